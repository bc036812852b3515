"""The records of a pass that several ranks ran: each has a part, the first writes them."""

import os
import re
from dataclasses import replace
from pathlib import Path

from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.rank_records import RankFacts
from llm_perf_opt.core.records import CleanTimings, MemoryPeaks
from llm_perf_opt.runners.measure.rank_meter import RankMeter
from llm_perf_opt.runners.session import Session

_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)
_INTERRUPTED = Missing("the run was interrupted before the ranks reported it")


def is_first(session: Session) -> bool:
    """Return whether this process writes the files of the pass."""
    return session.ranks is None or session.ranks.rank == 0


def trace_name(session: Session) -> str:
    """Return the name of this process's trace; that of the first rank is the trace of the pass."""
    return "trace.json.gz" if session.ranks is None or is_first(session) else f"rank{session.ranks.rank}.trace.json.gz"


def of_all_ranks(session: Session, meter: RankMeter, timings: CleanTimings, *, interrupted: bool) -> CleanTimings:
    """Return the times of this rank with the facts of all ranks, and the memory of all together."""
    group = session.ranks
    assert group is not None  # noqa: S101 - the caller checks it
    own = _facts(session, meter, timings)
    if interrupted:  # the others may have ended
        unknown = MemoryPeaks(_INTERRUPTED, _INTERRUPTED, _INTERRUPTED, _INTERRUPTED)
        return replace(timings, memory=unknown, ranks=(own,))
    ranks = tuple(group.gather_as(own, RankFacts, "the results of the ranks"))
    peaks = group.gather_as(timings.memory, MemoryPeaks, "the memory of the ranks")
    load = max(entry.load_s for entry in ranks)
    return replace(timings, ranks=ranks, memory=_together(ranks, peaks), load_s=load)


def _facts(session: Session, meter: RankMeter, timings: CleanTimings) -> RankFacts:
    group, host = session.ranks, timings.host
    assert group is not None  # noqa: S101 - the caller checks it
    unknown = Missing("the load of the host was not sampled")
    return RankFacts(
        rank=group.rank,
        pid=os.getpid(),
        device=str(session.device),
        backend=group.backend,
        threads=timings.threads,
        cpus=unknown if host is None else host.cpus,
        load_s=timings.load_s,
        request_ns=tuple(iteration.wall_ns for iteration in meter.own[len(timings.warmup) :][: len(timings.iterations)]),
        weight_bytes=getattr(session.runner, "held_bytes", None) or timings.model.weight_bytes,
        allocated_bytes=timings.memory.allocated_bytes,
        process_rss_bytes=timings.memory.process_rss_bytes,
        main_delay_ns=unknown if host is None else host.main_delay_ns,
        size=group.size,
    )


def _together(ranks: tuple[RankFacts, ...], peaks: list[MemoryPeaks]) -> MemoryPeaks:
    """Return the memory of the fullest device, and the host memory of all processes."""
    devices = dict.fromkeys(entry.device for entry in ranks)
    on_device = [[peak for entry, peak in zip(ranks, peaks, strict=True) if entry.device == device] for device in devices]
    return MemoryPeaks(
        allocated_bytes=_largest([_sum([peak.allocated_bytes for peak in found]) for found in on_device]),
        reserved_bytes=_largest([_sum([peak.reserved_bytes for peak in found]) for found in on_device]),
        device_used_bytes=_largest([peak.device_used_bytes for peak in peaks]),
        process_rss_bytes=_sum([*(peak.process_rss_bytes for peak in peaks), _launcher_bytes()]),
    )


def _sum(values: list[Maybe[int]]) -> Maybe[int]:
    missing = next((value for value in values if isinstance(value, Missing)), None)
    return missing or sum(value for value in values if not isinstance(value, Missing))


def _largest(values: list[Maybe[int]]) -> Maybe[int]:
    known = [value for value in values if not isinstance(value, Missing)]
    return max(known) if known else values[0]


def _launcher_bytes() -> int:
    """Return the peak memory of the process that started the ranks; 0 if the system does not tell."""
    try:
        found = _PEAK.search(Path(f"/proc/{os.getppid()}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0

"""Check whether a trace is usable. Each check reports what it found, with numbers, and whether sums would be wrong.

A profiler may stop half-way and still write a report that looks complete, so these checks run before anything is summed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from llm_perf_opt.core.secrets import hidden
from llm_perf_opt.core.units import duration
from llm_perf_opt.traces.events import MOST_NS, Bool, Int32, Int64, Trace, TraceProblem, WorkKind, different, different_pairs
from llm_perf_opt.traces.graph_capture import graph_captures, while_capturing
from llm_perf_opt.traces.projection import (
    NONE,
    Projection,
    graph_launches,
    kernel_launches,
    own_stage,
    packed_keys,
    project,
)
from llm_perf_opt.traces.silent_stages import CUT_SHORT, WORKING_STAGES, silent_stages

TOLERATED_SHARE = 0.01
"""Of launches without kernels. A few are normal where recording ends; more means that kernels were lost."""
MOST_DEVICES, MOST_PROCESSES, MOST_THREADS = 1024, 1024, 4096
"""The most that a trace may contain: far more than any machine has, and few enough to process each."""
MOST_NAMES, MOST_CHARACTERS = 100_000, 4_000_000
"""Distinct kernel names of a trace and their characters; a real run has some hundreds. More are not classified."""

_ORIGINAL = "Give the original trace of the profiler."


@dataclass(frozen=True)
class Expected:
    """What the caller knows about the recorded run."""

    gpu: bool = False
    """The program ran on a GPU."""
    ranges: tuple[str, ...] = ()
    """Ranges that must be in the trace; stages among them must contain work if the trace contains any."""
    command: str = ""
    """Text that only the command line of this run contains."""
    started_after_utc_ns: int | None = None
    started_before_utc_ns: int | None = None


def examined(trace: Trace, expected: Expected | None = None) -> Trace:
    """Return the trace with all problems found in it, so that `complete` is meaningful."""
    known = {problem.id for problem in trace.problems}
    fatal = {problem.id for problem in trace.problems if problem.fatal}
    found = [
        problem
        for problem in trace_problems(trace, expected)
        if problem.id not in known or (problem.fatal and problem.id not in fatal)  # a problem of the parser stays unless milder
    ]
    return replace(trace, problems=(*trace.problems, *found))


def trace_problems(
    trace: Trace, expected: Expected | None = None, projection: Projection | None = None
) -> tuple[TraceProblem, ...]:
    """Return the problems of a trace besides those that its parser reported."""
    beyond = tuple(_beyond_reason(trace))
    if beyond:
        return beyond
    expected = expected or Expected()
    projection = projection or project(trace)
    return (
        *_another_run(trace, expected),
        *_missing_ranges(trace, expected),
        *_durations(trace),
        *_no_kernels(trace, expected),
        *_launches_without_kernels(trace),
        *silent_stages(trace, projection, expected.ranges),
        *_captures(trace),
        *_calls_stop_early(trace),
        *_work_without_calls(trace, projection),
        *_clocks(trace, projection),
        *_overlaps(trace, projection),
        *_one_of_ranks(trace),
    )


def _beyond_reason(trace: Trace) -> Iterator[TraceProblem]:
    """Yield a problem if there are more devices, processes, threads or kernel names than any program has."""
    work = trace.work
    host = (trace.calls, trace.ranges, trace.operators)
    named = np.zeros(len(trace.names), np.bool_)
    named[work.name[work.name >= 0]] = True
    names = np.flatnonzero(named)
    if not within_reason(trace, names):
        size = sum(len(trace.name_of(name)) for name in names.tolist())
        fact = f"the kernels have {len(names):,} distinct names with {size:,} characters; no program has that many"
        yield TraceProblem("beyond_reason", fact, fatal=True, remedy=_ORIGINAL)
    counts = (
        ("devices", MOST_DEVICES, _distinct(MOST_DEVICES, work.device)),
        ("processes", MOST_PROCESSES, max(_distinct(MOST_PROCESSES, table.process) for table in (work, *host))),
        ("threads", MOST_THREADS, max(_distinct(MOST_THREADS, table.process, table.thread) for table in host)),
    )
    for what, table in (("device work", work), ("calls", trace.calls), ("ranges", trace.ranges), ("operators", trace.operators)):
        if abs(float((table.end_ns - table.start_ns).sum(dtype=np.float64))) >= MOST_NS:
            fact = f"the {what} of the trace last {MOST_NS / 3.15576e16:,.0f} years or more in total"
            yield TraceProblem("beyond_reason", fact, fatal=True, remedy=_ORIGINAL)
    for what, most, count in counts:
        if count > most:
            fact = f"the trace has {count:,} {what}; no program has more than {most:,}"
            yield TraceProblem("beyond_reason", fact, fatal=True, remedy=_ORIGINAL)


def _distinct(most: int, *columns: Int64 | Int32) -> int:
    """Return the number of distinct rows; 0 if at most `most` rows differ from the row before, which is cheap to find."""
    changes = np.zeros(max(len(columns[0]) - 1, 0), np.bool_)
    for column in columns:
        changes |= column[1:] != column[:-1]
    rows = np.append(0, np.flatnonzero(changes) + 1)
    if len(rows) <= most:
        return 0
    return len(different_pairs(*(column[rows].astype(np.int64) for column in (columns[0], columns[-1])))[0])


def _another_run(trace: Trace, expected: Expected) -> Iterator[TraceProblem]:
    command = trace.facts.get("command", "")
    if expected.command and command and hidden(expected.command) not in command:
        what = f"the trace is from another run: its command is `{command}`, not `{expected.command}`"
        yield TraceProblem("another_run", what, fatal=True, remedy="Give the report that belongs to this run.")
    started = trace.facts.get("started_utc_ns", "")
    if not started.lstrip("-").isdigit():
        return
    after, before = expected.started_after_utc_ns, expected.started_before_utc_ns
    if (after is not None and int(started) < after) or (before is not None and int(started) > before):
        late = after is None or int(started) >= after
        gap_s = (int(started) - (before or 0) if late else (after or 0) - int(started)) / 1e9
        what = f"the trace is from another run: it began {gap_s:,.1f} s {'after this one ended' if late else 'before this one'}"
        yield TraceProblem("another_run", what, fatal=True, remedy="Give the report that belongs to this run.")


def _missing_ranges(trace: Trace, expected: Expected) -> Iterator[TraceProblem]:
    present = {trace.names[index] for index in different(trace.ranges.name).tolist() if index >= 0}
    missing = [name for name in expected.ranges if name not in present]
    if missing:
        yield TraceProblem(
            "missing_ranges",
            f"ranges that the program sets are not in the trace: {', '.join(missing)}",
            fatal=True,
            remedy="nsys up to 2023.4 does not see nvtx 0.2.12 and later: pip install 'nvtx<0.2.12'. Check that NVTX is traced.",
        )


def _durations(trace: Trace) -> Iterator[TraceProblem]:
    for what, table in (("device events", trace.work), ("calls", trace.calls), ("ranges", trace.ranges)):
        backward = int(np.count_nonzero(table.end_ns < table.start_ns))
        if backward:
            fact = f"{backward:,} of {len(table):,} {what} end before they start"
            yield TraceProblem("negative_duration", fact, fatal=table is trace.work)


def _no_kernels(trace: Trace, expected: Expected) -> Iterator[TraceProblem]:
    if _kernels(trace).any():
        return
    launches = int(np.count_nonzero((kernel_launches(trace) & ~while_capturing(trace)) | graph_launches(trace)))
    if launches:
        yield TraceProblem("no_kernels", f"the trace has {launches:,} launches, but no kernel", fatal=True, remedy=CUT_SHORT)
    elif expected.gpu:
        yield TraceProblem(
            "no_kernels",
            "the program ran on a GPU, but the trace contains neither kernels nor launches",
            fatal=True,
            remedy="Trace CUDA (nsys: --trace=cuda,nvtx), and check that the recorded range includes the GPU work.",
        )


def _launches_without_kernels(trace: Trace) -> Iterator[TraceProblem]:
    """Check kernel launches and graph launches separately: the first start one kernel, the second any number."""
    kernels = _kernels(trace)
    if not kernels.any():
        return  # reported by _no_kernels
    call_key, work_key = packed_keys((trace.calls.process, trace.calls.correlation), (trace.work.process, trace.work.correlation))
    recorded = while_capturing(trace)
    for id, what, calls, ran in (
        ("launches_without_kernels", "kernel launches", kernel_launches(trace) & ~recorded, work_key[kernels]),
        ("graph_launches_without_kernels", "launches of CUDA graphs", graph_launches(trace), work_key),
    ):
        launched = np.sort(call_key[calls], kind="stable")  # nearly sorted: faster than the hashing of np.unique
        launched = launched[
            np.diff(launched, prepend=-1) != 0
        ]  # a runtime call and the driver call inside it share a correlation
        lost = len(launched) - int(np.isin(launched, ran).sum())
        if lost:
            fact = f"{lost:,} of {len(launched):,} {what} have no kernel in the trace"
            yield TraceProblem(id, fact, fatal=lost > TOLERATED_SHARE * len(launched), remedy=CUT_SHORT)


def _captures(trace: Trace) -> Iterator[TraceProblem]:
    """Note that the trace records the capture of graphs, whose launches rightly have no kernel."""
    captures = graph_captures(trace)
    if not captures:
        return
    nodes = sum(len(capture.nodes) for capture in captures)
    graphs = f"{len(captures):,} CUDA graphs" if len(captures) > 1 else "a CUDA graph"
    fact = (
        f"the trace records the capture of {graphs}: {nodes:,} captured calls have no kernel, because nothing runs until a replay"
    )
    remedy = "To attribute the kernels of a replay in another trace: llm-perf analyze REPLAY --modules-from THIS_TRACE."
    yield TraceProblem("graph_capture", fact, fatal=False, remedy=remedy)


def _calls_stop_early(trace: Trace) -> Iterator[TraceProblem]:
    """Check that calls were recorded up to the end of the stages, which end with a synchronization."""
    working = own_stage(trace, WORKING_STAGES) != NONE
    if not working.any() or not len(trace.calls):
        return
    first, last = int(trace.ranges.start_ns[working].min()), int(trace.ranges.end_ns[working].max())
    stopped = int(trace.calls.end_ns.max())
    if stopped - first < (last - first) / 2:
        fact = f"the last call was recorded {duration(stopped - first)} into stages that last {duration(last - first)}"
        yield TraceProblem("calls_stop_early", fact, fatal=False, remedy=CUT_SHORT)


def _work_without_calls(trace: Trace, projection: Projection) -> Iterator[TraceProblem]:
    orphans = int(np.count_nonzero(projection.call_of_work == NONE))
    if orphans:
        fact = (
            f"{orphans:,} of {len(trace.work):,} device events have no launch call in the trace and belong to no range or stage"
        )
        yield TraceProblem(
            "work_without_calls", fact, fatal=False, remedy="Trace the CUDA API too, and start recording before the launches."
        )


def _clocks(trace: Trace, projection: Projection) -> Iterator[TraceProblem]:
    joined = np.flatnonzero(projection.call_of_work != NONE)
    if not len(joined):
        return
    early = trace.calls.start_ns[projection.call_of_work[joined]] - trace.work.start_ns[joined]
    count = int(np.count_nonzero(early > 0))
    if count:
        most = duration(int(early.max()))
        fact = f"{count:,} device events start before their launch call, by up to {most}: the clocks disagree"
        yield TraceProblem("clock_skew", fact, fatal=False)


def _overlaps(trace: Trace, projection: Projection) -> Iterator[TraceProblem]:
    inner = np.flatnonzero(projection.parent != NONE)
    crossing = int(np.count_nonzero(trace.ranges.end_ns[inner] > trace.ranges.end_ns[projection.parent[inner]]))
    if crossing:
        fact = f"{crossing:,} ranges end after the range that they began in; each is assigned to the range where it began"
        yield TraceProblem("overlapping_ranges", fact, fatal=False)


def _one_of_ranks(trace: Trace) -> Iterator[TraceProblem]:
    """Note that a trace is from one of several ranks: its collectives wait for ranks that are not in it."""
    ranks, rank = (trace.facts.get(f"distributed_{key}", "") for key in ("world_size", "rank"))
    if ranks.isdecimal() and int(ranks) > 1 and len(ranks) < 7:
        what = (
            f"the trace is from {'rank ' + rank if rank.isdecimal() else 'one rank'} of {int(ranks):,}; its numbers are those of "
            "that rank"
        )
        remedy = "Collectives include waiting for the other ranks: give the traces of all ranks to llm-perf analyze."
        yield TraceProblem("one_rank", what, fatal=False, remedy=remedy)


def _kernels(trace: Trace) -> Bool:
    chosen: Bool = trace.work.kind == WorkKind.KERNEL
    return chosen


def within_reason(trace: Trace, names: Int64 | Int32) -> bool:
    """Return whether a program can have this many distinct kernel names."""
    if len(names) > MOST_NAMES:
        return False
    return sum(len(trace.name_of(name)) for name in names.tolist()) <= MOST_CHARACTERS

"""Find the problems of a torch trace."""

import re
from typing import Any

import numpy as np

from llm_perf_opt.traces.events import GPUS, DeviceWork, HostCalls, Int64, Trace, TraceProblem, different
from llm_perf_opt.traces.graph_capture import while_capturing
from llm_perf_opt.traces.health import TOLERATED_SHARE
from llm_perf_opt.traces.projection import graph_launches, kernel_launches

_LOSS = re.compile(r"dropped|overflow|exceeded max|terminating tracing|out of memory|failed to", re.IGNORECASE)
_PROFILE_SHORTER = "Profile fewer steps at a time: torch.profiler.schedule(active=1)."


def work_problems(trace: Trace) -> list[TraceProblem]:
    """Return problems of device work: launches and kernels that do not match, clock skew, duplicates."""
    return [*_unmatched(trace), *_skew(trace.work, trace.calls), *_twice(trace.work)]


def _unmatched(trace: Trace) -> list[TraceProblem]:
    work, calls = trace.work, trace.calls
    # Launches during the capture of a CUDA graph run nothing, so they need no kernel.
    launched = (kernel_launches(trace) & ~while_capturing(trace)) | graph_launches(trace)
    launches = different(calls.correlation[launched])  # a runtime call and the driver call inside it share a correlation
    if not len(work):
        if len(launches):
            what = f"the trace has {len(launches):,} kernel launches, but no kernel"
            return [TraceProblem("no_kernels", what, True, "Profile with ProfilerActivity.CUDA and without another profiler.")]
        if trace.facts.get(GPUS) == "0":
            return []  # there was nothing else to record
        what = "the trace has no device work: the run was on the CPU, or only the CPU was profiled"
        return [TraceProblem("no_device_work", what, False, "Profile with ProfilerActivity.CUDA to record GPU work.")]
    found = []
    lost = int((~np.isin(launches, work.correlation)).sum())
    if lost:
        what = f"{lost:,} of {len(launches):,} launches have no kernel"
        fatal = lost > TOLERATED_SHARE * len(launches)
        found.append(TraceProblem("launches_without_kernels", what, fatal, _PROFILE_SHORTER))
    orphans = int((~np.isin(work.correlation, calls.correlation)).sum())
    if orphans:
        what = f"{orphans:,} of {len(work):,} kernels, copies and memsets have no launch and belong to no stage"
        remedy = "Profile with ProfilerActivity.CPU too." if not len(calls) else ""
        found.append(TraceProblem("work_without_calls", what, False, remedy))
    return found


def launch_rows(work: DeviceWork, calls: HostCalls) -> Int64:
    """Return, per row of work, the row of the call that launched it, or -1. For one process only."""
    if not len(calls):
        return np.full(len(work), -1, np.int64)
    order = np.argsort(calls.correlation, kind="stable")
    ranked = calls.correlation[order]
    at = np.minimum(np.searchsorted(ranked, work.correlation), len(ranked) - 1)
    return np.where((ranked[at] == work.correlation) & (work.correlation != 0), order[at], -1)


def _skew(work: DeviceWork, calls: HostCalls) -> list[TraceProblem]:
    rows = launch_rows(work, calls)
    early = np.where(rows >= 0, calls.start_ns[rows] - work.start_ns, 0) if len(calls) else np.zeros(0, np.int64)
    count = int((early > 0).sum())
    if not count:
        return []
    what = f"{count:,} kernels begin before their launch, by up to {int(early.max()):,} ns: host and device clocks disagree"
    return [TraceProblem("clock_skew", what, False, "Device times are correct; delays between host and device are not.")]


def _twice(work: DeviceWork) -> list[TraceProblem]:
    """Return a problem if the same work is on the same stream at the same time twice: two traces in one file."""
    if len(work) < 2:
        return []
    same = (work.start_ns[1:] == work.start_ns[:-1]) & (work.end_ns[1:] == work.end_ns[:-1])
    if not same.any():
        return []
    fields = np.stack(
        [work.start_ns, work.end_ns, work.stream, work.device, work.name, work.correlation, work.graph_node], axis=1
    )
    twice = len(work) - len(np.unique(fields, axis=0))
    if not twice:
        return []
    what = f"{twice:,} of {len(work):,} device events are in the trace twice"
    return [TraceProblem("duplicate_events", what, True, "Give the trace of one rank, not several merged.")]


def process_problem(process: Int64) -> list[TraceProblem]:
    """Return a problem if there are calls of several processes."""
    if not len(process) or (process == process[0]).all():
        return []
    processes = len(different(process))
    what = f"the trace has calls of {processes} processes; device work is assigned to the process whose call has its correlation"
    return [TraceProblem("several_processes", what, False, "Give the trace of one process.")]


def shape_problem(trace: Trace) -> list[TraceProblem]:
    """Return a problem if no collective has a size, which comes from the shapes of its inputs; nothing else needs shapes."""
    collectives = trace.collectives
    if not len(collectives) or (collectives.in_bytes >= 0).any() or (trace.operators.shapes >= 0).any():
        return []
    what = "the operators have no shapes, so the sizes of the collectives are unknown"
    return [TraceProblem("missing_shapes", what, False, "Profile with record_shapes=True.")]


def notices(after: dict[str, Any]) -> list[TraceProblem]:
    """Return a problem if the profiler states after the events that it lost records."""
    lists = [after.get(level) for level in ("WARNING", "ERROR")]
    losses = [str(line) for lines in lists if isinstance(lines, list) for line in lines if _LOSS.search(str(line))]
    if not losses:
        return []
    what = f"the profiler reports that it lost records: {'; '.join(losses)[:300]}"
    return [TraceProblem("dropped_records", what, True, _PROFILE_SHORTER)]


def count_problems(negative_work: int, negative_host: int, unplaced: int) -> list[TraceProblem]:
    """Return problems for events with impossible times."""
    found = []
    if negative_work:
        what = f"{negative_work:,} kernels or copies end before they begin"
        found.append(TraceProblem("negative_duration", what, True, "The profiler's clock failed; profile again."))
    elif negative_host:
        what = f"{negative_host:,} host events end before they begin; their duration is taken as 0"
        found.append(TraceProblem("negative_duration", what, False, ""))
    if unplaced:
        found.append(TraceProblem("no_time", f"{unplaced:,} kernels or copies have no time and are left out", True, ""))
    return found

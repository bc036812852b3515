"""What a stage asks of the host beside launches: waiting for the device, allocating device memory, copies across the bus."""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llm_perf_opt.analysis.trace.idle import synchronizing_calls
from llm_perf_opt.analysis.trace.intervals import covered_of_group, union_blocks
from llm_perf_opt.analysis.trace.row_numbers import distinct, exact_sum
from llm_perf_opt.analysis.trace.stage_instances import TraceStages
from llm_perf_opt.traces.events import Int32, Int64, Trace, WorkKind, different_pairs
from llm_perf_opt.traces.nesting import lanes_of
from llm_perf_opt.traces.projection import NONE, launching_calls

ALLOCATING = re.compile(
    r"(cuda|hip)(Malloc|Free|HostAlloc|MallocHost|FreeHost)(?!.*Async)\w*|cuMem(Alloc|Free|Create|Map)(?!.*Async)\w*"
)
"""Calls that ask the driver for memory or give it back: they hold the host up, and some wait for the device."""
_TO_DEVICE = re.compile(r"HtoD|Host-to-Device|HostToDevice")
_TO_HOST = re.compile(r"DtoH|Device-to-Host|DeviceToHost")
_ITEM = re.compile(r"aten::(item|_local_scalar_dense|is_nonzero)")


@dataclass(frozen=True)
class HostCallCounts:
    """Of all instances of a stage together, on the threads that launch its work; times are below the profiler."""

    syncs: int
    sync_ns: int
    items: int
    """Values read to the host one by one (`.item()`, `if tensor:`); only a torch trace tells."""
    allocations: int
    allocation_ns: int
    to_device: int
    to_host: int
    copied_bytes: int


def host_calls(trace: Trace, stages: TraceStages, stage: str) -> HostCallCounts:
    """Calls that begin inside the stage's labels on the thread that launches its work, and copies that its launches started.

    What other threads wait for or allocate meanwhile does not hold the launches up, and is left out.
    """
    windows = _launching_windows(trace, stages, stage)
    calls, operators = trace.calls, trace.operators
    waits, asks, items = (
        windows.holding(rows.start_ns, rows.process, rows.thread, np.flatnonzero(chosen))
        for rows, chosen in (
            (calls, synchronizing_calls(trace)),
            (calls, matching(trace, calls.name, ALLOCATING)),
            (operators, matching(trace, operators.name, _ITEM)),
        )
    )
    copies = (stages.of_stage(stage) != NONE) & (trace.work.kind == WorkKind.MEMCPY)
    to_device = copies & matching(trace, trace.work.name, _TO_DEVICE)
    to_host = copies & matching(trace, trace.work.name, _TO_HOST)
    known = (to_device | to_host) & (trace.work.size_bytes > 0)
    return HostCallCounts(
        syncs=len(waits),
        sync_ns=int((calls.end_ns - calls.start_ns)[waits].sum()),
        items=len(items),
        allocations=len(asks),
        allocation_ns=int((calls.end_ns - calls.start_ns)[asks].sum()),
        to_device=int(to_device.sum()),
        to_host=int(to_host.sum()),
        copied_bytes=exact_sum(trace.work.size_bytes[known]),
    )


@dataclass(frozen=True)
class _Windows:
    """When a stage was open on the threads of its labels; and when it was open without one, on those that launched its work."""

    process: Int64
    thread: Int64
    start_ns: Int64
    end_ns: Int64
    launching: tuple[Int64, Int64]
    """Processes and threads."""
    bare_start_ns: Int64
    bare_end_ns: Int64

    def holding(self, moment_ns: Int64, process: Int64, thread: Int64, rows: Int64) -> Int64:
        """Those of the rows that begin inside a window of their own thread."""
        lane, launching, mine = lanes_of((self.process, self.thread), self.launching, (process[rows], thread[rows]))
        _, inside = covered_of_group(union_blocks(self.start_ns, self.end_ns, lane), moment_ns[rows], mine)
        bare = union_blocks(self.bare_start_ns, self.bare_end_ns)
        _, inside_bare = covered_of_group(bare, moment_ns[rows], np.zeros(len(rows), np.int64))
        return np.asarray(rows[inside | (inside_bare & np.isin(mine, launching))])


def _launching_windows(trace: Trace, stages: TraceStages, stage: str) -> _Windows:
    """The stage's labels on their threads; instances without a label, on every thread that launched work of the stage."""
    rows = stages.rows_of(stage)
    instances, ranges = stages.instances.rows(rows), trace.ranges
    labeled = np.flatnonzero(instances.range != NONE)
    label = instances.range[labeled]
    bare = np.flatnonzero(instances.range == NONE)
    call = np.empty(0, np.int64)
    if len(bare):
        call = distinct(launching_calls(trace)[stages.of_stage(stage) != NONE], len(trace.calls))
    return _Windows(
        process=ranges.process[label],
        thread=ranges.thread[label],
        start_ns=instances.start_ns[labeled],
        end_ns=instances.end_ns[labeled],
        launching=different_pairs(trace.calls.process[call], trace.calls.thread[call]),
        bare_start_ns=instances.start_ns[bare],
        bare_end_ns=instances.end_ns[bare],
    )


def matching(trace: Trace, name: Int32, pattern: re.Pattern[str]) -> npt.NDArray[np.bool_]:
    """Per row: whether its name begins so, or holds it. Each distinct name is looked at once."""
    matches = np.zeros(len(trace.names) + 1, np.bool_)  # the last entry answers NO_NAME
    for index in distinct(name.astype(np.int64), len(trace.names)):
        matches[index] = pattern.search(trace.name_of(int(index))) is not None
    found: npt.NDArray[np.bool_] = matches[name]
    return found

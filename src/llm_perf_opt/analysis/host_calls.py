"""What a stage asks of the host beside launches: waiting for the device, allocating device memory, copies across the bus."""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llm_perf_opt.analysis.idle import synchronising_calls
from llm_perf_opt.analysis.projection import NONE
from llm_perf_opt.analysis.row_numbers import distinct
from llm_perf_opt.analysis.stage_instances import TraceStages
from llm_perf_opt.events import Int32, Int64, Trace, WorkKind

ALLOCATING = re.compile(
    r"(cuda|hip)(Malloc|Free|HostAlloc|MallocHost|FreeHost)(?!.*Async)\w*|cuMem(Alloc|Free|Create|Map)(?!.*Async)\w*"
)
"""Calls that ask the driver for memory or give it back: they hold the host up, and some wait for the device."""
_TO_DEVICE = re.compile(r"HtoD|Host-to-Device|HostToDevice")
_TO_HOST = re.compile(r"DtoH|Device-to-Host|DeviceToHost")
_ITEM = re.compile(r"aten::(item|_local_scalar_dense|is_nonzero)")


@dataclass(frozen=True)
class HostCallCounts:
    """Of all instances of a stage together; times are below the profiler."""

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
    """Calls that begin inside the stage's labels, and copies that its launches started."""
    rows = stages.rows_of(stage)
    start, end = stages.instances.start_ns[rows], stages.instances.end_ns[rows]
    calls = trace.calls
    inside = _inside(calls.start_ns, start, end)
    waits = inside & synchronising_calls(trace)
    asks = inside & _matching(trace, calls.name, ALLOCATING)
    items = _matching(trace, trace.operators.name, _ITEM)
    items[items] = _inside(trace.operators.start_ns[items], start, end)
    copies = (stages.of_stage(stage) != NONE) & (trace.work.kind == WorkKind.MEMCPY)
    to_device = copies & _matching(trace, trace.work.name, _TO_DEVICE)
    to_host = copies & _matching(trace, trace.work.name, _TO_HOST)
    known = (to_device | to_host) & (trace.work.size_bytes > 0)
    return HostCallCounts(
        syncs=int(waits.sum()),
        sync_ns=int((calls.end_ns - calls.start_ns)[waits].sum()),
        items=int(items.sum()),
        allocations=int(asks.sum()),
        allocation_ns=int((calls.end_ns - calls.start_ns)[asks].sum()),
        to_device=int(to_device.sum()),
        to_host=int(to_host.sum()),
        copied_bytes=int(trace.work.size_bytes[known].sum()),
    )


def _inside(moments: Int64, start: Int64, end: Int64) -> npt.NDArray[np.bool_]:
    """Per moment: whether an instance that began last before it had not ended."""
    if not len(start):
        return np.zeros(len(moments), np.bool_)
    order = np.argsort(start, kind="stable")
    last = np.searchsorted(start[order], moments, side="right") - 1
    found: npt.NDArray[np.bool_] = (last >= 0) & (moments < end[order][np.maximum(last, 0)])
    return found


def _matching(trace: Trace, name: Int32, pattern: re.Pattern[str]) -> npt.NDArray[np.bool_]:
    """Per row: whether its name begins so, or holds it. Each distinct name is looked at once."""
    matches = np.zeros(len(trace.names) + 1, np.bool_)  # the last entry answers NO_NAME
    for index in distinct(name.astype(np.int64), len(trace.names)):
        matches[index] = pattern.search(trace.name_of(int(index))) is not None
    found: npt.NDArray[np.bool_] = matches[name]
    return found

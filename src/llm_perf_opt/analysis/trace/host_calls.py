"""Host calls of a stage other than launches: synchronization, allocation of device memory, copies over the bus; and fusion."""

import re
from dataclasses import dataclass

import numpy as np

from llm_perf_opt.analysis.kernels.classes import CLASSES, KernelClass, class_of_work
from llm_perf_opt.analysis.trace.idle import synchronizing_calls
from llm_perf_opt.analysis.trace.intervals import covered_of_group, distinct, exact_sum, matching, union_blocks
from llm_perf_opt.analysis.trace.stage_instances import TraceStages
from llm_perf_opt.traces.events import Int64, Trace, UInt8, WorkKind, different_pairs
from llm_perf_opt.traces.nesting import lanes_of
from llm_perf_opt.traces.projection import NONE, Bool, launching_calls

ALLOCATING = re.compile(
    r"(cuda|hip)(Malloc|Free|HostAlloc|MallocHost|FreeHost)(?!.*Async)\w*|cuMem(Alloc|Free|Create|Map)(?!.*Async)\w*"
)
"""Calls that allocate or free memory in the driver: they block the host, and some wait for the device."""
_TO_DEVICE = re.compile(r"HtoD|Host-to-Device|HostToDevice")
_TO_HOST = re.compile(r"DtoH|Device-to-Host|DeviceToHost")
_ITEM = re.compile(r"aten::(item|_local_scalar_dense|is_nonzero)")


@dataclass(frozen=True)
class HostCallCounts:
    """Counts over all instances of a stage, on the threads that launch its work; times are under the profiler."""

    syncs: int
    sync_ns: int
    items: int
    """Values read to the host one by one (`.item()`, `if tensor:`); only torch traces have them."""
    allocations: int
    allocation_ns: int
    to_device: int
    to_host: int
    copied_bytes: int


def host_calls(trace: Trace, stages: TraceStages, stage: str) -> HostCallCounts:
    """Return the calls inside the stage's labels on the thread that launches its work, and the copies its launches started.

    Calls of other threads are not counted, because they do not delay the launches.
    """
    windows = _launching_windows(trace, stages, stage)
    calls, operators = trace.calls, trace.operators
    waits, asks, items = (
        windows.holding(rows.start_ns, rows.process, rows.thread, np.flatnonzero(chosen))
        for rows, chosen in (
            (calls, synchronizing_calls(trace)),
            (calls, matching(trace, calls.name, ALLOCATING.search)),
            (operators, matching(trace, operators.name, _ITEM.search)),
        )
    )
    copies = (stages.of_stage(stage) != NONE) & (trace.work.kind == WorkKind.MEMCPY)
    to_device = copies & matching(trace, trace.work.name, _TO_DEVICE.search)
    to_host = copies & matching(trace, trace.work.name, _TO_HOST.search)
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
    """When a stage was open: on the threads of its labels, or without a label, on the threads that launched its work."""

    process: Int64
    thread: Int64
    start_ns: Int64
    end_ns: Int64
    launching: tuple[Int64, Int64]
    """Processes and threads."""
    bare_start_ns: Int64
    bare_end_ns: Int64

    def holding(self, moment_ns: Int64, process: Int64, thread: Int64, rows: Int64) -> Int64:
        """Return the rows that begin inside a window of their own thread."""
        lane, launching, mine = lanes_of((self.process, self.thread), self.launching, (process[rows], thread[rows]))
        _, inside = covered_of_group(union_blocks(self.start_ns, self.end_ns, lane), moment_ns[rows], mine)
        bare = union_blocks(self.bare_start_ns, self.bare_end_ns)
        _, inside_bare = covered_of_group(bare, moment_ns[rows], np.zeros(len(rows), np.int64))
        return np.asarray(rows[inside | (inside_bare & np.isin(mine, launching))])


def _launching_windows(trace: Trace, stages: TraceStages, stage: str) -> _Windows:
    """Return the windows of a stage; those without a label are on every thread that launched work of the stage."""
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


# --- fusion -----------------------------------------------------------------------------------------------------------


FUSABLE = (KernelClass.ELEMENTWISE, KernelClass.NORM, KernelClass.REDUCTION, KernelClass.COPY)
_PRODUCTS = (KernelClass.GEMM, KernelClass.GEMV, KernelClass.ATTENTION, KernelClass.COLLECTIVE)
_TOP_K = re.compile(r"gatherTopK|radixFindKthValues|computeBlockwiseWithinKCounts", re.IGNORECASE)
_SMALL_SORT = re.compile(r"bitonicSort", re.IGNORECASE)
"""Sorts of at most a few thousand values in one block."""
_GROUPED = re.compile(r"group(ed)?_?(mm|gemm)|GroupProblemShape", re.IGNORECASE)
"""Products of all experts at once."""
_WITHIN_DEVICE = re.compile(r"DtoD|Device-to-Device|DeviceToDevice")


@dataclass(frozen=True)
class Fusion:
    """The kernels of a stage before and after fusion, summed over all its units."""

    kept_kernels: int
    kept_ns: int
    fusable_kernels: int
    fusable_ns: int
    runs: int
    """Fewest kernels that the fusable ones become."""
    sizes: int
    """Most kernels that they become."""
    least_ns: int
    most_ns: int

    @property
    def fused_ns(self) -> float:
        """Estimated time of the fusable kernels after fusion."""
        return (self.least_ns + self.most_ns) / 2

    @property
    def kernels(self) -> float:
        """Estimated number of all kernels after fusion."""
        return self.kept_kernels + (self.runs + self.sizes) / 2

    @property
    def saved_ns(self) -> float:
        """Kernel time that fusion saves."""
        return self.fusable_ns - self.fused_ns


def within_device(trace: Trace) -> Bool:
    """Return per row of device work whether it is a copy within the device, which a compiler fuses into its kernels."""
    found: Bool = (trace.work.kind == WorkKind.MEMCPY) & matching(trace, trace.work.name, _WITHIN_DEVICE.search)
    return found


def fusion_of(trace: Trace, group: Int64, class_of: UInt8 | None = None) -> Fusion:
    """Return the fusion of a stage. `group` is the step or instance per row of device work, -1 for other work; kernels of
    different groups do not fuse."""
    work = trace.work
    rows = np.flatnonzero((group != NONE) & ((work.kind == WorkKind.KERNEL) | within_device(trace)))
    rows = rows[np.lexsort((work.start_ns[rows], group[rows]))]
    classes = (class_of_work(trace) if class_of is None else class_of)[rows]
    first = np.append(True, group[rows][1:] != group[rows][:-1])[: len(rows)]
    sorts = _compiled_sorts(trace, rows, first)
    fusable = _is_one_of(classes, FUSABLE) | sorts
    duration = (work.end_ns - work.start_ns)[rows]
    kept = int((~fusable).sum()), int(duration[~fusable].sum())
    if not fusable.any():
        return Fusion(*kept, 0, 0, 0, 0, 0, 0)
    run = np.cumsum(first | np.append(True, fusable[1:] != fusable[:-1]))[fusable]
    routing = _after_routing(trace, rows, classes, fusable, first)[fusable]
    ends_a_loop = ((classes == CLASSES.index(KernelClass.REDUCTION)) | sorts)[fusable]
    loop = np.where(routing, _loops(run, ends_a_loop), (work.grid * work.block)[rows][fusable])
    times = duration[fusable]
    order = np.lexsort((loop, run))
    run, loop, times = run[order], loop[order], times[order]
    begins = np.append(True, run[1:] != run[:-1])
    looped = begins | np.append(True, loop[1:] != loop[:-1])
    return Fusion(
        *kept,
        fusable_kernels=len(times),
        fusable_ns=int(times.sum()),
        runs=int(begins.sum()),
        sizes=int(looped.sum()),
        least_ns=int(np.maximum.reduceat(times, np.flatnonzero(begins)).sum()),
        most_ns=int(np.maximum.reduceat(times, np.flatnonzero(looped)).sum()),
    )


def _is_one_of(classes: UInt8, kinds: tuple[KernelClass, ...]) -> Bool:
    return np.isin(classes, [CLASSES.index(kind) for kind in kinds])


def _compiled_sorts(trace: Trace, rows: Int64, first: Bool) -> Bool:
    """Return which kernels are sorts that a compiler generates: small ones that do not directly follow a top-k."""
    name = trace.work.name[rows]
    after_top_k = np.append(False, matching(trace, name, _TOP_K.search)[:-1])[: len(rows)] & ~first
    found: Bool = matching(trace, name, _SMALL_SORT.search) & ~after_top_k
    return found


def _after_routing(trace: Trace, rows: Int64, classes: UInt8, fusable: Bool, first: Bool) -> Bool:
    """Return which kernels follow expert routing: after a grouped product, or a top-k whose next product is grouped."""
    name = trace.work.name[rows]
    grouped, top_k = matching(trace, name, _GROUPED.search), matching(trace, name, _TOP_K.search)
    if not grouped.any():
        return np.zeros(len(rows), np.bool_)
    product = ~fusable & (grouped | _is_one_of(classes, _PRODUCTS))
    step = np.cumsum(first)
    places = np.arange(len(rows))
    next_product = np.minimum.accumulate(np.where(product, places, len(rows))[::-1])[::-1]
    leads = np.append(grouped, False)[next_product] & (np.append(step, -1)[next_product] == step)
    opens = product | (top_k & leads)  # a top-k of the sampler leads to no product and is ignored
    last = np.maximum.accumulate(np.where(opens, places, -1))
    found: Bool = (last >= 0) & (step[last] == step) & (grouped | top_k)[last]
    return found


def _loops(run: Int64, ends_a_loop: Bool) -> Int64:
    """Return the loop of each kernel in the worst case: a number per sequence that ends one, -1 for the rest of a run."""
    begins = ends_a_loop & np.append(True, (run[1:] != run[:-1]) | ~ends_a_loop[:-1])
    return np.where(ends_a_loop, np.cumsum(begins), -1)

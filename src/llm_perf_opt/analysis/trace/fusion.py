"""What a compiler that fuses would leave of a stage's kernels, as bounds.

Matrix products, attention, sampling, routing and collectives stay as they are. Between two of them stand runs of kernels that
only move or combine values (elementwise, norm, reduction, copy; copies within the device, too). Inductor makes few kernels of
such a run:

- at best **one**, which takes as long as the longest of them: it reads what they read once, and writes what they leave once;
- at worst **one for each size of launch** in the run, each as long as the longest of that size: values of different shape are
  computed in different loops.

The truth lies between; the middle of the two is the estimate.

Expert routing is told otherwise: from the top-k that chooses experts to what follows their grouped products. What stands there
computes indices, gathers rows and adds up the experts' results. Such values are computed where they are used, whatever their
size, and each run leaves one value for the next product. Only what must see all values at once (a sum, a scan, a sort) ends a
loop: at worst a run is **one kernel for each of those and one for the rest**. A sort of a few values is compiled, too; a top-k
is not, nor the sort that belongs to it, nor a histogram.
"""

import re
from dataclasses import dataclass

import numpy as np

from llm_perf_opt.analysis.kernels.classes import CLASSES, KernelClass, class_of_work
from llm_perf_opt.analysis.trace.host_calls import matching
from llm_perf_opt.traces.events import Int64, Trace, UInt8, WorkKind
from llm_perf_opt.traces.projection import NONE, Bool

FUSABLE = (KernelClass.ELEMENTWISE, KernelClass.NORM, KernelClass.REDUCTION, KernelClass.COPY)
_PRODUCTS = (KernelClass.GEMM, KernelClass.GEMV, KernelClass.ATTENTION, KernelClass.COLLECTIVE)
_TOP_K = re.compile(r"gatherTopK|radixFindKthValues|computeBlockwiseWithinKCounts", re.IGNORECASE)
_SMALL_SORT = re.compile(r"bitonicSort", re.IGNORECASE)
"""Sorts in one block, of at most a few thousand values."""
_GROUPED = re.compile(r"group(ed)?_?(mm|gemm)|GroupProblemShape", re.IGNORECASE)
"""Products of all experts at once."""
_WITHIN_DEVICE = re.compile(r"DtoD|Device-to-Device|DeviceToDevice")


@dataclass(frozen=True)
class Fusion:
    """The kernels of a stage now, and after fusing. Sums over all its units."""

    kept_kernels: int
    kept_ns: int
    fusable_kernels: int
    fusable_ns: int
    runs: int
    """Kernels that the fusable ones become at best."""
    sizes: int
    """Kernels that they become at worst."""
    least_ns: int
    most_ns: int

    @property
    def fused_ns(self) -> float:
        """The estimate of what the fusable kernels would take."""
        return (self.least_ns + self.most_ns) / 2

    @property
    def kernels(self) -> float:
        """The estimate of all kernels after fusing."""
        return self.kept_kernels + (self.runs + self.sizes) / 2

    @property
    def saved_ns(self) -> float:
        """Kernel time that fusing saves."""
        return self.fusable_ns - self.fused_ns


def within_device(trace: Trace) -> Bool:
    """Per row of device work: whether it is a copy from the device to itself, which a compiler makes part of its kernels."""
    found: Bool = (trace.work.kind == WorkKind.MEMCPY) & matching(trace, trace.work.name, _WITHIN_DEVICE)
    return found


def fusion_of(trace: Trace, group: Int64, class_of: UInt8 | None = None) -> Fusion:
    """`group` tells per row of device work its step or instance, -1 for work of other stages; nothing fuses across groups."""
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
    """Sorts that a compiler makes kernels of: small ones that are no part of a top-k, whose own sort follows it at once."""
    name = trace.work.name[rows]
    after_top_k = np.append(False, matching(trace, name, _TOP_K)[:-1])[: len(rows)] & ~first
    found: Bool = matching(trace, name, _SMALL_SORT) & ~after_top_k
    return found


def _after_routing(trace: Trace, rows: Int64, classes: UInt8, fusable: Bool, first: Bool) -> Bool:
    """Whether the last kernel before that says so is a grouped product, or a top-k whose next product is a grouped one."""
    name = trace.work.name[rows]
    grouped, top_k = matching(trace, name, _GROUPED), matching(trace, name, _TOP_K)
    if not grouped.any():
        return np.zeros(len(rows), np.bool_)
    product = ~fusable & (grouped | _is_one_of(classes, _PRODUCTS))
    step = np.cumsum(first)
    places = np.arange(len(rows))
    next_product = np.minimum.accumulate(np.where(product, places, len(rows))[::-1])[::-1]
    leads = np.append(grouped, False)[next_product] & (np.append(step, -1)[next_product] == step)
    opens = product | (top_k & leads)  # a top-k of the sampler leads to no product, and changes nothing
    last = np.maximum.accumulate(np.where(opens, places, -1))
    said: Bool = (last >= 0) & (step[last] == step) & (grouped | top_k)[last]
    return said


def _loops(run: Int64, ends_a_loop: Bool) -> Int64:
    """Per kernel the loop that it is computed in at worst: a number for each stretch that ends one, -1 for the rest of a run."""
    begins = ends_a_loop & np.append(True, (run[1:] != run[:-1]) | ~ends_a_loop[:-1])
    return np.where(ends_a_loop, np.cumsum(begins), -1)

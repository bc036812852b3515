"""What a compiler that fuses would leave of a stage's kernels, as bounds.

Matrix products, attention, sampling, routing and collectives stay as they are. Between two of them stand runs of kernels that
only move or combine values (elementwise, norm, reduction, copy). Inductor makes few kernels of such a run:

- at best **one**, which takes as long as the longest of them: it reads what they read once, and writes what they leave once;
- at worst **one for each size of launch** in the run, each as long as the longest of that size: values of different shape are
  computed in different loops.

The truth lies between; the middle of the two is the estimate.
"""

from dataclasses import dataclass

import numpy as np

from llm_perf_opt.analysis.kernels.classes import CLASSES, KernelClass, class_of_work
from llm_perf_opt.analysis.trace.projection import NONE
from llm_perf_opt.events import Int64, Trace, UInt8, WorkKind

FUSABLE = (KernelClass.ELEMENTWISE, KernelClass.NORM, KernelClass.REDUCTION, KernelClass.COPY)


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


def fusion_of(trace: Trace, group: Int64, class_of: UInt8 | None = None) -> Fusion:
    """`group` tells per row of device work its step or instance, -1 for work of other stages; nothing fuses across groups."""
    work = trace.work
    rows = np.flatnonzero((group != NONE) & (work.kind == WorkKind.KERNEL))
    rows = rows[np.lexsort((work.start_ns[rows], group[rows]))]
    classes = class_of_work(trace) if class_of is None else class_of
    fusable = np.isin(classes[rows], [CLASSES.index(kind) for kind in FUSABLE])
    duration = (work.end_ns - work.start_ns)[rows]
    kept = int((~fusable).sum()), int(duration[~fusable].sum())
    if not fusable.any():
        return Fusion(*kept, 0, 0, 0, 0, 0, 0)
    edge = np.append(True, (group[rows][1:] != group[rows][:-1]) | (fusable[1:] != fusable[:-1]))
    run = np.cumsum(edge)[fusable]
    size = (work.grid * work.block)[rows][fusable]
    times = duration[fusable]
    order = np.lexsort((size, run))
    run, size, times = run[order], size[order], times[order]
    begins = np.append(True, run[1:] != run[:-1])
    sized = begins | np.append(True, size[1:] != size[:-1])
    return Fusion(
        *kept,
        fusable_kernels=len(times),
        fusable_ns=int(times.sum()),
        runs=int(begins.sum()),
        sizes=int(sized.sum()),
        least_ns=int(np.maximum.reduceat(times, np.flatnonzero(begins)).sum()),
        most_ns=int(np.maximum.reduceat(times, np.flatnonzero(sized)).sum()),
    )

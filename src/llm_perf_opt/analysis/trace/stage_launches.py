"""The kernel launches of a stage in the order of the calls, and kernel totals by name."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llm_perf_opt.analysis.kernels.classes import KernelClass, classify
from llm_perf_opt.analysis.kernels.names import function_name
from llm_perf_opt.analysis.kernels.selection import Launch
from llm_perf_opt.analysis.trace.intervals import sums
from llm_perf_opt.analysis.trace.stage_instances import TraceStages
from llm_perf_opt.core.stages import DOMAIN, Stage
from llm_perf_opt.traces.events import Int64, Trace, WorkKind, different
from llm_perf_opt.traces.projection import NONE, Bool, Projection, nearest_marked, step_of_work, through

ANY_DOMAIN = "*"
"""As in Nsight Systems."""


def stage_launches(trace: Trace, projection: Projection, stage: Stage) -> list[Launch]:
    """Return every kernel launched inside a range of this stage; `step` is the index of the stage's instance."""
    return _launches(trace, projection, step_of_work(trace, projection, stage))


def substage_launches(trace: Trace, projection: Projection, stage: Stage, name: str) -> list[Launch]:
    """Return the kernels of `stage_launches` that were launched inside the sub-stage `name`."""
    domains = np.array([text == DOMAIN for text in trace.names] + [True])  # labels of torch.profiler have none
    marked = nearest_marked(projection.parent, _named(trace, name) & domains[trace.ranges.domain])
    inside = through(projection.range_of_work, marked) != NONE
    return _launches(trace, projection, np.where(inside, step_of_work(trace, projection, stage), NONE))


def kernels_per_instance(trace: Trace, projection: Projection, stage: Stage) -> float | None:
    """Return the mean number of kernels over the ranges of this stage that launched any; None if none did."""
    instance = step_of_work(trace, projection, stage)
    mine = instance[(instance != NONE) & (trace.work.kind == WorkKind.KERNEL)]
    return len(mine) / len(different(mine)) if len(mine) else None


def range_launches(trace: Trace, projection: Projection, name: str, domain: str) -> list[Launch]:
    """Return every kernel launched inside a range of this name; an empty domain is the default one, `*` any."""
    domains = np.array([domain in (ANY_DOMAIN, text) for text in trace.names] + [domain in ("", ANY_DOMAIN)])
    marked = nearest_marked(projection.parent, _named(trace, name) & domains[trace.ranges.domain])
    return _launches(trace, projection, through(projection.range_of_work, marked))


def domains_of(trace: Trace, name: str) -> set[str]:
    """Return the domains that have a range of this name; "" is the default one."""
    return {trace.name_of(int(index)) if index >= 0 else "" for index in different(trace.ranges.domain[_named(trace, name)])}


def _named(trace: Trace, name: str) -> npt.NDArray[np.bool_]:
    return np.array([text == name for text in trace.names] + [False])[trace.ranges.name]


def instance_kernels(trace: Trace, stages: TraceStages, stage: str) -> list[Int64]:
    """Return the kernels of each instance of a stage that has any, sorted by start."""
    work, of = trace.work, stages.of_stage(stage)
    rows = np.flatnonzero((of != NONE) & (work.kind == WorkKind.KERNEL))
    rows = rows[np.lexsort((work.start_ns[rows], of[rows]))]
    cuts = np.flatnonzero(np.diff(of[rows])) + 1
    return [part for part in np.split(rows, cuts) if len(part)]


def all_launches(trace: Trace, projection: Projection) -> list[Launch]:
    """Return every kernel whose launch is known, as one step."""
    return _launches(trace, projection, np.where(projection.call_of_work != NONE, 0, NONE))


def _launches(trace: Trace, projection: Projection, instance: Int64) -> list[Launch]:
    work = trace.work
    rows = np.flatnonzero((instance != NONE) & (work.kind == WorkKind.KERNEL))
    call_start = trace.calls.start_ns[projection.call_of_work[rows]]
    rows = rows[np.lexsort((work.start_ns[rows], call_start))]
    step = np.unique(instance[rows], return_inverse=True)[1].reshape(-1)  # ranges are sorted by start
    functions = {int(index): function_name(trace.name_of(int(index))) for index in different(work.name[rows])}
    names, durations = work.name[rows].tolist(), (work.end_ns[rows] - work.start_ns[rows]).tolist()
    grids, blocks, devices = work.grid[rows].tolist(), work.block[rows].tolist(), work.device[rows].tolist()
    return [
        Launch(number, functions[name], trace.name_of(name), grid, block, duration, device)
        for number, name, grid, block, duration, device in zip(
            step.tolist(), names, grids, blocks, durations, devices, strict=True
        )
    ]


# --- kernel summary ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelTotal:
    """All launches of one kernel."""

    name: str
    kind: KernelClass
    calls: int
    total_ns: int
    mean_ns: float
    share: float
    """Share of the summed kernel time of the stage or the trace."""


def kernels_by_time(
    trace: Trace, stages: TraceStages | None = None, stage: str | None = None, only: Bool | None = None
) -> tuple[KernelTotal, ...]:
    """Return kernels by summed time, longest first; with `stage`, those that its launches started, with `only`, those rows."""
    chosen = trace.work.kind == WorkKind.KERNEL
    if stage is not None:
        if stages is None:
            raise ValueError("a stage's kernels need the trace's stages")
        chosen &= stages.of_stage(stage) != NONE
    if only is not None:
        chosen &= only
    rows = np.flatnonzero(chosen)
    duration = (trace.work.end_ns - trace.work.start_ns)[rows]
    whole = int(duration.sum())
    # two indices may have the same name, so kernels are combined by name
    indices, number = np.unique(trace.work.name[rows], return_inverse=True)
    calls = np.bincount(number.reshape(-1), minlength=len(indices))
    total = sums(number.reshape(-1), duration, len(indices))
    by_name: dict[str, tuple[int, int]] = {}
    for index, count, time in zip(indices.tolist(), calls.tolist(), total.tolist(), strict=True):
        name = trace.name_of(index)
        known = by_name.get(name, (0, 0))
        by_name[name] = (known[0] + count, known[1] + time)
    found = [
        KernelTotal(name, classify(name), count, time, time / count, time / whole if whole else 0.0)
        for name, (count, time) in by_name.items()
    ]
    return tuple(sorted(found, key=lambda row: (-row.total_ns, row.name)))

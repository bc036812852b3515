"""Kernels by name: how often, how long, what class, which share; for the whole trace or one stage."""

from dataclasses import dataclass

import numpy as np

from llm_perf_opt.analysis.kernels.classes import KernelClass, classify
from llm_perf_opt.analysis.trace.stage_instances import TraceStages
from llm_perf_opt.traces.events import Trace, WorkKind
from llm_perf_opt.traces.projection import NONE, Bool


@dataclass(frozen=True)
class KernelTotal:
    """All launches of one kernel."""

    name: str
    kind: KernelClass
    calls: int
    total_ns: int
    mean_ns: float
    share: float
    """Of the summed kernel time of the stage, or of the trace."""


def kernels_by_time(
    trace: Trace, stages: TraceStages | None = None, stage: str | None = None, only: Bool | None = None
) -> tuple[KernelTotal, ...]:
    """Kernels by their summed time, the largest first. With a stage, those its launches started; with `only`, those rows."""
    chosen = trace.work.kind == WorkKind.KERNEL
    if stage is not None:
        if stages is None:
            raise ValueError("a stage's kernels need the trace's stages")
        chosen &= stages.of_stage(stage) != NONE
    if only is not None:
        chosen &= only
    rows = np.flatnonzero(chosen)
    duration = (trace.work.end_ns - trace.work.start_ns)[rows]
    everything = int(duration.sum())
    # two indices may carry one name; the names decide
    indices, number = np.unique(trace.work.name[rows], return_inverse=True)
    calls = np.bincount(number.reshape(-1), minlength=len(indices))
    total = np.zeros(len(indices), np.int64)
    np.add.at(total, number.reshape(-1), duration)
    by_name: dict[str, tuple[int, int]] = {}
    for index, count, time in zip(indices.tolist(), calls.tolist(), total.tolist(), strict=True):
        name = trace.name_of(index)
        known = by_name.get(name, (0, 0))
        by_name[name] = (known[0] + count, known[1] + time)
    found = [
        KernelTotal(name, classify(name), count, time, time / count, time / everything if everything else 0.0)
        for name, (count, time) in by_name.items()
    ]
    return tuple(sorted(found, key=lambda row: (-row.total_ns, row.name)))

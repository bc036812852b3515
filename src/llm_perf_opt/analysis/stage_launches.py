"""The kernels of a stage, launch by launch in the order of the calls: what a choice of launches, and every sum, is made from."""

import numpy as np

from llm_perf_opt.analysis.kernel_names import function_name
from llm_perf_opt.analysis.kernel_selection import Launch
from llm_perf_opt.analysis.projection import NONE, Projection, step_of_work
from llm_perf_opt.events import Trace, WorkKind
from llm_perf_opt.stages import Stage


def stage_launches(trace: Trace, projection: Projection, stage: Stage) -> list[Launch]:
    """Every kernel launched inside a range of this stage; `step` counts the stage's instances from 0."""
    work = trace.work
    instance = step_of_work(trace, projection, stage)
    rows = np.flatnonzero((instance != NONE) & (work.kind == WorkKind.KERNEL))
    call_start = trace.calls.start_ns[projection.call_of_work[rows]]
    rows = rows[np.lexsort((work.start_ns[rows], call_start))]
    step = np.unique(instance[rows], return_inverse=True)[1].reshape(-1)  # ranges lie in the order of their start
    functions = {int(index): function_name(trace.name_of(int(index))) for index in np.unique(work.name[rows])}
    names, durations = work.name[rows].tolist(), (work.end_ns[rows] - work.start_ns[rows]).tolist()
    grids, blocks = work.grid[rows].tolist(), work.block[rows].tolist()
    return [
        Launch(number, functions[name], trace.name_of(name), grid, block, duration)
        for number, name, grid, block, duration in zip(step.tolist(), names, grids, blocks, durations, strict=True)
    ]

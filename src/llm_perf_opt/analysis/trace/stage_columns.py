"""Stage, step and class of every piece of device work, as further columns of its table."""

from typing import Any

import numpy as np

from llm_perf_opt.analysis.kernels.classes import CLASSES, class_of_work
from llm_perf_opt.analysis.trace.projection import NONE, through
from llm_perf_opt.analysis.trace.stage_instances import TraceStages
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.events import Trace


def stage_columns(trace: Trace, stages: TraceStages | None = None) -> dict[str, dict[str, Any]]:
    """Table → column → values. `stage` is the innermost one, `step` counts the steps of the trace from 0; NULL for none."""
    found = find_stages(trace) if stages is None else stages
    names = np.array([*found.names, None], object)
    stage = names[through(found.of_work, found.instances.stage.astype(np.int64))]
    classes = np.array([kind.value for kind in CLASSES], object)[class_of_work(trace)]
    return {"kernels": {"stage": stage, "step": _steps(found, len(trace.work)), "class": classes}}


def _steps(stages: TraceStages, rows: int) -> Any:
    if stages.step_stage is None:
        return np.full(rows, None, object)
    instance = stages.of_stage(stages.step_stage)
    steps = stages.rows_of(stages.step_stage)
    place = np.full(len(stages.instances) + 1, None, object)  # the last entry answers -1
    place[steps] = list(range(len(steps)))
    place[NONE] = None
    return place[instance]

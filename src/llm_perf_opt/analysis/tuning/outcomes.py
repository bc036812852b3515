"""What a trial shows: its distance from the roofline time, and how right the prediction of its finding was."""

from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.tuning.calibration import CalibrationPoint, point_of
from llm_perf_opt.analysis.tuning.goals import Goal
from llm_perf_opt.analysis.tuning.records import StageDistance
from llm_perf_opt.analysis.tuning.tokens import Tried
from llm_perf_opt.analysis.verification import measured
from llm_perf_opt.core.records import Missing


def distance_of(run: Tried, goal: Goal) -> StageDistance | None:
    """Return the distance of the goal's stage from its roofline time; None if it is unknown."""
    found = run.analysis.efficiency
    if isinstance(found, Missing) or not goal.stage:
        return None
    stage = next((stage for stage in found.stages if stage.stage == goal.stage), None)
    if stage is None or isinstance(stage.distance, Missing):
        return None
    return StageDistance(stage.distance.times, stage.distance.roofline.seconds * 1e9)


def trial_point(finding: Finding, before: Tried, after: Tried) -> CalibrationPoint | None:
    """Return the prediction of a finding and what its trial measured; None if one of them is unknown."""
    old, new = before.timings, after.timings
    if isinstance(old, Missing) or isinstance(new, Missing):
        return None
    made = after.analysis.manifest.created
    result = measured(finding, old, new, after.path)
    return point_of(result, device=new.model.device_name, model=new.model.name, run=after.path, made=made)

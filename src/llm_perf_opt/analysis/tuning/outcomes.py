"""What a trial shows: its distance from the roofline time, and how right the prediction of its finding was."""

from collections.abc import Sequence

from llm_perf_opt.analysis.comparison.differences import invalid_run
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.stats import percentile
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.tuning.calibration import CalibrationPoint, point_of
from llm_perf_opt.analysis.tuning.goals import Goal
from llm_perf_opt.analysis.tuning.records import StageDistance
from llm_perf_opt.analysis.tuning.tokens import Tried
from llm_perf_opt.analysis.verification import Trial, predicted_saving, unit_times
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.warnings import NOISE


def distance_of(run: Tried, goal: Goal) -> StageDistance | None:
    """Return the distance of the goal's stage from its roofline time; None if it is unknown."""
    found = run.analysis.efficiency
    if isinstance(found, Missing) or not goal.stage:
        return None
    stage = next((stage for stage in found.stages if stage.stage == goal.stage), None)
    if stage is None or isinstance(stage.distance, Missing):
        return None
    return StageDistance(stage.distance.times, stage.distance.roofline.seconds * 1e9)


def trial_point(finding: Finding, before: Sequence[Tried], after: Sequence[Tried]) -> CalibrationPoint | None:
    """Return the prediction of a finding and what its trial measured: the median of the medians of all runs of each side.

    None if one of them is unknown, if a run is invalid, or if something else used the machine during a run. A trial whose
    result was not distinguishable counts: without it, only predictions that came true would be learned from.
    """
    runs = [run.analysis for run in (*before, *after)]
    sides = [_levels(finding, side) for side in (before, after)]
    timings = after[0].timings if after else Missing("it was not run")
    if not all(sides) or isinstance(timings, Missing) or not can_be_learned_from(runs):
        return None
    before_ns, after_ns = (round(percentile(side, 0.5)) for side in sides)
    path, made = after[0].path, after[0].analysis.manifest.created
    saving = predicted_saving(finding, before_ns)
    trial = Trial(
        finding.id, tuple(finding.overrides), finding.saving_per, path, "", *saving,
        before_ns=before_ns, after_ns=after_ns, kind=finding.kind,
    )  # fmt: skip
    return point_of(trial, device=timings.model.device_name, model=timings.model.name, run=path, made=made)


def can_be_learned_from(runs: Sequence[RunAnalysis]) -> bool:
    """Return whether the runs of a trial are valid and nothing else used the machine during one of them."""
    noisy = any(warning.id in NOISE for run in runs for warning in run.warnings)
    return not noisy and invalid_run(runs) is None


def _levels(finding: Finding, runs: Sequence[Tried]) -> list[float]:
    """Return the median time of the finding's stage in each run; nothing if a run has none."""
    found = []
    for run in runs:
        times = run.timings if isinstance(run.timings, Missing) else unit_times(finding, run.timings)
        if isinstance(times, Missing):
            return []
        found.append(percentile(times, 0.5))
    return found

"""The figures of runs that goals and constraints are about."""

import math
from collections.abc import Iterable, Sequence

from llm_perf_opt.analysis.comparison.compare import Comparison
from llm_perf_opt.analysis.comparison.effects import Effect
from llm_perf_opt.analysis.comparison.figures import energy_of, memory_of
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.tuning.goals import GOALS, Constraint, Goal
from llm_perf_opt.core.records import Maybe, Missing


def value_in(run: RunAnalysis, goal: Goal) -> Maybe[float]:
    """Return the figure of one run: a median over its repeats, or its one reading."""
    timings = run.timings
    if isinstance(timings, Missing):
        return timings
    if goal.unit == "bytes":
        field = "reserved_bytes" if timings.model.device.startswith("cuda") else "process_rss_bytes"
        return memory_of(timings, field)
    if goal.unit == "J":
        return energy_of(run, "from_counter_j")
    metric = next((metric for metric in run.metrics if metric.key == goal.row), None)
    if metric is None:
        return Missing("no iteration was measured")
    return metric.value if isinstance(metric.value, Missing) else metric.value.median


def level_of(runs: Sequence[RunAnalysis], goal: Goal) -> Maybe[float]:
    """Return the geometric mean over runs of one configuration."""
    values = [value_in(run, goal) for run in runs]
    missing = next((value for value in values if isinstance(value, Missing)), None)
    if missing is not None or not values:
        return missing or Missing("the configuration was not run")
    known = [value for value in values if not isinstance(value, Missing)]
    if min(known) <= 0:
        return Missing(f"{goal.name} is not above zero")
    return math.exp(sum(math.log(value) for value in known) / len(known))


def not_better(before: Sequence[RunAnalysis], after: Sequence[RunAnalysis], goal: Goal) -> str:
    """Return how a goal changed from one configuration to the other if it is not better in as many runs of each, else nothing."""
    runs = min(len(before), len(after))
    old, new = level_of(before[:runs], goal), level_of(after[:runs], goal)
    if isinstance(old, Missing) or isinstance(new, Missing) or (new > old if goal.higher_is_better else new < old):
        return ""
    return f"{goal.name} went from {goal.text(old)} to {goal.text(new)}"


def broken(constraints: Iterable[Constraint], runs: Sequence[RunAnalysis]) -> list[Constraint]:
    """Return the constraints that a configuration breaks."""
    return [one for one in constraints if one.broken_by(level_of(runs, GOALS[one.goal]))]


def effect_in(comparison: Comparison, goal: Goal, device: str) -> Maybe[Effect]:
    """Return the change of a goal in a comparison."""
    key = goal.row_on(device)
    effects = {row.key: row.effect for row in comparison.metrics}
    effects |= {figure.key: figure.effect for figure in (*comparison.memory, *comparison.energy)}
    return effects.get(key, Missing(f"there is no {goal.name}"))

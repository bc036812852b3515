"""Whether a change is kept: the verdict of `compare`, with all of its guards, on runs that alternate."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llm_perf_opt.analysis.comparison.compare import compare
from llm_perf_opt.analysis.comparison.differences import check_distinct, config_differences
from llm_perf_opt.analysis.comparison.effects import Effect
from llm_perf_opt.analysis.comparison.sides import side_of
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.tuning.goals import Goal
from llm_perf_opt.analysis.tuning.measures import effect_in
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.units import counted, percentage

BETTER = ("faster", "less")
"""Verdicts of a change that improves a goal."""
SMALLEST = 0.01
"""A smaller improvement is not worth a change; the same as the smallest change that `compare` calls real."""


@dataclass(frozen=True)
class Decision:
    """The comparison of two configurations."""

    better: bool
    why: str
    before: float | None = None
    after: float | None = None
    change: float | None = None
    """after / before - 1."""
    low: float | None = None
    """The ends of the interval of the change; None if there is none."""
    high: float | None = None
    runs: tuple[int, int] = (0, 0)
    cautions: tuple[str, ...] = ()
    goal: str = ""
    """The figure that was compared."""


def decide(
    before: Sequence[RunAnalysis], after: Sequence[RunAnalysis], goal: Goal, keys: Iterable[str], *, other_model: bool = False
) -> Decision:
    """Compare two configurations once, over all of their runs. `keys`: the settings that are meant to differ.

    `other_model`: the change is one of precision, so the recorded weights may differ. Any other difference in hardware, model or
    requests is refused, and what `compare` cannot distinguish is not better.
    """
    differing = {row.key for row in config_differences(before[0], after[0])}
    experiment = [key for key in dict.fromkeys(keys) if key in differing or any(name.startswith(f"{key}.") for name in differing)]
    try:
        check_distinct([*before, *after])
        found = compare(side_of(before), side_of(after), experiment, ("model",) if other_model else ())
    except ConfigError as error:
        return Decision(False, f"the runs cannot be compared: {error.fact}")
    timings = after[0].timings
    effect = effect_in(found, goal, "" if isinstance(timings, Missing) else timings.model.device)
    if isinstance(effect, Missing):
        return Decision(False, f"{goal.name} cannot be compared: {effect.why}")
    return _decision(effect, goal, found.unjudged, found.cautions)


def _decision(effect: Effect, goal: Goal, unjudged: str, cautions: tuple[str, ...]) -> Decision:
    interval = effect.interval
    low, high = (None, None) if isinstance(interval, Missing) else (interval.low, interval.high)
    shown = f"{goal.text(effect.base)} → {goal.text(effect.new)}, {percentage(effect.change, 1, signed=True)}"
    if not isinstance(interval, Missing):
        shown += f" (98 % interval {percentage(interval.low, 1, signed=True)} to {percentage(interval.high, 1, signed=True)})"
    runs = f"{counted(effect.runs[0], 'run')} against {effect.runs[1]}"
    better = effect.verdict in BETTER
    words = "" if better else f"; {_why_not(effect, unjudged)}"
    why = f"{shown}, {runs}{words}"
    return Decision(better, why, effect.base, effect.new, effect.change, low, high, effect.runs, cautions, goal.name)


def _why_not(effect: Effect, unjudged: str) -> str:
    if unjudged:
        return f"not judged: {unjudged}"
    if isinstance(effect.interval, Missing):
        return f"no verdict: {effect.interval.why}"
    if effect.rival is not None:
        return f"no verdict: the machine's speed changed, {effect.rival.words}"
    return effect.verdict

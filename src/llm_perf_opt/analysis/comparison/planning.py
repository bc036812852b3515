"""How many runs a comparison needs, forecast from pilot runs before the others are made.

The pilots show how repeats scatter inside a run, how alike neighbors are, and how far the levels of runs lie apart. Runs with
that noise are then drawn and judged as `compare` judges them: the half-width of the interval comes from those draws, the place
of its center from the standard error of the change. One pilot does not show how processes differ; their spread is then assumed,
if it may be.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llm_perf_opt.analysis.comparison.statistics import LEAST_REPEATS, LEVEL, RECOMMENDED_RUNS, UNKNOWN_SPREAD
from llm_perf_opt.analysis.comparison.timeline import posterior, timeline_of
from llm_perf_opt.analysis.stability import Floats, inflation_of, median, quarter_spread
from llm_perf_opt.analysis.stats import student_quantile
from llm_perf_opt.core.records import Maybe, Missing

PLANNED = (RECOMMENDED_RUNS, 4, 5, 6, 8, 10, 15, 20, 30)
"""Runs per side that are considered."""
DRAWS = 12
"""Pairs drawn for each number of runs; their half-widths vary by a fifth, so the forecast by a few points."""
SURE = 0.995
"""No more runs are considered once the forecast reaches this."""
_WITHIN = 4.0
_SEED = 20240229
_LARGEST = 10.0
"""The largest change that is considered, as a logarithm."""
_RANGE = 1.2816
"""Normal quantile of the 80 % interval of the spread between processes."""


@dataclass(frozen=True)
class Noise:
    """What pilot runs show of one metric, as deviations of logarithms."""

    scatter: float
    """Standard deviation of the repeats inside a run."""
    likeness: float
    """Correlation of neighboring repeats."""
    process: Maybe[float]
    """Standard deviation between processes: measured with two pilots or more, else assumed; Missing if it may not be."""
    process_most: Maybe[float]
    """Upper end of its 80 % interval; if it is assumed, twice what is."""
    runs: int
    """Pilot runs."""
    repeats: int
    """Repeats per run, of the pilot with the fewest or as planned."""
    by_levels: bool = False
    """Whether the levels of the runs must show a change by themselves as well: on a busy CPU."""

    @property
    def of_level(self) -> float:
        """Variance of a run's level because of its repeats."""
        return self.scatter**2 * _share_left(self.repeats, self.likeness)


@dataclass(frozen=True)
class PlannedRuns:
    """The forecast for one number of runs per side."""

    runs: int
    power: float
    """The chance of a verdict, if the change is real."""
    power_least: float
    """The same if processes differ by `Noise.process_most`."""
    finds: float
    """The smallest change that gets a verdict with the chance that was asked for."""


@dataclass(frozen=True)
class Forecast:
    """The forecast for one metric."""

    noise: Noise
    table: tuple[PlannedRuns, ...]
    needed: Maybe[int]
    """Runs per side for the chance that was asked for."""
    needed_most: Maybe[int]
    """The same if processes differ by `Noise.process_most`."""


@dataclass(frozen=True)
class PlannedMetric:
    """The forecast for one metric."""

    key: str
    label: str
    forecast: Maybe[Forecast]


@dataclass(frozen=True)
class ComparisonPlan:
    """How many runs a comparison needs."""

    pilots: tuple[str, ...]
    effect: float
    """The change to find, as a share."""
    power: float
    """The chance of a verdict that is asked for, if the change is real."""
    repeats: int
    """Repeats per run that the forecast is for."""
    metrics: tuple[PlannedMetric, ...]
    runs: Maybe[int]
    """Runs per side with which every metric that has a forecast reaches that chance."""
    run_seconds: float
    """Time of one run with so many repeats, from its load to its last pass."""
    seconds: Maybe[float]
    """Time of all runs of both sides."""
    commands: Maybe[tuple[str, ...]]
    """The commands that make the runs in turn and compare them."""
    cautions: tuple[str, ...]


def noise_of(pilots: Sequence[Sequence[float]], spread: float | None, repeats: int | None = None) -> Maybe[Noise]:
    """Return the noise of pilot runs, each the values of its repeats. `spread`: assumed between processes, if it may be.

    `repeats`: how many are planned, if not as many as in the pilots.
    """
    if min(map(len, pilots)) < LEAST_REPEATS:
        return Missing(f"a pilot run has {min(map(len, pilots))} repeats; a plan needs {LEAST_REPEATS} (runtime.min_repeats)")
    if not all(math.isfinite(value) and value > 0 for run in pilots for value in run):
        return Missing("a pilot run has a value that is not above zero")
    runs = [np.log(np.asarray(run, np.float64)) for run in pilots]
    reach = _WITHIN * quarter_spread(np.concatenate([run - median(run) for run in runs]))
    runs = [median(run) + np.clip(run - median(run), -reach, reach) for run in runs]
    inflated = inflation_of(runs) ** 2
    likeness = (inflated - 1) / (inflated + 1)
    freedom = sum(len(run) * (1 - _share_left(len(run), likeness)) for run in runs)
    scatter = math.sqrt(sum(float(((run - run.mean()) ** 2).sum()) for run in runs) / freedom)
    planned = repeats or min(map(len, runs))
    process, most = _between([float(run.mean()) for run in runs], spread, scatter**2 * _share_left(len(runs[0]), likeness))
    return Noise(scatter, likeness, process, most, len(runs), planned, by_levels=spread is None)


def _share_left(repeats: int, likeness: float) -> float:
    """Return the variance of the mean of correlated repeats, as a share of that of one repeat."""
    lags = np.arange(1, repeats)
    return float(1 + 2 * ((1 - lags / repeats) * likeness**lags).sum()) / repeats


def _between(levels: Sequence[float], spread: float | None, inside: float) -> tuple[Maybe[float], Maybe[float]]:
    """Return the deviation between processes and the upper end of its interval. `inside`: variance of a level by its repeats."""
    if len(levels) == 1:
        return (UNKNOWN_SPREAD, UNKNOWN_SPREAD) if spread is None else (spread, 2 * spread)
    freedom, variance = len(levels) - 1, float(np.var(levels, ddof=1))
    least = freedom * (1 - 2 / (9 * freedom) - _RANGE * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson and Hilferty's quantile
    most = variance * freedom / max(least, 0.016)  # 0.016: with one degree of freedom, where theirs is off
    return math.sqrt(max(variance - inside, 0.0)), math.sqrt(max(most - inside, 0.0))


def forecast(noise: Noise, change: float, asked: float) -> Maybe[Forecast]:
    """Return the forecast for a change, such as 0.05, and the chance of a verdict that is asked for."""
    if isinstance(noise.process, Missing) or isinstance(noise.process_most, Missing):
        return UNKNOWN_SPREAD
    rows: list[PlannedRuns] = []
    size = abs(math.log1p(change))
    reach = _error(noise, noise.process, PLANNED[-1]) * student_quantile((1 + LEVEL) / 2, None) < size
    for runs in PLANNED if reach else (PLANNED[0], PLANNED[-1]):
        usual, wide = (_Drawn(noise, process, runs) for process in (noise.process, noise.process_most))
        rows.append(PlannedRuns(runs, usual.power(size), wide.power(size), math.expm1(usual.finds(asked))))
        if rows[-1].power_least >= asked and rows[-1].power >= SURE:
            break
    why = Missing(f"{PLANNED[-1]} runs per side do not reach it")
    needed = next((row.runs for row in rows if row.power >= asked), why)
    return Forecast(noise, tuple(rows), needed, next((row.runs for row in rows if row.power_least >= asked), why))


def _error(noise: Noise, process: float, runs: int) -> float:
    """Return the standard error of the change."""
    return math.sqrt(2 / runs * (process**2 + noise.of_level))


class _Drawn:
    """Pairs of equal sides with this noise, as `compare` judges them."""

    def __init__(self, noise: Noise, process: float, runs: int) -> None:
        generator = np.random.default_rng(_SEED)
        self.error = _error(noise, process, runs)
        self.halves = np.asarray([_half_width(noise, process, runs, generator) for _ in range(DRAWS if self.error else 1)])

    def power(self, size: float) -> float:
        """Return the chance that the interval excludes zero for a change of this size, on the right side of it."""
        if not self.error:
            return 1.0
        return float(np.mean([math.erfc((half - size) / self.error / math.sqrt(2)) / 2 for half in self.halves]))

    def finds(self, asked: float) -> float:
        """Return the smallest change with this chance of a verdict, by bisection."""
        low, high = 0.0, _LARGEST
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if self.power(middle) >= asked else (middle, high)
        return high


def _half_width(noise: Noise, process: float, runs: int, generator: np.random.Generator) -> float:
    """Return how far the interval of a drawn pair reaches from its middle to its ends."""
    drawn = [process * generator.normal() + _repeats(noise, generator) for _ in range(2 * runs)]
    found = posterior(timeline_of(drawn[:runs], drawn[runs:], (0, 1) * runs))
    if found is None:
        return 0.0
    low, high = found.quantiles((1 - LEVEL) / 2, (1 + LEVEL) / 2)
    if not noise.by_levels:
        return (high - low) / 2
    levels = np.asarray([median(run[:, 0]) for run in drawn]).reshape(2, runs)
    spread = math.sqrt(float(levels.var(axis=1, ddof=1).mean()) * 2 / runs)
    return max((high - low) / 2, student_quantile((1 + LEVEL) / 2, 2 * runs - 2) * spread)


def _repeats(noise: Noise, generator: np.random.Generator) -> Floats:
    steps = generator.normal(size=noise.repeats)
    values = np.empty((noise.repeats, 1))
    values[0] = steps[0]
    for place in range(1, noise.repeats):
        values[place] = noise.likeness * values[place - 1] + math.sqrt(1 - noise.likeness**2) * steps[place]
    return noise.scatter * values

"""Whether the machine changed its speed during a run, and how strongly consecutive repeats are correlated.

Everything uses logarithms of times. Two rank tests, which are robust to outliers, look for a movement at the level `SURE`:

- **drift**: Mann-Kendall's test of a trend, normal approximation with ties; its size is Theil and Sen's slope.
- **level shift**: the largest standardized rank sum over every place where the run can be split in two (Pettitt's test, but with
  splits near the ends weighted like those in the middle). Its null distribution comes from permutations, drawn once per number
  of repeats with a fixed seed.

Correlated neighbors imitate both on a steady machine. So each statistic is divided by the inflation that their correlation
causes, measured on the residuals of the drift or shift.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from llm_perf_opt.analysis.separable import stages_unavailable
from llm_perf_opt.core.records import CleanTimings
from llm_perf_opt.core.units import counted, percentage
from llm_perf_opt.core.warnings import RunWarning, WarningId

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]

SURE = 0.01
"""Significance level of each of the two tests."""
LEAST_REPEATS = 7
"""With fewer repeats, a single outlier hides a drift."""
MOST_POINTS = 60
"""Longer runs are reduced to medians of consecutive repeats, because the number of pairs grows quadratically."""
_LABELS = {"e2e": "End to end", "prefill": "Prefill", "decode": "Decode"}
_PERMUTATIONS = 20_000
_SEED = 20240229
_MOST_CORRELATION = 0.9
"""Upper limit of the estimated correlation."""
_NEAR_LARGEST = 0.8
"""Splits with at least this share of the largest rank sum are candidates for the place of a shift."""
_BEYOND_DOUBT = 8.0
"""A movement of this many standard errors is not explained by correlated neighbors."""


class Movement(str, Enum):
    """How the times of a run moved over its repeats."""

    STEADY = "steady"
    DRIFT = "drift"
    SHIFT = "level shift"
    UNKNOWN = "too few repeats"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Stability:
    """Whether the times of a run stayed at one level."""

    movement: Movement
    size: float
    """As a share: the change of a drift from the first repeat to the last, or that of a shift; 0 for a steady run."""
    at: int
    """The first repeat at the new level of a shift, counted from 1; else 0."""
    p_value: float
    """P-value of the movement; for a steady run, the smaller of the two tests."""
    repeats: int

    @property
    def moved(self) -> bool:
        """Whether the machine changed its speed during the run."""
        return self.movement in (Movement.DRIFT, Movement.SHIFT)

    @property
    def words(self) -> str:
        """A clause about the repeats."""
        if self.movement is Movement.DRIFT:
            return f"repeats drift by {percentage(self.size, 1, signed=True)} from first to last"
        if self.movement is Movement.SHIFT:
            return f"repeats shift by {percentage(self.size, 1, signed=True)} at repeat {self.at}"
        if self.movement is Movement.STEADY:
            return "repeats keep their level"
        return f"{counted(self.repeats, 'repeat')} cannot show a drift"


def run_stability(timings: CleanTimings) -> dict[str, Stability]:
    """Return the stability of a run: of its requests (`e2e`), and of prefill and decode if they can be separated."""
    series = {"e2e": [repeat.total_ns for repeat in timings.iterations]}
    if stages_unavailable(timings) is None:
        series["prefill"] = [repeat.prefill_ns for repeat in timings.iterations]
        series["decode"] = [repeat.decode_ns for repeat in timings.iterations]
    return {key: stability(np.log(times)) for key, times in series.items() if times and min(times) > 0}


def settling_warning(timings: CleanTimings) -> RunWarning | None:
    """Return a warning if the times were still changing when the warm-up ended, otherwise None."""
    if timings.settled:
        return None
    after = counted(len(timings.warmup), "warm-up iteration")
    return RunWarning(WarningId.NOT_SETTLED, f"The times had not settled after {after}.")


def movement_warnings(found: Mapping[str, Stability]) -> list[RunWarning]:
    """Return a warning if a run did not stay at one level: for the whole request, or else for each stage that did not."""
    whole = found.get("e2e")
    moved = {"e2e": whole} if whole is not None and whole.moved else {key: value for key, value in found.items() if value.moved}
    advice = "The machine's speed changed during the run. Repeat the run. To compare, make three alternating runs per side."
    return [RunWarning(WarningId.SPEED_CHANGED, f"{_LABELS[key]}: {value.words}. {advice}") for key, value in moved.items()]


def stability(logs: Floats) -> Stability:
    """Return the stability of a run. `logs` contains the logarithm of each repeat's time."""
    repeats = len(logs)
    if repeats < LEAST_REPEATS:
        return Stability(Movement.UNKNOWN, 0.0, 0, 1.0, repeats)
    points = _folded(logs)
    levels, ties = np.unique(points, return_inverse=True, return_counts=True)[1:]
    if len(ties) == 1:
        return Stability(Movement.STEADY, 0.0, 0, 1.0, repeats)
    trend, sums = _trend(points, ties), _rank_sums(_middle_ranks(levels.ravel(), ties)[None, :])[0]
    chance = min(_chance_of_trend(trend), _chance_of_shift(float(sums.max()), len(points)))
    if chance <= SURE:
        drift, shift = _drift(points, trend, repeats), _shift(points, sums, repeats)
        # Of a drift and a shift, report the one with the smaller residuals.
        for found, _ in sorted((drift, shift), key=lambda pair: pair[1]):
            if found.p_value <= SURE:
                return found
        chance = min(drift[0].p_value, shift[0].p_value)
    return Stability(Movement.STEADY, 0.0, 0, chance, repeats)


def _folded(logs: Floats) -> Floats:
    """Return at most `MOST_POINTS` medians, of equally many repeats each except for the last."""
    fold = _fold(len(logs))
    return logs if fold == 1 else np.asarray([median(logs[first : first + fold]) for first in range(0, len(logs), fold)])


def _fold(repeats: int) -> int:
    return math.ceil(repeats / MOST_POINTS)


@functools.lru_cache(maxsize=64)
def _pairs(count: int) -> tuple[Places, Places]:
    """Return the earlier and the later point of every pair."""
    earlier, later = np.triu_indices(count, 1)
    return earlier, later


def _trend(points: Floats, ties: Places) -> float:
    """Return the standardized Mann-Kendall score, without its sign. `ties`: how many points share each value."""
    count = len(points)
    earlier, later = _pairs(count)
    score = float(np.sign(points[later] - points[earlier]).sum())
    variance = (count * (count - 1) * (2 * count + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    return max(0.0, abs(score) - 1) / math.sqrt(variance)


def _drift(points: Floats, trend: float, repeats: int) -> tuple[Stability, float]:
    """Return the drift from the first repeat to the last, and the scatter of its residuals."""
    count = len(points)
    earlier, later = _pairs(count)
    drift = median((points[later] - points[earlier]) / (later - earlier)) * (count - 1)
    rest = points - drift * np.linspace(0, 1, count)
    error = quarter_spread(rest) * math.sqrt(12 / count)
    chance = _chance_of_trend(_deflated(trend, rest, abs(drift), error))
    return Stability(Movement.DRIFT, math.expm1(drift), 0, chance, repeats), float(np.abs(rest - median(rest)).sum())


def _shift(points: Floats, sums: Floats, repeats: int) -> tuple[Stability, float]:
    """Return the level shift, placed where it leaves the least scatter, and that scatter."""
    count = len(points)
    places = np.flatnonzero(sums >= _NEAR_LARGEST * sums.max()) + 1
    left, cut = min((float(np.abs(_without_shift(points, int(cut))).sum()), int(cut)) for cut in places)
    rest = _without_shift(points, cut)
    by = median(points[cut:]) - median(points[:cut])
    error = quarter_spread(rest) * math.sqrt(math.pi / 2 * (1 / cut + 1 / (count - cut)))
    chance = _chance_of_shift(_deflated(float(sums.max()), rest, abs(by), error), count)
    return Stability(Movement.SHIFT, math.expm1(by), cut * _fold(repeats) + 1, chance, repeats), left


def _without_shift(points: Floats, cut: int) -> Floats:
    """Return the residuals of a shift after `cut` points."""
    return np.concatenate([part - median(part) for part in (points[:cut], points[cut:])])


def _deflated(deviations: float, rest: Floats, size: float, error: float) -> float:
    """Return the standardized statistic without what correlated neighbors add to it.

    `rest` holds the residuals of the movement, `error` is the standard error of its size. A movement of `_BEYOND_DOUBT` standard
    errors keeps its statistic: ranks alone do not show how large it is.
    """
    inflation = inflation_of([rest], fitted=2)
    return deviations if size >= _BEYOND_DOUBT * inflation * error else deviations / inflation


def _middle_ranks(levels: Places, ties: Places) -> Floats:
    """Return standardized ranks, with ties sharing theirs. `levels`: each point's place among the different values."""
    ranks = (np.cumsum(ties) - (ties + 1) / 2)[levels] - (len(levels) - 1) / 2
    return np.asarray(ranks / ranks.std(), np.float64)


def _rank_sums(ranks: Floats) -> Floats:
    """Return for each row and each k the standardized sum of its first k ranks, without its sign."""
    count = ranks.shape[1]
    k = np.arange(1, count)
    sums: Floats = np.abs(np.cumsum(ranks, axis=1)[:, :-1]) / np.sqrt(k * (count - k) / (count - 1))
    return sums


def _chance_of_trend(deviations: float) -> float:
    """Return the p-value of a trend."""
    return math.erfc(deviations / math.sqrt(2))


def _chance_of_shift(deviations: float, count: int) -> float:
    """Return the p-value of a shift at any place of a run of `count` points."""
    null = _permuted(count)
    beyond = len(null) - int(np.searchsorted(null, deviations - 1e-9))
    return (beyond + 1) / (len(null) + 1)


@functools.lru_cache(maxsize=64)
def _permuted(count: int) -> Floats:
    """Return the largest rank sum of each of many permutations, sorted."""
    generator = np.random.default_rng(_SEED)
    ranks = np.tile(_middle_ranks(np.arange(count), np.ones(count, np.intp)), (_PERMUTATIONS, 1))
    return np.sort(_rank_sums(generator.permuted(ranks, axis=1)).max(axis=1))


def inflation_of(series: Sequence[Floats], fitted: int = 1) -> float:
    """Return √((1+ρ)/(1−ρ)) for the lag-one correlation ρ of the ranks, at least 1.

    ρ is the mean over the runs, because a single short series says little, corrected for its bias: (1+3ρ)/n for residuals of a
    level, (2+4ρ)/n for residuals of a line. `fitted` is the number of parameters that were fitted.
    """
    found = float(np.mean([_rank_correlation(values) for values in series]))
    shortest = min(len(values) for values in series)
    corrected = min(_MOST_CORRELATION, max(0.0, found + (fitted + (fitted + 2) * found) / shortest))
    return math.sqrt((1 + corrected) / (1 - corrected))


def _rank_correlation(values: Floats) -> float:
    """Return the correlation of each value's rank with the one before; 0 if all values are equal."""
    if np.ptp(values) == 0:
        return 0.0
    ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable") - (len(values) - 1) / 2
    return float((ranks[1:] * ranks[:-1]).sum() / (ranks * ranks).sum())


def quarter_spread(values: Floats) -> float:
    """Return the standard deviation estimated from the interquartile range."""
    ordered = np.sort(values)
    return (quantile(ordered, 0.75) - quantile(ordered, 0.25)) / 1.349


def medians(values: Floats) -> Floats:
    """Return the medians of finite values along the last axis, as `np.median` does but several times as fast."""
    ordered = np.sort(values)
    count = ordered.shape[-1]
    half = count // 2
    found: Floats = ordered[..., half] if count % 2 else (ordered[..., half - 1] + ordered[..., half]) / 2
    return found


def median(values: Floats) -> float:
    """Return the median of finite values."""
    return float(medians(values))


def quantile(ordered: Floats, share: float) -> float:
    """Return a quantile of sorted values, by linear interpolation; the same as `np.quantile`, to the last bit."""
    place = share * (len(ordered) - 1)
    low = int(place)
    below, above = float(ordered[low]), float(ordered[min(low + 1, len(ordered) - 1)])
    weight = place - low
    return above - (above - below) * (1 - weight) if weight >= 0.5 else below + (above - below) * weight

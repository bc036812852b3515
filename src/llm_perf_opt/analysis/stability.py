"""What the repeats inside one run show: how much they scatter, how alike neighbors are, whether the machine moved meanwhile.

All of it is on logarithms of times. A run is called drifting or shifted only where chance hardly explains it (`SURE`), by two
tests of ranks, which outliers do not move:

- **drift**: Mann-Kendall's test of a trend, normal approximation with ties; its size is Theil and Sen's slope.
- **level shift**: the largest standardized rank sum over every place where the run may be cut in two (Pettitt's test with its
  ends weighted like its middle). Its null distribution is that of permutations, drawn once per number of repeats, with a fixed
  seed.

Neighbors that resemble each other imitate both, without any change of the machine. So each statistic is divided by what that
likeness inflates it by, measured on what is left once the drift or the shift is taken out.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from llm_perf_opt.analysis.separable import inseparable
from llm_perf_opt.core.records import CleanTimings

Floats = npt.NDArray[np.float64]

SURE = 0.01
"""A movement is called one where chance gives as much in this share of steady runs."""
LEAST_REPEATS = 7
"""Fewer cannot show a movement so surely, even if each repeat is slower than the one before."""
MOST_POINTS = 60
"""Longer runs are folded to medians of consecutive repeats: pairs grow with the square."""
_LABELS = {"e2e": "End to end", "prefill": "Prefill", "decode": "Decode"}
_PERMUTATIONS = 20_000
_SEED = 20240229
_MOST_CORRELATION = 0.9
_AS_WELL = 0.8
"""Of the largest rank sum."""
_BEYOND_DOUBT = 8.0
"""Standard errors of the size of a movement, from which no likeness of neighbors explains it."""


class Movement(str, Enum):
    """What the level of a run did while its repeats were measured."""

    STEADY = "steady"
    DRIFT = "drift"
    SHIFT = "level shift"
    UNKNOWN = "too few repeats"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Stability:
    """Whether a run kept its level."""

    movement: Movement
    size: float
    """Of a drift the change from the first repeat to the last, of a shift that from before to after, as a share; else 0."""
    at: int
    """Of a shift the first repeat at the new level, counted from 1; else 0."""
    p_value: float
    """Of the movement named, else the least that was found."""
    repeats: int

    @property
    def moved(self) -> bool:
        """Whether the machine changed its speed during the run."""
        return self.movement in (Movement.DRIFT, Movement.SHIFT)

    @property
    def words(self) -> str:
        """What the repeats do."""
        if self.movement is Movement.DRIFT:
            return f"repeats drift by {self.size:+.1%} from first to last"
        if self.movement is Movement.SHIFT:
            return f"repeats switch level at repeat {self.at} by {self.size:+.1%}"
        return "repeats keep their level" if self.movement is Movement.STEADY else f"{self.repeats} repeats cannot show a drift"


def run_stability(timings: CleanTimings) -> dict[str, Stability]:
    """Whether a run kept its level: its requests (`e2e`), and prefill and decode where they are told apart."""
    series = {"e2e": [repeat.total_ns for repeat in timings.iterations]}
    if inseparable(timings) is None:
        series["prefill"] = [repeat.prefill_ns for repeat in timings.iterations]
        series["decode"] = [repeat.decode_ns for repeat in timings.iterations]
    return {key: stability(np.log(times)) for key, times in series.items() if times and min(times) > 0}


def movement_warnings(found: Mapping[str, Stability]) -> list[str]:
    """What to say of a run that did not keep its level: of the whole request, else of the stages that did not."""
    whole = found.get("e2e")
    moved = {"e2e": whole} if whole is not None and whole.moved else {key: one for key, one in found.items() if one.moved}
    return [
        f"{_LABELS[key]}: {one.words}. The machine changed its speed during the run. Rerun it; to compare, make three runs a "
        "side, in turn."
        for key, one in moved.items()
    ]


def stability(logs: Floats) -> Stability:
    """Whether a run whose repeats took these times, as logarithms, kept its level."""
    repeats = len(logs)
    if repeats < LEAST_REPEATS:
        return Stability(Movement.UNKNOWN, 0.0, 0, 1.0, repeats)
    points = _folded(logs)
    ranks = _middle_ranks(points)
    if not ranks.any():
        return Stability(Movement.STEADY, 0.0, 0, 1.0, repeats)
    trend, sums = _trend(points), _rank_sums(ranks[None, :])[0]
    chance = min(_chance_of_trend(trend), _chance_of_shift(float(sums.max()), len(points)))
    if chance <= SURE:
        drift, shift = _drift(points, trend, repeats), _shift(points, sums, repeats)
        # Of a drift and a shift the one that leaves less scatter is what happened.
        for found, _ in sorted((drift, shift), key=lambda pair: pair[1]):
            if found.p_value <= SURE:
                return found
        chance = min(drift[0].p_value, shift[0].p_value)
    return Stability(Movement.STEADY, 0.0, 0, chance, repeats)


def _folded(logs: Floats) -> Floats:
    """At most `MOST_POINTS` of them, of equally many repeats each but for the last."""
    fold = _fold(len(logs))
    return logs if fold == 1 else np.asarray([np.median(logs[first : first + fold]) for first in range(0, len(logs), fold)])


def _fold(repeats: int) -> int:
    return math.ceil(repeats / MOST_POINTS)


def _trend(points: Floats) -> float:
    """How many deviations Mann and Kendall's score lies off zero."""
    count = len(points)
    score = float(np.triu(np.sign(points[None, :] - points[:, None])).sum())
    ties = np.unique(points, return_counts=True)[1]
    variance = (count * (count - 1) * (2 * count + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    return max(0.0, abs(score) - 1) / math.sqrt(variance)


def _drift(points: Floats, trend: float, repeats: int) -> tuple[Stability, float]:
    """A drift from the first repeat to the last; and how much scatter it leaves."""
    count = len(points)
    earlier, later = np.triu_indices(count, 1)
    drift = float(np.median((points[later] - points[earlier]) / (later - earlier))) * (count - 1)
    rest = points - drift * np.linspace(0, 1, count)
    error = quarter_spread(rest) * math.sqrt(12 / count)
    chance = _chance_of_trend(_deflated(trend, rest, abs(drift), error))
    return Stability(Movement.DRIFT, math.expm1(drift), 0, chance, repeats), float(np.abs(rest - np.median(rest)).sum())


def _shift(points: Floats, sums: Floats, repeats: int) -> tuple[Stability, float]:
    """A shift of the level, likewise: where it leaves least scatter, of the places that the ranks show about as well as any."""
    count = len(points)
    places = np.flatnonzero(sums >= _AS_WELL * sums.max()) + 1
    left, cut = min((float(np.abs(_without_shift(points, int(cut))).sum()), int(cut)) for cut in places)
    rest = _without_shift(points, cut)
    by = float(np.median(points[cut:]) - np.median(points[:cut]))
    error = quarter_spread(rest) * math.sqrt(math.pi / 2 * (1 / cut + 1 / (count - cut)))
    chance = _chance_of_shift(_deflated(float(sums.max()), rest, abs(by), error), count)
    return Stability(Movement.SHIFT, math.expm1(by), cut * _fold(repeats) + 1, chance, repeats), left


def _without_shift(points: Floats, cut: int) -> Floats:
    """What a shift after so many points leaves."""
    return np.concatenate([part - np.median(part) for part in (points[:cut], points[cut:])])


def _deflated(deviations: float, rest: Floats, size: float, error: float) -> float:
    """Deviations of the ranks less what likeness of neighbors adds, unless the size of the movement is beyond all doubt.

    `rest` is what the movement leaves, `error` the standard error of the size. Ranks cannot show how far beyond it lies.
    """
    likeness = inflation_of([rest], fitted=2)
    return deviations if size >= _BEYOND_DOUBT * likeness * error else deviations / likeness


def _middle_ranks(points: Floats) -> Floats:
    """Ranks about their mean, equal points sharing theirs, with a deviation of 1; all 0 where all points are equal."""
    places, counts = np.unique(points, return_inverse=True, return_counts=True)[1:]
    ranks = (np.cumsum(counts) - (counts + 1) / 2)[places.ravel()] - (len(points) - 1) / 2
    return np.asarray(ranks / (ranks.std() or 1.0), np.float64)


def _rank_sums(ranks: Floats) -> Floats:
    """For each row and each cut after k values, how many deviations the sum of the first k lies off."""
    count = ranks.shape[1]
    k = np.arange(1, count)
    sums: Floats = np.abs(np.cumsum(ranks, axis=1)[:, :-1]) / np.sqrt(k * (count - k) / (count - 1))
    return sums


def _chance_of_trend(deviations: float) -> float:
    """How often a steady run shows at least as much."""
    return math.erfc(deviations / math.sqrt(2))


def _chance_of_shift(deviations: float, count: int) -> float:
    """The same of a run of so many points, wherever it is cut."""
    null = _permuted(count)
    beyond = len(null) - int(np.searchsorted(null, deviations - 1e-9))
    return (beyond + 1) / (len(null) + 1)


@functools.lru_cache(maxsize=64)
def _permuted(count: int) -> Floats:
    """The largest sum of each of many permutations, in order."""
    generator = np.random.default_rng(_SEED)
    ranks = np.tile(_middle_ranks(np.arange(count, dtype=np.float64)), (_PERMUTATIONS, 1))
    return np.sort(_rank_sums(generator.permuted(ranks, axis=1)).max(axis=1))


def inflation_of(series: Sequence[Floats], fitted: int = 1) -> float:
    """√((1+ρ)/(1−ρ)) for the lag-one correlation of the ranks, at least 1.

    ρ is the runs' mean, since one machine made them all and a short series tells little of its own, corrected for its bias:
    (1+3ρ)/n for values about their level, (2+4ρ)/n for what is left of a line (`fitted`: how many parameters were taken out).
    """
    found = float(np.mean([_rank_correlation(values) for values in series]))
    shortest = min(len(values) for values in series)
    corrected = min(_MOST_CORRELATION, max(0.0, found + (fitted + (fitted + 2) * found) / shortest))
    return math.sqrt((1 + corrected) / (1 - corrected))


def _rank_correlation(values: Floats) -> float:
    """Of each value with the one before it; equal values alone tell nothing."""
    if np.ptp(values) == 0:
        return 0.0
    ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable") - (len(values) - 1) / 2
    return float((ranks[1:] * ranks[:-1]).sum() / (ranks * ranks).sum())


def quarter_spread(values: Floats) -> float:
    """The interquartile range as a standard deviation."""
    low, high = np.quantile(values, [0.25, 0.75])
    return float(high - low) / 1.349

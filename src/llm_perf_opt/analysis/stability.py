"""What the repeats inside one run show: how much they scatter, how alike neighbors are, whether the machine moved meanwhile.

All of it is on logarithms of times. A run is called drifting or shifted only where chance hardly explains it (`SURE`), by two tests
of ranks, which outliers do not move:

- **drift**: Mann-Kendall's test of a trend, normal approximation with ties; its size is Theil and Sen's slope.
- **level shift**: the largest standardized rank sum over every place where the run may be cut in two (Pettitt's test with its
  ends weighted like its middle). Its null distribution is that of permutations, drawn once per number of repeats with a fixed seed.

Neighbors that resemble each other imitate both, without any change of the machine. So each statistic is divided by what that
likeness inflates it by, measured on what is left once the drift or the shift is taken out.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SURE = 0.004
"""A movement is called one where chance gives as much in this share of steady runs."""
LEAST_REPEATS = 7
"""Fewer cannot show a movement so surely, even if each repeat is slower than the one before."""
MOST_POINTS = 60
"""Longer runs are folded to medians of consecutive repeats: pairs grow with the square."""
_PERMUTATIONS = 20_000
_SEED = 20240229
_MOST_CORRELATION = 0.9


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


def stability(logs: Floats) -> Stability:
    """Whether a run whose repeats took these times, as logarithms, kept its level."""
    repeats = len(logs)
    if repeats < LEAST_REPEATS:
        return Stability(Movement.UNKNOWN, 0.0, 0, 1.0, repeats)
    fold = math.ceil(repeats / MOST_POINTS)
    points = np.asarray([np.median(part) for part in np.array_split(logs, math.ceil(repeats / fold))])
    if np.ptp(points) == 0:
        return Stability(Movement.STEADY, 0.0, 0, 1.0, repeats)
    drift, drift_left = _drift(points)
    shift, shift_left = _shift(points, repeats)
    # The one that is not there is taken out of nothing: what a shift leaves of a drift is a saw, what a drift leaves of a shift likewise.
    named, other = (drift, shift) if drift_left <= shift_left else (shift, drift)
    if named.p_value > SURE:
        named = other
    if named.p_value <= SURE:
        return Stability(named.movement, named.size, named.at, named.p_value, repeats)
    return Stability(Movement.STEADY, 0.0, 0, min(drift.p_value, shift.p_value), repeats)


def _drift(points: Floats) -> tuple[Stability, float]:
    """A drift from the first point to the last, with its p-value; and how much scatter it leaves."""
    count = len(points)
    earlier, later = np.triu_indices(count, 1)
    rises = points[later] - points[earlier]
    slope = float(np.median(rises / (later - earlier)))
    rest = points - slope * np.arange(count)
    rest -= np.median(rest)
    score = float(np.sign(rises).sum())
    ties = np.unique(points, return_counts=True)[1]
    variance = (count * (count - 1) * (2 * count + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    deviations = max(0.0, abs(score) - 1) / math.sqrt(variance) / inflation_of([rest], fitted=2)
    size = math.expm1(slope * (count - 1))
    return Stability(Movement.DRIFT, size, 0, math.erfc(deviations / math.sqrt(2)), count), float(np.abs(rest).sum())


def _shift(points: Floats, repeats: int) -> tuple[Stability, float]:
    """A shift of the level at the place that shows it best, likewise."""
    count = len(points)
    sums = _rank_sums(_middle_ranks(points)[None, :])[0]
    cut = int(np.argmax(sums)) + 1
    before, after = points[:cut], points[cut:]
    by = float(np.median(after) - np.median(before))
    rest = np.concatenate([before - np.median(before), after - np.median(after)])
    chance = _chance_of(float(sums[cut - 1]) / inflation_of([rest], fitted=2), count)
    at = round(cut * repeats / count) + 1
    return Stability(Movement.SHIFT, math.expm1(by), at, chance, count), float(np.abs(rest).sum())


def _middle_ranks(points: Floats) -> Floats:
    """Ranks about their mean, equal points sharing theirs; of variance 1."""
    places, counts = np.unique(points, return_inverse=True, return_counts=True)[1:]
    ends = np.cumsum(counts)
    ranks = (ends - (counts - 1) / 2)[places.ravel()]
    ranks = ranks - ranks.mean()
    return np.asarray(ranks / ranks.std(), np.float64)


def _rank_sums(ranks: Floats) -> Floats:
    """For each row and each cut after k values, how many deviations the sum of the first k lies off."""
    count = ranks.shape[1]
    k = np.arange(1, count)
    sums: Floats = np.abs(np.cumsum(ranks, axis=1)[:, :-1]) / np.sqrt(k * (count - k) / (count - 1))
    return sums


def _chance_of(statistic: float, count: int) -> float:
    """How often a steady run of so many points shows at least as much."""
    null = _permuted(count)
    beyond = len(null) - int(np.searchsorted(null, statistic - 1e-9))
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

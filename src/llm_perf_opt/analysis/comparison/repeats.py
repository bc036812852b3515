"""What the repeats inside one run show: how alike neighbours are, how far they drift, how much they scatter."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_MOST_CORRELATION = 0.9
_MEDIAN_VARIANCE = math.pi / 2
"""Variance of a median over that of a mean, for normal noise."""
_SURE_OF_DRIFT = 3.5
"""Halves of a run that lie further apart than this many standard errors have drifted; nearer ones may by chance."""


def inflation_of(series: Sequence[Floats]) -> float:
    """√((1+ρ)/(1−ρ)) for the lag-one correlation of the ranks, at least 1.

    ρ is the runs' mean, since one machine made them all and a short series tells little of its own, corrected for its bias.
    """
    found = float(np.mean([_rank_correlation(values) for values in series]))
    corrected = min(_MOST_CORRELATION, max(0.0, found + (1 + 3 * found) / min(len(values) for values in series)))
    return math.sqrt((1 + corrected) / (1 - corrected))


def _rank_correlation(values: Floats) -> float:
    """Of each value with the one before it; equal values alone tell nothing."""
    if np.ptp(values) == 0:
        return 0.0
    ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable") - (len(values) - 1) / 2
    return float((ranks[1:] * ranks[:-1]).sum() / (ranks * ranks).sum())


def drift(series: Floats, inflation: float) -> float:
    """How far the halves of a run lie apart, as a deviation, where their own noise does not explain it."""
    half = len(series) // 2
    if half == 0:
        return 0.0
    first, second = series[:half], series[-half:]
    middles = float(np.median(first)), float(np.median(second))
    deviation = quarter_spread(np.concatenate([first - middles[0], second - middles[1]]))
    noise = inflation * deviation * math.sqrt(_MEDIAN_VARIANCE * 2 / half)
    apart = abs(middles[1] - middles[0])
    return apart / math.sqrt(2) if apart > _SURE_OF_DRIFT * noise else 0.0


def quarter_spread(values: Floats) -> float:
    """The interquartile range as a standard deviation."""
    low, high = np.quantile(values, [0.25, 0.75])
    return float(high - low) / 1.349

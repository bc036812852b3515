"""Statistics of small samples, without assumptions about their distribution; and checks of numbers that users enter."""

import functools
import itertools
import math
import random
from collections.abc import Sequence

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import Distribution, Drift, Maybe, Missing


@functools.lru_cache(maxsize=256)
def student_quantile(share: float, freedom: int | None) -> float:
    """Return a quantile (0.5 < share < 1) of Student's t with integer degrees of freedom; None: of the normal distribution."""
    low, high = 0.0, 1e5
    for _ in range(100):
        middle = (low + high) / 2
        inside = math.erf(middle / math.sqrt(2)) if freedom is None else _inside_student(middle, freedom)
        if (1 + inside) / 2 < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _inside_student(t: float, freedom: int) -> float:
    """Return P(|T| < t) from the finite sums for integer degrees of freedom."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2 == 1
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(1 if odd else 0, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


_MOST = 10**12
"""Larger than any real size; products of a few such numbers still fit a float."""


def whole_number(field: str, value: object, *, at_least: int) -> int:
    """Return the value as an int, or raise a ConfigError that names the field. Booleans are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{field} must be a whole number, not {shown(value)}.")
    if value < at_least:
        raise ConfigError(f"{field} must be at least {at_least}, not {value}.")
    if value > _MOST:
        raise ConfigError(f"{field} must be at most {_MOST:,}.")
    return value


def positive_number(field: str, value: object) -> float:
    """Return the value as a finite float above zero, or raise a ConfigError that names the field."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{field} must be a number, not {shown(value)}.")
    if not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{field} must be above zero and finite, not {value}.")
    return float(value)


def shown(value: object) -> str:
    """Return a value for an error message: its text, shortened, and its type."""
    kind = "null" if value is None else type(value).__name__
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({kind})"


CONFIDENCE = 0.95
LEAST_BEYOND = 5
"""A percentile is reported only if at least this many values are expected beyond it."""
PERCENTILE_METHOD = "linear interpolation between order statistics (Hyndman and Fan's type 7)"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of the sample lies, by linear interpolation."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    weight = place - low
    if weight == 0 or ordered[low] == ordered[high]:
        return float(ordered[low])
    return ordered[low] * (1 - weight) + ordered[high] * weight


def least_values(share: float) -> int:
    """Return the sample size that this percentile needs."""
    return round(LEAST_BEYOND / (1 - share))


def supported_percentile(values: Sequence[float], share: float) -> Maybe[float]:
    """Return the percentile, or Missing if the sample is too small for it."""
    needed = least_values(share)
    if len(values) < needed:
        return Missing(f"{len(values)} values; p{share * 100:g} needs {needed}")
    return percentile(values, share)


def median_interval(values: Sequence[float]) -> Maybe[tuple[float, float]]:
    """Return the 95 % interval of the median from order statistics; valid for any continuous distribution."""
    n = len(values)
    rank = _interval_rank(n)
    if rank is None:
        return Missing(f"{n} values; a 95 % interval of the median needs {_least_for_interval()}")
    ordered = sorted(values)
    return float(ordered[rank]), float(ordered[n - 1 - rank])


def summarize(values: Sequence[float]) -> Distribution:
    """Return the median with its interval, quartiles, extremes, and the percentiles that the sample supports."""
    interval = median_interval(values)
    low, high = (interval, interval) if isinstance(interval, Missing) else interval
    return Distribution(
        n=len(values),
        median=percentile(values, 0.5),
        ci_low=low,
        ci_high=high,
        q1=percentile(values, 0.25),
        q3=percentile(values, 0.75),
        minimum=float(min(values)),
        maximum=float(max(values)),
        p90=supported_percentile(values, 0.90),
        p99=supported_percentile(values, 0.99),
    )


def rate_over(amount: float, times_ns: Sequence[float]) -> Distribution:
    """Return the distribution of a rate per second, from the times: the rate at their median, quartiles and extremes.

    It is not the distribution of each repeat's rate: with an even number of repeats, the medians differ.
    """
    time = summarize(times_ns)

    def rate(ns: float) -> float:
        return amount * 1e9 / ns

    def high_percentile(share: float, carried: Maybe[float]) -> Maybe[float]:
        return carried if isinstance(carried, Missing) else rate(percentile(times_ns, 1 - share))

    return Distribution(
        n=time.n,
        median=rate(time.median),
        ci_low=time.ci_high if isinstance(time.ci_high, Missing) else rate(time.ci_high),
        ci_high=time.ci_low if isinstance(time.ci_low, Missing) else rate(time.ci_low),
        q1=rate(time.q3),
        q3=rate(time.q1),
        minimum=rate(time.maximum),
        maximum=rate(time.minimum),
        p90=high_percentile(0.90, time.p90),
        p99=high_percentile(0.99, time.p99),
    )


def ends(value: Distribution) -> tuple[float, float]:
    """Return the 95 % interval of the median, or the minimum and maximum if there are too few values for it."""
    if isinstance(value.ci_low, Missing) or isinstance(value.ci_high, Missing):
        return value.minimum, value.maximum
    return value.ci_low, value.ci_high


def within_target(values: Sequence[float], target: float) -> bool:
    """Return whether half the interval of the median is at most `target` times the median."""
    relative = summarize(values).ci_relative if values else Missing("no values")
    return not isinstance(relative, Missing) and relative <= target


def drift(steps_by_iteration: Sequence[Sequence[int]], first_context: int) -> Maybe[Drift]:
    """Return the slope of the step time over the context (median of pairwise slopes), with a bootstrap interval."""
    steps = len(steps_by_iteration[0]) if steps_by_iteration else 0
    if steps < 8:
        return Missing(f"{steps} decode steps; a slope needs 8")
    profile = _profile(steps_by_iteration)
    slope = _theil_sen(profile)
    interval = _slope_interval(steps_by_iteration)
    low, high = (interval, interval) if isinstance(interval, Missing) else interval
    middle = percentile([value for _, value in profile], 0.5)
    return Drift(
        ns_per_token=slope,
        ci_low=low,
        ci_high=high,
        first_context=first_context,
        last_context=first_context + steps - 1,
        share=slope * (steps - 1) / middle if middle else 0.0,
    )


def _slope_interval(steps_by_iteration: Sequence[Sequence[int]]) -> Maybe[tuple[float, float]]:
    """Return the 95 % interval of the slope. It needs as many repeats as the interval of a median."""
    repeats, needed = len(steps_by_iteration), _least_for_interval()
    if repeats < needed:
        return Missing(f"{repeats} repeats; a 95 % interval of the slope needs {needed}")
    draw = random.Random(0)  # noqa: S311 - reproducible, not secret
    resampled = []
    for _ in range(100):
        chosen = [steps_by_iteration[draw.randrange(repeats)] for _ in range(repeats)]
        resampled.append(_theil_sen(_profile(chosen)))
    return percentile(resampled, 0.025), percentile(resampled, 0.975)


def _profile(steps_by_iteration: Sequence[Sequence[int]]) -> list[tuple[int, float]]:
    """Return (step, median over iterations) for about 64 steps, because the number of pairs grows quadratically."""
    steps = len(steps_by_iteration[0])
    return [(step, percentile([row[step] for row in steps_by_iteration], 0.5)) for step in range(0, steps, max(1, steps // 64))]


def _theil_sen(profile: Sequence[tuple[int, float]]) -> float:
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(profile, 2)]
    return percentile(slopes, 0.5)


@functools.lru_cache(maxsize=1024)
def _interval_rank(n: int) -> int | None:
    """Return the largest rank r for which [r-th smallest, r-th largest] covers the median with `CONFIDENCE`."""
    outside = (1 - CONFIDENCE) / 2
    first = max(0, n // 2 - 10 * math.isqrt(n))  # twenty standard deviations below the middle
    chance = math.exp(math.lgamma(n + 1) - math.lgamma(first + 1) - math.lgamma(n - first + 1) - n * math.log(2))
    tail = 0.0
    best = None
    for rank in range(first, n // 2):
        tail += chance
        if tail > outside:
            break
        best = rank
        chance *= (n - rank) / (rank + 1)
    return best


def _least_for_interval() -> int:
    return next(n for n in range(1, 100) if _interval_rank(n) is not None)


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Divide `total` into whole shares in the proportions of the weights, by largest remainder: they sum to it exactly."""
    whole = sum(weights)
    if whole <= 0:
        raise ValueError("no weight is above zero")
    shares = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda place: (-(total * weights[place] % whole), place))
    for place in by_remainder[: total - sum(shares)]:
        shares[place] += 1
    return shares

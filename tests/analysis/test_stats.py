"""Statistics of small samples: against numpy, against the binomial, and against a simulation with a known truth."""

import itertools
import math
import random
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from llm_perf_opt.analysis.stats import (
    drift,
    median_interval,
    percentile,
    summarize,
    supported_percentile,
    within_target,
)
from llm_perf_opt.core.records import Distribution, Drift, Missing
from work import lines_run

VALUES = st.floats(-1e9, 1e9, allow_subnormal=False)
SAMPLES = st.lists(VALUES, min_size=1, max_size=80)


def of(value: object) -> Drift:
    assert isinstance(value, Drift)
    return value


# --- percentiles ------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(SAMPLES, st.floats(0, 1))
@example([1.0, 2.0], 1.0)
@example([5.0], 0.3)
def test_a_percentile_is_numpys_linear_one(values: list[float], share: float) -> None:
    expected = float(np.percentile(values, share * 100, method="linear"))
    assert percentile(values, share) == pytest.approx(expected, rel=1e-12, abs=1e-9 * max(map(abs, values)))


@settings(deadline=None)
@given(SAMPLES, st.floats(0, 1), st.floats(0, 1), st.randoms(use_true_random=False))
def test_a_percentile_stays_inside_grows_and_ignores_order(
    values: list[float], one: float, other: float, draw: random.Random
) -> None:
    low, high = sorted((one, other))
    assert min(values) <= percentile(values, low) + 1e-6
    assert percentile(values, low) <= percentile(values, high) + 1e-6 * max(1, *map(abs, values))
    shuffled = draw.sample(values, len(values))
    assert percentile(shuffled, low) == percentile(values, low)


def test_percentiles_to_the_eye() -> None:
    values = [40, 10, 30, 20]
    # places 0, 1, 2, 3 hold 10, 20, 30, 40; a quarter of the way is place 0.75: 10 + 0.75 · 10
    assert [percentile(values, share) for share in (0, 0.25, 0.5, 0.75, 1)] == [10, 17.5, 25, 32.5, 40]


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 9), st.floats(0, 1))
def test_equal_values_have_only_one_percentile(value: float, count: int, share: float) -> None:
    assert percentile([value] * count, share) == value, "no rounding, no overflow"


def test_nothing_has_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


@pytest.mark.parametrize(
    ("share", "needed"),
    [(0.9, 50), (0.99, 500), (0.5, 10)],  # five beyond it: 5 / (1 − 0.9), 5 / (1 − 0.99), 5 / (1 − 0.5)
)
def test_a_percentile_is_given_only_where_five_values_lie_beyond(share: float, needed: int) -> None:
    few, enough = list(range(needed - 1)), list(range(needed))
    assert supported_percentile(few, share) == Missing(f"{needed - 1} values; p{share * 100:g} needs {needed}")
    assert supported_percentile(enough, share) == percentile(enough, share)


# --- the interval of a median -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(6))
def test_five_values_carry_no_interval(count: int) -> None:
    # the widest one, from the least to the greatest, misses the median with a chance of 2 · ½ⁿ: 6.25 % at 5, 3.1 % at 6
    assert median_interval(list(range(count))) == Missing(f"{count} values; a 95 % interval of the median needs 6")


@pytest.mark.parametrize(
    ("count", "lower", "upper"),
    [(6, 1, 6), (8, 1, 8), (9, 2, 8), (10, 2, 9), (12, 3, 10), (15, 4, 12), (20, 6, 15), (25, 8, 18), (30, 10, 21), (50, 18, 33)],
)
def test_the_ranks_printed_in_tables_of_the_sign_test(count: int, lower: int, upper: int) -> None:
    assert median_interval(list(range(1, count + 1))) == (lower, upper)


def coverage(count: int, lower: int) -> Fraction:
    """The chance that the median lies between the `lower`-th smallest and the `lower`-th largest of `count` values."""
    outside = sum(math.comb(count, below) for below in range(lower))
    return 1 - Fraction(2 * outside, 2**count)


@pytest.mark.parametrize("count", [*range(6, 80), 100, 101, 399, 400, 401, 1000, 3001])
@pytest.mark.slow
def test_the_interval_is_the_narrowest_that_still_covers_95_percent(count: int) -> None:
    interval = median_interval(list(range(1, count + 1)))
    assert not isinstance(interval, Missing)
    lower, upper = (int(end) for end in interval)
    assert lower + upper == count + 1, "as many values are left out below as above"
    assert coverage(count, lower) >= Fraction(95, 100)
    if lower < count // 2:
        assert coverage(count, lower + 1) < Fraction(95, 100)


@settings(deadline=None)
@given(st.lists(VALUES, min_size=6, max_size=200))
def test_the_interval_holds_the_median_and_ends_on_values_of_the_sample(values: list[float]) -> None:
    interval = median_interval(values)
    assert not isinstance(interval, Missing)
    low, high = interval
    assert low <= percentile(values, 0.5) <= high
    assert {low, high} <= set(values)


@pytest.mark.parametrize("count", [6, 10, 15, 40])
@pytest.mark.parametrize(
    ("draw_one", "median"),
    [
        (lambda draw: draw.gauss(5, 2), 5.0),
        (lambda draw: draw.expovariate(1), math.log(2)),
        (lambda draw: draw.lognormvariate(0, 1.5), 1.0),  # a long tail, as latencies have
    ],
    ids=["normal", "exponential", "lognormal"],
)
def test_19_of_20_intervals_hold_the_true_median(count: int, draw_one: Callable[[random.Random], float], median: float) -> None:
    draw = random.Random(20260102)
    trials, held = 3000, 0
    for _ in range(trials):
        interval = median_interval([draw_one(draw) for _ in range(count)])
        assert not isinstance(interval, Missing)
        held += interval[0] <= median <= interval[1]
    assert held / trials >= 0.95


def test_a_large_sample_does_not_slow_down_the_measurement() -> None:
    sample = range(100_001)
    assert not isinstance(median_interval(sample), Missing)
    assert lines_run(lambda: median_interval(sample)) < 10_000, "asked after every repeat; adding up exact binomials took minutes"


# --- the summary ------------------------------------------------------------------------------------------------------


def test_a_summary_to_the_eye() -> None:
    summary = summarize([3, 1, 2, 5, 4, 6, 7, 9, 8, 10])
    assert (summary.n, summary.median, summary.minimum, summary.maximum) == (10, 5.5, 1, 10)
    assert (summary.ci_low, summary.ci_high) == (2, 9), "second and ninth of ten"
    assert (summary.q1, summary.q3, summary.iqr) == (3.25, 7.75, 4.5)
    assert summary.ci_relative == pytest.approx((9 - 2) / 2 / 5.5)
    assert summary.p90 == Missing("10 values; p90 needs 50")


def test_one_value_is_its_own_summary() -> None:
    summary = summarize([7])
    assert (summary.n, summary.median, summary.q1, summary.q3, summary.iqr) == (1, 7, 7, 7, 0)
    assert summary.ci_low == summary.ci_high == summary.ci_relative == Missing("1 values; a 95 % interval of the median needs 6")


@settings(deadline=None)
@given(SAMPLES)
def test_a_summary_is_in_order(values: list[float]) -> None:
    summary = summarize(values)
    slack = 1e-9 * max(1, *map(abs, values))
    in_order = [summary.minimum, summary.q1, summary.median, summary.q3, summary.maximum]
    assert all(earlier <= later + slack for earlier, later in itertools.pairwise(in_order))
    assert isinstance(summary.p90, Missing) == (len(values) < 50)
    assert isinstance(summary.p99, Missing)


def test_a_median_of_zero_has_no_relative_interval() -> None:
    assert summarize([-3, -2, -1, 0, 0, 0, 1, 2, 3]).ci_relative == Missing("the median is zero")
    whole = summarize([1.0] * 6)
    assert Distribution(**{**vars(whole), "ci_high": Missing("lost")}).ci_relative == Missing("no interval")


def test_the_target_is_met_when_half_the_interval_is_within_it() -> None:
    # of ten values the interval goes from the second, 98, to the ninth, 102: half its width is 2, of the median 100
    values = [90, 98, 99, 99, 100, 100, 101, 101, 102, 150]
    assert within_target(values, 0.02)
    assert not within_target(values, 0.0199)
    assert not within_target(values[:5], 0.5), "five values never do"
    assert not within_target([], 0.5)
    assert within_target([100] * 6, 0.0)


# --- drift ------------------------------------------------------------------------------------------------------------


def growing(steps: int, start: int = 1000, slope: int = 7) -> list[int]:
    return [start + slope * step for step in range(steps)]


def test_linear_growth_is_found_exactly() -> None:
    found = of(drift([growing(11)] * 6, first_context=33))
    assert found.ns_per_token == found.ci_low == found.ci_high == 7
    assert (found.first_context, found.last_context) == (33, 43), "eleven steps, each with one token more"
    # from 1000 to 1070 around a median step of 1035
    assert found.share == pytest.approx(70 / 1035)


@pytest.mark.parametrize("steps", [8, 63, 64, 65, 127, 128, 1000])
def test_thinning_long_series_keeps_the_slope(steps: int) -> None:
    found = of(drift([growing(steps, slope=-1, start=5000)] * 3, first_context=1))
    assert found.ns_per_token == -1
    assert found.last_context == steps


def test_a_steady_step_does_not_drift() -> None:
    found = of(drift([[500] * 20] * 10, first_context=1))
    assert found.ns_per_token == found.ci_low == found.ci_high == found.share == 0


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_seven_steps_have_no_slope(steps: int) -> None:
    assert drift([[1] * steps] * 9, first_context=1) == Missing(f"{steps} decode steps; a slope needs 8")


def test_nothing_measured_has_no_slope() -> None:
    assert drift([], first_context=1) == Missing("0 decode steps; a slope needs 8")


def test_a_few_wild_steps_do_not_bend_the_slope() -> None:
    wild = growing(20)
    wild[3] = wild[11] = 900_000
    assert of(drift([growing(20)] * 4 + [wild] * 2, first_context=1)).ns_per_token == 7
    assert of(drift([wild] * 5, first_context=1)).ns_per_token == pytest.approx(7, abs=0.1)


def test_the_interval_of_a_noisy_slope_contains_the_truth_and_detects_growth() -> None:
    draw = random.Random(5)
    noisy = [[value + round(draw.gauss(0, 40)) for value in growing(40, slope=10)] for _ in range(30)]
    found = of(drift(noisy, first_context=1))
    assert not isinstance(found.ci_low, Missing)
    assert not isinstance(found.ci_high, Missing)
    assert found.ci_low <= 10 <= found.ci_high
    assert not isinstance(found.ci_low, Missing)
    assert found.ci_low > 0
    assert found == drift(noisy, first_context=1), "the same data give the same interval"


@pytest.mark.parametrize("repeats", [1, 2, 5])
def test_few_repeats_carry_no_interval_of_a_slope(repeats: int) -> None:
    found = of(drift([growing(20)] * repeats, first_context=1))
    assert isinstance(found.ci_low, Missing)
    assert isinstance(found.ci_low, Missing)
    assert found.ci_high == found.ci_low
    assert found.ns_per_token == 7


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 10**9), min_size=8, max_size=30), st.integers(1, 5), st.integers(-1000, 1000))
def test_a_constant_added_to_every_step_changes_no_slope(steps: list[int], iterations: int, added: int) -> None:
    assume(min(steps) + added > 0)
    before, after = (of(drift([[step + more for step in steps]] * iterations, 1)) for more in (0, added))
    assert after.ns_per_token == pytest.approx(before.ns_per_token, rel=1e-9, abs=1e-6)


def test_steps_of_no_length_have_no_share() -> None:
    assert of(drift([[0] * 8], first_context=1)).share == 0

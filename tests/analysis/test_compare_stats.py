"""Whether a change is called real at the rate it should be: simulations with known truth, and real repeats of one thing."""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_perf_opt.analysis.compare_stats import (
    DEFAULT_JUDGEMENT,
    Effect,
    Judgement,
    effect,
    paired_effect,
    student_quantile,
)
from llm_perf_opt.records import Missing

PAIRS = 200
NONE = "not distinguishable"
TINY_REPEATS = json.loads((Path(__file__).parents[1] / "fixtures/compare/tiny_repeats.json").read_text())["runs"]
ALONE = Judgement(smallest=0.0, process_spread=0.0)
"""Nothing but what the repeats themselves say."""


def noise(generator: np.random.Generator, n: int, deviation: float, likeness: float = 0.0, level: float = 100.0) -> list[float]:
    """Log-normal repeats; `likeness` is the correlation of each with the one before."""
    steps = generator.normal(size=n + 50)
    values = np.zeros(n + 50)
    for index in range(1, n + 50):
        values[index] = likeness * values[index - 1] + math.sqrt(1 - likeness**2) * steps[index]
    return list(level * np.exp(deviation * values[50:]))


def verdicts(
    *,
    n: int = 30,
    deviation: float = 0.02,
    likeness: float = 0.0,
    slowdown: float = 0.0,
    processes: float = 0.0,
    runs: int = 1,
    judgement: Judgement = DEFAULT_JUDGEMENT,
) -> list[Effect]:
    """Effects of `PAIRS` simulated pairs; `processes` is the deviation from one process to the next."""
    generator = np.random.default_rng(7)

    def side(level: float) -> list[list[float]]:
        shifts = np.exp(processes * generator.normal(size=runs))
        return [noise(generator, n, deviation, likeness, level * shift) for shift in shifts]

    found = []
    for _ in range(PAIRS):
        one = effect(side(100.0), side(100.0 * (1 + slowdown)), judgement=judgement)
        assert not isinstance(one, Missing)
        found.append(one)
    return found


def share(found: Sequence[Effect], verdict: str) -> float:
    return sum(one.verdict == verdict for one in found) / len(found)


@pytest.mark.parametrize("n", [10, 30])
@pytest.mark.parametrize("likeness", [0.0, 0.6])
def test_the_same_thing_twice_is_rarely_called_a_change(n: int, likeness: float) -> None:
    assert 1 - share(verdicts(n=n, likeness=likeness), NONE) <= 0.05


def test_a_slowdown_of_5_percent_in_2_percent_noise_is_found() -> None:
    assert share(verdicts(slowdown=0.05), "slower") >= 0.95
    assert share(verdicts(slowdown=-0.05), "faster") >= 0.95


def test_three_runs_a_side_find_it_with_ten_repeats_each() -> None:
    assert share(verdicts(n=10, slowdown=0.05, processes=0.005, runs=3), "slower") >= 0.95


@pytest.mark.parametrize("runs", [2, 3, 5])
def test_processes_that_differ_are_no_change_where_runs_measure_it(runs: int) -> None:
    """Ten times the spread that would be assumed. Measured, the rate is 5 %; of 200 pairs, chance leaves it below 9 %."""
    found = verdicts(n=10, processes=0.10, runs=runs)
    assert 1 - share(found, NONE) <= 0.05 + 2.5 * math.sqrt(0.05 * 0.95 / PAIRS)
    assert np.median([one.uncertainty.between for one in found]) == pytest.approx(
        0.1, rel=0.25
    )  # a few runs' deviation is skewed


def test_the_interval_covers_what_is_true() -> None:
    found = verdicts(slowdown=0.05, judgement=ALONE)
    assert np.mean([one.low <= 0.05 <= one.high for one in found]) >= 0.94


def test_likeness_of_neighbours_widens_the_interval() -> None:
    free, alike = (np.mean([one.uncertainty.inside for one in verdicts(likeness=rho)]) for rho in (0.0, 0.7))
    assert alike > 1.5 * free


@pytest.mark.parametrize("stage", ["prefill_ns", "decode_ns"])
def test_real_repeats_of_one_thing_on_a_busy_machine_are_not_told_apart(stage: str) -> None:
    """Their medians lie up to a factor of five apart: a single run a side must not be believed, two a side already know."""
    series = [run[stage] for run in TINY_REPEATS]
    medians = [float(np.median(values)) for values in series]
    assert max(medians) / min(medians) > 3
    single = [effect([one], [other]) for one, other in itertools.combinations(series, 2)]
    assert len(single) == 120
    assert sum(not isinstance(one, Missing) and one.verdict != NONE for one in single) <= 0.05 * 120
    believing = Judgement(restless=math.inf)
    believed = [effect([one], [other], judgement=believing) for one, other in itertools.combinations(series, 2)]
    assert sum(not isinstance(one, Missing) and one.verdict != NONE for one in believed) > 40, "the rule is what keeps them apart"
    for first in range(len(series) - 3):
        one = effect([series[first], series[first + 2]], [series[first + 1], series[first + 3]])
        assert not isinstance(one, Missing)
        assert one.verdict == NONE
        assert one.uncertainty.measured


def test_what_the_repeats_scatter_decides_whether_one_run_is_enough() -> None:
    generator = np.random.default_rng(1)
    quiet = effect([noise(generator, 30, 0.005)], [noise(generator, 30, 0.005, level=130)])
    restless = effect([noise(generator, 30, 0.05)], [noise(generator, 30, 0.05, level=130)])
    assert not isinstance(quiet, Missing)
    assert not isinstance(restless, Missing)
    assert (quiet.verdict, quiet.uncertainty.restless) == ("slower", False)
    assert (restless.verdict, restless.uncertainty.restless) == (NONE, True)
    large = effect([noise(generator, 30, 0.05)], [noise(generator, 30, 0.05, level=300)])
    assert not isinstance(large, Missing)
    assert (large.verdict, large.uncertainty.restless) == ("slower", True), "a factor of three is no accident of that machine"


def test_a_run_that_slides_widens_its_own_interval() -> None:
    flat = [100 + index % 2 * 0.1 for index in range(20)]
    sliding = [100 + index * 0.25 for index in range(20)]
    steady, drifting = effect([flat], [flat]), effect([flat], [sliding])
    assert not isinstance(steady, Missing)
    assert not isinstance(drifting, Missing)
    assert steady.uncertainty.between == DEFAULT_JUDGEMENT.process_spread
    assert drifting.uncertainty.between > DEFAULT_JUDGEMENT.process_spread


def test_a_sure_but_small_change_gets_no_verdict() -> None:
    runs = [[[100.0 + 0.01 * index for index in range(10)]] * 3, [[100.5 + 0.01 * index for index in range(10)]] * 3]
    found, asked = effect(runs[0], runs[1]), effect(runs[0], runs[1], judgement=Judgement(smallest=0.001))
    assert not isinstance(found, Missing)
    assert not isinstance(asked, Missing)
    assert found.low > 0
    assert (found.verdict, asked.verdict) == (NONE, "slower")


def test_more_throughput_is_faster() -> None:
    slow, fast = [[100.0, 101, 100, 101, 100, 101]], [[120.0, 121, 120, 121, 120, 121]]
    rates, times = effect(slow, fast, True), effect(slow, fast)
    assert not isinstance(rates, Missing)
    assert not isinstance(times, Missing)
    assert (rates.verdict, times.verdict) == ("faster", "slower")
    assert rates.change == pytest.approx(0.2, abs=0.01)


def test_pairing_cancels_the_growth_with_the_context() -> None:
    """Steps grow fivefold; the new side is 5 % slower at each. Unpaired repeats would have to see that through the growth."""
    generator = np.random.default_rng(3)
    growth = np.linspace(100, 500, 40)
    base = [(growth * np.exp(0.01 * generator.normal(size=40))).tolist() for _ in range(12)]
    new = [(growth * 1.05 * np.exp(0.01 * generator.normal(size=40))).tolist() for _ in range(12)]
    found = paired_effect([base], [new])
    assert not isinstance(found, Missing)
    assert found.change == pytest.approx(0.05, abs=0.004)
    assert (found.verdict, found.paired_steps) == ("slower", 40)
    cut = paired_effect([base], [[row[:10] for row in new]])
    assert not isinstance(cut, Missing)
    assert cut.paired_steps == 10
    assert cut.change == pytest.approx(0.05, abs=0.008)


def test_long_decodes_stay_cheap() -> None:
    rows = [[100.0 + step % 7 + repeat for step in range(5000)] for repeat in range(8)]
    found = paired_effect([rows], [rows])
    assert not isinstance(found, Missing)
    assert (found.change, found.paired_steps) == (0.0, 5000)


@pytest.mark.parametrize(
    ("base", "new", "why"),
    [
        ([], [[1.0] * 6], "the base side has no run"),
        ([[1.0] * 6], [[1.0] * 5], "5 repeats; an interval needs 6"),
        ([[1.0] * 5 + [0.0]], [[1.0] * 6], "not above zero"),
        ([[1.0] * 5 + [math.nan]], [[1.0] * 6], "not above zero"),
    ],
)
def test_what_carries_no_interval_says_why(base: list[list[float]], new: list[list[float]], why: str) -> None:
    found = effect(base, new)
    assert isinstance(found, Missing)
    assert why in found.why


def test_steps_that_are_not_there_say_so() -> None:
    assert isinstance(paired_effect([[[]] * 6], [[[1.0]] * 6]), Missing)
    assert isinstance(paired_effect([[[1.0]] * 3], [[[1.0]] * 6]), Missing)


series = st.lists(st.floats(1.0, 1e6), min_size=6, max_size=12)


@settings(max_examples=30, deadline=None)
@given(series, series)
def test_swapping_the_sides_turns_the_change_round(one: list[float], other: list[float]) -> None:
    there, back = effect([one], [other]), effect([other], [one])
    assert not isinstance(there, Missing)
    assert not isinstance(back, Missing)
    assert (1 + there.change) * (1 + back.change) == pytest.approx(1, rel=1e-6)
    opposite = {"faster": "slower", "slower": "faster", NONE: NONE}
    sure = min(abs(there.low), abs(there.high)) > 0.2 * (there.high - there.low)  # the draws differ: not at the edge
    assert there.verdict == opposite[back.verdict] or not sure


@settings(max_examples=30, deadline=None)
@given(series, series, st.floats(1e-3, 1e3))
def test_the_unit_does_not_matter(one: list[float], other: list[float], unit: float) -> None:
    plain, scaled = effect([one], [other]), effect([[value * unit for value in one]], [[value * unit for value in other]])
    assert not isinstance(plain, Missing)
    assert not isinstance(scaled, Missing)
    assert scaled.change == pytest.approx(plain.change, rel=1e-6, abs=1e-9)
    assert plain.low <= plain.change <= plain.high
    assert plain.low <= plain.bound_low <= plain.bound_high <= plain.high


@pytest.mark.parametrize(
    ("share_inside", "freedom", "expected"),
    [(0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 3, 3.182), (0.95, 4, 2.132), (0.975, 10, 2.228), (0.975, None, 1.960)],
)
def test_quantiles_are_those_of_the_tables(share_inside: float, freedom: int | None, expected: float) -> None:
    assert student_quantile(share_inside, freedom) == pytest.approx(expected, abs=5e-4)

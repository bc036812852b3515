"""Whether a change is called real at the rate it should be: simulations with known truth, and real repeats of one thing."""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_perf_opt.analysis.comparison.effects import Effect, Interval, Judgement, Order
from llm_perf_opt.analysis.comparison.statistics import (
    ACCELERATOR_SPREAD,
    effect,
    is_measured,
    paired_effect,
    runs_to_measure,
    usage_effect,
)
from llm_perf_opt.analysis.stability import Movement
from llm_perf_opt.core.records import Missing
from machine_noise import KINDS as MACHINES
from machine_noise import MOVING, Plan, pairs

PAIRS = 120
NONE = "not distinguishable"
FIXTURES = Path(__file__).parents[2] / "fixtures" / "compare"
TINY = json.loads((FIXTURES / "tiny_repeats.json").read_text())["sets"]
H200 = json.loads((FIXTURES / "h200_repeats.json").read_text())["runs"]
ON_ACCELERATOR = Judgement(process_spread=ACCELERATOR_SPREAD)
ON_CPU = Judgement()
ALONE = Judgement(smallest=0.0, process_spread=0.0)
"""Nothing but what the repeats themselves say."""
Runs = Sequence[Sequence[float]]


def interval_of(found: Effect) -> Interval:
    assert not isinstance(found.interval, Missing)
    return found.interval


def compared(base: Runs, new: Runs, judgement: Judgement = ON_ACCELERATOR) -> Effect:
    found = effect(base, new, judgement=judgement)
    assert not isinstance(found, Missing)
    return found


def likeness_noise(generator: np.random.Generator, n: int, likeness: float) -> npt.NDArray[np.float64]:
    """Each value is correlated with the one before."""
    steps = generator.normal(size=n + 50)
    values = np.zeros(n + 50)
    for index in range(1, n + 50):
        values[index] = likeness * values[index - 1] + math.sqrt(1 - likeness**2) * steps[index]
    return values[50:]


KINDS: dict[str, Callable[[np.random.Generator, int], npt.NDArray[np.float64]]] = {
    "log-normal": lambda generator, n: generator.normal(size=n),
    "heavy tails": lambda generator, n: generator.standard_t(3, size=n) / math.sqrt(3),
    "spikes": lambda generator, n: generator.normal(size=n) + (generator.random(n) < 0.1) * generator.exponential(15, size=n),
    "alike neighbors": lambda generator, n: likeness_noise(generator, n, 0.6),
}
"""Of deviation 1, but for the spikes: one repeat in ten is longer, by 15 deviations on average."""


def noise(
    generator: np.random.Generator, n: int, deviation: float, level: float = 100.0, kind: str = "log-normal"
) -> list[float]:
    return list(level * np.exp(deviation * KINDS[kind](generator, n)))


def verdicts(
    *,
    n: int = 30,
    deviation: float = 0.02,
    kind: str = "log-normal",
    slowdown: float = 0.0,
    processes: float = 0.0,
    runs: int = 1,
    judgement: Judgement = ON_ACCELERATOR,
) -> list[Effect]:
    """Effects of `PAIRS` simulated pairs; `processes` is the deviation from one process to the next."""
    generator = np.random.default_rng(7)

    def side(level: float) -> list[list[float]]:
        shifts = np.exp(processes * generator.normal(size=runs))
        return [noise(generator, n, deviation, level * shift, kind) for shift in shifts]

    return [compared(side(100.0), side(100.0 * (1 + slowdown)), judgement) for _ in range(PAIRS)]


def share(found: Sequence[Effect], verdict: str) -> float:
    return sum(one.verdict == verdict for one in found) / len(found)


def false_verdicts(found: Sequence[Effect]) -> int:
    """Of pairs of the same thing."""
    return sum(one.verdict != NONE for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("n", [10, 30])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_thing_twice_is_rarely_called_a_change(n: int, kind: str) -> None:
    assert false_verdicts(verdicts(n=n, kind=kind, processes=ACCELERATOR_SPREAD)) <= 0.05 * PAIRS


@pytest.mark.parametrize(
    ("runs", "processes", "kind"),
    [
        *[(2, 0.03, kind) for kind in KINDS],
        *[(3, 0.0, "log-normal"), (3, 0.10, "log-normal"), (3, 0.03, "heavy tails")],
        *[(5, 0.10, "spikes"), (5, 0.03, "alike neighbors")],
    ],
)
@pytest.mark.slow
def test_processes_that_differ_are_no_change_where_runs_measure_it(runs: int, processes: float, kind: str) -> None:
    """Up to ten times the spread that would be assumed; the true rate is 2 %."""
    found = verdicts(n=10, kind=kind, processes=processes, runs=runs)
    assert all(one.uncertainty.measured for one in found)
    assert false_verdicts(found) <= 0.05 * PAIRS


UNEVEN = [(2, 1), (2, 2), (3, 1), (1, 5)]
"""Runs on each side: few, and not as many on one as on the other."""


@pytest.mark.parametrize(
    ("counts", "processes", "judgement"),
    [
        *[(counts, 0.05, ON_ACCELERATOR) for counts in UNEVEN],
        *[(UNEVEN[0], spread, ON_ACCELERATOR) for spread in (0.01, 0.02)],
        *[(counts, 0.15, Judgement(process_spread=0.05, measured_from=4)) for counts in UNEVEN[1:3]],  # a CPU taken for 5 %
    ],
)
@pytest.mark.slow
def test_few_and_uneven_runs_that_differ_are_no_change(counts: tuple[int, int], processes: float, judgement: Judgement) -> None:
    """Whatever is assumed, and however far from it the processes are, as soon as one side has two runs."""
    generator = np.random.default_rng(11)

    def side(runs: int) -> list[list[float]]:
        return [noise(generator, 12, 0.01, 100 * math.exp(processes * generator.normal())) for _ in range(runs)]

    found = [compared(side(counts[0]), side(counts[1]), judgement) for _ in range(PAIRS)]
    assert false_verdicts(found) <= 0.05 * PAIRS
    beyond = [interval_of(one) for one in found]
    assert sum(one.bound_low > 0 for one in beyond) <= 0.1 * PAIRS, "a gate at no tolerance is one-sided at 95 %"


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.0, 0.02], ids=["to the byte", "resident"])
@pytest.mark.parametrize("processes", [0.001, 0.02, 0.1])
@pytest.mark.parametrize("counts", UNEVEN)
def test_memory_that_differs_between_runs_is_no_change(counts: tuple[int, int], processes: float, spread: float) -> None:
    generator = np.random.default_rng(13)
    judgement = Judgement(0.0, spread)
    wrong = 0
    for _ in range(PAIRS):
        base, new = ([4e9 * math.exp(processes * generator.normal()) for _ in range(count)] for count in counts)
        found = usage_effect(base, new, judgement)
        assert not isinstance(found, Missing)
        wrong += found.verdict != NONE
    assert wrong <= 0.05 * PAIRS


def test_two_runs_that_agree_leave_what_is_assumed() -> None:
    """One degree of freedom widens the interval only where the two runs differ."""
    run, slower = [[100.0, 100.1, 99.9, 100.0, 100.1, 99.9] for _ in range(2)], [[110.0, 110.1, 109.9, 110.0, 110.1, 109.9]]
    alike, apart = compared(run, slower), compared([run[0], [value * 1.02 for value in run[1]]], slower)
    assert (alike.verdict, apart.verdict) == ("slower", NONE)
    assert alike.uncertainty.between == ACCELERATOR_SPREAD
    assert interval_of(apart).high - interval_of(apart).low > 10 * (interval_of(alike).high - interval_of(alike).low)


@pytest.mark.parametrize("counts", [(5, 1), (1, 5), (20, 1), (8, 2)])
def test_many_runs_against_one_on_a_busy_machine_have_no_interval(counts: tuple[int, int]) -> None:
    """The machine has two states a factor of two apart; a side of one or two runs may be in one without showing it."""
    generator = np.random.default_rng(7)
    sides = [[noise(generator, 12, 0.025, 200 if generator.random() < 0.25 else 100) for _ in range(count)] for count in counts]
    found = compared(sides[0], sides[1], ON_CPU)
    assert isinstance(found.interval, Missing)
    assert found.verdict == NONE
    assert not found.uncertainty.measured
    quiet = compared(sides[0], sides[1], Judgement(process_spread=0.2, measured_from=4))
    assert not quiet.uncertainty.measured
    assert not isinstance(quiet.interval, Missing)


@pytest.mark.parametrize("chance", [0.15, 0.25])
@pytest.mark.slow
def test_states_of_a_machine_are_rarely_called_a_change_with_three_runs_per_side(chance: float) -> None:
    generator = np.random.default_rng(9)

    def side() -> list[list[float]]:
        return [noise(generator, 12, 0.025, 200 if generator.random() < chance else 100) for _ in range(3)]

    assert false_verdicts([compared(side(), side(), ON_CPU) for _ in range(PAIRS)]) <= 0.05 * PAIRS


@pytest.mark.slow
def test_the_spread_between_processes_is_measured() -> None:
    spreads = [one.uncertainty.between for one in verdicts(n=10, processes=0.10, runs=5)]
    assert np.median([spread for spread in spreads if not isinstance(spread, Missing)]) == pytest.approx(0.1, rel=0.1)


@pytest.mark.slow
def test_a_slowdown_of_5_percent_in_2_percent_noise_is_found() -> None:
    assert share(verdicts(slowdown=0.05), "slower") >= 0.95
    assert share(verdicts(slowdown=-0.05), "faster") >= 0.95


@pytest.mark.slow
def test_three_runs_per_side_detect_it_with_ten_repeats_each() -> None:
    assert share(verdicts(n=10, slowdown=0.05, processes=0.005, runs=3), "slower") >= 0.95
    assert share(verdicts(n=10, slowdown=0.05, processes=0.005, runs=3, judgement=ON_CPU), "slower") >= 0.95


def test_the_interval_covers_what_is_true() -> None:
    found = [interval_of(one) for one in verdicts(slowdown=0.05, judgement=ALONE)]
    assert np.mean([one.low <= 0.05 <= one.high for one in found]) >= 0.97
    assert np.mean([one.bound_low <= 0.05 for one in found]) >= 0.94


@pytest.mark.parametrize("runs", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_verdict_is_read_off_the_interval(runs: int) -> None:
    for one in verdicts(slowdown=0.03, runs=runs, processes=0.01):
        found = interval_of(one)
        assert (one.verdict == NONE) == (found.low <= 0 <= found.high or abs(one.change) < 0.01)


@pytest.mark.slow
def test_correlated_neighbors_widen_the_interval() -> None:
    free, alike = (np.mean([one.uncertainty.inside for one in verdicts(kind=kind)]) for kind in ("log-normal", "alike neighbors"))
    assert alike > 1.5 * free


# --- real repeats -------------------------------------------------------------------------------------------------------


def tiny(name: str, stage: str) -> list[list[float]]:
    return [run[stage] for run in TINY[name]["runs"]]


TINY_STAGES = [(name, stage) for name in TINY for stage in ("prefill_ns", "decode_ns")]


@pytest.mark.parametrize(("name", "stage"), TINY_STAGES)
@pytest.mark.slow
def test_single_equal_runs_on_a_cpu_are_never_called_different(name: str, stage: str) -> None:
    """What is assumed of an accelerator would call many of these pairs a change: a level is what the machine gave a run."""
    pairs = list(itertools.combinations(tiny(name, stage), 2))
    assert len(pairs) >= 100
    found = [compared([one], [other], ON_CPU) for one, other in pairs]
    assert {one.verdict for one in found} == {NONE}
    assert all(isinstance(one.interval, Missing) for one in found)
    assert any(compared([one], [other]).verdict != NONE for one, other in pairs), "the assumption is what must not be made"


def test_two_quiet_equal_runs_differ_by_a_factor_of_two() -> None:
    """So the repeats of single runs cannot reveal it."""
    calm = [run for name in TINY for run in tiny(name, "decode_ns") if np.ptp(np.log(run)) < 0.15]
    medians = [float(np.median(run)) for run in calm]
    assert max(medians) / min(medians) > 1.8


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage"), TINY_STAGES)
def test_alternating_equal_runs_are_not_called_different(name: str, stage: str) -> None:
    series = tiny(name, stage)
    for runs in (2, 3, 4):
        windows = [series[first : first + 2 * runs] for first in range(len(series) - 2 * runs + 1)]
        found = [compared(window[::2], window[1::2], ON_CPU) for window in windows]
        assert {one.verdict for one in found} == {NONE}
        assert {one.uncertainty.measured for one in found} == {runs > 2}


@pytest.mark.parametrize(("name", "stage"), TINY_STAGES)
@pytest.mark.slow
def test_equal_runs_in_any_order_are_rarely_called_different(name: str, stage: str) -> None:
    generator = np.random.default_rng(3)
    series = tiny(name, stage)
    drawn = [generator.permutation(len(series))[:6] for _ in range(PAIRS)]
    found = [compared([series[one] for one in six[:3]], [series[one] for one in six[3:]], ON_CPU) for six in drawn]
    assert false_verdicts(found) <= 0.05 * PAIRS


@pytest.mark.parametrize("kind", ["eager", "compiled"])
@pytest.mark.parametrize("stage", ["prefill_ns", "decode_ns"])
def test_single_equal_runs_on_an_h200_are_not_called_different(kind: str, stage: str) -> None:
    runs = [run[stage] for run in H200 if run["kind"] == kind]
    found = [compared([one], [other]) for one, other in itertools.combinations(runs, 2)]
    assert found
    assert {one.verdict for one in found} == {NONE}


def test_single_runs_on_an_h200_tell_a_sevenfold_change_on_a_restless_host() -> None:
    """Eager decoding is bound by the host and its repeats reach over a factor of two; compiled it takes a ninth to a seventh."""
    eager, compiled = ([run["decode_ns"] for run in H200 if run["kind"] == kind] for kind in ("eager", "compiled"))
    for base, new in itertools.product(eager, compiled):
        found = compared([base], [new])
        assert (found.verdict, found.uncertainty.restless) == ("faster", True)
        assert found.change < -0.8
        assert interval_of(found).high > -0.8, "the restless side widens it"


def test_on_a_restless_machine_a_change_must_exceed_the_range_that_the_repeats_visit() -> None:
    generator = np.random.default_rng(1)
    quiet = compared([noise(generator, 30, 0.005)], [noise(generator, 30, 0.005, level=115)])
    restless = compared([noise(generator, 30, 0.05)], [noise(generator, 30, 0.05, level=115)])
    assert (quiet.verdict, quiet.uncertainty.restless) == ("slower", False)
    assert (restless.verdict, restless.uncertainty.restless) == (NONE, True)
    large = compared([noise(generator, 30, 0.05)], [noise(generator, 30, 0.05, level=200)])
    assert (large.verdict, large.uncertainty.restless) == ("slower", True)
    assert large.uncertainty.visited < math.log(2)
    pair = [noise(generator, 30, 0.05, level=level) for level in (100, 100.1, 115, 115.1)]
    assert compared(pair[:2], pair[2:]).verdict == NONE, "two runs per side may both be in one state"
    six = [noise(generator, 30, 0.05, level=level) for level in (100, 100.1, 100.2, 115, 115.1, 115.2)]
    assert compared(six[:3], six[3:]).verdict == "slower"


def test_a_run_that_slides_widens_its_own_interval() -> None:
    flat = [100 + index % 2 * 0.1 for index in range(20)]
    sliding = [100 + index * 0.25 for index in range(20)]
    steady, drifting = (compared([flat], [run]).uncertainty.between for run in (flat, sliding))
    assert not isinstance(drifting, Missing)
    assert steady == ACCELERATOR_SPREAD
    assert drifting > ACCELERATOR_SPREAD


def test_a_sure_but_small_change_gets_no_verdict() -> None:
    runs = [[[100.0 + 0.01 * index for index in range(10)]] * 3, [[100.5 + 0.01 * index for index in range(10)]] * 3]
    found, asked = (compared(runs[0], runs[1], Judgement(smallest=smallest)) for smallest in (0.01, 0.001))
    assert interval_of(found).low > 0
    assert (found.verdict, asked.verdict) == (NONE, "slower")


def test_more_throughput_is_faster() -> None:
    slow, fast = [[100.0, 101, 100, 101, 100, 101]], [[120.0, 121, 120, 121, 120, 121]]
    rates, times = effect(slow, fast, True, ON_ACCELERATOR), compared(slow, fast)
    assert not isinstance(rates, Missing)
    assert (rates.verdict, times.verdict) == ("faster", "slower")
    assert rates.change == pytest.approx(0.2, abs=0.01)


def test_a_rate_is_shown_as_its_report_has_it() -> None:
    """Of six repeats the middle two times are averaged; their rates' average is another figure."""
    times = [[0.1, 0.1, 0.1, 0.2, 0.2, 0.2]]
    rates = [[2 / time for time in run] for run in times]
    found = effect(rates, rates, True, ON_ACCELERATOR)
    assert not isinstance(found, Missing)
    assert [found.base, found.new] == pytest.approx([2 / 0.15, 2 / 0.15])
    assert compared(times, times).base == pytest.approx(0.15)


def test_pairing_cancels_the_growth_with_the_context() -> None:
    """Steps grow fivefold; the new side is 5 % slower at each. Unpaired repeats would have to see that through the growth."""
    generator = np.random.default_rng(3)
    growth = np.linspace(100, 500, 40)
    base = [(growth * np.exp(0.01 * generator.normal(size=40))).tolist() for _ in range(12)]
    new = [(growth * 1.05 * np.exp(0.01 * generator.normal(size=40))).tolist() for _ in range(12)]
    found = paired_effect([base], [new], ON_ACCELERATOR)
    assert not isinstance(found, Missing)
    assert found.change == pytest.approx(0.05, abs=0.004)
    assert (found.verdict, found.paired_steps) == ("slower", 40)
    cut = paired_effect([base], [[row[:10] for row in new]], ON_ACCELERATOR)
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
        ([[1.0] * 6], [[]], "a run of the new side has no value"),
        ([[1.0] * 5 + [0.0]], [[1.0] * 6], "not above zero"),
        ([[1.0] * 5 + [math.nan]], [[1.0] * 6], "not above zero"),
    ],
)
def test_a_missing_interval_gives_the_reason(base: list[list[float]], new: list[list[float]], why: str) -> None:
    found = effect(base, new)
    assert isinstance(found, Missing)
    assert why in found.why


def test_steps_that_are_not_there_say_so() -> None:
    assert isinstance(paired_effect([[[]] * 6], [[[1.0]] * 6]), Missing)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_too_few_repeats_leave_the_medians_and_no_verdict(count: int) -> None:
    judgement = Judgement(process_spread=0.01)
    series = [10.0, 11.0, 12.0, 13.0, 14.0][:count]
    single = effect([[20.0] * 6], [series], judgement=judgement)
    paired = paired_effect([[[20.0, 20.0]] * 6], [[[value, value] for value in series]], judgement)
    for found in (single, paired):
        assert isinstance(found, Effect)
        assert found.base == pytest.approx(20)
        assert found.new == pytest.approx(float(np.median(series)), rel=0.01)
        assert found.verdict == "not distinguishable"
        assert isinstance(found.interval, Missing)
        assert f"a run of the new side has {count} repeats; an interval needs 6" in found.interval.why


series = st.lists(st.floats(1.0, 1e6), min_size=6, max_size=12)


@settings(max_examples=30, deadline=None)
@given(series, series)
def test_swapping_the_sides_turns_the_change_round(one: list[float], other: list[float]) -> None:
    there, back = compared([one], [other]), compared([other], [one])
    assert (1 + there.change) * (1 + back.change) == pytest.approx(1, rel=1e-6)
    opposite = {"faster": "slower", "slower": "faster", NONE: NONE}
    ends = interval_of(there)
    sure = min(abs(ends.low), abs(ends.high)) > 0.2 * (ends.high - ends.low)  # the draws differ: not at the edge
    assert there.verdict == opposite[back.verdict] or not sure


@settings(max_examples=30, deadline=None)
@given(series, series, st.floats(1e-3, 1e3))
def test_the_unit_does_not_matter(one: list[float], other: list[float], unit: float) -> None:
    plain, scaled = compared([one], [other]), compared([[value * unit for value in one]], [[value * unit for value in other]])
    assert scaled.change == pytest.approx(plain.change, rel=1e-6, abs=1e-9)
    ends = interval_of(plain)
    assert ends.low <= plain.change <= ends.high
    assert ends.low <= ends.bound_low <= ends.bound_high <= ends.high


@settings(max_examples=30, deadline=None)
@given(st.lists(series, min_size=1, max_size=2), st.lists(series, min_size=1, max_size=2))
def test_few_runs_without_an_assumption_give_no_verdict(base: Runs, new: Runs) -> None:
    found = compared(base, new, ON_CPU)
    assert found.verdict == NONE
    assert isinstance(found.interval, Missing)
    assert isinstance(found.uncertainty.between, Missing)


BYTES = st.integers(1, 2**50)


@given(BYTES, BYTES, st.integers(1, 12), st.integers(1, 12))
@settings(deadline=None)
def test_readings_that_repeat_to_the_byte_change_by_their_own_ratio(one: int, other: int, base_runs: int, new_runs: int) -> None:
    """Neither logarithms nor means over the runs may leave a last digit behind: a gate at the very change passes."""
    found = usage_effect([one] * base_runs, [other] * new_runs, ALONE)
    assert not isinstance(found, Missing)
    assert found.exact
    assert (found.base, found.new, found.change) == (one, other, (other - one) / one)
    assert found.uncertainty.between == 0
    assert found.verdict == (NONE if one == other else "more" if other > one else "less")


@given(BYTES, st.integers(2, 12))
@settings(deadline=None)
def test_repeats_and_runs_that_are_all_equal_have_no_spread(time: int, runs: int) -> None:
    found = compared([[float(time)] * 6] * runs, [[float(time)] * 7] * runs)
    assert found.exact
    assert (found.change, found.uncertainty.between, found.uncertainty.scatter) == (0, 0, 0)


@pytest.mark.parametrize(
    ("judgement", "fewest"), [(ON_ACCELERATOR, 2), (Judgement(process_spread=0.2, measured_from=4), 3), (ON_CPU, 3)]
)
def test_the_suggested_runs_are_the_fewest_that_measure_the_spread(judgement: Judgement, fewest: int) -> None:
    assert runs_to_measure(judgement) == fewest
    assert [is_measured((runs, runs), judgement) for runs in (fewest - 1, fewest)] == [False, True]
    runs = [noise(np.random.default_rng(seed), 10, 0.01) for seed in range(2 * fewest)]
    assert compared(runs[:fewest], runs[fewest:], judgement).uncertainty.measured
    assert not compared(runs[: fewest - 1], runs[fewest - 1 : 2 * fewest - 2], judgement).uncertainty.measured


# --- machines that move while they are measured -------------------------------------------------------------------------


def called(kind: str, plan: Plan, order: Order = "in turn", count: int = 200) -> float:
    """The share of simulated pairs that are called faster or slower."""
    judgement = Judgement(process_spread=ACCELERATOR_SPREAD, order=order)
    found = [compared(base, new, judgement) for base, new in pairs(kind, plan, count)]
    return false_verdicts(found) / count


@pytest.mark.slow  # of moving machines, 300 pairs tell 4 % from 7 %
@pytest.mark.parametrize("plan", [Plan(), Plan(runs=3, repeats=10)], ids=["one run a side", "three in turn"])
@pytest.mark.parametrize("kind", MACHINES)
def test_no_kind_of_noise_is_called_a_change_in_more_than_5_percent(kind: str, plan: Plan) -> None:
    """One run a side: 8 % of a drift of its own and 16 % of one switch before movements were looked for."""
    assert called(kind, plan, count=300 if kind in MOVING else 200) <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "most"), [("drift, continuing", 0.05), ("one switch", 0.08)])
def test_sides_made_one_after_the_other_are_not_called_a_change_by_what_the_machine_did(kind: str, most: float) -> None:
    """Three runs of base, then three of new: 32 and 18 % where the order is not known."""
    assert called(kind, Plan(runs=3, repeats=10, in_turn=False), "base first") <= most


POWER_BEFORE = {
    ("normal", 1, 0.05): 0.71,
    ("log-normal", 1, 0.05): 0.705,
    ("bimodal", 1, 0.05): 0.42,
    ("normal", 3, 0.05): 0.925,
    ("normal", 1, 0.10): 0.87,
    ("log-normal", 1, 0.10): 0.88,
    ("bimodal", 1, 0.10): 0.83,
    ("normal", 3, 0.10): 1.0,
}
"""By kind of noise, runs a side and slowdown: the share of these pairs found before movements were looked for."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "runs", "slowdown"), POWER_BEFORE)
def test_looking_for_movements_costs_no_power(kind: str, runs: int, slowdown: float) -> None:
    plan = Plan(runs=runs, repeats=30 if runs == 1 else 10, slowdown=slowdown)
    assert called(kind, plan) >= POWER_BEFORE[kind, runs, slowdown]


def test_a_difference_that_the_machine_explains_reaches_to_no_change() -> None:
    """Also as data. The verdict, the gates' bounds and the interval agree."""
    generator = np.random.default_rng(5)
    base, new = noise(generator, 30, 0.01), noise(generator, 30, 0.01, level=107)
    base[-4:] = noise(generator, 4, 0.01, level=107)
    found = compared([base], [new])
    assert found.rival is not None
    assert (found.rival.movement, found.rival.side, found.rival.last) == (Movement.SHIFT, "base", 30)
    assert found.verdict == NONE
    ends = interval_of(found)
    assert ends.low < 0 < found.change < ends.high
    assert ends.low <= ends.bound_low < 0 < ends.bound_high <= ends.high
    assert compared([base[:-4]], [new]).verdict == "slower"


def test_runs_that_scatter_alike_are_pooled_and_a_restless_one_still_counts() -> None:
    generator = np.random.default_rng(2)
    calm, restless = noise(generator, 30, 0.002), noise(generator, 30, 0.05, level=115)
    assert compared([calm], [restless]).uncertainty.restless
    spread = [compared([noise(generator, 30, 0.024)], [noise(generator, 30, 0.024)]).uncertainty.restless for _ in range(100)]
    assert np.mean(spread) <= 0.1, "in one pair of seven a run scatters by more than 3 % by chance; pooled, the two seldom do"

"""Tolerances: how they are written, when they pass, when they are undecided."""

import math

import numpy as np
import pytest

from llm_perf_opt.analysis.comparison.compare import gate_names
from llm_perf_opt.analysis.comparison.effects import Effect, Judgement
from llm_perf_opt.analysis.comparison.gates import NO_REMEDY, Gate, check_gate, exit_code, needed_to_decide, parse_gates
from llm_perf_opt.analysis.comparison.statistics import ACCELERATOR_SPREAD, QUIET_CPU_SPREAD, effect, usage_effect
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import Missing

ON_ACCELERATOR = Judgement(process_spread=ACCELERATOR_SPREAD)


def measured(
    change: float, deviation: float = 0.003, runs: int = 1, n: int = 20, judgement: Judgement = ON_ACCELERATOR
) -> Effect:
    generator = np.random.default_rng(4)

    def side(level: float) -> list[list[float]]:
        return [list(level * np.exp(deviation * generator.normal(size=n))) for _ in range(runs)]

    found = effect(side(100), side(100 * (1 + change)), judgement=judgement)
    assert not isinstance(found, Missing)
    return found


@pytest.mark.parametrize(
    ("text", "metric", "tolerance"),
    [
        ("tpot=3%", "tpot", 0.03),
        ("decode.tpot=3%", "tpot", 0.03),
        ("prefill.ttft=0.05", "ttft", 0.05),
        ("throughput=2.5%", "output_rate", 0.025),
        ("decode_step=0%", "decode_step", 0.0),
        ("memory.allocated=10 %", "memory.allocated", 0.1),
    ],
)
def test_a_gate_is_written_as_people_would(text: str, metric: str, tolerance: float) -> None:
    (gate,) = parse_gates([text], gate_names())
    assert gate.metric == metric
    assert gate.tolerance == pytest.approx(tolerance)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["tpto=3%"], "Did you mean 'tpot'?"),
        (["decode.ttft=3%"], "no metric is called 'decode.ttft'"),
        (["tpot"], "not METRIC=TOLERANCE"),
        (["tpot=-3%"], "not METRIC=TOLERANCE"),
        (["tpot=nan"], "not METRIC=TOLERANCE"),
        (["tpot=3"], "300 % worse"),
        (["tpot=3%", "decode.tpot=5%"], "already has a gate"),
        (["=3%"], "not METRIC=TOLERANCE"),
    ],
)
def test_a_wrong_gate_is_an_error(texts: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_gates(texts, gate_names())
    assert said in caught.value.fact


GATE = Gate("tpot", "tpot", 0.05)


@pytest.mark.parametrize(
    ("change", "outcome"), [(0.0, "pass"), (-0.2, "pass"), (0.02, "pass"), (0.05, "cannot tell"), (0.12, "regression")]
)
def test_a_quiet_pair_is_decided(change: float, outcome: str) -> None:
    assert check_gate(GATE, measured(change), False).outcome == outcome


def test_less_throughput_is_the_regression() -> None:
    lost, gained = measured(-0.15), measured(0.15)
    rates = [effect([[100.0, 101] * 5], [[level, level * 1.01] * 5], True, ON_ACCELERATOR) for level in (85.0, 115.0)]
    assert [check_gate(GATE, rate, True).outcome for rate in rates] == ["regression", "pass"]
    assert (check_gate(GATE, lost, False).outcome, check_gate(GATE, gained, False).outcome) == ("pass", "regression")


def test_noise_is_undecided_with_what_would_help() -> None:
    some = check_gate(Gate("tpot", "tpot", 0.03), measured(0.0, deviation=0.025, n=8), False)
    assert some.outcome == "cannot tell"
    assert not isinstance(some.needed, Missing)
    assert "runs per side" in some.needed
    restless = check_gate(GATE, measured(0.0, deviation=0.2), False)
    assert restless.outcome == "cannot tell"
    assert "vary by" in restless.why


def test_the_suggested_runs_are_about_enough() -> None:
    """If N runs are suggested, N runs decide."""
    gate = Gate("tpot", "tpot", 0.04)
    first = check_gate(gate, measured(0.0, deviation=0.028, n=8), False)
    assert first.outcome == "cannot tell"
    assert not isinstance(first.needed, Missing)
    runs = int(first.needed.split(" runs per side")[0].split()[-1])
    assert 2 <= runs <= 30
    assert check_gate(gate, measured(0.0, deviation=0.028, n=8, runs=runs + 2), False).outcome == "pass"


def test_a_change_at_the_tolerance_is_never_decided() -> None:
    found = measured(0.05, deviation=0.02, runs=2)
    near = check_gate(Gate("tpot", "tpot", found.change + 1e-9), found, False)
    assert near.outcome == "cannot tell"
    assert isinstance(near.needed, Missing)
    assert "30 runs per side would not decide it" in near.needed.why


@pytest.mark.parametrize("runs", [1, 2])
def test_few_runs_without_an_assumption_are_undecided_and_suggest_more(runs: int) -> None:
    for change, word in ((0.3, "worse by "), (-0.3, "better by ")):
        result = check_gate(GATE, measured(change, runs=runs, judgement=Judgement()), False)
        assert result.outcome == "cannot tell"
        assert result.why.startswith(word)
        assert "too few runs to measure how much processes differ" in result.why
        assert result.needed == "3 runs per side, which measure how much processes differ"
    told = [check_gate(GATE, measured(change, runs=3, judgement=Judgement()), False).outcome for change in (0.3, -0.3)]
    assert told == ["regression", "pass"]


def test_a_missing_metric_is_undecided() -> None:
    result = check_gate(GATE, Missing("one new token"), False)
    assert (result.outcome, result.why, result.needed) == (
        "cannot tell",
        "one new token",
        NO_REMEDY,
    )
    assert check_gate(GATE, Missing("one new token"), False, "two of them").needed == "two of them"


def test_too_few_repeats_say_how_many_are_needed() -> None:
    repeats = "at least 6 repeats in each run (runtime.min_repeats=6, runtime.max_repeats at least as high)"
    result = check_gate(GATE, measured(0.3, n=4), False)
    assert (result.outcome, result.needed) == ("cannot tell", repeats)
    assert "has 4 repeats; an interval needs 6" in result.why
    on_cpu = check_gate(GATE, measured(0.3, n=4, judgement=Judgement()), False)
    assert on_cpu.needed == f"{repeats}, and 3 runs per side, which measure how much processes differ"


def exactly(base: float, new: float) -> Effect:
    """A figure that repeats to the last digit."""
    found = usage_effect([base], [new], Judgement(0.0, 0.0))
    assert not isinstance(found, Missing)
    return found


def test_figures_that_repeat_to_the_byte_decide_themselves() -> None:
    assert check_gate(GATE, exactly(100, 104), False).outcome == "pass"
    assert check_gate(GATE, exactly(100, 106), False).outcome == "regression"
    assert check_gate(Gate("memory.device", "memory.device", 0.0), exactly(100, 100), False).outcome == "pass"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (1, "worse by 1 byte, 0.00 % tolerated"),
        (2**21, "worse by 0.05 % (2,097,152 bytes), 0.00 % tolerated"),
    ],
)
def test_a_byte_too_many_is_not_rounded_away(more: int, said: str) -> None:
    bytes_held = 2**32
    exact = Gate("memory.reserved", "memory.reserved", 0.0)
    result = check_gate(exact, exactly(bytes_held, bytes_held + more), False, unit="bytes")
    assert (result.outcome, result.why) == ("regression", said)
    less = check_gate(exact, exactly(bytes_held + more, bytes_held), False, unit="bytes")
    assert (less.outcome, less.why) == ("pass", said.replace("worse", "better"))
    same = check_gate(exact, exactly(bytes_held, bytes_held), False, unit="bytes")
    assert same.why == "the same, 0.00 % tolerated"


def test_a_tolerance_too_small_for_two_digits_is_shown() -> None:
    result = check_gate(Gate("memory.reserved", "memory.reserved", 1e-5), exactly(2**32, 2**32 + 2**20), False, unit="bytes")
    assert result.why == "worse by 0.02 % (1,048,576 bytes), 0.001 % tolerated"


@pytest.mark.parametrize(
    ("tolerance", "outcome"), [(0.0, "regression"), (0.004, "regression"), (0.01, "pass"), (0.006, "cannot tell")]
)
def test_the_interval_against_the_tolerance_decides_also_below_the_smallest_change(tolerance: float, outcome: str) -> None:
    """A sure worsening of 0.6 % is a regression where 0.4 % is tolerated, although it is too small for a verdict."""
    found = measured(0.006, deviation=0.0005, runs=3)
    assert found.verdict == "not distinguishable"
    assert not isinstance(found.interval, Missing)
    assert 0.004 < found.interval.low < 0.006 < found.interval.high < 0.01
    result = check_gate(Gate("tpot", "tpot", tolerance), found, False)
    assert result.outcome == outcome
    assert ("--smallest" in result.why) == (outcome == "regression")


def test_a_worsening_that_may_be_within_the_tolerance_is_no_regression() -> None:
    """Slower for sure, and its estimate beyond the tolerance; but perhaps within."""
    found = measured(0.06)
    assert (found.verdict, found.change > GATE.tolerance) == ("slower", True)
    assert check_gate(GATE, found, False).outcome == "cannot tell"


def test_what_is_needed_for_a_regression_is_reckoned_from_the_tolerance() -> None:
    """From zero it would be far: the runs asked for bring the interval beyond the tolerance."""
    gate, deviation = Gate("tpot", "tpot", 0.05), 0.02
    first = check_gate(gate, measured(0.06, deviation=deviation, runs=2), False)
    assert first.outcome == "cannot tell"
    assert not isinstance(first.needed, Missing)
    runs = int(first.needed.split(" runs per side")[0].split()[-1])
    assert runs > 2
    assert check_gate(gate, measured(0.06, deviation=deviation, runs=runs + 2), False).outcome == "regression"


def test_repeats_asked_for_a_pass_are_fewer_than_for_a_regression_as_far_away() -> None:
    """A pass needs 95 % on one side, a regression 99 %: the same distance asks for twice the repeats."""

    def asked(tolerance: float) -> int:
        found = measured(0.05, deviation=0.025, n=8, judgement=Judgement(process_spread=0.001))
        needed = needed_to_decide(found, found.change, math.expm1(math.log1p(found.change) + tolerance))
        assert not isinstance(needed, Missing)
        assert needed.startswith("about ")
        return int(needed.split()[1])

    within, beyond = asked(+0.015), asked(-0.015)
    assert beyond > 1.5 * within


def test_no_change_at_all_has_no_sign() -> None:
    same = effect([[100.0] * 8], [[100.0] * 8], judgement=Judgement(process_spread=0.0))
    noisy = effect([[100.0, 120.0, 80.0] * 3], [[100.0, 120.0, 80.0] * 3], judgement=ON_ACCELERATOR)
    said = [check_gate(gate, found, False).why for found in (same, noisy) for gate in (GATE, Gate("tpot", "tpot", 0.0))]
    assert said[0] == "the same, 5.00 % tolerated"
    assert said[2].startswith("the same, perhaps worse by ")
    assert not any("-0.00" in text or "by 0.00" in text for text in said)


def test_an_outcome_says_better_or_worse_never_a_signed_worsening() -> None:
    said = [check_gate(GATE, measured(change), False).why for change in (-0.2, 0.02, 0.12)]
    assert said[0].startswith("better by at least 1")
    assert said[1].startswith("worse by at most ")
    assert said[2].startswith("worse by 1")
    noisy = check_gate(GATE, measured(-0.01, deviation=0.2), False).why
    assert noisy.startswith(("better by ", "worse by "))
    assert " perhaps " in noisy
    said += [noisy, *[check_gate(GATE, exactly(100, new), False).why for new in (90, 100, 106)]]
    assert [text.split(",")[0] for text in said[-3:]] == ["better by 10.00 %", "the same", "worse by 6.00 %"]
    assert not any("+" in text or "-" in text for text in said)


def test_a_regression_outweighs_an_undecided_gate() -> None:
    results = [check_gate(GATE, measured(change), False) for change in (0.0, 0.05, 0.12)]
    assert [exit_code(results[:1]), exit_code(results[:2]), exit_code(results)] == [0, 2, 1]
    assert exit_code([]) == 0


def simulated_codes(slowdown: float, pairs: int = 200) -> list[int]:
    """Exit codes of a 3 % gate, three runs per side of 20 repeats, processes and repeats 1 % of deviation each."""
    generator = np.random.default_rng(9)

    def side(level: float) -> list[list[float]]:
        shifts = np.exp(0.01 * generator.normal(size=3))
        return [list(level * shift * np.exp(0.01 * generator.normal(size=20))) for shift in shifts]

    gate = Gate("tpot", "tpot", 0.03)
    found = [effect(side(100.0), side(100.0 * (1 + slowdown)), judgement=ON_ACCELERATOR) for _ in range(pairs)]
    return [exit_code([check_gate(gate, one, False)]) for one in found]


@pytest.mark.slow
def test_a_sure_worsening_is_a_regression_and_no_change_hardly_ever() -> None:
    worse, same = simulated_codes(0.10), simulated_codes(0.0)
    assert worse.count(1) >= 0.95 * len(worse)
    assert worse.count(0) == 0
    assert same.count(1) <= 0.05 * len(same)


SWITCHES_LATE = [100.0 + 0.3 * (index % 3) for index in range(26)] + [108.0 + 0.3 * (index % 3) for index in range(4)]
FAST, SLOW = SWITCHES_LATE[:24], [108.0 + 0.3 * (index % 3) for index in range(30)]


@pytest.mark.parametrize("higher_is_better", [False, True])
def test_a_machine_that_changed_its_speed_is_no_regression(higher_is_better: bool) -> None:
    """The base run ends at the level of the new one: the switch is seen, so the difference is no change for sure."""
    gate = Gate("tpot", "tpot", 0.03)
    sides = [[SWITCHES_LATE], [SLOW]]
    if higher_is_better:
        sides = [[[1 / time for time in run] for run in side] for side in sides]
    found = effect(sides[0], sides[1], higher_is_better, ON_ACCELERATOR)
    assert isinstance(found, Effect)
    result = check_gate(gate, found, higher_is_better)
    assert result.outcome == "cannot tell"
    assert exit_code([result]) == 2
    assert "repeats 27 to 30 of base ran at the level of new" in result.why
    assert result.needed == "3 alternating runs per side"
    steady = effect([FAST], [SLOW], judgement=ON_ACCELERATOR)
    assert isinstance(steady, Effect)
    assert check_gate(gate, steady, False).outcome == "regression"


def test_a_run_that_moved_needs_runs_and_not_repeats() -> None:
    drifting = [100 * math.exp(0.05 * index / 29 + 0.001 * (index * 7 % 5)) for index in range(30)]
    found = effect([drifting], [drifting], judgement=ON_ACCELERATOR)
    assert isinstance(found, Effect)
    assert found.uncertainty.moved == pytest.approx(0.05, abs=0.01)
    result = check_gate(Gate("tpot", "tpot", 0.03), found, False)
    assert (result.outcome, exit_code([result])) == ("cannot tell", 2)
    assert "changed by 5." in result.why or "changed by 4." in result.why
    assert result.needed == "3 alternating runs per side"


def test_a_movement_smaller_than_what_is_assumed_is_not_blamed() -> None:
    """On a quiet CPU 20 % are assumed: a drift of 5 % makes no interval wide."""
    drifting = [100 * math.exp(0.05 * index / 29 + 0.001 * (index * 7 % 5)) for index in range(30)]
    found = effect([drifting], [drifting], judgement=Judgement(process_spread=QUIET_CPU_SPREAD))
    assert isinstance(found, Effect)
    assert found.base_stability[0].moved
    assert found.uncertainty.moved == 0
    result = check_gate(Gate("tpot", "tpot", 0.03), found, False)
    assert result.outcome == "cannot tell"
    assert "changed its speed" not in result.why

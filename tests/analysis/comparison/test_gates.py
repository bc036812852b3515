"""Tolerances: how they are written, when they pass, when they cannot be told."""

import numpy as np
import pytest

from llm_perf_opt.analysis.comparison.compare import gate_names
from llm_perf_opt.analysis.comparison.gates import Gate, exit_code, hold, hold_exact, parse_gates
from llm_perf_opt.analysis.comparison.statistics import ACCELERATOR_SPREAD, Effect, Judgement, effect
from llm_perf_opt.errors import ConfigError
from llm_perf_opt.records import Missing

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
        (["tpot=3"], "would tolerate 300 %"),
        (["tpot=3%", "decode.tpot=5%"], "has a gate already"),
        (["=3%"], "not METRIC=TOLERANCE"),
    ],
)
def test_a_wrong_gate_is_refused(texts: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_gates(texts, gate_names())
    assert said in caught.value.fact


GATE = Gate("tpot", "tpot", 0.05)


@pytest.mark.parametrize(
    ("change", "outcome"), [(0.0, "pass"), (-0.2, "pass"), (0.02, "pass"), (0.05, "cannot tell"), (0.12, "regression")]
)
def test_a_quiet_pair_is_told(change: float, outcome: str) -> None:
    assert hold(GATE, measured(change), False).outcome == outcome


def test_less_throughput_is_the_regression() -> None:
    lost, gained = measured(-0.15), measured(0.15)
    rates = [effect([[100.0, 101] * 5], [[level, level * 1.01] * 5], True, ON_ACCELERATOR) for level in (85.0, 115.0)]
    assert [hold(GATE, rate, True).outcome for rate in rates] == ["regression", "pass"]
    assert (hold(GATE, lost, False).outcome, hold(GATE, gained, False).outcome) == ("pass", "regression")


def test_noise_is_told_as_such_with_what_would_help() -> None:
    some = hold(Gate("tpot", "tpot", 0.03), measured(0.0, deviation=0.025, n=8), False)
    assert some.outcome == "cannot tell"
    assert not isinstance(some.needed, Missing)
    assert "runs on each side" in some.needed
    restless = hold(GATE, measured(0.0, deviation=0.2), False)
    assert restless.outcome == "cannot tell"
    assert "scatter by" in restless.why


def test_the_runs_asked_for_are_about_enough() -> None:
    """Where it says N runs, N runs do tell."""
    gate = Gate("tpot", "tpot", 0.04)
    first = hold(gate, measured(0.0, deviation=0.028, n=8), False)
    assert first.outcome == "cannot tell"
    assert not isinstance(first.needed, Missing)
    runs = int(first.needed.split(" runs on each side")[0].split()[-1])
    assert 2 <= runs <= 30
    assert hold(gate, measured(0.0, deviation=0.028, n=8, runs=runs + 2), False).outcome == "pass"


def test_a_change_at_the_tolerance_is_never_told() -> None:
    found = measured(0.05, deviation=0.02, runs=2)
    near = hold(Gate("tpot", "tpot", found.change + 1e-9), found, False)
    assert near.outcome == "cannot tell"
    assert isinstance(near.needed, Missing)
    assert "30 runs on each side would not tell" in near.needed.why


@pytest.mark.parametrize("runs", [1, 2])
def test_few_runs_where_nothing_may_be_assumed_cannot_be_told_and_say_how_many_can(runs: int) -> None:
    for change, word in ((0.3, "worse by "), (-0.3, "better by ")):
        result = hold(GATE, measured(change, runs=runs, judgement=Judgement()), False)
        assert result.outcome == "cannot tell"
        assert result.why.startswith(word)
        assert "too few runs to know how much processes differ" in result.why
        assert result.needed == "3 runs on each side, which measure how much processes differ"
    told = [hold(GATE, measured(change, runs=3, judgement=Judgement()), False).outcome for change in (0.3, -0.3)]
    assert told == ["regression", "pass"]


def test_what_is_missing_cannot_be_told() -> None:
    result = hold(GATE, Missing("one new token"), False)
    assert (result.outcome, result.why, result.needed) == (
        "cannot tell",
        "one new token",
        Missing("More repeats do not cure this"),
    )
    assert hold(GATE, Missing("one new token"), False, "two of them").needed == "two of them"


def test_too_few_repeats_say_how_many_are_needed() -> None:
    repeats = "at least 6 repeats in each run (runtime.min_repeats=6, runtime.max_repeats no lower)"
    result = hold(GATE, measured(0.3, n=4), False)
    assert (result.outcome, result.needed) == ("cannot tell", repeats)
    assert "has 4 repeats; an interval needs 6" in result.why
    on_cpu = hold(GATE, measured(0.3, n=4, judgement=Judgement()), False)
    assert on_cpu.needed == f"{repeats}, and 3 runs on each side, which measure how much processes differ"


def test_figures_without_an_interval_decide_themselves() -> None:
    assert hold_exact(GATE, 100, 104).outcome == "pass"
    assert hold_exact(GATE, 100, 106).outcome == "regression"
    assert hold_exact(GATE, 0, 0).outcome == "pass"
    assert hold_exact(GATE, 0, 1).outcome == "regression"


def test_an_outcome_says_better_or_worse_never_a_signed_worsening() -> None:
    said = [hold(GATE, measured(change), False).why for change in (-0.2, 0.02, 0.12)]
    assert said[0].startswith("better by at least 1")
    assert said[1].startswith("worse by at most ")
    assert said[2].startswith("worse by 1")
    noisy = hold(GATE, measured(-0.01, deviation=0.2), False).why
    assert noisy.startswith(("better by ", "worse by "))
    assert " perhaps " in noisy
    said += [noisy, *[hold_exact(GATE, 100, new).why for new in (90, 100, 106)]]
    assert [text.split(",")[0] for text in said[-3:]] == ["less by 10.00%", "the same", "more by 6.00%"]
    assert not any("+" in text or "-" in text for text in said)


def test_a_regression_outweighs_what_cannot_be_told() -> None:
    results = [hold(GATE, measured(change), False) for change in (0.0, 0.05, 0.12)]
    assert [exit_code(results[:1]), exit_code(results[:2]), exit_code(results)] == [0, 2, 1]
    assert exit_code([]) == 0

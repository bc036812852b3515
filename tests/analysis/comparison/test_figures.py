"""Memory and energy: one reading a run, and what runs of the same thing differ by all the same."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from builders import MS, clean_timings, iteration, model_facts, run_analysis
from llm_perf_opt.analysis.comparison.compare import Comparison, Side, compare, gate_names
from llm_perf_opt.analysis.comparison.effects import Effect, Judgement
from llm_perf_opt.analysis.comparison.figures import POWER_SPREAD, UsageChange, energy_changes, memory_changes
from llm_perf_opt.analysis.comparison.gates import exit_code, parse_gates
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.telemetry import Energy, TelemetrySummary
from llm_perf_opt.core.engine_records import EngineMemory
from llm_perf_opt.core.records import CleanTimings, MemoryPeaks, Missing, RuntimeFacts

GIB = 2**30


def on_card(
    joules: float = 50.0, slower: float = 1.0, scatter: float = 0.001, card: str = "GPU-1", resident: float = 2.0, **memory: Any
) -> RunAnalysis:
    """A run of ten requests on a card, `joules` each."""
    times = [slower * (1 + scatter * (number * 7 % 5 - 2)) for number in range(10)]
    peaks = MemoryPeaks(**{"allocated_bytes": GIB, "reserved_bytes": 2 * GIB, "device_used_bytes": 3 * GIB, **memory},
                        process_rss_bytes=round(resident * GIB))  # fmt: skip
    timings = clean_timings(
        [iteration(round(100 * MS * time), [round(10 * MS * time)] * 3) for time in times],
        model=model_facts(device="cuda:0"),
        memory=peaks,
    )
    read = Energy("measured repeats", 1.3, 10 * joules, 10 * joules * 0.9)
    return run_analysis(
        timings=timings, telemetry=TelemetrySummary((), (read,), "", ()), env={"host": "node1", "gpu": {"uuid": card}}
    )


def held(base: Sequence[RunAnalysis], new: Sequence[RunAnalysis], *gates: str) -> Comparison:
    return compare(Side(tuple(base)), Side(tuple(new)), gates=parse_gates(gates, gate_names()))


def usage(found: Comparison, key: str) -> tuple[UsageChange, Effect]:
    row = next(row for row in (*found.memory, *found.energy) if row.key == key)
    assert not isinstance(row.effect, Missing)
    return row, row.effect


def test_energy_is_of_one_request() -> None:
    row, effect = usage(held([on_card(50.0)], [on_card(60.0)]), "energy.counter")
    assert [row.base, row.new] == pytest.approx([50.0, 60.0])
    assert effect.change == pytest.approx(0.2)
    power, _ = usage(held([on_card(50.0)], [on_card(60.0)]), "energy.power")
    assert power.base == pytest.approx(45.0)


@pytest.mark.parametrize("more", [1.089, 1.215, 1.299])
def test_energy_of_one_thing_on_two_cards_is_no_regression(more: float) -> None:
    """Three real pairs of one configuration differed this much."""
    found = held([on_card(50.0)], [on_card(50.0 * more, card="GPU-2")], "energy=3%")
    assert exit_code(found.gates) == 2
    _, effect = usage(found, "energy.counter")
    assert effect.verdict == "not distinguishable"
    assert not isinstance(effect.interval, Missing)
    assert effect.interval.low < 0 < effect.interval.high


def test_a_large_change_of_energy_is_detected_with_one_run_per_side() -> None:
    for new, code, verdict in ((50 * 1.6, 1, "more"), (50 / 1.6, 0, "less")):
        found = held([on_card(50.0)], [on_card(new)], "energy=3%")
        assert exit_code(found.gates) == code
        assert usage(found, "energy.counter")[1].verdict == verdict


def test_energy_has_the_uncertainty_of_the_time_it_was_measured_over() -> None:
    """Restless repeats: the change must exceed the range they visit, as that of the time must."""
    quiet, restless = (
        usage(held([on_card(50.0, scatter=scatter)], [on_card(80.0, scatter=scatter)]), "energy.counter")[1]
        for scatter in (0.001, 0.2)
    )
    assert (quiet.verdict, restless.verdict) == ("more", "not distinguishable")
    assert restless.uncertainty.restless
    assert [quiet.change, restless.change] == pytest.approx([0.6, 0.6])


def test_several_runs_per_side_measure_how_much_energy_differs() -> None:
    base = [on_card(joules) for joules in (50.0, 50.4, 49.7)]
    worse = held(base, [on_card(joules) for joules in (55.0, 55.5, 54.6)], "energy=3%")
    assert exit_code(worse.gates) == 1
    assert usage(worse, "energy.counter")[1].uncertainty.measured
    far = [on_card(joules) for joules in (50.0, 62.0, 41.0)]
    assert exit_code(held(far, [on_card(joules) for joules in (55.0, 68.0, 45.0)], "energy=3%").gates) == 2


def test_runs_of_each_side_on_a_card_of_its_own_do_not_show_how_cards_differ() -> None:
    """Three runs per side repeat well, each on its card: 9 % between the sides may be the cards'."""
    base = [on_card(joules) for joules in (50.0, 50.1, 49.9)]
    other = [on_card(joules * 1.09, card="GPU-2") for joules in (50.0, 50.1, 49.9)]
    found = held(base, other, "energy=3%")
    (gate,) = found.gates
    assert gate.outcome == "cannot tell"
    assert isinstance(gate.needed, Missing)
    assert "run both sides on the same card, alternating" in gate.needed.why
    mixed = [replace(one, env=two.env) for one, two in zip(other, [base[0], *other[1:]], strict=True)]
    both = [replace(one, env=two.env) for one, two in zip(base, [other[0], *base[1:]], strict=True)]
    assert exit_code(held(both, mixed, "energy=3%").gates) == 1
    unknown = [replace(one, env={"host": "node1", "cpu": {"usable": 8}}) for one in (*base, *other)]
    assert exit_code(held(unknown[:3], unknown[3:], "energy=3%").gates) == 2


@pytest.mark.parametrize("runs", [1, 2, 3, 10])
@pytest.mark.parametrize("scatter", [0.001, 0.2])
def test_no_number_of_runs_is_promised_where_the_cards_differ(runs: int, scatter: float) -> None:
    base, new = ([on_card(50 * more, scatter=scatter, card=card)] * runs for more, card in ((1, "GPU-1"), (1.2357, "GPU-2")))
    (gate,) = held(base, new, "energy=5%").gates
    assert gate.outcome == "cannot tell"
    assert isinstance(gate.needed, Missing)
    assert gate.needed.why.startswith("More runs do not show how much the cards differ")
    assert "the sides ran on different cards, and cards of one model are assumed to differ in power by 10 %" in gate.why
    assert "restless" not in gate.why + gate.needed.why
    (unknown,) = held([replace(base[0], env={"cpu": {}})], [replace(new[0], env={"cpu": {}})], "energy=5%").gates
    assert "the sides may have run on different cards" in unknown.why


def test_on_one_card_the_assumed_spread_is_named_and_runs_would_help() -> None:
    (gate,) = held([on_card(50)], [on_card(50 * 1.2357)], "energy=5%").gates
    assert gate.why.endswith("(runs are assumed to differ by 10.0 %, because there are too few to measure it)")
    assert not isinstance(gate.needed, Missing)
    assert "runs per side" in gate.needed
    (near,) = held([on_card(50)], [on_card(50 * 1.02)], "energy=3%").gates
    assert isinstance(near.needed, Missing)
    assert near.needed.why.endswith("for runs that differ by 10.05 % (assumed; 3 runs per side would measure it)")


@pytest.mark.slow
def test_energy_of_the_same_thing_is_rarely_called_a_change() -> None:
    """Pairs whose powers differ as is assumed: within the level, and far from never telling anything."""
    generator = np.random.default_rng(11)
    factors = np.exp(POWER_SPREAD * generator.normal(size=(200, 2)))
    told = 0
    for one, other in factors.tolist():
        row = energy_changes([on_card(50 * one)], [on_card(50 * other, card="GPU-2")], Judgement(process_spread=0.01))[0]
        assert not isinstance(row.effect, Missing)
        told += row.effect.verdict != "not distinguishable"
    assert told <= 10


def test_what_repeats_to_the_byte_is_compared_to_the_byte() -> None:
    found = held(
        [on_card()], [on_card(allocated_bytes=GIB + 2**20)], "memory.allocated=0%", "memory.reserved=0%", "memory.device=0%"
    )
    assert [result.outcome for result in found.gates] == ["regression", "pass", "pass"]
    assert usage(found, "memory.allocated")[1].exact
    assert usage(found, "memory.allocated")[1].verdict == "more"
    everyones = ["of all processes on the card" in result.why for result in found.gates]
    assert everyones == [False, False, True], "what the driver tells is not of this process alone"
    assert "of all processes on the card" in usage(found, "memory.device")[0].label


@pytest.mark.parametrize("runs", [1, 2, 3])
def test_a_gate_at_the_very_change_of_memory_passes_however_many_runs_show_it(runs: int) -> None:
    base, new = [on_card(allocated_bytes=39077149536)] * runs, [on_card(allocated_bytes=39077149536)] * runs
    assert exit_code(held(base, new, "memory.allocated=0%").gates) == 0
    more = [on_card(allocated_bytes=3 * 1_030_000_000)] * runs
    less = [on_card(allocated_bytes=3 * 1_000_000_000)] * runs
    assert exit_code(held(less, more, "memory.allocated=3%").gates) == 0
    assert exit_code(held(less, more, "memory.allocated=2.9%").gates) == 1


def test_runs_of_one_side_that_differ_show_that_it_is_not_exact() -> None:
    base = [on_card(device_used_bytes=held_bytes * GIB) for held_bytes in (3, 5, 4)]
    new = [on_card(device_used_bytes=held_bytes * GIB) for held_bytes in (4, 6, 5)]
    found = held(base, new, "memory.device=3%")
    assert exit_code(found.gates) == 2
    assert not usage(found, "memory.device")[1].exact


def test_resident_memory_has_an_interval() -> None:
    """Real pairs of equal runs differed by up to 2 %."""
    assert exit_code(held([on_card(resident=2.0)], [on_card(resident=2.04)], "memory.process=1%").gates) == 2
    assert exit_code(held([on_card(resident=2.0)], [on_card(resident=2.4)], "memory.process=1%").gates) == 1
    assert exit_code(held([on_card(resident=2.0)], [on_card(resident=2.0)], "memory.process=10%").gates) == 0


def test_a_missing_reading_leaves_the_other_side_shown() -> None:
    none = Missing("the driver does not tell")
    row = next(row for row in held([on_card()], [on_card(device_used_bytes=none)]).memory if row.key == "memory.device")
    assert (row.base, row.new, row.effect) == (3 * GIB, none, none)
    zero = held([on_card(0.0)], [on_card(1.0)], "energy=3%")
    assert zero.gates[0].outcome == "cannot tell"
    assert "not above zero" in zero.gates[0].why


def test_memory_that_an_engine_reserves_is_not_compared() -> None:
    plain = on_card().timings
    assert isinstance(plain, CleanTimings)
    memory = EngineMemory(0.92, 1000, 10 * GIB, 10, GIB)
    engine = replace(plain, runtime=RuntimeFacts("vllm", "0.32", "by step", memory=memory))
    changes = {row.key: row.change for row in memory_changes([plain], [engine], Judgement())}
    assert {key for key, change in changes.items() if isinstance(change, Missing)} == {
        "memory.allocated", "memory.reserved", "memory.device",
    }  # fmt: skip
    fixed = replace(engine, runtime=RuntimeFacts("vllm", "0.32", "by step", memory=replace(memory, share=Missing("set"))))
    assert not any(isinstance(row.change, Missing) for row in memory_changes([plain], [fixed], Judgement()))

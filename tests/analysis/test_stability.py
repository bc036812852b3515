"""Whether the repeats of a run keep their level: what is seen, how large it is, and how often chance is taken for it."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import MS, clean_timings, iteration
from llm_perf_opt.analysis.stability import (
    LEAST_REPEATS,
    SURE,
    Floats,
    Movement,
    Stability,
    median,
    medians,
    movement_warnings,
    quantile,
    run_stability,
    stability,
)
from llm_perf_opt.core.records import RuntimeFacts
from machine_noise import STATIONARY, Plan, pairs


def noise(count: int, deviation: float = 0.005, seed: int = 1) -> Floats:
    return deviation * np.random.default_rng(seed).normal(size=count)


def steps(count: int, at: int, by: float) -> Floats:
    """A level that moves by a share at a repeat, counted from 1."""
    return np.asarray(math.log1p(by) * (np.arange(1, count + 1) >= at), np.float64)


@pytest.mark.parametrize("count", [10, 30, 60])
@pytest.mark.parametrize("size", [0.05, -0.05])
def test_a_drift_is_found_with_its_size(count: int, size: float) -> None:
    found = stability(math.log1p(size) * np.linspace(0, 1, count) + noise(count))
    assert (found.movement, found.at, found.repeats) == (Movement.DRIFT, 0, count)
    assert found.size == pytest.approx(size, abs=0.01)
    assert found.p_value <= SURE
    assert found.moved


@pytest.mark.parametrize(("count", "at"), [(10, 6), (12, 7), (30, 16), (30, 6), (30, 25), (60, 50)])
@pytest.mark.parametrize("size", [0.05, -0.05])
def test_a_level_shift_is_found_with_its_place_and_size(count: int, at: int, size: float) -> None:
    found = stability(steps(count, at, size) + noise(count))
    assert (found.movement, found.at) == (Movement.SHIFT, at)
    assert found.size == pytest.approx(size, abs=0.01)


@pytest.mark.parametrize(("count", "at"), [(100, 51), (121, 100), (1000, 301)])
def test_a_long_run_is_folded_and_its_place_still_found(count: int, at: int) -> None:
    found = stability(steps(count, at, 0.05) + noise(count))
    assert found.movement is Movement.SHIFT
    assert found.at == pytest.approx(at, abs=count / 60 + 1)
    assert found.repeats == count


def test_an_outlier_or_two_at_the_end_are_no_movement() -> None:
    for count in (1, 2):
        assert not stability(steps(30, 31 - count, 0.5) + noise(30)).moved


@pytest.mark.parametrize("count", [0, 1, 2, LEAST_REPEATS - 1])
def test_too_few_repeats_show_nothing(count: int) -> None:
    found = stability(np.log(100.0 + np.arange(count)))
    assert (found.movement, found.moved, found.repeats) == (Movement.UNKNOWN, False, count)


def test_the_fewest_repeats_show_a_drift_that_no_repeat_breaks() -> None:
    assert stability(np.log(100.0 + np.arange(LEAST_REPEATS))).movement is Movement.DRIFT


def test_equal_repeats_and_few_values_are_steady() -> None:
    assert stability(np.zeros(30)) == Stability(Movement.STEADY, 0.0, 0, 1.0, 30)
    assert not stability(np.log([100.0, 101.0] * 15)).moved


@pytest.mark.parametrize("count", [10, 30])
@pytest.mark.parametrize(("kind", "most"), [("normal", 0.02), ("log-normal", 0.02), ("bimodal", 0.02), ("AR(1) 0.8", 0.15)])
def test_steady_runs_are_rarely_called_moving(count: int, kind: str, most: float) -> None:
    """The level is 1 % for each test. Neighbors as alike as 0.8 pass more: so few repeats hardly tell them from a drift."""
    runs = [np.log(run) for pair in pairs(kind, Plan(repeats=count), 250) for side in pair for run in side]
    assert kind in STATIONARY
    assert np.mean([stability(run).moved for run in runs]) <= most


def test_the_same_repeats_get_the_same_answer() -> None:
    run = steps(30, 12, 0.03) + noise(30, 0.02)
    assert stability(run) == stability(run.copy())


# --- of a run -----------------------------------------------------------------------------------------------------------


def moving(prefill: Floats, decode: Floats) -> dict[str, Stability]:
    """Of a run whose stages take these times, in milliseconds."""
    repeats = [iteration(round(one * MS), [round(other * MS)]) for one, other in zip(prefill, decode, strict=True)]
    return run_stability(clean_timings(repeats))


FLAT = 100 * np.exp(noise(30, 0.002))
SHIFTED = 100 * np.exp(steps(30, 16, 0.05) + noise(30, 0.002))


def test_a_run_is_judged_by_its_requests_and_its_stages() -> None:
    assert {key: one.movement for key, one in moving(FLAT, FLAT).items()} == dict.fromkeys(
        ("e2e", "prefill", "decode"), Movement.STEADY
    )
    found = moving(SHIFTED, FLAT / 1000)
    assert [found[key].movement for key in ("e2e", "prefill", "decode")] == [Movement.SHIFT, Movement.SHIFT, Movement.STEADY]


def test_stages_that_ran_together_are_not_judged() -> None:
    together = clean_timings([iteration()] * 10, runtime=RuntimeFacts("vllm", "1", "by arrival", inseparable="together"))
    assert list(run_stability(together)) == ["e2e"]
    assert "decode" not in run_stability(clean_timings([iteration(steps_ns=())] * 10))


def test_a_run_that_moved_is_warned_of_once() -> None:
    assert movement_warnings(moving(FLAT, FLAT)) == []
    (warning,) = movement_warnings(moving(SHIFTED, SHIFTED))
    assert warning.text.startswith("End to end: repeats shift by +4.9 % at repeat 16.")
    assert "three alternating runs" in warning.text
    (warning,) = movement_warnings(moving(SHIFTED / 1000, FLAT))
    assert warning.text.startswith("Prefill: repeats shift by")
    drifting = 100 * np.exp(0.04 * np.linspace(0, 1, 30) + noise(30, 0.002))
    (warning,) = movement_warnings(moving(drifting, drifting))
    assert warning.text.startswith("End to end: repeats drift by +3.9 % from first to last.")


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40), st.floats(0, 1))
def test_medians_and_quantiles_are_those_of_numpy(values: list[float], share: float) -> None:
    numbers = np.asarray(values)
    assert median(numbers) == np.median(numbers)
    assert quantile(np.sort(numbers), share) == np.quantile(numbers, share)
    table = np.stack([numbers, numbers[::-1] + 1, numbers * numbers])
    assert (medians(table) == np.median(table, axis=1)).all()

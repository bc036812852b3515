"""Whether what the machine did explains a difference: shifts and drifts inside the runs, and changes that are real."""

import math

import numpy as np
import pytest

from llm_perf_opt.analysis.comparison.effects import rival
from llm_perf_opt.analysis.stability import Floats, Movement

BY = 0.07


def noise(seed: int, deviation: float = 0.02, count: int = 30) -> Floats:
    return deviation * np.random.default_rng(seed).normal(size=count)


def switched(first: int, last: int, by: float = BY, count: int = 30) -> Floats:
    """Repeats `first` to `last`, counted from 1, at another level."""
    places = np.arange(1, count + 1)
    return np.asarray(by * ((places >= first) & (places <= last)), np.float64)


@pytest.mark.parametrize("ended", [2, 3, 8, 14])
def test_the_end_of_the_earlier_run_at_the_level_of_the_later_is_the_machine(ended: int) -> None:
    found = rival(noise(1) + switched(31 - ended, 30), noise(2) + BY)
    assert found is not None
    assert (found.movement, found.side) == (Movement.SHIFT, "base")
    assert found.last == 30
    assert found.first == pytest.approx(31 - ended, abs=1)
    assert f"to {found.last} of base ran at the level of new" in found.words


@pytest.mark.parametrize("begun", [2, 3, 8, 14])
def test_the_beginning_of_the_later_run_at_the_level_of_the_earlier_is_the_machine(begun: int) -> None:
    found = rival(noise(1), noise(2) + switched(begun + 1, 30))
    assert found is not None
    assert (found.movement, found.side, found.first) == (Movement.SHIFT, "new", 1)
    assert found.last == pytest.approx(begun, abs=1)


def test_the_sides_are_named_as_they_were_given() -> None:
    found = rival(noise(1, 0.01) + switched(26, 30), noise(2, 0.01) + BY, ("new", "base"))
    assert found is not None
    assert found.side == "new"
    assert found.words == "repeats 26 to 30 of new ran at the level of base"


def test_at_the_far_ends_more_repeats_are_needed() -> None:
    """There the machine must have switched twice: the same repeats in the opposite order do not explain the difference."""
    earlier, later = noise(1) + switched(29, 30, 0.05), noise(4) + 0.05
    near = rival(earlier, later)
    assert near is not None
    assert near.evidence < 2 * math.log(15)
    assert rival(earlier[::-1], later[::-1]) is None
    longer = rival(noise(1) + switched(1, 8), noise(2) + BY)
    assert longer is not None
    assert longer.first == 1
    assert longer.last == pytest.approx(8, abs=1)


@pytest.mark.parametrize("order", ["continuing", "own"])
@pytest.mark.parametrize("size", [0.06, -0.06])
def test_a_drift_that_makes_the_difference_is_the_machine(order: str, size: float) -> None:
    line = size * np.linspace(0, 1, 30)
    earlier, later = (line, line + size) if order == "continuing" else (-line, line)
    found = rival(noise(3) + earlier, noise(4) + later)
    assert found is not None
    assert (found.movement, found.side, found.first, found.last) == (Movement.DRIFT, "both", 0, 0)
    assert found.evidence > 2


@pytest.mark.parametrize("outlier", [0.4, 2.0, -0.4])
def test_outliers_hide_neither_a_shift_nor_a_drift(outlier: float) -> None:
    """One repeat of each run takes far more or far less time than the others."""
    line, alone = 0.06 * np.linspace(0, 1, 30), switched(12, 12, outlier)
    shift = rival(noise(1) + switched(25, 30) + alone, noise(2) + BY + alone)
    assert shift is not None
    assert (shift.movement, shift.side, shift.last) == (Movement.SHIFT, "base", 30)
    drift = rival(noise(3) + line + alone, noise(4) + line + 0.06 + alone)
    assert drift is not None
    assert drift.movement is Movement.DRIFT


@pytest.mark.slow
@pytest.mark.parametrize("change", [0.05, -0.05, 0.10, 1.0])
@pytest.mark.parametrize(("count", "most"), [(10, 0.06), (30, 0.03)])
def test_a_change_between_steady_runs_seldom_has_a_rival(change: float, count: int, most: float) -> None:
    pairs = [(noise(2 * seed, count=count), noise(2 * seed + 1, count=count) + change) for seed in range(300)]
    assert sum(rival(earlier, later) is not None for earlier, later in pairs) <= most * 300


def test_a_change_far_beyond_what_the_machine_does_is_a_change() -> None:
    """A drift of 5 % in either run, and a program half as fast."""
    line = 0.05 * np.linspace(0, 1, 30)
    assert rival(noise(1) + line, noise(2) + line + 0.7) is None


def test_equal_runs_and_repeats_without_noise_are_no_trouble() -> None:
    flat = np.zeros(30)
    assert rival(flat, flat) is None
    assert rival(flat, flat + 0.05) is None
    found = rival(switched(30, 30, 0.05), flat + 0.05)
    assert found is not None
    assert (found.first, found.last, found.words) == (30, 30, "repeat 30 of base ran at the level of new")

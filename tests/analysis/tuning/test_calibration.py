"""Predictions that learn: errors by finding, and intervals from earlier trials."""

import random
from dataclasses import replace

import pytest

from llm_perf_opt.analysis.tuning.calibration import COVERAGE, FEWEST, CalibrationPoint, calibration_rows, point_of
from llm_perf_opt.analysis.verification import Trial

POINT = CalibrationPoint("some_change", "a device", "tiny", "run", "2026", 10_000, 6_000, 5_000)


def points(measured: list[int]) -> list[CalibrationPoint]:
    return [replace(POINT, run=f"run-{number}", measured_ns=ns) for number, ns in enumerate(measured)]


def test_the_error_and_the_ratio_by_hand() -> None:
    """10 → 6 µs were predicted, 10 → 5 µs measured: 20 % too slow, 5/4 of the saving."""
    assert POINT.error == pytest.approx(0.2)
    assert POINT.ratio == pytest.approx(1.25)


def test_few_trials_show_errors_but_give_no_interval() -> None:
    (row,) = calibration_rows(points([5_000, 6_000, 8_000]))
    assert (row.n, row.median_error) == (3, 0.0)
    assert row.worst_error == pytest.approx(-0.25)
    assert row.bounds(4_000) is None


def test_enough_trials_give_the_interval_of_the_saving() -> None:
    """Nine ratios 0.2, 0.4, … 1.8: the smallest and the largest contain a tenth one in 8 of 10 cases."""
    (row,) = calibration_rows(points([10_000 - round(4_000 * 0.2 * number) for number in range(1, 10)]))
    assert row.n == FEWEST
    assert [row.low_ratio, row.high_ratio] == pytest.approx([0.2, 1.8])
    assert [*(row.bounds(4_000) or ())] == pytest.approx([800, 7_200])


def test_the_interval_keeps_its_level() -> None:
    """With nine trials, a tenth one is inside in 8 of 10 cases, whatever the distribution of the ratios."""
    draw, inside = random.Random(3), 0
    for _ in range(1000):
        ratios = [draw.random() ** 3 * 2 for _ in range(10)]
        (row,) = calibration_rows(points([10_000 - round(4_000 * ratio) for ratio in ratios[:9]]))
        assert row.low_ratio is not None
        assert row.high_ratio is not None
        inside += row.low_ratio <= ratios[9] <= row.high_ratio
    assert inside / 1000 == pytest.approx(COVERAGE, abs=0.04)


def test_a_trial_without_both_figures_is_no_point() -> None:
    known = {"device": "a device", "model": "tiny", "run": "run", "made": "2026"}
    trial = Trial("some_change", ("b=c",), "token", "run", "", 4_000, 3_000, 5_000, 10_000, 5_000, 1)
    found = point_of(trial, **known)
    assert found is not None
    assert (found.predicted_ns, found.measured_ns) == (6_000, 5_000)
    assert point_of(replace(trial, after_ns=None), **known) is None
    assert point_of(replace(trial, kind="throughput"), **known) is None
    assert point_of(replace(trial, predicted_saving_ns=0), **known) is None, "no saving to compare with"

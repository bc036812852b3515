"""What less kernel time saves on the wall clock, from a mostly idle device to a busy one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import MS
from evidence_builders import stage_evidence
from llm_perf_opt.analysis.evidence import StageEvidence
from llm_perf_opt.analysis.findings.finding import DEVICE_BOUND, HOST_BOUND, saving_of, wall_clock_saving
from llm_perf_opt.analysis.trace.idle import IdleCause

BOUNDS = (2.0 * MS, 4.0 * MS, 8.0 * MS)


def busy(percent: float, unprofiled: bool = True, overlap: float = 1.0) -> StageEvidence:
    idle = round(100 * MS - percent * MS)
    return stage_evidence(busy_ns=100 * MS - idle, idle={IdleCause.LAUNCH_BOUND: idle}, unprofiled=unprofiled, overlap=overlap)


def test_a_busy_device_saves_all_of_it_and_an_idle_one_nothing() -> None:
    assert wall_clock_saving(busy(95), BOUNDS).bounds == BOUNDS
    nothing = wall_clock_saving(busy(40), BOUNDS)
    assert (nothing.bounds, nothing.certain) == ((0, 0, 0), True)
    assert "the device is idle for 60 %" in nothing.claim


def test_in_between_a_share_is_counted_and_the_lower_bound_is_zero() -> None:
    half = wall_clock_saving(busy(70), BOUNDS)
    assert half.bounds == pytest.approx((0, 2.0 * MS, 8.0 * MS))
    assert "50 % of the saved kernel time" in half.because


def test_a_profiler_lengthens_gaps_so_a_stage_that_may_be_busy_without_it_keeps_its_bound() -> None:
    maybe = wall_clock_saving(busy(40, unprofiled=False), BOUNDS)
    assert (maybe.bounds, maybe.certain) == ((0, 0, 8.0 * MS), False)
    assert "Under the profiler" in maybe.claim
    assert wall_clock_saving(busy(10, unprofiled=False), BOUNDS).bounds == (0, 0, 0)  # no profiler stretches that much


def test_concurrent_kernels_save_less_than_their_sum() -> None:
    shared = wall_clock_saving(busy(95, overlap=0.5), BOUNDS)
    assert shared.bounds == (1.0 * MS, 2.0 * MS, 8.0 * MS)
    assert "concurrently" in shared.because


@given(st.floats(0, 130), st.booleans(), st.floats(0.01, 1), st.lists(st.floats(0, 5e8), min_size=3, max_size=3))
def test_bounds_stay_in_order_grow_with_the_busy_share_and_never_pass_the_stage(
    percent: float, unprofiled: bool, overlap: float, values: list[float]
) -> None:
    low, expected, high = sorted(values)
    stage = busy(percent, unprofiled, overlap)
    found = wall_clock_saving(stage, (low, expected, high)).bounds
    assert 0 <= found[0] <= found[1] <= found[2]
    assert found[1] <= expected
    saving = saving_of(stage, *found)
    assert 0 <= saving.low_ns <= saving.expected_ns <= saving.high_ns <= stage.wall_ns
    more = wall_clock_saving(busy(min(percent + 10, 130), unprofiled, overlap), (low, expected, high)).bounds
    assert more[1] >= found[1] - 1e-6


def test_the_thresholds_are_in_order() -> None:
    assert 0 < HOST_BOUND < DEVICE_BOUND < 1

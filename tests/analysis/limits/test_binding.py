"""Verdicts never go beyond the evidence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.analysis.cpu_budget import cpu_verdict
from llm_perf_opt.analysis.limits.binding import (
    BUSY_ENOUGH,
    COMPUTE,
    FRAMEWORK,
    HOW_TO_KNOW,
    KERNELS,
    LAUNCH,
    MEMORY,
    NEAR_ROOFLINE,
    NEITHER,
    OPERATORS,
    UNKNOWN,
    UTILIZATION_MARGIN,
    VERDICTS,
    WAITING,
    KernelShare,
    RooflineDistance,
    sampled_share,
    verdict,
)
from llm_perf_opt.analysis.limits.roofline import ComponentRoofline, RooflineTime
from llm_perf_opt.core.records import Maybe, Missing

NO_TORCH = Missing("the run was made without the torch pass")


def nearest(times: float, bound: str = "memory") -> RooflineDistance:
    flops, moved = (1, 10**9) if bound == "memory" else (10**9, 1)
    compute, memory = (1e-6, 1e-3) if bound == "memory" else (1e-3, 1e-6)
    return RooflineDistance(times, RooflineTime((ComponentRoofline("mlp", flops, moved, compute, memory),)), "measured")


@pytest.mark.parametrize(
    ("times", "share", "word"),
    [
        (6.5, NO_TORCH, UNKNOWN),
        (3.5, NO_TORCH, UNKNOWN),
        (1.9, NO_TORCH, MEMORY),
        (6.5, KernelShare(1.0, 1.0, 1.0), KERNELS),
        (3.5, KernelShare(0.86, 1.0, 0.88), KERNELS),
        (1.8, KernelShare(0.86, 1.0, 0.88), MEMORY),
        (2.0, KernelShare(0.9, 0.9), MEMORY),
        (2.01, KernelShare(0.9, 0.9), NEITHER),
        (3.46, KernelShare(0.875, 0.875), KERNELS),
        (3.0, KernelShare(0.55, 0.55), NEITHER),
        (4.0, KernelShare(0.55, 0.95, 0.9), UNKNOWN),
        (28.0, KernelShare(0.21, 0.24, 0.23), LAUNCH),
        (10.0, KernelShare(0.36, 1.0, 0.88), UNKNOWN),
        (3.5, KernelShare(0.9, 0.9), KERNELS),
        (3.5, KernelShare(0.3, 0.3), LAUNCH),
        (6.5, KernelShare(0.9, 0.9), KERNELS),
    ],
)
def test_on_a_gpu_what_its_kernels_did_decides(times: float, share: Maybe[KernelShare], word: str) -> None:
    found, because = verdict(nearest(times), share, on_cpu=False)
    assert found == word
    if word == UNKNOWN:
        assert HOW_TO_KNOW in because
        assert (NO_TORCH.why in because) == isinstance(share, Missing)
    elif not isinstance(share, Missing):
        assert share.words in because
        assert ("telemetry" in because) == (not isinstance(share.sampled, Missing))


def test_on_a_cpu_the_roofline_time_decides() -> None:
    assert verdict(nearest(2, "compute"), NO_TORCH, on_cpu=True)[0] == COMPUTE
    for times in (4, 6):
        far, because = verdict(nearest(times), NO_TORCH, on_cpu=True)
        assert far == NEITHER
        assert f"{times}.0 × its roofline time" in because


def test_without_peaks_only_an_idle_device_has_a_verdict() -> None:
    none = Missing("no peak is known to compare with")
    assert verdict(none, NO_TORCH, on_cpu=False) == (UNKNOWN, none.why)
    assert verdict(none, KernelShare(0.9, 0.9), on_cpu=False)[0] == UNKNOWN
    assert verdict(none, KernelShare(0.2, 0.2), on_cpu=False)[0] == LAUNCH


def test_every_word_is_defined() -> None:
    defined = [word for words, _ in VERDICTS for word in words.split(", ")]
    assert sorted(defined) == sorted([LAUNCH, MEMORY, COMPUTE, KERNELS, FRAMEWORK, OPERATORS, WAITING, NEITHER, UNKNOWN])


shares = st.floats(0, 1)


@given(st.floats(0.01, 1), shares, shares, shares, shares, shares, shares, st.floats(0, UTILIZATION_MARGIN))
def test_sampled_bounds_contain_the_true_share(
    own: float,
    rest: float,
    busy: float,
    others_busy: float,
    gap_busy: float,
    roofline: float,
    others_roofline: float,
    more: float,
) -> None:
    """For any stages, gaps between repeats and error of the readings, the stage's true share is within its bounds."""
    others = (1 - own) * rest
    seen = min(1.0, own * busy + others * others_busy + (1 - own - others) * gap_busy + more)
    found = sampled_share(seen, own, others, roofline * busy, others_roofline * others_busy)
    assert found.low - 1e-9 <= busy <= found.high + 1e-9
    assert 0 <= found.low <= found.high + 1e-9


@pytest.mark.parametrize(
    ("sampled", "prefill", "decode"),
    [(0.204, 0.262, 0.141), (0.926, 0.301, 0.875), (0.195, 0.199, 0.136), (0.24, 0.206, 0.173), (0.917, 0.24, 0.887)],
)
def test_torch_shares_of_real_runs_are_within_the_sampled_bounds(sampled: float, prefill: float, decode: float) -> None:
    """Runs of one model on an H200, eager and compiled: GPU utilization, and kernel time by the torch pass."""
    for share in (0.02, 0.11):  # of the repeats' time, for prefill
        for own, busy in ((share, prefill), (1 - share, decode)):
            found = sampled_share(sampled, own, 1 - own, 0.0, 0.0)
            assert found.low <= busy <= found.high


@given(st.floats(1, 100), shares, shares)
def test_a_verdict_that_names_a_limit_is_near_it_and_has_seen_kernels_run(times: float, one: float, two: float) -> None:
    share = KernelShare(min(one, two), max(one, two), 0.5)
    word, _ = verdict(nearest(times), share, on_cpu=False)
    if word in (MEMORY, COMPUTE):
        assert times <= NEAR_ROOFLINE
    if word in (MEMORY, COMPUTE, KERNELS):
        assert max(share.low, 1 / times) >= BUSY_ENOUGH
    if word == LAUNCH:
        assert share.high < BUSY_ENOUGH


@given(st.floats(1, 100), st.floats(0, 1))
def test_the_verdict_agrees_with_the_largest_share_of_the_time(times: float, more: float) -> None:
    """As in the budget: roofline time, kernels beyond it and waiting add up to the time."""
    roofline = 1 / times
    busy = roofline + more * (1 - roofline)
    parts = {MEMORY: roofline, KERNELS: busy - roofline, LAUNCH: 1 - busy}
    word, _ = verdict(nearest(times), KernelShare(busy, busy), on_cpu=False)
    if word in parts:
        assert parts[word] == pytest.approx(max(parts.values()))
    else:
        assert word == NEITHER
        assert max(parts.values()) <= BUSY_ENOUGH or times <= NEAR_ROOFLINE + 1e-9


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (0.496, "49.6 %"),
        (0.4996, "49.96 %"),
        (0.499999, "just under 50 %"),
        (0.5, "50 %"),
        (0.504, "50.4 %"),
        (0.42, "42 %"),
        (0.6, "60 %"),
        (1.0, "100 %"),
    ],
)
def test_a_share_does_not_round_to_the_other_side_of_what_decides(share: float, said: str) -> None:
    assert KernelShare(share, share).words == f"kernels fill {said} of the time"
    assert f"kernels run for {said} to 100 %" in KernelShare(share, 1.0, 0.7).words or share == 1.0


@pytest.mark.parametrize(
    ("times", "said"), [(2.04, "2.04"), (1.96, "1.96"), (2.0, "2.0"), (2.0004, "just over 2.0"), (3.46, "3.5")]
)
def test_times_roofline_does_not_round_across_the_threshold(times: float, said: str) -> None:
    assert nearest(times).words.startswith(f"it takes {said} × its roofline time")


@pytest.mark.parametrize(
    ("shares", "word"),
    [
        ({"floor": 0.1, "framework": 0.3, "python": 0.3, "matmul": 0.3}, "framework-bound"),
        ({"floor": 0.1, "framework": 0.1, "python": 0.1, "matmul": 0.5, "memory": 0.2}, "operator-bound"),
        ({"floor": 0.1, "waiting": 0.6, "matmul": 0.3}, "waiting"),
        ({"floor": 0.3, "framework": 0.35, "matmul": 0.35}, "near neither limit"),
    ],
)
def test_the_budget_decides_what_bounds_a_stage_on_a_cpu(shares: dict[str, float], word: str) -> None:
    found, because = cpu_verdict(nearest(9.0), shares)
    assert found == word
    assert because.startswith(nearest(9.0).words)

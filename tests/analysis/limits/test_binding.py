"""No verdict says more than was seen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.analysis.limits.binding import (
    BUSY_ENOUGH,
    COMPUTE,
    HOW_TO_KNOW,
    KERNELS,
    LAUNCH,
    MEMORY,
    NEAR_FLOOR,
    NEITHER,
    READ_TOO_MUCH,
    UNKNOWN,
    VERDICTS,
    KernelShare,
    Nearest,
    sampled_share,
    verdict,
)
from llm_perf_opt.analysis.limits.floor import Floor, FloorPart
from llm_perf_opt.core.records import Maybe, Missing

NO_TORCH = Missing("the run was made without the torch pass")


def nearest(times: float, bound: str = "memory") -> Nearest:
    flops, moved = (1, 10**9) if bound == "memory" else (10**9, 1)
    compute, memory = (1e-6, 1e-3) if bound == "memory" else (1e-3, 1e-6)
    return Nearest(times, Floor((FloorPart("mlp", flops, moved, compute, memory),)), "measured")


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


def test_on_a_cpu_the_floor_decides() -> None:
    assert verdict(nearest(2, "compute"), NO_TORCH, on_cpu=True)[0] == COMPUTE
    for times in (4, 6):
        far, because = verdict(nearest(times), NO_TORCH, on_cpu=True)
        assert far == NEITHER
        assert f"{times}.0 × its roofline time" in because


def test_without_limits_only_an_idle_device_is_told() -> None:
    none = Missing("no peak is known to compare with")
    assert verdict(none, NO_TORCH, on_cpu=False) == (UNKNOWN, none.why)
    assert verdict(none, KernelShare(0.9, 0.9), on_cpu=False)[0] == UNKNOWN
    assert verdict(none, KernelShare(0.2, 0.2), on_cpu=False)[0] == LAUNCH


def test_every_word_is_defined() -> None:
    defined = [word for words, _ in VERDICTS for word in words.split(", ")]
    assert sorted(defined) == sorted([LAUNCH, MEMORY, COMPUTE, KERNELS, NEITHER, UNKNOWN])


shares = st.floats(0, 1)


@given(st.floats(0.01, 1), shares, shares, shares, shares, shares, shares, st.floats(0, READ_TOO_MUCH))
def test_what_the_readings_leave_possible_holds_what_was(
    own: float, rest: float, busy: float, others_busy: float, gap_busy: float, floor: float, others_floor: float, more: float
) -> None:
    """Whatever the stages and the gaps between repeats did, and however far the readings overstate it, the stage's own share lies
    within what is told of it."""
    others = (1 - own) * rest
    seen = min(1.0, own * busy + others * others_busy + (1 - own - others) * gap_busy + more)
    found = sampled_share(seen, own, others, floor * busy, others_floor * others_busy)
    assert found.low - 1e-9 <= busy <= found.high + 1e-9
    assert 0 <= found.low <= found.high + 1e-9


@pytest.mark.parametrize(
    ("sampled", "prefill", "decode"),
    [(0.204, 0.262, 0.141), (0.926, 0.301, 0.875), (0.195, 0.199, 0.136), (0.24, 0.206, 0.173), (0.917, 0.24, 0.887)],
)
def test_the_torch_passes_of_real_runs_lie_within_what_the_readings_leave_possible(
    sampled: float, prefill: float, decode: float
) -> None:
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
        assert times <= NEAR_FLOOR
    if word in (MEMORY, COMPUTE, KERNELS):
        assert max(share.low, 1 / times) >= BUSY_ENOUGH
    if word == LAUNCH:
        assert share.high < BUSY_ENOUGH


@given(st.floats(1, 100), st.floats(0, 1))
def test_the_word_agrees_with_the_largest_part_of_the_time(times: float, more: float) -> None:
    """As in the budget: the floor, what kernels take beyond it, and waiting make up the time."""
    floor = 1 / times
    busy = floor + more * (1 - floor)
    parts = {MEMORY: floor, KERNELS: busy - floor, LAUNCH: 1 - busy}
    word, _ = verdict(nearest(times), KernelShare(busy, busy), on_cpu=False)
    if word in parts:
        assert parts[word] == pytest.approx(max(parts.values()))
    else:
        assert word == NEITHER
        assert max(parts.values()) <= BUSY_ENOUGH or times <= NEAR_FLOOR + 1e-9


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (0.496, "49.6%"),
        (0.4996, "49.96%"),
        (0.499999, "just under 50%"),
        (0.5, "50%"),
        (0.504, "50.4%"),
        (0.42, "42%"),
        (0.6, "60%"),
        (1.0, "100%"),
    ],
)
def test_a_share_does_not_round_to_the_other_side_of_what_decides(share: float, said: str) -> None:
    assert KernelShare(share, share).words == f"kernels fill {said} of the time"
    assert f"kernels run for {said} to 100%" in KernelShare(share, 1.0, 0.7).words or share == 1.0


@pytest.mark.parametrize(
    ("times", "said"), [(2.04, "2.04"), (1.96, "1.96"), (2.0, "2.0"), (2.0004, "just over 2.0"), (3.46, "3.5")]
)
def test_times_its_floor_do_not_round_to_the_other_side_either(times: float, said: str) -> None:
    assert nearest(times).words.startswith(f"it takes {said} × its roofline time")

"""Kernels paired by role: renamed ones meet, and each kernel of either side stands once."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.analysis.comparison.kernels import match_kernels


@dataclass(frozen=True)
class Kernel:
    name: str
    stage: str
    role: str
    calls: int
    time_ns: int


def test_a_renamed_kernel_meets_its_counterpart() -> None:
    base = [
        Kernel("sm80_xmma_gemm_bf16_128x64", "decode", "gemm", 112, 5_000),
        Kernel("vectorized_add<float>", "decode", "elementwise", 56, 100),
        Kernel("flash_fwd_splitkv", "decode", "attention", 28, 700),
        Kernel("old_memset", "decode", "other", 3, 10),
    ]
    new = [
        Kernel("sm90_xmma_gemm_bf16_128x128", "decode", "gemm", 112, 4_000),
        Kernel("vectorized_add<float>", "decode", "elementwise", 56, 110),
        Kernel("fmha_v2_flash", "decode", "attention", 28, 650),
        Kernel("triton_fused_norm", "decode", "norm", 57, 300),
    ]
    found = match_kernels(base, new)
    assert [(pair.role, pair.how, pair.new_ns - pair.base_ns) for pair in found.pairs] == [
        ("gemm", "same role", -1_000), ("attention", "same role", -50), ("elementwise", "same name", 10),
    ]  # fmt: skip
    assert [kernel.name for kernel in found.appeared] == ["triton_fused_norm"]
    assert [kernel.name for kernel in found.vanished] == ["old_memset"]


def test_order_and_call_counts_decide_between_like_kernels() -> None:
    """Two GEMMs of a layer, both renamed: the one called 28 times stays the one called 28 times, the first stays the first."""
    base = [
        Kernel("gemm_a", "decode", "gemm", 28, 1),
        Kernel("gemm_b", "decode", "gemm", 56, 1),
        Kernel("gemm_c", "decode", "gemm", 56, 1),
    ]
    new = [
        Kernel("tile_x", "decode", "gemm", 56, 1),
        Kernel("tile_y", "decode", "gemm", 56, 1),
        Kernel("tile_z", "decode", "gemm", 28, 1),
    ]
    pairs = {pair.base_name: pair.new_name for pair in match_kernels(base, new).pairs}
    assert pairs == {"gemm_a": "tile_z", "gemm_b": "tile_x", "gemm_c": "tile_y"}


def test_other_stages_classes_and_call_counts_do_not_pair() -> None:
    one = [Kernel("a", "decode", "gemm", 10, 1)]
    for other in (
        Kernel("b", "prefill", "gemm", 10, 1),
        Kernel("b", "decode", "norm", 10, 1),
        Kernel("b", "decode", "gemm", 16, 1),
    ):
        found = match_kernels(one, [other])
        assert (len(found.pairs), len(found.appeared), len(found.vanished)) == (0, 1, 1)


kernels = st.lists(
    st.builds(
        Kernel, st.sampled_from("abcdef"), st.sampled_from(["prefill", "decode"]), st.sampled_from(["gemm", "norm"]),
        st.integers(0, 5), st.integers(0, 100),
    ),
    max_size=12,
)  # fmt: skip


@given(kernels, kernels)
def test_every_kernel_stands_once_and_no_time_is_lost(base: list[Kernel], new: list[Kernel]) -> None:
    found = match_kernels(base, new)
    assert len(found.pairs) + len(found.vanished) == len(base)
    assert len(found.pairs) + len(found.appeared) == len(new)
    assert sum(pair.base_ns for pair in found.pairs) + sum(one.time_ns for one in found.vanished) == sum(k.time_ns for k in base)
    assert sum(pair.new_ns for pair in found.pairs) + sum(one.time_ns for one in found.appeared) == sum(k.time_ns for k in new)
    assert not match_kernels(base, base).appeared

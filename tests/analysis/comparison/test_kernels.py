"""Kernels paired by role: renamed kernels are paired, and each kernel appears once."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kernel_fixtures import counted, traced_uses
from llm_perf_opt.analysis.comparison.kernels import ComparedKernel, match_kernels
from llm_perf_opt.analysis.kernels.classes import classify
from llm_perf_opt.analysis.kernels.names import normal_name


def test_a_renamed_kernel_meets_its_counterpart() -> None:
    base = [
        ComparedKernel("sm80_xmma_gemm_bf16_128x64", "decode", "gemm", 112, 5_000),
        ComparedKernel("vectorized_add<float>", "decode", "elementwise", 56, 100),
        ComparedKernel("flash_fwd_splitkv", "decode", "attention", 28, 700),
        ComparedKernel("old_memset", "decode", "other", 3, 10),
    ]
    new = [
        ComparedKernel("sm90_xmma_gemm_bf16_128x128", "decode", "gemm", 112, 4_000),
        ComparedKernel("vectorized_add<float>", "decode", "elementwise", 56, 110),
        ComparedKernel("fmha_v2_flash", "decode", "attention", 28, 650),
        ComparedKernel("triton_fused_norm", "decode", "norm", 57, 300),
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
        ComparedKernel("gemm_a", "decode", "gemm", 28, 1),
        ComparedKernel("gemm_b", "decode", "gemm", 56, 1),
        ComparedKernel("gemm_c", "decode", "gemm", 56, 1),
    ]
    new = [
        ComparedKernel("tile_x", "decode", "gemm", 56, 1),
        ComparedKernel("tile_y", "decode", "gemm", 56, 1),
        ComparedKernel("tile_z", "decode", "gemm", 28, 1),
    ]
    pairs = {pair.base_name: pair.new_name for pair in match_kernels(base, new).pairs}
    assert pairs == {"gemm_a": "tile_z", "gemm_b": "tile_x", "gemm_c": "tile_y"}


def test_other_stages_classes_and_call_counts_do_not_pair() -> None:
    one = [ComparedKernel("a", "decode", "gemm", 10, 1)]
    for other in (
        ComparedKernel("b", "prefill", "gemm", 10, 1),
        ComparedKernel("b", "decode", "norm", 10, 1),
        ComparedKernel("b", "decode", "gemm", 16, 1),
    ):
        found = match_kernels(one, [other])
        assert (len(found.pairs), len(found.appeared), len(found.vanished)) == (0, 1, 1)


_VECTORIZED = "void at::native::vectorized_elementwise_kernel<%s, at::native::%s, std::array<char*, 2ul> >(int)"


def test_the_spellings_of_two_tools_are_one_name() -> None:
    """Every kernel that was recorded, as torch.profiler and as Nsight Compute spell it, in another order."""
    for stage in ("prefill", "decode"):
        spelled = {normal_name(one.name): one.name for one in counted()[stage].kernels}
        pairs = [(use.name, spelled[normal_name(use.name)]) for use in traced_uses() if normal_name(use.name) in spelled]
        assert len({torch for torch, nsight in pairs if torch != nsight}) > 10
        base = [ComparedKernel(name, stage, classify(name), 28, 1) for name in dict.fromkeys(nsight for _, nsight in pairs)]
        new = [ComparedKernel(name, stage, classify(name), 7, 1) for name in sorted(dict.fromkeys(torch for torch, _ in pairs))]
        found = match_kernels(base, new)
        assert not found.appeared
        assert not found.vanished
        assert {pair.how for pair in found.pairs} == {"same name"}
        assert all(normal_name(pair.base_name) == normal_name(pair.new_name) for pair in found.pairs)
        assert [one.role for one in base] == [classify({nsight: torch for torch, nsight in pairs}[one.name]) for one in base]


def test_template_arguments_distinguish_kernels_of_one_function() -> None:
    """All of them retuned from eight elements a thread to four, and standing in another order: silu stays silu."""
    functors = ("silu_kernel", "MulFunctor<float>", "CUDAFunctor_add<float>")
    base = [ComparedKernel(_VECTORIZED % ("8", name), "decode", "elementwise", 28, 1) for name in functors]
    for order in ((1, 0, 2), (2, 1, 0), (1, 2, 0)):
        new = [ComparedKernel(_VECTORIZED % ("4", functors[place]), "decode", "elementwise", 28, 1) for place in order]
        pairs = match_kernels(base, new).pairs
        assert len(pairs) == 3
        assert all(pair.new_name == pair.base_name.replace("<8,", "<4,") for pair in pairs)
    two = match_kernels(base[:2], [replace(base[1], name=_VECTORIZED % ("4", functors[1])), replace(base[0], name="silu_mul_0")])
    assert {pair.base_name: pair.new_name for pair in two.pairs} == {
        base[0].name: "silu_mul_0", base[1].name: _VECTORIZED % ("4", functors[1]),
    }  # fmt: skip


def test_names_that_share_a_word_meet_before_those_that_stand_alike() -> None:
    base = [ComparedKernel(_VECTORIZED % ("8", "silu_kernel"), "decode", "elementwise", 28, 5)]
    new = [
        ComparedKernel("triton_poi_fused_add_arange_bmm_cat_cos_2", "decode", "elementwise", 28, 5),
        ComparedKernel("triton_poi_fused_unsafe_view_mul_silu_8", "decode", "elementwise", 28, 4),
    ]
    (pair,) = match_kernels(base, new).pairs
    assert pair.new_name == "triton_poi_fused_unsafe_view_mul_silu_8"


def test_a_kernel_of_one_step_in_eight_is_no_counterpart_of_one_in_every_step() -> None:
    base = [ComparedKernel("rebuild_a", "decode", "other", 0.125, 1)]
    found = match_kernels(base, [ComparedKernel("rebuild_b", "decode", "other", 1.0, 1)])
    assert not found.pairs
    (pair,) = match_kernels(base, [ComparedKernel("rebuild_b", "decode", "other", 0.125, 1)]).pairs
    assert pair.base_calls == 0.125


kernels = st.lists(
    st.builds(
        ComparedKernel, st.sampled_from("abcdef"), st.sampled_from(["prefill", "decode"]), st.sampled_from(["gemm", "norm"]),
        st.integers(0, 5), st.integers(0, 100),
    ),
    max_size=12,
)  # fmt: skip


@given(kernels, kernels)
def test_every_kernel_stands_once_and_no_time_is_lost(base: list[ComparedKernel], new: list[ComparedKernel]) -> None:
    found = match_kernels(base, new)
    assert len(found.pairs) + len(found.vanished) == len(base)
    assert len(found.pairs) + len(found.appeared) == len(new)
    assert sum(pair.base_ns for pair in found.pairs) + sum(one.time_ns for one in found.vanished) == sum(k.time_ns for k in base)
    assert sum(pair.new_ns for pair in found.pairs) + sum(one.time_ns for one in found.appeared) == sum(k.time_ns for k in new)
    assert not match_kernels(base, base).appeared

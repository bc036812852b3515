"""Components of a step by the structure of its layers."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from llm_perf_opt.analysis.trace.layer_structure import StepStructure, structure_of
from llm_perf_opt.core.records import Missing
from trace_builders import HEAD, PACKED, TAIL

H200 = Path(__file__).parents[2] / "fixtures" / "h200"
CORE, PROJECTIONS = "attention_core", "attention_projections"


def step(layer: list[tuple[str, str]], layers: int = 4, tail: list[tuple[str, str]] = TAIL) -> list[tuple[str, str]]:
    return [*HEAD, *layer * layers, *tail]


def found(kernels: list[tuple[str, str]]) -> StepStructure:
    result = structure_of([name for name, _ in kernels])
    assert not isinstance(result, Missing), result.why
    return result


def check(kernels: list[tuple[str, str]], layers: int = 4) -> None:
    result = found(kernels)
    assert list(result.components) == [component for _, component in kernels]
    assert result.layers == layers


def test_packed_products_of_an_engine() -> None:
    check(step(PACKED))


def test_compiled_norms_without_a_name_separate_the_products_too() -> None:
    check([("triton_red_fused_2", part) if part == "norms" else (name, part) for name, part in step(PACKED)])


def test_separate_products_with_norms_of_query_and_key() -> None:
    norm = ("triton_per_fused_rsqrt_3", "norms")
    qkv = [("nvjet_q", PROJECTIONS), norm, ("nvjet_k", PROJECTIONS), norm, ("nvjet_v", PROJECTIONS)]
    mlp = [("nvjet_gate", "mlp"), ("nvjet_up", "mlp"), ("triton_poi_fused_silu_mul_1", "mlp"), ("nvjet_down", "mlp")]
    check(step([PACKED[0], *qkv, *PACKED[2:9], *mlp]))


def test_a_product_before_the_first_layer_is_none_of_its_projections() -> None:
    kernels = step(PACKED)
    kernels.insert(4, ("cutlass_80_simt_sgemm_positions", "other"))
    check(kernels)


def test_without_any_norm_the_number_of_products_decides() -> None:
    bare = [kernel for kernel in PACKED if kernel[1] != "norms"]
    check(step(bare, tail=TAIL[1:]))
    assert "no norm" in found(step(bare, tail=TAIL[1:])).evidence
    assert "no norm" not in found(step(PACKED)).evidence


def test_a_step_without_the_lm_head() -> None:
    check(step(PACKED, tail=TAIL[:1]))


def test_the_kernels_of_an_uncompiled_norm() -> None:
    norm = [
        ("add_kernel", "other"), ("bfloat16tofloat32_copy_kernel_cuda", "norms"), ("pow_tensor_scalar_kernel", "norms"),
        ("reduce_kernel<MeanOps>", "norms"), ("CUDAFunctorOnSelf_add elementwise", "norms"), ("rsqrt_kernel_cuda", "norms"),
        ("mul elementwise", "norms"), ("copy_kernel", "norms"), ("mul elementwise", "norms"),
    ]  # fmt: skip
    check(step([*norm, *PACKED[1:8], *norm, *PACKED[9:]]))


MOE = [
    *PACKED[:9],
    ("nvjet_router", "router"),
    ("topkGatingSoftmax", "router"),
    ("moe_align_block_size_kernel", "router"),
    ("fill elementwise", "experts"),
    ("fused_moe_kernel", "experts"),
    ("act_and_mul_kernel", "experts"),
    ("fused_moe_kernel", "experts"),
    ("moe_sum_kernel", "experts"),
]
SHARED = [("nvjet_a", "shared_experts"), ("act_and_mul_kernel", "shared_experts"), ("nvjet_b", "shared_experts")]


def test_router_and_experts() -> None:
    check(step(MOE))


def test_shared_experts_after_the_others_and_a_first_layer_without_experts() -> None:
    check([*HEAD, *PACKED, *[*MOE[:-1], *SHARED, MOE[-1]] * 3, *TAIL])


def test_products_next_to_the_experts_that_are_no_mlp_are_unknown() -> None:
    check(step([*MOE[:-1], ("nvjet_a", "unknown"), MOE[-1]]))


@pytest.mark.parametrize(
    ("kernels", "word"),
    [
        (step([kernel for kernel in PACKED if kernel[1] != CORE]), "no layers"),
        (step(PACKED, layers=1), "1 layers"),
        ([("gemm", ""), ("elementwise", "")], "no layers"),
        ([], "no layers"),
        (step([*PACKED[:8], *PACKED[9:]]), "differ or are too many"),
        (step(PACKED[1:]), "do not separate"),
        (step([*PACKED, ("nvjet_extra", ""), ("nvjet_extra", "")]), "neither"),
        (step(PACKED, tail=[*TAIL, ("nvjet_second_head", "")]), "follow the last layer"),
        (step(PACKED)[:-8], "ends inside"),
        (step(PACKED, tail=TAIL[1:]), "no norm precedes"),
        (step([kernel for kernel in [*PACKED, *[("nvjet_extra", "")] * 2] if kernel[1] != "norms"]), "no norm was recognized"),
    ],
)
def test_what_is_ambiguous_is_not_assigned(kernels: list[tuple[str, str]], word: str) -> None:
    result = structure_of([name for name, _ in kernels])
    assert isinstance(result, Missing)
    assert word in result.why


@pytest.mark.parametrize(
    ("model", "layers", "products", "expected"),
    [
        ("deepseek_v2_lite", 27, {"mlp": 3, "shared_experts": 3 * 26, "lm_head": 1, "attention_projections": 4 * 27}, 0.98),
        ("qwen3_30b_a3b", 48, {"lm_head": 1, "attention_projections": 4 * 48}, 0.98),
    ],
)
def test_compiled_steps_of_an_h200(model: str, layers: int, products: dict[str, int], expected: float) -> None:
    recorded = json.loads(gzip.decompress((H200 / "moe_decode_steps.json.gz").read_bytes()))[model]["graphs"]
    kernels = [(recorded["names"][name], length) for name, kind, length, _, _ in recorded["work"] if kind == 0]
    result = structure_of([name for name, _ in kernels])
    assert not isinstance(result, Missing)
    assert result.layers == layers
    weights = [name for (kernel, _), name in zip(kernels, result.components, strict=True) if "nvjet" in kernel]
    assert {name: Counter(weights)[name] for name in products} == products
    named = sum(ns for (_, ns), name in zip(kernels, result.components, strict=True) if name not in ("other", "unknown"))
    assert named / sum(ns for _, ns in kernels) > expected

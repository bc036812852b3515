"""Findings on a compiled decode: real steps of an H200, and figures computed by hand."""

import gzip
import json
from collections import defaultdict
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest
import yaml

from builders import MS, clean_timings, in_a_row, model_facts, workload
from evidence_builders import evidence, stage_evidence
from kernel_fixtures import H200
from llm_perf_opt.analysis.evidence import Evidence
from llm_perf_opt.analysis.findings.registry import find
from llm_perf_opt.analysis.kernels.classes import KernelClass, classify
from llm_perf_opt.analysis.limits.efficiency import efficiency
from llm_perf_opt.analysis.limits.hardware import hardware_named
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.trace.layer_structure import structure_of
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing, PartTime, TorchPass
from llm_perf_opt.core.weight_records import QuantizedWeights, WeightFacts

US = 1_000
GRAPHS = {"compile": "reduce-overhead", "cache": "static", "batch_size": 1}
NO_PARTS = Missing("not found")


def timings_of(model: str, step_ns: int, batch: int = 1) -> CleanTimings:
    settings = yaml.safe_load((files("llm_perf_opt") / "config" / "conf" / "model" / f"{model}.yaml").read_text())
    facts = model_facts(architecture=settings["architecture"], dtype="bf16", device="cuda:0", device_name="NVIDIA H200")
    work = workload(batch_size=batch, prompt_tokens=(512,) * batch, padded_tokens=512, new_tokens=11)
    return replace(clean_timings(in_a_row(8, 80 * MS, [step_ns] * 10)), model=facts, workload=work)


def compiled(
    timings: CleanTimings, kernels: list[tuple[str, int, int]], parts: Maybe[tuple[PartTime, ...]] = NO_PARTS, **runtime: Any
) -> Evidence:
    """Ten steps in CUDA graphs with these kernels (name, calls and ns per step), which fill 92 % of the time."""
    busy = sum(ns for _, _, ns in kernels) * 10
    stage = stage_evidence(
        wall_ns=round(busy / 0.92), busy_ns=busy, kernels=[(name, 10 * calls, 10 * ns) for name, calls, ns in kernels],
        launches=10, idle={},
    )  # fmt: skip
    datasheet = hardware_named("h200")
    torch = TorchPass("light", {}, 1, NO_PARTS, parts, (), "", 0)
    return evidence(
        stage,
        timings=timings,
        efficiency=efficiency(timings, NO_PARTS, datasheet, NO_PARTS),
        torch=torch,
        hardware=datasheet,
        config={"runtime": {**GRAPHS, **runtime}},
    )


def found(given: Evidence) -> dict[str, Finding]:
    return {one.id: one for one in find(given)}


def recorded(model: str) -> tuple[list[tuple[str, int, int]], Maybe[tuple[PartTime, ...]], int]:
    """A compiled step of an H200: its kernels by name, its components by their order, and its time."""
    step = json.loads(gzip.decompress((H200 / "moe_decode_steps.json.gz").read_bytes()))[model]["graphs"]
    kernels: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    work = [(step["names"][name], ns) for name, kind, ns, _, _ in step["work"] if kind == 0]
    for name, ns in work:
        kernels[name] = [kernels[name][0] + 1, kernels[name][1] + ns]
    structure = structure_of([name for name, _ in work])
    assert not isinstance(structure, Missing), structure.why
    parts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for component, (_, ns) in zip(structure.components, work, strict=True):
        parts[component] = [parts[component][0] + 1, parts[component][1] + ns]
    times = tuple(PartTime("decode", name, count, ns) for name, (count, ns) in parts.items())
    return [(name, count, ns) for name, (count, ns) in kernels.items()], times, step["step_ns"]


@pytest.mark.parametrize(
    ("model", "products_us", "attention_us", "slowest"),
    [("qwen3_30b_a3b", 1419, 831, "attention projections: 240 kernels"), ("deepseek_v2_lite", 1332, 423, "shared experts: 130")],
)
def test_a_compiled_step_of_an_h200_gets_findings(model: str, products_us: int, attention_us: int, slowest: str) -> None:
    kernels, parts, step_ns = recorded(model)
    by_id = found(compiled(timings_of(model, step_ns), kernels, parts))
    products = by_id["slow_products"]
    assert products.overrides == ["runtime.row_kernel=true"]
    assert f"take {products_us / 1000:.2f} ms per token" in products.claim
    assert any(row.startswith(slowest) for row in products.evidence)
    assert "best rate of this run: LM head" in products.evidence[-1]
    attention = by_id["slow_decode_attention"]
    assert f"takes {attention_us} µs per token" in attention.claim
    assert attention.overrides == []
    assert attention.change
    assert by_id["many_small_kernels"].overrides == []
    assert by_id["many_small_kernels"].change
    eight, four = by_id["eight_bit_weights"], by_id["four_bit_weights"]
    assert 0 < (four.saving_ns or 0) < (eight.saving_ns or 0) < step_ns / 2
    assert "lossy" in eight.title
    for one in by_id.values():
        if one.saving_ns is not None:
            assert (one.saving_low_ns or 0) <= one.saving_ns <= (one.saving_high_ns or 0) < step_ns


# --- by hand ------------------------------------------------------------------------------------------------------------------

NORM, ADD, LIBRARY, HEAD = "triton_red_fused_mean_rsqrt_1", "triton_poi_fused_mul_silu_2", "nvjet_sm90_tst_64x8", "nvjet_head"
MODEL = "llama3_8b"
"""32 layers; weights at 4.8 TB/s per step: attention projections 559.2 µs, MLP 2,349 µs, LM head 218.9 µs."""


def by_hand(**runtime: Any) -> Evidence:
    kernels = [(LIBRARY, 224, 6000 * US), (HEAD, 1, 243 * US), (NORM, 64, 128 * US), (ADD, 32, 32 * US)]
    parts = (
        PartTime("decode", "attention_projections", 128, 2000 * US),
        PartTime("decode", "mlp", 128, 4032 * US),
        PartTime("decode", "lm_head", 1, 243 * US),
        PartTime("prefill", "mlp", 96, 90 * MS),
    )
    return compiled(timings_of(MODEL, 7 * MS, runtime.get("batch_size", 1)), kernels, parts, **runtime)


def test_products_are_expected_at_the_best_rate_of_the_run_plus_a_fixed_time() -> None:
    """LM head: 90 % of the bandwidth. Generated kernels: norms of 2 µs, the shortest 1 µs."""
    products = found(by_hand())["slow_products"]
    share = 218.9 / 243
    attention, mlp = 2000 - 559.2 / share - 128 * 2, 4032 - 2349 / share - 128 * 2
    head = max(243 - 218.9 / share - 2, 0)
    assert products.saving_ns == pytest.approx((attention + mlp + head) * US, rel=0.01)
    most = (2000 - 559.2 - 128) + (4032 - 2349 - 128) + (243 - 218.9 - 1)
    assert products.saving_high_ns == pytest.approx(most * US, rel=0.01)
    assert (products.saving_low_ns, products.confidence) == (0, "low")
    assert "28 % of the datasheet bandwidth" in products.evidence[0]


@pytest.mark.parametrize(
    ("runtime", "overrides"),
    [
        ({"coordinate_descent_tuning": True}, ["runtime.row_kernel=true"]),
        ({"compile": "max-autotune"}, ["runtime.row_kernel=true"]),
        ({"batch_size": 4}, ["runtime.compile=max-autotune"]),
        ({"batch_size": 4, "compile": "max-autotune"}, []),
        ({"row_kernel": True}, []),
        ({"row_kernel": True, "batch_size": 4}, ["runtime.compile=max-autotune"]),
    ],
)
def test_what_to_try_for_slow_products(runtime: dict[str, Any], overrides: list[str]) -> None:
    products = found(by_hand(**runtime))["slow_products"]
    assert products.overrides == overrides
    assert products.change


@pytest.mark.parametrize("row_kernel", [False, True])
def test_the_row_kernel_is_not_proposed_for_layers_that_it_leaves_as_they_are(row_kernel: bool) -> None:
    kernels = [(LIBRARY, 48, 900 * US), (HEAD, 1, 30 * US), (NORM, 24, 48 * US)]
    parts = (PartTime("decode", "mlp", 24, 900 * US), PartTime("decode", "lm_head", 1, 30 * US))
    products = found(compiled(timings_of("gpt2", MS), kernels, parts, row_kernel=row_kernel))["slow_products"]
    assert products.overrides == ["runtime.compile=max-autotune"]


def test_products_of_the_same_input_are_expected_to_be_one() -> None:
    """Four products per layer that take 15.6 µs on average, 4.85 µs of which reads their matrices."""
    projections = found(by_hand())["separate_projections"]
    assert projections.overrides == ["runtime.fuse_projections=true"]
    fixed = 2000 / 128 - 559.2 / 128 / (218.9 / 243)
    assert projections.saving_ns == pytest.approx(64 * fixed * US, rel=0.01)
    assert projections.saving_high_ns == pytest.approx(96 * fixed * US, rel=0.01)
    assert "separate_projections" not in found(by_hand(fuse_projections=True))


def test_products_that_are_one_already_stay() -> None:
    """Two kernels per layer: query, key and value at once, and the output."""
    given = by_hand()
    assert not isinstance(given.facts.torch, Missing)
    parts = (PartTime("decode", "attention_projections", 64, 1500 * US), PartTime("decode", "lm_head", 1, 243 * US))
    fused = replace(given, facts=replace(given.facts, torch=replace(given.facts.torch, parts=parts)))
    assert "separate_projections" not in found(fused)


def test_without_components_a_rate_is_assumed() -> None:
    given = by_hand()
    without = replace(given, facts=replace(given.facts, torch=NO_PARTS))
    products = found(without)["slow_products"]
    assert products.saving_ns == pytest.approx((6243 - (559.2 + 2349 + 218.9) / 0.9 - 225 * 2) * US, rel=0.01)
    assert "assumed" in products.evidence[-1]


def test_an_eager_decode_and_one_without_generated_kernels_get_none() -> None:
    ids = {"slow_products", "slow_decode_attention", "many_small_kernels"}
    assert not ids & {*found(by_hand(compile="none"))}
    plain = compiled(timings_of(MODEL, 7 * MS), [(LIBRARY, 224, 6000 * US)])
    assert not ids & {*found(plain)}


def attention(kernels: list[tuple[str, int, int]], **runtime: Any) -> Finding:
    timings = timings_of(MODEL, 7 * MS, runtime.get("batch_size", 1))
    rows = [(LIBRARY, 224, 5000 * US), (NORM, 64, 128 * US), *kernels]
    return found(compiled(timings, rows, **runtime))["slow_decode_attention"]


FLASH, CUDNN = "void pytorch_flash::flash_fwd_splitkv_kernel", "cudnn_generated_fort_native_sdpa_sm80_flash_fprop"
COPIES = "triton_poi_fused__scaled_dot_product_cudnn_attention_clone_expand_3"


@pytest.mark.parametrize(
    ("kernels", "runtime", "overrides"),
    [
        ([(CUDNN, 32, 600 * US)], {}, ["runtime.attention_backend=efficient"]),
        ([(FLASH, 32, 600 * US)], {}, ["runtime.attention_backend=cudnn"]),
        ([(CUDNN, 32, 600 * US), (COPIES, 64, 300 * US)], {}, []),
        ([(FLASH, 32, 600 * US)], {"attention_backend": "flash"}, []),
        ([(CUDNN, 32, 600 * US)], {"batch_size": 4}, ["runtime.attention_backend=efficient"]),
    ],
)
def test_another_attention(kernels: list[tuple[str, int, int]], runtime: dict[str, Any], overrides: list[str]) -> None:
    """32 layers of 2 µs at least, and 14 µs of keys and values; half of the rest is expected."""
    finding = attention(kernels, **runtime)
    assert finding.overrides == overrides
    spent, read = sum(ns for _, _, ns in kernels), 14.1 * US * runtime.get("batch_size", 1)
    assert finding.saving_ns == pytest.approx((spent - 64 * US - read) / 2, rel=0.02)
    assert finding.saving_high_ns == pytest.approx(spent - read, rel=0.02)
    assert finding.concerns == (["attention"] if overrides else [])
    assert finding.change


def test_another_attention_than_sdpa_gets_words() -> None:
    kernels = [(LIBRARY, 224, 5000 * US), (NORM, 64, 128 * US), ("triton_tem_fused_flex_attention_2", 32, 600 * US)]
    given = compiled(timings_of(MODEL, 7 * MS), kernels)
    assert not isinstance(given.facts.timings, Missing)
    flex = replace(given.facts.timings, model=replace(given.facts.timings.model, attention="flex_attention"))
    finding = found(replace(given, facts=replace(given.facts, timings=flex)))["slow_decode_attention"]
    assert (finding.overrides, bool(finding.change)) == ([], True)


def test_quantized_weights_save_their_bytes() -> None:
    """Half of 3,127 µs of weights at the bandwidth; at most half of the products' time."""
    eight = found(by_hand())["eight_bit_weights"]
    assert eight.overrides == ["runtime.quantization=int8"]
    assert found(by_hand(compile="max-autotune", batch_size=4))["eight_bit_weights"].overrides == ["runtime.quantization=int8"]
    several = found(by_hand(batch_size=4))["eight_bit_weights"]
    assert several.overrides == ["runtime.quantization=int8", "runtime.coordinate_descent_tuning=true"]
    assert "eight_bit_weights" not in found(by_hand(batch_size=9))
    assert eight.saving_ns == pytest.approx(3127 / 2 * US, rel=0.01)
    assert eight.saving_high_ns == pytest.approx(6243 / 2 * US, rel=0.01)
    four = found(by_hand())["four_bit_weights"]
    assert four.overrides == ["runtime.quantization=int4"]
    assert four.saving_ns == pytest.approx((1 - 4.25 / 16) * 3127 / 2 * US, rel=0.01), "half: its kernels are slower"


def test_quantized_weights_are_not_quantized_again() -> None:
    given = by_hand()
    timings = given.facts.timings
    assert not isinstance(timings, Missing)
    quantized = QuantizedWeights("int8", "generated", 225, 8_000_000_000, 8_000_000_000, 1_000_000, ("mlp", "lm_head"))
    model = replace(timings.model, weights=WeightFacts("stored", quantized=quantized))
    ids = {*found(replace(given, facts=replace(given.facts, timings=replace(timings, model=model))))}
    assert ids
    assert not {"eight_bit_weights", "four_bit_weights", "slow_products"} & ids


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton_red_fused_mm_3", KernelClass.GEMV),
        ("row_product_kernel", KernelClass.GEMV),
        ("triton_per_fused__to_copy_add_mean_mm_mul_rsqrt_12", KernelClass.GEMV),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_1", KernelClass.NORM),
        ("triton_per_fused__grouped_mm_sum_3", KernelClass.REDUCTION),
        ("triton_per_fused__to_copy_arange_bmm_cos_mean_rsqrt_3", KernelClass.NORM),
        ("triton_poi_fused__grouped_mm_ge_mul_silu_12", KernelClass.ELEMENTWISE),
    ],
)
def test_products_that_the_compiler_generated_are_products(name: str, kind: KernelClass) -> None:
    assert classify(name) is kind

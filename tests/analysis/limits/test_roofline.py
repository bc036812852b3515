"""Roofline times: sums of maxima, what-if rows, and the batch at which decode becomes compute-bound."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_perf_opt.analysis.cost_model.architecture import Mla
from llm_perf_opt.analysis.cost_model.cost import BF16, ComponentCost, Formats, StageCost, step_cost, weight_bytes
from llm_perf_opt.analysis.cost_model.families import architecture_of
from llm_perf_opt.analysis.cost_model.work import Step
from llm_perf_opt.analysis.limits.hardware import given_hardware, hardware_named
from llm_perf_opt.analysis.limits.roofline import RooflineTime, roofline_time, turning_point, what_if
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import Missing

LLAMA3_8B = architecture_of(
    {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
)
MLA = architecture_of(
    {
        "model_type": "deepseek_v2",
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 16,
        "kv_lora_rank": 64,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    }
)
H100 = hardware_named("h100_sxm")


def test_roofline_time_sums_maxima_and_counts_cache_reads_in_attention() -> None:
    stage = StageCost(
        (
            ComponentCost("attention_projections", 400, 400, 100, "attention_projections"),
            ComponentCost("attention_core", 50, 90, 0, "attention_core"),
            ComponentCost("kv_read", 0, 0, 80, "attention_core"),
            ComponentCost("kv_write", 0, 0, 20, "attention_projections"),
            ComponentCost("mlp", 100, 100, 300, "mlp"),
        )
    )
    least = roofline_time(stage, peak_flops_per_s=10, bandwidth_bytes_per_s=10)
    rows = [(part.name, part.compute_s, part.memory_s, part.seconds, part.bound) for part in least.components]
    assert rows == [
        ("attention_projections", 40, 12, 40, "compute"),
        ("attention_core", 5, 8, 8, "memory"),
        ("mlp", 10, 30, 30, "memory"),
    ]
    assert least.seconds == 40 + 8 + 30
    assert (least.compute_s, least.memory_s, least.bound) == (55, 50, "compute")


def test_llama3_8b_on_an_h100() -> None:
    decode = roofline_time(step_cost(LLAMA3_8B, Step(1, 1, 2048)), 989e12, 3.35e12)
    assert decode.bound == "memory"
    assert decode.seconds == pytest.approx(15.28e9 / 3.35e12, rel=0.002)
    prefill = roofline_time(step_cost(LLAMA3_8B, Step(1, 2048)), 989e12, 3.35e12)
    assert prefill.bound == "compute"
    assert prefill.seconds == pytest.approx(29.7e12 / 989e12, rel=0.02)


@settings(deadline=None)
@given(
    step=st.builds(Step, st.integers(1, 64), st.integers(1, 64), st.integers(0, 5000)),
    mla=st.sampled_from(Mla),
    peak=st.floats(1e9, 1e16),
    bandwidth=st.floats(1e9, 1e13),
)
def test_roofline_time_is_between_the_longest_and_the_sum(step: Step, mla: Mla, peak: float, bandwidth: float) -> None:
    for architecture in (LLAMA3_8B, MLA):
        stage = step_cost(architecture, step, Formats(mla=mla))
        least = roofline_time(stage, peak, bandwidth)
        assert sum(part.flops for part in least.components) == stage.flops
        assert sum(part.bytes for part in least.components) == stage.bytes
        most = stage.flops / peak + stage.bytes / bandwidth
        assert max(least.compute_s, least.memory_s) <= least.seconds * (1 + 1e-12)
        assert least.seconds <= most * (1 + 1e-12)


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), float("inf"), "fast", None, True])
def test_rates_must_be_numbers(rate: Any) -> None:
    stage = step_cost(MLA, Step(1, 1))
    with pytest.raises(ConfigError, match="peak_flops_per_s"):
        roofline_time(stage, rate, 1.0)
    with pytest.raises(ConfigError, match="bandwidth_bytes_per_s"):
        roofline_time(stage, 1.0, rate)


# --- what if ----------------------------------------------------------------------------------------------------------


def test_a_row_for_each_combination() -> None:
    formats = [BF16, Formats("fp8", "fp8")]
    rows = what_if(LLAMA3_8B, H100, batches=[1, 8], contexts=[512, 4096], formats=formats, prompt=256)
    assert [(row.formats.weights, row.context, row.batch) for row in rows] == [
        (weights, context, batch) for weights in ("bf16", "fp8") for context in (512, 4096) for batch in (1, 8)
    ]
    first = rows[0]
    assert first.prompt == 256
    assert first.weight_bytes == weight_bytes(LLAMA3_8B)
    assert first.kv_cache_bytes == 513 * 131072
    assert first.fits is True
    assert isinstance(first.decode, RooflineTime)
    assert first.decode == roofline_time(step_cost(LLAMA3_8B, Step(1, 1, 512)), 989e12, 3.35e12)
    assert first.prefill == roofline_time(step_cost(LLAMA3_8B, Step(1, 256)), 989e12, 3.35e12)
    assert first.decode_tokens_per_s == 1 / first.decode.seconds
    assert rows[4].compute_dtype == "fp8"


def test_the_prompt_is_the_context_unless_given() -> None:
    (row,) = what_if(MLA, H100, batches=[2], contexts=[100], formats=[BF16])
    assert (row.prompt, row.context) == (100, 100)


def test_what_does_not_fit_or_has_no_peak_is_reported() -> None:
    (big,) = what_if(LLAMA3_8B, H100, batches=[1024], contexts=[8192], formats=[BF16])
    assert big.fits is False
    (old,) = what_if(LLAMA3_8B, hardware_named("v100_sxm2_32gb"), batches=[1], contexts=[8], formats=[BF16])
    for value in (old.prefill, old.decode, old.decode_tokens_per_s):
        assert isinstance(value, Missing)
        assert "no bf16 peak" in value.why
        assert "hardware." not in value.why, "`llm-perf cost` does not take such a setting"
    own = given_hardware(dtype="bf16", peak_tflops=100, bandwidth_gbs=1000)
    (row,) = what_if(LLAMA3_8B, own, batches=[1], contexts=[8], formats=[BF16])
    assert isinstance(row.fits, Missing)


def test_integer_weights_are_multiplied_in_bf16() -> None:
    (row,) = what_if(LLAMA3_8B, H100, batches=[1], contexts=[8], formats=[Formats("int4")])
    assert row.compute_dtype == "bf16"
    assert isinstance(row.decode, RooflineTime)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"batches": []}, "batch"),
        ({"contexts": []}, "context"),
        ({"formats": []}, "dtype"),
        ({"batches": [0]}, "batch"),
        ({"contexts": [-1]}, "context"),
        ({"contexts": ["8"]}, "context"),
        ({"prompt": 0}, "prompt"),
    ],
)
def test_lists_are_checked(arguments: dict[str, Any], named: str) -> None:
    request: dict[str, Any] = {"batches": [1], "contexts": [8], "formats": [BF16]} | arguments
    with pytest.raises(ConfigError) as caught:
        what_if(MLA, H100, **request)
    assert caught.value.fact.startswith(named)


# --- turning point ----------------------------------------------------------------------------------------------------


def test_without_context_llama_turns_at_the_ridge() -> None:
    turn = turning_point(LLAMA3_8B, H100, 0, BF16)
    ridge = H100.ridge_flops_per_byte("bf16")
    assert ridge == pytest.approx(295.2, abs=0.1)
    assert turn.weights == 297  # 2 FLOPs for 2 bytes of weight: a batch of about the ridge
    assert turn.step == 298


def test_long_contexts_never_turn() -> None:
    turn = turning_point(LLAMA3_8B, H100, 2048, BF16)
    assert isinstance(turn.step, Missing)
    assert "context of 2048" in turn.step.why
    assert turn.weights == 297


@pytest.mark.parametrize("context", [0, 64, 1000])
@pytest.mark.parametrize("formats", [BF16, Formats("fp8", "fp8"), Formats("int4", mla=Mla.ABSORB)])
@pytest.mark.parametrize("architecture", [LLAMA3_8B, MLA])
def test_one_batch_less_is_memory_bound(architecture: Any, formats: Formats, context: int) -> None:
    turn = turning_point(architecture, H100, context, formats)
    if isinstance(turn.step, Missing):
        return
    peak = H100.peaks["fp8" if formats.weights == "fp8" else "bf16"].flops_per_s
    bounds = [
        roofline_time(step_cost(architecture, Step(batch, 1, context), formats), peak, H100.bandwidth_bytes_per_s).bound
        for batch in (turn.step - 1, turn.step, 4 * turn.step)
        if batch
    ]
    assert bounds[-3:] == ["memory", "compute", "compute"][-len(bounds) :]


def test_no_peak_no_turning_point() -> None:
    turn = turning_point(LLAMA3_8B, hardware_named("t4"), 0, BF16)
    assert isinstance(turn.step, Missing)
    assert isinstance(turn.weights, Missing)

"""The weight matrices of a model: their weights and FLOPs are those of the cost model."""

from typing import Any

import pytest

from llm_perf_opt.analysis.cost_model.cost import step_cost
from llm_perf_opt.analysis.cost_model.families import architecture_of
from llm_perf_opt.analysis.cost_model.linears import linear_layers
from llm_perf_opt.analysis.cost_model.work import Step
from llm_perf_opt.core.machine_records import LinearLayer

QWEN = {
    "model_type": "qwen2", "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 1,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def test_equal_shapes_are_one_row_with_their_number() -> None:
    layers = linear_layers(architecture_of(QWEN), Step(2, 16), Step(2, 1))
    assert layers == (
        LinearLayer(256, 8192, 1, 2, 2),
        LinearLayer(256, 704, 8, 32, 2),
        LinearLayer(704, 256, 4, 32, 2),
        LinearLayer(256, 256, 8, 32, 2),
        LinearLayer(256, 64, 8, 32, 2),
    )


@pytest.mark.parametrize("config", [QWEN, DEEPSEEK])
@pytest.mark.parametrize("step", [Step(1, 1), Step(3, 7), Step(2, 5, logits="all")])
def test_the_flops_are_those_of_the_cost_model(config: dict[str, Any], step: Step) -> None:
    architecture = architecture_of(config)
    layers = linear_layers(architecture, step, Step(step.batch, 1))
    flops = sum(2 * layer.prefill_rows * layer.in_features * layer.out_features * layer.count for layer in layers)
    products = [part.flops for part in step_cost(architecture, step).components if part.name != "attention_core"]
    assert flops == sum(products)


def test_only_a_mixture_has_experts() -> None:
    assert architecture_of(MIXTRAL).has_experts
    assert not architecture_of(QWEN).has_experts
    assert not architecture_of(DEEPSEEK).has_experts, "all of its layers are dense"


def test_experts_that_only_prefill_uses_are_rows_of_their_own() -> None:
    layers = linear_layers(architecture_of(MIXTRAL), Step(1, 100), Step(1, 1))
    up = [layer for layer in layers if (layer.in_features, layer.out_features) == (64, 96)]
    assert {(layer.count, layer.prefill_rows, layer.decode_rows) for layer in up} == {(3 * 8 * 2, 25, 0), (3 * 2 * 2, 0, 1)}

"""How a model is split: against what an engine really holds and sends, and invariants of every family."""

from typing import Any

import pytest

from llm_perf_opt.analysis.cost_model.architecture import Architecture, Moe
from llm_perf_opt.analysis.cost_model.communication import stage_collectives
from llm_perf_opt.analysis.cost_model.cost import Formats, step_cost, weight_bytes
from llm_perf_opt.analysis.cost_model.expert_load import most_choices
from llm_perf_opt.analysis.cost_model.families import architecture_of
from llm_perf_opt.analysis.cost_model.sharding import Plan, device_stages, held_experts, stage_sizes, tensor_parallel_sizes
from llm_perf_opt.analysis.cost_model.work import Step
from llm_perf_opt.core.errors import ConfigError

FP32 = Formats("fp32", "fp32")
OLMO2: dict[str, Any] = {
    "model_type": "olmo2", "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 2,
    "sliding_window": 16,
}  # fmt: skip


LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 1010, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": False,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 1010, "n_positions": 512, "n_embd": 128, "n_layer": 3, "n_head": 4,
}  # fmt: skip
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64,
    "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "tie_word_embeddings": False, "decoder_sparse_step": 1,
}  # fmt: skip


DEEPSEEK_V2: dict[str, Any] = {
    "model_type": "deepseek_v2", "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32, "n_routed_experts": 8, "n_shared_experts": 2,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "tie_word_embeddings": False,
}  # fmt: skip


def calls(architecture: Architecture, plan: Plan, step: Step, stage: int = 0) -> dict[tuple[str, str], tuple[int, int]]:
    """Return count and bytes of one call by kind and purpose."""
    found = stage_collectives(device_stages(architecture, plan)[stage], step, FP32)
    return {(one.kind, one.purpose): (one.count, one.bytes) for one in found}


@pytest.mark.parametrize(
    ("config", "params", "all_reduces"),
    [(LLAMA, 353_152, 7), (GPT2, 429_888, 7), (QWEN3_MOE, 379_648, 5), (DEEPSEEK_V2, 946_560, 7)],
    ids=lambda value: str(value["model_type"]) if isinstance(value, dict) else "",
)
def test_two_devices_hold_and_send_what_an_engine_does(config: dict[str, Any], params: int, all_reduces: int) -> None:
    """Counted in the two ranks of vLLM 0.32.0 (CPU, tensor_parallel_size=2): parameters as loaded, and calls of its
    tensor-parallel group in a prefill of five tokens and in a decode step: tensors of (tokens, 128), logits of (1, 512)."""
    architecture = architecture_of(config)
    (stage,) = device_stages(architecture, Plan(2))
    assert stage.params == params
    for tokens in (5, 1):
        found = stage_collectives(stage, Step(1, tokens), FP32)
        reduced = [one for one in found if one.kind == "all_reduce"]
        assert sum(one.count for one in reduced) == all_reduces
        assert {one.bytes for one in reduced} == {tokens * 128 * 4}
        assert [(one.count, one.bytes) for one in found if one.kind == "all_gather"] == [(1, 2 * 512 * 4)]


def test_two_devices_hold_whole_experts_as_an_engine_does() -> None:
    """Counted in the same way with enable_expert_parallel: four of eight experts on each rank."""
    architecture = architecture_of(QWEN3_MOE)
    (stage,) = device_stages(architecture, Plan(2, 1, 2))
    moe = architecture.layers[0].feed_forward
    assert isinstance(moe, Moe)
    assert (stage.params, held_experts(moe, stage.plan)) == (379_648, 4)


def test_two_stages_hold_and_send_what_an_engine_does() -> None:
    """Counted in the same way with pipeline_parallel_size=2: the stages send hidden states and residual, (5, 128) each."""
    stages = device_stages(architecture_of(LLAMA), Plan(pp=2))
    assert [(len(stage.layers), stage.params) for stage in stages] == [(2, 410_112), (1, 270_720)]
    (sent,) = stage_collectives(stages[0], Step(1, 5), FP32)
    assert (sent.kind, sent.count, sent.bytes) == ("send", 2, 5 * 128 * 4)
    assert stage_collectives(stages[1], Step(1, 5), FP32) == ()


@pytest.mark.parametrize("config", [OLMO2, GPT_OSS], ids=lambda config: str(config["model_type"]))
def test_one_device_holds_and_computes_the_model(config: dict[str, Any]) -> None:
    architecture = architecture_of(config)
    (stage,) = device_stages(architecture, Plan())
    step = Step(3, 5, 7)
    assert stage.params == architecture.params
    assert stage.weight_bytes(FP32) == weight_bytes(architecture, FP32)
    assert stage.cost(step, FP32) == step_cost(architecture, step, FP32)
    assert stage_collectives(stage, step, FP32) == ()


def test_stages_together_hold_and_compute_the_model() -> None:
    architecture = architecture_of(GPT_OSS)
    stages, step = device_stages(architecture, Plan(pp=3)), Step(2, 3, 20)
    assert [len(stage.layers) for stage in stages] == [1, 2, 1]
    assert sum(stage.params for stage in stages) == architecture.params
    assert sum(stage.cost(step, FP32).flops for stage in stages) == step_cost(architecture, step, FP32).flops


def test_experts_that_do_not_divide_go_to_the_first_devices() -> None:
    architecture = architecture_of(GPT_OSS)
    (stage,) = device_stages(architecture, Plan(4, 1, 4))
    moe = architecture.layers[0].feed_forward
    (whole,) = device_stages(architecture, Plan(4))
    experts = {plan: stage.cost(Step(64, 1), FP32) for plan, stage in (("ep", stage), ("tp", whole))}
    flops = {plan: next(part.flops for part in cost.components if part.name == "experts") for plan, cost in experts.items()}
    busiest = most_choices(6, 2, 4, 64) / (64 * 2)
    assert busiest > 2 / 6, "two of six experts, which tokens choose at random"
    assert flops["ep"] == pytest.approx(flops["tp"] * 4 * busiest), "instead of a quarter of each expert"
    assert moe.params > 0


def traffic(architecture: Architecture, plan: Plan, step: Step) -> float:
    """Return what a device sends in the layers: everything but embedding, logits and stages."""
    (stage,) = device_stages(architecture, plan)
    outside = ("embedding", "logits")
    return sum(one.sent_bytes for one in stage_collectives(stage, step, FP32) if one.purpose not in outside)


def test_whole_experts_are_slower_than_divided_ones_for_one_token() -> None:
    """One device has to read a whole expert of each layer; divided, it reads a quarter of each of the two that are used."""
    architecture = architecture_of({**QWEN3_MOE, "num_experts": 4, "moe_intermediate_size": 256})
    whole, divided = (device_stages(architecture, plan)[0].cost(Step(1, 1), FP32) for plan in (Plan(4, 1, 4), Plan(4)))
    read = {
        name: next(part.bytes for part in cost.components if part.name == "experts")
        for name, cost in (("whole", whole), ("divided", divided))
    }
    assert read["whole"] == 2 * 3 * 128 * 256 * 4
    assert read["divided"] == read["whole"] // 2
    assert whole.flops > divided.flops


MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN2_MOE: dict[str, Any] = {
    "model_type": "qwen2_moe", "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "decoder_sparse_step": 1,
}  # fmt: skip


def test_replicas_of_mixtral_gather_tokens_from_their_counterparts() -> None:
    """vLLM 0.32: all_gatherv and reduce_scatterv over the data-parallel group, then an all-reduce (`AgRsAll2AllManager`)."""
    plan, tokens = Plan(4, 1, 8), 16
    found = calls(architecture_of(MIXTRAL), plan, Step(tokens, 1))
    everything = tokens * 128 * 4
    assert found["all_gather", "tokens to experts"] == found["reduce_scatter", "experts output"] == (2, everything)
    assert found["all_reduce", "experts output"] == found["all_reduce", "attention output"] == (2, everything // 2)
    (stage,) = device_stages(architecture_of(MIXTRAL), plan)
    assert {(one.group, one.ranks) for one in stage_collectives(stage, Step(tokens, 1), FP32)} == {("tp", 4), ("dp", 2)}
    exchanged = traffic(architecture_of(MIXTRAL), plan, Step(tokens, 1)) / 2 - 2 * 3 / 4 * everything / 2
    assert exchanged == 1.75 * everything


def test_replicas_of_deepseek_scatter_the_output_of_the_attention() -> None:
    """vLLM 0.32 (`DeepseekV2DecoderLayer`): a reduce-scatter and an all-gather instead of an all-reduce and an all-gather."""
    architecture = architecture_of(DEEPSEEK_V2)
    found, own = calls(architecture, Plan(2, 1, 4), Step(6, 1)), 4 * 128 * 4  # three tokens, padded to a multiple of two
    assert found["reduce_scatter", "attention output"] == (2, own)
    assert found["all_gather", "tokens for the next attention"] == (1, own)
    assert found["all_gather", "tokens and residual"] == (1, 2 * own)
    assert found["all_reduce", "attention output"] == (1, 3 * 128 * 4), "the layer without experts"
    staged = calls(architecture, Plan(2, 2, 4), Step(6, 1), 1)
    assert ("reduce_scatter", "attention output") not in staged, "not with pipeline stages"
    assert staged["all_gather", "experts output"] == (1, own)


def test_the_shared_expert_is_whole_only_where_tokens_are_divided() -> None:
    qwen, deepseek = architecture_of(QWEN2_MOE), architecture_of(DEEPSEEK_V2)
    expert, shared = 3 * 128 * 64, 3 * 128 * 128
    replicas, alone = Plan(2, 1, 4), Plan(2, 1, 2)
    for architecture, more in ((qwen, 0), (deepseek, shared // 2)):
        (here,), (there,) = device_stages(architecture, replicas), device_stages(architecture, alone)
        assert there.params - here.params == 2 * (2 * expert - more)
    parts = {
        name: next(part.flops for part in stage.cost(Step(8, 1), FP32).components if part.name == "shared_experts")
        for name, (stage,) in (("qwen", device_stages(qwen, replicas)), ("deepseek", device_stages(deepseek, replicas)))
    }
    assert parts["deepseek"] == 2 * 2 * 2 * shared, "two of four tokens, in two layers"
    assert parts["qwen"] == 2 * 4 * 2 * (shared // 2 + 128), "four tokens and half of the expert, and its gate"


def test_a_norm_over_all_heads_gathers_queries_and_keys() -> None:
    found = calls(architecture_of(OLMO2), Plan(2), Step(1, 5))
    assert found["all_gather", "queries for the norm"] == (2, 5 * 4 * 32 * 4)
    assert found["all_gather", "keys for the norm"] == (2, 5 * 2 * 32 * 4)


@pytest.mark.parametrize(("layers", "stages", "sizes"), [(80, 8, [10] * 8), (61, 4, [15, 15, 16, 15]), (7, 4, [2, 2, 2, 1])])
def test_remaining_layers_go_to_the_stages_before_the_last(layers: int, stages: int, sizes: list[int]) -> None:
    assert stage_sizes(layers, stages) == sizes


def test_sizes_that_fit_are_found() -> None:
    assert tensor_parallel_sizes(architecture_of(OLMO2)) == [1, 2, 4]
    odd = architecture_of({**OLMO2, "intermediate_size": 130})
    assert tensor_parallel_sizes(odd) == [1, 2]
    with pytest.raises(ConfigError, match="130 columns of an MLP") as refused:
        device_stages(odd, Plan(4))
    assert "1, 2" in str(refused.value.remedy)


def test_a_batch_is_shared_by_the_replicas() -> None:
    plan = Plan(2, 1, 6)
    assert (plan.replicas, plan.devices, plan.share(7), plan.share(1)) == (3, 6, 3, 1)

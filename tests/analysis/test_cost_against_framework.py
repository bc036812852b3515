"""The cost model against torch's own counter: models built without memory, forwards that compute nothing.

Zero difference is asked for, in the counter's convention: attention counted whole, logits for every position.
"""

from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from llm_perf_opt.analysis.cost_model.architecture import TRANSFORMERS_MLA, Mla
from llm_perf_opt.analysis.cost_model.cost import Formats, kv_bytes_per_token, kv_cache_bytes, step_cost
from llm_perf_opt.analysis.cost_model.families import architecture_of, known_model_types
from llm_perf_opt.analysis.cost_model.work import Step

PROMPT = 2048
CHUNK = 96


def _presets() -> dict[str, dict[str, Any]]:
    found = {}
    for file in resources.files("llm_perf_opt.config.conf").joinpath("model").iterdir():
        architecture = yaml.safe_load(file.read_text()).get("architecture")
        if architecture:
            found[file.name.removesuffix(".yaml")] = architecture
    return found


ALL_PRESETS = _presets()
_TEXTS = {name: fields.get("text_config", fields) for name, fields in ALL_PRESETS.items()}
PRESETS = {name: fields for name, fields in _TEXTS.items() if fields.get("model_type") in known_model_types()}
"""Decoders, also those behind an encoder. The models with images are proved in test_vision_cost_against_framework.py."""
ENCODED = {name: ALL_PRESETS[name] for name in PRESETS if "text_config" in ALL_PRESETS[name]}

_SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_SMALL_MOE = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
_SMALL_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama_biases_mqa_head_dim": {
        "model_type": "llama",
        **_SMALL,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama_no_kv_heads_named": {"model_type": "llama", **_SMALL, "num_key_value_heads": None},
    "mistral_window": {"model_type": "mistral", **_SMALL, "sliding_window": 512},
    "mistral_no_window": {"model_type": "mistral", **_SMALL, "sliding_window": None},
    "mixtral_window": {
        "model_type": "mixtral",
        **_SMALL,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 100,
    },
    "qwen2_window_from_layer_2": {
        "model_type": "qwen2",
        **_SMALL,
        "use_sliding_window": True,
        "sliding_window": 512,
        "max_window_layers": 2,
    },
    "qwen3_bias_window": {
        "model_type": "qwen3",
        **_SMALL,
        "head_dim": 32,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 3000,
        "max_window_layers": 1,
    },
    "qwen2_moe_mixed": {
        "model_type": "qwen2_moe",
        **_SMALL,
        **_SMALL_MOE,
        "num_experts": 8,
        "shared_expert_intermediate_size": 80,
        "num_hidden_layers": 6,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "use_sliding_window": True,
        "sliding_window": 256,
        "max_window_layers": 3,
    },
    "qwen2_moe_plain": {
        "model_type": "qwen2_moe",
        **_SMALL,
        **_SMALL_MOE,
        "num_experts": 8,
        "shared_expert_intermediate_size": 80,
        "qkv_bias": False,
    },
    "qwen3_moe_mixed": {
        "model_type": "qwen3_moe",
        **_SMALL,
        **_SMALL_MOE,
        "num_experts": 8,
        "mlp_only_layers": [0],
        "use_sliding_window": True,
        "sliding_window": 300,
    },
    "gemma": {"model_type": "gemma", **_SMALL, "head_dim": 32},
    "gemma2": {"model_type": "gemma2", **_SMALL, "head_dim": 32, "sliding_window": 700},
    "gemma3_layer_types": {
        "model_type": "gemma3_text",
        **_SMALL,
        "head_dim": 32,
        "sliding_window": 128,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    "deepseek_v2_biases": {
        "model_type": "deepseek_v2",
        **_SMALL,
        **_SMALL_MOE,
        **_SMALL_MLA,
        "q_lora_rank": 40,
        "first_k_dense_replace": 2,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_SMALL,
        **_SMALL_MOE,
        **_SMALL_MLA,
        "q_lora_rank": 40,
        "n_group": 2,
        "topk_group": 1,
    },
    "gpt2_inner": {
        "model_type": "gpt2",
        "vocab_size": 512,
        "n_positions": 4096,
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_inner": 200,
        "tie_word_embeddings": False,
    },
    "granite": {"model_type": "granite", **_SMALL, "mlp_bias": True},
    "smollm3": {"model_type": "smollm3", **_SMALL, "pad_token_id": 0},
    "starcoder2": {"model_type": "starcoder2", **_SMALL, "sliding_window": 1000},
    "ministral": {
        "model_type": "ministral",
        **_SMALL,
        "head_dim": 16,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
    "olmo": {"model_type": "olmo", **_SMALL},
    "olmo3": {"model_type": "olmo3", **_SMALL, "sliding_window": 333},
    "phi": {"model_type": "phi", **_SMALL, "qk_layernorm": True},
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_SMALL,
        "head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 128,
    },
    "phi3": {"model_type": "phi3", **_SMALL, "sliding_window": 2047, "pad_token_id": 0},
    "olmo2": {"model_type": "olmo2", **_SMALL},
    "gpt_neox": {"model_type": "gpt_neox", **_SMALL},
    "opt": {"model_type": "opt", **_SMALL, "ffn_dim": 160, "max_position_embeddings": 4096},
    "opt_projected": {
        "model_type": "opt",
        **_SMALL,
        "ffn_dim": 160,
        "max_position_embeddings": 4096,
        "word_embed_proj_dim": 48,
        "do_layer_norm_before": False,
        "enable_bias": False,
    },
}

CASES = PRESETS | VARIANTS


def _batch(case: str) -> int:
    return 1 if case in PRESETS else 3


@cache
def _model(case: str) -> Any:
    fields = dict(CASES[case])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        # Every model has eager attention. Of the ways to run experts, the counter sees only batched products.
        build: Any = AutoModelForCausalLM.from_config
        model = build(config, dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="batched_mm")
    return model.eval()


class Run:
    """Prefill, then one decode step, then a chunk on the same cache; what the framework counted and cached."""

    def __init__(self, case: str) -> None:
        model, batch = _model(case), _batch(case)
        self.flops: list[int] = []
        self.cache_bytes: list[int] = []
        past = None
        with torch.no_grad():
            for new_tokens in (PROMPT, 1, CHUNK):
                tokens = torch.zeros((batch, new_tokens), dtype=torch.long, device="meta")
                with FlopCounterMode(display=False) as counter:
                    past = model(input_ids=tokens, past_key_values=past, use_cache=True).past_key_values
                self.flops.append(counter.get_total_flops())
                tensors = [tensor for layer in past.layers for tensor in (layer.keys, layer.values)]
                self.cache_bytes.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))


_run = cache(Run)


QUICK = {"gpt2", "qwen2_5_0_5b"}
QUICK_FIRST = [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
"""Large ones are built by the framework for seconds each: two in `make test`, all of them in `make test-all`."""


@pytest.mark.parametrize("case", QUICK_FIRST)
def test_flops_equal_the_frameworks(case: str) -> None:
    architecture, batch = architecture_of(CASES[case]), _batch(case)
    prefill = step_cost(architecture, Step(batch, PROMPT, 0, "all"))
    decode = step_cost(architecture, Step(batch, 1, PROMPT, "all"))
    chunk = step_cost(architecture, Step(batch, CHUNK, PROMPT + 1, "all"))
    assert [step.flops_full_attention for step in (prefill, decode, chunk)] == _run(case).flops


@pytest.mark.parametrize("case", CASES)
def test_parameters_equal_the_frameworks(case: str) -> None:
    assert architecture_of(CASES[case]).params == sum(weight.numel() for weight in _model(case).parameters())


@pytest.mark.parametrize("case", QUICK_FIRST)
def test_cache_bytes_equal_the_real_tensors(case: str) -> None:
    architecture, batch = architecture_of(CASES[case]), _batch(case)
    lengths = (PROMPT, PROMPT + 1, PROMPT + 1 + CHUNK)
    assert [kv_cache_bytes(architecture, batch, length) for length in lengths] == _run(case).cache_bytes


@pytest.mark.parametrize("case", CASES)
def test_frameworks_own_config_reads_the_same(case: str) -> None:
    fields = dict(CASES[case])
    written = AutoConfig.for_model(fields.pop("model_type"), **fields).to_dict()
    assert architecture_of(written) == architecture_of(CASES[case])


@pytest.mark.parametrize("case", ENCODED)
def test_the_decoder_of_a_preset_with_an_encoder_is_the_one_proved(case: str) -> None:
    found = architecture_of(ENCODED[case], decoder_only=True)
    assert found.part_of == ENCODED[case]["model_type"]
    # The whole config may tie the embedding although that of the decoder does not.
    assert replace(found, part_of=None) == replace(architecture_of(PRESETS[case]), tied_embeddings=found.tied_embeddings)
    assert replace(architecture_of(ENCODED[case]), vision_params=0) == found


def test_there_is_such_a_preset() -> None:
    assert ENCODED


def test_every_known_model_type_is_proved() -> None:
    assert {fields["model_type"] for fields in CASES.values()} == set(known_model_types())


@pytest.mark.parametrize("case", ["qwen2_5_0_5b", "gpt2_inner", "gemma3_layer_types"])
def test_last_token_logits_equal_the_frameworks(case: str) -> None:
    batch = _batch(case)
    tokens = torch.zeros((batch, PROMPT), dtype=torch.long, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        _model(case)(input_ids=tokens, logits_to_keep=1)
    stage = step_cost(architecture_of(CASES[case]), Step(batch, PROMPT))
    assert stage.flops_full_attention == counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["deepseek_v2_lite", "deepseek_v3"])
def test_transformers_expands_the_latent_again_in_every_step(case: str) -> None:
    architecture, batch = architecture_of(CASES[case]), _batch(case)
    step = Step(batch, 1, PROMPT, "all")
    counted = _run(case).flops[1]
    same = [mla for mla in Mla if step_cost(architecture, step, Formats(mla=mla)).flops_full_attention == counted]
    assert same == [TRANSFORMERS_MLA] == [Mla.REEXPAND]
    grown = _run(case).cache_bytes[1] - _run(case).cache_bytes[0]
    assert grown == batch * kv_bytes_per_token(architecture, Formats(mla=Mla.REEXPAND))

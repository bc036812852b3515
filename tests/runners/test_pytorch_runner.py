"""The runner produces the tokens of transformers' own generation, for several architectures and both caches."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.flex_attention import WrappedFlexAttention

from llm_perf_opt.config.schema import CacheKind
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.runners.compilation import Compilation
from llm_perf_opt.runners.pytorch_runner import PyTorchRunner
from llm_perf_opt.workspace.data.prompts import Prompts, synthetic_prompts

NEW_TOKENS = 12
# Wide initial weights make the tokens vary; with the usual narrow ones a tied model repeats its input.
SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.5, "tie_word_embeddings": False,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama": {},
    "qwen3": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v2": {
        "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
}  # fmt: skip


def small_model(model_type: str, **changes: Any) -> Any:
    fields = {**SMALL, **ARCHITECTURES[model_type], **changes}
    if model_type == "gpt2":
        fields = {key: fields[key] for key in ("vocab_size", "initializer_range", "n_embd", "n_layer", "n_head", "n_positions")}
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields), dtype=torch.float32).eval()


def stepped(model: Any, prompts: Prompts, cache: CacheKind, requests: int = 1) -> list[list[int]]:
    """Tokens of the last of several requests: a reused cache must not remember the ones before."""
    runner = PyTorchRunner(model, "small", NEW_TOKENS, cache)
    batch = runner.place(prompts)
    for _ in range(requests):
        runner.begin()
        tokens = [runner.prefill(batch)]
        for _ in range(NEW_TOKENS - 1):
            tokens.append(runner.decode_step(tokens[-1]))
    return runner.to_lists(tokens)


def generated(model: Any, prompts: Prompts, cache: CacheKind) -> list[list[int]]:
    width = max(prompts.lengths)
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in prompts.ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts.ids])
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0,
        cache_implementation="static" if cache == "static" else None, disable_compile=True,
    )  # fmt: skip
    rows: list[list[int]] = out[:, width:].tolist()
    return rows


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_tokens_equal_generate(model_type: str, cache: CacheKind) -> None:
    model = small_model(model_type)
    prompts = synthetic_prompts(2, 20, 97, seed=3)
    expected = generated(model, prompts, cache)
    assert len({token for row in expected for token in row}) > 4, "a constant answer would prove nothing"
    assert stepped(model, prompts, cache) == expected
    assert stepped(model, prompts, cache, requests=3) == expected


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("model_type", ["qwen2", "gemma3_text", "gpt2"])
def test_prompts_of_different_length_are_padded_as_generate_pads_them(model_type: str, cache: CacheKind) -> None:
    model = small_model(model_type)
    whole = synthetic_prompts(3, 18, 97, seed=5)
    prompts = Prompts((whole.ids[0], whole.ids[1][:7], whole.ids[2][:12]), "test")
    assert stepped(model, prompts, cache) == generated(model, prompts, cache)


def test_flex_attention_sees_no_later_key_in_a_static_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask is a function that is called after the cache was updated. Without the compiler, which takes a minute for it."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(WrappedFlexAttention, "_instance", None)  # it keeps what was compiled
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    model = small_model("llama")
    prompts = synthetic_prompts(1, 20, 97, seed=3)
    logits: dict[str, list[torch.Tensor]] = {}
    for attention in ("sdpa", "flex_attention"):
        model.set_attn_implementation(attention)
        found = logits.setdefault(attention, [])
        hook = model.lm_head.register_forward_hook(lambda *given, found=found: found.append(given[-1]))
        stepped(model, prompts, "static")
        hook.remove()
    assert len(logits["sdpa"]) == NEW_TOKENS
    torch.testing.assert_close(logits["flex_attention"], logits["sdpa"], rtol=1e-4, atol=1e-4)


def test_one_sequence_gets_the_same_tokens_alone_and_in_a_batch() -> None:
    model = small_model("llama")
    prompts = synthetic_prompts(2, 16, 97, seed=7)
    short = Prompts((prompts.ids[0], prompts.ids[1][:9]), "test")
    assert stepped(model, short, "dynamic")[1] == stepped(model, Prompts((short.ids[1],), "alone"), "dynamic")[0]


@pytest.mark.slow
@pytest.mark.parametrize("prefill", [False, True])
def test_compiled_decode_and_prefill_give_the_same_tokens(prefill: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode with torch's compiler. Prefill is only captured as graphs: compiling two more of them takes a minute."""
    if prefill:
        captured: list[int] = []

        def capture(graph: Any, inputs: Any) -> Any:
            captured.append(len(graph.graph.nodes))
            return graph.forward

        plain = torch.compile
        monkeypatch.setattr(torch, "compile", lambda model, mode: plain(model, backend=capture, fullgraph=True))
    model = small_model("qwen2", num_hidden_layers=1)
    prompts = synthetic_prompts(1, 16, 97, seed=3)
    runner = PyTorchRunner(model, "small", NEW_TOKENS, "static", Compilation("default", prefill))
    batch = runner.place(prompts)
    runner.begin()
    tokens = [runner.prefill(batch)]
    for _ in range(NEW_TOKENS - 1):
        tokens.append(runner.decode_step(tokens[-1]))
    assert runner.to_lists(tokens) == generated(model, prompts, "static")
    if prefill:
        assert len(captured) == 2, "one graph of prefill and one of decode, whatever the position"


def test_facts_are_of_the_model_that_ran() -> None:
    model = small_model("qwen2")
    facts = PyTorchRunner(model, "small", 4).facts
    assert facts.parameters == sum(tensor.numel() for tensor in model.parameters())
    assert facts.weight_bytes == facts.parameters * 4
    assert (facts.dtype, facts.device, facts.model_class, facts.logits) == ("fp32", "cpu", "Qwen2ForCausalLM", "last token")
    assert facts.architecture["hidden_size"] == 32


def test_a_model_that_keeps_no_key_value_cache_is_refused() -> None:
    config = AutoConfig.for_model("mamba", vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ConfigError, match="does not use a key-value cache"):
        PyTorchRunner(model, "mamba", 4)


def test_a_cache_that_stays_empty_is_refused() -> None:
    model = small_model("qwen2")
    forget = model.forward

    def forward(input_ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = True, logits_to_keep: int = 0) -> Any:
        return forget(input_ids=input_ids, use_cache=False, logits_to_keep=logits_to_keep)

    model.forward = forward
    runner = PyTorchRunner(model, "forgetful", 4)
    runner.begin()
    with pytest.raises(ConfigError, match="would not see the prompt"):
        runner.prefill(runner.place(synthetic_prompts(1, 8, 97, seed=0)))

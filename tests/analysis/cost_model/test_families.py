"""Reading Hugging Face configurations: defaults, text decoders of larger models, and errors."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_perf_opt.analysis.cost_model.architecture import GroupedAttention, LatentAttention, Mlp, Moe
from llm_perf_opt.analysis.cost_model.families import architecture_of, known_model_types
from llm_perf_opt.core.errors import ConfigError

LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
MLA = LLAMA | {
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 1000, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}


def refused(config: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        architecture_of(config)
    assert caught.value.exit_code == 2
    return caught.value


def windows(config: dict[str, Any]) -> list[int | None]:
    return [layer.window for layer in architecture_of(config).layers]


# --- absent fields ----------------------------------------------------------------------------------------------------


def test_llama_defaults() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    architecture = architecture_of(config)
    assert architecture.layers[0].attention == GroupedAttention(hidden=64, heads=4, kv_heads=4, head_dim=16)
    assert architecture.layers[0].feed_forward == Mlp(hidden=64, intermediate=128, gated=True)
    assert not architecture.tied_embeddings


@pytest.mark.parametrize(
    ("model_type", "tied"), [("llama", False), ("qwen2", False), ("gemma", True), ("gemma2", True), ("smollm3", True)]
)
def test_tying_has_the_default_of_the_model_type(model_type: str, tied: bool) -> None:
    assert architecture_of(LLAMA | {"model_type": model_type}).tied_embeddings is tied
    assert architecture_of(LLAMA | {"model_type": model_type, "tie_word_embeddings": not tied}).tied_embeddings != tied


def test_mistral_window_absent_is_4096_and_null_is_none() -> None:
    mistral = LLAMA | {"model_type": "mistral"}
    assert windows(mistral) == [4096, 4096]
    assert windows(mistral | {"sliding_window": None}) == [None, None]
    assert windows(mistral | {"sliding_window": 7}) == [7, 7]


def test_qwen2_windows_start_late_and_only_when_switched_on() -> None:
    qwen2 = LLAMA | {"model_type": "qwen2", "num_hidden_layers": 4, "sliding_window": 7, "max_window_layers": 3}
    assert windows(qwen2) == [None] * 4
    assert windows(qwen2 | {"use_sliding_window": True}) == [None, None, None, 7]


def test_gemma3_has_one_global_layer_in_six() -> None:
    gemma3 = LLAMA | {"model_type": "gemma3_text", "num_hidden_layers": 8, "sliding_window": 9}
    assert windows(gemma3) == [9, 9, 9, 9, 9, None, 9, 9]
    assert windows(gemma3 | {"sliding_window_pattern": 2}) == [9, None] * 4


def test_gemma2_alternates() -> None:
    assert windows(LLAMA | {"model_type": "gemma2", "sliding_window": 5}) == [5, None]


def test_layer_types_overrule_the_pattern() -> None:
    kinds = ["full_attention", "sliding_attention"]
    assert windows(LLAMA | {"model_type": "gemma2", "sliding_window": 5, "layer_types": kinds}) == [None, 5]


def test_experts_are_in_every_second_layer_except_named_ones() -> None:
    config = MOE | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    sparse = [isinstance(layer.feed_forward, Moe) for layer in architecture_of(config).layers]
    assert sparse == [False, True, False, False, False, True]


def test_deepseek_query_rank_absent_is_1536_and_null_is_none() -> None:
    absent = {key: value for key, value in MLA.items() if key != "q_lora_rank"}
    for config, rank in ((absent, 1536), (MLA, None)):
        attention = architecture_of(config).layers[0].attention
        assert isinstance(attention, LatentAttention)
        assert attention.query_rank == rank


# --- text decoders of vision-language models --------------------------------------------------------------------------


def test_published_gemma3_file_names_only_what_differs_from_the_defaults() -> None:
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    architecture = architecture_of(
        {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1}}, decoder_only=True
    )
    assert architecture.part_of == "gemma3"
    assert architecture.model_type == "gemma3_text"
    assert architecture.params == 3_880_263_168
    del text["model_type"]
    assert architecture_of({"model_type": "gemma3", "text_config": text}, decoder_only=True).params == 3_880_263_168


def test_text_config_of_a_model_that_is_not_known_itself() -> None:
    architecture = architecture_of({"model_type": "some_vlm", "text_config": LLAMA}, decoder_only=True)
    assert architecture == replace(architecture_of(LLAMA), part_of="some_vlm")


def test_tying_is_read_as_transformers_reads_it() -> None:
    def tied(model_type: str, outer: dict[str, bool], inner: dict[str, bool]) -> bool:
        config = {"model_type": model_type, **outer, "text_config": LLAMA | inner}
        return architecture_of(config, decoder_only=True).tied_embeddings

    yes, no = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
    cases = [({}, {}), (yes, {}), (no, yes), (yes, no)]
    assert [tied("llava", *case) for case in cases] == [False, True, True, True]
    assert [tied("internvl", *case) for case in cases] == [True, True, False, True]
    assert [tied("some_vlm", *case) for case in cases] == [False, True, True, False]


def test_errors_inside_a_text_config_name_it() -> None:
    def said(inner: object) -> str:
        with pytest.raises(ConfigError) as caught:
            architecture_of({"model_type": "llava", "text_config": inner}, decoder_only=True)
        return str(caught.value)

    assert "text_config.hidden_size" in said(LLAMA | {"hidden_size": 0})
    assert "text_config.model_type" in said(LLAMA | {"model_type": 3})
    assert "text_config" in said(3)


@pytest.mark.parametrize("model_type", ["some_vlm", "qwen2_audio"])
def test_a_decoder_with_an_encoder_that_is_not_covered_is_refused(model_type: str) -> None:
    error = refused({"model_type": model_type, "text_config": LLAMA, "vision_config": {"hidden_size": 1}})
    assert f"'{model_type}'" in error.fact
    assert "encoder" in error.fact
    assert "--decoder-only" in error.remedy


# --- errors -----------------------------------------------------------------------------------------------------------


def test_unknown_model_type_is_named_with_the_known_ones_and_the_nearest() -> None:
    error = refused(LLAMA | {"model_type": "lama"})
    assert "'lama'" in error.fact
    assert "Did you mean 'llama'?" in error.fact
    assert all(name in error.remedy for name in known_model_types())


@pytest.mark.parametrize("model_type", [None, 3, ["llama"], True])
def test_model_type_must_be_a_name(model_type: object) -> None:
    assert "model_type" in str(refused({**LLAMA, "model_type": model_type}))


@pytest.mark.parametrize("config", [None, [], "llama", 3])
def test_a_config_must_be_a_mapping(config: object) -> None:
    assert "mapping" in str(refused(config))


@pytest.mark.parametrize(
    ("config", "field"),
    [
        *((LLAMA, field) for field in LLAMA if field != "num_key_value_heads"),
        *((MOE, field) for field in ("moe_intermediate_size", "num_experts", "num_experts_per_tok")),
        *((MLA, field) for field in MLA if field not in ("num_key_value_heads", "q_lora_rank", "intermediate_size")),
        *((GPT2, field) for field in GPT2),
    ],
)
def test_a_missing_size_is_named(config: dict[str, object], field: str) -> None:
    error = refused({key: value for key, value in config.items() if key != field})
    assert error.fact.startswith(field)
    assert "missing" in error.fact


@pytest.mark.parametrize("value", [0, -1, 2.0, "64", True, [64], {"size": 64}, float("nan"), 10**13])
@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers", "num_key_value_heads"])
def test_a_size_that_is_no_size_is_named(field: str, value: object) -> None:
    assert refused({**LLAMA, field: value}).fact.startswith(field)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads"),
        (LLAMA | {"num_attention_heads": 3, "num_key_value_heads": 3}, "num_attention_heads"),
        (LLAMA | {"num_hidden_layers": 10**6}, "num_hidden_layers"),
        (LLAMA | {"attention_bias": "yes"}, "attention_bias"),
        (LLAMA | {"tie_word_embeddings": 1}, "tie_word_embeddings"),
        (LLAMA | {"sliding_window": 128}, "sliding_window"),
        (LLAMA | {"head_dim": 0}, "head_dim"),
        (LLAMA | {"model_type": "gemma", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (LLAMA | {"model_type": "gemma2", "sliding_window": None}, "sliding_window"),
        (LLAMA | {"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types"),
        (LLAMA | {"model_type": "gemma2", "layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        (LLAMA | {"model_type": "gemma2", "layer_types": ["full_attention", ["x"]]}, "layer_types"),
        (LLAMA | {"model_type": "gemma2", "layer_types": "full_attention"}, "layer_types"),
        (LLAMA | {"model_type": "mistral", "layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (LLAMA | {"model_type": "qwen2", "num_key_value_heads": 32}, "num_key_value_heads"),
        (LLAMA | {"model_type": "qwen2", "use_sliding_window": 1}, "use_sliding_window"),
        (MOE | {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        (MOE | {"mlp_only_layers": 3}, "mlp_only_layers"),
        (MOE | {"mlp_only_layers": [-1]}, "mlp_only_layers"),
        (MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (MLA | {"num_key_value_heads": 2}, "num_key_value_heads"),
        (MLA | {"moe_layer_freq": 2}, "moe_layer_freq"),
        (MLA | {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention"),
        (GPT2 | {"n_head": 5}, "n_head"),
    ],
)
def test_what_cannot_be_is_named(config: dict[str, object], named: str) -> None:
    assert refused(config).fact.startswith(named)


def test_a_default_that_does_not_fit_is_called_a_default() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {"model_type": "qwen2"}
    assert "(32, the default of 'qwen2',)" in refused(config).fact


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**15),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(-2, 5), st.text(max_size=3), st.lists(st.none(), max_size=1)), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@settings(max_examples=50, deadline=None)
@given(config=st.sampled_from([LLAMA, MOE, MLA, GPT2]), data=st.data())
def test_junk_gives_an_architecture_or_a_named_error(config: dict[str, object], data: st.DataObject) -> None:
    extra = ["sliding_window", "layer_types", "mlp_only_layers", "head_dim", "text_config", "model_type", "mlp_bias"]
    broken = dict(config)
    for field in data.draw(st.lists(st.sampled_from([*config, *extra]), min_size=1, max_size=3)):
        broken[field] = data.draw(JUNK)
    if data.draw(st.booleans()):
        broken["model_type"] = data.draw(st.sampled_from(known_model_types()))
    with suppress(ConfigError):
        assert architecture_of(broken).params > 0

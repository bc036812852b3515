"""Builders of architectures without experts, one for each model_type."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from llm_perf_opt.analysis.cost_model.architecture import Architecture, Fields, GroupedAttention, Layer
from llm_perf_opt.analysis.cost_model.blocks import (
    decoder,
    gated_mlp,
    grouped_attention,
    head_size,
    layer_number,
    no_window,
    one_window,
    plain_mlp,
    qwen_window,
    uniform_layers,
    windows,
)

# --- Llama and its kin ------------------------------------------------------------------------------------------------


def _llama(f: Fields) -> Architecture:
    bias = f.flag("attention_bias", False)
    attention = grouped_attention(f, qkv_bias=bias, out_bias=bias)
    mlp = gated_mlp(f, f.size("intermediate_size"), bias=f.flag("mlp_bias", False))
    return decoder(f, uniform_layers(attention, mlp, no_window(f, layer_number(f))))


def _olmo2(f: Fields) -> Architecture:
    bias = f.flag("attention_bias", False)
    attention = grouped_attention(f, qkv_bias=bias, out_bias=bias, norm="all heads")
    mlp = gated_mlp(f, f.size("intermediate_size"))
    return decoder(f, uniform_layers(attention, mlp, no_window(f, layer_number(f))))


def _olmo3(f: Fields) -> Architecture:
    bias = f.flag("attention_bias", False)
    attention = grouped_attention(f, qkv_bias=bias, out_bias=bias, norm="all heads")
    sliding = [(index + 1) % 4 != 0 for index in range(layer_number(f))]
    layer_windows = windows(f, f.nullable_size("sliding_window", absent=4096), sliding)
    return decoder(f, uniform_layers(attention, gated_mlp(f, f.size("intermediate_size")), layer_windows))


def _olmo(f: Fields) -> Architecture:
    # Its norms have no weights.
    bias = f.flag("attention_bias", False)
    attention = grouped_attention(f, qkv_bias=bias, out_bias=bias)
    mlp = gated_mlp(f, f.size("intermediate_size"))
    layers = uniform_layers(attention, mlp, no_window(f, layer_number(f)), norms=0)
    return decoder(f, layers, final_norms=0)


def _smollm3(f: Fields) -> Architecture:
    f.refuse("use_sliding_window", "windows on the layers without rotary positions are not modeled.")
    bias = f.flag("attention_bias", False)
    attention = grouped_attention(f, kv_default=4, qkv_bias=bias, out_bias=bias)
    mlp = gated_mlp(f, f.size("intermediate_size"), bias=f.flag("mlp_bias", False))
    return decoder(f, uniform_layers(attention, mlp, no_window(f, layer_number(f))), tied=True)


def _mistral(f: Fields) -> Architecture:
    attention = grouped_attention(f, kv_default=8)
    window = f.nullable_size("sliding_window", absent=4096)
    mlp = gated_mlp(f, f.size("intermediate_size"))
    return decoder(f, uniform_layers(attention, mlp, one_window(f, window, layer_number(f))))


def _ministral(f: Fields) -> Architecture:
    attention = grouped_attention(f, kv_default=8)
    window = f.nullable_size("sliding_window", absent=4096)
    layer_windows = windows(f, window, [window is not None] * layer_number(f))
    return decoder(f, uniform_layers(attention, gated_mlp(f, f.size("intermediate_size")), layer_windows))


def _phi3(f: Fields) -> Architecture:
    window = f.nullable_size("sliding_window", absent=None)
    mlp = gated_mlp(f, f.size("intermediate_size"))
    return decoder(f, uniform_layers(grouped_attention(f), mlp, one_window(f, window, layer_number(f))))


# --- Qwen -------------------------------------------------------------------------------------------------------------


def _qwen2(f: Fields) -> Architecture:
    return _qwen_dense(f, grouped_attention(f, kv_default=32, qkv_bias=True))


def _qwen3(f: Fields) -> Architecture:
    bias = f.flag("attention_bias", False)
    attention = grouped_attention(f, kv_default=32, head_dim=128, qkv_bias=bias, out_bias=bias, norm="head")
    return _qwen_dense(f, attention)


def _qwen_dense(f: Fields, attention: GroupedAttention) -> Architecture:
    window, first = qwen_window(f), f.count("max_window_layers", 28)
    sliding = [window is not None and index >= first for index in range(layer_number(f))]
    mlp = gated_mlp(f, f.size("intermediate_size"))
    return decoder(f, uniform_layers(attention, mlp, windows(f, window, sliding)))


# --- Gemma ------------------------------------------------------------------------------------------------------------


def _gemma(f: Fields) -> Architecture:
    attention = _gemma_attention(f, kv_default=16)
    mlp = gated_mlp(f, f.size("intermediate_size"))
    return decoder(f, uniform_layers(attention, mlp, no_window(f, layer_number(f))), tied=True)


def _gemma2(f: Fields) -> Architecture:
    return _gemma_sliding(f, _gemma_attention(f, kv_default=4), pattern=2)


def _gemma3(f: Fields) -> Architecture:
    # Published vision-language files leave out what equals transformers' defaults, so these must be filled in.
    attention = _gemma_attention(f, heads_default=8, kv_default=4, norm="head")
    return _gemma_sliding(f, attention, pattern=f.size("sliding_window_pattern", default=6), vocabulary_default=262_208)


def _gemma_attention(f: Fields, *, kv_default: int, heads_default: int | None = None, norm: str = "none") -> GroupedAttention:
    f.refuse("use_bidirectional_attention", "only causal decoders are costed.")
    bias = f.flag("attention_bias", False)
    return grouped_attention(
        f,
        heads_default=heads_default,
        kv_default=kv_default,
        head_dim=256,
        qkv_bias=bias,
        out_bias=bias,
        norm=norm,
    )


def _gemma_sliding(
    f: Fields, attention: GroupedAttention, *, pattern: int, vocabulary_default: int | None = None
) -> Architecture:
    """Every `pattern`-th layer attends to everything, the others to a window; four norms a layer."""
    sliding = [(index + 1) % pattern != 0 for index in range(layer_number(f))]
    layer_windows = windows(f, f.nullable_size("sliding_window", absent=4096), sliding)
    mlp = gated_mlp(f, f.size("intermediate_size"))
    layers = uniform_layers(attention, mlp, layer_windows, norms=4)
    return decoder(f, layers, tied=True, vocabulary_default=vocabulary_default)


# --- plain MLPs -------------------------------------------------------------------------------------------------------


def _gpt2(f: Fields) -> Architecture:
    f.refuse("add_cross_attention", "only decoders without an encoder are costed.")
    hidden, heads = f.size("n_embd", "hidden_size"), f.size("n_head", "num_attention_heads")
    size = head_size(f, hidden, heads, "n_head")
    attention = GroupedAttention(hidden, heads, heads, size, bias_params=4 * hidden)
    mlp = plain_mlp(hidden, f.size("n_inner", default=4 * hidden))
    return Architecture(
        model_type=f.model_type,
        hidden=hidden,
        vocabulary=f.size("vocab_size"),
        layers=(Layer(attention, mlp, 4 * hidden),) * layer_number(f, "n_layer", "num_hidden_layers"),
        final_norm_params=2 * hidden,
        tied_embeddings=f.flag("tie_word_embeddings", True),
        embedding_dim=hidden,
        position_rows=f.size("n_positions", "max_position_embeddings"),
    )


def _gpt_neox(f: Fields) -> Architecture:
    hidden, heads = f.size("hidden_size"), f.size("num_attention_heads")
    bias_params = 4 * hidden if f.flag("attention_bias", True) else 0
    attention = GroupedAttention(hidden, heads, heads, head_size(f, hidden, heads), bias_params)
    layer = Layer(attention, plain_mlp(hidden, f.size("intermediate_size")), norm_params=4 * hidden)
    return decoder(f, [layer] * layer_number(f), final_norms=2)


def _phi(f: Fields) -> Architecture:
    attention = grouped_attention(f, qkv_bias=True, out_bias=True)
    if f.flag("qk_layernorm", False):
        attention = replace(attention, norm_params=4 * attention.head_dim)
    mlp = plain_mlp(attention.hidden, f.size("intermediate_size"))
    # Attention and MLP stand side by side behind one norm, which has a bias.
    layers = uniform_layers(attention, mlp, no_window(f, layer_number(f)))
    return decoder(f, layers, final_norms=2, head_bias=True)


def _starcoder2(f: Fields) -> Architecture:
    bias = f.flag("use_bias", True)
    attention = grouped_attention(f, kv_default=2, qkv_bias=bias, out_bias=bias)
    mlp = plain_mlp(attention.hidden, f.size("intermediate_size"), bias=bias)
    window = f.nullable_size("sliding_window", absent=None)
    layers = uniform_layers(attention, mlp, one_window(f, window, layer_number(f)), norms=4)
    return decoder(f, layers, tied=True, final_norms=2)


def _opt(f: Fields) -> Architecture:
    hidden, heads = f.size("hidden_size"), f.size("num_attention_heads")
    bias = f.flag("enable_bias", True)
    norm_params = 2 * hidden if f.flag("layer_norm_elementwise_affine", True) else 0
    attention = GroupedAttention(hidden, heads, heads, head_size(f, hidden, heads), 4 * hidden if bias else 0)
    layer = Layer(attention, plain_mlp(hidden, f.size("ffn_dim"), bias=bias), 2 * norm_params)
    has_final_norm = f.flag("do_layer_norm_before", True) and not f.flag("_remove_final_layer_norm", False)
    return Architecture(
        model_type=f.model_type,
        hidden=hidden,
        vocabulary=f.size("vocab_size"),
        layers=(layer,) * layer_number(f),
        final_norm_params=norm_params if has_final_norm else 0,
        tied_embeddings=f.flag("tie_word_embeddings", True),
        embedding_dim=f.size("word_embed_proj_dim", default=hidden),
        position_rows=f.size("max_position_embeddings") + 2,  # two rows before the first position are never used
    )


DENSE_FAMILIES: Mapping[str, Callable[[Fields], Architecture]] = MappingProxyType(
    {
        "gemma": _gemma,
        "gemma2": _gemma2,
        "gemma3_text": _gemma3,
        "gpt2": _gpt2,
        "gpt_neox": _gpt_neox,
        "granite": _llama,
        "llama": _llama,
        "ministral": _ministral,
        "mistral": _mistral,
        "olmo": _olmo,
        "olmo2": _olmo2,
        "olmo3": _olmo3,
        "opt": _opt,
        "phi": _phi,
        "phi3": _phi3,
        "qwen2": _qwen2,
        "qwen3": _qwen3,
        "smollm3": _smollm3,
        "starcoder2": _starcoder2,
    }
)
"""From model_type to builder."""

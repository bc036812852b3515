"""Build the Architecture that a Hugging Face configuration describes.

Sizes are required; other fields that are absent have the default that transformers uses for the model_type. An unknown
model_type is an error: its FLOPs would be a guess.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from llm_perf_opt.analysis.cost_model.architecture import Architecture, GroupedAttention, Layer, Mlp, Moe
from llm_perf_opt.analysis.cost_model.blocks import (
    Fields,
    decoder,
    experts,
    gated_mlp,
    grouped_attention,
    head_size,
    latent_attention,
    layer_number,
    no_window,
    one_window,
    plain_mlp,
    qwen_window,
    uniform_layers,
    windows,
)
from llm_perf_opt.analysis.cost_model.vision_families import FAMILIES, Family
from llm_perf_opt.analysis.cost_model.vision_models import text_fields, vision_of
from llm_perf_opt.analysis.stats import shown
from llm_perf_opt.core.errors import ConfigError, nearest

# --- Llama and similar ------------------------------------------------------------------------------------------------


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
    # OLMo's norms have no weights.
    bias = f.flag("attention_bias", False)
    attention = grouped_attention(f, qkv_bias=bias, out_bias=bias)
    mlp = gated_mlp(f, f.size("intermediate_size"))
    layers = uniform_layers(attention, mlp, no_window(f, layer_number(f)), norms=0)
    return decoder(f, layers, final_norms=0)


def _smollm3(f: Fields) -> Architecture:
    f.refuse("use_sliding_window", "windows of layers without rotary positions are not modeled.")
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
    # Published vision-language configs omit fields that equal the defaults of transformers.
    attention = _gemma_attention(f, heads_default=8, kv_default=4, norm="head")
    return _gemma_sliding(f, attention, pattern=f.size("sliding_window_pattern", default=6), vocabulary_default=262_208)


def _gemma_attention(f: Fields, *, kv_default: int, heads_default: int | None = None, norm: str = "none") -> GroupedAttention:
    f.refuse("use_bidirectional_attention", "the cost model covers causal decoders only.")
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
    """Return layers with four norms each; every `pattern`-th one attends to the whole context, the others to a window."""
    sliding = [(index + 1) % pattern != 0 for index in range(layer_number(f))]
    layer_windows = windows(f, f.nullable_size("sliding_window", absent=4096), sliding)
    mlp = gated_mlp(f, f.size("intermediate_size"))
    layers = uniform_layers(attention, mlp, layer_windows, norms=4)
    return decoder(f, layers, tied=True, vocabulary_default=vocabulary_default)


# --- plain MLPs -------------------------------------------------------------------------------------------------------


def _gpt2(f: Fields) -> Architecture:
    f.refuse("add_cross_attention", "the cost model covers decoders without an encoder only.")
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
    # Attention and MLP run in parallel after one norm, which has a bias.
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


# --- mixture of experts -----------------------------------------------------------------------------------------------


def _mixtral(f: Fields) -> Architecture:
    attention = grouped_attention(f, kv_default=8)
    window = f.nullable_size("sliding_window", absent=None)
    moe = experts(f, gated_mlp(f, f.size("intermediate_size")), f.size("num_local_experts", "num_experts"))
    return decoder(f, uniform_layers(attention, moe, one_window(f, window, layer_number(f))))


def _gpt_oss(f: Fields) -> Architecture:
    bias = f.flag("attention_bias", True)
    attention = grouped_attention(f, kv_default=8, head_dim=64, qkv_bias=bias, out_bias=bias)
    attention = replace(attention, norm_params=attention.heads)  # one learned sink per head, in the softmax
    expert = gated_mlp(f, f.size("intermediate_size"), bias=True)
    moe = replace(experts(f, expert, f.size("num_local_experts", "num_experts")), router_bias=True)
    sliding = [index % 2 == 0 for index in range(layer_number(f))]
    layer_windows = windows(f, f.nullable_size("sliding_window", absent=128), sliding)
    return decoder(f, uniform_layers(attention, moe, layer_windows))


def _qwen2_moe(f: Fields) -> Architecture:
    attention = grouped_attention(f, kv_default=16, qkv_bias=f.flag("qkv_bias", True))
    shared = gated_mlp(f, f.size("shared_expert_intermediate_size"))
    moe = experts(f, _expert(f), f.size("num_experts", "num_local_experts"), shared, shared_gate=True)
    window, last = qwen_window(f), f.count("max_window_layers", 28)
    # Unlike in the dense models, the layers with a window come first and alternate.
    sliding = [window is not None and index % 2 == 0 and index < last for index in range(layer_number(f))]
    return _qwen_sparse(f, attention, moe, windows(f, window, sliding))


def _qwen3_moe(f: Fields) -> Architecture:
    bias = f.flag("attention_bias", False)
    attention = grouped_attention(f, kv_default=4, qkv_bias=bias, out_bias=bias, norm="head")
    moe = experts(f, _expert(f), f.size("num_experts", "num_local_experts"))
    return _qwen_sparse(f, attention, moe, one_window(f, qwen_window(f), layer_number(f)))


def _expert(f: Fields) -> Mlp:
    return gated_mlp(f, f.size("moe_intermediate_size"))


def _qwen_sparse(f: Fields, attention: GroupedAttention, moe: Moe, layer_windows: list[int | None]) -> Architecture:
    """Return a decoder with experts in every `decoder_sparse_step`-th layer, except those in `mlp_only_layers`."""
    step, dense_only = f.size("decoder_sparse_step", default=1), f.indices("mlp_only_layers")
    sparse = [(index + 1) % step == 0 and index not in dense_only for index in range(len(layer_windows))]
    dense = moe if all(sparse) else gated_mlp(f, f.size("intermediate_size"))
    layers = [
        Layer(attention, moe if has_experts else dense, 2 * attention.hidden, window)
        for has_experts, window in zip(sparse, layer_windows, strict=True)
    ]
    return decoder(f, layers)


# --- DeepSeek ---------------------------------------------------------------------------------------------------------


def _deepseek_v2(f: Fields) -> Architecture:
    return _deepseek(f, first_dense=f.count("first_k_dense_replace", 0), bias=f.flag("mlp_bias", False))


def _deepseek_v3(f: Fields) -> Architecture:
    # transformers does not build the multi-token prediction modules of the checkpoint.
    return _deepseek(f, first_dense=f.count("first_k_dense_replace", 3), bias=False)


def _deepseek(f: Fields, *, first_dense: int, bias: bool) -> Architecture:
    if f.size("moe_layer_freq", default=1) != 1:
        raise f.error("moe_layer_freq", "must be 1: transformers has experts in every layer after the dense ones.")
    attention, number = latent_attention(f), layer_number(f)
    expert = _expert(f)
    shared = gated_mlp(f, expert.intermediate * f.size("n_shared_experts"), bias=bias)
    spellings = ("n_routed_experts", "num_experts", "num_local_experts")
    moe = experts(f, expert, f.size(*spellings), shared)
    dense = gated_mlp(f, f.size("intermediate_size"), bias=bias) if first_dense else moe
    no_window(f, number)
    norms = 2 * attention.hidden
    layers = [Layer(attention, dense if index < first_dense else moe, norms) for index in range(number)]
    return decoder(f, layers)


# --- model types ------------------------------------------------------------------------------------------------------

_BUILDERS: Mapping[str, Callable[[Fields], Architecture]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "granite": _llama,
    "llama": _llama,
    "ministral": _ministral,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "opt": _opt,
    "phi": _phi,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "smollm3": _smollm3,
    "starcoder2": _starcoder2,
}


def architecture_of(config: object, *, decoder_only: bool = False) -> Architecture:
    """Return the architecture that a config describes.

    Of a vision-language model that the cost model covers, it includes the weights of the encoders. Any other config with a text
    decoder and an encoder raises a ConfigError. With `decoder_only`, the text decoder is taken as the model, for example for
    requests that are text only.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"A model configuration must be a mapping of fields, not {type(config).__name__}.")
    model_type = _model_type(config, "")
    family = FAMILIES.get(model_type)
    if family is not None:
        return _with_images(config, model_type, family, decoder_only)
    inner = config.get("text_config")
    if model_type in _BUILDERS or inner is None:
        return _builder(model_type)(Fields(config, model_type))
    if not isinstance(inner, Mapping):
        raise ConfigError(f"text_config must be a mapping of fields, not {type(inner).__name__}.")
    if not decoder_only:
        raise ConfigError(
            f"model_type '{model_type}' is a text decoder (text_config) with an image or audio encoder, "
            "which the cost model does not cover.",
            "Add --decoder-only to count the text decoder alone, as it runs on a text prompt. "
            f"Covered with images: {', '.join(FAMILIES)}.",
        )
    # The decoder's own setting takes precedence; some configs have it only at the top level.
    fields = {key: config[key] for key in ("tie_word_embeddings",) if key in config} | dict(inner)
    inner_type = _model_type(fields, "text_config.")
    return replace(_builder(inner_type)(Fields(fields, inner_type, "text_config.")), part_of=model_type)


def _with_images(config: Mapping[str, object], model_type: str, family: Family, decoder_only: bool) -> Architecture:
    fields = text_fields(config, family)
    inner_type = _model_type(fields, "text_config.")
    own = family.text if inner_type == family.text_type else None
    decoder = (own or _builder(inner_type))(Fields(fields, inner_type, "text_config."))
    vision = None if decoder_only else vision_of(config)
    return replace(decoder, part_of=model_type, vision_params=vision.params if vision else 0)


def known_model_types() -> tuple[str, ...]:
    """Return every model_type that the cost model covers."""
    return tuple(sorted(_BUILDERS))


def _model_type(config: Mapping[str, object], prefix: str) -> str:
    value = config.get("model_type")
    if value is None:
        raise ConfigError(f"{prefix}model_type is missing.", _known())
    if not isinstance(value, str):
        raise ConfigError(f"{prefix}model_type must be a name, not {shown(value)}.", _known())
    return value


def _builder(model_type: str) -> Callable[[Fields], Architecture]:
    if model_type not in _BUILDERS:
        hint = nearest(model_type, _BUILDERS)
        raise ConfigError(f"model_type '{model_type}' is not a known architecture.{hint}", _known())
    return _BUILDERS[model_type]


def _known() -> str:
    return f"Known: {', '.join((*known_model_types(), *FAMILIES))}."

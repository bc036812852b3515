"""Builders of architectures with routed experts, one for each model_type."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from llm_perf_opt.analysis.cost_model.architecture import Architecture, Fields, GroupedAttention, Layer, Mlp, Moe
from llm_perf_opt.analysis.cost_model.blocks import (
    decoder,
    experts,
    gated_mlp,
    grouped_attention,
    latent_attention,
    layer_number,
    no_window,
    one_window,
    qwen_window,
    uniform_layers,
    windows,
)


def _mixtral(f: Fields) -> Architecture:
    attention = grouped_attention(f, kv_default=8)
    window = f.nullable_size("sliding_window", absent=None)
    moe = experts(f, gated_mlp(f, f.size("intermediate_size")), f.size("num_local_experts", "num_experts"))
    return decoder(f, uniform_layers(attention, moe, one_window(f, window, layer_number(f))))


def _gpt_oss(f: Fields) -> Architecture:
    bias = f.flag("attention_bias", True)
    attention = grouped_attention(f, kv_default=8, head_dim=64, qkv_bias=bias, out_bias=bias)
    attention = replace(attention, norm_params=attention.heads)  # one learned sink a head, in the softmax
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
    # Here the windows come first and alternate, unlike in the dense models.
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
    """Experts in every `decoder_sparse_step`-th layer but those named in `mlp_only_layers`."""
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
    # The multi-token prediction modules of the checkpoint are no part of the decoder that transformers builds.
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


MOE_FAMILIES: Mapping[str, Callable[[Fields], Architecture]] = MappingProxyType(
    {
        "deepseek_v2": _deepseek_v2,
        "deepseek_v3": _deepseek_v3,
        "gpt_oss": _gpt_oss,
        "mixtral": _mixtral,
        "qwen2_moe": _qwen2_moe,
        "qwen3_moe": _qwen3_moe,
    }
)
"""From model_type to builder."""

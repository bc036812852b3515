"""What the builders of architectures share: attention, feed-forward blocks and windows read from config fields."""

from collections.abc import Iterable, Sequence

from llm_perf_opt.analysis.cost_model.architecture import Architecture, Fields, GroupedAttention, LatentAttention, Layer, Mlp, Moe

_MOST_LAYERS = 10_000
"""No model comes near it; a slip of the finger would otherwise fill the memory."""

_SLIDING = "sliding_attention"
_KINDS = frozenset({_SLIDING, "full_attention"})


def layer_number(f: Fields, name: str = "num_hidden_layers", *spellings: str) -> int:
    """How many layers there are."""
    number = f.size(name, *spellings)
    if number > _MOST_LAYERS:
        raise f.error(name, f"is {number}: more than {_MOST_LAYERS} layers.")
    return number


def head_size(f: Fields, hidden: int, heads: int, name: str = "num_attention_heads") -> int:
    """hidden / heads, for models that do not name it."""
    if hidden % heads:
        raise f.error(name, f"({heads}) does not divide the hidden size ({hidden}).")
    return hidden // heads


def grouped_attention(
    f: Fields,
    *,
    heads_default: int | None = None,
    kv_default: int | None = None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    norm: str = "none",
) -> GroupedAttention:
    """Grouped attention. `kv_default` is for an absent field; null, and no default, mean as many as heads."""
    hidden = f.size("hidden_size")
    heads = f.size("num_attention_heads", default=heads_default)
    kv_heads = f.nullable_size("num_key_value_heads", kv_default) or heads
    if heads % kv_heads:
        note = "" if f.has("num_key_value_heads") else f", the default of '{f.model_type}',"
        raise f.error("num_key_value_heads", f"({kv_heads}{note}) does not divide num_attention_heads ({heads}).")
    if head_dim is None and not f.has("head_dim"):
        head_dim = head_size(f, hidden, heads)
    size = f.size("head_dim", default=head_dim)
    norm_params = {"none": 0, "head": 2 * size, "all heads": (heads + kv_heads) * size}[norm]
    bias_params = (size * (heads + 2 * kv_heads) if qkv_bias else 0) + (hidden if out_bias else 0)
    return GroupedAttention(hidden, heads, kv_heads, size, bias_params, norm_params)


def latent_attention(f: Fields) -> LatentAttention:
    """DeepSeek's attention; queries are compressed too unless `q_lora_rank` is null."""
    hidden, heads = f.size("hidden_size"), f.size("num_attention_heads")
    kv_heads = f.size("num_key_value_heads", default=heads)
    if kv_heads != heads:
        raise f.error("num_key_value_heads", f"({kv_heads}) must equal num_attention_heads ({heads}) here.")
    query_rank = f.nullable_size("q_lora_rank", absent=1536)
    kv_rank, rope = f.size("kv_lora_rank"), f.size("qk_rope_head_dim")
    bias = f.flag("attention_bias", False)
    return LatentAttention(
        hidden=hidden,
        heads=heads,
        query_rank=query_rank,
        kv_rank=kv_rank,
        nope_dim=f.size("qk_nope_head_dim"),
        rope_dim=rope,
        value_dim=f.size("v_head_dim"),
        bias_params=(query_rank or 0) + kv_rank + rope + hidden if bias else 0,
        norm_params=(query_rank or 0) + kv_rank,
    )


def gated_mlp(f: Fields, intermediate: int, *, bias: bool = False) -> Mlp:
    """Gate, up and down."""
    hidden = f.size("hidden_size")
    return Mlp(hidden, intermediate, gated=True, bias_params=2 * intermediate + hidden if bias else 0)


def plain_mlp(hidden: int, intermediate: int, *, bias: bool = True) -> Mlp:
    """Up and down."""
    return Mlp(hidden, intermediate, gated=False, bias_params=intermediate + hidden if bias else 0)


def experts(f: Fields, expert: Mlp, number: int, shared: Mlp | None = None, *, shared_gate: bool = False) -> Moe:
    """Routed experts, `num_experts_per_tok` of which each token uses."""
    active = f.size("num_experts_per_tok")
    if active > number:
        raise f.error("num_experts_per_tok", f"({active}) is more than there are experts ({number}).")
    return Moe(expert, number, active, shared, shared_gate)


def no_window(f: Fields, number: int) -> list[int | None]:
    """For a model_type that always attends to everything."""
    f.refuse("sliding_window", f"'{f.model_type}' attends to everything.")
    return windows(f, None, [False] * number, fixed=True)


def one_window(f: Fields, window: int | None, number: int) -> list[int | None]:
    """For a model_type whose layers all have the same window, or none."""
    return windows(f, window, [window is not None] * number, fixed=True)


def qwen_window(f: Fields) -> int | None:
    """Qwen's window, which a flag turns on."""
    return f.nullable_size("sliding_window", absent=4096) if f.flag("use_sliding_window", False) else None


def windows(f: Fields, window: int | None, sliding: Iterable[bool], *, fixed: bool = False) -> list[int | None]:
    """The window of each layer; `layer_types` overrules the pattern, except where the model has no such choice."""
    slides = list(sliding)
    kinds = f.words("layer_types", length=len(slides), allowed=_KINDS)
    if kinds is not None:
        chosen = [kind == _SLIDING for kind in kinds]
        if fixed and chosen != slides:
            raise f.error("layer_types", f"is not what '{f.model_type}' computes.")
        slides = chosen
    if any(slides) and window is None:
        raise f.error("sliding_window", "is missing, but there are layers with sliding attention.")
    return [window if slide else None for slide in slides]


def uniform_layers(
    attention: GroupedAttention, mlp: Mlp | Moe, layer_windows: Sequence[int | None], *, norms: int = 2
) -> list[Layer]:
    """Layers that differ in nothing but their window; `norms` of the model's width each."""
    return [Layer(attention, mlp, norms * attention.hidden, window) for window in layer_windows]


def decoder(
    f: Fields,
    layers: Sequence[Layer],
    *,
    tied: bool = False,
    final_norms: int = 1,
    vocabulary_default: int | None = None,
    head_bias: bool = False,
) -> Architecture:
    """The whole model around its layers, with rotary positions; `tied` is the model_type's default."""
    hidden, vocabulary = f.size("hidden_size"), f.size("vocab_size", default=vocabulary_default)
    return Architecture(
        model_type=f.model_type,
        hidden=hidden,
        vocabulary=vocabulary,
        layers=tuple(layers),
        final_norm_params=final_norms * hidden,
        tied_embeddings=f.flag("tie_word_embeddings", tied),
        embedding_dim=hidden,
        head_bias_params=vocabulary if head_bias else 0,
    )

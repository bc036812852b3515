"""Building blocks of the architecture builders: validated config fields, attention, feed-forward blocks, windows."""

from collections.abc import Iterable, Mapping, Sequence

from llm_perf_opt.analysis.cost_model.architecture import Architecture, GroupedAttention, LatentAttention, Layer, Mlp, Moe
from llm_perf_opt.analysis.stats import positive_number, shown, whole_number
from llm_perf_opt.core.errors import ConfigError

_MOST_LAYERS = 10_000
"""More than any model has; a typo beyond it would fill the memory."""

_SLIDING = "sliding_attention"
_KINDS = frozenset({_SLIDING, "full_attention"})


class Fields:
    """The fields of one config. Null means absent, except in `nullable_size`."""

    def __init__(self, values: Mapping[str, object], model_type: str, prefix: str = "") -> None:
        self._values = values
        self._model_type = model_type
        self._prefix = prefix

    @property
    def model_type(self) -> str:
        """The config's name for its architecture."""
        return self._model_type

    def error(self, name: str, problem: str, remedy: str = "") -> ConfigError:
        """Return a ConfigError about one field."""
        return ConfigError(f"{self._label(name)} {problem}", remedy)

    def has(self, name: str) -> bool:
        """Return whether the field is present and not null."""
        return self._values.get(name) is not None

    def size(self, *names: str, default: int | None = None) -> int:
        """Return a whole number of at least 1 under any of the names; without a default, the field is required."""
        for name in names:
            if self.has(name):
                return whole_number(self._label(name), self._values[name], at_least=1)
        if default is None:
            raise self.error(names[0], "is missing.", f"The cost model needs it for '{self._model_type}'.")
        return default

    def nullable_size(self, name: str, absent: int | None) -> int | None:
        """Return a whole number of at least 1, None for null, or `absent` if the config does not have the field."""
        if name not in self._values:
            return absent
        return self.size(name) if self.has(name) else None

    def count(self, name: str, default: int) -> int:
        """Return a whole number of at least 0."""
        return whole_number(self._label(name), self._values[name], at_least=0) if self.has(name) else default

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean field."""
        if not self.has(name):
            return default
        value = self._values[name]
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {shown(value)}.")
        return value

    def words(self, name: str, *, length: int, allowed: frozenset[str]) -> tuple[str, ...] | None:
        """Return a list of `length` allowed words, or None if the field is absent."""
        if not self.has(name):
            return None
        value = self._list(name)
        if len(value) != length:
            raise self.error(name, f"has {len(value)} entries for {length} layers.")
        words = tuple(entry for entry in value if isinstance(entry, str) and entry in allowed)
        if len(words) != length:
            unknown = next(entry for entry in value if entry not in words)
            raise self.error(name, f"contains {shown(unknown)}; known: {', '.join(sorted(allowed))}.")
        return words

    def indices(self, name: str, default: Sequence[int] = ()) -> frozenset[int]:
        """Return the layer numbers of a list."""
        entries = self._list(name) if self.has(name) else default
        return frozenset(whole_number(self._label(name), entry, at_least=0) for entry in entries)

    def pair(self, name: str, default: int | tuple[int, int]) -> tuple[int, int]:
        """Return two whole numbers of at least 1, such as height and width; a single one stands for both."""
        if not self.has(name):
            return default if isinstance(default, tuple) else (default, default)
        value = self._values[name]
        entries = (value, value) if isinstance(value, int) else self._list(name)
        if len(entries) != 2:
            raise self.error(name, f"must be a number or two, not {shown(value)}.")
        first, second = (whole_number(self._label(name), entry, at_least=1) for entry in entries)
        return first, second

    def number(self, name: str, default: float) -> float:
        """Return a number above zero."""
        return positive_number(self._label(name), self._values[name]) if self.has(name) else default

    def word(self, name: str, default: str, allowed: Sequence[str]) -> str:
        """Return one of the allowed words."""
        value = self._values[name] if self.has(name) else default
        if not isinstance(value, str) or value not in allowed:
            raise self.error(name, f"is {shown(value)}; known: {', '.join(allowed)}.")
        return value

    def entries(self, name: str) -> int:
        """Return how many entries a field has that is a list or a single value; one if it is absent."""
        value = self._values.get(name)
        return len(value) if isinstance(value, (list, tuple)) else 1

    def section(self, name: str, model_type: str) -> "Fields":
        """Return the fields of an inner config; `model_type` applies if it does not name its own."""
        if not self.has(name):
            raise self.error(name, "is missing.", f"The cost model needs it for '{self._model_type}'.")
        value = self._values[name]
        if not isinstance(value, Mapping):
            raise self.error(name, f"must be a mapping of fields, not {type(value).__name__}.")
        own = value.get("model_type")
        return Fields(value, own if isinstance(own, str) else model_type, f"{self._prefix}{name}.")

    def refuse(self, name: str, why: str) -> None:
        """Raise a ConfigError if the field is set: its effect on the cost is not modeled."""
        value = self._values.get(name)
        if value not in (None, False, 0):
            raise self.error(name, f"is {shown(value)}: {why}")

    def _list(self, name: str) -> Sequence[object]:
        value = self._values[name]
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.error(name, f"must be a list, not {shown(value)}.")
        return value

    def _label(self, name: str) -> str:
        return f"{self._prefix}{name} (model_type '{self._model_type}')"


def layer_number(f: Fields, name: str = "num_hidden_layers", *spellings: str, default: int | None = None) -> int:
    """Return the number of layers."""
    number = f.size(name, *spellings, default=default)
    if number > _MOST_LAYERS:
        raise f.error(name, f"is {number}: more than {_MOST_LAYERS} layers.")
    return number


def head_size(f: Fields, hidden: int, heads: int, name: str = "num_attention_heads") -> int:
    """Return hidden / heads, for models whose config has no head size."""
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
    """Return grouped attention. `kv_default` applies if the field is absent; null, or no default, means as many as heads."""
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
    return GroupedAttention(hidden, heads, kv_heads, size, bias_params, norm_params, norm == "all heads")


def latent_attention(f: Fields) -> LatentAttention:
    """Return DeepSeek's attention; queries are also compressed unless `q_lora_rank` is null."""
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
    """Return an MLP with gate, up and down projections."""
    hidden = f.size("hidden_size")
    return Mlp(hidden, intermediate, gated=True, bias_params=2 * intermediate + hidden if bias else 0)


def plain_mlp(hidden: int, intermediate: int, *, bias: bool = True) -> Mlp:
    """Return an MLP with up and down projections."""
    return Mlp(hidden, intermediate, gated=False, bias_params=intermediate + hidden if bias else 0)


def experts(f: Fields, expert: Mlp, number: int, shared: Mlp | None = None, *, shared_gate: bool = False) -> Moe:
    """Return routed experts; each token uses `num_experts_per_tok` of them."""
    active = f.size("num_experts_per_tok")
    if active > number:
        raise f.error("num_experts_per_tok", f"({active}) is larger than the number of experts ({number}).")
    return Moe(expert, number, active, shared, shared_gate)


def no_window(f: Fields, number: int) -> list[int | None]:
    """Return no window per layer, for a model_type that attends to the whole context."""
    f.refuse("sliding_window", f"'{f.model_type}' attends to the whole context.")
    return windows(f, None, [False] * number, fixed=True)


def one_window(f: Fields, window: int | None, number: int) -> list[int | None]:
    """Return the window per layer, for a model_type whose layers all have the same window or none."""
    return windows(f, window, [window is not None] * number, fixed=True)


def qwen_window(f: Fields) -> int | None:
    """Return Qwen's window if its flag enables it."""
    return f.nullable_size("sliding_window", absent=4096) if f.flag("use_sliding_window", False) else None


def windows(f: Fields, window: int | None, sliding: Iterable[bool], *, fixed: bool = False) -> list[int | None]:
    """Return the window of each layer. `layer_types` overrides the pattern unless the pattern is `fixed`."""
    slides = list(sliding)
    kinds = f.words("layer_types", length=len(slides), allowed=_KINDS)
    if kinds is not None:
        chosen = [kind == _SLIDING for kind in kinds]
        if fixed and chosen != slides:
            raise f.error("layer_types", f"does not match the layers of '{f.model_type}'.")
        slides = chosen
    if any(slides) and window is None:
        raise f.error("sliding_window", "is missing, but some layers use sliding attention.")
    return [window if slide else None for slide in slides]


def uniform_layers(
    attention: GroupedAttention, mlp: Mlp | Moe, layer_windows: Sequence[int | None], *, norms: int = 2
) -> list[Layer]:
    """Return layers that differ only in their window, with `norms` norms of the model's width each."""
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
    """Return the model with these layers and rotary positions; `tied` is the model_type's default."""
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

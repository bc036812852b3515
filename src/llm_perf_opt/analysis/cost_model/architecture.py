"""A decoder-only transformer as sizes: what its parts weigh, which is all that FLOPs and bytes depend on."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from types import MappingProxyType

from llm_perf_opt.analysis.stats import shown, whole_number
from llm_perf_opt.core.errors import ConfigError


class Mla(str, Enum):
    """How multi-head latent attention is carried out. The mathematics is one; the FLOPs and the cache are not."""

    EXPAND_ONCE = "expand_once"
    """Keys and values are expanded when a token is new and cached expanded: heads × (qk + v) elements a token."""
    REEXPAND = "reexpand"
    """The latent is cached (rank + rope elements a token) and every step expands the whole context again."""
    ABSORB = "absorb"
    """The latent is cached and attended to directly; the expansion is absorbed into the query and the output."""

    def __str__(self) -> str:
        return self.value


TRANSFORMERS_MLA = Mla.REEXPAND
"""What transformers 5 runs for DeepSeek: the cache keeps the latent, `kv_b_proj` runs over all of it in every step."""


@dataclass(frozen=True)
class GroupedAttention:
    """Query heads that share key/value heads: MHA with as many, GQA with fewer, MQA with one."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    bias_params: int = 0
    norm_params: int = 0
    """Weights inside attention that multiply no matrix: norms of queries and keys, sinks."""

    @property
    def matrix_params(self) -> int:
        """Weights of the query, key, value and output projections."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def params(self) -> int:
        """All parameters."""
        return self.matrix_params + self.bias_params + self.norm_params

    def flops_per_pair(self, mla: Mla) -> int:
        """Of one query token and one key token in all heads, the score and the weighted value; `mla` plays no part."""
        return 2 * self.heads * (self.head_dim + self.head_dim)

    def kv_elements(self, mla: Mla) -> int:
        """Cached per token; `mla` plays no part."""
        return 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): keys and values come from one low-rank vector a token."""

    hidden: int
    heads: int
    query_rank: int | None
    """Rank of the query's own compression, None where queries come from one matrix."""
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    bias_params: int = 0
    norm_params: int = 0

    @property
    def expansion_params(self) -> int:
        """Weights that turn a latent into every head's key and value (`kv_b_proj`)."""
        return self.kv_rank * self.heads * (self.nope_dim + self.value_dim)

    @property
    def token_params(self) -> int:
        """Weights of the projections that run once for each new token, whatever the implementation."""
        queries = self.heads * (self.nope_dim + self.rope_dim)
        rank = self.query_rank
        query = self.hidden * queries if rank is None else rank * (self.hidden + queries)
        return query + self.hidden * (self.kv_rank + self.rope_dim) + self.heads * self.value_dim * self.hidden

    @property
    def matrix_params(self) -> int:
        """Weights of all projections."""
        return self.token_params + self.expansion_params

    @property
    def params(self) -> int:
        """All parameters."""
        return self.matrix_params + self.bias_params + self.norm_params

    def flops_per_pair(self, mla: Mla) -> int:
        """Of one query token and one key token in all heads: the score and the weighted value."""
        if mla is Mla.ABSORB:
            return 2 * self.heads * ((self.kv_rank + self.rope_dim) + self.kv_rank)
        return 2 * self.heads * ((self.nope_dim + self.rope_dim) + self.value_dim)

    def kv_elements(self, mla: Mla) -> int:
        """Cached per token."""
        if mla is Mla.EXPAND_ONCE:
            return self.heads * (self.nope_dim + self.rope_dim + self.value_dim)
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class Mlp:
    """A feed-forward block: three matrices when gated, two when plain."""

    hidden: int
    intermediate: int
    gated: bool
    bias_params: int = 0

    @property
    def matrix_params(self) -> int:
        """Weights of its matrices."""
        return (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def params(self) -> int:
        """All parameters."""
        return self.matrix_params + self.bias_params


@dataclass(frozen=True)
class Moe:
    """Routed experts, of which each token uses a few, and what every token shares."""

    expert: Mlp
    experts: int
    active: int
    shared: Mlp | None = None
    shared_gate: bool = False
    """Whether the shared expert's output is scaled by a learned gate of one column."""
    router_bias: bool = False

    @property
    def router_matrix_params(self) -> int:
        """One column an expert."""
        return self.expert.hidden * self.experts

    @property
    def router_params(self) -> int:
        """All parameters of the router."""
        return self.router_matrix_params + (self.experts if self.router_bias else 0)

    @property
    def shared_matrix_params(self) -> int:
        """Weights every token multiplies beside its experts, the gate among them."""
        shared = self.shared.matrix_params if self.shared else 0
        return shared + (self.expert.hidden if self.shared_gate else 0)

    @property
    def shared_params(self) -> int:
        """All parameters of what is shared."""
        return self.shared_matrix_params + (self.shared.bias_params if self.shared else 0)

    @property
    def params(self) -> int:
        """All parameters, every expert counted."""
        return self.router_params + self.experts * self.expert.params + self.shared_params

    @property
    def active_params(self) -> int:
        """Parameters one token uses."""
        return self.params - (self.experts - self.active) * self.expert.params


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    attention: GroupedAttention | LatentAttention
    feed_forward: Mlp | Moe
    norm_params: int
    window: int | None = None
    """How many tokens a query sees, itself among them; None sees all before it."""

    @property
    def params(self) -> int:
        """All parameters."""
        return self.attention.params + self.feed_forward.params + self.norm_params

    @property
    def active_params(self) -> int:
        """Parameters one token uses."""
        idle = self.feed_forward.params - self.feed_forward.active_params if isinstance(self.feed_forward, Moe) else 0
        return self.params - idle


@dataclass(frozen=True)
class Architecture:
    """Everything about a model that its FLOPs and bytes depend on."""

    model_type: str
    hidden: int
    vocabulary: int
    layers: tuple[Layer, ...]
    final_norm_params: int
    tied_embeddings: bool
    embedding_dim: int
    """Width of the embedding table; a projection to `hidden` stands between where the two differ (OPT-350M)."""
    position_rows: int = 0
    """Rows of a learned position table, 0 for rotary positions."""
    head_bias_params: int = 0
    part_of: str | None = None
    """model_type of the vision-language model this is the text decoder of; its other towers are not counted."""

    @cached_property
    def layer_counts(self) -> Mapping[Layer, int]:
        """Each distinct kind of layer and how many there are of it."""
        return MappingProxyType(Counter(self.layers))

    @property
    def has_latent_attention(self) -> bool:
        """Whether the choice of `Mla` matters."""
        return any(isinstance(layer.attention, LatentAttention) for layer in self.layer_counts)

    @property
    def projected_embedding(self) -> bool:
        """Whether matrices stand between the embedding's width and the model's."""
        return self.embedding_dim != self.hidden

    @property
    def embedding_params(self) -> int:
        """Token table, position table and the projection to the model's width."""
        projection = self.embedding_dim * self.hidden if self.projected_embedding else 0
        return self.vocabulary * self.embedding_dim + self.position_rows * self.hidden + projection

    @property
    def head_matrix_params(self) -> int:
        """Weights that a logit needs, whether or not they are the embedding's own."""
        projection = self.embedding_dim * self.hidden if self.projected_embedding else 0
        return self.vocabulary * self.embedding_dim + projection

    @property
    def params(self) -> int:
        """All parameters held; a tied embedding is held once."""
        tied = self.vocabulary * self.embedding_dim if self.tied_embeddings else 0
        layers = sum(count * layer.params for layer, count in self.layer_counts.items())
        head = self.head_matrix_params + self.head_bias_params
        return self.embedding_params + layers + self.final_norm_params + head - tied

    @property
    def active_params(self) -> int:
        """All parameters but those of the experts one token leaves idle; embedding and head are counted."""
        idle = sum(count * (layer.params - layer.active_params) for layer, count in self.layer_counts.items())
        return self.params - idle


# --- hf config --------------------------------------------------------------------------------------------------------


class Fields:
    """The fields of one config. Null counts as absent, except where a reader says what null itself means."""

    def __init__(self, values: Mapping[str, object], model_type: str, prefix: str = "") -> None:
        self._values = values
        self._model_type = model_type
        self._prefix = prefix

    @property
    def model_type(self) -> str:
        """The config's own name for its architecture."""
        return self._model_type

    def error(self, name: str, problem: str, remedy: str = "") -> ConfigError:
        """A ConfigError about one field."""
        return ConfigError(f"{self._label(name)} {problem}", remedy)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    def size(self, *names: str, default: int | None = None) -> int:
        """A whole number of at least one. Further names are other spellings; without a default it must be there."""
        for name in names:
            if self.has(name):
                return whole_number(self._label(name), self._values[name], at_least=1)
        if default is None:
            raise self.error(names[0], "is missing.", f"'{self._model_type}' cannot be costed without it.")
        return default

    def nullable_size(self, name: str, absent: int | None) -> int | None:
        """A whole number of at least one, or None for null; `absent` where the field is not there at all."""
        if name not in self._values:
            return absent
        return self.size(name) if self.has(name) else None

    def count(self, name: str, default: int) -> int:
        """A whole number of at least zero."""
        return whole_number(self._label(name), self._values[name], at_least=0) if self.has(name) else default

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        if not self.has(name):
            return default
        value = self._values[name]
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {shown(value)}.")
        return value

    def words(self, name: str, *, length: int, allowed: frozenset[str]) -> tuple[str, ...] | None:
        """A list of that many allowed words, or None."""
        if not self.has(name):
            return None
        value = self._list(name)
        if len(value) != length:
            raise self.error(name, f"has {len(value)} entries for {length} layers.")
        words = tuple(entry for entry in value if isinstance(entry, str) and entry in allowed)
        if len(words) != length:
            strange = next(entry for entry in value if entry not in words)
            raise self.error(name, f"holds {shown(strange)}; known: {', '.join(sorted(allowed))}.")
        return words

    def indices(self, name: str) -> frozenset[int]:
        """A list of layer numbers; absent is empty."""
        entries = self._list(name) if self.has(name) else ()
        return frozenset(whole_number(self._label(name), entry, at_least=0) for entry in entries)

    def refuse(self, name: str, why: str) -> None:
        """Stop where the field is set to anything that changes the model: it would be guessed at, not computed."""
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

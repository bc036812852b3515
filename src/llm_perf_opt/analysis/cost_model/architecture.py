"""A decoder-only transformer as the sizes that its FLOPs and bytes depend on."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from types import MappingProxyType


class Mla(str, Enum):
    """How multi-head latent attention is implemented: same mathematics, different FLOPs and cache."""

    EXPAND_ONCE = "expand_once"
    """Expand the keys and values of each new token and cache them: heads × (qk + v) elements per token."""
    REEXPAND = "reexpand"
    """Cache the latent (rank + rope elements per token) and expand the whole context again in every step."""
    ABSORB = "absorb"
    """Cache the latent and attend to it directly; the expansion is absorbed into the query and the output."""

    def __str__(self) -> str:
        return self.value


TRANSFORMERS_MLA = Mla.REEXPAND
"""What transformers 5 runs for DeepSeek: the cache holds the latent, and `kv_b_proj` runs over all of it in every step."""


@dataclass(frozen=True)
class GroupedAttention:
    """Attention whose query heads share key/value heads: as many (MHA), fewer (GQA) or one (MQA)."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    bias_params: int = 0
    norm_params: int = 0
    """Attention weights outside the matrices: query and key norms, sinks."""
    norm_over_heads: bool = False
    """Whether the norms of queries and keys run over all heads together (OLMo 2), not over each."""

    @property
    def matrix_params(self) -> int:
        """Weights of the query, key, value and output projections."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def params(self) -> int:
        """All parameters."""
        return self.matrix_params + self.bias_params + self.norm_params

    def flops_per_pair(self, mla: Mla) -> int:
        """Return the FLOPs of the score and the weighted value for one query and one key token; `mla` is ignored."""
        return 2 * self.heads * (self.head_dim + self.head_dim)

    def kv_elements(self, mla: Mla) -> int:
        """Return the elements cached per token; `mla` is ignored."""
        return 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): keys and values come from one low-rank vector per token."""

    hidden: int
    heads: int
    query_rank: int | None
    """Rank of the query compression; None if one matrix computes the queries."""
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    bias_params: int = 0
    norm_params: int = 0

    @property
    def expansion_params(self) -> int:
        """Weights that expand a latent into the keys and values of all heads (`kv_b_proj`)."""
        return self.kv_rank * self.heads * (self.nope_dim + self.value_dim)

    @property
    def token_params(self) -> int:
        """Weights of the projections that run once per new token in every implementation."""
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
        """Return the FLOPs of the score and the weighted value for one query and one key token, over all heads."""
        if mla is Mla.ABSORB:
            return 2 * self.heads * ((self.kv_rank + self.rope_dim) + self.kv_rank)
        return 2 * self.heads * ((self.nope_dim + self.rope_dim) + self.value_dim)

    def kv_elements(self, mla: Mla) -> int:
        """Return the elements cached per token."""
        if mla is Mla.EXPAND_ONCE:
            return self.heads * (self.nope_dim + self.rope_dim + self.value_dim)
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class Mlp:
    """A feed-forward block: three matrices if gated, otherwise two."""

    hidden: int
    intermediate: int
    gated: bool
    bias_params: int = 0

    @property
    def matrix_params(self) -> int:
        """Weights of the matrices."""
        return (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def params(self) -> int:
        """All parameters."""
        return self.matrix_params + self.bias_params


@dataclass(frozen=True)
class Moe:
    """Routed experts, a few of them active per token, and an optional shared expert."""

    expert: Mlp
    experts: int
    active: int
    shared: Mlp | None = None
    shared_gate: bool = False
    """Whether a learned gate of one column scales the shared expert's output."""
    router_bias: bool = False

    @property
    def router_matrix_params(self) -> int:
        """Weights of the router: one column per expert."""
        return self.expert.hidden * self.experts

    @property
    def router_params(self) -> int:
        """All parameters of the router."""
        return self.router_matrix_params + (self.experts if self.router_bias else 0)

    @property
    def shared_matrix_params(self) -> int:
        """Matrix weights that every token uses next to its experts, including the gate."""
        shared = self.shared.matrix_params if self.shared else 0
        return shared + (self.expert.hidden if self.shared_gate else 0)

    @property
    def shared_params(self) -> int:
        """All parameters of the shared expert and its gate."""
        return self.shared_matrix_params + (self.shared.bias_params if self.shared else 0)

    @property
    def params(self) -> int:
        """All parameters, including every expert."""
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
    """How many tokens a query sees, including itself; None for all earlier ones."""

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
    """Width of the embedding table. If it differs from `hidden`, a projection connects the two (OPT-350M)."""
    position_rows: int = 0
    """Rows of a learned position table, 0 for rotary positions."""
    head_bias_params: int = 0
    part_of: str | None = None
    """model_type of the multimodal model whose text decoder this is."""
    vision_params: int = 0
    """Parameters of the image encoders and the projector of `part_of`; 0 if only the decoder is counted."""

    @cached_property
    def layer_counts(self) -> Mapping[Layer, int]:
        """The number of layers of each distinct kind."""
        return MappingProxyType(Counter(self.layers))

    @property
    def caveats(self) -> tuple[str, ...]:
        """What the figures leave out or assume beyond what all of them do, one sentence each."""
        return ()

    @property
    def depth(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def has_latent_attention(self) -> bool:
        """Whether any layer uses latent attention, so that the choice of `Mla` matters."""
        return any(isinstance(layer.attention, LatentAttention) for layer in self.layer_counts)

    @property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(isinstance(layer.feed_forward, Moe) for layer in self.layer_counts)

    @property
    def projected_embedding(self) -> bool:
        """Whether a projection connects the embedding's width to the model's."""
        return self.embedding_dim != self.hidden

    @property
    def embedding_params(self) -> int:
        """Parameters of the token table, the position table and the projection to the model's width."""
        projection = self.embedding_dim * self.hidden if self.projected_embedding else 0
        return self.vocabulary * self.embedding_dim + self.position_rows * self.hidden + projection

    @property
    def head_matrix_params(self) -> int:
        """Weights used to compute logits, whether or not they are tied to the embedding."""
        projection = self.embedding_dim * self.hidden if self.projected_embedding else 0
        return self.vocabulary * self.embedding_dim + projection

    @property
    def params(self) -> int:
        """All parameters; a tied embedding counts once."""
        tied = self.vocabulary * self.embedding_dim if self.tied_embeddings else 0
        layers = sum(count * layer.params for layer, count in self.layer_counts.items())
        head = self.head_matrix_params + self.head_bias_params
        return self.vision_params + self.embedding_params + layers + self.final_norm_params + head - tied

    @property
    def active_params(self) -> int:
        """All parameters except those of experts that a token does not use; includes embedding and head."""
        idle = sum(count * (layer.params - layer.active_params) for layer, count in self.layer_counts.items())
        return self.params - idle

"""FLOPs and elements moved in one forward step, independent of number formats.

A step processes q new tokens of each of B sequences on p cached tokens. A multiply-add counts as 2 FLOPs, and only
matrix products count, as in PyTorch's FLOP counter.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from llm_perf_opt.analysis.cost_model.architecture import Architecture, GroupedAttention, LatentAttention, Layer, Mla, Moe
from llm_perf_opt.analysis.stats import whole_number
from llm_perf_opt.core.errors import ConfigError

ComponentName = Literal[
    "vision_convolutions",
    "vision_attention_projections",
    "vision_attention_core",
    "vision_mlp",
    "vision_norms",
    "projector",
    "embedding",
    "attention_projections",
    "attention_core",
    "kv_read",
    "kv_write",
    "recurrent",
    "state",
    "mlp",
    "router",
    "experts",
    "shared_experts",
    "norms",
    "lm_head",
]

Logits = Literal["last", "all", "none"]
"""Positions with logits: the last of each sequence, all, or none (a prefill chunk before the last)."""


@dataclass(frozen=True)
class Step:
    """One forward step: `new_tokens` of each of `batch` sequences, on `cached_tokens` earlier ones."""

    batch: int
    new_tokens: int
    cached_tokens: int = 0
    logits: Logits = "last"
    image_tokens: int = 0
    """New tokens in the batch whose embeddings come from the projector instead of the table."""
    block_pairs: int = 0
    """Query-key pairs in the batch beyond the causal ones: tokens of an image that attend to its later tokens (Gemma 3)."""

    def __post_init__(self) -> None:
        whole_number("batch", self.batch, at_least=1)
        whole_number("new_tokens", self.new_tokens, at_least=1)
        whole_number("cached_tokens", self.cached_tokens, at_least=0)
        whole_number("image_tokens", self.image_tokens, at_least=0)
        whole_number("block_pairs", self.block_pairs, at_least=0)
        if self.logits not in ("last", "all", "none"):
            raise ConfigError(f"logits must be last, all or none, not {self.logits!r}.")

    @property
    def tokens(self) -> int:
        """New tokens in the batch."""
        return self.batch * self.new_tokens

    @property
    def logit_positions(self) -> int:
        """Positions in the batch with logits."""
        return {"last": self.batch, "all": self.tokens, "none": 0}[self.logits]


def decode_steps(batch: int, prompt: int, steps: int) -> tuple[Step, ...]:
    """Return the decode steps after a prompt: one new token each, on a context that grows by one."""
    whole_number("prompt", prompt, at_least=0)
    whole_number("steps", steps, at_least=0)
    return tuple(Step(batch, 1, prompt + index) for index in range(steps))


@dataclass(frozen=True)
class Work:
    """FLOPs, and elements moved by the format they are stored in."""

    flops: int = 0
    full_attention_extra_flops: int = 0
    """FLOPs that full attention adds to `flops`."""
    weights: float = 0
    """Fractional only for experts, because their number is an expected value."""
    kv: int = 0
    activations: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.flops + other.flops,
            self.full_attention_extra_flops + other.full_attention_extra_flops,
            self.weights + other.weights,
            self.kv + other.kv,
            self.activations + other.activations,
        )

    def times(self, count: int) -> "Work":
        """Return the work of `count` such layers."""
        return Work(
            count * self.flops,
            count * self.full_attention_extra_flops,
            count * self.weights,
            count * self.kv,
            count * self.activations,
        )


def causal_pairs(new_tokens: int, cached_tokens: int, window: int | None) -> int:
    """Return the query-key pairs of one sequence: the sum over i = 1..q of min(p + i, window)."""
    if window is None:
        window = cached_tokens + new_tokens
    growing = min(max(window - cached_tokens, 0), new_tokens)
    return growing * cached_tokens + growing * (growing + 1) // 2 + (new_tokens - growing) * window


def full_pairs(new_tokens: int, cached_tokens: int, window: int | None) -> int:
    """Return the query-key pairs if every new token attends to all new tokens and the cached ones in the window."""
    return new_tokens * (new_tokens + tokens_kept(cached_tokens, window))


def tokens_kept(tokens: int, window: int | None) -> int:
    """Return how many tokens the cache must hold: the next token sees them and itself within the window."""
    return tokens if window is None else min(tokens, window - 1)


def expected_experts(experts: int, active: int, tokens: int) -> float:
    """Return the expected number of distinct experts if each token draws `active` of them uniformly: E(1 - (1 - k/E)^T)."""
    if active == experts:
        return float(experts)
    return -experts * math.expm1(tokens * math.log1p(-active / experts))


def layer_work(layer: Layer, step: Step, mla: Mla) -> Iterator[tuple[ComponentName, Work]]:
    """Yield the components of one layer."""
    attention, feed_forward, tokens = layer.attention, layer.feed_forward, step.tokens
    yield "attention_projections", _projections(attention, step, mla)
    yield "attention_core", _attention_core(layer, step, mla)
    cached = attention.kv_elements(mla) * step.batch
    yield "kv_read", Work(kv=cached * tokens_kept(step.cached_tokens, layer.window))
    # If the prompt is longer than the window, only the window's tokens reach the cache.
    yield "kv_write", Work(kv=cached * min(step.new_tokens, layer.window or step.new_tokens))
    yield "norms", Work(weights=layer.norm_params + attention.norm_params)
    if isinstance(feed_forward, Moe):
        yield from _moe(feed_forward, tokens)
    else:
        yield "mlp", Work(2 * tokens * feed_forward.matrix_params, weights=feed_forward.params)


def model_work(architecture: Architecture, step: Step) -> Iterator[tuple[ComponentName, Work]]:
    """Yield the components outside the layers."""
    projection = architecture.embedding_dim * architecture.hidden if architecture.projected_embedding else 0
    # A row that is read twice moves at least once, so the table's size is the most rows to count.
    rows = min(max(step.tokens - step.image_tokens, 0), architecture.vocabulary) * architecture.embedding_dim
    positions = min(step.new_tokens, architecture.position_rows) * architecture.hidden
    yield "embedding", Work(2 * step.tokens * projection, weights=rows + positions + projection)
    yield "norms", Work(weights=architecture.final_norm_params)
    logits = step.logit_positions
    yield (
        "lm_head",
        Work(
            2 * logits * architecture.head_matrix_params,
            weights=architecture.head_matrix_params + architecture.head_bias_params if logits else 0,
            activations=logits * architecture.vocabulary,
        ),
    )


def _projections(attention: GroupedAttention | LatentAttention, step: Step, mla: Mla) -> Work:
    weights = attention.matrix_params + attention.bias_params
    if isinstance(attention, GroupedAttention) or mla is not Mla.REEXPAND:
        # When absorbed, the expansion applies to each new token's query and output instead of its latent: same FLOPs.
        return Work(2 * step.tokens * attention.matrix_params, weights=weights)
    context = step.batch * (step.cached_tokens + step.new_tokens)
    flops = 2 * step.tokens * attention.token_params + 2 * context * attention.expansion_params
    return Work(flops, weights=weights)


def _attention_core(layer: Layer, step: Step, mla: Mla) -> Work:
    per_pair = layer.attention.flops_per_pair(mla)
    needed = step.batch * causal_pairs(step.new_tokens, step.cached_tokens, layer.window) + step.block_pairs
    full = step.batch * full_pairs(step.new_tokens, step.cached_tokens, layer.window)
    return Work(per_pair * needed, per_pair * (full - needed))


def _moe(moe: Moe, tokens: int) -> Iterator[tuple[ComponentName, Work]]:
    yield "router", Work(2 * tokens * moe.router_matrix_params, weights=moe.router_params)
    used = expected_experts(moe.experts, moe.active, tokens)
    yield "experts", Work(2 * tokens * moe.active * moe.expert.matrix_params, weights=used * moe.expert.params)
    if moe.shared_params:
        yield "shared_experts", Work(2 * tokens * moe.shared_matrix_params, weights=moe.shared_params)

"""What the devices of a plan send to each other in one step.

The collectives are those of the engine whose split `sharding` follows, with rings: of a tensor of S bytes over N devices, each
device sends 2(N-1)/N × S in an all-reduce and (N-1)/N × S in an all-gather or a reduce-scatter.

With replicas, models differ in how tokens reach the experts. In DeepSeek without pipeline stages, the output of the attention
is scattered among the devices of a tensor-parallel group, and gathered before the next attention. In other models it is reduced
on all of them. Each device then takes its part of the tokens to the experts, and the results are gathered (Qwen3, gpt-oss); or
each takes all tokens of its replica, and the results are reduced (Mixtral, Qwen2).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from llm_perf_opt.analysis.cost_model.architecture import GroupedAttention, Layer, Moe
from llm_perf_opt.analysis.cost_model.cost import Formats, activation_dtype, size_bytes
from llm_perf_opt.analysis.cost_model.sharding import DeviceStage, Plan, held_experts, padded_vocabulary
from llm_perf_opt.analysis.cost_model.work import Step

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
GroupName = Literal["tp", "ep", "pp", "dp"]
"""The devices that share a layer, all devices with experts of a layer, a device and its next stage, and the devices of all
replicas that have the same part of a layer."""
ExpertExchange = Literal["all_gather", "all_to_all"]
EXPERT_EXCHANGES: tuple[ExpertExchange, ...] = ("all_gather", "all_to_all")
"""How tokens reach experts on other replicas: all tokens to all devices, or each to its experts alone."""

_SENDS_ONE_TENSOR = frozenset({"gpt2", "gpt_neox", "granite", "olmo", "olmo2", "olmo3", "opt", "phi", "smollm3", "starcoder2"})
"""Models whose stages pass on the hidden states alone; all others pass on the residual as a second tensor."""
_SCATTERS_TOKENS = frozenset({"deepseek_v2", "deepseek_v3"})
"""Models that keep tokens divided among the devices of a group from the attention to the next one."""


@dataclass(frozen=True)
class Collective:
    """The same communication, done `count` times in one step."""

    kind: CollectiveKind
    group: GroupName
    purpose: str
    ranks: int
    count: int
    bytes: int
    """Of one call: the whole tensor; for a send and an all-to-all, what leaves the device."""

    @property
    def sent_bytes(self) -> float:
        """What one device sends in all calls."""
        return self.count * self.bytes * _sent_share(self.kind, self.ranks)


def _sent_share(kind: CollectiveKind, ranks: int) -> float:
    if kind in ("send", "all_to_all"):
        return 1.0
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks


def stage_collectives(
    stage: DeviceStage, step: Step, formats: Formats, exchange: ExpertExchange = "all_gather"
) -> tuple[Collective, ...]:
    """Return the communication of a pipeline stage in one step of the whole batch, including the send to the next stage."""
    found: dict[tuple[CollectiveKind, GroupName, str, int, int], int] = {}
    for one in _collectives(stage, step, formats, exchange):
        key = (one.kind, one.group, one.purpose, one.ranks, one.bytes)
        found[key] = found.get(key, 0) + one.count
    return tuple(Collective(*key[:4], count, key[4]) for key, count in found.items() if count and key[4])


def _collectives(stage: DeviceStage, step: Step, formats: Formats, exchange: ExpertExchange) -> Iterator[Collective]:
    plan, architecture = stage.plan, stage.architecture
    share = plan.share(step.batch)
    tokens = share * step.new_tokens
    dtype = activation_dtype(formats.weights)
    hidden = size_bytes(tokens * architecture.hidden, dtype)
    if plan.tp > 1 and stage.first:
        yield Collective("all_reduce", "tp", "embedding", plan.tp, 1, size_bytes(tokens * architecture.embedding_dim, dtype))
    for layer, count in stage.counts.items():
        if plan.tp > 1:
            yield from _norms_over_heads(layer, plan, tokens, count, dtype)
            if not (_scatters(stage) and isinstance(layer.feed_forward, Moe)):
                yield Collective("all_reduce", "tp", "attention output", plan.tp, count, hidden)
        yield from _feed_forward(stage, layer, step, count, dtype, exchange)
    if _scatters(stage):
        yield from _scattered(stage, tokens, dtype)
    if plan.tp > 1 and stage.last and step.logits != "none":
        positions = share * (step.new_tokens if step.logits == "all" else 1)
        logits = size_bytes(positions * padded_vocabulary(architecture, plan), dtype)
        yield Collective("all_gather", "tp", "logits", plan.tp, 1, logits)
    tensors = 1 if architecture.model_type in _SENDS_ONE_TENSOR else 2
    if not stage.last:  # each device of the group sends an equal part
        yield Collective("send", "pp", "to the next stage", 2, tensors, -(-hidden // plan.tp))
    if plan.tp > 1 and not stage.first:
        yield Collective("all_gather", "tp", "parts from the previous stage", plan.tp, tensors, hidden)


def _norms_over_heads(layer: Layer, plan: Plan, tokens: int, count: int, dtype: str) -> Iterator[Collective]:
    """Yield the gathering of queries and keys for a norm over all heads, of which each device has only some."""
    attention = layer.attention
    if isinstance(attention, GroupedAttention) and attention.norm_over_heads:
        for heads, what in ((attention.heads, "queries"), (max(attention.kv_heads, plan.tp), "keys")):
            moved = size_bytes(tokens * heads * attention.head_dim, dtype)
            yield Collective("all_gather", "tp", f"{what} for the norm", plan.tp, count, moved)


def _scatters(stage: DeviceStage) -> bool:
    plan, model_type = stage.plan, stage.architecture.model_type
    return stage.tokens_divided and plan.pp == 1 and model_type in _SCATTERS_TOKENS


def _scattered(stage: DeviceStage, tokens: int, dtype: str) -> Iterator[Collective]:
    """Yield what divides the tokens in layers with experts, and what gathers them again.

    Between two such layers, hidden states are gathered; after the last, hidden states and residual.
    """
    ranks = stage.plan.tp
    padded = size_bytes(-(-tokens // ranks) * ranks * stage.architecture.hidden, dtype)
    sparse = [isinstance(layer.feed_forward, Moe) for layer in stage.layers]
    layers = sum(sparse)
    followed = sum(here and after for here, after in pairwise(sparse))
    yield Collective("reduce_scatter", "tp", "attention output", ranks, layers, padded)
    yield Collective("all_gather", "tp", "tokens for the next attention", ranks, followed, padded)
    yield Collective("all_gather", "tp", "tokens and residual", ranks, layers - followed, 2 * padded)


def _feed_forward(
    stage: DeviceStage, layer: Layer, step: Step, count: int, dtype: str, exchange: ExpertExchange
) -> Iterator[Collective]:
    moe, hidden, plan = layer.feed_forward, layer.attention.hidden, stage.plan
    tokens = plan.share(step.batch) * step.new_tokens
    purpose = "experts output" if isinstance(moe, Moe) else "MLP output"
    if isinstance(moe, Moe) and plan.replicas > 1:
        yield from _to_experts(stage, moe, step, count, dtype, exchange)
        if stage.tokens_divided:
            if not _scatters(stage):
                padded = -(-tokens // plan.tp) * plan.tp
                yield Collective("all_gather", "tp", purpose, plan.tp, count, size_bytes(padded * hidden, dtype))
            return
    if plan.tp > 1:  # also with expert parallelism: each device adds what its experts computed
        yield Collective("all_reduce", "tp", purpose, plan.tp, count, size_bytes(tokens * hidden, dtype))


def _to_experts(
    stage: DeviceStage, moe: Moe, step: Step, count: int, dtype: str, exchange: ExpertExchange
) -> Iterator[Collective]:
    """Yield the exchange of tokens between replicas, to the experts and back."""
    plan, hidden = stage.plan, moe.expert.hidden
    if exchange == "all_gather":
        group: tuple[GroupName, int] = ("ep", plan.ep) if stage.tokens_divided or plan.tp == 1 else ("dp", plan.replicas)
        everything = size_bytes(step.tokens * hidden, dtype)
        yield Collective("all_gather", group[0], "tokens to experts", group[1], count, everything)
        yield Collective("reduce_scatter", group[0], "experts output", group[1], count, everything)
        return
    own = -(-plan.share(step.batch) * step.new_tokens // plan.tp)
    leaving = round(own * _other_devices(moe, plan) * hidden)
    for purpose in ("tokens to experts", "experts output"):
        yield Collective("all_to_all", "ep", purpose, plan.ep, count, size_bytes(leaving, dtype))


def _other_devices(moe: Moe, plan: Plan) -> float:
    """Return the expected number of other devices that hold an expert of a token, if all experts are equally likely."""
    held = held_experts(moe, plan)
    without = math.comb(moe.experts - held, moe.active) / math.comb(moe.experts, moe.active)
    return (plan.ep - 1) * (1 - without)

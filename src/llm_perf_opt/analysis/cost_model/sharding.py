"""A model split over several devices: what each device of each pipeline stage holds and computes.

The split is that of vLLM 0.32; docs/cost.md says where others differ. Tensor parallelism (`tp`) divides attention heads, MLPs,
the vocabulary and, without expert parallelism, every expert; norms, routers, latent down-projections and position tables are on
every device. Pipeline parallelism (`pp`) gives each stage whole layers. Expert parallelism (`ep`) gives each device whole
experts; `ep` = `tp` uses the devices of one tensor-parallel group, and a larger `ep` adds replicas of the attention, which share
the batch. Tokens choose experts at random, so some devices have more to do; a step takes as long as the most loaded device.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from llm_perf_opt.analysis.cost_model.architecture import Architecture, GroupedAttention, LatentAttention, Layer, Mla, Mlp, Moe
from llm_perf_opt.analysis.cost_model.cost import Formats, StageCost, carriers_of, size_bytes, stage_of
from llm_perf_opt.analysis.cost_model.counted_work import CountedArchitecture
from llm_perf_opt.analysis.cost_model.expert_load import most_choices, most_experts
from llm_perf_opt.analysis.cost_model.work import ComponentName, Step, Work, layer_work, model_work, tokens_kept
from llm_perf_opt.analysis.stats import whole_number
from llm_perf_opt.core.errors import ConfigError

VOCABULARY_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this (`DEFAULT_VOCAB_PADDING_SIZE`) before it divides it among the devices."""
_MOST_DEVICES = 65_536
"""More than any cluster; a typo beyond it would take long to plan."""
_MOST_NAMED = 10
"""Sizes that an error names one by one."""
_KEEPS_TOKENS = frozenset({"mixtral", "qwen2_moe"})
"""Models that in vLLM 0.32 do not divide the tokens of a replica among its devices before they reach the experts."""


@dataclass(frozen=True)
class Plan:
    """How many devices share the model, and how."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep"):
            whole_number(f"--{name}", getattr(self, name), at_least=1)
        if self.devices > _MOST_DEVICES:
            raise ConfigError(f"--tp, --pp and --ep ask for {self.devices:,} devices.", f"The most is {_MOST_DEVICES:,}.")

    @property
    def replicas(self) -> int:
        """Copies of everything but the experts, each with its share of the batch (vLLM's data parallelism)."""
        return max(1, self.ep // self.tp)

    @property
    def devices(self) -> int:
        """All devices."""
        return self.tp * self.replicas * self.pp

    def share(self, batch: int) -> int:
        """Return the largest number of sequences that one replica gets."""
        return -(-batch // self.replicas)

    def words(self) -> str:
        """Return the options that ask for this plan."""
        given = [f"--{name} {getattr(self, name)}" for name in ("tp", "pp", "ep") if getattr(self, name) > 1]
        return " ".join(given) or "one device"


def check_plan(architecture: Architecture, plan: Plan) -> None:
    """Raise a ConfigError if the model cannot be split this way; it names sizes that fit."""
    if isinstance(architecture, CountedArchitecture):
        raise ConfigError(
            f"The counted operators of {architecture.model_type} cannot be divided among devices.", "Omit --tp, --pp and --ep."
        )
    _check_experts(architecture, plan)
    problem = _tp_problem(architecture, plan)
    if problem:
        fitting = [str(size) for size in tensor_parallel_sizes(architecture, plan.ep)]
        given = f" with --ep {plan.ep}" if plan.ep > 1 else ""
        remedy = f"It fits{given}: {', '.join(fitting)}."
        raise ConfigError(f"--tp {plan.tp} does not fit {architecture.model_type}: {problem}.", remedy)
    layers = len(architecture.layers)
    if plan.pp > layers:
        raise ConfigError(f"--pp {plan.pp} needs at least {plan.pp} layers; the model has {layers}.", f"It fits: 1 to {layers}.")


def _check_experts(architecture: Architecture, plan: Plan) -> None:
    if plan.ep == 1:
        return
    sparse = (layer.feed_forward for layer in architecture.layer_counts if isinstance(layer.feed_forward, Moe))
    fewest = min((moe.experts for moe in sparse), default=0)
    if not fewest:
        raise ConfigError(f"--ep {plan.ep} has no effect: {architecture.model_type} has no experts.", "Omit it.")
    if plan.ep <= fewest and plan.ep % plan.tp == 0:
        return
    why = f"is not a multiple of --tp {plan.tp}" if plan.ep % plan.tp else f"is more than the {fewest} experts of a layer"
    sizes = [size for size in range(plan.tp, fewest + 1, plan.tp) if size > 1]
    few = ", ".join(map(str, sizes)) if len(sizes) <= _MOST_NAMED else f"multiples of {plan.tp} up to {sizes[-1]}"
    remedy = f"With --tp {plan.tp}, it fits: {few}." if sizes else f"Give a --tp up to {fewest}, or omit --ep."
    raise ConfigError(f"--ep {plan.ep} {why}.", remedy)


def tensor_parallel_sizes(architecture: Architecture, ep: int = 1) -> list[int]:
    """Return every size of tensor parallelism that divides the model, up to one device per attention head."""
    if isinstance(architecture, CountedArchitecture):
        return [1]
    most = min(layer.attention.heads for layer in architecture.layer_counts)
    sizes = [size for size in range(1, most + 1) if ep == 1 or ep % size == 0]
    return [size for size in sizes if not _tp_problem(architecture, Plan(size, ep=ep))]


def _tp_problem(architecture: Architecture, plan: Plan) -> str:
    """Return why this size of tensor parallelism does not divide the model, or an empty string."""
    tp = plan.tp
    if tp == 1:
        return ""
    for layer in architecture.layer_counts:
        heads = layer.attention.heads
        if heads % tp:
            return f"it does not divide the {heads} attention heads"
        kv = layer.attention.kv_heads if isinstance(layer.attention, GroupedAttention) else tp
        if max(kv, tp) % min(kv, tp):
            return f"the {kv} key/value heads can neither be divided among the devices nor copied equally often"
        for size, what in _widths(layer.feed_forward, plan, divides_tokens(architecture, plan)):
            if size % tp:
                return f"it does not divide the {size:,} columns of {what}"
    if padded_vocabulary(architecture, plan) % tp:
        return f"it does not divide the vocabulary of {architecture.vocabulary:,}, padded to a multiple of {VOCABULARY_MULTIPLE}"
    return ""


def _widths(feed_forward: Mlp | Moe, plan: Plan, tokens_divided: bool) -> Iterator[tuple[int, str]]:
    if isinstance(feed_forward, Mlp):
        yield feed_forward.intermediate, "an MLP"
        return
    if plan.ep == 1:
        yield feed_forward.expert.intermediate, "an expert"
    if feed_forward.shared and not tokens_divided:
        yield feed_forward.shared.intermediate, "the shared expert"


def divides_tokens(architecture: Architecture, plan: Plan) -> bool:
    """Return whether the devices of a tensor-parallel group divide their tokens at the experts, instead of all having them."""
    return plan.replicas > 1 and plan.tp > 1 and architecture.model_type not in _KEEPS_TOKENS


def padded_vocabulary(architecture: Architecture, plan: Plan) -> int:
    """Return the rows of the embedding and of the head, on all devices of a group together; one device is counted unpadded."""
    if plan.devices == 1:
        return architecture.vocabulary
    return -(-architecture.vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def stage_sizes(layers: int, stages: int) -> list[int]:
    """Return the layers of each pipeline stage as vLLM divides them.

    Of a remainder, one layer each goes to the stages before the last, from the back: the last stage has the head.
    """
    sizes = [layers // stages] * stages
    for index in range(layers % stages):
        sizes[-2 - index] += 1
    return sizes


# --- one layer on one device -----------------------------------------------------------------------------------------


def local_layer(layer: Layer, plan: Plan, tokens_divided: bool) -> Layer:
    """Return the part of a layer that tensor parallelism leaves to a device; experts stay whole with expert parallelism."""
    feed_forward = _local_feed_forward(layer.feed_forward, plan, tokens_divided)
    return replace(layer, attention=_local_attention(layer.attention, plan.tp), feed_forward=feed_forward)


def _local_attention(attention: GroupedAttention | LatentAttention, tp: int) -> GroupedAttention | LatentAttention:
    if isinstance(attention, LatentAttention):  # the down-projections, their norms and the latent cache are on every device
        return replace(attention, heads=attention.heads // tp)
    # A device has at least one key/value head: with fewer heads than devices, several hold the same one.
    heads, kv_heads = attention.heads // tp, max(1, attention.kv_heads // tp)
    divided = attention.head_dim * (attention.heads + 2 * attention.kv_heads)
    bias = attention.bias_params
    if bias >= divided:  # the bias of queries, keys and values is divided; that of the output is on every device
        bias += attention.head_dim * (heads + 2 * kv_heads) - divided
    return replace(attention, heads=heads, kv_heads=kv_heads, bias_params=bias)


def _local_feed_forward(feed_forward: Mlp | Moe, plan: Plan, tokens_divided: bool) -> Mlp | Moe:
    if isinstance(feed_forward, Mlp):
        return _local_mlp(feed_forward, plan.tp)
    expert = feed_forward.expert if plan.ep > 1 else _local_mlp(feed_forward.expert, plan.tp)
    shared = feed_forward.shared
    if shared and not tokens_divided:  # a device with tokens of its own holds all of the shared expert
        shared = _local_mlp(shared, plan.tp)
    return replace(feed_forward, expert=expert, shared=shared)


def _local_mlp(mlp: Mlp, tp: int) -> Mlp:
    """Return a device's part of an MLP; the bias of the last matrix is on every device."""
    columns = mlp.bias_params - mlp.hidden if mlp.bias_params else 0
    bias = columns // tp + mlp.hidden if mlp.bias_params else 0
    return replace(mlp, intermediate=mlp.intermediate // tp, bias_params=bias)


def held_experts(moe: Moe, plan: Plan) -> int:
    """Return the experts on the device that has the most: all of them, or its share."""
    return moe.experts if plan.ep == 1 else -(-moe.experts // plan.ep)


# --- one pipeline stage ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceStage:
    """The most loaded device of one pipeline stage."""

    architecture: Architecture
    plan: Plan
    index: int
    layers: tuple[Layer, ...]
    """The layers of the stage, whole."""

    @property
    def first(self) -> bool:
        """Whether the stage has the embedding."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether the stage has the final norm and the head."""
        return self.index == self.plan.pp - 1

    @cached_property
    def counts(self) -> Mapping[Layer, int]:
        """The number of layers of each distinct kind."""
        return replace(self.architecture, layers=self.layers).layer_counts

    @property
    def tokens_divided(self) -> bool:
        """Whether the device has only part of its group's tokens at the experts."""
        return divides_tokens(self.architecture, self.plan)

    @cached_property
    def local(self) -> Architecture:
        """The model with this device's part of the vocabulary."""
        rows = padded_vocabulary(self.architecture, self.plan) // self.plan.tp
        bias = rows if self.architecture.head_bias_params else 0
        return replace(self.architecture, vocabulary=rows, head_bias_params=bias)

    @cached_property
    def params(self) -> int:
        """Parameters that the device holds."""
        total = sum(count * self._layer_params(layer) for layer, count in self.counts.items())
        local = self.local
        total += local.embedding_params if self.first else 0
        if self.last:
            total += local.final_norm_params + local.head_matrix_params + local.head_bias_params
            # A tied head in another stage than the embedding needs its own copy of the table.
            total -= local.vocabulary * local.embedding_dim if local.tied_embeddings and self.first else 0
        return total

    def _part(self, layer: Layer) -> Layer:
        return local_layer(layer, self.plan, self.tokens_divided)

    def _layer_params(self, layer: Layer) -> int:
        local = self._part(layer)
        idle = 0
        if isinstance(local.feed_forward, Moe):
            idle = (local.feed_forward.experts - held_experts(local.feed_forward, self.plan)) * local.feed_forward.expert.params
        return local.params - idle

    def weight_bytes(self, formats: Formats) -> int:
        """Return the bytes of the weights on the device."""
        return size_bytes(self.params, formats.weights)

    def kv_cache_bytes(self, batch: int, tokens: int, formats: Formats) -> int:
        """Return the bytes of the device's cache for a batch of sequences of this length."""
        elements = sum(
            count * self._part(layer).attention.kv_elements(formats.mla) * tokens_kept(tokens, layer.window)
            for layer, count in self.counts.items()
        )
        return size_bytes(self.plan.share(batch) * elements, formats.kv)

    def cost(self, step: Step, formats: Formats) -> StageCost:
        """Return what the device computes and moves in one step of the whole batch."""
        own = replace(step, batch=self.plan.share(step.batch))
        totals: dict[ComponentName, Work] = {}
        for layer, count in self.counts.items():
            for name, work in self._layer_work(layer, own, step.tokens, formats.mla):
                totals[name] = totals.get(name, Work()) + work.times(count)
        for name, work in self._outside_layers(own):
            totals[name] = totals.get(name, Work()) + work
        return stage_of(totals, formats, carriers_of(self.architecture, formats))

    def _layer_work(self, layer: Layer, own: Step, all_tokens: int, mla: Mla) -> Iterator[tuple[ComponentName, Work]]:
        local = self._part(layer)
        moe = local.feed_forward
        if isinstance(moe, Mlp) or self.plan.ep == 1:
            yield from layer_work(local, own, mla)
            return
        sparse = ("router", "experts", "shared_experts")
        yield from ((name, work) for name, work in layer_work(local, own, mla) if name not in sparse)
        yield from self._expert_work(moe, own.tokens, all_tokens)

    def _expert_work(self, moe: Moe, own_tokens: int, all_tokens: int) -> Iterator[tuple[ComponentName, Work]]:
        """Yield the work of whole experts on the device that has most of it; the tokens of all replicas choose them."""
        tokens = -(-own_tokens // self.plan.tp) if self.tokens_divided else own_tokens
        yield "router", Work(2 * tokens * moe.router_matrix_params, weights=moe.router_params)
        choice = (moe.experts, moe.active, self.plan.ep, all_tokens)
        flops = math.ceil(2 * most_choices(*choice) * moe.expert.matrix_params)
        yield "experts", Work(flops, weights=most_experts(*choice) * moe.expert.params)
        if moe.shared_params:
            yield "shared_experts", Work(2 * tokens * moe.shared_matrix_params, weights=moe.shared_params)

    def _outside_layers(self, own: Step) -> Iterator[tuple[ComponentName, Work]]:
        # The devices of a group find different rows in their parts of the table: on average, each an equal share.
        held, tokens = self.local.vocabulary, own.tokens
        fewer = min(tokens, held) - min(-(-tokens // self.plan.tp), held)
        for name, work in model_work(self.local, own):
            if name == "embedding":
                if self.first:
                    yield name, replace(work, weights=work.weights - fewer * self.local.embedding_dim)
            elif self.last:
                yield name, work


def device_stages(architecture: Architecture, plan: Plan) -> tuple[DeviceStage, ...]:
    """Return the most loaded device of every pipeline stage; raise a ConfigError if the model cannot be split this way."""
    check_plan(architecture, plan)
    stages, start = [], 0
    for index, size in enumerate(stage_sizes(len(architecture.layers), plan.pp)):
        stages.append(DeviceStage(architecture, plan, index, architecture.layers[start : start + size]))
        start += size
    return tuple(stages)

"""The roofline time and the memory of a model on several devices, and what fits on them.

The time of a step is the sum over the pipeline stages of the roofline time of their most loaded device and of the time of
their communication. Nothing overlaps, and one batch is in the pipeline. Communication has no latency unless it is given.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Literal

from llm_perf_opt.analysis.cost_model.architecture import Architecture
from llm_perf_opt.analysis.cost_model.communication import Collective, ExpertExchange, GroupName, stage_collectives
from llm_perf_opt.analysis.cost_model.cost import Formats, StageCost, compute_dtype, step_cost
from llm_perf_opt.analysis.cost_model.sharding import DeviceStage, Plan, device_stages, tensor_parallel_sizes
from llm_perf_opt.analysis.cost_model.work import Step
from llm_perf_opt.analysis.limits.hardware import MEMORY_SHARE, Hardware
from llm_perf_opt.analysis.limits.links import Fabric, GroupLink, Link, group_link
from llm_perf_opt.analysis.limits.roofline import RooflineTime, roofline_time
from llm_perf_opt.core.records import Maybe, Missing

_MOST_BATCH = 2**24
_MOST_CONTEXT = 2**30
"""Beyond these, the size is limited by something else than memory."""
_MOST_SEARCHED = 1024
"""The largest number of devices tried in the search for the smallest that fits."""

ParallelBound = Literal["compute", "memory", "communication"]


@dataclass(frozen=True)
class Communication:
    """One collective of a step with the link that it waits for and its time."""

    stage: int
    collective: Collective
    nodes: int
    link: Link
    seconds: float


@dataclass(frozen=True)
class StageTime:
    """One pipeline stage in one step: the work of its most loaded device, and its communication."""

    cost: StageCost
    """Of the device."""
    roofline: Maybe[RooflineTime]
    communication: tuple[Communication, ...]

    @property
    def communication_s(self) -> float:
        """Time of all communication, including the send to the next stage."""
        return sum(one.seconds for one in self.communication)

    @property
    def sent_bytes(self) -> float:
        """What the device sends."""
        return sum(one.collective.sent_bytes for one in self.communication)

    @property
    def seconds(self) -> Maybe[float]:
        """Roofline time and communication, one after the other."""
        return self.roofline if isinstance(self.roofline, Missing) else self.roofline.seconds + self.communication_s


@dataclass(frozen=True)
class ParallelStep:
    """One step on all devices."""

    stages: tuple[StageTime, ...]
    model_flops: int
    """Of the whole model, without padding and without what several devices compute alike."""
    peak_flops_per_s: Maybe[float]
    """Of one device."""
    devices: int

    @property
    def most_loaded(self) -> StageTime:
        """The pipeline stage that takes longest."""
        return max(self.stages, key=lambda stage: _or_zero(stage.seconds))

    @property
    def roofline_s(self) -> Maybe[float]:
        """Roofline time of the stages, one after the other."""
        return _sum(stage.roofline if isinstance(stage.roofline, Missing) else stage.roofline.seconds for stage in self.stages)

    @property
    def communication_s(self) -> float:
        """Communication of all stages."""
        return sum(stage.communication_s for stage in self.stages)

    @property
    def seconds(self) -> Maybe[float]:
        """Time of the step, one batch in the pipeline."""
        return _sum(stage.seconds for stage in self.stages)

    @property
    def sent_bytes(self) -> float:
        """What the device that sends most sends."""
        return max(stage.sent_bytes for stage in self.stages)

    @property
    def interval_s(self) -> Maybe[float]:
        """Time between steps if every stage always has a batch: that of the slowest stage."""
        return self.most_loaded.seconds

    @property
    def bound(self) -> Maybe[ParallelBound]:
        """What takes longest: all FLOPs, all bytes or all communication."""
        parts: dict[ParallelBound, float] = {"communication": self.communication_s, "memory": 0.0, "compute": 0.0}
        for stage in self.stages:
            if isinstance(stage.roofline, Missing):
                return stage.roofline
            parts["memory"] += stage.roofline.memory_s
            parts["compute"] += stage.roofline.compute_s
        return max(parts, key=parts.__getitem__)

    def mfu(self, seconds: Maybe[float]) -> Maybe[float]:
        """Return the model's FLOPs as a share of what all devices could compute in this time."""
        if isinstance(seconds, Missing):
            return seconds
        if isinstance(self.peak_flops_per_s, Missing):
            return self.peak_flops_per_s
        return self.model_flops / (seconds * self.devices * self.peak_flops_per_s)

    def by_collective(self) -> tuple[Communication, ...]:
        """Return the communication of all stages together, by kind, purpose and link."""
        found: dict[tuple[object, ...], Communication] = {}
        for one in (one for stage in self.stages for one in stage.communication):
            call = one.collective
            key = (call.kind, call.group, call.purpose, call.ranks, call.bytes, one.nodes, one.link)
            if key in found:
                before = found[key]
                call = replace(call, count=before.collective.count + call.count)
                one = replace(before, collective=call, seconds=before.seconds + one.seconds)
            found[key] = one
        return tuple(found.values())


@dataclass(frozen=True)
class DeviceMemory:
    """What the fullest device holds."""

    stage: int
    weight_bytes: int
    kv_cache_bytes: int
    usable_bytes: Maybe[int]

    @property
    def fits(self) -> Maybe[bool]:
        """Whether weights and cache fit in the usable memory."""
        if isinstance(self.usable_bytes, Missing):
            return self.usable_bytes
        return self.weight_bytes + self.kv_cache_bytes <= self.usable_bytes


@dataclass(frozen=True)
class Deployment:
    """A model, its formats and the devices that it is split over."""

    architecture: Architecture
    formats: Formats
    hardware: Hardware
    fabric: Fabric
    plan: Plan
    exchange: ExpertExchange = "all_gather"
    memory_share: float = MEMORY_SHARE

    @cached_property
    def stages(self) -> tuple[DeviceStage, ...]:
        """The most loaded device of every pipeline stage."""
        return device_stages(self.architecture, self.plan)

    @cached_property
    def group_links(self) -> Mapping[tuple[GroupName, int], GroupLink]:
        """How the groups of each pipeline stage communicate; `pp` is the way to the next stage."""
        found: dict[tuple[GroupName, int], GroupLink] = {}
        for stage in range(self.plan.pp):
            names: tuple[GroupName, ...] = ("tp", "ep", "dp", "pp") if stage + 1 < self.plan.pp else ("tp", "ep", "dp")
            found |= {(name, stage): group_link(self.fabric, self.plan, name, stage) for name in names}
        return MappingProxyType(found)

    def step(self, step: Step) -> ParallelStep:
        """Return the time of one step of the whole batch."""
        peak = self.hardware.peak(compute_dtype(self.formats.weights))
        rate: Maybe[float] = peak if isinstance(peak, Missing) else peak.flops_per_s
        flops = step_cost(self.architecture, step, self.formats).flops
        times = tuple(self._stage_time(stage, step, rate) for stage in self.stages)
        return ParallelStep(times, flops, rate, self.plan.devices)

    def _stage_time(self, stage: DeviceStage, step: Step, rate: Maybe[float]) -> StageTime:
        cost = stage.cost(step, self.formats)
        least = rate if isinstance(rate, Missing) else roofline_time(cost, rate, self.hardware.bandwidth_bytes_per_s)
        communication = []
        for one in stage_collectives(stage, step, self.formats, self.exchange):
            path = self.group_links[one.group, stage.index]
            communication.append(Communication(stage.index, one, path.nodes, path.link_of(one), path.seconds(one)))
        return StageTime(cost, least, tuple(communication))

    def memory(self, batch: int, tokens: int) -> DeviceMemory:
        """Return what the fullest device holds with a batch of sequences of this length."""
        found = [
            DeviceMemory(
                stage.index,
                stage.weight_bytes(self.formats),
                stage.kv_cache_bytes(batch, tokens, self.formats),
                self.usable_bytes,
            )
            for stage in self.stages
        ]
        return max(found, key=lambda memory: memory.weight_bytes + memory.kv_cache_bytes)

    @property
    def usable_bytes(self) -> Maybe[int]:
        """The memory of a device for weights and cache."""
        return self.hardware.usable_bytes(self.memory_share)

    def largest_batch(self, tokens: int) -> Maybe[int]:
        """Return the largest batch of sequences of this length that fits."""
        return self._largest(lambda batch: self.memory(batch, tokens), _MOST_BATCH, f"a sequence of {tokens:,} tokens")

    def largest_context(self, batch: int) -> Maybe[int]:
        """Return the most tokens per sequence that fit with this batch, whether or not the model supports as many."""
        return self._largest(lambda tokens: self.memory(batch, tokens), _MOST_CONTEXT, f"one token for a batch of {batch:,}")

    def _largest(self, memory: Callable[[int], DeviceMemory], most: int, least: str) -> Maybe[int]:
        if isinstance(self.usable_bytes, Missing):
            return self.usable_bytes
        if not memory(1).fits:
            alone = self.memory(1, 0).fits
            return Missing(f"{least} does not fit next to the weights" if alone else "the weights alone do not fit")
        if memory(most).fits:
            return Missing(f"memory does not limit it: more than {most:,} fit")
        low, high = 1, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if memory(middle).fits else (low, middle)
        return low

    def smallest(self, batch: int, tokens: int) -> Maybe[Plan]:
        """Return the plan with the fewest devices that fits; of several, the one with the most tensor parallelism in a node."""
        if isinstance(self.usable_bytes, Missing):
            return self.usable_bytes
        sizes = [size for size in tensor_parallel_sizes(self.architecture) if size <= self.fabric.node_gpus]
        plans = [Plan(tp, pp) for tp in sizes for pp in range(1, len(self.architecture.layers) + 1)]
        for plan in sorted(plans, key=lambda plan: (plan.devices, -plan.tp)):
            if plan.devices > _MOST_SEARCHED:
                break
            if replace(self, plan=plan).memory(batch, tokens).fits:
                return plan
        return Missing(f"it does not fit on up to {_MOST_SEARCHED:,} devices, split by tensor and pipeline parallelism")


@dataclass(frozen=True)
class ParallelRow:
    """One combination of sizes on the devices of a plan."""

    deployment: Deployment
    batch: int
    prompt: int
    context: int
    prefill: ParallelStep
    decode: ParallelStep
    memory: DeviceMemory
    largest_batch: Maybe[int]
    """With sequences of `tokens`."""
    largest_context: Maybe[int]
    """In tokens per sequence, with this batch."""
    smallest: Maybe[Plan]

    @property
    def tokens(self) -> int:
        """Tokens per sequence in the cache after prefill and the decode step."""
        return _held(self.prompt, self.context)

    @property
    def decode_tokens_per_s(self) -> Maybe[float]:
        """Upper bound of the batch's decode throughput, one batch in the pipeline."""
        seconds = self.decode.seconds
        return seconds if isinstance(seconds, Missing) else self.batch / seconds


def parallel_row(deployment: Deployment, batch: int, prompt: int, context: int) -> ParallelRow:
    """Return prefill, a decode step and the memory for these sizes, and what would fit."""
    held = _held(prompt, context)
    return ParallelRow(
        deployment=deployment,
        batch=batch,
        prompt=prompt,
        context=context,
        prefill=deployment.step(Step(batch, prompt)),
        decode=deployment.step(Step(batch, 1, context)),
        memory=deployment.memory(batch, held),
        largest_batch=deployment.largest_batch(held),
        largest_context=deployment.largest_context(batch),
        smallest=deployment.smallest(batch, held),
    )


def _held(prompt: int, context: int) -> int:
    """Return the tokens per sequence in the cache after prefill and the decode step."""
    return max(prompt, context + 1)


def _sum(values: Iterable[Maybe[float]]) -> Maybe[float]:
    total = 0.0
    for value in values:
        if isinstance(value, Missing):
            return value
        total += value
    return total


def _or_zero(value: Maybe[float]) -> float:
    return 0.0 if isinstance(value, Missing) else value

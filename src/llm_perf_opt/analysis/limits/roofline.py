"""The least time a stage can take on given hardware, and what would change it.

The floor is the sum over parts of max(FLOPs / peak, bytes / bandwidth): parts run one after the other, and within a
part computing and moving overlap perfectly. The cache's bytes overlap with the part whose kernel moves them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from llm_perf_opt.analysis.cost_model.architecture import Architecture
from llm_perf_opt.analysis.cost_model.cost import (
    COMPONENT_NAMES,
    Formats,
    StageCost,
    compute_dtype,
    kv_cache_bytes,
    step_cost,
    weight_bytes,
)
from llm_perf_opt.analysis.cost_model.work import ComponentName, Step
from llm_perf_opt.analysis.limits.hardware import Hardware
from llm_perf_opt.analysis.stats import positive_number, whole_number
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import Maybe, Missing

Bound = Literal["compute", "memory"]

_CACHE_PARTS = frozenset({"attention_core", "kv_read", "kv_write"})

_MOST_BATCH = 2**20
"""Beyond it the answer is that decode never turns."""


@dataclass(frozen=True)
class ComponentRoofline:
    """One part's share, the cache's bytes counted where they are moved."""

    name: ComponentName
    flops: int
    bytes: int
    compute_s: float
    memory_s: float

    @property
    def seconds(self) -> float:
        """The longer of the two."""
        return max(self.compute_s, self.memory_s)

    @property
    def bound(self) -> Bound:
        """Which of the two it is."""
        return "compute" if self.compute_s >= self.memory_s else "memory"


@dataclass(frozen=True)
class RooflineTime:
    """The least time of a stage."""

    parts: tuple[ComponentRoofline, ...]

    @property
    def seconds(self) -> float:
        """Sum over the parts."""
        return sum(part.seconds for part in self.parts)

    @property
    def compute_s(self) -> float:
        """All FLOPs at the peak."""
        return sum(part.compute_s for part in self.parts)

    @property
    def memory_s(self) -> float:
        """All bytes at full bandwidth."""
        return sum(part.memory_s for part in self.parts)

    @property
    def bound(self) -> Bound:
        """Which of all FLOPs and all bytes takes longer."""
        return "compute" if self.compute_s >= self.memory_s else "memory"


def compute_only_time(stage: StageCost, peak_flops_per_s: float) -> RooflineTime:
    """The floor of a stage whose bytes take no time: they stay in a cache."""
    return RooflineTime(tuple(replace(part, memory_s=0.0) for part in roofline_time(stage, peak_flops_per_s, 1.0).parts))


def roofline_time(stage: StageCost, peak_flops_per_s: float, bandwidth_bytes_per_s: float) -> RooflineTime:
    """The floor of a stage; FLOPs with causal attention."""
    peak = positive_number("peak_flops_per_s", peak_flops_per_s)
    bandwidth = positive_number("bandwidth_bytes_per_s", bandwidth_bytes_per_s)
    parts = []
    for name in COMPONENT_NAMES:
        members = [part for part in stage.parts if part.within == name]
        if members:
            flops, moved = sum(part.flops for part in members), sum(part.bytes for part in members)
            parts.append(ComponentRoofline(name, flops, moved, flops / peak, moved / bandwidth))
    return RooflineTime(tuple(parts))


@dataclass(frozen=True)
class WhatIf:
    """One row of the what-if table."""

    hardware: str
    formats: Formats
    compute_dtype: str
    """The format whose peak the floor was computed with."""
    batch: int
    prompt: int
    context: int
    weight_bytes: int
    kv_cache_bytes: int
    """After the decode step."""
    fits: Maybe[bool]
    """Whether weights and cache are within the device's nominal memory."""
    prefill: Maybe[RooflineTime]
    decode: Maybe[RooflineTime]

    @property
    def decode_tokens_per_s(self) -> Maybe[float]:
        """Of the whole batch, at best."""
        return self.decode if isinstance(self.decode, Missing) else self.batch / self.decode.seconds


def what_if(
    architecture: Architecture,
    hardware: Hardware,
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    formats: Sequence[Formats],
    prompt: int | None = None,
) -> list[WhatIf]:
    """A row for each combination; the prompt is as long as the context unless it is given."""
    for name, values in (("batch", batches), ("context", contexts), ("dtype", formats)):
        if not values:
            raise ConfigError(f"{name} must have at least one value.")
    for context in contexts:
        whole_number("context", context, at_least=0)
    if prompt is not None:
        whole_number("prompt", prompt, at_least=1)
    return [
        _row(architecture, hardware, batch, prompt or max(context, 1), context, chosen)
        for chosen in formats
        for context in contexts
        for batch in batches
    ]


def step_roofline_time(architecture: Architecture, hardware: Hardware, step: Step, formats: Formats) -> Maybe[RooflineTime]:
    """The least time of one step on the datasheet's limits."""
    peak = hardware.peak(compute_dtype(formats.weights))
    if isinstance(peak, Missing):
        return peak
    return roofline_time(step_cost(architecture, step, formats), peak.flops_per_s, hardware.bandwidth_bytes_per_s)


def largest_batch_within(
    architecture: Architecture, hardware: Hardware, batch: int, context: int, formats: Formats, longer: float
) -> Maybe[int]:
    """The largest batch whose decode step has a floor at most `longer` (a share) above that of `batch`."""
    now = step_roofline_time(architecture, hardware, Step(batch, 1, context), formats)
    if isinstance(now, Missing):
        return now
    most_s = now.seconds * (1 + longer)

    def is_longer(larger: int) -> bool:
        found = step_roofline_time(architecture, hardware, Step(larger, 1, context), formats)
        return isinstance(found, Missing) or found.seconds > most_s

    high = batch + 1
    while not is_longer(high):
        high *= 2
        if high > _MOST_BATCH:
            return _MOST_BATCH
    low = max(batch, high // 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_longer(middle) else (middle, high)
    return low


@dataclass(frozen=True)
class TurningPoint:
    """The smallest batch at which a decode step is bound by compute."""

    hardware: str
    formats: Formats
    context: int
    step: Maybe[int]
    """All parts together: at long contexts each sequence brings so many cached bytes that no batch turns it."""
    weights: Maybe[int]
    """The parts that multiply weights, without attention over the cache."""


def turning_point(architecture: Architecture, hardware: Hardware, context: int, formats: Formats) -> TurningPoint:
    """Where decode turns from memory- to compute-bound as the batch grows."""
    whole_number("context", context, at_least=0)
    peak = hardware.peak(compute_dtype(formats.weights))
    if isinstance(peak, Missing):
        return TurningPoint(hardware.key, formats, context, peak, peak)

    def bound_with(without: frozenset[str]) -> Callable[[int], bool]:
        def is_compute_bound(batch: int) -> bool:
            stage = step_cost(architecture, Step(batch, 1, context), formats)
            parts = [part for part in stage.parts if part.name not in without]
            compute_s = sum(part.flops for part in parts) / peak.flops_per_s
            return compute_s >= sum(part.bytes for part in parts) / hardware.bandwidth_bytes_per_s

        return is_compute_bound

    return TurningPoint(
        hardware=hardware.key,
        formats=formats,
        context=context,
        step=_first_batch(bound_with(frozenset()), f"at a context of {context} the cache's bytes outgrow the FLOPs"),
        weights=_first_batch(bound_with(_CACHE_PARTS), "the weights stay memory-bound"),
    )


def _row(architecture: Architecture, hardware: Hardware, batch: int, prompt: int, context: int, formats: Formats) -> WhatIf:
    held = weight_bytes(architecture, formats)
    cache = kv_cache_bytes(architecture, batch, max(prompt, context + 1), formats)
    memory = hardware.memory_bytes
    return WhatIf(
        hardware=hardware.key,
        formats=formats,
        compute_dtype=compute_dtype(formats.weights),
        batch=batch,
        prompt=prompt,
        context=context,
        weight_bytes=held,
        kv_cache_bytes=cache,
        fits=memory if isinstance(memory, Missing) else held + cache <= memory,
        prefill=step_roofline_time(architecture, hardware, Step(batch, prompt), formats),
        decode=step_roofline_time(architecture, hardware, Step(batch, 1, context), formats),
    )


def _first_batch(is_compute_bound: Callable[[int], bool], why_never: str) -> Maybe[int]:
    """The first batch for which it holds. Bytes grow ever slower with the batch and FLOPs evenly, so it turns once."""
    high = 1
    while not is_compute_bound(high):
        high *= 2
        if high > _MOST_BATCH:
            return Missing(f"no batch up to {_MOST_BATCH:,} is compute-bound: {why_never}")
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_compute_bound(middle) else (middle, high)
    return high

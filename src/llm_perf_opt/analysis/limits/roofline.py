"""The roofline time of a stage on given hardware, and what would change it.

The roofline time is the sum over components of max(FLOPs / peak, bytes / bandwidth): components run one after the
other, and within a component compute and memory traffic overlap perfectly. The bytes of the KV cache count in the
component whose kernel moves them.
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
from llm_perf_opt.analysis.cost_model.vision_models import ImagePrompt, prefill_cost
from llm_perf_opt.analysis.cost_model.work import ComponentName, Step
from llm_perf_opt.analysis.limits.hardware import MEMORY_SHARE, Hardware
from llm_perf_opt.analysis.stats import positive_number, whole_number
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import Maybe, Missing

Bound = Literal["compute", "memory"]

_CACHE_COMPONENTS = frozenset({"attention_core", "kv_read", "kv_write", "state"})

_MOST_BATCH = 2**20
"""The largest batch tried before decode counts as never compute-bound."""


@dataclass(frozen=True)
class ComponentRoofline:
    """The roofline time of one component, including the cache's bytes that its kernel moves."""

    name: ComponentName
    flops: int
    bytes: int
    compute_s: float
    memory_s: float

    @property
    def seconds(self) -> float:
        """The larger of compute and memory time."""
        return max(self.compute_s, self.memory_s)

    @property
    def bound(self) -> Bound:
        """Which of compute and memory takes longer."""
        return "compute" if self.compute_s >= self.memory_s else "memory"


@dataclass(frozen=True)
class RooflineTime:
    """The roofline time of a stage: the least time that the hardware allows."""

    components: tuple[ComponentRoofline, ...]

    @property
    def seconds(self) -> float:
        """Sum over the components."""
        return sum(component.seconds for component in self.components)

    @property
    def compute_s(self) -> float:
        """Time of all FLOPs at the peak rate."""
        return sum(component.compute_s for component in self.components)

    @property
    def memory_s(self) -> float:
        """Time of all bytes at full bandwidth."""
        return sum(component.memory_s for component in self.components)

    @property
    def bound(self) -> Bound:
        """Which of all FLOPs and all bytes takes longer."""
        return "compute" if self.compute_s >= self.memory_s else "memory"


def compute_only_time(stage: StageCost, peak_flops_per_s: float) -> RooflineTime:
    """Return the roofline time of a stage whose bytes stay in a cache and take no time."""
    return RooflineTime(
        tuple(replace(component, memory_s=0.0) for component in roofline_time(stage, peak_flops_per_s, 1.0).components)
    )


def roofline_time(stage: StageCost, peak_flops_per_s: float, bandwidth_bytes_per_s: float) -> RooflineTime:
    """Return the roofline time of a stage with causal attention."""
    peak = positive_number("peak_flops_per_s", peak_flops_per_s)
    bandwidth = positive_number("bandwidth_bytes_per_s", bandwidth_bytes_per_s)
    components = []
    for name in COMPONENT_NAMES:
        members = [component for component in stage.components if component.within == name]
        if members:
            flops, moved = sum(component.flops for component in members), sum(component.bytes for component in members)
            components.append(ComponentRoofline(name, flops, moved, flops / peak, moved / bandwidth))
    return RooflineTime(tuple(components))


@dataclass(frozen=True)
class WhatIf:
    """One row of the what-if table."""

    hardware: str
    formats: Formats
    compute_dtype: str
    """The format whose peak the roofline time uses."""
    batch: int
    prompt: int
    """Including the tokens of images."""
    context: int
    weight_bytes: int
    kv_cache_bytes: int
    """After the decode step."""
    fits: Maybe[bool]
    """Whether weights and cache fit in the share of the device's memory that is for them."""
    memory_share: float
    prefill: Maybe[RooflineTime]
    decode: Maybe[RooflineTime]

    @property
    def decode_tokens_per_s(self) -> Maybe[float]:
        """Upper bound of the batch's decode throughput."""
        return self.decode if isinstance(self.decode, Missing) else self.batch / self.decode.seconds


def what_if(
    architecture: Architecture,
    hardware: Hardware,
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    formats: Sequence[Formats],
    prompt: int | None = None,
    images: ImagePrompt | None = None,
    memory_share: float = MEMORY_SHARE,
) -> list[WhatIf]:
    """Return a row per combination; the prompt defaults to the length of the context. `images` are in every prompt."""
    for name, values in (("batch", batches), ("context", contexts), ("dtype", formats)):
        if not values:
            raise ConfigError(f"{name} must have at least one value.")
    for context in contexts:
        whole_number("context", context, at_least=0)
    if prompt is not None:
        whole_number("prompt", prompt, at_least=1)
    return [
        _row(architecture, hardware, Step(batch, prompt or max(context, 1)), context, chosen, images, memory_share)
        for chosen in formats
        for context in contexts
        for batch in batches
    ]


def step_roofline_time(architecture: Architecture, hardware: Hardware, step: Step, formats: Formats) -> Maybe[RooflineTime]:
    """Return the roofline time of one step at the datasheet peaks."""
    return _roofline_on(hardware, step_cost(architecture, step, formats), formats)


def _roofline_on(hardware: Hardware, cost: StageCost, formats: Formats) -> Maybe[RooflineTime]:
    peak = hardware.peak(compute_dtype(formats.weights))
    if isinstance(peak, Missing):
        return peak
    return roofline_time(cost, peak.flops_per_s, hardware.bandwidth_bytes_per_s)


def largest_batch_within(
    architecture: Architecture, hardware: Hardware, batch: int, context: int, formats: Formats, longer: float
) -> Maybe[int]:
    """Return the largest batch whose decode step has a roofline time at most `longer` (a fraction) above that of `batch`."""
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
    """All components. At long contexts, each sequence adds so many cached bytes that no batch is compute-bound."""
    weights: Maybe[int]
    """The components that multiply weights, without attention over the cache."""


def turning_point(architecture: Architecture, hardware: Hardware, context: int, formats: Formats) -> TurningPoint:
    """Return the batch at which decode becomes compute-bound."""
    whole_number("context", context, at_least=0)
    peak = hardware.peak(compute_dtype(formats.weights))
    if isinstance(peak, Missing):
        return TurningPoint(hardware.key, formats, context, peak, peak)

    def bound_with(without: frozenset[str]) -> Callable[[int], bool]:
        def is_compute_bound(batch: int) -> bool:
            stage = step_cost(architecture, Step(batch, 1, context), formats)
            counted = [component for component in stage.components if component.name not in without]
            compute_s = sum(component.flops for component in counted) / peak.flops_per_s
            return compute_s >= sum(component.bytes for component in counted) / hardware.bandwidth_bytes_per_s

        return is_compute_bound

    return TurningPoint(
        hardware=hardware.key,
        formats=formats,
        context=context,
        step=_first_batch(bound_with(frozenset()), f"at a context of {context}, the cache's bytes grow faster than the FLOPs"),
        weights=_first_batch(bound_with(_CACHE_COMPONENTS), "the weights stay memory-bound"),
    )


def _row(
    architecture: Architecture,
    hardware: Hardware,
    text: Step,
    context: int,
    formats: Formats,
    images: ImagePrompt | None,
    memory_share: float,
) -> WhatIf:
    usable = hardware.usable_bytes(memory_share)
    batch, prompt = text.batch, text.new_tokens + (images.tokens if images else 0)
    held = weight_bytes(architecture, formats)
    cache = kv_cache_bytes(architecture, batch, max(prompt, context + 1), formats)
    vision, inputs = (images.vision, images.input(batch)) if images else (None, None)
    prefill = prefill_cost(architecture, replace(text, new_tokens=prompt), formats, vision, inputs)
    return WhatIf(
        hardware=hardware.key,
        formats=formats,
        compute_dtype=compute_dtype(formats.weights),
        batch=batch,
        prompt=prompt,
        context=context,
        weight_bytes=held,
        kv_cache_bytes=cache,
        fits=usable if isinstance(usable, Missing) else held + cache <= usable,
        memory_share=memory_share,
        prefill=_roofline_on(hardware, prefill, formats),
        decode=step_roofline_time(architecture, hardware, Step(batch, 1, context), formats),
    )


def _first_batch(is_compute_bound: Callable[[int], bool], why_never: str) -> Maybe[int]:
    """Return the smallest compute-bound batch. FLOPs grow linearly with the batch and bytes more slowly: one crossing."""
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

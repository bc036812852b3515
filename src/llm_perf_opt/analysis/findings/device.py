"""Rules on device utilization: occupancy, partial waves and small batches."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from llm_perf_opt.analysis.cost_model.cost import kv_cache_bytes, weight_bytes
from llm_perf_opt.analysis.cost_model.work import Step
from llm_perf_opt.analysis.evidence import Evidence, StageEvidence
from llm_perf_opt.analysis.findings.finding import (
    Grounds,
    Throughput,
    ToTry,
    finding,
    largest_saving,
    place_of,
    saving_of,
    wall_clock_saving,
)
from llm_perf_opt.analysis.findings.host import wall_scope
from llm_perf_opt.analysis.kernels.names import short_name
from llm_perf_opt.analysis.kernels.table import StageKernel
from llm_perf_opt.analysis.limits.efficiency import RequestCost, request_cost
from llm_perf_opt.analysis.limits.hardware import Hardware, devices_of
from llm_perf_opt.analysis.limits.roofline import largest_batch_within, step_roofline_time, turning_point
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.trace.stage_instances import DECODE
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.units import duration, percentage

LOW_OCCUPANCY = 25.0
"""Percent of the warps an SM can hold; below this, latency is hardly hidden."""
NEAR_A_PEAK = 60.0
"""Percent of a unit's peak; from here on, occupancy does not hold a kernel back."""
NOTEWORTHY = 0.05
"""The least share of a stage's kernel time that makes a kernel part of a finding."""
TAIL = 0.25
"""The least share of empty block slots, over all waves of a kernel, that makes it part of a finding."""
LARGER_BATCH = 8
"""The proposed batch is at most this many times the current one."""
HARDLY_LONGER = 0.10
"""A step whose roofline time grows by at most this share counts as hardly longer."""
WORTHWHILE = 1.1
"""The least gain in tokens per second that makes a larger batch a finding."""

_AUTOTUNE = ("runtime.cache=static", "runtime.compile=max-autotune")

Check = Callable[[StageKernel], tuple[str, float] | None]
"""Returns what holds a kernel back, in words, and the largest share of its time that a better kernel could save."""


def low_occupancy(evidence: Evidence) -> Finding | None:
    """Kernels with few active warps take much of the time and are far from every peak."""
    return _counter_finding(
        evidence,
        "low_occupancy",
        _low_occupancy,
        "Kernels of {stage} have few active warps and are far from the device's peaks: {names}.",
        ToTry(
            _AUTOTUNE,
            "Give each launch more work (a larger batch, a longer prompt), or use smaller tiles or split-K; max-autotune "
            "searches for such kernels.",
            "Raise the occupancy of slow kernels",
        ),
    )


def wave_tail(evidence: Evidence) -> Finding | None:
    """The blocks of a kernel do not fill the device in their last or only wave."""
    return _counter_finding(
        evidence,
        "wave_tail",
        _partial_wave,
        "Kernels of {stage} leave part of the device idle in their last wave of blocks: {names}.",
        ToTry(
            _AUTOTUNE,
            "Choose tiles so that blocks fill whole waves (split-K, stream-K, persistent kernels); max-autotune searches for "
            "such kernels.",
            "Choose tiles that fill whole waves",
        ),
    )


def small_batch(evidence: Evidence) -> Finding | None:
    """Decode reads the weights for few tokens; a larger batch raises throughput."""
    stage, facts = evidence.stage(DECODE), evidence.facts
    if stage is None or not stage.by_token or isinstance(facts.timings, Missing) or isinstance(facts.hardware, Missing):
        return None
    request = request_cost(facts.timings)
    if isinstance(request, Missing):
        return None
    work = facts.timings.workload
    cost = _StepCost(request, facts.hardware, work.padded_tokens, devices_of(facts.timings))
    batch = work.batch_size
    larger, similar = cost.larger_batch(batch, work.new_tokens), cost.similar_batch(batch)
    least_ns, larger_least_ns = cost.roofline_ns(batch), cost.roofline_ns(larger)
    if larger < 2 * batch or min(least_ns, larger_least_ns, cost.roofline_ns(max(similar, batch))) <= 0:
        return None
    more_ns = larger_least_ns - least_ns
    # Expected: the step grows by its additional work at the device's peaks. At worst, all kernels grow with the batch.
    step_ns, busy_ns = stage.wall_ns, stage.per_unit(stage.budget.busy_ns)
    then = step_ns + more_ns
    worst = step_ns + busy_ns * (larger / batch - 1)
    if larger / then < WORTHWHILE * batch / step_ns:
        return None
    most = round(max(then, worst))
    found = Throughput(batch, larger, round(step_ns), round(then), round(step_ns), most, stage.unit, stage.units)
    return finding(
        "small_batch",
        place_of(evidence, stage),
        (
            f"At batch {batch}, a decode step reads the weights for {'one token' if batch == 1 else f'{batch} tokens at once'}.",
            f"{_growth_words(cost, batch, larger, similar)} A larger batch gives more tokens per second; a single request is no "
            "faster.",
        ),
        Grounds(
            (
                f"batch {batch}: {duration(step_ns, 3)} per step{wall_scope(stage)}, {batch * 1e9 / step_ns:,.4g} tokens/s",
                f"batch {larger}: {duration(then, 3)} per step, {larger * 1e9 / then:,.4g} tokens/s; the additional work takes "
                f"{duration(more_ns, 3)} at the datasheet peaks of {facts.hardware.name}",
            ),
            "medium",
            "the larger step is estimated as the current one plus its additional work at the device's peaks; at worst all "
            "kernels grow with the batch",
        ),
        found,
        ToTry(
            (f"runtime.batch_size={larger}",),
            "Serve more sequences at once (continuous batching).",
            f"Raise the batch size to {larger}",
        ),
    )


@dataclass(frozen=True)
class _StepCost:
    """The roofline time of a decode step at any batch, by the arithmetic of `llm-perf cost`."""

    request: RequestCost
    hardware: Hardware
    context: int
    devices: int

    @property
    def has_idle_experts(self) -> bool:
        """Whether a larger batch reads weights that a smaller one does not read."""
        return self.request.architecture.active_params < self.request.architecture.params

    def roofline_ns(self, batch: int) -> float:
        """Return the roofline time of a step; 0 if it is unknown."""
        found = step_roofline_time(self.request.architecture, self.hardware, Step(batch, 1, self.context), self.request.formats)
        return 0.0 if isinstance(found, Missing) else found.seconds * 1e9 / self.devices

    def similar_batch(self, batch: int) -> int:
        """Return the largest batch whose step is hardly longer."""
        found = largest_batch_within(
            self.request.architecture, self.hardware, batch, self.context, self.request.formats, HARDLY_LONGER
        )
        return batch if isinstance(found, Missing) else found

    def larger_batch(self, batch: int, new_tokens: int) -> int:
        """Return the batch to try: limited by `LARGER_BATCH`, by memory, and by where products become compute-bound."""
        turn = turning_point(self.request.architecture, self.hardware, self.context, self.request.formats).weights
        bounds = [LARGER_BATCH * batch, self._room(new_tokens), 0 if isinstance(turn, Missing) else turn]
        similar = self.similar_batch(batch)
        return min([*bounds, similar] if similar >= 2 * batch else bounds)

    def _room(self, new_tokens: int) -> int:
        """Return the largest batch that fits in the devices' memory; unlimited if the memory size is unknown."""
        memory, formats, architecture = self.hardware.usable_bytes(), self.request.formats, self.request.architecture
        sequence = kv_cache_bytes(architecture, 1, self.context + new_tokens, formats)
        if isinstance(memory, Missing) or not sequence:
            return sys.maxsize
        return int((memory * self.devices - weight_bytes(architecture, formats)) // sequence)


def _growth_words(cost: _StepCost, batch: int, larger: int, similar: int) -> str:
    """Return how the roofline time of a step grows with the batch: up to which batch it hardly does, or else by how much."""
    name, now = cost.hardware.name, duration(cost.roofline_ns(batch), 3)
    if similar >= 2 * batch:
        return (
            f"Its roofline time at the datasheet peaks of {name} is {now}; up to batch {similar:,} it stays within "
            f"{percentage(HARDLY_LONGER)} of that ({duration(cost.roofline_ns(similar), 3)})."
        )
    then = duration(cost.roofline_ns(larger), 3)
    why = ": more sequences use more experts, whose weights must be read too" if cost.has_idle_experts else ""
    return f"Its roofline time at the datasheet peaks of {name} grows from {now} to {then} at batch {larger}{why}."


def _counter_finding(evidence: Evidence, id: str, check: Check, claim: str, to_try: ToTry) -> Finding | None:
    """Return the finding on the kernels that `check` reports, in the stage where it saves most."""
    in_words = replace(to_try, overrides=())
    if evidence.facts.setting("runtime.compile") == "max-autotune":
        to_try = in_words  # already set
    found = []
    for stage in evidence.stages:
        limited = [(row, words) for row in _counter_rows(stage) if row.share >= NOTEWORTHY and (words := check(row))]
        if limited:
            found.append(_device_finding(evidence, stage, id, limited, claim, to_try if stage.name == DECODE else in_words))
    return largest_saving(found)


def _device_finding(
    evidence: Evidence,
    stage: StageEvidence,
    id: str,
    limited: list[tuple[StageKernel, tuple[str, float]]],
    claim: str,
    to_try: ToTry,
) -> Finding:
    share = stage.kernel_ns / max(sum(row.total_ns for row in _counter_rows(stage)), 1)
    gain = sum(row.total_ns * unused for row, (_, unused) in limited) * share
    names = "; ".join(f"{short_name(row.name, 60)} ({words})" for row, (words, _) in limited[:3])
    text = claim.format(stage=stage.name, names=names)
    on_wall = wall_clock_saving(stage, (0, gain / 2, gain))
    because = "counters show what is unused, not what a better kernel would use; the expected saving is half of the unused share"
    rows = tuple(
        f"{short_name(row.name, 90)}: {row.calls:,} calls, {duration(row.total_ns, 3)}, {percentage(row.share, 1)} of "
        f"{stage.name}'s kernel time, {words}"
        for row, (words, _) in limited[:3]
    )
    grounds = Grounds(rows, "low", f"{because}; {on_wall.because}" if on_wall.because else because)
    saving = saving_of(stage, *on_wall.bounds)
    return finding(id, place_of(evidence, stage), (text, on_wall.claim), grounds, saving, to_try)


def _counter_rows(stage: StageEvidence) -> tuple[StageKernel, ...]:
    return () if isinstance(stage.counters, Missing) else stage.counters.rows


def _low_occupancy(row: StageKernel) -> tuple[str, float] | None:
    call = row.per_call
    if isinstance(call, Missing):
        return None
    occupancy, sm, dram = call.occupancy_pct, call.sm_pct, call.dram_pct
    if isinstance(occupancy, Missing) or isinstance(sm, Missing) or isinstance(dram, Missing):
        return None
    if occupancy >= LOW_OCCUPANCY or max(sm, dram) >= NEAR_A_PEAK:
        return None
    return f"occupancy {occupancy:.0f} %, SM {sm:.0f} %, DRAM {dram:.0f} %", 1 - max(sm, dram) / 100


def _partial_wave(row: StageKernel) -> tuple[str, float] | None:
    call = row.per_call
    if isinstance(call, Missing) or isinstance(call.waves, Missing) or call.waves <= 0:
        return None
    peaks = [value for value in (call.sm_pct, call.dram_pct) if not isinstance(value, Missing)]
    empty = 1 - call.waves / math.ceil(call.waves)
    if empty < TAIL or (peaks and max(peaks) >= NEAR_A_PEAK):
        return None
    return f"{call.waves:.2f} waves, {percentage(empty)} of the block slots empty", empty

"""The input of findings: what a trace shows about each stage, and what is known about the run."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from llm_perf_opt.analysis.budget import BudgetFacts, BudgetKey, StageBudget, stage_budget
from llm_perf_opt.analysis.kernels.classes import class_of_work
from llm_perf_opt.analysis.kernels.evidence import KernelEvidence
from llm_perf_opt.analysis.kernels.table import StageKernels
from llm_perf_opt.analysis.limits.efficiency import Efficiency, other_steps, request_cost, stage_samples
from llm_perf_opt.analysis.limits.hardware import Hardware, devices_of, more_devices
from llm_perf_opt.analysis.limits.peaks import Peaks, best_roofline_time
from llm_perf_opt.analysis.limits.roofline import RooflineTime
from llm_perf_opt.analysis.overhead import AddedTime, PassOverhead
from llm_perf_opt.analysis.stats import ends, summarize
from llm_perf_opt.analysis.telemetry import TelemetrySummary
from llm_perf_opt.analysis.trace.accounting import (
    Account,
    StageTime,
    kernels_cover,
    on_the_busiest,
    overlap_of,
    side_by_side_notes,
)
from llm_perf_opt.analysis.trace.document import UNPROFILED
from llm_perf_opt.analysis.trace.host_calls import Fusion, HostCallCounts, fusion_of, host_calls, within_device
from llm_perf_opt.analysis.trace.host_time import HostTime
from llm_perf_opt.analysis.trace.idle import IdleCause
from llm_perf_opt.analysis.trace.intervals import exact_sum, union_blocks
from llm_perf_opt.analysis.trace.operator_classes import HostRow
from llm_perf_opt.analysis.trace.stage_instances import DECODE, DECODE_STEP, PREFILL, TraceStages
from llm_perf_opt.analysis.trace.stage_launches import KernelTotal, kernels_by_time
from llm_perf_opt.config.schema import PYTORCH
from llm_perf_opt.core.machine_records import Ceilings
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing, TorchPass
from llm_perf_opt.core.stages import MIXED_STEP, STEP, Stage
from llm_perf_opt.traces.events import Int64, Trace, UInt8, WorkKind, different
from llm_perf_opt.traces.projection import NONE

UNITS = {PREFILL: "prefill", DECODE: "token", MIXED_STEP: "step", STEP: "step"}
"""Stage → the unit that savings are given per. A decode step makes one token of each sequence."""
_TRACE_ONLY = Missing("a trace alone does not contain it")
_NO_STEPS = Missing("the trace does not show the steps of decode, so the number of tokens is unknown")


@dataclass(frozen=True)
class RunFacts:
    """What is known in addition to the trace; nothing for a standalone trace."""

    timings: Maybe[CleanTimings] = _TRACE_ONLY
    efficiency: Maybe[Efficiency] = _TRACE_ONLY
    kernels: Maybe[KernelEvidence] = _TRACE_ONLY
    telemetry: Maybe[TelemetrySummary] = _TRACE_ONLY
    ceilings: Maybe[Ceilings] = _TRACE_ONLY
    hardware: Maybe[Hardware] = _TRACE_ONLY
    overheads: tuple[PassOverhead, ...] = ()
    trace_pass: str = ""
    """The pass that recorded the trace."""
    config: Mapping[str, Any] = field(default_factory=dict)
    torch: Maybe[TorchPass] = _TRACE_ONLY
    env: Mapping[str, Any] = field(default_factory=dict)

    def setting(self, key: str) -> Any:
        """Return a value of the run's configuration by its dotted key, or None."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    @property
    def attention(self) -> str:
        """The attention implementation that the model used, or else the configured one; empty if unknown."""
        ran = "" if isinstance(self.timings, Missing) else self.timings.model.attention
        return ran or str(self.setting("runtime.attn_implementation") or "")

    @property
    def on_gpu(self) -> bool:
        """Whether the run used a GPU; False for a standalone trace."""
        return not isinstance(self.timings, Missing) and self.timings.model.device.startswith("cuda")

    @property
    def own_runtime(self) -> bool:
        """Whether llm-perf ran the model with its own PyTorch runtime, whose settings it has; True for a standalone trace."""
        return self.setting("runtime.type") in (None, PYTORCH)

    @property
    def compiled(self) -> bool:
        """Whether the run's decode step is already compiled."""
        return self.setting("runtime.compile") not in (None, "none")


@dataclass(frozen=True)
class StageFigures:
    """What every rule needs of a stage."""

    name: str
    unit: str
    """token, prefill or step; `decode` if its steps are unknown."""
    units: int
    """Decode steps, prefills, steps, or decodes in the trace."""
    budget: StageBudget
    unprofiled: bool
    """Whether the wall time comes from the unprofiled pass."""
    wall_ends_ns: tuple[float, float] | None = field(default=None, kw_only=True)
    """Interval of the unprofiled wall time of all units, over the repeats; None without an unprofiled time."""
    request_units: int = field(default=0, kw_only=True)
    """Units in a whole request, the first of which are in the trace; 0: unknown."""

    @property
    def wall_ns(self) -> float:
        """Wall time of one unit; unprofiled if known."""
        return self.budget.wall_ns / self.units

    @property
    def least_wall_ns(self) -> float:
        """Lower end of the interval of the wall time of all units; the wall time itself if there is no interval."""
        return min(self.wall_ends_ns[0], self.budget.wall_ns) if self.wall_ends_ns else self.budget.wall_ns

    @property
    def by_token(self) -> bool:
        """Whether the unit is a decode step, which makes one token of each sequence."""
        return self.unit == UNITS[DECODE]

    def per_unit(self, ns: float) -> float:
        """Return a sum over the trace divided by its units."""
        return ns / self.units


@dataclass(frozen=True)
class HostStageEvidence(StageFigures):
    """One stage of a program on the CPU."""

    time: HostTime
    rows: Mapping[HostRow, int]
    """Time of each class of operators without the profiler's cost, over all units, including its roofline time."""


@dataclass(frozen=True)
class StageEvidence(StageFigures):
    """One stage with work on a GPU."""

    time: StageTime
    kernels: tuple[KernelTotal, ...]
    """Kernels of each instance's busiest device. Devices run concurrently, so savings are not summed over them."""
    fusion: Fusion
    """What a compiler would fuse on the busiest device."""
    calls: HostCallCounts
    queued_gap_ns: Maybe[float]
    """Median gap before a kernel that was already queued: what the device itself needs between two kernels."""
    counters: Maybe[StageKernels]
    overlap: float = 1.0
    """Time that the kernels of the busiest device cover, divided by their sum; below 1 if some run concurrently."""
    collective_ns: int = 0
    """Time during which only collectives ran; part of the budget's exposed copies and communication."""
    inner_copy_ns: int = 0
    """Copies within the device and waiting for them, part of the same row: a compiler fuses them into kernels."""

    @property
    def kernel_ns(self) -> int:
        """Summed kernel time of the busiest device."""
        return sum(row.total_ns for row in self.kernels)

    @property
    def busy_share(self) -> float:
        """Share of the wall time during which the device was busy."""
        return self.budget.busy_ns / self.budget.wall_ns if self.budget.wall_ns else 0.0


@dataclass(frozen=True)
class Evidence:
    """The input of every rule."""

    stages: tuple[StageEvidence, ...]
    facts: RunFacts
    method: str = ""
    """How the stages were found: whose labels mark them."""
    on_cpu: tuple[HostStageEvidence, ...] = ()
    """The stages of a program on the CPU; then `stages` is empty."""

    @property
    def every(self) -> tuple[StageFigures, ...]:
        """The stages, wherever they ran."""
        return (*self.stages, *self.on_cpu)

    def figures(self, name: str) -> StageFigures | None:
        """Return the stage with this name wherever it ran, or None."""
        return next((stage for stage in self.every if stage.name == name), None)

    def cpu_stage(self, name: str) -> HostStageEvidence | None:
        """Return the stage with this name if it ran on the CPU."""
        return next((stage for stage in self.on_cpu if stage.name == name), None)

    def stage(self, name: str) -> StageEvidence | None:
        """Return the stage with this name, or None if the trace does not show it."""
        return next((stage for stage in self.stages if stage.name == name), None)


def gather(trace: Trace, stages: TraceStages, account: Account, facts: RunFacts) -> Evidence:
    """Return the evidence of every stage with device work. Stages that only contain others (`profile`) are skipped."""
    classes = class_of_work(trace)
    times = [time for time in account.stages if time.name in UNITS and time.span_ns]
    return Evidence(tuple(_stage(trace, stages, account, time, classes, facts) for time in times), facts, stages.method)


def _stage(
    trace: Trace, stages: TraceStages, account: Account, time: StageTime, classes: UInt8, facts: RunFacts
) -> StageEvidence:
    inner = DECODE_STEP if time.name == DECODE and DECODE_STEP in stages.names else time.name
    unit = DECODE if inner == DECODE else UNITS[time.name]  # without steps, the number of tokens is unknown
    group = stages.of_stage(inner)
    active = different(group[group != NONE])
    units = len(active) or 1
    time = _without_idle_units(time, stages, inner, active)
    busiest = on_the_busiest(trace, group)
    devices = len(different(trace.work.device[group != NONE])) or 1
    roofline_ns, roof = _roofline(time.name, unit, units, facts, devices)
    counters = _counters(time.name, facts)
    counted_ns, share = _counted(counters, roof, time.name, units, facts)
    wall_ns, wall_ends, source = unprofiled_wall(time.name, unit, units, facts)
    unprofiled = wall_ns is not None
    compute_ns, kernels_ns = kernels_cover(trace, stages.of_stage(time.name), classes)
    changed = _changed(time.name, unit, facts)
    budget = stage_budget(
        BudgetFacts(
            stage=time.name,
            units=units,
            wall_ns=wall_ns if wall_ns is not None else max(time.wall_ns, time.span_ns),
            wall_source=source,
            unprofiled=unprofiled,
            trace_wall_ns=time.wall_ns,
            span_ns=time.span_ns,
            busy_ns=time.busy_ns,
            compute_ns=compute_ns,
            idle=time.idle,
            roofline_ns=roofline_ns,
            counted_ns=counted_ns,
            counted_share=share,
            changed_ns=round(changed.ns * units) if changed else 0,
            changed_spread=changed is None or changed.has_spread,
        )
    )
    return StageEvidence(
        name=time.name,
        unit=unit,
        units=units,
        time=time,
        budget=replace(budget, notes=(*budget.notes, *side_by_side_notes(trace, stages, inner, devices))),
        kernels=kernels_by_time(trace, stages, time.name, busiest),
        fusion=fusion_of(trace, np.where(busiest, group, NONE), classes),
        calls=host_calls(trace, stages, inner),
        queued_gap_ns=_queued_gap(account),
        counters=counters,
        unprofiled=unprofiled,
        overlap=overlap_of(trace, stages.of_stage(time.name), busiest, devices, kernels_ns),
        collective_ns=kernels_ns - compute_ns,
        inner_copy_ns=_inner_copies(trace, stages.of_stage(time.name), account, time, budget, compute_ns),
        wall_ends_ns=wall_ends,
        request_units=0
        if time.name != DECODE or unit == DECODE or isinstance(facts.timings, Missing)
        else facts.timings.workload.decode_steps,
    )


def _changed(stage: str, unit: str, facts: RunFacts) -> AddedTime | None:
    """Return the time that the traced pass added to a unit by changing the engine; None if it is unknown or within the spread."""
    cost = next((each.changes for each in facts.overheads if each.name == facts.trace_pass), None)
    if cost is None or stage not in (PREFILL, DECODE) or unit == DECODE:
        return None
    added = cost.added_prefill if stage == PREFILL else cost.added_step
    return None if isinstance(added, Missing) or not added.distinguishable else added


def _without_idle_units(time: StageTime, stages: TraceStages, inner: str, active: Int64) -> StageTime:
    """Return the stage time without units that had no device work: they are not counted as units."""
    is_idle = np.zeros(len(stages.instances), np.bool_)
    is_idle[stages.rows_of(inner)] = True
    is_idle[active] = False
    idle = np.flatnonzero(is_idle)
    idle_ns = exact_sum(stages.instances.end_ns[idle] - stages.instances.start_ns[idle])
    return replace(time, wall_ns=time.wall_ns - idle_ns) if idle_ns else time


def unprofiled_wall(stage: str, unit: str, units: int, facts: RunFacts) -> tuple[int | None, tuple[float, float] | None, str]:
    """Return the unprofiled time of as many units, its interval, and the source of the wall time."""
    timings = facts.timings
    profiled = "the trace, under the profiler"
    if isinstance(timings, Missing):
        return None, None, profiled if timings is _TRACE_ONLY else f"{profiled}: {timings.why}"
    if stage not in (PREFILL, DECODE) or not timings.iterations:
        return None, None, f"{profiled}: the unprofiled pass did not time this stage"
    if unit == DECODE:
        return None, None, f"{profiled}: {_NO_STEPS.why}"
    values = stage_samples(timings, Stage(stage), units)
    if isinstance(values, Missing):
        return None, None, f"{profiled}: {values.why}"
    times = repeats_of(stage, units)
    found = summarize(values)
    low, high = ends(found)
    others = other_steps(timings, units, found.median) if stage == DECODE else ""
    source = f"{UNPROFILED}, median of {found.n} repeats{others}"
    return round(found.median) * times, (low * times, high * times), source


def _roofline(stage: str, unit: str, units: int, facts: RunFacts, devices: int) -> tuple[Maybe[int], Maybe[Peaks]]:
    """Return the roofline time of as many units on all devices that share the work. `devices`: those in the trace."""
    elsewhere = more_devices(devices, devices_of(facts.timings))
    least = elsewhere or unit_roofline(stage, unit, units, facts)
    if isinstance(least, Missing):
        return least, least
    roof, found = least
    return round(found.seconds * 1e9) * repeats_of(stage, units), roof


def unit_roofline(stage: str, unit: str, units: int, facts: RunFacts) -> Maybe[tuple[Peaks, RooflineTime]]:
    """Return the best known peaks and the roofline time of one prefill, or of as many decode steps as the trace contains."""
    if isinstance(facts.timings, Missing):
        return facts.timings
    if isinstance(facts.efficiency, Missing):
        return facts.efficiency
    if stage not in (PREFILL, DECODE):
        return Missing("the cost model does not cover this stage")
    if unit == DECODE:
        return _NO_STEPS
    request = request_cost(facts.timings)
    cost = request if isinstance(request, Missing) else request.stage(Stage(stage), units)
    return cost if isinstance(cost, Missing) else best_roofline_time(cost, facts.efficiency.peak_sets)


def repeats_of(stage: str, units: int) -> int:
    """Return how often the time of `unit_roofline` or of an unprofiled stage occurs in the trace."""
    return units if stage == PREFILL else 1


def _counters(stage: str, facts: RunFacts) -> Maybe[StageKernels]:
    if isinstance(facts.kernels, Missing):
        return facts.kernels
    found = next((entry for entry in facts.kernels.stages if entry.stage == stage), None)
    if found is None:
        return Missing("no counters were read in this stage")
    return found.counters if isinstance(found.counters, Missing) else found


def _counted(
    counters: Maybe[StageKernels], roof: Maybe[Peaks], stage: str, units: int, facts: RunFacts
) -> tuple[Maybe[int], float]:
    """Return the roofline time of the work that counted kernels executed, for as many units, and the share of time counted."""
    if isinstance(counters, Missing):
        return counters, 0.0
    if isinstance(roof, Missing):
        return roof, 0.0
    peak, bandwidth = roof.peak_flops_per_s, roof.bandwidth_bytes_per_s
    if isinstance(peak, Missing) or isinstance(bandwidth, Missing) or isinstance(facts.kernels, Missing):
        return Missing("peak FLOP/s or bandwidth is unknown"), 0.0
    if (several := facts.kernels.device_mismatch(stage)) is not None:
        return several, 0.0
    seconds = 0.0
    for row in counters.rows:
        for variant in row.variants:
            if isinstance(variant.per_call, Missing):
                continue
            flops, moved = variant.per_call.flops, variant.per_call.dram_bytes
            if isinstance(flops, Missing) or isinstance(moved, Missing):
                return Missing("FLOPs or bytes were not counted"), 0.0
            seconds += variant.calls * max(flops / peak, moved / bandwidth)
    recorded = facts.kernels.decode_steps if stage == DECODE else 1
    share = counters.counters if not isinstance(counters.counters, Missing) else 0.0
    return round(seconds * 1e9 * units / max(recorded, 1)), share


def _inner_copies(trace: Trace, group: Int64, account: Account, time: StageTime, budget: StageBudget, compute_ns: int) -> int:
    """Return the time that only copies within the device cover, plus their share of the budget's waiting for copies."""
    inner = within_device(trace) & (group != NONE)
    if not inner.any():
        return 0
    others = np.flatnonzero((group != NONE) & ~inner)
    covered = union_blocks(trace.work.start_ns[others], trace.work.end_ns[others], group[others])
    alone = time.busy_ns - int((covered.end_ns - covered.start_ns).sum())
    gaps = account.gaps
    mine = (gaps.cause == IdleCause.COPY_WAIT) & (group[gaps.after] != NONE)
    length, copy = (
        (gaps.end_ns - gaps.start_ns)[mine],
        np.where(trace.work.kind[gaps.after[mine]] == WorkKind.MEMCPY, gaps.after[mine], gaps.before[mine]),
    )
    whole = int(length.sum())
    waited = budget.ns(BudgetKey.EXPOSED) - (budget.busy_ns - compute_ns)
    return alone + (round(waited * int(length[inner[copy]].sum()) / whole) if whole else 0)


def _queued_gap(account: Account) -> Maybe[float]:
    gaps = account.gaps
    queued = (gaps.end_ns - gaps.start_ns)[gaps.cause == IdleCause.DEVICE_LATENCY]
    return float(np.median(queued)) if len(queued) else Missing("no kernel in the trace was queued behind another")

"""The kernels of every stage of a trace, joined with the hardware counters of sampled launches.

Calls and time are from the trace, because Nsight Compute replays a kernel alone, often with different clocks and caches. Work
per call (FLOPs, bytes) is from the counters. A row is one kernel; its launch sizes are joined one by one, so means over them
are weighted by calls.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from llm_perf_opt.analysis.kernels.join import NOT_COLLECTED, Join, Joined, counter_sum, join, weighted
from llm_perf_opt.analysis.kernels.names import normal_name
from llm_perf_opt.analysis.limits.peaks import (
    NO_LIMITS,
    RateLimits,
    possible_bytes_rate,
    possible_flops_rate,
    possible_percentage,
)
from llm_perf_opt.core.machine_records import CounterReport, KernelUse
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.counters.catalog import CounterRoles

TIME_DIFFERS = 0.25
"""Difference between Nsight Compute's and the trace's duration above which it is reported."""
OTHER_WORK = 3.0
"""Factor between these durations above which the sampled launches did other work than those of the trace: persistent kernels
have one grid for every amount of work. Conditions alone (clocks, caches) change durations by less."""
WAVES = "launch__waves_per_multiprocessor"
_BY_TIME = frozenset({"sm_pct", "dram_pct", "occupancy_pct", "waves"})
"""Means over launch sizes that are weighted by time instead of calls."""
NOT_SAMPLED = Missing("none of its launches was sampled")


@dataclass(frozen=True)
class PerCall:
    """Counters per call: a mean over the sampled launch sizes."""

    tensor_flops: Maybe[float]
    vector_flops: Maybe[float]
    """Single and double precision outside the tensor cores."""
    dram_read_bytes: Maybe[float]
    dram_write_bytes: Maybe[float]
    time_ns: Maybe[float]
    """Duration under Nsight Compute."""
    sm_pct: Maybe[float]
    dram_pct: Maybe[float]
    occupancy_pct: Maybe[float]
    waves: Maybe[float] = NOT_COLLECTED
    """Rounds of blocks that fill the device; below one, or just above a whole number, part of the device is idle."""
    half_flops: Maybe[float] = NOT_COLLECTED
    """Upper bound, not included elsewhere: packed half-precision instructions also move constants, even in copies."""

    @property
    def flops(self) -> Maybe[float]:
        """FLOPs of the tensor cores plus single and double precision outside them, or the kind that was collected."""
        known = [value for value in (self.tensor_flops, self.vector_flops) if not isinstance(value, Missing)]
        return sum(known) if known else self.tensor_flops

    @property
    def dram_bytes(self) -> Maybe[float]:
        """DRAM bytes read and written."""
        if isinstance(self.dram_read_bytes, Missing):
            return self.dram_read_bytes
        if isinstance(self.dram_write_bytes, Missing):
            return self.dram_write_bytes
        return self.dram_read_bytes + self.dram_write_bytes


@dataclass(frozen=True)
class Variant:
    """A kernel at one launch size."""

    grid: int
    block: int
    calls: int
    total_ns: int
    sampled: int
    """Number of launches with its counters."""
    by_name: bool
    """Whether those launches had a different grid."""
    per_call: Maybe[PerCall]


@dataclass(frozen=True)
class StageKernel:
    """One kernel of a stage."""

    stage: str
    name: str
    """In normal form."""
    spelled: str
    """As in the trace."""
    calls: int
    total_ns: int
    share: float
    """Of the stage's kernel time."""
    variants: tuple[Variant, ...]
    per_call: Maybe[PerCall]
    """Mean over the launch sizes with counters, weighted by calls (percentages and waves: by time)."""
    limits: RateLimits = NO_LIMITS
    """Limits of the device."""

    @property
    def mean_ns(self) -> float:
        """Mean duration of a call in the trace."""
        return self.total_ns / self.calls

    @property
    def counted_ns(self) -> int:
        """Time of the launch sizes with counters."""
        return sum(variant.total_ns for variant in self.variants if not isinstance(variant.per_call, Missing))

    @property
    def by_name(self) -> bool:
        """Whether some of its counters are from launches with a different grid."""
        return any(variant.by_name for variant in self.variants)

    @property
    def flops_per_s(self) -> Maybe[float]:
        """Counted FLOPs / trace time of the same launch sizes; Missing if the device cannot reach it."""
        return possible_flops_rate(self._rate("flops"), self.limits)

    @property
    def bytes_per_s(self) -> Maybe[float]:
        """Counted DRAM bytes / trace time of the same launch sizes; Missing if the device cannot reach it."""
        return possible_bytes_rate(self._rate("dram_bytes"), self.limits)

    @property
    def flops_per_byte(self) -> Maybe[float]:
        """Executed FLOPs per byte of DRAM traffic."""
        if isinstance(self.per_call, Missing):
            return self.per_call
        flops, moved = self.per_call.flops, self.per_call.dram_bytes
        if isinstance(flops, Missing):
            return flops
        if isinstance(moved, Missing):
            return moved
        return flops / moved if moved else Missing("it moved no DRAM bytes")

    @property
    def time_ratio(self) -> Maybe[float]:
        """Nsight Compute's duration / the trace's, of the same launch sizes."""
        own = self._sum("time_ns")
        return own if isinstance(own, Missing) else own / max(self.counted_ns, 1)

    @property
    def time_differs(self) -> bool:
        """Whether the durations differ so much that the kernel must have run under different conditions."""
        ratio = self.time_ratio
        return not isinstance(ratio, Missing) and abs(ratio - 1) > TIME_DIFFERS

    def _rate(self, amount: str) -> Maybe[float]:
        total = self._sum(amount)
        return total if isinstance(total, Missing) else total / (max(self.counted_ns, 1) / 1e9)

    def _sum(self, amount: str) -> Maybe[float]:
        return _total(self.variants, amount)


@dataclass(frozen=True)
class StageKernels:
    """All kernels of a stage, longest first."""

    stage: str
    rows: tuple[StageKernel, ...]
    total_ns: int
    calls: int
    counters: Maybe[float]
    """Share of its kernel time with counters."""
    by_name: float
    """Share of its kernel time whose counters are from launches with a different grid."""
    flops: Maybe[float]
    """Executed FLOPs of all calls with counters, without packed half precision."""
    tensor_flops: Maybe[float]
    dram_bytes: Maybe[float]
    unused: int
    """Sampled launches of kernels that are not in this stage of the trace."""
    not_collected: tuple[str, ...]
    """FLOP counters of the chip that were not collected: the figures do not include their work."""
    notes: tuple[str, ...] = ()
    half_flops: Maybe[float] = NOT_COLLECTED
    """Upper bound of FLOPs in packed half precision, over all calls with counters."""


def kernel_table(
    uses: Iterable[KernelUse],
    reports: Mapping[str, Maybe[CounterReport]],
    roles: Maybe[CounterRoles],
    *,
    limits: RateLimits = NO_LIMITS,
    no_counters: str = "no counters were read in this stage",
) -> tuple[StageKernels, ...]:
    """Return the stages in the order of their kernels; `reports` has the counters of each stage, or why there are none."""
    stages: dict[str, list[KernelUse]] = defaultdict(list)
    for use in uses:
        if use.calls > 0:
            stages[use.stage].append(use)
    return tuple(
        _stage(stage, members, reports.get(stage, Missing(no_counters)), roles, limits) for stage, members in stages.items()
    )


def _stage(
    stage: str, uses: Sequence[KernelUse], report: Maybe[CounterReport], roles: Maybe[CounterRoles], limits: RateLimits
) -> StageKernels:
    why = _unusable(report, roles)
    joined = join(report.kernels if why is None and not isinstance(report, Missing) else (), uses)
    total = sum(use.total_ns for use in uses)
    groups: dict[str, list[KernelUse]] = defaultdict(list)
    for use in uses:
        groups[normal_name(use.name)].append(use)
    rows = [replace(_row(stage, name, group, total, joined, roles, why), limits=limits) for name, group in groups.items()]
    rows.sort(key=lambda row: (-row.total_ns, row.name))
    variants = [variant for row in rows for variant in row.variants]
    return StageKernels(
        stage=stage,
        rows=tuple(rows),
        total_ns=total,
        calls=sum(use.calls for use in uses),
        counters=why or sum(row.counted_ns for row in rows) / max(total, 1),
        by_name=sum(variant.total_ns for variant in variants if variant.by_name) / max(total, 1),
        flops=why or _total(variants, "flops"),
        tensor_flops=why or _total(variants, "tensor_flops"),
        dram_bytes=why or _total(variants, "dram_bytes"),
        unused=joined.unused,
        not_collected=() if why else _not_collected(joined, roles),
        notes=() if isinstance(report, Missing) else tuple(problem.what for problem in report.problems),
        half_flops=why or _total(variants, "half_flops"),
    )


def _unusable(report: Maybe[CounterReport], roles: Maybe[CounterRoles]) -> Missing | None:
    if isinstance(report, Missing):
        return report
    fatal = next((problem for problem in report.problems if problem.fatal), None)
    if fatal:
        return Missing(f"the counters of this stage are not valid: {fatal.what}")
    return roles if isinstance(roles, Missing) else None


def _row(
    stage: str,
    name: str,
    uses: Sequence[KernelUse],
    stage_ns: int,
    joined: Join,
    roles: Maybe[CounterRoles],
    why: Missing | None,
) -> StageKernel:
    sizes: dict[tuple[int, int], list[KernelUse]] = defaultdict(list)
    for use in uses:
        sizes[(use.grid, use.block)].append(use)
    calls = {size: sum(use.calls for use in group) for size, group in sizes.items()}
    variants = []
    for (grid, block), group in sizes.items():
        found = joined.found.get((name, grid, block))
        counted: Maybe[PerCall] = NOT_SAMPLED if why is None else why
        if found and not isinstance(roles, Missing):
            counted = _of_same_work(_mean_call(found, roles), sum(use.total_ns for use in group) / max(calls[(grid, block)], 1))
        total = sum(use.total_ns for use in group)
        sampled, by_name = (len(found.samples), found.by_name) if found else (0, False)
        variants.append(Variant(grid, block, calls[(grid, block)], total, sampled, by_name, counted))
    variants.sort(key=lambda variant: -variant.total_ns)
    total = sum(variant.total_ns for variant in variants)
    return StageKernel(
        stage=stage,
        name=name,
        spelled=uses[0].name,
        calls=sum(calls.values()),
        total_ns=total,
        share=total / max(stage_ns, 1),
        variants=tuple(variants),
        per_call=_over_variants(variants, why or NOT_SAMPLED),
    )


def _of_same_work(counted: PerCall, trace_ns: float) -> Maybe[PerCall]:
    """Return the counters of a launch size, or Missing if its sampled launches cannot stand for those of the trace."""
    if isinstance(counted.time_ns, Missing) or not counted.time_ns or not trace_ns:
        return counted
    ratio = counted.time_ns / trace_ns
    if 1 / OTHER_WORK <= ratio <= OTHER_WORK:
        return counted
    far = f"{ratio:.1f} times as long as" if ratio > 1 else f"{1 / ratio:.1f} times shorter than"
    return Missing(f"its sampled launches were {far} those of the trace, so they did other work")


def _mean_call(joined: Joined, roles: CounterRoles) -> PerCall:
    return PerCall(
        tensor_flops=joined.mean(lambda sample: counter_sum([sample], roles.tensor_flops)),
        vector_flops=joined.mean(lambda sample: counter_sum([sample], roles.vector_flops)),
        dram_read_bytes=joined.counter(roles.dram_read_bytes),
        dram_write_bytes=joined.counter(roles.dram_write_bytes),
        time_ns=joined.counter(roles.time_ns),
        sm_pct=possible_percentage(joined.counter(roles.sm_pct)),
        dram_pct=possible_percentage(joined.counter(roles.dram_pct)),
        occupancy_pct=possible_percentage(joined.counter(roles.occupancy_pct)),
        waves=joined.counter(WAVES),
        half_flops=joined.mean(lambda sample: counter_sum([sample], roles.half_flops)),
    )


def _over_variants(variants: Sequence[Variant], none: Missing) -> Maybe[PerCall]:
    known = [(variant, variant.per_call) for variant in variants if not isinstance(variant.per_call, Missing)]
    if not known:
        return none

    def mean(amount: str) -> Maybe[float]:
        weights = [float(variant.total_ns if amount in _BY_TIME else variant.calls) for variant, _ in known]
        return weighted([getattr(counted, amount) for _, counted in known], weights if any(weights) else [1.0] * len(known))

    return PerCall(**{column.name: mean(column.name) for column in fields(PerCall)})


def _total(variants: Iterable[Variant], amount: str) -> Maybe[float]:
    """Return the sum over all calls of the launch sizes with counters."""
    total, why = 0.0, NOT_SAMPLED
    counted = False
    for variant in variants:
        if isinstance(variant.per_call, Missing):
            why = variant.per_call
            continue
        value = getattr(variant.per_call, amount)
        if isinstance(value, Missing):
            return value
        total, counted = total + value * variant.calls, True
    return total if counted else why


def _not_collected(joined: Join, roles: Maybe[CounterRoles]) -> tuple[str, ...]:
    if isinstance(roles, Missing) or not joined.found:
        return ()
    return tuple(name for name in (*roles.tensor_flops, *roles.vector_flops) if name not in joined.counters)

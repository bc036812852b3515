"""Kernels of every stage from a trace, joined with what hardware counters said of some of their launches.

Calls and time are the trace's: Nsight Compute replays a kernel alone, often with other clocks and caches. Work per call
(FLOPs, bytes) is the counters'. A row is one kernel; its launch sizes are joined one by one, so that a mean over them is
weighted by how often each ran.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from llm_perf_opt.analysis.kernels.join import NOT_COLLECTED, Join, Joined, join, weighted
from llm_perf_opt.analysis.kernels.names import normal_name
from llm_perf_opt.analysis.limits.peaks import (
    NO_LIMITS,
    RateLimits,
    possible_bytes_rate,
    possible_flops_rate,
    possible_percentage,
)
from llm_perf_opt.core.machine_records import CountedKernel, CounterReport, KernelUse
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.counters.catalog import CounterRoles

TIME_DIFFERS = 0.25
"""Share by which Nsight Compute's duration may differ from the trace's before it is said."""
WAVES = "launch__waves_per_multiprocessor"
NOT_SAMPLED = Missing("no launch of it was sampled")


@dataclass(frozen=True)
class PerCall:
    """What counters said, per call: a mean over the sampled launch sizes."""

    tensor_flops: Maybe[float]
    vector_flops: Maybe[float]
    """Single and double precision beside the tensor cores."""
    dram_read_bytes: Maybe[float]
    dram_write_bytes: Maybe[float]
    time_ns: Maybe[float]
    """Nsight Compute's own duration."""
    sm_pct: Maybe[float]
    dram_pct: Maybe[float]
    occupancy_pct: Maybe[float]
    waves: Maybe[float] = NOT_COLLECTED
    """Rounds of blocks that fill the whole device; below one, or just above a whole number, a part of it has nothing to do."""
    half_flops: Maybe[float] = NOT_COLLECTED
    """An upper bound, in no other figure: packed half-precision instructions also move constants, in copies too."""

    @property
    def flops(self) -> Maybe[float]:
        """On the tensor cores and in single and double precision beside them; of one kind alone where the other was not
        collected."""
        known = [value for value in (self.tensor_flops, self.vector_flops) if not isinstance(value, Missing)]
        return sum(known) if known else self.tensor_flops

    @property
    def dram_bytes(self) -> Maybe[float]:
        """Read and written."""
        for value in (self.dram_read_bytes, self.dram_write_bytes):
            if isinstance(value, Missing):
                return value
        return _known(self.dram_read_bytes) + _known(self.dram_write_bytes)


@dataclass(frozen=True)
class Variant:
    """A kernel in one launch size."""

    grid: int
    block: int
    calls: int
    total_ns: int
    sampled: int
    """Launches whose counters stand for it."""
    by_name: bool
    """Whether those launches had another grid."""
    per_call: Maybe[PerCall]


@dataclass(frozen=True)
class StageKernel:
    """One kernel of a stage."""

    stage: str
    name: str
    """In normal form."""
    spelled: str
    """As the trace has it."""
    calls: int
    total_ns: int
    share: float
    """Of the stage's kernel time."""
    variants: tuple[Variant, ...]
    per_call: Maybe[PerCall]
    """Over the launch sizes that have counters, weighted by their calls (percentages: by their time)."""
    limits: RateLimits = NO_LIMITS
    """Of the device."""

    @property
    def mean_ns(self) -> float:
        """Of a call, in the trace."""
        return self.total_ns / self.calls

    @property
    def counted_ns(self) -> int:
        """The part of its time whose launch sizes have counters."""
        return sum(variant.total_ns for variant in self.variants if not isinstance(variant.per_call, Missing))

    @property
    def by_name(self) -> bool:
        """Whether some of its counters are of launches with another grid."""
        return any(variant.by_name for variant in self.variants)

    @property
    def flops_per_s(self) -> Maybe[float]:
        """Counted FLOPs over the trace's time of the same launch sizes; never more than the device can."""
        return possible_flops_rate(self._rate("flops"), self.limits)

    @property
    def bytes_per_s(self) -> Maybe[float]:
        """Counted DRAM bytes over the trace's time of the same launch sizes; never more than the device can."""
        return possible_bytes_rate(self._rate("dram_bytes"), self.limits)

    @property
    def flops_per_byte(self) -> Maybe[float]:
        """Executed FLOPs per byte of DRAM traffic."""
        if isinstance(self.per_call, Missing):
            return self.per_call
        flops, moved = self.per_call.flops, self.per_call.dram_bytes
        for value in (flops, moved):
            if isinstance(value, Missing):
                return value
        return _known(flops) / _known(moved) if moved else Missing("it moved no byte of DRAM")

    @property
    def time_ratio(self) -> Maybe[float]:
        """Nsight Compute's duration over the trace's, of the same launch sizes."""
        own = self._sum("time_ns")
        return own if isinstance(own, Missing) else own / max(self.counted_ns, 1)

    @property
    def time_differs(self) -> bool:
        """Whether the two durations are so far apart that the kernel ran under other conditions."""
        ratio = self.time_ratio
        return not isinstance(ratio, Missing) and abs(ratio - 1) > TIME_DIFFERS

    def _rate(self, amount: str) -> Maybe[float]:
        total = self._sum(amount)
        return total if isinstance(total, Missing) else total / (max(self.counted_ns, 1) / 1e9)

    def _sum(self, amount: str) -> Maybe[float]:
        return _total(self.variants, amount)


@dataclass(frozen=True)
class StageKernels:
    """All kernels of a stage, the longest first."""

    stage: str
    rows: tuple[StageKernel, ...]
    total_ns: int
    calls: int
    counters: Maybe[float]
    """Share of its kernel time that has counters."""
    by_name: float
    """Share of its kernel time whose counters are of launches with another grid."""
    flops: Maybe[float]
    """Executed, over all calls that have counters; packed half precision is not in it."""
    tensor_flops: Maybe[float]
    dram_bytes: Maybe[float]
    unused: int
    """Sampled launches of kernels that the trace did not see in this stage."""
    not_collected: tuple[str, ...]
    """FLOP counters of the chip that were not asked for: their work is not in the figures."""
    notes: tuple[str, ...] = ()
    half_flops: Maybe[float] = NOT_COLLECTED
    """At most, in packed half precision, over all calls that have counters."""


def kernel_table(
    uses: Iterable[KernelUse],
    reports: Mapping[str, Maybe[CounterReport]],
    roles: Maybe[CounterRoles],
    *,
    limits: RateLimits = NO_LIMITS,
    no_counters: str = "no counters were read in this stage",
) -> tuple[StageKernels, ...]:
    """Stages in the order their kernels come in; `reports` holds what was counted in a stage, or why nothing was."""
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
        return Missing(f"the counters of this stage cannot be believed: {fatal.what}")
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
            counted = _mean_call(found, roles)
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


def _mean_call(joined: Joined, roles: CounterRoles) -> PerCall:
    return PerCall(
        tensor_flops=joined.mean(lambda sample: _flops(sample, roles.tensor_flops)),
        vector_flops=joined.mean(lambda sample: _flops(sample, roles.vector_flops)),
        dram_read_bytes=joined.counter(roles.dram_read_bytes),
        dram_write_bytes=joined.counter(roles.dram_write_bytes),
        time_ns=joined.counter(roles.time_ns),
        sm_pct=possible_percentage(joined.counter(roles.sm_pct)),
        dram_pct=possible_percentage(joined.counter(roles.dram_pct)),
        occupancy_pct=possible_percentage(joined.counter(roles.occupancy_pct)),
        waves=joined.counter(WAVES),
        half_flops=joined.mean(lambda sample: _flops(sample, roles.half_flops)),
    )


def _flops(sample: CountedKernel, counters: Mapping[str, int]) -> Maybe[float]:
    """The sum over the counters that were collected; one of them without a value leaves none."""
    total, any_of_them = 0.0, False
    for name, flops in counters.items():
        value = sample.counters.get(name)
        if isinstance(value, Missing):
            return value
        if value is not None:
            total, any_of_them = total + value * flops, True
    return total if any_of_them else NOT_COLLECTED


def _over_variants(variants: Sequence[Variant], none: Missing) -> Maybe[PerCall]:
    known = [(variant, variant.per_call) for variant in variants if not isinstance(variant.per_call, Missing)]
    if not known:
        return none

    def mean(amount: str, *, by_time: bool = False) -> Maybe[float]:
        weights = [float(variant.total_ns if by_time else variant.calls) for variant, _ in known]
        return weighted([getattr(counted, amount) for _, counted in known], weights if any(weights) else [1.0] * len(known))

    return PerCall(
        tensor_flops=mean("tensor_flops"),
        vector_flops=mean("vector_flops"),
        dram_read_bytes=mean("dram_read_bytes"),
        dram_write_bytes=mean("dram_write_bytes"),
        time_ns=mean("time_ns"),
        sm_pct=mean("sm_pct", by_time=True),
        dram_pct=mean("dram_pct", by_time=True),
        occupancy_pct=mean("occupancy_pct", by_time=True),
        waves=mean("waves", by_time=True),
        half_flops=mean("half_flops"),
    )


def _total(variants: Iterable[Variant], amount: str) -> Maybe[float]:
    """Over all calls of the launch sizes that have counters."""
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


def _known(value: Maybe[float]) -> float:
    if isinstance(value, Missing):
        raise TypeError(value.why)
    return value

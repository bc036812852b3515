"""Hardware counters of a region, combined from counted launches of its kernels."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from llm_perf_opt.analysis.kernels.join import join
from llm_perf_opt.analysis.kernels.names import normal_name
from llm_perf_opt.analysis.regions.records import CounterValue, How, KernelTime
from llm_perf_opt.analysis.trace.intervals import sums
from llm_perf_opt.core.machine_records import CountedKernel, KernelUse
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.traces.events import Int64, Trace, WorkKind
from llm_perf_opt.traces.projection import Bool, packed_keys

NOT_COUNTED = Missing("none of its kernels was counted")

Seen = dict[int, tuple[int, int]]
"""Variant → calls and nanoseconds."""


@dataclass(frozen=True)
class CountedStage:
    """The counted launches of one stage of a trace. They represent kernels of that stage only, because the same kernel at the
    same launch size does different work in prefill and decode."""

    stage: str
    work: Bool
    """Per row of device work: whether it belongs to this stage."""
    kernels: tuple[CountedKernel, ...]
    units: Mapping[str, str] = field(default_factory=dict)
    """Counter → its unit."""


@dataclass(frozen=True)
class _Counted:
    """The counters of one variant."""

    values: Mapping[str, Maybe[float]]
    """Counter → its value for one launch."""
    by_name: bool
    """Whether the counted launches had a different grid."""


@dataclass(frozen=True)
class Variants:
    """The kernels of a trace by stage, name, grid and block; launches of one variant do about the same work."""

    of_work: Int64
    """Variant per row of device work."""
    names: tuple[str, ...]
    """Per variant."""
    counted: tuple[_Counted | None, ...]
    """Per variant: the counters of one launch, if it was counted."""
    shown: tuple[str, ...]
    """Counters to show."""
    units: Mapping[str, str]
    """Counter → its unit."""

    @classmethod
    def of(cls, trace: Trace, stages: Sequence[CountedStage], shown: tuple[str, ...]) -> "Variants":
        """Return the variants of a trace, each with the counters of its stage."""
        work = trace.work
        stage_of = np.zeros(len(work), np.int64)
        for number, stage in enumerate(stages, start=1):
            stage_of[stage.work & (work.kind == WorkKind.KERNEL)] = number
        (named,) = packed_keys((work.name.astype(np.int64), work.grid))
        (sized,) = packed_keys((named, work.block))
        (key,) = packed_keys((sized, stage_of))
        _, first, which, calls = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
        names = tuple(trace.name_of(name) for name in work.name[first].tolist())
        sizes: list[tuple[int, int]] = list(zip(work.grid[first].tolist(), work.block[first].tolist(), strict=True))
        counters = shown or tuple(sorted({name for stage in stages for kernel in stage.kernels for name in kernel.counters}))
        counted: list[_Counted | None] = [None] * len(names)
        for number, stage in enumerate(stages, start=1):
            mine = np.flatnonzero(stage_of[first] == number).tolist()
            uses = [
                KernelUse(stage.stage, names[row], grid=sizes[row][0], block=sizes[row][1], calls=int(calls[row]), total_ns=0)
                for row in mine
            ]
            found = join(stage.kernels, uses).found
            for row in mine:
                joined = found.get((normal_name(names[row]), *sizes[row]))
                if joined is not None:
                    counted[row] = _Counted({name: joined.counter(name) for name in counters}, joined.by_name)
        units = {name: unit for stage in stages for name, unit in stage.units.items()}
        return cls(which.reshape(-1).astype(np.int64), names, tuple(counted), counters, units)

    def by_path(self, levels: Iterable[tuple[Int64, Int64]], duration: Int64) -> dict[int, Seen]:
        """Return the variants of each path. `levels` has rows of work and the path around each, per level of nesting."""
        found: dict[int, Seen] = {}
        for rows, path in levels:
            key = path * (len(self.names) + 1) + self.of_work[rows]
            distinct, which = np.unique(key, return_inverse=True)
            total = sums(which.reshape(-1), duration[rows], len(distinct))
            calls = np.bincount(which.reshape(-1), minlength=len(distinct))
            for number, count, ns in zip(distinct.tolist(), calls.tolist(), total.tolist(), strict=True):
                of_path = found.setdefault(number // (len(self.names) + 1), {})
                variant = number % (len(self.names) + 1)
                before = of_path.get(variant, (0, 0))
                of_path[variant] = (before[0] + count, before[1] + ns)
        return found

    def top(self, seen: Seen, most: int) -> tuple[KernelTime, ...]:
        """Return the kernel names that took the most time."""
        by_name: dict[str, tuple[int, int]] = {}
        for variant, (calls, ns) in seen.items():
            before = by_name.get(self.names[variant], (0, 0))
            by_name[self.names[variant]] = (before[0] + calls, before[1] + ns)
        ordered = sorted(by_name.items(), key=lambda item: (-item[1][1], item[0]))
        return tuple(KernelTime(name, calls, ns) for name, (calls, ns) in ordered[:most])


def region_counters(variants: Variants, seen: Seen) -> tuple[CounterValue, ...]:
    """Return each counter over the kernels of a region, with the kernel time that it covers."""
    return tuple(_counter(counter, variants, seen) for counter in variants.shown)


def how_combined(counter: str) -> How:
    """Return how values of launches combine: sums add up; rates, averages and shares are weighted by kernel time."""
    ending = counter.rsplit(".", 1)[-1]
    endings: dict[str, How] = {"sum": "sum", "max": "largest", "min": "smallest"}
    return endings.get(ending, "mean by kernel time")


def _counter(counter: str, variants: Variants, seen: Seen) -> CounterValue:
    how, unit = how_combined(counter), variants.units.get(counter, "")
    values: list[tuple[float, int, int]] = []
    covered, by_name, why = 0, 0, NOT_COUNTED
    for variant, (calls, ns) in seen.items():
        counted = variants.counted[variant]
        if counted is None:
            continue
        value = counted.values[counter]
        if isinstance(value, Missing):
            why = value
            continue
        values.append((value, calls, ns))
        covered += ns
        by_name += ns if counted.by_name else 0
    if not values or (how == "mean by kernel time" and not covered):
        return CounterValue(counter, why, how, 0, unit)
    return CounterValue(counter, _combined(how, values, covered), how, covered, unit, by_name)


def _combined(how: How, values: Sequence[tuple[float, int, int]], covered: int) -> float:
    """Combine the values of variants, given with their calls and nanoseconds."""
    if how == "sum":
        return float(sum(value * calls for value, calls, _ in values))
    if how == "largest":
        return max(value for value, _, _ in values)
    if how == "smallest":
        return min(value for value, _, _ in values)
    return sum(value * ns for value, _, ns in values) / covered

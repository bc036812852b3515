"""Hardware counters of a region: put together from the counted launches of its kernels' variants."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llm_perf_opt.analysis.projection import packed_keys
from llm_perf_opt.analysis.region_records import CounterValue, How, KernelTime
from llm_perf_opt.events import Int64, Trace
from llm_perf_opt.records import Missing

Counters = Mapping[tuple[str, int, int], Mapping[str, float]]
"""(kernel name, blocks, threads of a block) → counter → its value for one launch."""
Seen = dict[int, tuple[int, int]]
"""Variant → calls and nanoseconds."""


@dataclass(frozen=True)
class Variants:
    """The kernels of a trace by name, grid and block: launches of one variant do the same work, or nearly."""

    of_work: Int64
    """Per row of device work."""
    names: tuple[str, ...]
    """Per variant."""
    counted: tuple[Mapping[str, float], ...]
    """Per variant: the counters of one launch; empty if it was not counted."""
    shown: tuple[str, ...]
    """The counters of the report."""

    @classmethod
    def of(cls, trace: Trace, counters: Counters, name_key: Callable[[str], str], shown: tuple[str, ...]) -> "Variants":
        """Number the variants of a trace and look each up."""
        work = trace.work
        (named,) = packed_keys((work.name.astype(np.int64), work.grid))
        (key,) = packed_keys((named, work.block))
        _, first, which = np.unique(key, return_index=True, return_inverse=True)
        names = tuple(trace.name_of(name) for name in work.name[first].tolist())
        sizes = zip(work.grid[first].tolist(), work.block[first].tolist(), strict=True)
        counted = tuple(counters.get((name_key(name), *size), {}) for name, size in zip(names, sizes, strict=True))
        every = sorted({counter for values in counters.values() for counter in values})
        return cls(which.reshape(-1).astype(np.int64), names, counted, shown or tuple(every))

    def by_path(self, levels: Iterable[tuple[Int64, Int64]], duration: Int64) -> dict[int, Seen]:
        """Per path: its variants. `levels` pairs rows of work with the path around each, once per level of nesting."""
        found: dict[int, Seen] = {}
        for rows, path in levels:
            key = path * (len(self.names) + 1) + self.of_work[rows]
            distinct, which = np.unique(key, return_inverse=True)
            total = np.zeros(len(distinct), np.int64)
            np.add.at(total, which.reshape(-1), duration[rows])
            calls = np.bincount(which.reshape(-1), minlength=len(distinct))
            for number, count, ns in zip(distinct.tolist(), calls.tolist(), total.tolist(), strict=True):
                of_path = found.setdefault(number // (len(self.names) + 1), {})
                variant = number % (len(self.names) + 1)
                before = of_path.get(variant, (0, 0))
                of_path[variant] = (before[0] + count, before[1] + ns)
        return found

    def top(self, seen: Seen, most: int) -> tuple[KernelTime, ...]:
        """The names that took the most time."""
        by_name: dict[str, tuple[int, int]] = {}
        for variant, (calls, ns) in seen.items():
            before = by_name.get(self.names[variant], (0, 0))
            by_name[self.names[variant]] = (before[0] + calls, before[1] + ns)
        ordered = sorted(by_name.items(), key=lambda item: (-item[1][1], item[0]))
        return tuple(KernelTime(name, calls, ns) for name, (calls, ns) in ordered[:most])


def region_counters(variants: Variants, seen: Seen) -> tuple[CounterValue, ...]:
    """Each counter over the kernels of a region, and the kernel time it stands on."""
    return tuple(_counter(counter, variants, seen) for counter in variants.shown)


def how_combined(counter: str) -> How:
    """Sums add up over launches; rates, averages and shares are weighed by the kernels' time."""
    ending = counter.rsplit(".", 1)[-1]
    endings: dict[str, How] = {"sum": "sum", "max": "largest", "min": "smallest"}
    return endings.get(ending, "mean by kernel time")


def _counter(counter: str, variants: Variants, seen: Seen) -> CounterValue:
    how = how_combined(counter)
    having = [
        (variants.counted[variant][counter], calls, ns)
        for variant, (calls, ns) in seen.items()
        if counter in variants.counted[variant]
    ]
    covered = sum(ns for _, _, ns in having)
    if not having or (how == "mean by kernel time" and not covered):
        return CounterValue(counter, Missing("none of its kernels was counted"), how, 0)
    return CounterValue(counter, _combined(how, having, covered), how, covered)


def _combined(how: How, having: Sequence[tuple[float, int, int]], covered: int) -> float:
    """One value from those of variants with their calls and nanoseconds."""
    if how == "sum":
        return float(sum(value * calls for value, calls, _ in having))
    if how == "largest":
        return max(value for value, _, _ in having)
    if how == "smallest":
        return min(value for value, _, _ in having)
    return sum(value * ns for value, _, ns in having) / covered

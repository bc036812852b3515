"""Records of NVTX regions in integer nanoseconds, written as regions.json."""

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import Maybe
from llm_perf_opt.traces.events import TraceProblem

REGEX = "regex:"


@dataclass(frozen=True)
class Selection:
    """A filter on names."""

    include: tuple[str, ...] = ()
    """Empty for all."""
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for pattern in (*self.include, *self.exclude):
            _compiled(pattern)

    def takes(self, *spellings: str) -> bool:
        """Return whether an item with these spellings passes the filter."""
        if any(_matches(pattern, spellings) for pattern in self.exclude):
            return False
        return not self.include or any(_matches(pattern, spellings) for pattern in self.include)

    def __str__(self) -> str:
        parts = [
            f"{word} {', '.join(patterns)}" for word, patterns in (("only", self.include), ("without", self.exclude)) if patterns
        ]
        return "; ".join(parts) or "all"


def _matches(pattern: str, spellings: Sequence[str]) -> bool:
    compiled = _compiled(pattern)
    return any(compiled.search(spelling) is not None for spelling in spellings)


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    """Return the compiled pattern: a shell pattern matches the whole name, a regular expression any part of it."""
    remedy = "Write a shell pattern such as *gemm*, or regex: and a regular expression such as regex:gemm|gemv."
    if not pattern.removeprefix(REGEX).strip():
        raise ConfigError(f"The pattern '{pattern}' is empty.", remedy)
    if not pattern.startswith(REGEX):
        return re.compile(r"\A" + fnmatch.translate(pattern))
    try:
        return re.compile(pattern.removeprefix(REGEX))
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"The pattern '{pattern}' is not a regular expression: {error}.", remedy) from error


ALL = Selection()


How = Literal["sum", "mean by kernel time", "largest", "smallest"]


@dataclass(frozen=True)
class KernelTime:
    """One kernel name in one region."""

    name: str
    calls: int
    total_ns: int


@dataclass(frozen=True)
class CounterValue:
    """A hardware counter of a region, combined from counted launches of the same kernels."""

    counter: str
    value: Maybe[float]
    how: How
    """How the kernels' values were combined."""
    covered_ns: int
    """Kernel time of the region that the value covers."""
    unit: str = ""
    """As named by Nsight Compute; empty for a plain number."""
    by_name_ns: int = 0
    """Time within `covered_ns` whose counters are from launches with a different grid."""


@dataclass(frozen=True)
class Region:
    """All instances of one path of ranges. Figures include inner regions unless their name has `self`."""

    path: tuple[str, ...]
    """Labels, outermost first; `DOMAIN@name` if there is a domain."""
    instances: int
    wall_ns: int
    """Host time between begin and end, over all instances."""
    kernels: int
    kernel_ns: int
    """Sum of kernel durations."""
    self_kernels: int
    self_kernel_ns: int
    """Duration of kernels launched outside inner regions."""
    busy_ns: int
    """Time in which its kernels or copies ran, overlaps counted once; summed over devices."""
    copies: int
    """Copies and memsets."""
    copy_ns: int
    launches: int
    """Calls that started work; a CUDA graph replay counts as one."""
    top: tuple[KernelTime, ...]
    counters: tuple[CounterValue, ...] = ()


@dataclass(frozen=True)
class Rest:
    """Kernels outside every region of the table."""

    kernels: int
    kernel_ns: int


@dataclass(frozen=True)
class Reconciliation:
    """Whether the table adds up to the trace."""

    trace_kernel_ns: int
    accounted_ns: int
    """Outermost regions + outside + left out + excluded kernels."""
    difference_ns: int
    share: float
    """The difference / the trace's kernel time."""
    reconciles: bool
    """Whether the difference is within 1 %, and every region is the sum of its own kernels and its inner regions."""


@dataclass(frozen=True)
class RegionGroup:
    """The regions of one process on one device, or of all."""

    process: int | None
    """None for all processes together."""
    process_name: str
    device: int | None
    """None for all devices together, or without device work."""
    device_name: str
    regions: tuple[Region, ...]
    """Each after the region around it."""
    outside: Rest
    """Kernels launched outside any range."""
    left_out: Rest
    """Kernels launched in regions that the filter leaves out, without a region around them in the table."""
    excluded: tuple[KernelTime, ...]
    """Kernels that the filter excludes, with their time; not included in the other figures."""
    check: Reconciliation


@dataclass(frozen=True)
class FreeRange:
    """Start/end ranges of one name. They can overlap, so no total includes them."""

    label: str
    instances: int
    wall_ns: int
    kernels: int
    """Kernels that its process launched while a range was open; if several were open, counted for each."""
    kernel_ns: int


@dataclass(frozen=True)
class RegionReport:
    """The NVTX regions of one trace."""

    complete: bool
    """Whether the trace is complete; if not, there are no groups."""
    aggregate: bool
    """Whether processes and devices are combined."""
    kernel_filter: Selection
    region_filter: Selection
    folded: int
    """Number of regions too deep or too many for the table; their work counts in the region around them."""
    groups: tuple[RegionGroup, ...]
    free: tuple[FreeRange, ...] = ()
    problems: tuple[TraceProblem, ...] = field(default_factory=tuple)
    notes: tuple[str, ...] = ()
    """Notes on the counters."""

"""What is said about NVTX regions: frozen, integer nanoseconds, written as regions.json."""

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
    """Which names to take."""

    include: tuple[str, ...] = ()
    """Empty: all."""
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for pattern in (*self.include, *self.exclude):
            _compiled(pattern)

    def takes(self, *spellings: str) -> bool:
        """Whether a thing that goes by these spellings is taken."""
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
    """A shell pattern has to match the whole name, a regular expression any part of it."""
    remedy = "Write a shell pattern such as *gemm*, or regex: and a regular expression such as regex:gemm|gemv."
    if not pattern.removeprefix(REGEX).strip():
        raise ConfigError(f"The pattern '{pattern}' is empty.", remedy)
    if not pattern.startswith(REGEX):
        return re.compile(r"\A" + fnmatch.translate(pattern))
    try:
        return re.compile(pattern.removeprefix(REGEX))
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"The pattern '{pattern}' is no regular expression: {error}.", remedy) from error


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
    """A hardware counter over a region, from launches of the same kernels that were counted one by one."""

    counter: str
    value: Maybe[float]
    how: How
    """How the kernels' values were put together."""
    covered_ns: int
    """Kernel time of the region that the value stands on."""
    unit: str = ""
    """As Nsight Compute names it; empty for a plain number."""
    by_name_ns: int = 0
    """The part of it whose counters are of launches with another grid."""


@dataclass(frozen=True)
class Region:
    """All instances of one path of ranges. Figures include the regions inside it unless they say `self`."""

    path: tuple[str, ...]
    """Labels, outermost first, as `DOMAIN@name` where there is a domain."""
    instances: int
    wall_ns: int
    """Host time between begin and end, over all instances."""
    kernels: int
    kernel_ns: int
    """Sum of kernel durations."""
    self_kernels: int
    self_kernel_ns: int
    """Of kernels launched outside any region inside this one."""
    busy_ns: int
    """Time in which its kernels or copies ran, overlaps counted once; the sum over devices where there are several."""
    copies: int
    """Copies and memsets."""
    copy_ns: int
    launches: int
    """Calls that started work; the replay of a CUDA graph is one."""
    top: tuple[KernelTime, ...]
    counters: tuple[CounterValue, ...] = ()


@dataclass(frozen=True)
class Rest:
    """Kernels that no region in the table holds."""

    kernels: int
    kernel_ns: int


@dataclass(frozen=True)
class Reconciliation:
    """Whether the table adds up to the trace."""

    trace_kernel_ns: int
    accounted_ns: int
    """Outermost regions + outside + left out + excluded."""
    difference_ns: int
    share: float
    """The difference over the trace's kernel time."""
    reconciles: bool
    """Within 1 %, and every region is the sum of itself and the regions inside it."""


@dataclass(frozen=True)
class RegionGroup:
    """The regions of one process on one device, or of all."""

    process: int | None
    """None: all processes together."""
    process_name: str
    device: int | None
    """None: all devices together, or no device work at all."""
    device_name: str
    regions: tuple[Region, ...]
    """Each after the region it lies in."""
    outside: Rest
    """Launched outside any range."""
    left_out: Rest
    """Launched in regions that the filter leaves out, with none around them in the table."""
    excluded: tuple[KernelTime, ...]
    """Kernels that the filter excludes, with their time; in no figure above."""
    check: Reconciliation


@dataclass(frozen=True)
class FreeRange:
    """Start/end ranges of one name. They overlap freely, so they are in no total."""

    label: str
    instances: int
    wall_ns: int
    kernels: int
    """Launched by its process while one was open; by several open at once, counted for each."""
    kernel_ns: int


@dataclass(frozen=True)
class RegionReport:
    """The NVTX regions of one trace."""

    complete: bool
    """Whether the trace may be summed at all; if not, there are no groups."""
    aggregate: bool
    """Processes and devices together."""
    kernel_filter: Selection
    region_filter: Selection
    folded: int
    """Regions too deep or too many for a table: their work counts as that of the region around them."""
    groups: tuple[RegionGroup, ...]
    free: tuple[FreeRange, ...] = ()
    problems: tuple[TraceProblem, ...] = field(default_factory=tuple)
    notes: tuple[str, ...] = ()
    """What is to be said of the counters."""

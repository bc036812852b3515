"""One event model for every profiler's trace: columns of equal length, integer nanoseconds, names by index.

A torch trace and an nsys export become the same `Trace`, so everything after the parsers is written once. Columns, not objects:
a trace holds millions of events. Times are on the trace's own clock; only differences mean something.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
UInt8 = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

NO_NAME = -1
"""In a column of name indices: there is none."""
EARLIEST_NS, LATEST_NS = -(2**60), 2**61
"""The times that every reader accepts for the start and the end of an event; since 1970 they reach from 1933 to 2043. Twice the
difference of two of them fits into 64 bits. An event beyond them is damaged, and named as such."""
MOST_NS = 2**62
"""What the events of a table may last together, so that no sum over some of them is beyond 64 bits."""


class WorkKind(IntEnum):
    """What a device was doing."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2


class RangeKind(IntEnum):
    """How a label was set."""

    PUSH_POP = 0
    """Nested on its thread: NVTX push/pop, record_function."""
    START_END = 1
    """Free: may end on another thread and overlap its siblings."""


C = TypeVar("C", bound="Columns")


@dataclass(frozen=True)
class Columns:
    """Arrays of equal length; a row is one event."""

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in self.columns().items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns of different length: {lengths}")

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def columns(self) -> dict[str, Any]:
        """Name → array, in the order they are declared."""
        return {column.name: getattr(self, column.name) for column in fields(self)}

    def rows(self: C, which: Any) -> C:
        """The rows that a mask or an index array picks, in its order."""
        return type(self)(**{name: column[which] for name, column in self.columns().items()})

    @classmethod
    def none(cls: type[C]) -> C:
        """No rows."""
        return cls(**{column.name: np.empty(0, _DTYPES[str(column.type)]) for column in fields(cls)})


def is_beyond_clocks(start_ns: Int64, end_ns: Int64) -> npt.NDArray[np.bool_]:
    """Per event: whether its times are none that a reader accepts."""
    beyond: npt.NDArray[np.bool_] = (start_ns < EARLIEST_NS) | (start_ns > LATEST_NS) | (end_ns < EARLIEST_NS)
    return beyond | (end_ns > LATEST_NS)


def different(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The different values of a column, in order. By sorting: np.unique hashes, which takes thirty times as long."""
    ranked = np.sort(values)
    kept = np.ones(len(ranked), np.bool_)
    kept[1:] = ranked[1:] != ranked[:-1]
    return ranked[kept]


def different_pairs(first: Int64, second: Int64) -> tuple[Int64, Int64]:
    """The different pairs of two columns, such as process and thread, in order."""
    order = np.lexsort((second, first))
    first, second = first[order], second[order]
    kept = np.ones(len(order), np.bool_)
    kept[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    return first[kept], second[kept]


_DTYPES = {"Int64": np.int64, "Int32": np.int32, "UInt8": np.uint8}


@dataclass(frozen=True)
class DeviceWork(Columns):
    """Kernels, copies and memsets, in the order of their start."""

    start_ns: "Int64"
    end_ns: "Int64"
    kind: "UInt8"
    """A WorkKind."""
    name: "Int32"
    process: "Int64"
    device: "Int32"
    stream: "Int64"
    correlation: "Int64"
    """Joins a call of the same process; 0: none is known."""
    graph_node: "Int64"
    """Which node of a CUDA graph; 0: launched by itself."""
    size_bytes: "Int64"
    """Copied or set; -1: not known, or a kernel."""
    grid: "Int64"
    """Blocks in all (x·y·z); 0: not known."""
    block: "Int64"
    """Threads of a block; 0: not known."""


@dataclass(frozen=True)
class HostCalls(Columns):
    """Calls of the CUDA runtime and driver, in the order of their start."""

    start_ns: "Int64"
    end_ns: "Int64"
    name: "Int32"
    process: "Int64"
    thread: "Int64"
    correlation: "Int64"


@dataclass(frozen=True)
class Ranges(Columns):
    """Labels: NVTX ranges and the profiler's user annotations, in the order of their start, the outer first."""

    start_ns: "Int64"
    end_ns: "Int64"
    name: "Int32"
    domain: "Int32"
    """Index of the domain's name, or NO_NAME."""
    kind: "UInt8"
    """A RangeKind."""
    process: "Int64"
    thread: "Int64"


@dataclass(frozen=True)
class Operators(Columns):
    """Framework operators on the host (torch traces only), in the order of their start, the outer first."""

    start_ns: "Int64"
    end_ns: "Int64"
    name: "Int32"
    process: "Int64"
    thread: "Int64"
    shapes: "Int32"
    """Index of the input shapes as the trace spells them, or NO_NAME."""


@dataclass(frozen=True)
class DeviceSamples(Columns):
    """Samples of a device's metrics (nsys only), in the order of their time."""

    time_ns: "Int64"
    device: "Int32"
    metric: "Int32"
    """Index of the metric's name."""
    value: "Int64"
    """As the tool gives it: percent for most, else in the unit that the name tells."""


@dataclass(frozen=True)
class TraceProblem:
    """Something that makes a trace, or a part of it, unfit for a number."""

    id: str
    """A short fixed word: truncated, no_kernels, launches_without_kernels, negative_duration, importer_gave_up …"""
    what: str
    """The fact, with its figures."""
    fatal: bool
    """Whether sums over this trace would be wrong: it is then called incomplete and kept out of them."""
    remedy: str = ""


@dataclass(frozen=True)
class Trace:
    """What one profiler recorded."""

    source: Literal["torch", "nsys"]
    names: Sequence[str]
    work: DeviceWork
    calls: HostCalls
    ranges: Ranges
    operators: Operators
    problems: tuple[TraceProblem, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
    """What the trace says of its making: tool version, device names, command."""
    samples: DeviceSamples = field(default_factory=DeviceSamples.none)
    """Of the devices' metrics while there was work; most traces have none."""

    @property
    def complete(self) -> bool:
        """Whether sums over it may be believed."""
        return not any(problem.fatal for problem in self.problems)

    def name_of(self, index: int) -> str:
        """The name behind an index."""
        return "" if index == NO_NAME else self.names[index]

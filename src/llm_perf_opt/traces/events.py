"""The event model of all traces: columns of equal length, times in integer nanoseconds, names by index.

A torch trace and an nsys export both become a `Trace`, so all code after the parsers is written once. Events are stored in
columns because a trace has millions of them. Times are on the clock of the trace; only differences are meaningful.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from llm_perf_opt.core.errors import ParseError

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
UInt8 = npt.NDArray[np.uint8]
Bool = npt.NDArray[np.bool_]

NO_NAME = -1
"""In a column of name indices: no name."""
EARLIEST_NS, LATEST_NS = -(2**60), 2**61
"""The first and last time that every reader accepts: 1933 and 2043, counted from 1970. Twice the difference of two such times
fits in 64 bits. An event outside is reported as damaged."""
GPUS = "gpus"
"""Key in `Trace.facts`: how many GPUs the recording process could use; absent if the trace does not state it."""
MOST_NS = 2**62
"""The durations of a table add up to less than this, so that no partial sum exceeds 64 bits."""
MOST_NAME_BYTES = 400_000_000
"""The most memory that the distinct texts and long numbers of a trace may take: names, shapes, processes and threads."""
_NAME_ENTRY_BYTES = 120
"""What a text takes besides its own bytes: its number, and its entries in the table and the list of names."""


class NameCodes(dict[str, int]):
    """Name → its index; a new name gets the next one. Raise a ParseError if the texts take more than MOST_NAME_BYTES.

    `source`: the path of the trace, for the error.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source
        self.names: list[str] = []
        self._bytes = 0

    def __missing__(self, name: str) -> int:
        self.count(name)
        self[name] = code = len(self.names)
        self.names.append(name)
        return code

    def count(self, text: str | bytes | int) -> None:
        """Count the memory of a text, or of a long number, that is kept. Raise a ParseError beyond MOST_NAME_BYTES."""
        self._bytes += sys.getsizeof(text) + _NAME_ENTRY_BYTES
        if self._bytes > MOST_NAME_BYTES:
            raise ParseError(
                f"{self._source}: its distinct names, shapes and threads take more than {MOST_NAME_BYTES / 1e6:,.0f} MB; no "
                "program has that many.",
                "Give the original trace of the profiler.",
            )


class WorkKind(IntEnum):
    """The kind of device work."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2


class RangeKind(IntEnum):
    """How a label was set."""

    PUSH_POP = 0
    """Nests on its thread: NVTX push/pop, record_function."""
    START_END = 1
    """May end on another thread and overlap others."""


C = TypeVar("C", bound="Columns")


@dataclass(frozen=True)
class Columns:
    """Arrays of equal length; a row is one event."""

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in self.columns().items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns of different length: {lengths}")

    def __len__(self) -> int:
        return len(getattr(self, _column_names(type(self))[0]))

    def columns(self) -> dict[str, Any]:
        """Return name → array, in the order of declaration."""
        return {name: getattr(self, name) for name in _column_names(type(self))}

    def rows(self: C, which: Any) -> C:
        """Return the rows that a mask or an index array selects, in its order."""
        return type(self)(**{name: column[which] for name, column in self.columns().items()})

    @classmethod
    def none(cls: type[C]) -> C:
        """Return a table without rows."""
        return cls(**{column.name: np.empty(0, _DTYPES[str(column.type)]) for column in fields(cls)})


def _column_names(table: type[Columns]) -> tuple[str, ...]:
    """Return the names of a table's columns; kept, because a trace in many chunks asks for them often."""
    found = _NAMES.get(table)
    if found is None:
        found = _NAMES[table] = tuple(column.name for column in fields(table))
    return found


_NAMES: dict[type[Any], tuple[str, ...]] = {}


def is_beyond_clocks(start_ns: Int64, end_ns: Int64) -> Bool:
    """Return, per event, whether its times are outside what readers accept."""
    beyond: Bool = (start_ns < EARLIEST_NS) | (start_ns > LATEST_NS) | (end_ns < EARLIEST_NS)
    return beyond | (end_ns > LATEST_NS)


def different(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the distinct values of a column, sorted. Sorting is thirty times as fast as np.unique, which hashes."""
    ranked = np.sort(values)
    kept = np.ones(len(ranked), np.bool_)
    kept[1:] = ranked[1:] != ranked[:-1]
    return ranked[kept]


def different_pairs(first: Int64, second: Int64) -> tuple[Int64, Int64]:
    """Return the distinct pairs of two columns, such as process and thread, sorted."""
    order = np.lexsort((second, first))
    first, second = first[order], second[order]
    kept = np.ones(len(order), np.bool_)
    kept[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    return first[kept], second[kept]


_DTYPES = {"Int64": np.int64, "Int32": np.int32, "UInt8": np.uint8}


@dataclass(frozen=True)
class DeviceWork(Columns):
    """Kernels, copies and memsets, sorted by start."""

    start_ns: "Int64"
    end_ns: "Int64"
    kind: "UInt8"
    """A WorkKind."""
    name: "Int32"
    process: "Int64"
    device: "Int32"
    stream: "Int64"
    correlation: "Int64"
    """The same as that of the launching call of this process; 0: unknown."""
    graph_node: "Int64"
    """The node of a CUDA graph; 0: not launched by a graph."""
    size_bytes: "Int64"
    """Bytes copied or set; -1: unknown, or a kernel."""
    grid: "Int64"
    """Total blocks (x·y·z); 0: unknown."""
    block: "Int64"
    """Threads per block; 0: unknown."""


@dataclass(frozen=True)
class HostCalls(Columns):
    """Calls of the CUDA runtime and driver, sorted by start."""

    start_ns: "Int64"
    end_ns: "Int64"
    name: "Int32"
    process: "Int64"
    thread: "Int64"
    correlation: "Int64"


@dataclass(frozen=True)
class Ranges(Columns):
    """Labels: NVTX ranges and user annotations of torch.profiler, sorted by start, outer ranges first."""

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
    """Framework operators on the host (torch traces only), sorted by start, outer operators first."""

    start_ns: "Int64"
    end_ns: "Int64"
    name: "Int32"
    process: "Int64"
    thread: "Int64"
    shapes: "Int32"
    """Index of the input shapes as the trace spells them, or NO_NAME."""


@dataclass(frozen=True)
class DeviceSamples(Columns):
    """Samples of device metrics (nsys only), sorted by time."""

    time_ns: "Int64"
    device: "Int32"
    metric: "Int32"
    """Index of the metric's name."""
    value: "Int64"
    """As nsys reports it: percent for most metrics, otherwise in the unit that the name contains."""


@dataclass(frozen=True)
class Collectives(Columns):
    """What a trace states about its collectives (torch traces only), sorted by start. A collective may have several rows: a label
    and an operator on the host, and a kernel."""

    start_ns: "Int64"
    end_ns: "Int64"
    name: "Int32"
    on_device: "UInt8"
    """1 for a kernel, 0 for a label or an operator on the host."""
    collective: "Int32"
    """Index of the name of the collective, such as `allreduce`, or NO_NAME."""
    process_group: "Int32"
    """Index of the name of the process group, or NO_NAME."""
    group_ranks: "Int32"
    """Index of the ranks of the group as the trace spells them, possibly shortened, or NO_NAME."""
    group_size: "Int64"
    """0: unknown."""
    in_bytes: "Int64"
    """Size of this rank's input; -1: unknown."""
    out_bytes: "Int64"
    sequence: "Int64"
    """The library's number of the collective in its group; -1: unknown."""
    process: "Int64"
    """Of a kernel: its device."""
    thread: "Int64"
    """Of a kernel: its stream."""


@dataclass(frozen=True)
class TraceProblem:
    """A problem that makes a trace, or a part of it, unusable for numbers."""

    id: str
    """A fixed identifier: truncated, no_kernels, launches_without_kernels, negative_duration, importer_gave_up …"""
    what: str
    """The fact, with numbers."""
    fatal: bool
    """Whether sums over this trace would be wrong. Such a trace is incomplete and is not used for sums."""
    remedy: str = ""


@dataclass(frozen=True)
class Trace:
    """What one profiler recorded."""

    source: str
    names: Sequence[str]
    work: DeviceWork
    calls: HostCalls
    ranges: Ranges
    operators: Operators
    problems: tuple[TraceProblem, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
    """What the trace states about the recording: tool version, device names, command."""
    samples: DeviceSamples = field(default_factory=DeviceSamples.none)
    """Samples of device metrics during device work; most traces have none."""
    collectives: Collectives = field(default_factory=Collectives.none)
    """What the trace states about collectives; for one rank of several."""

    @property
    def complete(self) -> bool:
        """Whether no problem makes sums over it wrong."""
        return not any(problem.fatal for problem in self.problems)

    def name_of(self, index: int) -> str:
        """Return the name with an index; empty for NO_NAME."""
        return "" if index == NO_NAME else self.names[index]

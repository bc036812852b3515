"""Events of a torch trace → columns, chunk by chunk. The objects of a chunk are freed before the next is decoded."""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from llm_perf_opt.traces.events import (
    NO_NAME,
    Collectives,
    Columns,
    DeviceWork,
    HostCalls,
    Int32,
    Int64,
    Operators,
    RangeKind,
    Ranges,
    WorkKind,
    is_beyond_clocks,
)
from llm_perf_opt.traces.torch_json.codes import CALLS, LARGEST_NS, MODULE, MODULE_DOMAIN, OPERATORS, PYTHON, RANGES, WORK, Codes
from llm_perf_opt.traces.torch_json.collectives import collective_columns, states_collective
from llm_perf_opt.traces.torch_json.events import EXACT_BELOW_US, AnyEvent, Event, NeedsDigits, UsualEvent

Table = TypeVar("Table", bound=Columns)


@dataclass(frozen=True)
class PartialRead:
    """The events of an array that were read without decoding them."""

    tables: Sequence[Columns]
    """With the numbers of the file's `Codes`."""
    events: int
    """Events read, including those that no table keeps."""
    others: bytes
    """The remaining events, as a JSON array."""


class _Buckets(dict[str, Callable[[AnyEvent], None]]):
    """Category → the list of its events. Events of other categories are dropped; their categories are remembered."""

    def __init__(self, codes: Codes) -> None:
        super().__init__()
        self.lists: dict[str, list[AnyEvent]] = {}
        self._codes = codes
        self._dropped: list[AnyEvent] = []

    def want(self, category: str) -> None:
        self.lists[category] = []
        self[category] = self.lists[category].append

    def __missing__(self, category: str) -> Callable[[AnyEvent], None]:
        if self._codes.pass_over(category):
            self[category] = self._dropped.append
        return self._dropped.append

    def clear_events(self) -> None:
        self._dropped.clear()
        for events in self.lists.values():
            events.clear()


class TorchColumns:
    """Collects chunks of events and returns them as columns."""

    def __init__(self, source: str) -> None:
        self.codes = Codes(source)
        self._buckets = _Buckets(self.codes)
        for category in (*WORK, *CALLS, *OPERATORS, *RANGES, PYTHON):
            self._buckets.want(category)
        self._parts: dict[type[Columns], list[Columns]] = {
            kind: [] for kind in (DeviceWork, HostCalls, Operators, Ranges, Collectives)
        }
        self.unplaced_work = 0
        """The number of device events without a start."""
        self.negative_work = 0
        self.negative_host = 0

    @property
    def names(self) -> list[str]:
        """All names by index."""
        return self.codes.name.names

    @property
    def other_categories(self) -> list[str]:
        """Categories that were skipped."""
        return sorted(self.codes.others - {""})

    def take(self, events: Sequence[AnyEvent]) -> None:
        """Add a chunk of events, or raise and add none."""
        try:
            put = self._buckets
            for event in events:
                put[event.cat](event)
            made = [self._columns(category, bucket) for category, bucket in put.lists.items() if bucket]
            stated = [self._collectives(category, bucket) for category, bucket in put.lists.items() if bucket]
        finally:
            self._buckets.clear_events()
        self.add(part for part in stated if len(part))
        for part, unplaced, negative in made:
            self._parts[type(part)].append(part)
            if isinstance(part, DeviceWork):
                self.unplaced_work += unplaced
                self.negative_work += negative
            else:
                self.negative_host += negative

    def add(self, parts: Iterable[Columns]) -> None:
        """Add tables that were read without decoding, with the numbers of the same codes."""
        for part in parts:
            self._parts[type(part)].append(part)

    def table(self, kind: type[Table]) -> Table:
        """Return all rows of a kind, sorted by start, outer events first."""
        table = self._unsorted(kind)
        columns = table.columns()
        start, end = columns["start_ns"], columns["end_ns"]
        if (start[1:] > start[:-1]).all():  # already sorted, as kernels and calls usually are
            return table
        order = np.argsort(start, kind="stable")
        in_order = start[order]
        if (in_order[1:] == in_order[:-1]).any():  # of events that begin together, the outer comes first
            order = np.lexsort((-end, start))
        return kind(**{name: column[order] for name, column in columns.items()})

    def _unsorted(self, kind: type[Table]) -> Table:
        """Return all rows of a kind in the order of the file, and drop them here."""
        parts = self._parts[kind]
        if not parts:
            return kind.none()
        self._parts[kind] = []
        return kind(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in parts[0].columns()})

    # --- one chunk ------------------------------------------------------------------------------------------------

    def _columns(self, category: str, bucket: list[AnyEvent]) -> tuple[Columns, int, int]:
        events, unplaced = _placed(bucket)
        if category == PYTHON:
            events = [event for event in events if event.name.startswith(MODULE)]
        start = _nanoseconds([event.ts for event in events])
        duration = _nanoseconds([event.dur for event in events])
        negative = int((duration < 0).sum())
        end = start + np.maximum(duration, 0)
        if is_beyond_clocks(start, end).any():
            raise msgspec.ValidationError("a time beyond all clocks")
        code = self.codes.name
        name = _int32(map(code.__getitem__, [event.name for event in events]), len(events))
        if category in WORK:
            return self._work(events, WORK[category], start, end, name), unplaced, negative
        process = self._numbers([event.pid for event in events])
        thread = self._numbers([event.tid for event in events])
        if category in CALLS:
            correlation = _int64([event.args.correlation for event in events])
            return HostCalls(start, end, name, process, thread, correlation), 0, negative
        if category in OPERATORS:
            spelled = _texts([event.args.shapes for event in events])
            shapes = _int32(map(self.codes.shapes.__getitem__, spelled), len(events))
            return Operators(start, end, name, process, thread, shapes), 0, negative
        domain = np.full(len(events), code[MODULE_DOMAIN] if category == PYTHON else NO_NAME, np.int32)
        kind = np.full(len(events), RangeKind.PUSH_POP, np.uint8)
        return Ranges(start, end, name, domain, kind, process, thread), 0, negative

    def _collectives(self, category: str, bucket: list[AnyEvent]) -> Collectives:
        """Return what the events state about collectives."""
        names = {event.name for event in bucket}
        wanted = {name for name in names if states_collective(category, name)}
        events = [event for event in _placed(bucket)[0] if event.name in wanted] if wanted else []
        if not events:
            return Collectives.none()
        start = _nanoseconds([event.ts for event in events])
        end = start + np.maximum(_nanoseconds([event.dur for event in events]), 0)
        return collective_columns(self.codes, events, start, end, on_device=category in WORK)

    def _numbers(self, identities: list[int | str]) -> Int64:
        number = self.codes.identity
        if identities and identities.count(identities[0]) == len(identities):  # usual: one thread of one process does the work
            return np.full(len(identities), number[identities[0]], np.int64)
        return _int64([number[identity] for identity in identities])

    def _work(self, events: list[AnyEvent], kind: WorkKind, start: Int64, end: Int64, name: Int32) -> DeviceWork:
        given = [event.args for event in events]
        if kind is WorkKind.KERNEL:
            grid = _int64([x * y * z for x, y, z in [args.grid for args in given]])
            block = _int64([x * y * z for x, y, z in [args.block for args in given]])
            size = np.full(len(events), -1, np.int64)
        else:
            grid = block = np.zeros(len(events), np.int64)
            size = _int64([args.bytes for args in given])
        device = _int64([args.device for args in given])
        stream = _int64([args.stream for args in given])
        number = self.codes.identity
        for row in np.flatnonzero(device < 0):  # older traces have only the process and the thread
            device[row] = number[events[row].pid]
        for row in np.flatnonzero(stream < 0):
            stream[row] = number[events[row].tid]
        return DeviceWork(
            start_ns=start,
            end_ns=end,
            kind=np.full(len(events), kind, np.uint8),
            name=name,
            process=np.zeros(len(events), np.int64),  # set when all calls are known
            device=np.clip(device, -(2**31), 2**31 - 1).astype(np.int32),
            stream=stream,
            correlation=_int64([args.correlation for args in given]),
            graph_node=_int64([args.graph_node for args in given]),
            size_bytes=size,
            grid=grid,
            block=block,
        )


def _placed(bucket: list[AnyEvent]) -> tuple[list[AnyEvent], int]:
    """Return the events with a duration and a start (usually all), and the number of those without a start."""
    if isinstance(bucket[0], UsualEvent):
        return bucket, 0
    events = [event for event in bucket if event.ph == "X"]
    if isinstance(bucket[0], Event):  # a missing start is NaN, which makes the chunk be decoded as exact events
        return events, 0
    placed = [event for event in events if event.ts is not None]
    return placed, len(events) - len(placed)


def _texts(raws: list[msgspec.Raw]) -> list[bytes]:
    """Return each as bytes. Joining and splitting is twice as fast as one by one; only damaged text contains a zero byte."""
    texts = b"\0".join(raws).split(b"\0")
    return texts if len(texts) == len(raws) else [bytes(raw) for raw in raws]


def _int64(values: list[int]) -> Int64:
    return np.fromiter(values, np.int64, len(values))


def _int32(values: Iterable[int], count: int) -> Int32:
    return np.fromiter(values, np.int32, count)


def _nanoseconds(microseconds: Sequence[Any]) -> Int64:
    """Return the exact integer ns of times in µs, floats or decimals."""
    if not microseconds:
        return np.empty(0, np.int64)
    if isinstance(microseconds[0], float):
        values = np.frombuffer(struct.pack(f"{len(microseconds)}d", *microseconds))  # much faster than np.array
        if not (np.abs(values) < EXACT_BELOW_US).all():
            raise NeedsDigits
        whole_us = np.floor(values)  # separately: rounding the product would lose digits
        return whole_us.astype(np.int64) * 1000 + np.rint((values - whole_us) * 1000.0).astype(np.int64)
    if not all(value.is_finite() and -LARGEST_NS < value < LARGEST_NS for value in microseconds):
        raise msgspec.ValidationError("not a time")
    whole = [int((value * 1000).to_integral_value()) for value in microseconds]
    if any(abs(value) >= LARGEST_NS for value in whole):
        raise msgspec.ValidationError("a time beyond all clocks")
    return np.array(whole, np.int64)

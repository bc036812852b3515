"""Events in the lines that torch writes them in → columns, all of a chunk at once.

What differs from event to event are numbers; the text around them repeats, and each such text is decoded once. An event that is
not written so, or of which a text that is needed does not decode, is handed on as it is. What is not needed is not looked at,
as long as it is no longer than it should be.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod

import msgspec
import numpy as np

from llm_perf_opt.events import NO_NAME, Columns, DeviceWork, HostCalls, Int32, Int64, Operators, RangeKind, Ranges, WorkKind
from llm_perf_opt.parsers.torch_json.codes import CALLS, LARGEST_NS, MODULE, MODULE_DOMAIN, OPERATORS, PYTHON, RANGES, WORK, Codes
from llm_perf_opt.parsers.torch_json.event_chunks import DECODE_FAILURES
from llm_perf_opt.parsers.torch_json.event_lines import EventLines, Room
from llm_perf_opt.parsers.torch_json.events import NO_ARGUMENTS, Arguments
from llm_perf_opt.parsers.torch_json.known_texts import UNREADABLE, KnownTexts, Said
from llm_perf_opt.parsers.torch_json.text_words import Mask, TextWords, word

_CORRELATION = b'"correlation": '
_LEAST_SHARE = 0.5
"""Where fewer events are in these lines, they are not worth looking for."""
_MOST_WIDTHS = 8
_HEADS = [[("cat", str), ("name", str), ("pid", process), ("tid", thread)] for process in (int, str) for thread in (int, str)]


class _Kind(IntEnum):
    """What an event's first line makes it."""

    ANOTHER = 0
    """None of these, or not to be read: left to others."""
    PASSED_OVER = 1
    KERNEL = 2
    CALL = 3
    OPERATOR = 4
    RANGE = 5
    MODULE = 6


_NO_HEAD = (int(_Kind.ANOTHER), 0, 0, 0)


@dataclass(frozen=True)
class Lined:
    """What was read of a chunk."""

    parts: Sequence[Columns]
    events: int
    """Read or passed over."""
    others: bytes
    """The other events, as a JSON array."""


@dataclass(frozen=True)
class _Rows:
    """Events of one kind: which they are, their times, and the row of what their first line says."""

    lines: EventLines
    rows: Int64
    start_ns: Int64
    end_ns: Int64
    head: Int64

    def __len__(self) -> int:
        return len(self.rows)

    def only(self, which: Mask) -> "_Rows":
        if which.all():
            return self
        return _Rows(self.lines, self.rows[which], self.start_ns[which], self.end_ns[which], self.head[which])


class TorchLines:
    """Reads the chunks of one file."""

    def __init__(self, codes: Codes) -> None:
        self._codes = codes
        self._room = Room()
        self._heads = KnownTexts(4, self._head_in)
        self._shapes = KnownTexts(1, self._shapes_in)
        self._calls = KnownTexts(0, _call_in)
        self._places = KnownTexts(2, _place_in)
        self._launches = KnownTexts(3, _launch_in)
        self._widths: list[int] = []
        """How long the text between the first number and the correlation is in the kernels seen."""
        self._makers: dict[_Kind, Callable[[_Rows], tuple[_Rows, Columns]]] = {
            _Kind.KERNEL: self._kernels,
            _Kind.CALL: self._host_calls,
            _Kind.OPERATOR: self._operators,
            _Kind.RANGE: lambda rows: self._ranges(rows, NO_NAME),
            _Kind.MODULE: lambda rows: self._ranges(rows, codes.name[MODULE_DOMAIN]),
        }

    def read(self, array: bytes | memoryview) -> Lined | None:
        """The events of a JSON array, or None where they are not in these lines."""
        lines = self._room.lines(array)
        if lines is None:
            return None
        done = lines.passed_over()
        rows = lines.with_length()
        heads = self._heads.rows(lines.text, *lines.heads(rows))
        kinds = self._heads.column(0)[heads]
        passed = rows[kinds == _Kind.PASSED_OVER]
        done[passed] = lines.is_short(passed)
        kept = kinds > _Kind.PASSED_OVER
        rows, heads, kinds = rows[kept], heads[kept], kinds[kept]
        start, end, sound = lines.times(rows)
        parts = []
        for kind, make in self._makers.items():
            which = np.flatnonzero(sound & (kinds == kind))
            if len(which):
                read, part = make(_Rows(lines, rows[which], start[which], end[which], heads[which]))
                done[read.rows] = True
                parts.append(part)
        count = int(done.sum())
        if count < _LEAST_SHARE * len(done):
            return None
        return Lined(parts, count, lines.array_of(np.flatnonzero(~done)))

    # --- by kind: those that could be read, and their columns ------------------------------------------------------------------

    def _ranges(self, rows: _Rows, domain: int) -> tuple[_Rows, Columns]:
        rows = rows.only(rows.lines.is_short(rows.rows))
        kind = np.full(len(rows), RangeKind.PUSH_POP, np.uint8)
        domains = np.full(len(rows), domain, np.int32)
        return rows, Ranges(rows.start_ns, rows.end_ns, self._name(rows), domains, kind, *self._thread(rows))

    def _operators(self, rows: _Rows) -> tuple[_Rows, Columns]:
        start, end = rows.lines.arguments(rows.rows)
        text = rows.lines.text
        _, count = text.number_before(end)
        said = self._shapes.rows(text, start, np.maximum(end - count, start))
        read = (said != UNREADABLE) & (text.is_whole(end - count, count) | ((count == 0) & (text.bytes[end - 1] != ord(" "))))
        rows = rows.only(read)
        shapes = self._shapes.column(0)[said[read]].astype(np.int32)
        return rows, Operators(rows.start_ns, rows.end_ns, self._name(rows), *self._thread(rows), shapes)

    def _host_calls(self, rows: _Rows) -> tuple[_Rows, Columns]:
        start, end = rows.lines.arguments(rows.rows)
        text = rows.lines.text
        correlation, count = text.number_before(end)
        read = self._calls.rows(text, start, np.maximum(end - count, start)) != UNREADABLE
        read &= text.is_whole(end - count, count)
        rows = rows.only(read)
        return rows, HostCalls(rows.start_ns, rows.end_ns, self._name(rows), *self._thread(rows), correlation[read])

    def _kernels(self, rows: _Rows) -> tuple[_Rows, Columns]:
        lines = rows.lines
        start, end = lines.arguments(rows.rows)
        number = self._correlations(lines, start, end)
        behind = number + lines.text.digits_from(number)
        correlation, count = lines.text.number_before(behind)
        place = self._places.rows(lines.text, start, number)
        launch = self._launches.rows(lines.text, np.minimum(behind, end), end)
        read = (place != UNREADABLE) & (launch != UNREADABLE) & lines.text.is_whole(number, count)
        rows, place, launch = rows.only(read), place[read], launch[read]
        work = DeviceWork(
            start_ns=rows.start_ns,
            end_ns=rows.end_ns,
            kind=np.full(len(rows), WorkKind.KERNEL, np.uint8),
            name=self._name(rows),
            process=np.zeros(len(rows), np.int64),  # known once all calls are
            device=self._places.column(0)[place].astype(np.int32),
            stream=self._places.column(1)[place],
            correlation=correlation[read],
            graph_node=self._launches.column(2)[launch],
            size_bytes=np.full(len(rows), -1, np.int64),
            grid=self._launches.column(0)[launch],
            block=self._launches.column(1)[launch],
        )
        return rows, work

    def _correlations(self, lines: EventLines, start: Int64, end: Int64) -> Int64:
        """Where the kernels' correlations stand; for those where none is found, the start of the arguments."""
        number: Int64 = start.copy()
        sought = np.arange(len(start))
        for width in self._widths:
            sought = _found_at(lines.text, width, sought, start, end, number)
        while len(sought) and len(self._widths) < _MOST_WIDTHS:
            first = int(start[sought[0]])
            place = lines.text.text.find(_CORRELATION, first, int(end[sought[0]]))
            if place < 0:
                sought = sought[1:]
            else:
                self._widths.append(place + len(_CORRELATION) - first)
                sought = _found_at(lines.text, self._widths[-1], sought, start, end, number)
        return number

    def _name(self, rows: _Rows) -> Int32:
        name: Int32 = self._heads.column(1)[rows.head].astype(np.int32)
        return name

    def _thread(self, rows: _Rows) -> tuple[Int64, Int64]:
        return self._heads.column(2)[rows.head], self._heads.column(3)[rows.head]

    # --- what texts say --------------------------------------------------------------------------------------------------------

    def _head_in(self, text: bytes) -> Said:
        """Kind, name, process and thread."""
        try:
            said = msgspec.json.decode(b"{" + text.removesuffix(b",") + b"}")
        except DECODE_FAILURES:
            return _NO_HEAD
        if not text.endswith(b",") or [(key, type(value)) for key, value in said.items()] not in _HEADS:
            return _NO_HEAD
        kind = self._kind(said["cat"], said["name"])
        if kind in (_Kind.ANOTHER, _Kind.PASSED_OVER):
            return kind, 0, 0, 0
        codes = self._codes
        return kind, codes.name[said["name"]], codes.identity[said["pid"]], codes.identity[said["tid"]]

    def _kind(self, category: str, name: str) -> _Kind:
        if category in WORK:
            return _Kind.KERNEL if WORK[category] is WorkKind.KERNEL else _Kind.ANOTHER
        if category in CALLS:
            return _Kind.CALL
        if category in OPERATORS:
            return _Kind.OPERATOR
        if category in RANGES:
            return _Kind.RANGE
        if category == PYTHON:
            return _Kind.MODULE if name.startswith(MODULE) else _Kind.PASSED_OVER
        self._codes.pass_over(category)
        return _Kind.PASSED_OVER

    def _shapes_in(self, text: bytes) -> Said | None:
        said = _arguments(text)
        return None if said is None else (self._codes.shapes[bytes(said.shapes)],)


def _found_at(text: TextWords, width: int, sought: Int64, start: Int64, end: Int64, number: Int64) -> Int64:
    """Set the number's place where the correlation stands so far behind the start; returns those where it does not."""
    at = np.minimum(start[sought] + width, end[sought])
    found = (text.word(at - 15) == word(_CORRELATION[:8])) & (text.word(at - 8) == word(_CORRELATION[7:]))
    number[sought[found]] = at[found]
    left: Int64 = sought[~found]
    return left


_read_arguments = msgspec.json.Decoder(Arguments).decode


def _arguments(text: bytes) -> Arguments | None:
    """What a part of the arguments says, a number before it or at its end left out; None if that is no JSON, or of odd types."""
    before = b'{"":0' if text.startswith(b",") else b"{"
    behind = b"0}" if text.endswith(b": ") else b"}"
    try:
        return _read_arguments(before + text + behind)
    except (*DECODE_FAILURES, OverflowError):
        return None


def _call_in(text: bytes) -> Said | None:
    """Nothing, if the number that follows is the correlation."""
    return () if text.endswith(_CORRELATION) and _arguments(text) is not None else None


def _place_in(text: bytes) -> Said | None:
    """The device and the stream, from what stands before the correlation."""
    said = _arguments(text)
    if said is None or said.device == -1 or said.stream == -1 or _launch(said) != _launch(NO_ARGUMENTS):
        return None
    return (said.device, said.stream) if abs(said.device) < 2**31 and abs(said.stream) < LARGEST_NS else None


def _launch_in(text: bytes) -> Said | None:
    """Blocks, threads in one and the node of the graph, from what stands behind the correlation."""
    said = _arguments(text)
    if said is None or (said.correlation, said.device, said.stream) != (0, -1, -1):
        return None
    launch = _launch(said)
    return launch if all(abs(number) < LARGEST_NS for number in launch) else None


def _launch(said: Arguments) -> tuple[int, int, int]:
    return prod(said.grid), prod(said.block), said.graph_node

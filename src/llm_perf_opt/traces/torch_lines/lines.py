"""Events in the lines that torch writes them in → columns, all of a chunk at once.

What differs from event to event are numbers; the texts between them repeat, and each is decoded once. An event counts as read
only when each of its bytes belongs to such a text or is a digit of such a number; any other event is handed on as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Any

import msgspec
import numpy as np

from llm_perf_opt.traces.events import (
    NO_NAME,
    Columns,
    DeviceWork,
    HostCalls,
    Int32,
    Int64,
    Mask,
    Operators,
    RangeKind,
    Ranges,
    WorkKind,
)
from llm_perf_opt.traces.torch_json.codes import CALLS, LARGEST_NS, MODULE, MODULE_DOMAIN, OPERATORS, PYTHON, RANGES, WORK, Codes
from llm_perf_opt.traces.torch_json.columns import PartialRead
from llm_perf_opt.traces.torch_json.event_chunks import DECODE_FAILURES
from llm_perf_opt.traces.torch_json.events import NO_ARGUMENTS, Arguments
from llm_perf_opt.traces.torch_lines.arrows import Arrows
from llm_perf_opt.traces.torch_lines.event_lines import EventLines, Room
from llm_perf_opt.traces.torch_lines.known_texts import UNREADABLE, KnownTexts, Said
from llm_perf_opt.traces.torch_lines.text_words import TextWords, word

CORRELATION = b'"correlation": '
_READ_ARGUMENTS = msgspec.json.Decoder(Arguments).decode
_HEAD = [("cat", str), ("name", str), ("pid", int), ("tid", int)]


def head_in(text: bytes) -> dict[str, Any] | None:
    """Category, name, process and thread, if these stand there and nothing else does; the latter two as numbers: words get theirs
    in the order of the file."""
    said = _decoded(b"{" + text.removesuffix(b",") + b"}")
    if said is None or not text.endswith(b",") or [(key, type(value)) for key, value in said.items()] != _HEAD:
        return None
    return said if max(abs(said["pid"]), abs(said["tid"])) < LARGEST_NS else None


def plain_in(text: bytes) -> tuple[bytes | None, bool] | None:
    """Of arguments without their first and last number: the shapes of an operator's inputs as they are spelled, if that number is
    none of them; and whether it is the correlation."""
    said = _arguments(text)
    if said is None:
        return None
    cut_off = text.endswith(b": ") and bytes(said.shapes) == b"0"
    return None if cut_off else bytes(said.shapes), _ends_in_correlation(text)


def place_in(text: bytes) -> Said | None:
    """The device and the stream, of what stands before the correlation."""
    said = _arguments(text)
    if said is None or not _ends_in_correlation(text) or _launch(said) != _launch(NO_ARGUMENTS):
        return None
    known = 0 <= said.device < 2**31 and 0 <= said.stream < LARGEST_NS
    return (said.device, said.stream) if known else None


def launch_in(text: bytes) -> Said | None:
    """Blocks, threads of one and the node of the graph, of what stands behind the correlation."""
    if text and (not text.startswith(b",") or text.endswith(b": ")):
        return None
    said = _arguments(text)
    if said is None or {"correlation", "device", "stream"} & set(_keys(text)):
        return None
    launch = _launch(said)
    return launch if all(abs(number) < LARGEST_NS for number in launch) else None


def _closed(text: bytes) -> bytes:
    """An object of it, with a number where one was cut off before it and behind it."""
    before = b'{"":0' if text.startswith(b",") else b"{"
    return before + text + (b"0}" if text.endswith(b": ") else b"}")


def _arguments(text: bytes) -> Arguments | None:
    if _decoded(_closed(text)) is None:  # also what is wrong in values that nobody reads
        return None
    try:
        return _READ_ARGUMENTS(_closed(text))
    except (*DECODE_FAILURES, OverflowError):
        return None


def _decoded(text: bytes) -> dict[str, Any] | None:
    try:
        said: dict[str, Any] = msgspec.json.decode(text)
    except DECODE_FAILURES:
        return None
    return said


def _keys(text: bytes) -> list[str]:
    return list(_decoded(_closed(text)) or ())


def _ends_in_correlation(text: bytes) -> bool:
    return text.endswith(CORRELATION) and _keys(text)[-1:] == ["correlation"]


def _launch(said: Arguments) -> tuple[int, int, int]:
    return prod(said.grid), prod(said.block), said.graph_node


_LEAST_SHARE = 0.5
"""Where fewer events are in these lines, they are not worth looking for."""
_FEWEST = 0.005
"""Fewer events of a kind are decoded faster."""
_MOST_NEW, _TRIED_EVERY = 0.1, 8
"""Where more texts than this share of the events were new, they do not repeat: only one chunk in so many is tried further on."""
_MOST_WIDTHS = 8
_FRAME = (b'      "Python parent id": ', b', "Python id": ', b', "Ev Idx": ')
_MODULE_FRAME = (*_FRAME[:2], b', "Python module id": ', *_FRAME[2:])
"""The arguments of Python's frames, each text before a number."""


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
    FRAME = 7


_UNKEPT = (_Kind.ANOTHER, _Kind.PASSED_OVER, _Kind.FRAME)
_IS_PLAIN = np.isin(np.arange(len(_Kind)), (_Kind.PASSED_OVER, _Kind.CALL, _Kind.OPERATOR, _Kind.RANGE))
_UNSPELLED = -2
"""Shapes of which the last number was cut off."""


@dataclass(frozen=True)
class _Rows:
    """Events of one kind: which they are, their times, and the row of what their first line says."""

    lines: EventLines
    rows: Int64
    start_ns: Int64
    end_ns: Int64
    head: Int64
    said: Int64
    """The row of what the arguments say, and their last number; where they differ in no others."""
    number: Int64

    def __len__(self) -> int:
        return len(self.rows)

    def only(self, which: Mask) -> "_Rows":
        if which.all():
            return self
        columns = (self.rows, self.start_ns, self.end_ns, self.head, self.said, self.number)
        return _Rows(self.lines, *(column[which] for column in columns))


class TorchLines:
    """Reads the chunks of one file."""

    def __init__(self, codes: Codes) -> None:
        self._codes = codes
        self._room = Room()
        self._heads = KnownTexts(4, self._head)
        self._arguments = KnownTexts(2, self._arguments_in)
        self._places = KnownTexts(2, place_in)
        self._launches = KnownTexts(3, launch_in)
        self._arrows = Arrows()
        self._widths: list[int] = []
        """How long the text between the first number and the correlation is in the kernels seen."""
        self._not_tried = 0
        """So many chunks yet."""
        self._makers: dict[_Kind, Callable[[_Rows], tuple[_Rows, Columns | None]]] = {
            _Kind.PASSED_OVER: self._passed_over,
            _Kind.KERNEL: self._kernels,
            _Kind.CALL: self._host_calls,
            _Kind.OPERATOR: self._operators,
            _Kind.RANGE: self._ranges,
            _Kind.MODULE: self._modules,
            _Kind.FRAME: self._frames,
        }

    def read(self, array: bytes | memoryview) -> PartialRead | None:
        """The events of a JSON array, or None where they are not in these lines, or their texts do not repeat."""
        lines = self._room.lines(array) if not self._not_tried else None
        self._not_tried = max(self._not_tried - 1, 0)
        if lines is None:
            return None
        known = self._known()
        done = np.zeros(len(lines), np.bool_)
        arrows = lines.arrows()
        done[arrows] = self._arrows.known(lines.text, *lines.events(arrows))
        rows = lines.with_length()
        heads = self._heads.rows(lines.text, *lines.heads(rows))
        kinds = self._heads.column(0)[heads]
        start, end, sound = lines.times(rows)
        said, number = self._plain(lines, rows, kinds, sound)
        parts = []
        for kind, make in self._makers.items():
            which = np.flatnonzero(sound & (kinds == kind))
            if len(which) > _FEWEST * len(done):
                columns = (rows, start, end, heads, said, number)
                read, part = make(_Rows(lines, *(column[which] for column in columns)))
                done[read.rows] = True
                parts += [] if part is None else [part]
        count = int(done.sum())
        if self._known() - known > _MOST_NEW * len(done):
            self._not_tried = _TRIED_EVERY
        if count < _LEAST_SHARE * len(done):
            return None
        others = _array(lines.text.between(*lines.events(np.flatnonzero(~done))))
        return None if others is None else PartialRead(parts, count, others)

    def _known(self) -> int:
        return sum(texts.new for texts in (self._heads, self._arguments, self._places, self._launches))

    # --- by kind: those that could be read, and their columns ------------------------------------------------------------------

    def _plain(self, lines: EventLines, rows: Int64, kinds: Int64, sound: Mask) -> tuple[Int64, Int64]:
        """Of events whose arguments differ in their first and last number alone: what the rest says, and the last number."""
        said, number = np.full(len(rows), UNREADABLE), np.zeros(len(rows), np.int64)
        which = np.flatnonzero(sound & _IS_PLAIN[kinds])
        start, end = lines.arguments(rows[which])
        number[which], count = lines.text.number_before(end)
        cut = np.maximum(end - count, start)
        bytes_ = lines.text.bytes
        behind_key = (bytes_[cut - 1] == ord(" ")) & (bytes_[cut - 2] == ord(":"))
        whole = np.where(cut < end, lines.text.is_whole(cut, end - cut) & behind_key, bytes_[end - 1] != ord(" "))
        said[which] = np.where(whole, self._arguments.rows(lines.text, start, cut), UNREADABLE)
        return said, number

    def _passed_over(self, rows: _Rows) -> tuple[_Rows, Columns | None]:
        return rows.only(rows.said != UNREADABLE), None

    def _frames(self, rows: _Rows) -> tuple[_Rows, Columns | None]:
        return rows.only(rows.lines.spell(rows.rows, _FRAME)), None

    def _modules(self, rows: _Rows) -> tuple[_Rows, Columns | None]:
        return self._labels(rows.only(rows.lines.spell(rows.rows, _MODULE_FRAME)), self._codes.name[MODULE_DOMAIN])

    def _ranges(self, rows: _Rows) -> tuple[_Rows, Columns | None]:
        return self._labels(rows.only(rows.said != UNREADABLE), NO_NAME)

    def _labels(self, rows: _Rows, domain: int) -> tuple[_Rows, Columns]:
        kind = np.full(len(rows), RangeKind.PUSH_POP, np.uint8)
        domains = np.full(len(rows), domain, np.int32)
        return rows, Ranges(rows.start_ns, rows.end_ns, self._name(rows), domains, kind, *self._thread(rows))

    def _operators(self, rows: _Rows) -> tuple[_Rows, Columns | None]:
        shapes = self._arguments.column(0)[rows.said]
        read = (rows.said != UNREADABLE) & (shapes != _UNSPELLED)
        rows = rows.only(read)
        columns = self._name(rows), *self._thread(rows), shapes[read].astype(np.int32)
        return rows, Operators(rows.start_ns, rows.end_ns, *columns)

    def _host_calls(self, rows: _Rows) -> tuple[_Rows, Columns | None]:
        rows = rows.only((rows.said != UNREADABLE) & (self._arguments.column(1)[rows.said] != 0))
        return rows, HostCalls(rows.start_ns, rows.end_ns, self._name(rows), *self._thread(rows), rows.number)

    def _kernels(self, rows: _Rows) -> tuple[_Rows, Columns | None]:
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
            place = lines.text.text.find(CORRELATION, first, int(end[sought[0]]))
            if place < 0:
                sought = sought[1:]
            else:
                self._widths.append(place + len(CORRELATION) - first)
                sought = _found_at(lines.text, self._widths[-1], sought, start, end, number)
        return number

    def _name(self, rows: _Rows) -> Int32:
        name: Int32 = self._heads.column(1)[rows.head].astype(np.int32)
        return name

    def _thread(self, rows: _Rows) -> tuple[Int64, Int64]:
        return self._heads.column(2)[rows.head], self._heads.column(3)[rows.head]

    # --- what first lines say --------------------------------------------------------------------------------------------------

    def _head(self, text: bytes) -> Said:
        """Kind, name, process and thread."""
        said = head_in(text)
        kind = _Kind.ANOTHER if said is None else self._kind(said["cat"], said["name"])
        if said is None or kind in _UNKEPT:
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
            return _Kind.MODULE if name.startswith(MODULE) else _Kind.FRAME
        self._codes.pass_over(category)
        return _Kind.PASSED_OVER

    def _arguments_in(self, text: bytes) -> Said | None:
        """The shapes, and whether the correlation follows."""
        said = plain_in(text)
        if said is None:
            return None
        spelled, to_correlation = said
        return _UNSPELLED if spelled is None else self._codes.shapes[spelled], int(to_correlation)


_PIECES = msgspec.json.Decoder(list[msgspec.Raw])


def _array(events: list[bytes]) -> bytes | None:
    """A JSON array of these, or None where one of them is not one JSON value: lines are then not what they seem."""
    array = b"[" + b",".join(events) + b"]"
    try:
        pieces = _PIECES.decode(array)
    except DECODE_FAILURES:
        return None
    return array if [len(bytes(piece)) for piece in pieces] == [len(event) for event in events] else None


def _found_at(text: TextWords, width: int, sought: Int64, start: Int64, end: Int64, number: Int64) -> Int64:
    """Set the number's place where the correlation stands so far behind the start; returns those where it does not."""
    at = np.minimum(start[sought] + width, end[sought])
    found = text.word(at - 8) == word(CORRELATION[-8:])
    number[sought[found]] = at[found]
    left: Int64 = sought[~found]
    return left

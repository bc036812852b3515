"""Read events in the line layout of torch into columns, a whole chunk at a time.

Only numbers differ from event to event; the texts between them repeat, and each distinct text is decoded once. An event counts as
read only if each of its bytes belongs to such a text or is a digit of such a number. All other events are returned undecoded.
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
    Bool,
    Columns,
    DeviceWork,
    HostCalls,
    Int32,
    Int64,
    Operators,
    RangeKind,
    Ranges,
    WorkKind,
)
from llm_perf_opt.traces.torch_json.codes import CALLS, LARGEST_NS, MODULE, MODULE_DOMAIN, OPERATORS, PYTHON, RANGES, WORK, Codes
from llm_perf_opt.traces.torch_json.collectives import states_collective
from llm_perf_opt.traces.torch_json.columns import PartialRead
from llm_perf_opt.traces.torch_json.event_chunks import DECODE_FAILURES
from llm_perf_opt.traces.torch_json.events import NO_ARGUMENTS, Arguments
from llm_perf_opt.traces.torch_lines.arrows import Arrows
from llm_perf_opt.traces.torch_lines.event_lines import EventLines, LineBuffer
from llm_perf_opt.traces.torch_lines.known_texts import UNREADABLE, KnownTexts, Values
from llm_perf_opt.traces.torch_lines.text_words import TextWords, word

CORRELATION = b'"correlation": '
_READ_ARGUMENTS = msgspec.json.Decoder(Arguments).decode
_HEAD = [("cat", str), ("name", str), ("pid", int), ("tid", int)]


def head_in(text: bytes) -> dict[str, Any] | None:
    """Return category, name, process and thread if the text has exactly these and the last two are numbers, else None."""
    head = _decoded(b"{" + text.removesuffix(b",") + b"}")
    if head is None or not text.endswith(b",") or [(key, type(value)) for key, value in head.items()] != _HEAD:
        return None
    return head if max(abs(head["pid"]), abs(head["tid"])) < LARGEST_NS else None


def plain_in(text: bytes) -> tuple[bytes | None, bool] | None:
    """Return the shapes as spelled (None if they are the last number) and whether the last number is the correlation.

    The text is the arguments without their first and last number.
    """
    arguments = _arguments(text)
    if arguments is None:
        return None
    cut_off = text.endswith(b": ") and bytes(arguments.shapes) == b"0"
    return None if cut_off else bytes(arguments.shapes), _ends_in_correlation(text)


def place_in(text: bytes) -> Values | None:
    """Return device and stream from the arguments before the correlation."""
    arguments = _arguments(text)
    if arguments is None or not _ends_in_correlation(text) or _launch(arguments) != _launch(NO_ARGUMENTS):
        return None
    known = 0 <= arguments.device < 2**31 and 0 <= arguments.stream < LARGEST_NS
    return (arguments.device, arguments.stream) if known else None


def launch_in(text: bytes) -> Values | None:
    """Return blocks, threads per block and graph node from the arguments after the correlation."""
    if text and (not text.startswith(b",") or text.endswith(b": ")):
        return None
    arguments = _arguments(text)
    if arguments is None or {"correlation", "device", "stream"} & set(_keys(text)):
        return None
    launch = _launch(arguments)
    return launch if all(abs(number) < LARGEST_NS for number in launch) else None


def _closed(text: bytes) -> bytes:
    """Return the text as a JSON object, with a number where one was cut off at its start or end."""
    before = b'{"":0' if text.startswith(b",") else b"{"
    return before + text + (b"0}" if text.endswith(b": ") else b"}")


def _arguments(text: bytes) -> Arguments | None:
    if _decoded(_closed(text)) is None:  # detects errors in values that are not read, too
        return None
    try:
        return _READ_ARGUMENTS(_closed(text))
    except (*DECODE_FAILURES, OverflowError):
        return None


def _decoded(text: bytes) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = msgspec.json.decode(text)
    except DECODE_FAILURES:
        return None
    return found


def _keys(text: bytes) -> list[str]:
    return list(_decoded(_closed(text)) or ())


def _ends_in_correlation(text: bytes) -> bool:
    return text.endswith(CORRELATION) and _keys(text)[-1:] == ["correlation"]


def _launch(arguments: Arguments) -> tuple[int, int, int]:
    return prod(arguments.grid), prod(arguments.block), arguments.graph_node


_LEAST_SHARE = 0.5
"""With a smaller share of events in this layout, the chunk is decoded as JSON."""
_FEWEST = 0.005
"""A smaller share of events of a kind is decoded faster as JSON."""
_MOST_NEW, _TRIED_EVERY = 0.1, 8
"""If more texts than this share of the events were new, texts do not repeat: then only every eighth chunk is tried."""
_MOST_WIDTHS = 8
_FRAME = (b'      "Python parent id": ', b', "Python id": ', b', "Ev Idx": ')
_MODULE_FRAME = (*_FRAME[:2], b', "Python module id": ', *_FRAME[2:])
"""The arguments of Python frames: the text before each number."""


class _Kind(IntEnum):
    """The kind of an event, from its head."""

    ANOTHER = 0
    """Another kind, or unreadable: decoded as JSON."""
    SKIPPED = 1
    KERNEL = 2
    CALL = 3
    OPERATOR = 4
    RANGE = 5
    MODULE = 6
    FRAME = 7


_UNKEPT = (_Kind.ANOTHER, _Kind.SKIPPED, _Kind.FRAME)
_IS_PLAIN = np.isin(np.arange(len(_Kind)), (_Kind.SKIPPED, _Kind.CALL, _Kind.OPERATOR, _Kind.RANGE))
_UNSPELLED = -2
"""Shapes whose last number was cut off."""


@dataclass(frozen=True)
class _Rows:
    """Events of one kind: their rows, times and heads."""

    lines: EventLines
    rows: Int64
    start_ns: Int64
    end_ns: Int64
    head: Int64
    """The row of the head in the known heads."""
    arguments: Int64
    """The row of the arguments in the known arguments, if they differ only in their first and last number."""
    number: Int64
    """The last number of the arguments."""

    def __len__(self) -> int:
        return len(self.rows)

    def only(self, which: Bool) -> "_Rows":
        if which.all():
            return self
        columns = (self.rows, self.start_ns, self.end_ns, self.head, self.arguments, self.number)
        return _Rows(self.lines, *(column[which] for column in columns))


class TorchLines:
    """Reads the chunks of one file (a `FastReader`)."""

    def __init__(self, codes: Codes) -> None:
        self._codes = codes
        self._buffer = LineBuffer()
        self._heads = KnownTexts(4, self._head)
        self._arguments = KnownTexts(2, self._arguments_in)
        self._places = KnownTexts(2, place_in)
        self._launches = KnownTexts(3, launch_in)
        self._arrows = Arrows()
        self._widths: list[int] = []
        """The lengths of the text between the first number and the correlation in the kernels so far."""
        self._chunks_to_skip = 0
        self._makers: dict[_Kind, Callable[[_Rows], tuple[_Rows, Columns | None]]] = {
            _Kind.SKIPPED: self._skipped,
            _Kind.KERNEL: self._kernels,
            _Kind.CALL: self._host_calls,
            _Kind.OPERATOR: self._operators,
            _Kind.RANGE: self._ranges,
            _Kind.MODULE: self._modules,
            _Kind.FRAME: self._frames,
        }

    def read(self, array: bytes | memoryview) -> PartialRead | None:
        """Return the events of a JSON array, or None if they are not in this layout or their texts do not repeat."""
        lines = self._buffer.lines(array) if not self._chunks_to_skip else None
        self._chunks_to_skip = max(self._chunks_to_skip - 1, 0)
        if lines is None:
            return None
        known = self._known()
        done = np.zeros(len(lines), np.bool_)
        arrows = lines.arrows()
        done[arrows] = self._arrows.known(lines.text, *lines.events(arrows))
        rows = lines.with_duration()
        heads = self._heads.rows(lines.text, *lines.heads(rows))
        kinds = self._heads.column(0)[heads]
        start, end, valid = lines.times(rows)
        arguments, number = self._plain(lines, rows, kinds, valid)
        tables = []
        for kind, make in self._makers.items():
            which = np.flatnonzero(valid & (kinds == kind))
            if len(which) > _FEWEST * len(done):
                columns = (rows, start, end, heads, arguments, number)
                read, table = make(_Rows(lines, *(column[which] for column in columns)))
                done[read.rows] = True
                tables += [] if table is None else [table]
        count = int(done.sum())
        if self._known() - known > _MOST_NEW * len(done):
            self._chunks_to_skip = _TRIED_EVERY
        if count < _LEAST_SHARE * len(done):
            return None
        others = _array(lines.text.between(*lines.events(np.flatnonzero(~done))))
        return None if others is None else PartialRead(tables, count, others)

    def _known(self) -> int:
        return sum(texts.new for texts in (self._heads, self._arguments, self._places, self._launches))

    # --- by kind: return the events that could be read, and their columns ------------------------------------------------------

    def _plain(self, lines: EventLines, rows: Int64, kinds: Int64, valid: Bool) -> tuple[Int64, Int64]:
        """Return the known arguments and the last number of events whose arguments differ only in their first and last number."""
        arguments, number = np.full(len(rows), UNREADABLE), np.zeros(len(rows), np.int64)
        which = np.flatnonzero(valid & _IS_PLAIN[kinds])
        start, end = lines.arguments(rows[which])
        number[which], count = lines.text.number_before(end)
        cut = np.maximum(end - count, start)
        bytes_ = lines.text.bytes
        after_key = (bytes_[cut - 1] == ord(" ")) & (bytes_[cut - 2] == ord(":"))
        whole = np.where(cut < end, lines.text.is_whole(cut, end - cut) & after_key, bytes_[end - 1] != ord(" "))
        arguments[which] = np.where(whole, self._arguments.rows(lines.text, start, cut), UNREADABLE)
        return arguments, number

    def _skipped(self, rows: _Rows) -> tuple[_Rows, Columns | None]:
        return rows.only(rows.arguments != UNREADABLE), None

    def _frames(self, rows: _Rows) -> tuple[_Rows, Columns | None]:
        return rows.only(rows.lines.spell(rows.rows, _FRAME)), None

    def _modules(self, rows: _Rows) -> tuple[_Rows, Columns | None]:
        return self._labels(rows.only(rows.lines.spell(rows.rows, _MODULE_FRAME)), self._codes.name[MODULE_DOMAIN])

    def _ranges(self, rows: _Rows) -> tuple[_Rows, Columns | None]:
        return self._labels(rows.only(rows.arguments != UNREADABLE), NO_NAME)

    def _labels(self, rows: _Rows, domain: int) -> tuple[_Rows, Columns]:
        kind = np.full(len(rows), RangeKind.PUSH_POP, np.uint8)
        domains = np.full(len(rows), domain, np.int32)
        return rows, Ranges(rows.start_ns, rows.end_ns, self._name(rows), domains, kind, *self._thread(rows))

    def _operators(self, rows: _Rows) -> tuple[_Rows, Columns | None]:
        shapes = self._arguments.column(0)[rows.arguments]
        read = (rows.arguments != UNREADABLE) & (shapes != _UNSPELLED)
        rows = rows.only(read)
        columns = self._name(rows), *self._thread(rows), shapes[read].astype(np.int32)
        return rows, Operators(rows.start_ns, rows.end_ns, *columns)

    def _host_calls(self, rows: _Rows) -> tuple[_Rows, Columns | None]:
        rows = rows.only((rows.arguments != UNREADABLE) & (self._arguments.column(1)[rows.arguments] != 0))
        return rows, HostCalls(rows.start_ns, rows.end_ns, self._name(rows), *self._thread(rows), rows.number)

    def _kernels(self, rows: _Rows) -> tuple[_Rows, Columns | None]:
        lines = rows.lines
        start, end = lines.arguments(rows.rows)
        number = self._correlations(lines, start, end)
        after = number + lines.text.digits_from(number)
        correlation, count = lines.text.number_before(after)
        place = self._places.rows(lines.text, start, number)
        launch = self._launches.rows(lines.text, np.minimum(after, end), end)
        read = (place != UNREADABLE) & (launch != UNREADABLE) & lines.text.is_whole(number, count)
        rows, place, launch = rows.only(read), place[read], launch[read]
        work = DeviceWork(
            start_ns=rows.start_ns,
            end_ns=rows.end_ns,
            kind=np.full(len(rows), WorkKind.KERNEL, np.uint8),
            name=self._name(rows),
            process=np.zeros(len(rows), np.int64),  # set when all calls are known
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
        """Return the position of the correlation of each kernel, or the start of its arguments if it has none."""
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

    # --- reading new texts -----------------------------------------------------------------------------------------------------

    def _head(self, text: bytes) -> Values:
        """Return kind, name, process and thread."""
        head = head_in(text)
        kind = _Kind.ANOTHER if head is None else self._kind(head["cat"], head["name"])
        if head is None or kind in _UNKEPT:
            return kind, 0, 0, 0
        codes = self._codes
        return kind, codes.name[head["name"]], codes.identity[head["pid"]], codes.identity[head["tid"]]

    def _kind(self, category: str, name: str) -> _Kind:
        if states_collective(category, name):
            return _Kind.ANOTHER  # few, and more of their arguments is read
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
        return _Kind.SKIPPED

    def _arguments_in(self, text: bytes) -> Values | None:
        """Return the shapes, and whether the correlation follows."""
        found = plain_in(text)
        if found is None:
            return None
        spelled, to_correlation = found
        return _UNSPELLED if spelled is None else self._codes.shapes[spelled], int(to_correlation)


_PIECES = msgspec.json.Decoder(list[msgspec.Raw])


def _array(events: list[bytes]) -> bytes | None:
    """Return a JSON array of events, or None if one of them is not a single JSON value: the layout is then another one."""
    array = b"[" + b",".join(events) + b"]"
    try:
        pieces = _PIECES.decode(array)
    except DECODE_FAILURES:
        return None
    return array if [len(bytes(piece)) for piece in pieces] == [len(event) for event in events] else None


def _found_at(text: TextWords, width: int, sought: Int64, start: Int64, end: Int64, number: Int64) -> Int64:
    """Set the position of the correlation where it is `width` after the start. Return the rows where it is not."""
    at = np.minimum(start[sought] + width, end[sought])
    found = text.word(at - 8) == word(CORRELATION[-8:])
    number[sought[found]] = at[found]
    left: Int64 = sought[~found]
    return left

"""Split the array of events of a trace file into chunks of whole events, so that a file of any size needs little memory.

Events are separated by `}, {"word":`. A JSON string cannot contain that text, because its quotes would be escaped. The arguments
of an event can, between the objects of an array; a chunk that is cut there does not decode, and is then extended.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.traces.events import Int64
from llm_perf_opt.traces.torch_json.damaged_text import event_ends, repaired

CHUNK_BYTES = 2 << 20
"""Small enough for the cache of the processor, which makes decoding a third faster; large enough for numpy."""
LARGEST_EVENT_BYTES = 8 << 20
"""A longer piece that does not decode is damaged, not one event. Its objects may take fifty times as much memory."""
_ENDS_TRIED = 8
"""Possible ends of the last complete event of a truncated file."""
_KEYS_TRIED = 16
"""Keys named traceEvents in inner objects before the one of the events."""
MOST_LOST, _LOST_SHARE = 50_000, 10
"""A file with more unreadable events than this, and more than a tenth of the readable ones, is refused: each takes as long as
hundreds of readable ones."""
_LONGEST_BEGINNING = 64
"""Bytes of the key of the array and its bracket, with whitespace."""
LARGEST_HEAD_BYTES = 64 << 20
LARGEST_EDGE_BYTES = 4 << 20
"""The text before and after the events is decoded up to this size, as its objects take much memory too."""

BOUNDARY = re.compile(rb'\}\s*,\s*(?=\{\s*"\w+"\s*:)')
"""Between two events, judged by bytes alone."""
_EMPTY_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{\s*\})")
"""Before an empty event. Searched only if there is no other boundary, as texts may contain it too."""
_ARRAY_BEGINS = re.compile(rb'"traceEvents"\s*:\s*\[')
_AFTER_ARRAY = re.compile(rb'\s*(?:,\s*"|\}|\Z)')
_ARRAY_ENDS = re.compile(rb"\s*\]")
_BYTE = re.compile(r"\(byte (\d+)\)")
_LONGEST_ESCAPE = len(b"\\u0000]") + 1
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")

NOT_A_TRACE = "Give a trace that torch.profiler exported: .json, .json.gz or a zip of one."
DECODE_FAILURES = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True)
class Surroundings:
    """The values before and after the events of a trace file."""

    before: dict[str, Any]
    after: dict[str, Any]
    readable: bool
    """Whether both are readable."""


@dataclass(frozen=True)
class _Fed:
    """The result of feeding a piece."""

    used: bool
    after: bytes | None = None
    """The text after the array, if it ended in the piece."""
    cut_inside: bool = False
    """The piece ends inside an event."""


ReadInto = Callable[[memoryview], int]
"""Reads the next bytes of a file into a buffer, which may be filled partly. Returns their number, 0 at the end."""
Decode = Callable[[bytes | memoryview], int]
"""Keeps all events of a JSON array and returns their number, or keeps none and raises one of DECODE_FAILURES."""

Count = Callable[[int], None]
"""Receives the number of events as they are decoded. Raises an error if they are too many for the file."""


class EventChunks:
    """Passes the events of a file to a decoder, chunk by chunk."""

    def __init__(self, name: str, read: ReadInto, decode: Decode, count: Count = lambda _: None) -> None:
        self.name = name
        self.events = 0
        self.cut_short = False
        """The file ends before its events do."""
        self.unreadable = 0
        """Events that could not be decoded."""
        self.repaired = 0
        """Pieces that were not JSON until they were repaired."""
        self._read = read
        self._decode = decode
        self._count = count
        self._seen = 0

    def run(self) -> Surroundings:
        """Read the whole file."""
        before, buffer = self._head()
        after = self._events(buffer)
        return _surroundings(before, after, self.cut_short)

    # --- before the events ----------------------------------------------------------------------------------------

    def _more(self, size: int) -> bytes:
        buffer = bytearray(size)
        with memoryview(buffer) as view:
            count = _fill(self._read, view)
        self._seen += count
        del buffer[count:]
        return bytes(buffer)

    def _head(self) -> tuple[bytes, bytes]:
        """Return the text before the array, and the first bytes inside it."""
        buffer = self._more(CHUNK_BYTES).removeprefix(b"\xef\xbb\xbf")
        start = buffer.lstrip()[:1]
        if start == b"[":  # a Chrome trace may be the array alone
            return b"", buffer.lstrip()[1:]
        if start != b"{":
            why = f"it begins with {buffer[:12]!r}" if buffer.strip() else "it is empty"
            raise ParseError(f"{self.name} is not a torch trace: {why}.", NOT_A_TRACE)
        searched = tried = 0
        while True:
            for match in _ARRAY_BEGINS.finditer(buffer, searched):
                if not _is_inside_an_object(buffer[: match.start()]):
                    return buffer[: match.start()], buffer[match.end() :]
                searched = match.end()
                tried += 1
                if tried == _KEYS_TRIED:
                    why = f"its first {tried} keys named traceEvents are in inner objects"
                    raise ParseError(f"{self.name} is not a torch trace: {why}.", NOT_A_TRACE)
            data = self._more(max(CHUNK_BYTES, len(buffer))) if len(buffer) < LARGEST_HEAD_BYTES else b""
            if not data:
                raise ParseError(f"{self.name} is not a torch trace: {_why_no_events(buffer, self._seen)}.", NOT_A_TRACE)
            searched = max(searched, len(buffer) - _LONGEST_BEGINNING)
            buffer += data

    # --- the events -----------------------------------------------------------------------------------------------

    def _events(self, first: bytes) -> bytes:
        """Feed every event, and return the text after the array."""
        window = _Window(first)
        wanted = CHUNK_BYTES
        ended = False
        while True:
            cut = window.end if ended else window.last_boundary()
            if cut is not None and cut > 1:
                fed = self._feed(window, cut, last=ended)
                if fed.after is not None:
                    return fed.after + window.between(cut, window.end) + self._more(LARGEST_EDGE_BYTES)
                if fed.used:
                    window.drop(cut)
                    wanted = CHUNK_BYTES
            if ended:
                self.cut_short = True
                return b""
            most = LARGEST_EVENT_BYTES + CHUNK_BYTES
            if window.end > most:
                raise ParseError(
                    f"{self.name} is damaged: no event ends in the {window.end:,} bytes before byte {self._seen:,}.", NOT_A_TRACE
                )
            if window.end > wanted // 2:  # a piece that ends inside an event grows by doubling
                wanted = min(2 * window.end, most + 1 - window.end)
            count = window.fill(self._read, wanted)
            self._seen += count
            ended = not count

    def _feed(self, window: "_Window", cut: int, last: bool) -> _Fed:
        """Decode a piece: unchanged, else repaired, else in parts, so that one bad event loses only that event."""
        try:
            self._keep(window.decode(self._decode, cut))
            return _Fed(True)
        except DECODE_FAILURES:
            piece = window.between(1, cut).rstrip(b", \t\r\n")  # a file may end after the comma of a complete event
        fed = self._attempt(piece)
        if fed.used or (fed.cut_inside and not last and len(piece) <= LARGEST_EVENT_BYTES):
            return fed
        if fed.cut_inside and last and self._take_complete_events(piece):
            return _Fed(True)
        fed = self._attempt_repaired(piece)
        return fed if fed.used else self._part_by_part(piece, last)

    def _keep(self, events: int) -> None:
        self.events += events
        self._count(events)

    def _attempt_repaired(self, piece: bytes) -> _Fed:
        fed = self._attempt(repaired(piece))
        self.repaired += fed.used
        return fed

    def _attempt(self, piece: bytes) -> _Fed:
        """Decode all events of the piece, or all up to the end of the array if the piece contains it."""
        text = b"[" + piece + b"]"
        why = self._failure(text)
        if not why:
            return _Fed(True)
        end = _array_end(text, why)
        if end is not None and _AFTER_ARRAY.match(text, end, len(text) - 1):
            why = self._failure(text[:end])
            if not why:
                return _Fed(True, text[end:-1])
        return _Fed(False, cut_inside=_fails_at_its_end(text, why))

    def _failure(self, text: bytes) -> str:
        """Decode an array. Return why that fails, or an empty string; not the error, which would keep the text in memory."""
        try:
            self._keep(self._decode(text))
        except DECODE_FAILURES as error:
            return str(error) or type(error).__name__
        return ""

    def _part_by_part(self, piece: bytes, last: bool) -> _Fed:
        """Decode what is readable in a piece: halve parts that do not decode, down to single events, and repair these."""
        starts, ends = _single_events(piece)
        lost = 0
        fed = _Fed(True)
        part = b""
        waiting = [(0, len(starts))]
        while waiting:
            low, high = waiting.pop()
            part = piece[starts[low] : ends[high - 1]]
            is_whole = high - low == len(starts)  # that was tried already
            fed = _Fed(False) if is_whole else self._attempt(part)
            if not fed.used and high - low > 1:
                middle = (low + high) // 2
                waiting += [(middle, high), (low, middle)]
                continue
            if not fed.used and not is_whole:
                fed = self._attempt_repaired(part)
            if fed.after is not None:
                fed = _Fed(True, fed.after + piece[ends[high - 1] :])
                break
            lost += not fed.used
            if self.unreadable + lost > max(MOST_LOST, self.events // _LOST_SHARE):
                what = f"more than {self.unreadable + lost - 1:,} of its events cannot be read, and {self.events:,} can"
                raise ParseError(f"{self.name} is damaged: {what}.", NOT_A_TRACE)
        if last and not fed.used:
            fed = _Fed(False, _after_damage(part))
            if fed.after is None:
                lost -= 1  # the end of the file truncated this one
                self._take_complete_events(part)
        self.unreadable += lost
        return _Fed(True, fed.after)

    def _take_complete_events(self, piece: bytes) -> bool:
        """Decode the events before the truncated last one: the longest part that ends with an event and decodes.

        Return whether that succeeded or there are none.
        """
        ends = event_ends(piece)
        return not len(ends) or any(self._attempt(piece[:end]).used for end in ends[: -_ENDS_TRIED - 1 : -1].tolist())


def _surroundings(before: bytes, after: bytes, cut_short: bool) -> Surroundings:
    """Decode the text before and after the events; both are empty if the array is the whole file."""
    head = _object(before + b'"":0}') if before else {}
    tail = _object(b'{"":0' + after) if before and not cut_short else {}
    if before and tail is None:
        tail = _object(repaired(b'{"":0' + after))
    return Surroundings(head or {}, tail or {}, head is not None and tail is not None)


class _Window:
    """The current bytes after a `[`, in one buffer: allocating megabytes for every chunk takes as long as decoding it."""

    def __init__(self, first: bytes) -> None:
        self.end = 1 + len(first)
        self._buffer = bytearray(self.end + 2 * CHUNK_BYTES)
        self._buffer[: self.end] = b"[" + first

    def fill(self, read: ReadInto, wanted: int) -> int:
        """Append up to `wanted` bytes and return their number."""
        if self.end + wanted >= len(self._buffer):  # one byte stays free for a closing bracket
            self._buffer = self._buffer[: self.end] + bytes(2 * wanted + self.end)
        with memoryview(self._buffer) as buffer:
            count = _fill(read, buffer[self.end : self.end + wanted])
        self.end += count
        return count

    def last_boundary(self) -> int | None:
        """Return the end of the last complete event."""
        return self._last(BOUNDARY) or self._last(_EMPTY_BOUNDARY)

    def _last(self, boundary: "re.Pattern[bytes]") -> int | None:
        width = 1 << 13
        while True:
            start = max(0, self.end - width)
            last = None
            for last in boundary.finditer(self._buffer, start, self.end):  # noqa: B007 - the last one is wanted
                pass
            if last is not None:
                return last.start() + 1
            if start == 0:
                return None
            width *= 8

    def decode(self, decode: Decode, cut: int) -> int:
        """Decode the bytes up to the cut as a closed array, without copying them."""
        following = self._buffer[cut]
        self._buffer[cut] = ord("]")
        try:
            return decode(memoryview(self._buffer)[: cut + 1])
        finally:
            self._buffer[cut] = following

    def between(self, start: int, end: int) -> bytes:
        """Return a copy of some bytes."""
        return bytes(self._buffer[start:end])

    def drop(self, cut: int) -> None:
        """Remove the bytes before the cut, and the comma after it."""
        rest = bytes(self._buffer[cut : self.end]).lstrip(b", \t\r\n")
        self._buffer[1 : 1 + len(rest)] = rest
        self.end = 1 + len(rest)


def _single_events(piece: bytes) -> tuple[Int64, Int64]:
    """Return where single events begin and end, judged by bytes alone."""
    between = np.fromiter((place for match in BOUNDARY.finditer(piece) for place in match.span()), np.int64).reshape(-1, 2)
    return np.append(0, between[:, 1]), np.append(between[:, 0] + 1, len(piece))


def _fill(read: ReadInto, buffer: memoryview) -> int:
    """Fill a buffer with the next bytes of a file. Return their number, which is less than its size only at the end."""
    count = 0
    while count < len(buffer) and (more := read(buffer[count:])):
        count += more
    return count


def _array_end(text: bytes, why: str) -> int | None:
    """Return the end of the array if text follows it; the decoder reports about the first byte after it."""
    found = _TRAILING.search(why)
    if not found:
        return None
    for follows in (int(found.group(1)) - 1, int(found.group(1))):
        end = text.rfind(b"]", 0, follows) + 1
        if end and not text[end:follows].strip():
            return end
    return None


def _after_damage(part: bytes) -> bytes | None:
    """Return the text after the array if its last event is damaged and the brackets show that the array ends after it."""
    ends = event_ends(part)
    closed = _ARRAY_ENDS.match(part, int(ends[-1])) if len(ends) else None
    return part[closed.end() :] if closed and _AFTER_ARRAY.match(part, closed.end()) else None


def _fails_at_its_end(text: bytes, why: str) -> bool:
    """Return whether the text only ends too early: in a value, or in an escape that the appended bracket then breaks."""
    found = _BYTE.search(why)
    return "truncated" in why or (found is not None and int(found.group(1)) >= len(text) - _LONGEST_ESCAPE)


def _is_inside_an_object(before: bytes) -> bool:
    """Return whether a key after this text would be in an inner object; False if the text is not JSON at all."""
    try:
        msgspec.json.decode(before + b'"":0}', type=msgspec.Raw)
    except DECODE_FAILURES as error:
        return "truncated" in str(error)
    return False


def _object(text: bytes) -> dict[str, Any] | None:
    if len(text) > LARGEST_EDGE_BYTES:
        return None
    try:
        found = msgspec.json.decode(text)
    except DECODE_FAILURES:
        return None
    return found if isinstance(found, dict) else None


def _why_no_events(buffer: bytes, seen: int) -> str:
    found = _object(buffer)
    if found is None:
        return f"its first {seen:,} bytes have no list of traceEvents"
    return f"it is JSON without a list of traceEvents; its keys are {', '.join(list(found)[:8]) or 'none'}"

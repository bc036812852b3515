"""The big array of a trace file, cut into chunks of whole events by looking at the bytes: a file of any size in little memory.

Where one event ends and the next begins, `}, {"word":` stands. Inside a JSON string that text cannot stand, because its quotes
would be escaped, and after a string's closing quote no word can follow. It may still stand inside an event, between objects of an
array among its arguments; a chunk cut there does not decode, and is then read further.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.traces.events import Int64
from llm_perf_opt.traces.torch_json.brackets import event_ends

CHUNK_BYTES = 4 << 20
"""Small enough for the processor's cache, which makes decoding a third faster than in one piece; large enough for numpy."""
LARGEST_EVENT_BYTES = 8 << 20
"""A longer stretch that does not decode is damaged, not one event. Its objects may take fifty times as much memory."""
_PARTS_TRIED = 8
"""Beginnings of an event that the file's end cut in two."""
_KEYS_TRIED = 16
"""Keys called traceEvents in inner objects before that of the events."""
MOST_LOST, _LOST_SHARE = 50_000, 10
"""Where more events than this and than a tenth of those that could be read cannot, the file is refused: each costs as much as
hundreds that can."""
_LONGEST_BEGINNING = 64
"""Bytes between the key of the array and its bracket, with what whitespace a writer may put there."""
LARGEST_HEAD_BYTES = 64 << 20
LARGEST_EDGE_BYTES = 4 << 20
"""What stands before or behind the events is decoded up to this size: its objects, too, take much memory."""

BOUNDARY = re.compile(rb'\}\s*,\s*(?=\{\s*"\w+"\s*:)')
"""Between two events, as far as bytes can tell."""
_EMPTY_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{\s*\})")
"""Before an event that says nothing; looked for only where there is no other, as texts hold it too."""
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
    """What a trace file holds around its events."""

    before: dict[str, Any]
    after: dict[str, Any]
    readable: bool
    """Whether both could be read."""


@dataclass(frozen=True)
class _Fed:
    """What became of a piece."""

    used: bool
    after: bytes | None = None
    """What follows the array, if it ended in the piece."""
    cut_inside: bool = False
    """The piece ends inside an event."""


ReadInto = Callable[[memoryview], int]
"""Fills some room, or a part of it, with a file's next bytes; returns how many, none at the end."""
Decode = Callable[[bytes | memoryview], int]
"""Takes a JSON array of events and keeps them, all or none; returns how many. Raises one of DECODE_FAILURES."""


class EventChunks:
    """Feeds the events of a file to a decoder, chunk by chunk."""

    def __init__(self, name: str, read: ReadInto, decode: Decode, repair: Callable[[bytes], bytes]) -> None:
        self.name = name
        self.events = 0
        self.cut_short = False
        """The file ends before its events do."""
        self.unreadable = 0
        """Events that no decoder could read."""
        self.repaired = 0
        """Chunks that were no JSON until they were mended."""
        self._read = read
        self._decode = decode
        self._repair = repair
        self._seen = 0

    def run(self) -> Surroundings:
        """Read it all."""
        before, buffer = self._head()
        after = self._events(buffer)
        return _surroundings(before, after, self._repair, self.cut_short)

    # --- before the events ----------------------------------------------------------------------------------------

    def _more(self, size: int) -> bytes:
        room = bytearray(size)
        with memoryview(room) as whole:
            count = _filled(self._read, whole)
        self._seen += count
        del room[count:]
        return bytes(room)

    def _head(self) -> tuple[bytes, bytes]:
        """What stands before the array, and the first bytes of the array's inside."""
        buffer = self._more(CHUNK_BYTES).removeprefix(b"\xef\xbb\xbf")
        start = buffer.lstrip()[:1]
        if start == b"[":  # the array alone is a Chrome trace too
            return b"", buffer.lstrip()[1:]
        if start != b"{":
            raise ParseError(f"{self.name} is not a torch trace: {_first_bytes(buffer)}.", NOT_A_TRACE)
        searched = tried = 0
        while True:
            for match in _ARRAY_BEGINS.finditer(buffer, searched):
                if not _is_inside_an_object(buffer[: match.start()]):
                    return buffer[: match.start()], buffer[match.end() :]
                searched = match.end()
                tried += 1
                if tried == _KEYS_TRIED:
                    raise ParseError(f"{self.name} is not a torch trace: {_only_inner_keys(tried)}.", NOT_A_TRACE)
            data = self._more(max(CHUNK_BYTES, len(buffer))) if len(buffer) < LARGEST_HEAD_BYTES else b""
            if not data:
                raise ParseError(f"{self.name} is not a torch trace: {_why_no_events(buffer, self._seen)}.", NOT_A_TRACE)
            searched = max(searched, len(buffer) - _LONGEST_BEGINNING)
            buffer += data

    # --- the events -----------------------------------------------------------------------------------------------

    def _events(self, first: bytes) -> bytes:
        """Feed every event; returns what stands behind the array."""
        window = _Window(first)
        wanted = CHUNK_BYTES
        ended = False
        while True:
            cut = window.end if ended else window.last_boundary()
            if cut is not None and cut > 1:
                fed = self._feed(window, cut, last=ended)
                if fed.after is not None:
                    return fed.after + window.between(cut, window.end) + self._rest()
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
            if window.end > wanted // 2:  # what was cut inside an event is read on in growing pieces, not again and again
                wanted = min(2 * window.end, most + 1 - window.end)
            count = window.fill(self._read, wanted)
            self._seen += count
            ended = not count

    def _feed(self, window: "_Window", cut: int, last: bool) -> _Fed:
        """Give a piece to the decoder: as it is, else mended, else in parts, so that one bad event costs one event."""
        try:
            self.events += window.decode(self._decode, cut)
            return _Fed(True)
        except DECODE_FAILURES:
            piece = window.between(1, cut).rstrip(b", \t\r\n")  # a file may end behind a whole event's comma
        fed = self._attempt(piece)
        if fed.used or (fed.cut_inside and not last and len(piece) <= LARGEST_EVENT_BYTES):
            return fed
        if fed.cut_inside and last and self._take_whole_part(piece):
            return _Fed(True)
        fed = self._attempt_mended(piece)
        return fed if fed.used else self._part_by_part(piece, last)

    def _attempt_mended(self, piece: bytes) -> _Fed:
        fed = self._attempt(self._repair(piece))
        self.repaired += fed.used
        return fed

    def _attempt(self, piece: bytes) -> _Fed:
        """All events of the piece, or all up to the end of the array if that lies in it."""
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
        """Give an array to the decoder. Returns why it cannot be read, or nothing; not the error, which would keep the text."""
        try:
            self.events += self._decode(text)
        except DECODE_FAILURES as error:
            return str(error) or type(error).__name__
        return ""

    def _part_by_part(self, piece: bytes, last: bool) -> _Fed:
        """Read what can be read of a piece: parts that do not decode are halved, down to single events, which are also mended."""
        starts, ends = _single_events(piece)
        lost = 0
        fed = _Fed(True)
        part = b""
        waiting = [(0, len(starts))]
        while waiting:
            low, high = waiting.pop()
            part = piece[starts[low] : ends[high - 1]]
            is_whole = high - low == len(starts)  # that was tried, and mended
            fed = _Fed(False) if is_whole else self._attempt(part)
            if not fed.used and high - low > 1:
                middle = (low + high) // 2
                waiting += [(middle, high), (low, middle)]
                continue
            if not fed.used and not is_whole:
                fed = self._attempt_mended(part)
            if fed.after is not None:
                fed = _Fed(True, fed.after + piece[ends[high - 1] :])
                break
            lost += not fed.used
            if self.unreadable + lost > max(MOST_LOST, self.events // _LOST_SHARE):
                what = f"more than {self.unreadable + lost - 1:,} of its events cannot be read, and {self.events:,} can"
                raise ParseError(f"{self.name} is damaged: {what}.", NOT_A_TRACE)
        if last and not fed.used:
            fed = _Fed(False, _behind_damage(part))
            if fed.after is None:
                lost -= 1  # the file's end cut this one in two
                self._take_whole_part(part)
        self.unreadable += lost
        return _Fed(True, fed.after)

    def _take_whole_part(self, piece: bytes) -> bool:
        """Take the events before the one that the file's end cut in two: the longest part that ends with an event and decodes.

        Whether it is settled how many there are.
        """
        ends = event_ends(piece)
        return not len(ends) or any(self._attempt(piece[:end]).used for end in ends[: -_PARTS_TRIED - 1 : -1].tolist())

    # --- behind the events ----------------------------------------------------------------------------------------

    def _rest(self) -> bytes:
        return self._more(LARGEST_EDGE_BYTES)


def _surroundings(before: bytes, after: bytes, repair: Callable[[bytes], bytes], cut_short: bool) -> Surroundings:
    """What stands before the events and behind them, decoded; nothing does where the array is the whole file."""
    head = _object(before + b'"":0}') if before else {}
    tail = _object(b'{"":0' + after) if before and not cut_short else {}
    if before and tail is None:
        tail = _object(repair(b'{"":0' + after))
    return Surroundings(head or {}, tail or {}, head is not None and tail is not None)


class _Window:
    """The bytes at hand, behind a `[`, in one piece of memory: fresh megabytes for every chunk cost as much as decoding it."""

    def __init__(self, first: bytes) -> None:
        self._room = bytearray(b"[" + first + bytes(2 * CHUNK_BYTES))
        self.end = 1 + len(first)

    def fill(self, read: ReadInto, wanted: int) -> int:
        """Up to so many bytes more at the end; returns how many."""
        if self.end + wanted >= len(self._room):  # one byte is kept free for a closing bracket
            self._room = self._room[: self.end] + bytes(2 * wanted + self.end)
        with memoryview(self._room) as room:
            count = _filled(read, room[self.end : self.end + wanted])
        self.end += count
        return count

    def last_boundary(self) -> int | None:
        """Where the last whole event ends."""
        return self._last(BOUNDARY) or self._last(_EMPTY_BOUNDARY)

    def _last(self, boundary: "re.Pattern[bytes]") -> int | None:
        width = 1 << 13
        while True:
            start = max(0, self.end - width)
            last = None
            for last in boundary.finditer(self._room, start, self.end):  # noqa: B007 - the last one is wanted
                pass
            if last is not None:
                return last.start() + 1
            if start == 0:
                return None
            width *= 8

    def decode(self, decode: Decode, cut: int) -> int:
        """Give the bytes up to the cut to a decoder as a closed array, where they lie."""
        behind = self._room[cut]
        self._room[cut] = ord("]")
        try:
            return decode(memoryview(self._room)[: cut + 1])
        finally:
            self._room[cut] = behind

    def between(self, start: int, end: int) -> bytes:
        """A copy of some bytes."""
        return bytes(self._room[start:end])

    def drop(self, cut: int) -> None:
        """Forget what lies before the cut, and the comma behind it."""
        rest = bytes(self._room[cut : self.end]).lstrip(b", \t\r\n")
        self._room[1 : 1 + len(rest)] = rest
        self.end = 1 + len(rest)


def _single_events(piece: bytes) -> tuple[Int64, Int64]:
    """Where single events begin and end, as far as bytes can tell."""
    between = np.fromiter((place for match in BOUNDARY.finditer(piece) for place in match.span()), np.int64).reshape(-1, 2)
    return np.append(0, between[:, 1]), np.append(between[:, 0] + 1, len(piece))


def _filled(read: ReadInto, room: memoryview) -> int:
    """Fill the room with a file's next bytes, as far as there are some; returns how many."""
    count = 0
    while count < len(room) and (more := read(room[count:])):
        count += more
    return count


def _array_end(text: bytes, why: str) -> int | None:
    """Where the array was closed, if the text goes on behind it; the decoder names about the first byte that follows."""
    found = _TRAILING.search(why)
    if not found:
        return None
    for follows in (int(found.group(1)) - 1, int(found.group(1))):
        end = text.rfind(b"]", 0, follows) + 1
        if end and not text[end:follows].strip():
            return end
    return None


def _behind_damage(part: bytes) -> bytes | None:
    """What follows the array, where its last event cannot be read and brackets tell that the array ends behind it."""
    ends = event_ends(part)
    closed = _ARRAY_ENDS.match(part, int(ends[-1])) if len(ends) else None
    return part[closed.end() :] if closed and _AFTER_ARRAY.match(part, closed.end()) else None


def _fails_at_its_end(text: bytes, why: str) -> bool:
    """Whether the text only stops too early: inside a value, or inside an escape, which the bracket put behind it then spoils."""
    found = _BYTE.search(why)
    return "truncated" in why or (found is not None and int(found.group(1)) >= len(text) - _LONGEST_ESCAPE)


def _is_inside_an_object(before: bytes) -> bool:
    """Whether a key behind this text would stand in an inner object. Text that is no JSON at all says nothing against the key."""
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


def _first_bytes(buffer: bytes) -> str:
    return f"it begins with {buffer[:12]!r}" if buffer.strip() else "it is empty"


def _only_inner_keys(count: int) -> str:
    return f"its first {count} keys called traceEvents are those of inner objects"


def _why_no_events(buffer: bytes, seen: int) -> str:
    found = _object(buffer)
    if found is None:
        return f"its first {seen:,} bytes have no list of traceEvents"
    return f"it is JSON without a list of traceEvents; its keys are {', '.join(list(found)[:8]) or 'none'}"

"""Find the lines of events in the layout of torch. Up to 2.11 (left) and since (right):

  {                                                    {
    "ph": "X", "cat": "cpu_op", "name": "aten::mm",      "ph": "X",
    "pid": 607, "tid": 607,                              "cat": "cpu_op",
    "ts": 3904425331755.097, "dur": 193.795,             "name": "aten::mm",
    "args": {                                            "pid": 607,
      "External id": 5, …, "Ev Idx": 4                   "tid": 607,
    }                                                    "ts": 3904425331755.097,
  },                                                     "dur": 193.795
                                                         ,
(the first two values are on one line)                             "args": {
                                                           "External id": 5, …, "Ev Idx": 4
                                                         }
                                                       },
"""

from dataclasses import dataclass

import numpy as np

from llm_perf_opt.traces.events import LATEST_NS, Bool, Int64
from llm_perf_opt.traces.torch_lines.known_texts import MARGIN
from llm_perf_opt.traces.torch_lines.text_words import (
    TextWords,
    Word,
    Words,
    eight_digits,
    leading_digits,
    no_digits,
    trailing_number,
    word,
)

_BEFORE, _AFTER = b"\n  },\n  ", b",\n  {\n"
"""The text before and after the braces of an event; between two events they overlap."""
_SPACE = b" \t\r\n"
_PHASE = b'    "ph": "%s",'
_TS = b'    "ts": '
_AFTER_ARGUMENTS = word(b"\n    }\n ")
_EXTERNAL = b'      "External id": '
_FEW = 16
_MOST_US = LATEST_NS // 1000 - 10**9
"""Events that start before this end at an accepted time, as durations have eight digits before the point."""
_NEWLINE, _BRACE, _COMMA = b"\n{,"


@dataclass(frozen=True)
class _Layout:
    """How an event is split into lines. Lines are counted from the one with its brace."""

    after_phase: bytes
    """The two bytes after the phase."""
    between_times: bytes
    before_arguments: bytes
    times: int
    arguments: int
    lines: int
    """The number of lines of an event with a duration."""


_OLDER = _Layout(b' "', b', "dur": ', b',\n    "args": {\n', 2, 4, 7)
_NEWER = _Layout(b"\n ", b',\n    "dur": ', b'\n    ,\n    "args": {\n', 6, 10, 13)


class EventLines:
    """The lines of a JSON array of events. Rows are positions of events in the array."""

    def __init__(self, text: TextWords, newline: Int64, first: Int64) -> None:
        self.text = text
        self._newline = newline
        self._first = first
        """The newline before the brace of each event, and one before a brace after the last event."""
        self._lines = first[1:] - first[:-1]
        begun, self._phase = text.words(newline[first[:-1] + 1] + 1, 2)
        self._begun: Bool = begun == word(_PHASE[:8])
        self._layout = _OLDER if self._is(b"X", _OLDER).sum() >= self._is(b"X", _NEWER).sum() else _NEWER

    def _is(self, phase: bytes, layout: _Layout) -> Bool:
        found: Bool = self._begun & (self._phase == word((_PHASE % phase + layout.after_phase)[8:]))
        return found

    def __len__(self) -> int:
        return len(self._lines)

    def arrows(self) -> Int64:
        """Return the rows of arrows."""
        return np.flatnonzero(self._is(b"s", self._layout) | self._is(b"f", self._layout))

    def with_duration(self) -> Int64:
        """Return the rows of events with a duration and the expected number of lines."""
        return np.flatnonzero(self._is(b"X", self._layout) & (self._lines == self._layout.lines))

    def spell(self, rows: Int64, texts: tuple[bytes, ...]) -> Bool:
        """Return whether the arguments are these texts, each followed by a number."""
        at, end = self._arguments(rows)
        valid = np.ones(len(rows), np.bool_)
        for text in texts:
            valid &= _is_at(self.text.words(at, _words_in(len(text))), 0, text)
            at = np.minimum(at + len(text), end)
            digits = self.text.digits_from(at)
            valid &= self.text.is_whole(at, digits)
            at = np.minimum(at + digits, end)
        found: Bool = valid & (at == end)
        return found

    def heads(self, rows: Int64) -> tuple[Int64, Int64]:
        """Return where the heads of events with a duration begin and end: from the category to the comma before the times."""
        first = self._first[rows]
        return self._newline[first + 1] + 1 + len(_PHASE % b"X"), self._newline[first + self._layout.times]

    def times(self, rows: Int64) -> tuple[Int64, Int64, Bool]:
        """Return start and end in ns, and for which events they and the text around the arguments are in the layout."""
        if not len(rows):
            return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.bool_)
        number = self._newline[self._first[rows] + self._layout.times] + 1 + len(_TS)
        digits = _usual(self.text.digits_from(_few_of(number)))
        start, valid = self._starts(number, digits)
        arguments, end = self._arguments(rows)
        duration, also = self._durations(number + (digits + len(b".000" + self._layout.between_times)), arguments)
        valid &= also & (self.text.word(end) == _AFTER_ARGUMENTS)
        return start, start + duration, valid

    def _starts(self, number: Int64, digits: int) -> tuple[Int64, Bool]:
        """Return the number in `"ts": 1234567890123.456, "dur": ` in thousandths, and where it has this many digits."""
        between = self._layout.between_times
        words = self.text.words(number + (digits - 32), _words_in(32 + 4 + len(between)))
        whole = _ending_number(words[2], digits - 8) * 100_000_000 + _ending_number(words[3], digits)
        valid = _end_in_digits(words[2], digits - 8) & _end_in_digits(words[3], digits) & _are_decimals(words[4])
        valid &= whole < _MOST_US
        valid &= _is_at(words, 32 - digits - len(_TS), _TS) & _is_at(words, 36, between)
        valid &= self.text.is_whole(number, np.full(len(number), digits))
        return whole * 1000 + _decimals(words[4]), valid

    def _durations(self, number: Int64, arguments: Int64) -> tuple[Int64, Bool]:
        """Return the number in `12.345,` before a line `"args": {` in thousandths, and where it is there."""
        after = self._layout.before_arguments
        count = _words_in(8 + 4 + len(after))
        dot = 8 * count - len(after) - 4
        words = self.text.words(arguments - 8 * count, count)
        whole, digits = trailing_number(_shifted(words, dot - 8))
        decimals = _shifted(words, dot)
        valid = _are_decimals(decimals) & _is_at(words, dot + 4, after) & self.text.is_whole(number, digits)
        valid &= number + digits == arguments - (8 * count - dot)
        return whole * 1000 + _decimals(decimals), valid

    def arguments(self, rows: Int64) -> tuple[Int64, Int64]:
        """Return where the arguments begin and end: after the `External id` that they usually begin with, or else at the newline
        before them."""
        start, end = self._arguments(rows)
        number = start + len(_EXTERNAL)
        words = self.text.words(start, _words_in(len(_EXTERNAL) + 8))
        digits = self._digits(words, start, len(_EXTERNAL))
        after = number + digits
        numbered = _is_at(words, 0, _EXTERNAL) & self.text.is_whole(number, digits)
        numbered &= self.text.bytes[after] == _COMMA
        return np.where(numbered, after, start - 1), end

    def _digits(self, words: Words, start: Int64, at: int) -> Int64:
        """Return the number of digits `at` bytes after each start; `words` are the first words from there."""
        digits = leading_digits(_shifted(words, at))
        long = np.flatnonzero(digits == 8)
        if len(long):
            digits[long] = self.text.digits_from(start[long] + at)
        return digits

    def _arguments(self, rows: Int64) -> tuple[Int64, Int64]:
        before = self._first[rows] + self._layout.arguments
        return self._newline[before] + 1, self._newline[before + 1]

    def events(self, rows: Int64) -> tuple[Int64, Int64]:
        """Return where events begin and end, including their braces."""
        return self._newline[self._first[rows]] + 3, self._newline[self._first[rows + 1]] - 1


class LineBuffer:
    """A buffer for one text after another: allocating megabytes for each takes longer than reading it."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._is_newline = np.empty(0, np.bool_)

    def lines(self, array: bytes | memoryview) -> EventLines | None:
        """Return the lines of a JSON array, valid until the next call; None if its events are not in this layout."""
        text = self._put(array)
        newline = np.flatnonzero(np.equal(text.bytes, _NEWLINE, out=self._is_newline[: len(text.bytes)]))
        first = np.flatnonzero(newline[1:] - newline[:-1] == len(b"  {\n"))
        before = newline[first]
        first = first[(text.word(before - 5) == word(_BEFORE)) & (text.bytes[before + 3] == _BRACE)]
        if len(first) < 2 or first[0] != 1 or first[-1] != len(newline) - 2:
            return None
        return EventLines(text, newline, first)

    def _put(self, array: bytes | memoryview) -> TextWords:
        start, end = _inside(array)
        after = len(_BEFORE) + end - start
        size = after + len(_AFTER) + MARGIN
        if size > len(self._text):
            self._text = bytearray(size + size // 4)
            self._is_newline = np.empty(len(self._text), np.bool_)
        with memoryview(self._text) as text:
            text[: len(_BEFORE)] = _BEFORE
            text[len(_BEFORE) : after] = memoryview(array)[start:end]
            text[after:size] = _AFTER + bytes(MARGIN)
        return TextWords(self._text, size)


def _inside(array: bytes | memoryview) -> tuple[int, int]:
    """Return where the first event begins and the last one ends."""
    start, end = 1, len(array) - 1
    while start < end and array[start] in _SPACE:
        start += 1
    while start < end and array[end - 1] in _SPACE:
        end -= 1
    return start, end


def _few_of(places: Int64) -> Int64:
    """Return a few of the positions."""
    few: Int64 = places[:: len(places) // _FEW + 1]
    return few


def _usual(counts: Int64) -> int:
    """Return the most frequent count; starts usually have the same number of digits in a chunk."""
    return int(np.bincount(counts).argmax())


def _words_in(size: int) -> int:
    """Return the number of words for this many bytes."""
    return -(-size // 8)


def _shifted(words: Words, at: int) -> Words:
    """Return the word `at` bytes after the first of consecutive words."""
    whole, part = divmod(at, 8)
    found: Words = words[whole]
    return (found >> Word(8 * part)) | (words[whole + 1] << Word(64 - 8 * part)) if part else found


def _is_at(words: Words, at: int, text: bytes) -> Bool:
    """Return whether a text is `at` bytes after the first of consecutive words."""
    found = np.ones(words.shape[1], np.bool_)
    for number in range(at // 8, _words_in(at + len(text))):
        start = 8 * number - at  # of this word in the text
        here = text[max(start, 0) : start + 8]
        before = max(-start, 0)
        kept = word(bytes(before) + b"\xff" * len(here))
        found &= (words[number] & kept) == word(bytes(before) + here)
    return found


def _last_bytes(count: int) -> np.uint64:
    """Return a mask of the last `count` bytes of a word."""
    kept = min(max(count, 0), 8)
    return word(bytes(8 - kept) + b"\xff" * kept)


def _end_in_digits(words: Words, count: int) -> Bool:
    """Return whether the last `count` bytes are digits."""
    found: Bool = (no_digits(words) & _last_bytes(count)) == 0
    return found


def _ending_number(words: Words, count: int) -> Int64:
    """Return the number in the last `count` bytes."""
    return eight_digits(words & _last_bytes(count))


_DECIMALS = word(b"\0\xff\xff\xff")


def _are_decimals(words: Words) -> Bool:
    """Return whether words begin with a point and three digits."""
    found: Bool = ((words & word(b"\xff")) == word(b".")) & ((no_digits(words) & _DECIMALS) == 0)
    return found


def _decimals(words: Words) -> Int64:
    """Return the three digits after the point as a number."""
    return eight_digits((words & _DECIMALS) << Word(32))

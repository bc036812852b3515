"""Texts that repeat at many places of a longer one: each different text is read once, and found again by comparing its words."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from llm_perf_opt.traces.events import Int64
from llm_perf_opt.traces.torch_lines.text_words import ALL_EQUAL, TextWords, Word, Words

MARGIN = 64
"""Bytes that must stand behind the last text."""
UNREADABLE = 0
"""The row of texts that say nothing."""

_WORDS = MARGIN // 8
_SLOT_BITS = 14
_MOST_TEXTS, _MOST_BYTES = 20_000, 8 << 20
"""Beyond so many, all are forgotten: they may not repeat, and memory must not grow with the file."""
_MOST_LEARNT = 1000
"""Of so many new texts at once, the others are not read: they do not repeat."""
_NO_BLOCKS = np.zeros(1, f"V{MARGIN}")
_LONGEST = 4096
"""Longer texts are compared as a whole."""
_FACTORS = np.array(
    [[(0x9E3779B97F4A7C15 * (2 * n + 1)) % 2**64 for n in range(k * _WORDS, (k + 1) * _WORDS)] for k in range(8)], Word
)
_MASKS = np.array([[(1 << 8 * min(max(size - at, 0), 8)) - 1 for at in range(0, MARGIN, 8)] for size in range(MARGIN)], Word)
"""Bytes of a block that count → masks of its words."""

Said = tuple[int, ...]


class KnownTexts:
    """What texts of one sort say, as rows of a table."""

    def __init__(self, columns: int, read: Callable[[bytes], Said | None]) -> None:
        self.new = 0
        """How many texts were new so far."""
        self._read = read
        self._nothing = (0,) * columns
        self._forget()

    def _forget(self) -> None:
        self._rows: dict[bytes, int] = {}
        self._size = 0
        """Bytes of all texts."""
        self._said: list[Said] = [self._nothing]
        self._stored = bytearray()
        self._known: list[tuple[int, int, int]] = [(-1, 0, UNREADABLE)]
        """Of each text that is found by comparing: its length, the first of its stored blocks, its row."""
        self._slots = np.zeros(1 << _SLOT_BITS, np.int64)
        """Bits of a key → which of those it may be."""
        self._freeze()

    def _freeze(self) -> None:
        self._columns = np.array(self._said, np.int64).T.copy()
        self._sizes, self._firsts, self._found = np.array(self._known, np.int64).T.copy()
        self._blocks = np.frombuffer(self._stored, f"V{MARGIN}") if self._stored else _NO_BLOCKS

    def column(self, which: int) -> Int64:
        """What the rows say, one number of it."""
        column: Int64 = self._columns[which]
        return column

    def rows(self, text: TextWords, start: Int64, end: Int64) -> Int64:
        """The row of the text between each two places; they hold until the next are asked for."""
        if len(self._rows) > _MOST_TEXTS or self._size > _MOST_BYTES:
            self._forget()
        rows, slots, new = self._found_again(text, start, end)
        if len(new):
            one_each = new[np.unique(slots[new], return_index=True)[1][:_MOST_LEARNT]]
            self._learn(text, start[one_each], end[one_each], slots[one_each])
            rows[new], slots, others = self._found_again(text, start[new], end[new])
            new = new[others]
            if len(one_each) < _MOST_LEARNT:
                rows[new] = self._learn(text, start[new], end[new], slots[others])  # their slot is another's
            else:
                rows[new] = UNREADABLE
                self.new += len(new)
        return rows

    def _found_again(self, text: TextWords, start: Int64, end: Int64) -> tuple[Int64, Int64, Int64]:
        """The rows of known texts, the slots of all, and which texts are new."""
        size = end - start
        blocks = list(_blocks(text, start, size))
        keys = size.astype(Word)
        for nth, places, words in blocks:
            keys[places] += words @ _FACTORS[nth % len(_FACTORS)]
        slots = (keys >> Word(64 - _SLOT_BITS)).view(np.int64)
        known = self._slots[slots]
        same = self._sizes[known] == size
        for nth, places, words in blocks:
            stored = np.minimum(self._firsts[known[places]] + nth, len(self._blocks) - 1)
            equal = self._blocks[stored].view("<u8").reshape(-1, _WORDS) == words
            same[places] &= equal.view("<u8")[:, 0] == ALL_EQUAL
        return self._found[known], slots, np.flatnonzero(~same)

    def _learn(self, text: TextWords, start: Int64, end: Int64, slots: Int64) -> list[int]:
        """Read these texts, if they are new; their rows."""
        self._blocks = _NO_BLOCKS  # what is looked at cannot grow
        rows = [self._row(one, slot) for one, slot in zip(text.between(start, end), slots.tolist(), strict=True)]
        self._freeze()
        return rows

    def _row(self, text: bytes, slot: int) -> int:
        row = self._rows.get(text)
        if row is not None:
            return row
        self.new += 1
        self._size += len(text)
        said = self._read(text)
        self._rows[text] = row = UNREADABLE if said is None else len(self._said)
        if said is not None:
            self._said.append(said)
        if not self._slots[slot] and len(text) <= _LONGEST:
            self._slots[slot] = len(self._known)
            self._known.append((len(text), len(self._stored) // MARGIN, row))
            for at in _places(len(text)):
                self._stored += text[at : at + MARGIN].ljust(MARGIN, b"\0")
        return row


def _places(size: int) -> list[int]:
    """Where the blocks of a text begin; the last ends with it, and may overlap the one before."""
    return [*range(0, size - MARGIN, MARGIN), max(size - MARGIN, 0)]


def _blocks(text: TextWords, start: Int64, size: Int64) -> Iterator[tuple[int, Any, Words]]:
    """The blocks of the texts, first blocks first: the how manieth they are, whose they are, and their words."""
    short = np.flatnonzero(size < MARGIN)
    if len(short):
        yield 0, short, text.blocks(start[short], _WORDS) & _MASKS[size[short]]
    whose: Any = np.flatnonzero((size >= MARGIN) & (size <= _LONGEST))
    if len(whose) == len(size):
        whose = slice(None)
    at = start[whose]
    last = at + size[whose] - MARGIN
    nth = 0
    while len(at):
        yield nth, whose, text.blocks(np.minimum(at, last), _WORDS)
        longer = np.flatnonzero(at < last)
        whose = (longer if isinstance(whose, slice) else whose[longer]) if len(longer) < len(at) else whose
        at, last = at[longer] + MARGIN, last[longer]
        nth += 1

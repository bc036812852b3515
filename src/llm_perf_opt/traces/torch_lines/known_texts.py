"""Texts that repeat at many positions of a longer text: each distinct text is read once, and found again by comparing words."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from llm_perf_opt.traces.events import Int64
from llm_perf_opt.traces.torch_lines.text_words import ALL_EQUAL, TextWords, Word, Words

MARGIN = 64
"""Bytes that must follow the last text."""
UNREADABLE = 0
"""The row of unreadable texts."""

_WORDS = MARGIN // 8
_SLOT_BITS = 14
_MOST_TEXTS, _MOST_BYTES = 20_000, 8 << 20
"""Beyond these, all texts are forgotten, so that memory does not grow with the file."""
_MOST_NEW = 1000
"""New texts that are read per call; with more, texts do not repeat."""
_NO_BLOCKS = np.zeros(1, f"V{MARGIN}")
_LONGEST = 4096
"""Longer texts are looked up one by one."""
_FACTORS = np.array(
    [[(0x9E3779B97F4A7C15 * (2 * n + 1)) % 2**64 for n in range(k * _WORDS, (k + 1) * _WORDS)] for k in range(8)], Word
)
_MASKS = np.array([[(1 << 8 * min(max(size - at, 0), 8)) - 1 for at in range(0, MARGIN, 8)] for size in range(MARGIN)], Word)
"""Bytes of a block that are used → masks of its words."""

Values = tuple[int, ...]
"""What a text contains: a row of numbers."""


class KnownTexts:
    """The values of texts of one kind, as rows of a table."""

    def __init__(self, columns: int, read: Callable[[bytes], Values | None]) -> None:
        self.new = 0
        """The number of new texts so far."""
        self._read = read
        self._nothing = (0,) * columns
        self._forget()

    def _forget(self) -> None:
        self._rows: dict[bytes, int] = {}
        self._size = 0
        """Bytes of all texts."""
        self._values: list[Values] = [self._nothing]
        self._stored = bytearray()
        self._known: list[tuple[int, int, int]] = [(-1, 0, UNREADABLE)]
        """Per text that is found by comparing words: its length, its first stored block, its row."""
        self._slots = np.zeros(1 << _SLOT_BITS, np.int64)
        """Bits of a key → the text that it may be."""
        self._freeze()

    def _freeze(self) -> None:
        self._columns = np.array(self._values, np.int64).T.copy()
        self._sizes, self._firsts, self._found = np.array(self._known, np.int64).T.copy()
        self._blocks = np.frombuffer(self._stored, f"V{MARGIN}") if self._stored else _NO_BLOCKS

    def column(self, which: int) -> Int64:
        """Return one value of all rows."""
        column: Int64 = self._columns[which]
        return column

    def rows(self, text: TextWords, start: Int64, end: Int64) -> Int64:
        """Return the row of the text between each pair of positions, valid until the next call."""
        if len(self._rows) > _MOST_TEXTS or self._size > _MOST_BYTES:
            self._forget()
        rows, slots, new = self._found_again(text, start, end)
        if len(new):
            one_per_slot = new[np.unique(slots[new], return_index=True)[1][:_MOST_NEW]]
            self._learn(text, start[one_per_slot], end[one_per_slot], slots[one_per_slot])
            rows[new], slots, others = self._found_again(text, start[new], end[new])
            new = new[others]
            if len(one_per_slot) < _MOST_NEW:
                rows[new] = self._learn(text, start[new], end[new], slots[others])  # another text has their slot
            else:
                rows[new] = UNREADABLE
                self.new += len(new)
        return rows

    def _found_again(self, text: TextWords, start: Int64, end: Int64) -> tuple[Int64, Int64, Int64]:
        """Return the rows of known texts, the slots of all, and which texts are new."""
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
        """Read the texts that are new, and return the rows of all."""
        self._blocks = _NO_BLOCKS  # a bytearray with a view cannot grow
        rows = [self._row(found, slot) for found, slot in zip(text.between(start, end), slots.tolist(), strict=True)]
        self._freeze()
        return rows

    def _row(self, text: bytes, slot: int) -> int:
        row = self._rows.get(text)
        if row is not None:
            return row
        self.new += 1
        self._size += len(text)
        values = self._read(text)
        self._rows[text] = row = UNREADABLE if values is None else len(self._values)
        if values is not None:
            self._values.append(values)
        if not self._slots[slot] and len(text) <= _LONGEST:
            self._slots[slot] = len(self._known)
            self._known.append((len(text), len(self._stored) // MARGIN, row))
            for at in _places(len(text)):
                self._stored += text[at : at + MARGIN].ljust(MARGIN, b"\0")
        return row


def _places(size: int) -> list[int]:
    """Return where the blocks of a text begin. The last block ends with the text and may overlap the one before."""
    return [*range(0, size - MARGIN, MARGIN), max(size - MARGIN, 0)]


def _blocks(text: TextWords, start: Int64, size: Int64) -> Iterator[tuple[int, Any, Words]]:
    """Yield the blocks of the texts, first blocks first: their number, the texts that have them, and their words."""
    short = np.flatnonzero(size < MARGIN)
    if len(short):
        yield 0, short, text.blocks(start[short], _WORDS) & _MASKS[size[short]]
    texts: Any = np.flatnonzero((size >= MARGIN) & (size <= _LONGEST))
    if len(texts) == len(size):
        texts = slice(None)
    at = start[texts]
    last = at + size[texts] - MARGIN
    nth = 0
    while len(at):
        yield nth, texts, text.blocks(np.minimum(at, last), _WORDS)
        longer = np.flatnonzero(at < last)
        texts = (longer if isinstance(texts, slice) else texts[longer]) if len(longer) < len(at) else texts
        at, last = at[longer] + MARGIN, last[longer]
        nth += 1

"""Read bytes at many positions of a text at once, as 64-bit words: texts to compare, decimal numbers."""

import numpy as np
import numpy.typing as npt

from llm_perf_opt.traces.events import Bool, Int64, UInt8

Word = np.uint64
Words = npt.NDArray[np.uint64]

ALL_EQUAL = Word(int("01" * 8, 16))
"""A word of eight comparisons that are all true."""
_ZEROS, _ONES, _LOW, _HIGH = (Word(int(byte * 8, 16)) for byte in ("30", "01", "7f", "80"))
_TO_HIGH = Word(int("76" * 8, 16))  # added to ten or more, it sets the high bit
_FOURTHS = Word(0x000000FF000000FF)


def word(text: bytes) -> np.uint64:
    """Return up to eight bytes as a word; the first is the lowest."""
    found: np.uint64 = Word(int.from_bytes(text, "little"))
    return found


class TextWords:
    """A text, or its first bytes. Every position must be followed by at least the bytes that are read."""

    def __init__(self, text: bytes | bytearray, size: int | None = None) -> None:
        self.text = text
        self.bytes: UInt8 = np.frombuffer(text, np.uint8, len(text) if size is None else size)
        self._overlapping: dict[int, npt.NDArray[np.void]] = {}

    def blocks(self, at: Int64, words: int) -> Words:
        """Return `words` words from each position, a row per position."""
        if words not in self._overlapping:
            size = 8 * words
            shape = (max(len(self.bytes) - size + 1, 0),)
            self._overlapping[words] = np.ndarray(shape, f"V{size}", self.text, strides=(1,))
        found: Words = self._overlapping[words][at].view("<u8").reshape(-1, words)
        return found

    def words(self, at: Int64, words: int) -> Words:
        """Return the same transposed: a row with the first word of each position, a row with the second, and so on."""
        return np.ascontiguousarray(self.blocks(at, words).T)

    def word(self, at: Int64) -> Words:
        """Return the word at each position."""
        found: Words = self.blocks(at, 1)[:, 0]
        return found

    def between(self, start: Int64, end: Int64) -> list[bytes]:
        """Return the text between each pair of positions."""
        text = memoryview(self.text)
        return [bytes(text[first:last]) for first, last in zip(start.tolist(), end.tolist(), strict=True)]

    def digits_from(self, start: Int64) -> Int64:
        """Return the number of digits from each position, up to sixteen."""
        count = leading_digits(self.word(start))
        full = np.flatnonzero(count == 8)
        if len(full):
            count[full] += leading_digits(self.word(start[full] + 8))
        return count

    def number_before(self, end: Int64) -> tuple[Int64, Int64]:
        """Return the number that ends before each position, and its digits, up to sixteen."""
        value, count = trailing_number(self.word(end - 8))
        full = np.flatnonzero(count == 8)
        if len(full):
            more, digits = trailing_number(self.word(end[full] - 16))
            value[full] += more * 100_000_000
            count[full] += digits
        return value, count

    def is_whole(self, start: Int64, digits: Int64) -> Bool:
        """Return whether this many digits from each position are a JSON number."""
        found: Bool = (digits > 0) & ((self.bytes[start] != ord("0")) | (digits == 1))
        return found


def no_digits(words: Words) -> Words:
    """Return the high bit of each byte that is not a digit."""
    from_zero = words ^ _ZEROS
    found: Words = (((from_zero & _LOW) + _TO_HIGH) | from_zero) & _HIGH
    return found


def eight_digits(words: Words) -> Int64:
    """Return the number in the eight digits of a word; a zero byte counts as the digit 0."""
    digits = words & Word(0x0F0F0F0F0F0F0F0F)
    pairs = digits * Word(10) + (digits >> Word(8))
    first = (pairs & _FOURTHS) * Word(0x000F424000000064)
    second = ((pairs >> Word(16)) & _FOURTHS) * Word(0x0000271000000001)
    found: Int64 = ((first + second) >> Word(32)).view(np.int64)
    return found


def leading_digits(words: Words) -> Int64:
    """Return the number of digits at the start of each word."""
    others = no_digits(words)
    others |= others << Word(8)
    others |= others << Word(16)
    others |= others << Word(32)
    return _counted((~others & _HIGH) >> Word(7))


def trailing_number(words: Words) -> tuple[Int64, Int64]:
    """Return the number at the end of each word, and its digits."""
    others = no_digits(words)
    others |= others >> Word(8)
    others |= others >> Word(16)
    others |= others >> Word(32)
    digits = (~others & _HIGH) >> Word(7)
    return eight_digits(words & (digits * Word(255))), _counted(digits)


def _counted(ones: Words) -> Int64:
    """Return the number of bytes that are one in each word; the others are zero."""
    found: Int64 = ((ones * _ONES) >> Word(56)).view(np.int64)
    return found

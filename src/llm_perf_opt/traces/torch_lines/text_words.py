"""What stands at many places of a text, read for all of them at once by 64-bit words: texts to compare, decimal numbers."""

import numpy as np
import numpy.typing as npt

from llm_perf_opt.traces.events import Int64, Mask, UInt8

Word = np.uint64
Words = npt.NDArray[np.uint64]

ALL_EQUAL = Word(int("01" * 8, 16))
"""Eight comparisons, all of them true, as a word."""
_ZEROS, _ONES, _LOW, _HIGH = (Word(int(byte * 8, 16)) for byte in ("30", "01", "7f", "80"))
_TO_HIGH = Word(int("76" * 8, 16))  # ten and this have the high bit
_FOURTHS = Word(0x000000FF000000FF)


def word(text: bytes) -> np.uint64:
    """Up to eight bytes as a word holds them: the first is the lowest."""
    found: np.uint64 = Word(int.from_bytes(text, "little"))
    return found


class TextWords:
    """A text, or its first bytes; every place that is asked about must be followed by as many bytes as are asked for."""

    def __init__(self, text: bytes | bytearray, size: int | None = None) -> None:
        self.text = text
        self.bytes: UInt8 = np.frombuffer(text, np.uint8, len(text) if size is None else size)
        self._overlapping: dict[int, npt.NDArray[np.void]] = {}

    def blocks(self, at: Int64, words: int) -> Words:
        """So many words from each place on, a row for each place."""
        if words not in self._overlapping:
            size = 8 * words
            shape = (max(len(self.bytes) - size + 1, 0),)
            self._overlapping[words] = np.ndarray(shape, f"V{size}", self.text, strides=(1,))
        found: Words = self._overlapping[words][at].view("<u8").reshape(-1, words)
        return found

    def words(self, at: Int64, words: int) -> Words:
        """The same, a row for the first word of each place, a row for the second, and so on."""
        return np.ascontiguousarray(self.blocks(at, words).T)

    def word(self, at: Int64) -> Words:
        """The word at each place."""
        found: Words = self.blocks(at, 1)[:, 0]
        return found

    def between(self, start: Int64, end: Int64) -> list[bytes]:
        """The text between each two places."""
        text = memoryview(self.text)
        return [bytes(text[one:other]) for one, other in zip(start.tolist(), end.tolist(), strict=True)]

    def digits_from(self, start: Int64) -> Int64:
        """How many digits stand from each place on; sixteen are as many as are told."""
        count = leading_digits(self.word(start))
        full = np.flatnonzero(count == 8)
        if len(full):
            count[full] += leading_digits(self.word(start[full] + 8))
        return count

    def number_before(self, end: Int64) -> tuple[Int64, Int64]:
        """The number whose digits end before each place, and how many they are; of the last sixteen."""
        value, count = trailing_number(self.word(end - 8))
        full = np.flatnonzero(count == 8)
        if len(full):
            more, digits = trailing_number(self.word(end[full] - 16))
            value[full] += more * 100_000_000
            count[full] += digits
        return value, count

    def is_whole(self, start: Int64, digits: Int64) -> Mask:
        """Whether so many digits from each place on are a number as JSON has it."""
        found: Mask = (digits > 0) & ((self.bytes[start] != ord("0")) | (digits == 1))
        return found


def no_digits(words: Words) -> Words:
    """The high bit of each byte that is no digit."""
    from_zero = words ^ _ZEROS
    found: Words = (((from_zero & _LOW) + _TO_HIGH) | from_zero) & _HIGH
    return found


def eight_digits(words: Words) -> Int64:
    """The number that a word's digits spell; bytes of zero count as the digit."""
    digits = words & Word(0x0F0F0F0F0F0F0F0F)
    pairs = digits * Word(10) + (digits >> Word(8))
    first = (pairs & _FOURTHS) * Word(0x000F424000000064)
    second = ((pairs >> Word(16)) & _FOURTHS) * Word(0x0000271000000001)
    found: Int64 = ((first + second) >> Word(32)).view(np.int64)
    return found


def leading_digits(words: Words) -> Int64:
    """How many digits each word begins with."""
    others = no_digits(words)
    others |= others << Word(8)
    others |= others << Word(16)
    others |= others << Word(32)
    return _counted((~others & _HIGH) >> Word(7))


def trailing_number(words: Words) -> tuple[Int64, Int64]:
    """The number that each word ends with, and how many digits it has."""
    others = no_digits(words)
    others |= others >> Word(8)
    others |= others >> Word(16)
    others |= others >> Word(32)
    digits = (~others & _HIGH) >> Word(7)
    return eight_digits(words & (digits * Word(255))), _counted(digits)


def _counted(ones: Words) -> Int64:
    """How many bytes of each word are one; the others are zero."""
    found: Int64 = ((ones * _ONES) >> Word(56)).view(np.int64)
    return found

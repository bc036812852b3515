"""Numbers and texts at many positions of a text, compared with plain Python."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.traces.torch_lines.text_words import TextWords, eight_digits, leading_digits, trailing_number, word

# Bytes around the digits: their neighbors in the code, those with the high bit, zero.
_OTHERS = b'/:. ",x\x00\x7f\x80\xb0\xb5\xb9\xff'
_DIGITS = st.text("0123456789", max_size=16)
_PIECES = st.lists(st.tuples(st.sampled_from(list(_OTHERS)), _DIGITS), min_size=1, max_size=40)


def _laid_out(pieces: list[tuple[int, str]]) -> tuple[TextWords, np.ndarray, np.ndarray]:
    """Return numbers, each after a byte that is not a digit, and where they begin and end."""
    text, start, end = b"x" * 16, [], []
    for other, digits in pieces:
        text += bytes([other])
        start.append(len(text))
        text += digits.encode()
        end.append(len(text))
    return TextWords(text + b"x" * 16), np.array(start), np.array(end)


@given(_PIECES)
def test_numbers_are_what_their_digits_say(pieces: list[tuple[int, str]]) -> None:
    text, start, end = _laid_out(pieces)
    value, count = text.number_before(end)
    assert text.digits_from(start).tolist() == (end - start).tolist() == count.tolist()
    assert value.tolist() == [int(digits or "0") for _, digits in pieces]


@given(_PIECES)
def test_only_numbers_as_json_has_them_are_whole(pieces: list[tuple[int, str]]) -> None:
    text, start, end = _laid_out(pieces)
    expected = [digits == "0" or (digits != "" and not digits.startswith("0")) for _, digits in pieces]
    assert text.is_whole(start, end - start).tolist() == expected


@given(st.binary(min_size=8, max_size=8))
def test_a_word_is_read_from_both_its_ends(text: bytes) -> None:
    words = np.array([word(text)])
    digits = b"0123456789"
    leading = next((place for place, byte in enumerate(text) if byte not in digits), 8)
    trailing = next((place for place, byte in enumerate(reversed(text)) if byte not in digits), 8)
    assert leading_digits(words).tolist() == [leading]
    value, count = trailing_number(words)
    assert count.tolist() == [trailing]
    assert value.tolist() == [int(text[8 - trailing :] or b"0")]


@given(st.integers(0, 99_999_999))
def test_eight_digits_are_one_number(number: int) -> None:
    assert eight_digits(np.array([word(b"%08d" % number)])).tolist() == [number]
    assert eight_digits(np.array([word((b"%d" % number).rjust(8, b"\0"))])).tolist() == [number]


def test_words_are_those_of_the_text_at_any_place() -> None:
    data = random.Random(3).randbytes(500)
    text = TextWords(bytearray(data), 400)
    at = np.array([0, 1, 7, 8, 13, 400 - 24])
    blocks = text.blocks(at, 3)
    assert [row.tobytes() for row in blocks] == [data[place : place + 24] for place in at]
    assert (text.words(at, 3) == blocks.T).all()
    assert (text.word(at) == blocks[:, 0]).all()
    assert text.between(at, at + 5) == [data[place : place + 5] for place in at]

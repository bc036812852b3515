"""Known texts are found again, however many there are and however similar."""

import random

import numpy as np
import pytest

from llm_perf_opt.traces.torch_lines import known_texts
from llm_perf_opt.traces.torch_lines.known_texts import MARGIN, UNREADABLE, KnownTexts
from llm_perf_opt.traces.torch_lines.text_words import TextWords


class _Counting:
    """Numbers the distinct texts, and counts its calls."""

    def __init__(self) -> None:
        self.texts: list[bytes] = []

    def __call__(self, text: bytes) -> tuple[int, ...] | None:
        self.texts.append(text)
        return None if text.startswith(b"!") else (len(self.texts) - 1, len(text))


def _laid_out(texts: list[bytes]) -> tuple[TextWords, np.ndarray, np.ndarray]:
    sizes = np.array([len(text) for text in texts])
    end = np.cumsum(sizes + 3) - 3 + 5
    return TextWords(b"#####" + b"###".join(texts) + b"#" * MARGIN), end - sizes, end


def _check(known: KnownTexts, read: _Counting, texts: list[bytes]) -> None:
    rows = known.rows(*_laid_out(texts))
    numbers, sizes = known.column(0)[rows], known.column(1)[rows]
    for text, row, number, size in zip(texts, rows, numbers, sizes, strict=True):
        if text.startswith(b"!"):
            assert row == UNREADABLE
        else:
            assert (read.texts[number], size) == (text, len(text))


def _texts(draw: random.Random, different: int) -> list[bytes]:
    """Texts of each length around that of a block, which differ in one byte."""
    found = [b"", b"!", b"a"]
    while len(found) < different:
        length = draw.choice([1, 7, 8, 9, 62, 63, 64, 65, 66, 127, 128, 129, 200, 300, 4095, 4096, 4097])
        text = bytearray(draw.choice([draw.randbytes(length), b"a" * length, b"!" + b"b" * (length - 1)]))
        text[draw.randrange(length)] = draw.randrange(256)
        found.append(bytes(text))
    return found


@pytest.mark.parametrize("different", [1, 40, 1000])
def test_every_text_gets_its_own_row_and_is_read_once(different: int) -> None:
    draw = random.Random(different)
    texts = _texts(draw, different)
    read = _Counting()
    known = KnownTexts(2, read)
    for _ in range(4):
        _check(known, read, draw.choices(texts, k=3000))
    assert len(read.texts) == len(set(read.texts)) <= len(set(texts))


def test_texts_that_share_a_slot_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_texts, "_SLOT_BITS", 2)
    draw = random.Random(5)
    texts = _texts(draw, 100)
    read = _Counting()
    known = KnownTexts(2, read)
    for _ in range(3):
        _check(known, read, draw.choices(texts, k=500))
    assert len(read.texts) == len(set(read.texts))


def test_texts_that_never_repeat_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_texts, "_MOST_TEXTS", 50)
    read = _Counting()
    known = KnownTexts(2, read)
    for first in range(0, 2000, 40):
        _check(known, read, [b"%0100d" % number for number in range(first, first + 40)])
        assert len(known._rows) <= 50 + 40
    _check(known, read, [b"%0100d" % number for number in range(40)])  # read anew, to the same


@pytest.mark.parametrize("size", [100, 5000])
def test_long_texts_take_little_memory(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(known_texts, "_MOST_BYTES", 10 * size)
    read = _Counting()
    known = KnownTexts(2, read)
    for first in range(0, 200, 5):
        _check(known, read, [b"%d" % number * size for number in range(first, first + 5)])
        assert sum(map(len, known._rows)) <= (10 + 5) * 3 * size


def test_of_many_new_texts_only_some_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_texts, "_MOST_NEW", 10)
    read = _Counting()
    known = KnownTexts(2, read)
    texts = [b"%0100d" % number for number in range(100)]
    rows = known.rows(*_laid_out(texts))
    assert (len(read.texts), int((rows != UNREADABLE).sum()), known.new) == (10, 10, 100)
    assert [read.texts[number] for number in known.column(0)[rows[rows != UNREADABLE]]] == [
        text for text, row in zip(texts, rows, strict=True) if row != UNREADABLE
    ]


def test_no_texts_have_no_rows() -> None:
    known = KnownTexts(2, _Counting())
    assert known.rows(*_laid_out([])).tolist() == []

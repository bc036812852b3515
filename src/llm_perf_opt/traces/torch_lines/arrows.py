"""Recognize flow arrows from launches to kernels: a third of a trace, and not kept. They differ only in their digits, so each is
compared with one that was decoded."""

import re
from dataclasses import dataclass

import msgspec
import numpy as np

from llm_perf_opt.traces.events import Bool, Int64
from llm_perf_opt.traces.torch_json.event_chunks import DECODE_FAILURES
from llm_perf_opt.traces.torch_lines.text_words import ALL_EQUAL, TextWords, Words, no_digits

_BLOCK = 64
_LONGEST = 1000
"""Other arrows are not compared with one of more bytes than this: its blocks would take many times its length. Those of torch
have fewer than 200 bytes."""
_MOST_MODELS = 40
_MOST_REFUSED = 8
"""After this many events that are not arrows of torch, the rest is not tried."""
_KEYS = ["ph", "id", "pid", "tid", "ts", "cat", "name"]
_DIGITS = re.compile(rb"[0-9]+")


@dataclass(frozen=True)
class _Model:
    """An arrow that was decoded."""

    size: int
    blocks: tuple[tuple[int, Words, Words], ...]
    """Per block: its position, its bytes with digits masked out, and the mask."""
    not_zero: tuple[int, ...]
    """Positions of the first digit of numbers with several digits."""


class Arrows:
    """The known arrows of one file."""

    def __init__(self) -> None:
        self._models: list[_Model] = []

    def known(self, text: TextWords, start: Int64, end: Int64) -> Bool:
        """Return which of the events between these positions are valid arrows."""
        found = np.zeros(len(start), np.bool_)
        left = np.arange(len(start))
        used: list[_Model] = []
        unused: list[_Model] = []
        for model in self._models:
            alike = left[_alike(model, text, start[left], end[left])]
            found[alike] = True
            (used if len(alike) else unused).append(model)
            left = left[~found[left]] if len(alike) else left
        self._models = used + unused  # likely to match in the next chunk
        refused = 0
        while len(left) and len(self._models) < _MOST_MODELS and refused < _MOST_REFUSED:
            new = _model_of(text.between(start[left[:1]], end[left[:1]])[0])
            refused += new is None
            if new is not None:
                self._models.insert(0, new)
                found[left[_alike(new, text, start[left], end[left])]] = True
            left = left[1:][~found[left[1:]]]
        return found


def _alike(model: _Model, text: TextWords, start: Int64, end: Int64) -> Int64:
    """Return the rows that differ from the model only in their digits."""
    rows = np.flatnonzero(end - start == model.size)
    if not len(rows):
        return rows
    begin = start[rows]
    same = np.ones(len(rows), np.bool_)
    for at, wanted, kept in model.blocks:
        words = text.blocks(begin + at, _BLOCK // 8)
        same &= ((words & kept) == wanted).view("<u8")[:, 0] == ALL_EQUAL
        for number in np.flatnonzero(~kept).tolist():
            same &= (no_digits(words[:, number]) & ~kept[number]) == 0
    for place in model.not_zero:
        same &= text.bytes[begin + place] != ord("0")
    alike: Int64 = rows[same]
    return alike


def _model_of(event: bytes) -> _Model | None:
    if not _BLOCK <= len(event) <= _LONGEST:
        return None
    try:
        arrow = msgspec.json.decode(event)
    except DECODE_FAILURES:
        return None
    is_arrow = isinstance(arrow, dict) and list(arrow) in (_KEYS, [*_KEYS, "bp"]) and arrow["ph"] in ("s", "f")
    if not is_arrow or b"\\" in event:  # an escape contains digits that must not vary
        return None
    kept = np.full(len(event), 255, np.uint8)
    not_zero = []
    for digits in _DIGITS.finditer(event):
        kept[digits.start() : digits.end()] = 0
        if len(digits[0]) > 1 and event[digits.start() - 1 : digits.start()] != b".":
            not_zero.append(digits.start())
    blocks, masks = [], kept.tobytes()
    for at in (*range(0, len(event) - _BLOCK, _BLOCK), len(event) - _BLOCK):
        mask = np.frombuffer(masks, "<u8", _BLOCK // 8, at)
        blocks.append((at, np.frombuffer(event, "<u8", _BLOCK // 8, at) & mask, mask))
    return _Model(len(event), tuple(blocks), tuple(not_zero))

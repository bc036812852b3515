"""Find where the events of a text end, by its brackets, a megabyte at a time."""

import numpy as np

from llm_perf_opt.traces.events import Bool, Int64, UInt8

_BLOCK_BYTES = 1 << 20
_QUOTE, _BACKSLASH = b'"\\'
_OPENS, _CLOSES = ord("["), ord("]")
_BRACE_BIT = ord("{") ^ ord("[")
"""The bit that differs between braces and brackets."""


def event_ends(text: bytes) -> Int64:
    """Return the position after each bracket or brace that closes everything open, up to one that closes too much."""
    found = [np.empty(0, np.int64)]
    depth, is_inside, backslashes = 0, False, 0
    for start in range(0, len(text), _BLOCK_BYTES):
        block = np.frombuffer(text, np.uint8, min(_BLOCK_BYTES, len(text) - start), start)
        inside, backslashes = _in_strings(block, is_inside, backslashes)
        is_inside = bool(inside[-1])
        bracket = block & np.uint8(255 ^ _BRACE_BIT)
        steps = np.zeros(len(block), np.int8)
        steps[(bracket == _OPENS) & ~inside] = 1
        steps[(bracket == _CLOSES) & ~inside] = -1
        depths = depth + np.cumsum(steps, dtype=np.int64)
        ends = np.flatnonzero((steps < 0) & (depths <= 0))
        if len(ends) and (depths[ends] < 0).any():
            ends = ends[: int(np.argmax(depths[ends] < 0))]
            return np.concatenate([*found, ends + start + 1])
        found.append(ends + start + 1)
        depth = int(depths[-1])
    return np.concatenate(found)


def _in_strings(block: UInt8, begins_inside: bool, backslashes: int) -> tuple[Bool, int]:
    """Return which bytes are inside a string (without its closing quote), and the number of backslashes at the block's end.

    `backslashes` is the number of backslashes right before the block.
    """
    quotes = np.flatnonzero(block == _QUOTE)
    others = np.flatnonzero(block != _BACKSLASH)
    last = int(others[-1]) if len(others) else -1 - backslashes
    before = np.searchsorted(others, quotes) - 1
    run = quotes - 1 - np.where(before >= 0, others[before] if len(others) else 0, -1 - backslashes)
    turns = np.zeros(len(block), np.bool_)
    turns[quotes[run % 2 == 0]] = True
    inside: Bool = np.logical_xor.accumulate(turns) ^ begins_inside
    return inside, len(block) - 1 - last

"""Read damaged JSON: repair its text, and find the ends of events by their brackets.

torch does not escape names: a label with a quote breaks the JSON. Other tools write NaN and Infinity. Repairing examines each
byte a fixed number of times, and no pattern repeats a group, because each repetition takes a hundred bytes of memory.
"""

import re
from collections.abc import Iterator

import numpy as np

from llm_perf_opt.traces.events import Bool, Int64, UInt8

_NAME = re.compile(rb'"name"\s*:\s*"')
_NEXT_KEY = re.compile(rb'"\s*,\s*"(?:ph|cat|pid|tid|ts|dur|args|s|id)"\s*:')
_LONGEST_NAME = 4000
_AFTER_NAME = re.compile(rb"\s*[,}]")
_STRING_OR_NUMBER = re.compile(rb'"[^"\\\x00-\x1f]*(")?|-?\b(?:nan|NaN|inf|Infinity)\b')
_STOP = re.compile(rb'["\\]')
_NAME_STOP = re.compile(rb'["\\\n]')
_LONGEST_STRING = 1 << 20
"""A longer string with escapes or control characters is not repaired, and its event is lost."""
_ESCAPE = re.compile(rb'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')
_CONTROL = re.compile(rb"[\x00-\x1f]")


def repaired(piece: bytes) -> bytes:
    """Return the piece with unescaped quotes, wrong escapes, control characters, NaN and invalid UTF-8 repaired."""
    text = piece.decode("utf-8", "replace").encode()
    return _joined(_with_values(_joined(_with_names(text))))


def _joined(pieces: Iterator[bytes]) -> bytes:
    """Join pieces one by one: `bytes.join` takes eighty bytes for each of millions."""
    text = bytearray()
    for piece in pieces:
        text += piece
    return bytes(text)


def _with_names(text: bytes) -> Iterator[bytes]:
    """Yield the text in pieces, with the quotes in names escaped. A valid name is skipped as a whole; an invalid one extends to
    what looks like the next key of its event on the same line."""
    done = 0
    key = _NEXT_KEY.search(text)
    newline = text.find(b"\n")
    while name := _NAME.search(text, done):
        begin = name.end()
        yield text[done:begin]
        done = begin
        end = _string_end(text, begin, _NAME_STOP)
        if end is not None and text[end] == ord('"') and _AFTER_NAME.match(text, end + 1):
            done = end + 1
            yield text[begin:done]
            continue
        if key is not None and key.start() < begin:
            key = _NEXT_KEY.search(text, begin)
        if 0 <= newline < begin:
            newline = text.find(b"\n", begin)
        if key is not None and key.start() - begin <= _LONGEST_NAME and not begin <= newline < key.start():
            yield text[begin : key.start()].replace(b'\\"', b'"').replace(b'"', b'\\"')
            yield key[0]
            done = key.end()
    yield text[done:]


def _with_values(text: bytes) -> Iterator[bytes]:
    """Yield the text in pieces, with repaired strings, and null instead of NaN and Infinity."""
    done = at = 0
    while found := _STRING_OR_NUMBER.search(text, at):
        at = found.end()
        if found[1]:  # a valid string
            continue
        yield text[done : found.start()]
        done = found.start()
        if not found[0].startswith(b'"'):
            yield b"null"
            done = at
            continue
        end = _string_end(text, found.start() + 1, _STOP)
        if end is None:
            break
        done = at = end + 1
        escaped = _ESCAPE.sub(lambda escape: escape[0] if escape[1] else b"\\\\", text[found.start() : done])
        yield _CONTROL.sub(lambda char: b"\\u%04x" % char[0][0], escaped)
    yield text[done:]


def _string_end(text: bytes, begin: int, stop: "re.Pattern[bytes]") -> int | None:
    """Return where the string that begins there ends or is interrupted, or None if that is too far away."""
    at = begin
    most = begin + _LONGEST_STRING
    while found := stop.search(text, at, most):
        if found[0] != b"\\":
            return found.start()
        at = found.start() + 2
    return None


# --- ends of events -------------------------------------------------------------------------------------------------------------

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

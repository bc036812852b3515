"""Limits of the values in a file of a run: how many there may be, how deep, how large, and how much memory they may take."""

import math
import re
import sys
from collections.abc import Iterator
from typing import Any

from llm_perf_opt.core.user_files import TooLargeError

MOST_LEVELS = 64
"""Nested mappings and lists."""
MOST_JSON_BYTES = 96 << 20
MOST_JSON_MEMORY = 900_000_000
"""About how much memory decoding a JSON file may take."""
_MEMORY = {b"{": 200, b"[": 110, b'"': 30, b",": 45}
"""Bytes per character, measured with short values. Dictionaries are largest in Python 3.10."""
_MEMORY_OF_A_BYTE = 5
"""The byte that was read, and a text in which it takes four."""
MOST_NUMBER = 2.0**63
"""What 64 bits hold: 292 years in nanoseconds. Larger numbers in a file of someone else are no measurement."""
_MOST_DIGITS = 20
_LARGE_NUMBER = rb"(?<![\w.+-])-?(?:\d{19,}(?:\.\d+)?(?:[eE][+-]?\d+)?|\d+(?:\.\d+)?[eE]\+?\d{2,})"
"""Only an integer of 19 digits or more can be beyond 64 bits, and only it or an exponent can make a float too large."""
_MAYBE_LARGE = re.compile(rb"\d{19}|[eE]\+?\d{2}")
_QUOTE_OR_LARGE_NUMBER = re.compile(rb'\\.|"|' + _LARGE_NUMBER, re.DOTALL)
"""Not whole texts: matching one takes memory for each escape."""
_MOST_FLOAT = 1e30
"""More than the work of the largest model in FLOP, and far from where sums and products of floats end."""


def number_in(value: Any, most: float = MOST_NUMBER) -> float | None:
    """Return a number from a file of someone else as a float; None if it is none, not finite, or beyond `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -most <= value <= most:  # NaN is in no range
        return None
    return float(value)


def check_json(content: bytes) -> None:
    """Raise a ValueError if decoding this JSON could take too much memory, or if it has a number that nothing measures."""
    check_json_memory(content)
    _check_numbers(content)


def check_json_memory(content: bytes) -> None:
    """Raise a ValueError if decoding this JSON could take too much memory."""
    memory = len(content) * _MEMORY_OF_A_BYTE + sum(content.count(text) * each for text, each in _MEMORY.items())
    if memory > MOST_JSON_MEMORY:
        raise TooLargeError(
            f"its values could take {memory / 1e6:,.0f} MB of memory; the limit is {MOST_JSON_MEMORY / 1e6:,.0f} MB"
        )


def _check_numbers(content: bytes) -> None:
    """Raise a ValueError for an integer beyond 64 bits or a float beyond 1e30. Nothing is decoded, to save memory."""
    if not _MAYBE_LARGE.search(content):
        return
    in_text = False
    for found in _QUOTE_OR_LARGE_NUMBER.finditer(content):
        if found[0] == b'"':
            in_text = not in_text
        elif in_text or found[0].startswith(b"\\"):
            continue
        elif not found[0].lstrip(b"-").isdigit():
            if not -_MOST_FLOAT <= float(found[0]) <= _MOST_FLOAT:
                raise ValueError(f"it contains a number beyond {_MOST_FLOAT:g}")
        elif len(found[0]) > _MOST_DIGITS or not -(2**63) <= int(found[0]) < 2**64:
            raise ValueError("it contains a number beyond 64 bits")


def check_plain(values: Any, most: float = math.inf) -> None:
    """Raise a ValueError if plain values are too many, nested too deeply or beyond 64 bits."""
    for count, value in enumerate(_all_values(values, MOST_LEVELS)):
        if count > most:
            raise ValueError(f"it contains more than {most:,} values")
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise ValueError("it contains a number beyond 64 bits")
        if isinstance(value, float) and math.isfinite(value) and not -_MOST_FLOAT <= value <= _MOST_FLOAT:
            raise ValueError(f"it contains a number beyond {_MOST_FLOAT:g}")


def _all_values(values: Any, levels: int) -> Iterator[Any]:
    """Yield a value and all values inside it."""
    yield values
    if isinstance(values, dict | list):
        if not levels:
            raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep")
        for value in values.values() if isinstance(values, dict) else values:
            yield from _all_values(value, levels - 1)


def memory_of(value: Any) -> int:
    """Return the bytes that a plain value takes, with all values in it."""
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        return size + sum(memory_of(key) + memory_of(item) for key, item in value.items())
    return size + sum(map(memory_of, value)) if isinstance(value, list | tuple) else size

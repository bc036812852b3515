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
_MOST_DIGITS = 20
_QUOTE_OR_LONG_NUMBER = re.compile(rb'\\.|"|(?<![\d.eE+-])-?\d{19,}(?![\d.eE])', re.DOTALL)
"""Only an integer of 19 digits or more can be beyond 64 bits. Not whole texts: matching one takes memory for each escape."""


def check_json(content: bytes) -> None:
    """Raise a ValueError if decoding this JSON could take too much memory, or if it has an integer beyond 64 bits."""
    memory = len(content) * _MEMORY_OF_A_BYTE + sum(content.count(text) * each for text, each in _MEMORY.items())
    if memory > MOST_JSON_MEMORY:
        raise TooLargeError(
            f"its values could take {memory / 1e6:,.0f} MB of memory; the limit is {MOST_JSON_MEMORY / 1e6:,.0f} MB"
        )
    _check_numbers(content)


def _check_numbers(content: bytes) -> None:
    """Raise a ValueError if this JSON has an integer beyond 64 bits; nothing is decoded, which could take much memory."""
    if not re.search(rb"\d{19}", content):
        return
    in_text = False
    for found in _QUOTE_OR_LONG_NUMBER.finditer(content):
        if found[0] == b'"':
            in_text = not in_text
        elif in_text or found[0].startswith(b"\\"):
            continue
        elif len(found[0]) > _MOST_DIGITS or not -(2**63) <= int(found[0]) < 2**64:
            raise ValueError("it contains a number beyond 64 bits")


def check_plain(values: Any, most: float = math.inf) -> None:
    """Raise a ValueError if plain values are too many, nested too deeply or beyond 64 bits."""
    for count, value in enumerate(_all_values(values, MOST_LEVELS)):
        if count > most:
            raise ValueError(f"it contains more than {most:,} values")
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise ValueError("it contains a number beyond 64 bits")


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

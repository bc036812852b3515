"""Damaged JSON: repaired in linear time and memory; ends of events by brackets, compared with reading byte by byte."""

import tracemalloc
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_perf_opt.traces.torch_json import damaged_text
from llm_perf_opt.traces.torch_json.damaged_text import event_ends, repaired
from work import lines_run

NAME = b'{"ph": "X", "name": "%b", "ts": 1}'
HOSTILE: dict[str, Callable[[int], bytes]] = {
    "wrong escapes in one name": lambda size: NAME % (b"\\q" * (size // 2)),
    "wrong escapes in one name, cut short": lambda size: (NAME % (b"\\q" * (size // 2)))[:-12],
    "boundaries of events in one name": lambda size: NAME % (b'}, {"a": 1 ' * (size // 11)),
    "names that begin and do not end": lambda size: b'"name": "\\' * (size // 10),
    "quotes": lambda size: b'"' * size,
    "control characters": lambda size: NAME % (b"\x01" * size),
    "no numbers": lambda size: b"NaN," * (size // 4),
    "names with quotes": lambda size: b",".join([NAME % b'a"b'] * (size // 35)),
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_repairing_takes_memory_in_proportion(hostile: str) -> None:
    text = HOSTILE[hostile](50_000)
    tracemalloc.start()
    try:
        with patch.object(damaged_text, "_LONGEST_STRING", 1000):  # that of one string may be more, but not that of all
            repaired(text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * len(text)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_repairing_takes_time_in_proportion(hostile: str) -> None:
    once, twice = (lines_run(partial(repaired, HOSTILE[hostile](size))) for size in (4_000, 8_000))
    assert twice < 2.2 * once + 100


def plain_ends(text: bytes) -> list[int]:
    """Return the same as `event_ends`, slowly."""
    ends: list[int] = []
    depth, is_inside, is_escaped = 0, False, False
    for place, byte in enumerate(text):
        char = chr(byte)
        if char == '"' and not is_escaped:
            is_inside = not is_inside
        elif not is_inside and char in "[{":
            depth += 1
        elif not is_inside and char in "]}":
            depth -= 1
            if depth < 0:
                return ends
            if depth == 0:
                ends.append(place + 1)
        is_escaped = char == "\\" and not is_escaped
    return ends


@settings(deadline=None)
@given(st.text(alphabet='{}[]"\\a', max_size=60), st.integers(1, 70))
def test_ends_of_any_text_in_blocks_of_any_size(text: str, block: int) -> None:
    with patch.object(damaged_text, "_BLOCK_BYTES", block):
        assert event_ends(text.encode()).tolist() == plain_ends(text.encode())

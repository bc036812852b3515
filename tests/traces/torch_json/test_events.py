"""Repairing text that is not JSON, in linear time and memory."""

import tracemalloc
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest

from llm_perf_opt.traces.torch_json import events
from llm_perf_opt.traces.torch_json.events import repaired
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
def test_mending_takes_memory_in_proportion(hostile: str) -> None:
    text = HOSTILE[hostile](50_000)
    tracemalloc.start()
    try:
        with patch.object(events, "_LONGEST_STRING", 1000):  # that of one string may be more, but not that of all
            repaired(text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * len(text)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_mending_takes_time_in_proportion(hostile: str) -> None:
    once, twice = (lines_run(partial(repaired, HOSTILE[hostile](size))) for size in (4_000, 8_000))
    assert twice < 2.2 * once + 100

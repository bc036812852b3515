"""Splitting the array of events: all events are read, whatever the layout and the size of the pieces."""

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.traces.torch_json import event_chunks
from llm_perf_opt.traces.torch_json.damaged_text import repaired
from llm_perf_opt.traces.torch_json.event_chunks import EventChunks, ReadInto, Surroundings

TEXT = st.text(alphabet='ab"\\{}[],: \n/é', max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.just("name"), inner, max_size=3),
    max_leaves=8,
)
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no fault
EVENTS = st.lists(st.dictionaries(st.sampled_from(["ph", "name", "args", "ts"]) | TEXT, VALUES, max_size=4), max_size=12)


def reader(data: bytes, piece: int) -> ReadInto:
    """A source that returns at most this many bytes per read."""
    place = 0

    def read(room: memoryview) -> int:
        nonlocal place
        found = data[place : place + min(len(room), piece)]
        room[: len(found)] = found
        place += len(found)
        return len(found)

    return read


def cut(data: bytes, chunk: int, piece: int) -> tuple[list[Any], EventChunks, Surroundings]:
    found: list[Any] = []

    def keep(text: bytes | memoryview) -> int:
        events = msgspec.json.decode(text)
        found.extend(events)
        return len(events)

    with patch.object(event_chunks, "CHUNK_BYTES", chunk):
        chunks = EventChunks("file", reader(data, piece), keep)
        around = chunks.run()
    return found, chunks, around


@PATIENT
@given(EVENTS, st.sampled_from([None, 1, 4]), st.booleans(), st.integers(8, 200), st.integers(1, 300))
def test_what_goes_in_comes_out(events: list[Any], indent: int | None, ascii_only: bool, chunk: int, piece: int) -> None:
    before = {"schemaVersion": 1, "x": {"traceEvents": [1, 2]}}
    after = {"WARNING": ["]", "}, {"], "traceName": "n", "others": [{"a": 1}, {"b": 2}]}
    text = json.dumps({**before, "traceEvents": events, **after}, indent=indent, ensure_ascii=ascii_only)
    found, chunks, around = cut(text.encode(), chunk, piece)
    assert found == events
    assert chunks.events == len(events)
    assert (chunks.cut_short, chunks.unreadable, chunks.repaired) == (False, 0, 0)
    assert {key: value for key, value in {**around.before, **around.after}.items() if key} == {**before, **after}


@PATIENT
@given(EVENTS, st.integers(8, 100), st.data())
def test_a_file_cut_anywhere_gives_its_first_events(events: list[Any], chunk: int, data: st.DataObject) -> None:
    text = json.dumps({"traceEvents": [{"ph": "X", "id": number, "args": event} for number, event in enumerate(events)]}).encode()
    begun = text.index(b"[") + 1
    at = data.draw(st.integers(begun, len(text) - 2))
    found, chunks, _ = cut(text[:at], chunk, 50)
    assert chunks.cut_short
    assert [event["id"] for event in found] == list(range(len(found)))
    whole = sum(end <= at for end in _ends(text, begun))
    assert len(found) == whole
    assert chunks.unreadable == 0


def _ends(text: bytes, begun: int) -> list[int]:
    """Return where each event ends, found by decoding one after another."""
    decoder = json.JSONDecoder()
    content = text.decode()
    place = begun
    ends = []
    while content[place] == "{":
        _, place = decoder.raw_decode(content, place)
        ends.append(place)
        place += 2 if content[place] == "," else 0
    return ends


def test_an_event_without_end_does_not_fill_the_memory() -> None:
    with (
        patch.object(event_chunks, "LARGEST_EVENT_BYTES", 10_000),
        pytest.raises(ParseError, match="no event ends in the"),
    ):
        cut(b'{"traceEvents": [{"name": "' + b"x" * 100_000 + b'"}]}', 100, 1000)


def test_a_bracket_that_closes_too_early_is_damage_not_the_end() -> None:
    text = b'{"traceEvents": [{"a": 1}] {"a": 2}, {"a": 3}], "traceName": "x"}'
    found, chunks, _ = cut(text, 1000, 1000)
    assert {"a": 3} in found
    assert chunks.unreadable == 1


def test_what_is_decoded_at_once_fits_into_a_gigabyte() -> None:
    """Nested lists take the most memory per byte of text. The largest event, head and tail may consist of them."""
    text = b"[" + b",".join([b"[" * 900 + b"]" * 900] * 100) + b"]"
    tracemalloc.start()
    try:
        found = msgspec.json.decode(text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == 100
    largest = event_chunks.LARGEST_EVENT_BYTES + event_chunks.CHUNK_BYTES, 2 * event_chunks.LARGEST_EDGE_BYTES
    assert max(largest) * peak / len(text) < 800e6  # the program itself and copies of the text take the rest


def test_edges_too_large_to_be_decoded_are_left_out_and_named() -> None:
    text = json.dumps({"before": ["x"] * 200, "traceEvents": [{"ph": "X"}] * 3, "after": ["x"] * 200}).encode()
    with patch.object(event_chunks, "LARGEST_EDGE_BYTES", 500):
        found, _, around = cut(text, 64, 64)
    assert len(found) == 3
    assert (around.before, around.after, around.readable) == ({}, {}, False)


EVENT = b'{"ph": "X", "name": "k"}'
HOSTILE: dict[str, Callable[[int], bytes]] = {
    "boundaries in one name": lambda size: b'{"ph": "X", "name": "' + b'}, {"a": 1 ' * (size // 11) + b'"}',
    "boundaries in names": lambda size: b", ".join([b'{"ph": "X", "name": "' + b'}, {"a": ' * 9 + b'"}'] * (size // 104)),
    "bad escapes in one name": lambda size: b'{"ph": "X", "name": "' + rb"\q" * (size // 2) + b'"}',
    "closing braces at the end": lambda size: EVENT + b"}" * size,
    "every second event damaged": lambda size: b", ".join([EVENT, b'{"ph": nul}'] * (size // 39)),
    "nothing but boundaries": lambda size: b'}, {"a": ' * (size // 9),
    "opening brackets": lambda size: b"[" * size,
    "quotes": lambda size: b'"' * size,
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_byte_is_decoded_or_repaired_again_and_again(hostile: str) -> None:
    """A damaged piece is halved down to single events."""
    text = b'{"traceEvents": [' + HOSTILE[hostile](40_000) + b"]}"
    looked_at = 0

    def keep(array: bytes | memoryview) -> int:
        nonlocal looked_at
        looked_at += len(array)
        return len(msgspec.json.decode(array))

    def repair(piece: bytes) -> bytes:
        nonlocal looked_at
        looked_at += len(piece)
        return repaired(piece)

    with patch.object(event_chunks, "repaired", repair):
        EventChunks("file", reader(text, 1 << 20), keep).run()
    assert looked_at < 24 * len(text)


READ = """
import sys
from pathlib import Path
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.traces.open_trace import read_trace
try:
    print(len(read_trace(Path(sys.argv[1])).operators))
except ParseError as error:
    print(error.fact)
print(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")))
"""


def reading(trace: Path) -> tuple[str, int]:
    """Read a trace in a process of its own and remove it. Return the number of operators or the error, and the most memory."""
    done = subprocess.run([sys.executable, "-c", READ, trace], capture_output=True, text=True, check=True)
    trace.unlink()
    outcome, kilobytes = done.stdout.splitlines()
    return outcome, 1024 * int(kilobytes)


@pytest.mark.slow
@pytest.mark.parametrize("hostile", HOSTILE)
def test_reading_stays_below_a_gigabyte(hostile: str, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_bytes(b'{"traceEvents": [' + HOSTILE[hostile](16_000_000) + b"]}")
    assert reading(tmp_path / "trace.json")[1] < 1e9


@pytest.mark.slow
def test_reading_millions_of_names_stays_below_a_gigabyte(tmp_path: Path) -> None:
    event = b'{"ph":"X","cat":"cpu_op","pid":1,"tid":1,"ts":%d,"dur":1,"name":"%07d"},\n'
    with (tmp_path / "trace.json").open("wb") as file:
        file.write(b'{"traceEvents": [')
        file.writelines(event % (place, place) for place in range(4_000_000))
        file.write(EVENT + b"]}")
    outcome, most = reading(tmp_path / "trace.json")
    assert "names, shapes and threads take more than" in outcome
    assert most < 1e9


def test_a_key_of_inner_objects_is_looked_at_a_few_times() -> None:
    inner = b'"traceEvents": [], '
    with pytest.raises(ParseError, match="inner objects"):
        cut(b'{"x": {' + inner * 1000, 1000, 1000)
    found, _, _ = cut(b'{"x": {' + inner * 9 + b'"a": 1}, "traceEvents": [{"a": 2}]}', 1000, 1000)
    assert found == [{"a": 2}]


def test_a_file_with_too_many_damaged_events_is_refused() -> None:
    events = [b'{"a": 1}', b'{"a": nul}', b'{"a": 1}'] * 300
    with patch.object(event_chunks, "MOST_LOST", 100), pytest.raises(ParseError, match="more than 100 of its events cannot"):
        cut(b'{"traceEvents": [' + b", ".join(events) + b"]}", 1000, 1000)
    found, chunks, _ = cut(b'{"traceEvents": [' + b", ".join(events) + b"]}", 1000, 1000)
    assert (len(found), chunks.unreadable) == (600, 300)


def test_what_follows_the_events_is_whole_where_one_of_the_last_is_damaged() -> None:
    after = {"others": [{"b": number} for number in range(20)], "traceName": "n"}
    text = b'{"traceEvents": [{"a": 1}, {"a": nul}, {"a": 2}], ' + json.dumps(after)[1:].encode()
    found, chunks, around = cut(text, 1000, 1000)
    assert found == [{"a": 1}, {"a": 2}]
    assert chunks.unreadable == 1
    assert (around.after, around.readable) == ({"": 0, **after}, True)


@pytest.mark.parametrize("before", ["", '{"a": 1}, ', '{"a": 1}, {"a": nul}, '])
def test_a_damaged_last_event_does_not_cut_the_file_short(before: str) -> None:
    text = f'{{"traceEvents": [{before}{{"a": nul}}], "traceName": "n"}}'.encode()
    found, chunks, around = cut(text, 1000, 1000)
    assert (len(found), chunks.unreadable, chunks.cut_short) == (before.count("1"), 1 + before.count("nul"), False)
    assert around.after["traceName"] == "n"
    found, chunks, _ = cut(text[: text.index(b"]")], 1000, 1000)
    assert (len(found), chunks.unreadable, chunks.cut_short) == (before.count("1"), before.count("nul"), True)

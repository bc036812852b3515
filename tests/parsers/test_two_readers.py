"""Two readers find what one finds, or leave the file to the one."""

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from llm_perf_opt.errors import ParseError
from llm_perf_opt.parsers import event_chunks, two_readers
from llm_perf_opt.parsers.torch_trace import read_torch_trace
from llm_perf_opt.parsers.two_readers import read_by_two
from parsers.test_torch_fuzz import MUTATORS, TRIES
from synthetic_traces import Recipe, kinds, write_trace
from traces_equal import in_order, said


class Here:
    """A reader beside this one that is this one: the work is done at once."""

    def __init__(self, work: Callable[[BinaryIO], None]) -> None:
        self.abandoned = False
        self._out: io.BytesIO | None = io.BytesIO()
        try:
            work(self._out)
        except Exception:  # noqa: BLE001 - a copy of the process that fails only fails
            self._out = None

    def result(self) -> bytes | None:
        return None if self._out is None else self._out.getvalue()

    def abandon(self) -> None:
        self.abandoned = True


@pytest.fixture(autouse=True)
def however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_readers, "SMALLEST_BYTES", 0)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("kind", range(5))
def test_both_ways_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int, share: float) -> None:
    monkeypatch.setattr(two_readers, "_SHARE", share)
    path = tmp_path / "trace.json"
    truth = write_trace(path, list(kinds(5))[kind])
    found = read_by_two(path, Here)
    assert found is not None
    assert found.events == truth.events
    by_two = read_torch_trace(path, Here)
    assert said(by_two) == said(read_torch_trace(path))
    assert in_order(by_two)
    assert set(by_two.facts["devices"].split(", ")) == {"NVIDIA H200"}


def outcome(path: Path, start: two_readers.StartBeside | None) -> dict[str, Any] | str:
    try:
        return said(read_torch_trace(path, start))
    except ParseError as error:
        return str(error)


@pytest.mark.parametrize("part", range(2))
def test_both_ways_say_the_same_of_mutants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, Recipe(steps=1, kernels_per_step=2, copies=part == 0, seed=part))
    base = path.read_bytes()
    taken = 0
    for number in range(TRIES // 8):
        draw = random.Random(number)
        monkeypatch.setattr(two_readers, "_SHARE", draw.random())
        monkeypatch.setattr(event_chunks, "CHUNK_BYTES", draw.choice([300, 900, 5000, 1 << 20]))
        path.unlink()
        path.write_bytes(draw.choice(MUTATORS)(bytearray(base), draw))
        assert outcome(path, Here) == outcome(path, None), number
        try:
            taken += read_by_two(path, Here) is not None
        except ParseError:
            continue
    assert taken > TRIES / 80  # many mutants are sound enough for two, or this tests little


def write(path: Path, events: list[dict[str, Any]], **more: Any) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events, **more}))
    return path


OPERATOR = {"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 2, "ts": 1.0, "dur": 2.0, "args": {}}


def test_a_cut_inside_an_event_is_noticed(tmp_path: Path) -> None:
    inner = [{"ph": "X", "number": number} for number in range(200)]
    path = write(tmp_path / "trace.json", [OPERATOR, {**OPERATOR, "args": {"inner": inner}}, OPERATOR])
    assert read_by_two(path, Here) is None
    trace = read_torch_trace(path, Here)
    assert len(trace.operators) == 3
    assert trace.complete


def test_a_cut_behind_the_events_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", [OPERATOR] * 3, behind=[OPERATOR] * 50)
    assert read_by_two(path, Here) is None
    assert len(read_torch_trace(path, Here).operators) == 3


def test_numbers_beyond_all_bounds_are_left_to_the_one(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", [{**OPERATOR, "tid": 2**62 + number} for number in range(8)])
    assert read_by_two(path, Here) is None
    assert len(set(read_torch_trace(path, Here).operators.thread.tolist())) == 8


def test_a_file_that_is_replaced_meanwhile_is_not_mixed(tmp_path: Path) -> None:
    """Both parts are sound; they are of two files."""
    path = write(tmp_path / "trace.json", [OPERATOR] * 50)
    other = write(tmp_path / "other.json", [{**OPERATOR, "dur": 9.0}] * 50)

    class Replaced(Here):
        def __init__(self, work: Callable[[BinaryIO], None]) -> None:
            other.replace(path)
            super().__init__(work)

    assert read_by_two(path, Replaced) is None


def test_threads_that_are_words_are_left_to_the_one(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", [{**OPERATOR, "tid": name, "name": name} for name in "abcdefgh"])
    assert read_by_two(path, Here) is None
    assert len(set(read_torch_trace(path, Here).operators.thread.tolist())) == 8


def test_what_goes_wrong_beside_costs_nothing_but_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    truth = write_trace(path, Recipe())

    class Fails(Here):
        def result(self) -> None:
            return None

    for start in (Fails, lambda _: None):
        assert read_by_two(path, start) is None
        assert read_torch_trace(path, start).facts["events"] == str(truth.events)


def test_whoever_works_beside_is_always_ended(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, Recipe())
    started: list[Here] = []

    def start(work: Callable[[BinaryIO], None]) -> Here:
        started.append(Here(work))
        return started[-1]

    read_by_two(path, start)
    path.write_bytes(path.read_bytes().replace(b'"traceEvents"', b'"others"'))
    read_by_two(path, start)
    assert [one.abandoned for one in started] == [True, True]


def test_small_and_packed_files_are_left_to_the_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gzip

    path = tmp_path / "trace.json"
    write_trace(path, Recipe())
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_by_two(packed, Here) is None
    monkeypatch.setattr(two_readers, "SMALLEST_BYTES", path.stat().st_size + 1)
    assert read_by_two(path, Here) is None

"""The first bytes of a file select its reader."""

import gc
import gzip
import itertools
import os
import shutil
import sqlite3
import sys
import tracemalloc
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.traces import events
from llm_perf_opt.traces.open_trace import FORMATS, format_of, read_trace
from llm_perf_opt.traces.torch_json import codes, columns

REAL = Path(__file__).parents[1] / "fixtures" / "h200" / "torch_trace.json.gz"


def test_a_torch_trace_under_any_name(tmp_path: Path) -> None:
    for name in ("trace.json.gz", "trace", "trace.sqlite"):
        trace = read_trace(Path(shutil.copy(REAL, tmp_path / name)))
        assert trace.source == "torch"
        assert len(trace.work) == 1733


def test_a_database_is_nsys_plain_or_packed(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "x.json") as database:
        database.execute("create table t (a)")
    database.close()
    (tmp_path / "x.gz").write_bytes(gzip.compress((tmp_path / "x.json").read_bytes()))
    nsys = next(known for known in FORMATS if known.name == "nsys")
    assert format_of(tmp_path / "x.json") == format_of(tmp_path / "x.gz") == nsys
    assert format_of(REAL) is None


@pytest.mark.parametrize("name", ["run.nsys-rep", "run.qdrep"])
def test_what_only_nsys_reads_comes_with_its_command(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ParseError) as caught:
        read_trace(tmp_path / name)
    assert caught.value.remedy == f"nsys export --type sqlite -o run.sqlite {name}"


def test_a_folder_and_nothing(tmp_path: Path) -> None:
    with pytest.raises(ParseError, match="is a folder"):
        read_trace(tmp_path)
    with pytest.raises(ParseError, match="cannot be read"):
        read_trace(tmp_path / "none")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ParseError, match="not a regular file"):
        read_trace(tmp_path / "pipe")


@pytest.mark.parametrize("name", ["torch_trace.json.gz", "nsys_decode.sqlite.gz", "inline.sqlite"])
def test_names_that_take_too_much_memory_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever reader, wherever it stops; each distinct text counts once."""
    path, unheard, counted = REAL.with_name(name), list[object](), list[str | bytes]()
    if name == "inline.sqlite":  # with labels that are not among the strings of the export
        path = tmp_path / name
        path.write_bytes(gzip.decompress(REAL.with_name("nsys_decode.sqlite.gz").read_bytes()))
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("UPDATE NVTX_EVENTS SET textId = NULL, text = 'label ' || rowid WHERE eventType = 59")
    monkeypatch.setattr(sys, "unraisablehook", unheard.append)
    with monkeypatch.context() as patched:
        patched.setattr(events.NameCodes, "count", lambda _, text: counted.append(text))
        assert set(read_trace(path).names) <= set(counted)
    assert len(counted) == len(set(counted))
    needed = sum(sys.getsizeof(text) + events._NAME_ENTRY_BYTES for text in counted)
    monkeypatch.setattr(events, "MOST_NAME_BYTES", needed)
    assert len(read_trace(path).work)
    for limit in (needed - 1, *range(100, needed, max(needed // 9, 1))):
        monkeypatch.setattr(events, "MOST_NAME_BYTES", limit)
        with pytest.raises(ParseError, match="its distinct names, shapes and threads take more than") as caught:
            read_trace(path)
        assert caught.value.fact.startswith(f"{path}: ")
    gc.collect()
    assert unheard == []


def test_names_take_the_memory_that_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_NAME_BYTES", 10_000_000)
    names = events.NameCodes("trace.json")
    tracemalloc.start()
    try:
        with pytest.raises(ParseError):
            sum(names[f"{number:x}"] for number in itertools.count())
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 5_000_000 < held < 13_000_000
    assert most < 20_000_000, "while the table grows"


@pytest.mark.parametrize("thread", ["%d", '"thread %d"'])
def test_more_threads_than_a_reader_can_number(thread: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes, "MOST_IDENTITIES", 50)
    event = '{"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": THREAD, "ts": 1, "dur": 1}'.replace("THREAD", thread)
    for count, refused in ((49, False), (51, True)):
        (tmp_path / "x.json").write_text('{"traceEvents": [' + ", ".join(event % number for number in range(count)) + "]}")
        with pytest.raises(ParseError, match="50 processes and threads") if refused else nullcontext():
            assert len(read_trace(tmp_path / "x.json").operators) == count


@pytest.mark.parametrize(
    "field",
    [
        b'"tid": "%s"',
        b'"pid": "%s"',
        b'"args": {"Input Dims": [[1], "%s"]}',
        b'"args": {"Input Dims": "\xff%s"}',
        b'"name": "%s"',
    ],
)
def test_every_text_that_is_kept_is_counted(field: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also shapes that are no valid UTF-8: they are the same text for a reader, but are kept as they are."""
    monkeypatch.setattr(events, "MOST_NAME_BYTES", 1_000_000)
    common = b'"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1, "ts": 1, "dur": 1'

    def event(number: int) -> bytes:
        text = bytes(254 + (number >> bit & 1) for bit in range(8)) if b"\xff" in field else b"%d" % number
        return b"{%s, %s}" % (common, field % (text + 10_000 * b"x"))

    for count, refused in ((40, False), (120, True)):
        (tmp_path / "x.json").write_bytes(b'{"traceEvents": [%s]}' % b", ".join(event(number) for number in range(count)))
        with pytest.raises(ParseError, match="its distinct names, shapes and threads") if refused else nullcontext():
            assert len(read_trace(tmp_path / "x.json").operators) == count


def test_long_numbers_of_threads_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_NAME_BYTES", 100_000)
    event = '{"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1%04000d, "ts": 1, "dur": 1}'
    for count, refused in ((30, False), (90, True)):
        (tmp_path / "x.json").write_text('{"traceEvents": [' + ", ".join(event % number for number in range(count)) + "]}")
        with pytest.raises(ParseError, match="its distinct names, shapes and threads") if refused else nullcontext():
            assert len(read_trace(tmp_path / "x.json").operators) == count


def test_long_categories_are_not_kept_whole() -> None:
    numbers = codes.Codes("trace.json")
    lists = columns._Buckets(numbers)
    for number in range(2000):
        for category in (f"{number}{1000 * 'x'}", f"{1000 * 'x'}{number}"):
            lists[category]
    assert sum(map(len, numbers.others)) <= 200_000
    assert len(lists) == 0, "none is a key"

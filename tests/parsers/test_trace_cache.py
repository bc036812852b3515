"""A trace is parsed once; never is an old or damaged table taken for it."""

import gzip
import os
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from llm_perf_opt.errors import ParseError
from llm_perf_opt.events import Trace
from llm_perf_opt.parsers import trace_cache, trace_mark
from llm_perf_opt.parsers.open_trace import read_trace
from llm_perf_opt.parsers.trace_cache import cached_trace, fingerprint
from llm_perf_opt.parsers.trace_mark import META_FILE, fresh_tables
from llm_perf_opt.parsers.trace_tables import made_of
from synthetic_traces import Recipe, write_trace


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "trace.json"
    path.parent.mkdir()
    write_trace(path, Recipe(steps=2, kernels_per_step=3))
    return path


def aged(path: Path) -> None:
    """Wait until the file's change time is certainly past."""
    while time.time() - path.stat().st_ctime < 0.15:
        time.sleep(0.05)


def test_the_second_reading_comes_from_the_tables(source: Path) -> None:
    first = cached_trace(source)
    assert first.parsed
    assert first.tables is not None
    assert first.tables.parent == source.parent
    assert first.tables.name == f"trace.json.tables-{fingerprint(source)}"
    second = cached_trace(source)
    assert not second.parsed
    assert second.tables == first.tables
    assert second.trace.names == first.trace.names
    assert (second.trace.work.start_ns == first.trace.work.start_ns).all()


def test_an_untouched_file_is_not_even_read(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aged(source)
    cached_trace(source)

    def unwanted(_: Path) -> str:
        raise AssertionError("the file was read")

    monkeypatch.setattr("llm_perf_opt.parsers.trace_cache.fingerprint", unwanted)
    assert not cached_trace(source).parsed


@pytest.mark.parametrize("packed", ["", ".gz", ".zip"])
def test_tables_are_named_by_the_bytes_of_the_file_whether_packed_or_not(source: Path, packed: str) -> None:
    given = source.with_name(f"trace.json{packed}")
    if packed == ".gz":
        given.write_bytes(gzip.compress(source.read_bytes()))
    elif packed:
        with zipfile.ZipFile(given, "w") as archive:
            archive.write(source, "trace.json")
    found = cached_trace(given)
    assert found.tables is not None
    assert made_of(found.tables)[0] == fingerprint(given)
    assert found.tables.name == f"{given.name}.tables-{fingerprint(given)}"


def test_the_first_reading_reads_the_file_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(_: Path) -> str:
        raise AssertionError("the file was read again")

    monkeypatch.setattr("llm_perf_opt.parsers.trace_cache.fingerprint", unwanted)
    assert cached_trace(source).parsed


def test_a_change_is_noticed_though_size_and_time_are_put_back(source: Path) -> None:
    aged(source)
    first = cached_trace(source)
    before = source.stat()
    text = source.read_bytes()
    assert b'"prefill"' in text
    source.write_bytes(text.replace(b'"prefill"', b'"PREFILL"'))
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = cached_trace(source)
    assert second.parsed
    assert "PREFILL" in second.trace.names
    assert second.tables != first.tables
    assert [path for path in source.parent.iterdir() if path != source] == [second.tables]  # the old ones are gone


def test_a_moved_trace_finds_its_tables_by_its_bytes(source: Path, tmp_path: Path) -> None:
    cached_trace(source)
    moved = source.parent.rename(tmp_path / "elsewhere") / source.name
    content = moved.read_bytes()
    moved.unlink()
    moved.write_bytes(content)  # another file of the same bytes
    assert not cached_trace(moved).parsed


def test_damaged_tables_are_made_anew(source: Path) -> None:
    tables = cached_trace(source).tables
    assert tables is not None
    (tables / "kernels.parquet").write_bytes(b"PAR1")
    assert cached_trace(source).parsed
    assert not cached_trace(source).parsed
    (tables / META_FILE).unlink()
    assert cached_trace(source).parsed


def test_a_folder_can_be_given(source: Path, tmp_path: Path) -> None:
    wanted = tmp_path / "run" / "tables" / "torch"
    assert cached_trace(source, wanted).tables == wanted
    assert not cached_trace(source, wanted).parsed
    assert list(source.parent.iterdir()) == [source]
    source.write_bytes(source.read_bytes().replace(b'"prefill"', b'"PREFILL"'))
    assert cached_trace(source, wanted).parsed
    assert made_of(wanted)[0] == fingerprint(source)


def test_where_nothing_can_be_written_the_trace_comes_all_the_same(source: Path) -> None:
    wanted = source / "below a file"
    found = cached_trace(source, wanted)
    assert found.tables is None
    assert found.parsed
    assert "not kept" in found.note
    assert len(found.trace.work) == 9


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder(source: Path) -> None:
    source.parent.chmod(0o555)
    try:
        assert cached_trace(source).tables is None
    finally:
        source.parent.chmod(0o755)


def test_without_duckdb_nothing_is_kept(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    found = cached_trace(source)
    assert found.tables is None
    assert "duckdb" in found.note
    assert len(found.trace.work) == 9


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ParseError, match="cannot be read"):
        cached_trace(tmp_path / "none.json")


def test_other_files_beside_the_trace_stay(source: Path) -> None:
    keep = source.parent / "trace.json.tables-v1-mine"
    keep.mkdir()
    (keep / "notes.txt").write_text("not a table")
    cached_trace(source)
    assert (keep / "notes.txt").exists()


def test_the_trace_is_worked_with_once_however_it_comes(source: Path) -> None:
    aged(source)
    for parsed in (True, False):
        given: list[Trace] = []
        found = cached_trace(source, meanwhile=given.append)
        assert found.parsed == parsed
        assert given == [found.trace]


def test_what_goes_wrong_meanwhile_is_heard_and_the_tables_are_kept(source: Path) -> None:
    def fail(_: Trace) -> None:
        raise RuntimeError("meanwhile")

    with pytest.raises(RuntimeError, match="meanwhile"):
        cached_trace(source, meanwhile=fail)
    assert not cached_trace(source).parsed


def test_nothing_is_kept_of_a_file_that_changes_while_it_is_read(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = read_trace

    def read_and_change(path: Path, *rest: Any) -> Trace:
        found = read(path, *rest)
        path.write_bytes(path.read_bytes().replace(b'"prefill"', b'"PREFILL"'))
        return found

    monkeypatch.setattr(trace_cache, "read_trace", read_and_change)
    found = cached_trace(source)
    assert found.tables is None
    assert "changed while it was read" in found.note
    monkeypatch.undo()
    again = cached_trace(source)
    assert again.parsed
    assert "PREFILL" in again.trace.names


def test_what_a_killed_writer_left_is_swept(tmp_path: Path) -> None:
    source = tmp_path / "trace.json"
    write_trace(source, Recipe(steps=2, kernels_per_step=3))
    dead, alive = (tmp_path / f".trace.json.tables-v4-1-2.{pid}-7.part" for pid in (2**22 + 5, os.getpid()))
    for half in (dead, alive):
        half.mkdir()
    cached_trace(source)
    assert not dead.exists()
    assert alive.exists(), "somebody else may be writing"


def test_what_other_code_made_of_a_trace_is_made_anew(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aged(source)
    assert cached_trace(source).parsed
    assert fresh_tables(source) is not None
    for module in ("trace_mark", "trace_tables"):
        monkeypatch.setattr(f"llm_perf_opt.parsers.{module}.made_by", lambda: "another")
    assert fresh_tables(source) is None
    assert cached_trace(source).parsed
    assert not cached_trace(source).parsed


def test_the_mark_of_the_code_changes_with_what_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    monkeypatch.setattr(trace_mark, "__file__", str(package / "parsers" / "trace_mark.py"))
    seen = set()
    for file, text in [("stages.py", ""), ("parsers/trace_mark.py", ""), ("analysis/kernels/class_rules.py", "a"),
                       ("analysis/kernels/class_rules.py", "b"), ("analysis/trace/new.py", "")]:  # fmt: skip
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text(text)
        seen.add(trace_mark.made_by.__wrapped__())
    assert len(seen) == 5
    (package / "report").mkdir()
    (package / "report" / "html.py").write_text("")
    assert trace_mark.made_by.__wrapped__() in seen, "how a page looks decides nothing"

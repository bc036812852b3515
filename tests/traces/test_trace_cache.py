"""A trace is parsed once, and outdated or damaged tables are never used."""

import gzip
import os
import sys
import time
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llm_perf_opt.analysis.trace.stages import stage_columns
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.inside import partial_of
from llm_perf_opt.core.records import Missing
from llm_perf_opt.traces import trace_cache, trace_mark
from llm_perf_opt.traces.events import Trace
from llm_perf_opt.traces.open_trace import read_trace
from llm_perf_opt.traces.trace_cache import fingerprint
from llm_perf_opt.traces.trace_mark import META_FILE, fresh_tables, kept_bytes, kept_for
from llm_perf_opt.traces.trace_tables import made_of
from synthetic_traces import Recipe, write_trace

cached_trace = partial(trace_cache.cached_trace, columns=stage_columns)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "trace.json"
    path.parent.mkdir()
    write_trace(path, Recipe(steps=2, kernels_per_step=3))
    return path


def aged(path: Path) -> None:
    """Wait until the change time of the file is past."""
    while time.time() - path.stat().st_ctime < 0.15:
        time.sleep(0.05)


def test_the_second_reading_comes_from_the_tables(source: Path) -> None:
    first = cached_trace(source)
    assert first.parsed
    assert not isinstance(first.tables, Missing)
    assert first.tables.is_relative_to(os.environ["XDG_CACHE_HOME"])
    assert first.tables.name == f"tables-{fingerprint(source)}"
    assert list(source.parent.iterdir()) == [source], "nothing is put beside a user's file"
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

    monkeypatch.setattr("llm_perf_opt.traces.trace_cache.fingerprint", unwanted)
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
    assert not isinstance(found.tables, Missing)
    assert made_of(found.tables)[0] == fingerprint(given)
    assert found.tables.name == f"tables-{fingerprint(given)}"


def test_the_first_reading_reads_the_file_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(_: Path) -> str:
        raise AssertionError("the file was read again")

    monkeypatch.setattr("llm_perf_opt.traces.trace_cache.fingerprint", unwanted)
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
    assert not isinstance(second.tables, Missing)
    assert list(second.tables.parent.iterdir()) == [second.tables]  # the old ones are gone


def test_another_file_of_the_same_bytes_in_its_place_finds_the_tables(source: Path) -> None:
    cached_trace(source)
    content = source.read_bytes()
    source.unlink()
    source.write_bytes(content)
    assert not cached_trace(source).parsed


def test_a_file_is_known_by_where_it_really_lies(source: Path, tmp_path: Path) -> None:
    cached_trace(source)
    (tmp_path / "link").symlink_to(source.parent)
    assert not cached_trace(tmp_path / "link" / source.name).parsed
    copy = source.with_name("copy.json")
    copy.write_bytes(source.read_bytes())
    assert cached_trace(copy).parsed, "what is kept of one file is replaced when that one changes"


def test_damaged_tables_are_made_anew(source: Path) -> None:
    tables = cached_trace(source).tables
    assert not isinstance(tables, Missing)
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
    assert isinstance(found.tables, Missing)
    assert found.parsed
    assert "not kept" in found.tables.why
    assert len(found.trace.work) == 9


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder(source: Path) -> None:
    source.parent.chmod(0o555)
    try:
        assert not isinstance(cached_trace(source).tables, Missing)
        assert not cached_trace(source).parsed
    finally:
        source.parent.chmod(0o755)


def test_a_cache_that_cannot_be_written_costs_the_cache_alone(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        found = cached_trace(source)
        assert found.parsed
        assert isinstance(found.tables, Missing)
        assert f"{tmp_path / 'file'}" in found.tables.why
        assert len(found.trace.work) == 9
    monkeypatch.setattr(trace_mark, "user_cache_folder", lambda _: Missing("no home"))
    assert cached_trace(source).tables == Missing("the tables were not kept: no home")


# --- the bound --------------------------------------------------------------------------------------------------------


def entry_of(source: Path) -> Path:
    kept = kept_for(source)
    assert not isinstance(kept, Missing)
    return kept


def test_what_was_used_least_recently_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sources = [tmp_path / f"{name}.json" for name in "abcd"]
    for number, source in enumerate(sources):
        write_trace(source, Recipe(steps=2, kernels_per_step=3))
        if number < 3:
            cached_trace(source)
            os.utime(entry_of(source), (number, number))
    one = kept_bytes(entry_of(sources[0]))
    assert not cached_trace(sources[0]).parsed  # the oldest, and used again now
    monkeypatch.setattr(trace_cache, "MOST_BYTES", round(3.5 * one))
    cached_trace(sources[3])
    assert [entry_of(source).exists() for source in sources] == [True, False, True, True]
    monkeypatch.setattr(trace_cache, "MOST_BYTES", 1)
    cached_trace(sources[1])
    assert [entry_of(source).exists() for source in sources] == [False, True, False, False], "what was asked for stays"


def test_without_duckdb_nothing_is_kept(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    found = cached_trace(source)
    assert isinstance(found.tables, Missing)
    assert "duckdb" in found.tables.why
    assert len(found.trace.work) == 9


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ParseError, match="cannot be read"):
        cached_trace(tmp_path / "none.json")


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
    assert isinstance(found.tables, Missing)
    assert "changed while it was read" in found.tables.why
    monkeypatch.undo()
    again = cached_trace(source)
    assert again.parsed
    assert "PREFILL" in again.trace.names


def test_what_a_killed_writer_left_is_swept(tmp_path: Path) -> None:
    source = tmp_path / "trace.json"
    write_trace(source, Recipe(steps=2, kernels_per_step=3))
    alive = partial_of(entry_of(source) / "tables-v4-1-2")
    dead = alive.with_name(alive.name.replace(f".{os.getpid()}-", f".{2**22 + 5}-"))
    for half in (dead, alive):
        half.mkdir(parents=True)
    cached_trace(source)
    assert not dead.exists()
    assert alive.exists(), "somebody else may be writing"


def test_what_other_code_made_of_a_trace_is_made_anew(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aged(source)
    assert cached_trace(source).parsed
    assert fresh_tables(source) is not None
    for module in ("trace_mark", "trace_tables"):
        monkeypatch.setattr(f"llm_perf_opt.traces.{module}.made_by", lambda: "another")
    assert fresh_tables(source) is None
    assert cached_trace(source).parsed
    assert not cached_trace(source).parsed


def test_the_mark_of_the_code_changes_with_what_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    monkeypatch.setattr(trace_mark, "__file__", str(package / "traces" / "trace_mark.py"))
    seen = set()
    for file, text in [("core/stages.py", ""), ("traces/trace_mark.py", ""), ("analysis/kernels/classes.py", "a"),
                       ("analysis/kernels/classes.py", "b"), ("analysis/trace/new.py", "")]:  # fmt: skip
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text(text)
        seen.add(trace_mark.made_by.__wrapped__())
    assert len(seen) == 5
    (package / "report").mkdir()
    (package / "report" / "html.py").write_text("")
    assert trace_mark.made_by.__wrapped__() in seen, "how a page looks decides nothing"

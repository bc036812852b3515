"""Writing a trace as tables and reading it back: nothing is lost, any DuckDB reads them, no partial files remain."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from llm_perf_opt.core.errors import ParseError, ResourceError
from llm_perf_opt.traces import trace_tables
from llm_perf_opt.traces.events import DeviceWork, HostCalls, Operators, RangeKind, Ranges, Trace, TraceProblem
from llm_perf_opt.traces.torch_json.trace import read_torch_trace
from llm_perf_opt.traces.trace_mark import META_FILE
from llm_perf_opt.traces.trace_tables import TABLE_NAMES, connect, made_of, read_tables, write_tables
from synthetic_traces import Recipe, Truth, write_trace


def same(one: Trace, other: Trace) -> bool:
    for table in ("work", "calls", "ranges", "operators", "samples"):
        columns, others = getattr(one, table).columns(), getattr(other, table).columns()
        for name, column in columns.items():
            if column.dtype != others[name].dtype or not np.array_equal(column, others[name]):
                return False
    rest = ("source", "problems", "facts")
    return list(one.names) == list(other.names) and all(getattr(one, name) == getattr(other, name) for name in rest)


def rows_of(sql: str) -> list[Any]:
    with duckdb.connect() as connection:
        return connection.execute(sql).fetchall()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Truth]:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    truth = write_trace(path, Recipe(steps=5, kernels_per_step=9, copies=True, graph=True))
    return read_torch_trace(path), truth


def test_what_is_written_is_read_back(tmp_path: Path, made: tuple[Trace, Truth]) -> None:
    trace, _ = made
    problem = TraceProblem("truncated", "a 'quoted' fact\nof two lines", True, "remedy")
    trace = replace(trace, problems=(problem,), facts={"tool": "x", "é": "ü"})
    write_tables(trace, tmp_path / "tables", of="abc", seen="s", root=tmp_path)
    assert same(read_tables(tmp_path / "tables"), trace)
    assert made_of(tmp_path / "tables") == ("abc", "s")
    assert [path.name for path in tmp_path.iterdir()] == ["tables"]  # nothing is left beside


def test_a_trace_without_events(tmp_path: Path) -> None:
    empty = Trace("nsys", [], DeviceWork.none(), HostCalls.none(), Ranges.none(), Operators.none())
    write_tables(empty, tmp_path / "tables", root=tmp_path)
    assert same(read_tables(tmp_path / "tables"), empty)


def test_rows_stay_in_order_when_there_are_more_names_than_rows(tmp_path: Path) -> None:
    count = 50
    column = np.arange(count, dtype=np.int64)
    ranges = Ranges(
        start_ns=column, end_ns=column + 5, name=(column[::-1] * 90).astype(np.int32), domain=np.full(count, -1, np.int32),
        kind=np.full(count, RangeKind.START_END, np.uint8), process=column * 0, thread=-column,
    )  # fmt: skip
    names = [f"range '{number}' \"é\"\n" for number in range(5000)]
    trace = Trace("nsys", names, DeviceWork.none(), HostCalls.none(), ranges, Operators.none())
    write_tables(trace, tmp_path / "it's here", root=tmp_path)
    assert same(read_tables(tmp_path / "it's here"), trace)


def test_any_duckdb_reads_the_files(tmp_path: Path, made: tuple[Trace, Truth]) -> None:
    trace, truth = made
    write_tables(trace, tmp_path / "tables", root=tmp_path)
    query = f"select name, count(*), sum(dur_ns) from '{tmp_path}/tables/kernels.parquet' where kind = 'kernel' group by name"
    found = {name: [calls, int(total)] for name, calls, total in rows_of(query)}
    assert found == dict(truth.by_name)
    unknown = f"select count(*) from '{tmp_path}/tables/kernels.parquet' where size_bytes is null"
    assert rows_of(unknown) == [(truth.kernels,)]
    ((least,),) = rows_of(f"select min(graph_node) from '{tmp_path}/tables/kernels.parquet'")
    assert least > 0  # a kernel of no graph has no node, not node 0


def test_extra_columns_stand_first(tmp_path: Path, made: tuple[Trace, Truth]) -> None:
    trace, _ = made
    stage = np.array(["decode", None] * len(trace.work), object)[: len(trace.work)]
    step = np.arange(len(trace.work), dtype=np.int32)
    write_tables(trace, tmp_path / "tables", extra={"kernels": {"stage": stage, "step": step}}, root=tmp_path)
    file = f"'{tmp_path}/tables/kernels.parquet'"
    assert [row[0] for row in rows_of(f"describe select * from {file}")][:3] == ["stage", "step", "name"]
    assert rows_of(f"select stage, step from {file} limit 3") == [("decode", 0), (None, 1), ("decode", 2)]
    assert same(read_tables(tmp_path / "tables"), trace)


def test_tables_are_replaced_whole(tmp_path: Path, made: tuple[Trace, Truth]) -> None:
    trace, _ = made
    write_tables(replace(trace, names=["x"] * len(trace.names)), tmp_path / "tables", root=tmp_path)
    write_tables(trace, tmp_path / "tables", root=tmp_path)
    assert same(read_tables(tmp_path / "tables"), trace)
    assert [path.name for path in tmp_path.iterdir()] == ["tables"]


def test_a_failed_write_leaves_the_old_tables(tmp_path: Path, made: tuple[Trace, Truth], monkeypatch: pytest.MonkeyPatch) -> None:
    trace, _ = made
    write_tables(trace, tmp_path / "tables", root=tmp_path)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("llm_perf_opt.traces.trace_tables._copy_to", fail)
    with pytest.raises(OSError, match="No space"):
        write_tables(replace(trace, facts={}), tmp_path / "tables", root=tmp_path)
    assert same(read_tables(tmp_path / "tables"), trace)
    assert [path.name for path in tmp_path.iterdir()] == ["tables"]


@pytest.mark.parametrize("file", [META_FILE, "names.parquet", *[f"{table}.parquet" for table in TABLE_NAMES]])
def test_damage_is_noticed(tmp_path: Path, made: tuple[Trace, Truth], file: str) -> None:
    trace, _ = made
    folder = tmp_path / "tables"
    write_tables(trace, folder, root=folder.parent)
    whole = (folder / file).read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0x10
    for damaged in (whole[:-1], b"", bytes(flipped), None):
        if damaged is None:
            (folder / file).unlink()
        else:
            (folder / file).write_bytes(damaged)
        if file == META_FILE and damaged == bytes(flipped):
            continue  # a letter of a fact may change and stay JSON
        with pytest.raises(ParseError, match="tables"):
            read_tables(folder)


def test_another_version_is_refused(tmp_path: Path, made: tuple[Trace, Truth], monkeypatch: pytest.MonkeyPatch) -> None:
    write_tables(made[0], tmp_path / "tables", root=tmp_path)
    monkeypatch.setattr("llm_perf_opt.traces.trace_tables.SCHEMA_VERSION", 999)
    with pytest.raises(ParseError, match="another version"):
        read_tables(tmp_path / "tables")


def test_a_folder_whose_name_is_a_pattern_or_a_column_is_read_by_itself(tmp_path: Path, made: tuple[Trace, Truth]) -> None:
    other_path = tmp_path / "other.json"
    write_trace(other_path, Recipe(steps=2, kernels_per_step=3))
    write_tables(read_torch_trace(other_path), tmp_path / "t1", root=tmp_path)
    for name in ("t[1]", "t?", "dur_ns=5", "it's=[x]"):
        write_tables(made[0], tmp_path / name, root=tmp_path)
        assert same(read_tables(tmp_path / name), made[0])


def test_without_duckdb_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(ResourceError, match="duckdb is not installed") as caught:
        connect()
    assert "pip install" in caught.value.remedy


def test_a_long_name_that_its_file_repeats_is_not_read(tmp_path: Path) -> None:
    trace = Trace("nsys", ["a" * (1 << 20)] * 300, DeviceWork.none(), HostCalls.none(), Ranges.none(), Operators.none())
    write_tables(trace, tmp_path / "tables", root=tmp_path)
    assert (tmp_path / "tables" / "names.parquet").stat().st_size < 1 << 20
    with pytest.raises(ParseError, match="more than 200 times its size"):
        read_tables(tmp_path / "tables")


def test_texts_in_place_of_numbers_are_not_read(
    tmp_path: Path, made: tuple[Trace, Truth], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column of texts would become Python values, however long its file says they are."""
    real = trace_tables._copy_to

    def planted(connection: duckdb.DuckDBPyConnection, table: str, file: Path) -> None:
        chosen = f"(select * replace (repeat('a', 9) as start_ns) from {table})" if table == "calls" else table
        real(connection, chosen, file)

    monkeypatch.setattr(trace_tables, "_copy_to", planted)
    write_tables(made[0], tmp_path / "tables", root=tmp_path)
    with pytest.raises(ParseError, match="Could not convert string 'aaaaaaaaa' to INT64"):
        read_tables(tmp_path / "tables")

"""Write a trace as tables, and read it back: Parquet files that any DuckDB opens, with names as text and times in integer ns.

`kernels` (all device work, with its kind), `calls`, `ranges` and `operators` have a row per event, `gpu_metrics` one per sample.
`names` numbers the names; columns that end in `_id` contain these numbers, so a trace can be read back without texts. An unknown
value is NULL. `meta.json` contains problems, facts, and the size and checksum of every file, so that damage is detected.
"""

import atexit
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from llm_perf_opt.core.errors import ParseError, ResourceError
from llm_perf_opt.core.inside import inside, make_folder, move, new_folder, open_new, partial_of, remove_if_possible
from llm_perf_opt.core.proportion import Proportion
from llm_perf_opt.core.run_folder import encoded
from llm_perf_opt.core.user_files import literal, parquet_rows, pattern_of, read_bytes
from llm_perf_opt.traces.events import (
    NO_NAME,
    Collectives,
    Columns,
    DeviceSamples,
    DeviceWork,
    HostCalls,
    Operators,
    Ranges,
    Trace,
    TraceProblem,
    is_beyond_clocks,
)
from llm_perf_opt.traces.trace_mark import META_FILE, SCHEMA_VERSION, made_by

if TYPE_CHECKING:
    import duckdb

Extra = Mapping[str, Mapping[str, Any]]
"""Table → column → a numpy array with one value per row: numbers, or an object array of text and None."""

_WORK_KINDS = "['kernel', 'memcpy', 'memset']"
_RANGE_KINDS = "['push_pop', 'start_end']"
_TIMES = "start_ns, end_ns, end_ns - start_ns as dur_ns"

# Table → (SQL from arrays to columns, SQL from columns back to arrays). `names` is the list of all names.
_TABLES: dict[str, tuple[str, str]] = {
    "kernels": (
        f"""names[name + 1] as name, {_WORK_KINDS}[kind + 1] as kind, {_TIMES}, device, stream, process,
        nullif(correlation, 0) as correlation, nullif(graph_node, 0) as graph_node,
        nullif(size_bytes, -1) as size_bytes, nullif(grid, 0) as grid, nullif(block, 0) as block, name as name_id""",
        f"""start_ns, end_ns, (list_position({_WORK_KINDS}, kind) - 1)::utinyint as kind, name_id as name, process, device,
        stream,
        coalesce(correlation, 0) as correlation, coalesce(graph_node, 0) as graph_node,
        coalesce(size_bytes, -1) as size_bytes, coalesce(grid, 0) as grid, coalesce(block, 0) as block""",
    ),
    "calls": (
        f"names[name + 1] as name, {_TIMES}, process, thread, nullif(correlation, 0) as correlation, name as name_id",
        "start_ns, end_ns, name_id as name, process, thread, coalesce(correlation, 0) as correlation",
    ),
    "ranges": (
        f"""names[name + 1] as name, names[nullif(domain, -1) + 1] as domain, {_RANGE_KINDS}[kind + 1] as kind, {_TIMES},
        process, thread, name as name_id, domain as domain_id""",
        f"""start_ns, end_ns, name_id as name, domain_id as domain, (list_position({_RANGE_KINDS}, kind) - 1)::utinyint as kind,
        process, thread""",
    ),
    "operators": (
        f"""names[name + 1] as name, names[nullif(shapes, -1) + 1] as shapes, {_TIMES}, process, thread,
        name as name_id, shapes as shapes_id""",
        "start_ns, end_ns, name_id as name, process, thread, shapes_id as shapes",
    ),
    "collectives": (
        f"""names[name + 1] as name, names[nullif(collective, -1) + 1] as collective,
        names[nullif(process_group, -1) + 1] as process_group, names[nullif(group_ranks, -1) + 1] as group_ranks,
        nullif(group_size, 0) as group_size, nullif(in_bytes, -1) as in_bytes, nullif(out_bytes, -1) as out_bytes,
        nullif(sequence, -1) as sequence, on_device, {_TIMES}, process, thread, name as name_id,
        collective as collective_id, process_group as process_group_id, group_ranks as group_ranks_id""",
        """start_ns, end_ns, name_id as name, on_device, collective_id as collective, process_group_id as process_group,
        group_ranks_id as group_ranks, coalesce(group_size, 0) as group_size, coalesce(in_bytes, -1) as in_bytes,
        coalesce(out_bytes, -1) as out_bytes, coalesce(sequence, -1) as sequence, process, thread""",
    ),
    "gpu_metrics": (
        "names[metric + 1] as metric, time_ns, device, value, metric as metric_id",
        "time_ns, device, metric_id as metric, value",
    ),
}
TABLE_NAMES = tuple(_TABLES)
_FORMAT = "format parquet, parquet_version v2, dictionary_size_limit 2000"
"""Version 2 stores times as differences: half the size, and faster to write and read. There are at most a few thousand names and
shapes; a dictionary of times is given up after 2,000 values instead of tens of thousands."""
_NAMES = {"name", "domain", "shapes", "metric", "collective", "process_group", "group_ranks"}
"""Columns with indices of names."""
_HIGHEST_RATIO = 100
"""The size of a table in memory to its file; about 5 in real traces."""

_LEAST_MEMORY = 1 << 30
"""What reading tables may take in the database, besides 100 times their size."""
_SQL_TYPES = {"int64": "bigint", "int32": "integer", "uint8": "utinyint", "float64": "double", "bool": "boolean"}

Table = TypeVar("Table", bound=Columns)


class _Meta(msgspec.Struct):
    schema: int
    source: str
    of: str
    """The fingerprint of the source file, or empty."""
    seen: str
    """Device, inode, size and times of the source file when it was read, or empty."""
    by: str
    """The version of the code that wrote the tables."""
    rows: dict[str, int]
    files: dict[str, tuple[int, int]]
    """File → (size, CRC-32)."""
    problems: list[TraceProblem]
    facts: dict[str, str]


def connect() -> "duckdb.DuckDBPyConnection":
    """Return an in-memory database without access to Python variables. Raise a ResourceError if DuckDB is not installed."""
    connection: duckdb.DuckDBPyConnection = _duckdb().connect(":memory:")
    connection.execute("set python_enable_replacements = false")
    return connection


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError as error:
        raise ResourceError("The package duckdb is not installed.", "pip install duckdb") from error
    return duckdb


def _writing_cursor() -> "duckdb.DuckDBPyConnection":
    """Return a connection for writing tables. All share one database: opening one takes a third as long as writing a trace."""
    _duckdb()
    return _writing_database().cursor()


@cache
def _writing_database() -> "duckdb.DuckDBPyConnection":
    connection = connect()
    connection.execute("set threads = 1")  # two take a sixth more CPU time in total
    atexit.register(_close_writing_database)
    return connection


def _close_writing_database() -> None:
    """Close the database before the interpreter ends: DuckDB would report it as leaked."""
    _writing_database().close()
    _writing_database.cache_clear()


def load_trace(connection: "duckdb.DuckDBPyConnection", trace: Trace, extra: Extra | None = None) -> None:
    """Create a view of each table over the arrays of the trace, with the extra columns first."""
    names = np.empty(len(trace.names), object)
    names[:] = trace.names
    connection.register("_names", {"id": np.arange(len(names), dtype=np.int32), "name": names})
    connection.execute("create temp table _texts as select coalesce(list(name order by id), []) as names from _names")
    connection.execute("create temp view names as select id, name from _names")
    for table, (made, _) in _TABLES.items():
        more = dict((extra or {}).get(table, {}))
        columns = {**_columns_of(trace, table).columns(), **{f"extra_{name}": column for name, column in more.items()}}
        connection.register(f"_{table}", columns)
        added = "".join(f'extra_{name}{_cast(column)} as "{name}", ' for name, column in more.items())
        connection.execute(f"create temp view {table} as select {added}{made} from _{table}, _texts")  # noqa: S608 - own names


def _cast(column: Any) -> str:
    """Return a cast for integers with gaps, which DuckDB before 1.5 reads as text."""
    return "::bigint" if isinstance(next((value for value in column if value is not None), None), int) else ""


def _columns_of(trace: Trace, table: str) -> Columns:
    return {
        "kernels": trace.work,
        "calls": trace.calls,
        "ranges": trace.ranges,
        "operators": trace.operators,
        "collectives": trace.collectives,
        "gpu_metrics": trace.samples,
    }[table]


def write_tables(trace: Trace, folder: Path, extra: Extra | None = None, of: str = "", seen: str = "", *, root: Path) -> None:
    """Write the tables to `folder` below `root`, completely or not at all, and replace what was there. Raise OSError on failure.

    `extra` contains additional columns, such as the stage of each kernel; `of` and `seen` identify the source file.
    """
    make_folder(root, folder.parent)
    folder = inside(root, folder)
    partial = partial_of(folder)
    connection = _writing_cursor()
    try:
        new_folder(root, partial)
        load_trace(connection, trace, extra)
        files = {}
        for table in (*_TABLES, "names"):
            file = partial / f"{table}.parquet"
            _copy_to(connection, table, file)
            files[file.name] = _size_and_checksum(file)
        meta = _Meta(
            SCHEMA_VERSION, trace.source, of, seen, made_by(), {table: len(_columns_of(trace, table)) for table in _TABLES},
            files, list(trace.problems), trace.facts,
        )  # fmt: skip
        with open_new(root, partial / META_FILE) as out:
            out.write(encoded(meta))
        _replace(root, folder, partial)
    finally:
        connection.close()
        remove_if_possible(root, partial)


def write_rows(root: Path, file: Path, columns: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as a Parquet file below `root`, completely or not at all. Raise OSError if that fails.

    `columns` has SQL names and types.
    """
    kinds = dict(column.split() for column in columns.split(","))
    make_folder(root, file.parent)
    partial = partial_of(inside(root, file))
    connection = connect()
    try:
        connection.execute(f"create table made ({columns})")
        if rows:
            lists = ", ".join(f"unnest(?::{kind}[])" for kind in kinds.values())  # a column at a time: a row takes milliseconds
            connection.execute(f"insert into made select {lists}", [[row[name] for row in rows] for name in kinds])
        _copy_to(connection, "made", partial)
        move(root, partial, file)
    finally:
        connection.close()
        remove_if_possible(root, partial)


def _copy_to(connection: "duckdb.DuckDBPyConnection", table: str, file: Path) -> None:
    import duckdb

    try:
        connection.execute(f"copy (select * from {table}) to {literal(str(file))} ({_FORMAT})")  # noqa: S608 - own names
    except duckdb.IOException as error:
        raise OSError(str(error)) from error


def _replace(root: Path, folder: Path, made: Path) -> None:
    """Move the new folder to its place. If another process did so first, its folder stays."""
    if os.path.lexists(folder):
        old = made.with_suffix(".old")
        move(root, folder, old)
        remove_if_possible(root, old)
    with suppress(FileExistsError):
        move(root, made, folder)


def _size_and_checksum(file: Path) -> tuple[int, int]:
    data = read_bytes(file)
    return len(data), zlib.crc32(data)


def _meta(folder: Path) -> _Meta:
    try:
        meta = msgspec.json.decode(read_bytes(folder / META_FILE), type=_Meta)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ParseError(f"{folder} has no readable tables: {error}", "Remove the folder.") from error
    if meta.schema != SCHEMA_VERSION or meta.by != made_by():
        raise ParseError(f"The tables in {folder} are from another version.", "Remove the folder.")
    return meta


def made_of(folder: Path) -> tuple[str, str]:
    """Return `of` and `seen` of the source of these tables, or raise a ParseError."""
    meta = _meta(folder)
    return meta.of, meta.seen


def _check_files(folder: Path, meta: _Meta) -> None:
    expected = {f"{table}.parquet" for table in (*_TABLES, "names")}
    try:
        valid = set(meta.files) == expected and all(_size_and_checksum(folder / name) == meta.files[name] for name in expected)
    except OSError as error:
        raise ParseError(f"{folder} has no readable tables: {error}", "Remove the folder.") from error
    if not valid:
        raise ParseError(f"The tables in {folder} are damaged.", "Remove the folder.")


def open_tables(connection: "duckdb.DuckDBPyConnection", folder: Path) -> None:
    """Create a view of each Parquet file in the folder."""
    for table in (*_TABLES, "names"):
        rows = parquet_rows(folder / f"{table}.parquet")
        connection.execute(f"create temp view {table} as select * from {rows}")  # noqa: S608 - quoted


def read_tables(folder: Path) -> Trace:
    """Return the trace in a folder of tables, or raise a ParseError."""
    meta = _meta(folder)
    _check_files(folder, meta)
    connection = connect()
    import duckdb

    try:
        _check_sizes(connection, folder, meta)
        open_tables(connection, folder)
        work, calls = _read(connection, "kernels", DeviceWork), _read(connection, "calls", HostCalls)
        ranges, operators = _read(connection, "ranges", Ranges), _read(connection, "operators", Operators)
        samples, stated = _read(connection, "gpu_metrics", DeviceSamples), _read(connection, "collectives", Collectives)
        names = _read_names(connection, meta)
    except (duckdb.Error, KeyError, ValueError) as error:
        raise ParseError(f"The tables in {folder} cannot be read: {error}", "Remove the folder.") from error
    finally:
        connection.close()
    trace = Trace(meta.source, names, work, calls, ranges, operators, tuple(meta.problems), meta.facts, samples, stated)
    if not _is_valid(trace):
        raise ParseError(f"The tables in {folder} contain impossible rows.", "Remove the folder.")
    return trace


def _check_sizes(connection: "duckdb.DuckDBPyConnection", folder: Path, meta: _Meta) -> None:
    """Raise a ParseError if the tables unpack to an implausible size: a small file may be enormous in memory."""
    for name, (size, _) in meta.files.items():
        file = literal(pattern_of(folder / name))
        (rows,) = connection.execute(f"select num_rows from parquet_file_metadata({file})").fetchone() or (0,)  # noqa: S608
        unpacked = f"select coalesce(sum(total_uncompressed_size), 0) from parquet_metadata({file})"  # noqa: S608
        (memory,) = connection.execute(unpacked).fetchone() or (0,)
        if rows > size or memory > _HIGHEST_RATIO * size:
            raise ParseError(f"The tables in {folder} unpack to far more than their size.", "Remove the folder.")
    # What the files say of themselves may be wrong.
    connection.execute(f"set memory_limit = '{_LEAST_MEMORY + _HIGHEST_RATIO * sum(size for size, _ in meta.files.values())}B'")
    connection.execute("set temp_directory = ''")


def _read_names(connection: "duckdb.DuckDBPyConnection", meta: _Meta) -> list[Any]:
    """Return the names. Raise a DisproportionError if they take far more than their file, which may repeat a long one."""
    rows, size = connection.execute("select count(*), coalesce(sum(strlen(name)), 0)::bigint from names").fetchone() or (0, 0)
    Proportion().add(meta.files["names.parquet"][0], size, rows)
    return [row[0] for row in connection.execute("select name::varchar from names order by id::bigint").fetchall()]


def _is_valid(trace: Trace) -> bool:
    """Return whether the rows are possible in a trace."""
    texts = len(trace.names)
    return all(
        not is_beyond_clocks(table.start_ns, table.end_ns).any() and bool((table.end_ns >= table.start_ns).all())
        for table in (trace.work, trace.calls, trace.ranges, trace.operators, trace.collectives)
    ) and all(
        bool(((column >= NO_NAME) & (column < texts)).all())
        for table in (trace.work, trace.calls, trace.ranges, trace.operators, trace.samples, trace.collectives)
        for name, column in table.columns().items()
        if name in _NAMES
    )


def _read(connection: "duckdb.DuckDBPyConnection", table: str, kind: type[Table]) -> Table:
    _, read = _TABLES[table]
    wanted = kind.none().columns()
    numbers = ", ".join(f"{name}::{_SQL_TYPES[like.dtype.name]} as {name}" for name, like in wanted.items())  # never texts
    found = connection.execute(f"select {numbers} from (select {read} from {table})").fetchnumpy()  # noqa: S608 - own names
    return kind(**{name: np.ascontiguousarray(found[name], like.dtype) for name, like in wanted.items()})

"""Read and write Parquet with DuckDB: one thread, so that the same rows give the same bytes, and bounded memory."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_perf_opt.core.errors import ParseError, ResourceError
from llm_perf_opt.core.host import available_memory_bytes
from llm_perf_opt.core.statements import run_statements
from llm_perf_opt.core.user_files import AS_WRITTEN, literal, parquet_rows, pattern_of, quoted
from llm_perf_opt.workspace.data.inventory import Advance
from llm_perf_opt.workspace.data.lines import MAX_LINE_BYTES, missing_column

if TYPE_CHECKING:
    import duckdb

_MEMORY_MB = 256
_ROWS_HELD = 2048
"""Rows that the database processes at a time: memory depends on the length of a record, not on their number."""
_COPIES_HELD = 16
"""The database reserves this many times the size of those rows, and uses about six of them. Measured on 2,048 rows of 300 kB
and on 300 of 2 MB: Parquet to JSON lines fails at 8 and passes at 16, with 3.4 GB of memory for 600 MB of rows."""
_SHARE_OF_FREE = 0.8
"""The share of free memory that it may use: an error is better than a killed process."""
ROWS_AT_ONCE = 1024
_SCRATCH = ".duckdb"
_PLACE = "file_row_number"
"""DuckDB's column with the position of each row; unavailable if the file has a column of this name."""
_FLOATS = ("double", "float")
_GROUP_BYTES = 32 * 1024 * 1024
_MOST_OBJECT_BYTES = MAX_LINE_BYTES + 1024 * 1024
"""The database allocates buffers of twice this size."""
_MOST_GROUP_ROWS = 122_880
"""DuckDB's default row group, if the rows are small enough."""


@contextmanager
def database(scratch: Path | None = None, held_bytes: float = 0) -> Iterator["duckdb.DuckDBPyConnection"]:
    """Open an in-memory database for about `held_bytes` of rows that spills to `scratch` and has no network access."""
    import duckdb

    wanted = _MEMORY_MB + int(_COPIES_HELD * held_bytes / 1e6)
    limit = f"{max(_MEMORY_MB, min(wanted, int(_SHARE_OF_FREE * available_memory_bytes() / 1e6)))}MB"
    settings = {"threads": "1", "memory_limit": limit, "autoinstall_known_extensions": "false"}
    connection = duckdb.connect(":memory:", config={**settings, "temp_directory": str(scratch) if scratch else ""})
    try:
        connection.execute("SET enable_progress_bar = true")  # needed for query_progress(),
        connection.execute("SET enable_progress_bar_print = false")  # but nothing is printed
        if connection.execute("SELECT 1 FROM duckdb_settings() WHERE name = 'async_threads'").fetchone():
            # In DuckDB 2.0 an interrupted or failed statement often waits for asynchronous writes for ever.
            connection.execute("SET async_threads = 0")
        yield connection
    finally:
        connection.close()


def columns_of(path: Path) -> dict[str, str]:
    """Return names and types of the columns."""
    with database() as connection, _named(path):
        rows = connection.execute(f"DESCRIBE SELECT * FROM {parquet_rows(path)}").fetchall()  # noqa: S608 - quoted
    return {str(row[0]): str(row[1]) for row in rows}


def count_rows(path: Path) -> int:
    """Return the number of rows from the footer."""
    with database() as connection, _named(path):
        row = connection.execute("SELECT sum(num_rows)::BIGINT FROM parquet_file_metadata(?)", [pattern_of(path)]).fetchone()
    return int(row[0]) if row and row[0] is not None else 0


def _held_bytes(path: Path) -> float:
    """Return the size of the rows processed at a time."""
    with database() as connection, _named(path):
        query = "SELECT sum(total_uncompressed_size)::BIGINT FROM parquet_metadata(?)"
        row = connection.execute(query, [pattern_of(path)]).fetchone()
    rows = count_rows(path)
    return min(rows, _ROWS_HELD) * float(row[0]) / rows if row and row[0] and rows else 0


def objects(path: Path, advance: Advance) -> Iterator[list[dict[str, Any]]]:
    """Yield blocks of rows as objects."""
    names = list(columns_of(path))
    for rows in _fetched(path, "*", advance):
        yield [dict(zip(names, row, strict=True)) for row in rows]


def column(path: Path, name: str, advance: Advance) -> Iterator[list[Any]]:
    """Yield blocks of one column."""
    known = list(columns_of(path))
    if name not in known:
        raise missing_column(path, name, known)
    for rows in _fetched(path, quoted(name), advance):
        yield [row[0] for row in rows]


def write_json(path: Path, out: Path, advance: Advance, rows: Sequence[int] | None = None) -> None:
    """Write the rows (or those at the positions `rows`, from 0) as JSON lines.

    JSON has no NaN and no infinity: they become null, inside lists and structs too.
    """
    types = _types_of(path)
    chosen = ", ".join(f"{_finite(quoted(name), kind, 0)} AS {quoted(name)}" for name, kind in types)
    sql = f"SELECT {chosen} FROM {parquet_rows(path)}"  # noqa: S608 - names are quoted
    values: list[Any] = []
    if rows is not None:
        numbered, place = _numbered_rows(path, [name for name, _ in types])
        where = f"{place} IN (SELECT unnest(?::BIGINT[]))"
        sql = f"SELECT {chosen} FROM {numbered} WHERE {where} ORDER BY {place}"  # noqa: S608 - names are quoted
        values.append(list(rows))
    _copy(f"COPY ({sql}) TO {literal(str(out))} (FORMAT json)", values, path, out.parent, _held_bytes(path), advance)


def _numbered_rows(path: Path, columns: Sequence[str]) -> tuple[str, str]:
    """Return the FROM clause for rows with their positions, and an unused name for the column of positions."""
    taken = {name.casefold() for name in columns}
    if _PLACE not in taken:
        return parquet_rows(path, f"{_PLACE}=true"), _PLACE
    place = next(name for number in itertools.count() if (name := f"place_{number}") not in taken)
    return f"(SELECT *, row_number() OVER () - 1 AS {place} FROM {parquet_rows(path)})", place  # noqa: S608 - quoted


def write_parquet(lines: Path, columns: dict[str, str], rows: int, out: Path, advance: Advance) -> None:
    """Write JSON lines as Parquet with these columns, in row groups of about 32 MiB."""
    spelled = ", ".join(f"{literal(name)}: {literal(kind)}" for name, kind in columns.items())
    row_bytes = lines.stat().st_size / max(1, rows)
    group = int(min(_MOST_GROUP_ROWS, max(_ROWS_HELD, _GROUP_BYTES / max(row_bytes, 1) // _ROWS_HELD * _ROWS_HELD)))
    taken = f"format='newline_delimited', columns={{{spelled}}}, maximum_object_size={_MOST_OBJECT_BYTES}"
    read = f"read_json({literal(pattern_of(lines))}, {taken}, {AS_WRITTEN})"
    options = f"FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {group}"
    sql = f"COPY (SELECT * FROM {read}) TO {literal(str(out))} ({options})"  # noqa: S608 - names are quoted
    _copy(sql, [], lines, out.parent, row_bytes * min(rows, _ROWS_HELD), advance)


def _types_of(path: Path) -> list[tuple[str, Any]]:
    """Return the columns with the database's own, inspectable types."""
    with database() as connection, _named(path):
        found = connection.sql(f"SELECT * FROM {parquet_rows(path)}")  # noqa: S608 - quoted
        return list(zip(found.columns, found.types, strict=True))


def _finite(value: str, kind: Any, depth: int) -> str:
    """Return SQL for `value` with null for every non-finite number in it; `value` itself if it cannot contain any."""
    if not _holds_floats(kind):
        return value
    if kind.id in _FLOATS:
        return f"CASE WHEN isfinite({value}) THEN {value} END"
    inner, item = dict(kind.children), f"item{depth}"
    if kind.id == "struct":
        fields = (
            f"{quoted(name)} := {_finite(f'struct_extract({value}, {literal(name)})', field, depth)}"
            for name, field in inner.items()
        )
        return f"CASE WHEN {value} IS NOT NULL THEN struct_pack({', '.join(fields)}) END"
    if kind.id == "map":
        pair = f"ROW({item}.key, {_finite(f'{item}.value', inner['value'], depth + 1)})"
        return f"map_from_entries([{pair} FOR {item} IN map_entries({value})])"
    return f"[{_finite(item, inner['child'], depth + 1)} FOR {item} IN {value}]"


def _holds_floats(kind: Any) -> bool:
    if kind.id in _FLOATS:
        return True
    if kind.id == "map":  # its keys become text
        return _holds_floats(dict(kind.children)["value"])
    return kind.id in ("list", "struct") and any(_holds_floats(inner) for _, inner in kind.children)


def _fetched(path: Path, what: str, advance: Advance) -> Iterator[list[tuple[Any, ...]]]:
    total, size, done, reported = max(1, count_rows(path)), path.stat().st_size, 0, 0
    with database(held_bytes=_held_bytes(path)) as connection, _named(path):
        result = connection.execute(f"SELECT {what} FROM {parquet_rows(path)}")  # noqa: S608 - quoted above
        while rows := result.fetchmany(ROWS_AT_ONCE):
            done += len(rows)
            advance(size * done // total - reported)
            reported = size * done // total
            yield rows


def _copy(sql: str, values: list[Any], path: Path, scratch: Path, held_bytes: float, advance: Advance) -> None:
    """Run a long statement, report its progress and handle interrupts."""
    size, reported = path.stat().st_size, 0
    with database(scratch / _SCRATCH, held_bytes) as connection, _named(path):

        def report() -> None:
            nonlocal reported
            now = max(reported, int(size * min(100.0, max(0.0, connection.query_progress())) / 100))
            advance(now - reported)
            reported = now

        run_statements(connection, lambda: connection.execute(sql, values), tick=report)
    advance(size - reported)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    import duckdb

    try:
        yield
    except duckdb.OutOfMemoryException as error:
        raise ResourceError(
            f"{path} has records too long to process {_ROWS_HELD} at a time: {_first_line(error)}",
            "Keep it as JSONL, or use a machine with more free memory.",
        ) from error
    except duckdb.IOException as error:
        if "No space left" in str(error):
            raise OSError(28, "No space left on device") from error
        raise ParseError(f"{path} cannot be read: {_first_line(error)}", "The file is damaged or truncated.") from error
    except duckdb.Error as error:
        if "duplicate key" in str(error):
            raise ParseError(
                f"{path} cannot be converted to Parquet: {_first_line(error)}",
                "A field may appear only once per record in Parquet. --skip-bad does not help.",
            ) from error
        raise ParseError(
            f"{path} cannot be read: {_first_line(error)}", "The file is damaged or has unsupported contents."
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300]

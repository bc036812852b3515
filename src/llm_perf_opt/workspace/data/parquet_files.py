"""Read and write Parquet with DuckDB: one thread, so that the same rows give the same bytes, and bounded memory."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_perf_opt.core.errors import ParseError, ResourceError
from llm_perf_opt.core.host import available_memory_bytes
from llm_perf_opt.core.proportion import (
    HIGHEST_RATIO,
    RATIO_COUNTS_FROM_BYTES,
    STREAM_RATIO_COUNTS_FROM_BYTES,
    DisproportionError,
    Proportion,
)
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
_BLOCK_BYTES = 32 * 1024 * 1024
"""Of the rows that become Python values at a time."""
_CHUNKS_HELD, _MOST_HELD_BYTES = 3, 1 << 30
"""The database copies up to so many times its rows, without regard to its own limit, before it returns the first."""
_TOO_LONG = f"{{}} has records too long to process {_ROWS_HELD} at a time: {{}}."
_KEEP_JSONL = "Keep it as JSONL, or use a machine with more free memory."
_CELL_BYTES = 16
"""What a value counts besides its text."""
_TEXTS = {"varchar": "strlen", "blob": "octet_length"}
_SCRATCH = ".duckdb"
_PLACE = "file_row_number"
"""DuckDB's column with the position of each row; unavailable if the file has a column of this name."""
_FLOATS = ("double", "float")
_FIXED = {
    *_FLOATS, "boolean", "tinyint", "smallint", "integer", "bigint", "hugeint", "utinyint", "usmallint", "uinteger", "ubigint",
    "uhugeint", "decimal", "date", "time", "time with time zone", "timestamp", "timestamp_s", "timestamp_ms", "timestamp_ns",
    "timestamp with time zone", "interval", "uuid", "enum", "null",
}  # fmt: skip
"""Types whose values have one size; others are measured as text."""
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
    """Return the number of rows from the footer. Raise a ParseError if there are far too many for the size of the file."""
    with database() as connection, _named(path):
        row = connection.execute("SELECT sum(num_rows)::BIGINT FROM parquet_file_metadata(?)", [pattern_of(path)]).fetchone()
        rows = int(row[0]) if row and row[0] is not None else 0
        Proportion(STREAM_RATIO_COUNTS_FROM_BYTES).add(path.stat().st_size, 0, rows)
    return rows


def _held_bytes(path: Path) -> float:
    """Return the size of the rows processed at a time, as the file states it, if that is in proportion to its own size."""
    with database() as connection, _named(path):
        query = "SELECT sum(total_uncompressed_size)::BIGINT FROM parquet_metadata(?)"
        row = connection.execute(query, [pattern_of(path)]).fetchone()
    rows = count_rows(path)
    stated = min(rows, _ROWS_HELD) * float(row[0]) / rows if row and row[0] and rows else 0
    return min(stated, max(RATIO_COUNTS_FROM_BYTES, HIGHEST_RATIO * path.stat().st_size))


def objects(path: Path, advance: Advance) -> Iterator[list[dict[str, Any]]]:
    """Yield blocks of rows as objects."""
    names = list(columns_of(path))
    for rows in _fetched(path, names, advance):
        yield [dict(zip(names, row, strict=True)) for row in rows]


def column(path: Path, name: str, advance: Advance) -> Iterator[list[Any]]:
    """Yield blocks of one column."""
    known = list(columns_of(path))
    if name not in known:
        raise missing_column(path, name, known)
    for rows in _fetched(path, [name], advance):
        yield [row[0] for row in rows]


def write_json(path: Path, out: Path, advance: Advance, rows: Sequence[int] | None = None) -> None:
    """Write the rows (or those at the positions `rows`, from 0) as JSON lines.

    JSON has no NaN and no infinity: they become null, inside lists and structs too.
    """
    types = _types_of(path)
    _check_proportion(path, [name for name, _ in types], advance)
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
    if _PLACE not in {name.casefold() for name in columns}:
        return parquet_rows(path, f"{_PLACE}=true"), _PLACE
    place = _unused("place", columns)
    return f"(SELECT *, row_number() OVER () - 1 AS {place} FROM {parquet_rows(path)})", place  # noqa: S608 - quoted


def _unused(kind: str, columns: Iterable[str]) -> str:
    taken = {name.casefold() for name in columns}
    return next(name for number in itertools.count() if (name := f"{kind}_{number}") not in taken)


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


def _fetched(path: Path, columns: Sequence[str], advance: Advance) -> Iterator[list[tuple[Any, ...]]]:
    """Yield blocks of the rows of these columns. Their sizes are read ahead of them, so that no block is unexpectedly large."""
    total, size, done, reported = max(1, count_rows(path)), path.stat().st_size, 0, 0
    with database(held_bytes=_held_bytes(path)) as connection, _named(path):
        rows_of, row_bytes = _sized_rows(path, columns)
        ahead = _Ahead(connection.cursor().execute(f"SELECT {row_bytes} FROM {rows_of}"), path)  # noqa: S608 - quoted
        count = ahead.next_block()
        what = ", ".join(map(quoted, columns))
        result = connection.execute(f"SELECT {what} FROM {parquet_rows(path)}")  # noqa: S608 - quoted
        while count and (rows := result.fetchmany(count)):
            done += len(rows)
            advance(size * done // total - reported)
            reported = size * done // total
            yield rows
            count = ahead.next_block()


class _Ahead:
    """The sizes of the next rows, at least as many as the database holds at a time."""

    def __init__(self, sizes: "duckdb.DuckDBPyConnection", path: Path) -> None:
        self._rest, self._path, self._file_bytes = sizes, path, path.stat().st_size
        self._next: list[int] = []
        self._proportion = Proportion(STREAM_RATIO_COUNTS_FROM_BYTES)
        self._most = min(_MOST_HELD_BYTES, max(2 * MAX_LINE_BYTES, HIGHEST_RATIO * self._file_bytes))

    def next_block(self) -> int:
        """Return how many rows are the next block, 0 at the end. Raise a ResourceError if the next rows are too large."""
        while len(self._next) < _CHUNKS_HELD * _ROWS_HELD and (more := self._rest.fetchmany(_ROWS_HELD)):
            found = [size for (size,) in more]
            self._proportion.add(self._file_bytes, sum(found), len(found))
            self._next += found
        if sum(self._next) > self._most:
            raise ResourceError(_TOO_LONG.format(self._path, f"they take {sum(self._next) / 1e6:,.0f} MB"), _KEEP_JSONL)
        count = held = 0
        while count < min(ROWS_AT_ONCE, len(self._next)) and held < _BLOCK_BYTES:
            held += self._next[count]
            count += 1
        del self._next[:count]
        return count


def _sized_rows(path: Path, columns: Iterable[str]) -> tuple[str, str]:
    """Return the FROM clause for rows, and the name of their size in bytes. A row beyond the longest line is an error."""
    types = _types_of(path)
    name = _unused("size", (known for known, _ in types))
    size = " + ".join(_size_of(quoted(known), kind, 0) for known, kind in types if known in columns)
    too_long = f"error('a record is longer than {MAX_LINE_BYTES >> 20} MiB')::boolean"
    found = f"SELECT *, {size} AS {name} FROM {parquet_rows(path)}"  # noqa: S608 - quoted
    return f"({found}) WHERE CASE WHEN {name} > {MAX_LINE_BYTES} THEN {too_long} ELSE true END", name


def _size_of(value: str, kind: Any, depth: int) -> str:
    """Return SQL for about how many bytes a value takes. An encoded column may repeat a long text in every row and list."""
    if kind.id in _TEXTS:
        return f"coalesce({_TEXTS[kind.id]}({value}) + {_CELL_BYTES}, {_CELL_BYTES})"
    if kind.id == "struct":
        fields = (_size_of(f"struct_extract({value}, {literal(name)})", field, depth) for name, field in kind.children)
        return f"({' + '.join((str(_CELL_BYTES), *fields))})"
    if kind.id in ("list", "array", "map"):
        item, inner = f"item{depth}", dict(kind.children)
        parts = [(item, inner.get("child"))]
        if kind.id == "map":
            value, parts = f"map_entries({value})", [(f"{item}.key", inner["key"]), (f"{item}.value", inner["value"])]
        each = " + ".join(_size_of(part, of, depth + 1) for part, of in parts)
        return f"coalesce(list_sum([{each} FOR {item} IN {value}])::BIGINT + {_CELL_BYTES}, {_CELL_BYTES})"
    return str(_CELL_BYTES) if kind.id in _FIXED else f"coalesce(strlen({value}::VARCHAR) + {_CELL_BYTES}, {_CELL_BYTES})"


def _check_proportion(path: Path, columns: Iterable[str], advance: Advance) -> None:
    """Raise a ParseError if the values of all rows take far more than the file."""
    rows_of, row_bytes = _sized_rows(path, columns)
    with database(held_bytes=_held_bytes(path)) as connection, _named(path):
        sql = f"SELECT count(*), sum({row_bytes})::BIGINT FROM {rows_of}"  # noqa: S608 - quoted
        rows, size = run_statements(connection, lambda: connection.execute(sql).fetchone(), tick=lambda: advance(0)) or (0, 0)
        Proportion(STREAM_RATIO_COUNTS_FROM_BYTES).add(path.stat().st_size, size or 0, rows)


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
    except DisproportionError as error:
        raise error.of(path) from error
    except duckdb.OutOfMemoryException as error:
        raise ResourceError(_TOO_LONG.format(path, _first_line(error)), _KEEP_JSONL) from error
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

"""Read an untrusted SQLite file: read-only, columns as numpy arrays, every failure a ParseError.

The file may be truncated, damaged or malicious. The schema is queried, only plain tables are read (a view can be an endless
query), a cell of a wrong type drops its row, and the work is bounded by the size of the file. Queries contain only names from
the source of this program, none from the file.
"""

import sqlite3
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.user_files import open_ordinary
from llm_perf_opt.traces.events import Int64
from llm_perf_opt.traces.packed import is_gzip, unpack

_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 100
_LEAST_ROW_BYTES = 4
"""The least size of a row. A scan that yields more rows than this allows runs in a circle."""
_STEPS_PER_BYTE = 60
_FREE_STEPS = 20_000_000
_STEPS_PER_CHECK = 100_000
_DAMAGED = "The file is damaged. Export it again: nsys export --type sqlite -o FILE REPORT.nsys-rep"


@dataclass(frozen=True)
class Integer:
    """A column of integers: the first of `names` with a value, else `default`. Without a default the row is dropped."""

    names: tuple[str, ...]
    default: int | None = None


@dataclass(frozen=True)
class Product:
    """A product of integer columns, computed by SQLite: 0 if one is missing, -1 on overflow."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class IntegerTable:
    """Columns read from a table."""

    columns: dict[str, Int64]
    dropped: int
    """Rows with a cell of a wrong type, or without a required value."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


class Database:
    """The plain tables of one file."""

    def __init__(self, connection: sqlite3.Connection, path: Path, size: int) -> None:
        self._connection = connection
        self._path = path
        self._most_rows = size // _LEAST_ROW_BYTES
        self._checks_left = (_FREE_STEPS + size * _STEPS_PER_BYTE) // _STEPS_PER_CHECK
        self.damaged_texts = 0
        """Texts so far that were not valid UTF-8; invalid characters are replaced."""
        connection.text_factory = self._text
        connection.set_progress_handler(self._check, _STEPS_PER_CHECK)
        self.tables = self._schema()
        """Table → its columns, both in lower case: SQLite ignores case."""

    def has(self, table: str, *columns: str) -> bool:
        """Return whether there is a table with these columns."""
        known = self.tables.get(table.lower())
        return known is not None and all(column == "rowid" or column.lower() in known for column in columns)

    def integers(self, table: str, wanted: Mapping[str, Integer | Product], where: str = "") -> IntegerTable:
        """Return columns of integers with the names of `wanted`. A missing table has no rows."""
        if not self.has(table):
            return IntegerTable({name: np.empty(0, np.int64) for name in wanted}, 0)
        names = [f"c{place}" for place in range(len(wanted))]
        expressions = [
            f"{self._expression(table, column)} AS {name}" for name, column in zip(names, wanted.values(), strict=True)
        ]
        integers = " AND ".join(f"typeof({name}) = 'integer'" for name in names)
        chosen = f'FROM "{table}"' + (f" WHERE {where}" if where else "")
        query = f"SELECT {', '.join(names)} FROM (SELECT {', '.join(expressions)} {chosen}) WHERE {integers}"  # noqa: S608
        with self._running(f"{query} LIMIT {self._most_rows + 1}") as cursor:
            cells = np.fromiter(chain.from_iterable(cursor), np.int64).reshape(-1, len(names))
        # Not count(*): SQLite does not interrupt it, and a damaged tree of pages may be endless.
        with self._running(f"SELECT count(1) {chosen}") as cursor:
            dropped = cursor.fetchone()[0] - len(cells)
        if len(cells) > self._most_rows:
            raise ParseError(f"{self._path}: {table} has more rows than the size of the file allows.", _DAMAGED)
        return IntegerTable({name: np.ascontiguousarray(cells[:, place]) for place, name in enumerate(wanted)}, dropped)

    def rows(
        self, table: str, columns: Sequence[str], where: str = "", longest: int = 4096
    ) -> Generator[tuple[Any, ...], None, None]:
        """Yield rows as Python values, with texts truncated to `longest` characters; none if the table or a column is missing.

        Close it if it may not be read to its end: it cannot be closed after the database.
        """
        if not self.has(table, *columns):
            return
        cells = [f'CASE typeof("{name}") WHEN \'text\' THEN substr("{name}", 1, {longest}) ELSE "{name}" END' for name in columns]
        blobless = " AND ".join(f"typeof(\"{name}\") <> 'blob'" for name in columns)
        query = f'SELECT {", ".join(cells)} FROM "{table}" WHERE {blobless}'  # noqa: S608
        yield from self._rows(query + (f" AND ({where})" if where else ""))

    def _expression(self, table: str, column: Integer | Product) -> str:
        if isinstance(column, Product):
            if not self.has(table, *column.names):
                return "0"
            product = " * ".join(f'"{name}"' for name in column.names)
            return f"CASE typeof({product}) WHEN 'integer' THEN {product} WHEN 'null' THEN 0 ELSE -1 END"
        present = [f'"{name}"' for name in column.names if self.has(table, name)]
        if column.default is not None:
            present.append(str(column.default))
        if not present:
            raise ParseError(
                f"{self._path}: the table {table} has no column {' or '.join(column.names)}.",
                "The layout is from an unsupported version of Nsight Systems. Export with nsys 2022 to 2025.",
            )
        return present[0] if len(present) == 1 else f"coalesce({', '.join(present)})"

    def _schema(self) -> dict[str, dict[str, str]]:
        tables: dict[str, dict[str, str]] = {}
        for (name,) in list(self._rows("SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0")):
            if not isinstance(name, str) or not name.isidentifier():
                continue  # not a table of a profiler, and unsafe in a query
            described = self._rows(f'PRAGMA table_info("{name}")')
            tables[name.lower()] = {str(row[1]).lower(): str(row[2]) for row in described}
        return tables

    def _rows(self, query: str) -> Iterator[tuple[Any, ...]]:
        with self._running(query) as cursor:
            for count, row in enumerate(cursor):
                if count > self._most_rows:
                    raise ParseError(f"{self._path} has a table with more rows than its size allows.", _DAMAGED)
                yield row

    @contextmanager
    def _running(self, query: str) -> Iterator[sqlite3.Cursor]:
        try:
            with closing(self._connection.execute(query)) as cursor:
                yield cursor
        except (sqlite3.Error, UnicodeError, OverflowError, MemoryError) as error:
            what = error if self._checks_left >= 0 else "its pages form a circle"
            raise ParseError(f"{self._path} cannot be read: {what or type(error).__name__}.", _DAMAGED) from error

    def _text(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.damaged_texts += 1
            return raw.decode(errors="replace")

    def _check(self) -> int:
        self._checks_left -= 1
        return self._checks_left < 0  # a true value interrupts the query


@contextmanager
def open_database(path: Path) -> Iterator[Database]:
    """Open a SQLite file, or a gzip file of one, read-only."""
    try:
        if is_gzip(path):
            with tempfile.TemporaryDirectory(prefix="llm-perf-") as folder:
                unpacked = Path(folder, "report.sqlite")
                unpack(path, unpacked)
                with _connected(unpacked, path) as database:
                    yield database
        else:
            with _connected(path, path) as database:
                yield database
    except OSError as error:
        raise ParseError(f"{path} cannot be read: {error.strerror or error}.") from error


@contextmanager
def _connected(file: Path, path: Path) -> Iterator[Database]:
    size = _checked_size(file, path)
    try:
        connection = sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    except sqlite3.Error as error:
        raise ParseError(f"{path} cannot be opened: {error}.", _DAMAGED) from error
    with closing(connection):
        try:
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA cell_size_check = ON")
        except sqlite3.Error as error:
            raise ParseError(f"{path} cannot be opened: {error}.", _DAMAGED) from error
        yield Database(connection, path, size)


def _checked_size(file: Path, path: Path) -> int:
    """Return the size of the file. Raise a ParseError unless its header is of SQLite and the file is complete."""
    with open_ordinary(file) as opened:
        header = opened.read(_HEADER_BYTES)
    size = file.stat().st_size
    if not header:
        raise ParseError(f"{path} is empty.", "The export did not finish; export the report again.")
    if not header.startswith(_MAGIC):
        raise ParseError(
            f"{path} is not a SQLite file.", "Export the report first: nsys export --type sqlite -o FILE REPORT.nsys-rep"
        )
    page = int.from_bytes(header[16:18], "big")
    needed = int.from_bytes(header[28:32], "big") * (65536 if page == 1 else page)
    if len(header) < _HEADER_BYTES or (header[24:28] == header[92:96] and size < needed):
        raise ParseError(f"{path} is truncated: it has {size:,} of {max(needed, _HEADER_BYTES):,} bytes.", _DAMAGED)
    for ending in ("-journal", "-wal"):
        journal = file.with_name(file.name + ending)
        if journal.is_file() and journal.stat().st_size:
            raise ParseError(
                f"{path} was not written completely: {journal.name} is next to it.",
                "Wait for the export to end, or export the report again.",
            )
    return size

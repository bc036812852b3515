"""SQL over the tables of a run or of a trace: reading only, with no file, network or setting within its reach."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_perf_opt.errors import ConfigError, ParseError
from llm_perf_opt.run_folder import RunFolder

if TYPE_CHECKING:
    import duckdb

    from llm_perf_opt.parsers.trace_cache import CachedTrace

_LINE = 300


@dataclass(frozen=True)
class TableInfo:
    """A table that a query may name."""

    name: str
    rows: int
    columns: tuple[tuple[str, str], ...]
    """(name, type) of each."""


@dataclass(frozen=True)
class Answer:
    """What a query gave."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]
    more: bool
    """Whether there are rows beyond the limit."""


class Queries:
    """The tables of one source, closed off before the first query."""

    def __init__(self, source: Path) -> None:
        from llm_perf_opt.tables import TABLE_NAMES, connect

        self.opened = open_source(source)
        self._tables = TABLE_NAMES
        self._connection = connect()
        _load(self._connection, self.opened)

    def tables(self) -> list[TableInfo]:
        """What there is to ask."""
        self._close_off(self._tables)
        found = []
        for table in self._tables:
            columns = self._connection.execute(f"describe {table}").fetchall()
            (rows,) = self._connection.execute(f"select count(*) from {table}").fetchone() or (0,)  # noqa: S608 - own names
            found.append(TableInfo(table, rows, tuple((name, kind) for name, kind, *_ in columns)))
        return found

    def ask(self, sql: str, limit: int = 0) -> Answer:
        """The rows of a query, at most `limit` where that is not zero; a ConfigError says in a line what is wrong with it."""
        import duckdb

        try:
            self._check(sql)
            self._close_off([table for table in self._tables if table in sql.casefold()])  # one too many costs only time
            self._connection.execute(sql)
            columns = tuple(column[0] for column in self._connection.description or ())
            rows = self._connection.fetchmany(limit + 1) if limit else self._connection.fetchall()
        except duckdb.PermissionException as error:
            raise ConfigError(
                "A query reaches the tables only: no files, no network, no settings.", _remedy(self._tables)
            ) from error
        except duckdb.Error as error:
            raise ConfigError(f"SQL: {_one_line(str(error))}", _remedy(self._tables)) from error
        return Answer(_distinct(columns), rows[:limit] if limit else rows, bool(limit) and len(rows) > limit)

    def _check(self, sql: str) -> None:
        import duckdb

        statements = self._connection.extract_statements(sql)
        if len(statements) != 1:
            raise ConfigError(f"One query was expected; here are {len(statements)}.", "Give one SELECT.")
        kind = statements[0].type
        if kind not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
            raise ConfigError(f"{kind.name} is not a query: the tables are read, never changed.", "Give a SELECT.")

    def _close_off(self, tables: Sequence[str]) -> None:
        """Take the tables a query names into memory, then shut out everything else for good."""
        for table in tables:
            self._connection.execute(f"create table memory.main.{table} as select * from temp.{table}")  # noqa: S608 - own names
        for table in (*self._tables, "names"):
            self._connection.execute(f"drop view if exists temp.{table}")
        for setting in ("enable_external_access = false", "lock_configuration = true"):
            self._connection.execute(f"set {setting}")


def open_source(source: Path) -> "CachedTrace":
    """The trace of a run folder or of a file, with its tables; or a ParseError that says what is missing."""
    from llm_perf_opt.parsers.trace_cache import cached_trace

    if not source.exists():
        raise ParseError(f"{source} does not exist.", "Give a run folder, a torch trace or an nsys SQLite export.")
    if not source.is_dir():
        return cached_trace(source)
    run = RunFolder.open(source)
    for name, file in run.trace_files().items():
        if file.is_file():
            return cached_trace(file, run.tables(name))
    raise ParseError(f"{source} holds no trace: neither its torch pass nor its nsys pass left one.", "run.json says why.")


def _load(connection: "duckdb.DuckDBPyConnection", opened: "CachedTrace") -> None:
    from llm_perf_opt.tables import load_trace, open_tables

    if opened.tables is not None:
        open_tables(connection, opened.tables)
    else:
        load_trace(connection, opened.trace)


def _one_line(message: str) -> str:
    """The first line of DuckDB's message with what it suggests, without the drawing of the place."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith("LINE ")]
    return " ".join(line for line in lines if set(line) != {"^"})[:_LINE]


def _remedy(tables: Sequence[str]) -> str:
    return f"The tables are {', '.join(tables)}; without a query their columns are listed."


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    """Column names, the second of one name with a number behind it."""
    found: list[str] = []
    for name in names:
        number = 1
        chosen = name
        while chosen in found:
            chosen = f"{name}_{number}"
            number += 1
        found.append(chosen)
    return tuple(found)

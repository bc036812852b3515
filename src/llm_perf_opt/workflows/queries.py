"""SQL over the tables of a run or a trace: read-only, without access to files, the network or settings."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_perf_opt.core.errors import ConfigError, ParseError, ResourceError
from llm_perf_opt.core.inside import disk_error, remove
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.run_folder import RunFolder, there
from llm_perf_opt.core.statements import OverdueError, run_statements
from llm_perf_opt.core.units import BYTES, scaled, significant
from llm_perf_opt.core.user_files import check_ordinary, parquet_rows, quoted
from llm_perf_opt.core.value_limits import memory_of
from llm_perf_opt.traces.trace_tables import write_rows

if TYPE_CHECKING:
    import duckdb

    from llm_perf_opt.analysis.kernels.table import StageKernel
    from llm_perf_opt.analysis.run_analysis import RunAnalysis
    from llm_perf_opt.analysis.trace.document import TraceAnalysis
    from llm_perf_opt.core.machine_records import Telemetry
    from llm_perf_opt.traces.trace_cache import CachedTrace


_LINE = 300
_MOST_ROWS = 2**31
_MOST_MEMORY = 700 * 10**6
"""For the tables in a run's folder. Those of a report have thousands of rows."""
_ROWS_AT_FIRST, _FETCHED_BYTES = 8, 1 << 20
"""How many rows are fetched before their size is known, and then of which size."""
_COPIES = 3
"""Of the rows of an answer: as fetched, as plain values, as text. Measured: 2.4 to 2.9."""
_MORE = 4
"""How much higher than the limit an error proposes to set it."""
_VIEW = "llm_perf_answer"
_ZONED = "TIMESTAMP WITH TIME ZONE"


@dataclass(frozen=True)
class TableInfo:
    """A table that a query can use."""

    name: str
    rows: int
    columns: tuple[tuple[str, str], ...]
    """Name and type of each column."""


@dataclass(frozen=True)
class Answer:
    """The result of a query."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]
    more: bool
    """Whether there are more rows than the limit."""


@dataclass(frozen=True)
class Limits:
    """What a query may take. `timeout` and `memory` are the options that raise them."""

    timeout_s: float = 60.0
    memory_bytes: int = 2 * 10**9

    def overdue(self) -> ResourceError:
        """Return the error for a query that takes too long."""
        what = f"The query took longer than {significant(self.timeout_s)} s and was stopped."
        return ResourceError(what, f"Query fewer rows, or allow more time: --timeout {significant(_MORE * self.timeout_s)}s.")

    def too_large(self) -> ResourceError:
        """Return the error for a query that needs too much memory."""
        more = scaled(_MORE * self.memory_bytes, BYTES).replace(" ", "")
        what = f"The query needs more than {scaled(self.memory_bytes, BYTES)} of memory and was stopped."
        return ResourceError(what, f"Query fewer rows or columns, or allow more memory: --memory {more}.")


DEFAULT_LIMITS = Limits()


class Queries:
    """The tables of one source. Each query gets its own database in memory, without access to anything else."""

    def __init__(self, source: Path) -> None:
        from llm_perf_opt.traces.trace_tables import TABLE_NAMES

        self._derived = _derived_tables(source)
        self.trace = None if _is_serving(source) else open_source(source)
        """None for a run under load: its tables are those of its report."""
        self._names = tuple(self._derived) if self.trace is None else (*TABLE_NAMES, *self._derived)
        if not self._names:
            raise ParseError(f"{source} has no tables.", f"`llm-perf report {source}` writes them.")

    @property
    def opened(self) -> "CachedTrace":
        """The trace with its tables. Raise ParseError if there is none."""
        if self.trace is None:
            raise ParseError("A run under load has no trace of its own.", "Query its tables, or a trace file in its raw folder.")
        return self.trace

    def tables(self) -> list[TableInfo]:
        """Return the tables with their columns and row counts."""
        found = []
        with self.isolated(self._names) as connection:
            for table in self._names:
                columns = connection.execute(f"describe {table}").fetchall()
                (rows,) = connection.execute(f"select count(*) from {table}").fetchone() or (0,)  # noqa: S608 - own names
                found.append(TableInfo(table, rows, tuple((name, kind) for name, kind, *_ in columns)))
        return found

    def ask(self, sql: str, limit: int = 0, limits: Limits = DEFAULT_LIMITS) -> Answer:
        """Return the rows of a query, at most `limit` if that is not zero.

        Raise ConfigError if the query is invalid, and ResourceError if it is beyond `limits`.
        """
        # Loading a table too many only takes time.
        named = [table for table in self._names if table in sql.casefold()] or self._names
        remedy = f"The tables are {', '.join(self._names)}; without a query their columns are listed."
        with self.isolated(named, limits) as connection:
            import duckdb  # `isolated` raises an error with a remedy if it is not installed

            def asked() -> tuple[tuple[str, ...], list[Any]]:
                _require_one_select(connection, sql)
                connection.execute(_zones_as_text(connection, sql))
                columns = tuple(column[0] for column in connection.description or ())
                return columns, _fetched(connection, min(limit, _MOST_ROWS) + 1 if limit else sys.maxsize, limits)

            try:
                columns, rows = run_statements(connection, asked, limits.timeout_s)
            except OverdueError as error:
                raise limits.overdue() from error
            except duckdb.OutOfMemoryException as error:
                raise limits.too_large() from error
            except duckdb.PermissionException as error:
                raise ConfigError("A query can use only the tables: no files, no network, no settings.", remedy) from error
            except duckdb.Error as error:
                raise ConfigError(f"SQL: {_one_line(str(error))}", remedy) from error
        return Answer(_unique_names(columns), rows[:limit] if limit else rows, bool(limit) and len(rows) > limit)

    @contextmanager
    def isolated(self, tables: Sequence[str], limits: Limits = DEFAULT_LIMITS) -> "Iterator[duckdb.DuckDBPyConnection]":
        """Yield a database in memory with these tables, without access to anything else: also none to a disk to spill to."""
        from llm_perf_opt.traces.trace_tables import connect

        connection = connect()
        try:
            run_statements(connection, lambda: self._load(connection, tables, limits))
            yield connection
        finally:
            connection.close()

    def _load(self, connection: "duckdb.DuckDBPyConnection", tables: Sequence[str], limits: Limits) -> None:
        """Load these tables into memory and lock the database. Raise a ResourceError if they need more than may be used."""
        import duckdb

        from llm_perf_opt.analysis.trace.stages import stage_columns
        from llm_perf_opt.traces.trace_mark import META_FILE
        from llm_perf_opt.traces.trace_tables import TABLE_NAMES, load_trace, open_tables

        connection.execute("set temp_directory = ''")
        self._load_derived(connection, tables, limits)
        connection.execute(f"set memory_limit = '{limits.memory_bytes}B'")
        opened = self.trace
        if opened is None:
            pass
        elif not isinstance(opened.tables, Missing) and (opened.tables / META_FILE).is_file():  # not evicted meanwhile
            open_tables(connection, opened.tables)
        else:
            load_trace(connection, opened.trace, stage_columns(opened.trace))
        offered = () if opened is None else (*TABLE_NAMES, "names")
        try:
            for table in offered:
                if table in tables:
                    connection.execute(f"create table memory.main.{table} as select * from temp.{table}")  # noqa: S608 - own names
                connection.execute(f"drop view temp.{table}")
        except duckdb.OutOfMemoryException as error:
            raise limits.too_large() from error
        for setting in ("enable_external_access = false", "lock_configuration = true"):
            connection.execute(f"set {setting}")

    def _load_derived(self, connection: "duckdb.DuckDBPyConnection", tables: Sequence[str], limits: Limits) -> None:
        """Copy these tables of the run's folder into memory. Raise a ParseError if one is damaged or too large."""
        import duckdb

        most = min(_MOST_MEMORY, limits.memory_bytes)
        connection.execute(f"set memory_limit = '{most}B'")  # a kilobyte may hold millions of rows
        for table in (table for table in tables if table in self._derived):
            try:
                connection.execute(f"create table memory.main.{table} as select * from {self._derived[table]}")  # noqa: S608 - quoted
            except duckdb.OutOfMemoryException as error:
                if most < _MOST_MEMORY:
                    raise limits.too_large() from error
                raise ParseError(
                    f"The tables of this run need more than {_MOST_MEMORY // 10**6} MB of memory, with {table}.parquet: "
                    "a file is damaged.",
                    "`llm-perf report RUN` writes them again.",
                ) from error
            except duckdb.Error as error:
                what = f"{table}.parquet cannot be read: {_one_line(str(error))}"
                raise ParseError(what, "`llm-perf report RUN` writes it again.") from error


def _fetched(connection: "duckdb.DuckDBPyConnection", most: int, limits: Limits) -> list[Any]:
    """Return at most `most` rows. Raise a ResourceError if their values take more memory than a query may use."""
    rows: list[Any] = []
    size, wanted = 0, _ROWS_AT_FIRST
    while piece := connection.fetchmany(min(wanted, most - len(rows))):
        rows += piece
        fetched = sum(map(memory_of, piece))
        size += fetched
        if size * _COPIES > limits.memory_bytes:
            raise limits.too_large()
        wanted = max(1, len(piece) * _FETCHED_BYTES // fetched)
    return rows


def _require_one_select(connection: "duckdb.DuckDBPyConnection", sql: str) -> None:
    """Raise ConfigError unless this is a single statement that only reads."""
    import duckdb

    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise ConfigError(f"Expected one query, found {len(statements)}.", "Give one SELECT.")
    kind = statements[0].type
    if kind not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
        raise ConfigError(f"{kind.name} is not a query: the tables are read-only.", "Give a SELECT.")


def _zones_as_text(connection: "duckdb.DuckDBPyConnection", sql: str) -> str:
    """Return the query with time-zone timestamps cast to text: DuckDB needs pytz to return them."""
    import duckdb

    try:
        connection.execute(f"create temp view {_VIEW} as {sql}")
        columns = connection.execute(f"describe {_VIEW}").fetchall()
    except duckdb.Error:  # no view can be made of it; running it reports what is wrong
        return sql
    if not any(_ZONED in kind for _, kind, *_ in columns):
        connection.execute(f"drop view {_VIEW}")
        return sql
    shown = [
        f"#{number}{'::varchar' if _ZONED in kind else ''} as {quoted(name)}"
        for number, (name, kind, *_) in enumerate(columns, start=1)
    ]
    return f"select {', '.join(shown)} from {_VIEW}"  # noqa: S608 - quoted


def open_source(source: Path) -> "CachedTrace":
    """Return the trace of a run folder or a file, with its tables. Raise ParseError if there is none."""
    from llm_perf_opt.analysis.trace.stages import stage_columns
    from llm_perf_opt.traces.trace_cache import cached_trace
    from llm_perf_opt.workflows.run_reader import RunReader

    if not there(source, "Give a run folder, a torch trace or an nsys SQLite export.").is_dir():
        check_ordinary(source)
        return cached_trace(source, columns=stage_columns)
    return RunReader.open(source).cached_trace()


def _is_serving(source: Path) -> bool:
    return source.is_dir() and RunFolder.open(source).manifest().kind == "serving"


def _derived_tables(source: Path) -> dict[str, str]:
    """Return the tables that the report of a run wrote: name → SQL that reads it."""
    if not source.is_dir():
        return {}
    folder = RunFolder.open(source).derived_tables
    offered = SERVING_TYPES if _is_serving(source) else RUN_TABLES
    found = {name: parquet_rows(file) for name in offered if (file := folder / f"{name}.parquet").is_file()}
    earlier = folder / _EARLIER_COMPONENTS
    if "components" not in found and earlier.is_file():
        found["components"] = f"(select stage, part as component, pieces, time_ns from {parquet_rows(earlier)})"  # noqa: S608 - quoted
    return found


def _one_line(message: str) -> str:
    """Return the message of DuckDB on one line, without the excerpt of the query."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith("LINE ")]
    return " ".join(line for line in lines if set(line) != {"^"})[:_LINE]


def _unique_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return column names; a repeated name gets a number."""
    found: list[str] = []
    for name in names:
        number = 1
        chosen = name
        while chosen in found:
            chosen = f"{name}_{number}"
            number += 1
        found.append(chosen)
    return tuple(found)


# --- run tables -------------------------------------------------------------------------------------------------------


Row = dict[str, Any]

_TYPES = {
    "stages": "name text, count bigint, wall_ns bigint, gpu_busy_ns bigint, idle_ns bigint, kernels bigint, launches bigint, "
    "kernel_ns bigint, span_ns bigint",
    "devices": "device bigint, name text, kernels bigint, kernel_ns bigint, busy_ns bigint, idle_ns bigint, span_ns bigint",
    "stage_metrics": "stage text, device bigint, metric text, samples bigint, mean double, least bigint, most bigint",
    "steps": "stage text, step bigint, wall_ns bigint, span_ns bigint, gpu_busy_ns bigint, idle_ns bigint, kernels bigint, "
    "kernel_ns bigint, launches bigint",
    "modules": "name text, calls bigint, kernels bigint, self_ns bigint, total_ns bigint, share double",
    "budget": "stage text, key text, label text, ns bigint, share double, units bigint, wall_ns bigint",
    "components": "stage text, component text, pieces bigint, time_ns bigint",
    "counters": "stage text, name text, calls bigint, total_ns bigint, share double, tensor_flops double, vector_flops double, "
    "half_flops double, dram_read_bytes double, dram_write_bytes double, sm_pct double, dram_pct double, occupancy_pct double, "
    "waves double",
    "samples": "at_ns bigint, power_mw bigint, sm_clock_mhz bigint, memory_clock_mhz bigint, temperature_c bigint, "
    "gpu_utilisation_pct bigint, memory_used_bytes bigint, throttle_bits bigint, energy_mj bigint, device bigint",
}
"""Table → columns. A missing value is NULL."""
RUN_TABLES = tuple(_TYPES)
_LATENCY_COLUMNS = ", ".join(
    f"{key}_{name}_ns double" for key in ("ttft", "tpot", "itl", "e2e") for name in ("p50", "p90", "p99")
)
SERVING_TYPES = {
    "requests": "load bigint, id text, sent_ns bigint, end_ns bigint, scheduled_ns bigint, prompt_tokens bigint, "
    "output_tokens bigint, chunks bigint, ttft_ns double, tpot_ns double, e2e_ns double, good boolean, error text",
    "load_points": "load bigint, kind text, asked double, arrival text, generator text, status text, profiled boolean, "
    "requests bigint, failed bigint, issued_rate double, request_rate double, output_rate double, kept_up double, "
    f"goodput double, good_share double, {_LATENCY_COLUMNS}",
    "server_samples": "load bigint, at_ns bigint, running double, waiting double, kv_usage double, preemptions double, "
    "generated double",
}
"""The tables of a run under load."""
_EARLIER_COMPONENTS = "parts.parquet"
"""The components in folders of earlier versions; its column `part` is now `component`."""


def write_run_tables(folder: RunFolder, analysis: "RunAnalysis", telemetry: "Maybe[Telemetry]") -> Missing | None:
    """Write every table; return why there are none, for example without DuckDB."""
    try:
        for name, rows in _rows(analysis, telemetry).items():
            write_rows(folder.path, folder.derived_tables / f"{name}.parquet", _TYPES[name], rows)
        remove(folder.path, folder.derived_tables / _EARLIER_COMPONENTS)
    except (ParseError, ResourceError) as error:
        return Missing(f"tables/ was not written: {error.fact} {error.remedy}")
    except OSError as error:
        raise disk_error(error, folder.derived_tables) from error
    return None


def _rows(analysis: "RunAnalysis", telemetry: "Maybe[Telemetry]") -> dict[str, list[Row]]:
    found = analysis.trace
    trace = None if isinstance(found, Missing) else found
    kernels = () if isinstance(analysis.kernels, Missing) else analysis.kernels.stages
    torch = analysis.torch
    components = () if isinstance(torch, Missing) or isinstance(torch.parts, Missing) else torch.parts
    return {
        "stages": _fields(trace.stages if trace else (), _names("stages")),
        "devices": _fields(trace.devices if trace else (), _names("devices")),
        "stage_metrics": _fields(trace.gpu_metrics if trace else (), _names("stage_metrics")),
        "steps": _fields(trace.steps if trace else (), _names("steps")),
        "modules": _fields(trace.modules if trace else (), _names("modules")),
        "budget": _budget(trace),
        "components": [
            {"stage": row.stage, "component": row.part, "pieces": row.pieces, "time_ns": row.time_ns} for row in components
        ],
        "counters": [_counters(row) for stage in kernels for row in stage.rows],
        "samples": _fields(() if isinstance(telemetry, Missing) else telemetry.gpu, _names("samples")),
    }


def _names(table: str) -> list[str]:
    return [column.split()[0] for column in _TYPES[table].split(",")]


def _fields(records: Sequence[Any], names: Sequence[str]) -> list[Row]:
    return [{name: _value(getattr(record, name)) for name in names} for record in records]


def _value(value: Any) -> Any:
    return None if isinstance(value, Missing) else value


def _budget(trace: "TraceAnalysis | None") -> list[Row]:
    return [
        {"stage": budget.stage, "key": row.key, "label": row.label, "ns": row.ns, "share": row.share, "units": budget.units,
         "wall_ns": budget.wall_ns}
        for budget in (trace.budgets if trace else ())
        for row in budget.rows
    ]  # fmt: skip


def _counters(row: "StageKernel") -> Row:
    known = {name: _value(getattr(row, name)) for name in ("stage", "name", "calls", "total_ns", "share")}
    counted = None if isinstance(row.per_call, Missing) else row.per_call
    return known | {name: _value(getattr(counted, name)) if counted else None for name in _names("counters")[5:]}

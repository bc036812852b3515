"""Query the tables of a run or a trace."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llm_perf_opt.cli.completing import complete_run
from llm_perf_opt.cli.shared import Debug, Json, note_debug, print_json
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.terminal import indented, one_line

if TYPE_CHECKING:
    from llm_perf_opt.traces.events import TraceProblem
    from llm_perf_opt.traces.trace_cache import CachedTrace
    from llm_perf_opt.workflows.queries import Answer, TableInfo

SHOWN_ROWS = 50
_WIDEST_CELL = 72
_EXPECTED_IN_RUNS = ("no_device_work",)
"""Problems caused by the settings of a run: it ran on the CPU."""


def sql(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|TRACE", help="A run folder, a torch trace or an nsys SQLite export.", autocompletion=complete_run
        ),
    ],
    query: Annotated[str | None, typer.Argument(metavar="SQL", help="A SELECT statement; without it, list the tables.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print rows as CSV.")] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            help=f"Maximum number of rows; 0 for all. Default: {SHOWN_ROWS} in the terminal, all with --json and --csv.", min=0
        ),
    ] = None,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="Stop the query after this time.")] = "60s",
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory that the tables, the query and its rows may use.")] = "2GB",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Query the tables of a run or a trace with SQL. Queries are read-only, without access to files or the network."""
    note_debug(debug)
    from llm_perf_opt.core.records import Missing
    from llm_perf_opt.core.units import bytes_of, seconds_of
    from llm_perf_opt.workflows.queries import Limits, Queries

    if as_json and as_csv:
        raise ConfigError("--json and --csv select two formats.", "Use one of them.")
    limits = Limits(seconds_of(timeout, "--timeout"), bytes_of(memory, "--memory"))
    queries = Queries(source)
    for problem in _problems_to_print(queries.trace, of_a_run=source.is_dir()) if queries.trace else ():
        print("warning:", indented(problem.what), file=sys.stderr)
    if queries.trace and isinstance(queries.trace.tables, Missing):
        print(f"note: {queries.trace.tables.why}", file=sys.stderr)
    if query is None:
        _show_tables(queries.tables(), as_json, as_csv)
        return
    shown = limit if limit is not None else 0 if as_json or as_csv else SHOWN_ROWS
    answer = queries.ask(query, shown, limits)
    _show(answer, as_json, as_csv)
    if answer.more:
        print(f"note: the first {shown} rows; --limit 0 shows all", file=sys.stderr)


def _problems_to_print(opened: "CachedTrace", *, of_a_run: bool) -> "list[TraceProblem]":
    """Return fatal problems always, and others only on the first parse, unless the settings of the run cause them."""
    expected = _EXPECTED_IN_RUNS if of_a_run else ()
    return [problem for problem in opened.trace.problems if problem.fatal or (opened.parsed and problem.id not in expected)]


def _show_tables(tables: "list[TableInfo]", as_json: bool, as_csv: bool) -> None:
    if as_json:
        print_json([{"table": table.name, "rows": table.rows, "columns": dict(table.columns)} for table in tables])
        return
    if as_csv:
        from llm_perf_opt.report.csv import rows_csv

        rows = [[table.name, table.rows, name, kind] for table in tables for name, kind in table.columns]
        sys.stdout.write(rows_csv(["table", "rows", "column", "type"], rows))
        return
    for table in tables:
        print(f"{table.name}  {table.rows:,} rows")
        for name, kind in table.columns:
            print(f"  {name:<14} {kind.lower()}")


def _show(answer: "Answer", as_json: bool, as_csv: bool) -> None:
    rows = [[_plain(value) for value in row] for row in answer.rows]
    if as_json:
        print_json([dict(zip(answer.columns, row, strict=True)) for row in rows])
    elif as_csv:
        from llm_perf_opt.report.csv import rows_csv

        sys.stdout.write(rows_csv(list(answer.columns), rows))
    else:
        from llm_perf_opt.report.terminal import columns

        align = "".join("r" if _is_number_column(rows, index) else "l" for index in range(len(answer.columns)))
        print(columns([_cell(name) for name in answer.columns], [[_cell(value) for value in row] for row in rows], align))


def _is_number_column(rows: list[list[Any]], index: int) -> bool:
    return all(row[index] is None or isinstance(row[index], int | float) for row in rows)


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold; other types become text."""
    from decimal import Decimal

    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, bool) or value is None or isinstance(value, str | float):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value.hex() if isinstance(value, bytes) else str(value)


def _cell(value: Any) -> str:
    """Return a cell for the terminal on one line, shortened if it is very long."""
    from llm_perf_opt.report.text import significant

    if value is None:
        return ""
    if isinstance(value, float):
        return significant(value, 6) if abs(value) < float("inf") else str(value)
    text = one_line(str(value))
    return text if len(text) <= _WIDEST_CELL else text[: _WIDEST_CELL - 1] + "…"

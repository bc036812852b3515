"""List runs and sweeps."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llm_perf_opt.cli.shared import Debug, Json, note_debug, print_json

if TYPE_CHECKING:
    from llm_perf_opt.core.records import Maybe
    from llm_perf_opt.workflows.run_listing import Listed


def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder with the runs, at any depth.")] = Path("runs"),
    model: Annotated[str | None, typer.Option(help="Only runs of this model.")] = None,
    experiment: Annotated[str | None, typer.Option(help="Only runs of this experiment.")] = None,
    status: Annotated[str | None, typer.Option(help="Only runs with this status: complete, partial, failed or damaged.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of rows; 0 for all.")] = 20,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List runs and sweeps, newest first. A damaged run is listed with the reason."""
    note_debug(debug)
    import sys

    from llm_perf_opt.report.terminal import columns
    from llm_perf_opt.workflows.run_listing import list_runs

    found = list_runs(folder, model=model, experiment=experiment, status=status, limit=limit)
    if as_json:
        print_json(found.rows)
        return
    header = ("created", "status", "model", "batch × prompt + new", "TTFT", "TPOT", "path", "")
    rows = [
        [
            row.created[:19].replace("T", " "),
            row.status if row.kind == "run" else f"{row.status} sweep",
            row.model,
            row.workload,
            _time(row.ttft_ns),
            _time(row.tpot_ns),
            row.path,
            row.why or _why_no_time(row),
        ]
        for row in found.rows
    ]
    cut = [row[-1] for row in rows if len(row[-1]) > _LONGEST_WHY]
    for row in rows:
        row[-1] = _line(row[-1])
    if rows:
        print(columns(header, rows, "llllrrll"))
    if cut:
        print("A reason that ends in … is shown in full with --json and in the run's report.", file=sys.stderr)
    if len(found.rows) < found.matching:
        print(f"{len(found.rows)} of {found.matching} shown; --limit 0 shows all.", file=sys.stderr)
    elif not found.rows:
        print(f"No run in {folder} matches ({found.found} in all).", file=sys.stderr)


_LONGEST_WHY = 100
"""Maximum length of a reason in the list; a tool's message can be many lines long."""


def _line(text: str) -> str:
    return text if len(text) <= _LONGEST_WHY else f"{text[: _LONGEST_WHY - 1].rstrip()}…"


def _why_no_time(row: "Listed") -> str:
    from llm_perf_opt.core.records import Missing

    return next((f"n/a: {value.why}" for value in (row.ttft_ns, row.tpot_ns) if isinstance(value, Missing)), "")


def _time(ns: "Maybe[float] | None") -> str:
    from llm_perf_opt.core.records import Missing
    from llm_perf_opt.report.text import duration

    return "" if ns is None else "n/a" if isinstance(ns, Missing) else duration(ns)

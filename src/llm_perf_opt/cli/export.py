"""Export runs to other programs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llm_perf_opt.cli.completing import complete_run
from llm_perf_opt.cli.shared import Debug, Json, note_debug, print_json, verb_group

if TYPE_CHECKING:
    from llm_perf_opt.core.secrets import hidden
    from llm_perf_opt.workflows.export_mlflow import Exported

app = verb_group("export", "Export runs to other programs.")


@app.callback()
def _group() -> None:
    """Make `mlflow` a command of the group, although it is the only one."""


@app.command()
def mlflow(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Folders of runs.", autocompletion=complete_run)],
    tracking_uri: Annotated[
        str,
        typer.Option(envvar="MLFLOW_TRACKING_URI", metavar="URI", help="Where MLflow stores runs: a database or a server."),
    ] = "sqlite:///mlflow.db",
    experiment: Annotated[str, typer.Option(metavar="NAME", help="The experiment of MLflow.")] = "llm-perf",
    replace: Annotated[bool, typer.Option("--replace", help="Export runs again that were exported before.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Export runs to MLflow: settings as parameters, metrics with intervals, tags, and the report as an artifact.

    Needs the extra `mlflow`. A run that was exported before is not exported again.
    """
    note_debug(debug)
    from llm_perf_opt.workflows.export_mlflow import export_runs

    report = (lambda _: None) if as_json else _print
    done = export_runs([Path(run) for run in runs], tracking_uri, experiment, replace=replace, report=report)
    if as_json:
        print_json(done)
    else:
        print(f"MLflow: {hidden(tracking_uri)}, experiment {experiment}", file=sys.stderr)


def _print(row: "Exported") -> None:
    metrics = "" if row.done == "already exported" else f", {row.metrics} metrics"
    print(f"{row.done}  {row.path} → {row.mlflow_run}{metrics}{f' ({row.note})' if row.note else ''}", flush=True)

"""Make a run folder from the output files of load generators."""

from pathlib import Path
from typing import Annotated

import typer

from llm_perf_opt.cli.outcome import print_serving
from llm_perf_opt.cli.shared import SLO_HELP, Debug, Json, command_line, note_debug


def import_load(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="AIPerf's profile_export.jsonl, the JSON of `vllm bench serve --save-detailed`, or GuideLLM's JSON. Several "
            "files are several loads of one server.",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Run folder; by default runs/import/MODEL/TIME.")] = None,
    metrics: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Metrics of the server: JSON lines with at_ns and series, or one answer of /metrics, saved as text.",
        ),
    ] = None,
    slo: Annotated[str, typer.Option(help=SLO_HELP, metavar="LIMITS")] = "",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Import the output of a load generator: make a run folder from it, with its report.

    The format of each file is recognized by its content. AIPerf's summary is read if it is next to its records.
    """
    note_debug(debug)
    from llm_perf_opt.workflows.import_load import ImportRequest, import_loads
    from llm_perf_opt.workflows.run_reader import RunReader
    from llm_perf_opt.workflows.serving import report_serving

    folder = import_loads(ImportRequest(tuple(files), out, metrics, slo), command_line())
    print_serving(folder, report_serving(RunReader(folder)), as_json)

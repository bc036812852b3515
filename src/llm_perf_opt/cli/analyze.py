"""Where a trace's time went, why, and what to change first."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from llm_perf_opt.cli.completing import complete_run
from llm_perf_opt.cli.shared import Debug, Json, note_debug, print_json, raise_if
from llm_perf_opt.cli.watching import ended_in_order


def analyze(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|TRACE",
            help="A run folder, a torch trace, an nsys report or its SQLite export.",
            autocompletion=complete_run,
        ),
    ],
    top: Annotated[int, typer.Option(min=1, help="Kernels to list in the terminal.")] = 15,
    modules_from: Annotated[
        Path | None,
        typer.Option(metavar="RUN|TRACE", help="An eager trace of the same model: its modules for kernels of CUDA graphs."),
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Read the trace itself; keep nothing of it.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Account for a trace: health, stages, budget, idle causes, kernels, operators, and findings with what each would save."""
    note_debug(debug)
    from llm_perf_opt.core.run_folder import there
    from llm_perf_opt.workflows.analyze_trace import analyze_source, with_borrowed_modules

    if modules_from is not None:
        there(modules_from, "Give a run folder or a torch trace of the same model.")
    with ended_in_order():
        found = analyze_source(source, use_cache=not no_cache)
        if modules_from is not None:
            found = with_borrowed_modules(found, source, modules_from)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    if as_json:
        print_json(found.document)
    else:
        from llm_perf_opt.report.trace_document import trace_text

        sys.stdout.write(trace_text(found.document, top))
    raise_if(found.error)

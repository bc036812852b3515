"""Account for the time of a run or a trace."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from llm_perf_opt.cli.completing import complete_run
from llm_perf_opt.cli.shared import Debug, Json, note_debug, print_json, raise_if
from llm_perf_opt.cli.signals import graceful_exit


def analyze(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|TRACE",
            help="A run folder, a torch trace, an nsys report or its SQLite export.",
            autocompletion=complete_run,
        ),
    ],
    top: Annotated[int, typer.Option(min=1, help="Number of kernels to list in the terminal.")] = 15,
    modules_from: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN|TRACE",
            help="Take the modules of CUDA graph kernels from this eager run or trace of the same model, or modules and "
            "operators from this trace of the graphs' capture.",
        ),
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Parse the trace again and do not cache the result.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show where the time of a run or a trace goes.

    Prints health, stages, budget, idle causes, kernels, operators, and findings with their savings.
    """
    note_debug(debug)
    from llm_perf_opt.core.run_folder import there
    from llm_perf_opt.workflows.analyze_trace import analyze_source, with_borrowed_modules

    if modules_from is not None:
        there(modules_from, "Give a run folder or a torch trace of the same model.")
    with graceful_exit():
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

"""Account for the time of a run or a trace."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llm_perf_opt.cli.completing import complete_run
from llm_perf_opt.cli.shared import Debug, Json, note_debug, page_kind, print_json, raise_if, write_page
from llm_perf_opt.core.errors import ConfigError

if TYPE_CHECKING:
    from llm_perf_opt.report.document import Document
    from llm_perf_opt.workflows.analyze_ranks import RanksResult
    from llm_perf_opt.workflows.analyze_trace import SourceAnalysis


def analyze(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN|TRACE",
            help="A run folder, a torch trace, an nsys report or its SQLite export. For several ranks of one job: one trace per "
            "rank, or the folder that contains them.",
            autocompletion=complete_run,
        ),
    ],
    top: Annotated[
        int, typer.Option(min=1, help="Number of rows of each long table in the terminal, such as kernels or collectives.")
    ] = 15,
    modules_from: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN|TRACE",
            help="Take the modules of CUDA graph kernels from this eager run or trace of the same model, or modules and "
            "operators from this trace of the graphs' capture.",
        ),
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Parse the trace again and do not cache the result.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the result to this file: .html, .md or .json.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show where the time of a run or a trace goes.

    Prints health, stages, budget, idle causes, kernels, operators, and findings with their savings. For several ranks, it
    prints the budget of each, their collectives with waiting and transfer, and which rank was late and why.
    """
    note_debug(debug)
    kind = page_kind(out)
    from llm_perf_opt.workflows.analyze_ranks import analyze_rank_files, only_traces, traces_of

    found: SourceAnalysis | RanksResult
    files, notes = traces_of(sources)
    if len(files) == 1:
        found = _one(files[0], modules_from, use_cache=not no_cache)
    elif modules_from is not None:
        raise ConfigError("--modules-from needs one run or trace, not several ranks.", "Give the trace of one rank.")
    else:
        source = " ".join(str(path) for path in sources) if len(sources) < 3 else f"{sources[0]} … {sources[-1]}"
        with_analyses = as_json or kind == ".json"
        found = analyze_rank_files(only_traces(files), source, use_cache=not no_cache, with_analyses=with_analyses)
    for note in (*notes, *found.notes):
        print(f"note: {note}", file=sys.stderr)
    if out is not None:
        write_page(out, kind, found.document, lambda: _page(found, top))
    if as_json:
        print_json(found.document)
    else:
        from llm_perf_opt.report.terminal import render_text

        sys.stdout.write(render_text(_page(found, top)))
    raise_if(found.error)


def _one(source: Path, modules_from: Path | None, *, use_cache: bool) -> "SourceAnalysis":
    from llm_perf_opt.core.run_folder import there
    from llm_perf_opt.workflows.analyze_trace import analyze_source, with_borrowed_modules

    if modules_from is not None:
        there(modules_from, "Give a run folder or a torch trace of the same model.")
    found = analyze_source(source, use_cache=use_cache)
    return found if modules_from is None else with_borrowed_modules(found, source, modules_from)


def _page(found: "SourceAnalysis | RanksResult", top: int) -> "Document":
    from llm_perf_opt.report.ranks_document import ranks_document
    from llm_perf_opt.report.trace_document import trace_document
    from llm_perf_opt.workflows.analyze_ranks import RanksResult

    return ranks_document(found.document, top) if isinstance(found, RanksResult) else trace_document(found.document, top)

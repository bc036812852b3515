"""The analysis of a trace or a run. The analysis of a trace file is cached with its tables."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from llm_perf_opt.core.errors import LlmPerfError, ParseError, ResourceError
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.run_folder import encoded, there, write_whole
from llm_perf_opt.core.user_files import check_ordinary, read_bytes
from llm_perf_opt.traces.trace_mark import fresh_tables, made_by
from llm_perf_opt.workflows.nsys_exports import readable_file

if TYPE_CHECKING:
    from llm_perf_opt.analysis.trace.document import TraceAnalysis
    from llm_perf_opt.traces.events import Trace

ANALYSIS_FILE = "analysis.json"


@dataclass(frozen=True)
class SourceAnalysis:
    """The analysis of a trace or a run, with notes for the user."""

    document: "TraceAnalysis"
    notes: tuple[str, ...] = ()
    error: LlmPerfError | None = None
    """The error that the command ends with."""


def analyze_source(source: Path, *, use_cache: bool = True) -> SourceAnalysis:
    """Analyze a run folder, a torch trace, or an nsys report or export."""
    if there(source, "Give a run folder, a torch trace, or an nsys report or SQLite export.").is_dir():
        return _analyze_run(source)
    check_ordinary(source)
    file, notes = readable_file(source, use_cache)
    found = _cached(file, source) if use_cache else None
    if found is None:
        found, more = _analyze_file(file, source, use_cache)
        notes += more
    return SourceAnalysis(found, notes, _incomplete_error(found))


def with_borrowed_modules(found: SourceAnalysis, source: Path, eager: Path) -> SourceAnalysis:
    """Add the modules of CUDA graph kernels, taken from an eager trace or run of the same model or from the graphs' capture."""
    from llm_perf_opt.analysis.trace.attribution import attribute, has_modules
    from llm_perf_opt.analysis.trace.graph_modules import (
        AttributedTrace,
        borrow_from_capture,
        borrow_modules,
        borrowed_table,
    )
    from llm_perf_opt.analysis.trace.stages import find_stages
    from llm_perf_opt.traces.graph_capture import graph_captures, graph_replays
    from llm_perf_opt.traces.health import examined
    from llm_perf_opt.workflows.queries import open_source

    if found.error is not None:
        return found
    both = []
    for path in (eager, source):
        trace = examined(open_source(path).trace)
        if not trace.complete:
            raise ParseError(f"The trace of {path} is incomplete: modules cannot be taken from it.", "Record it again.")
        stages = find_stages(trace)
        both.append(AttributedTrace(trace, stages, attribute(trace, stages)))
    if graph_captures(both[0].trace) and graph_replays(both[1].trace, both[1].attribution.call):
        taken = borrow_from_capture(both[0].trace, both[1])
    elif has_modules(both[0].trace):
        taken = borrow_modules(*both)
    else:
        raise ParseError(
            f"{eager} has no module labels.", "Record it with profiling.torch.preset=max, or with_modules=True in torch.profiler."
        )
    table = borrowed_table(taken, both[1].trace, str(eager))
    return replace(found, document=msgspec.structs.replace(found.document, borrowed=table))


def _analyze_run(source: Path) -> SourceAnalysis:
    """Analyze a run; its reports are regenerated if its folder is writable."""
    from llm_perf_opt.workflows.analyze_run import reread

    run, analysis = reread(source)
    if isinstance(analysis.trace, Missing):
        raise ParseError(
            f"{run.folder.path} has no trace to analyze: {analysis.trace.why}.", "See run.json for the status of its passes."
        )
    return SourceAnalysis(
        analysis.trace, tuple(str(warning) for warning in analysis.warnings), analysis.fault or _incomplete_error(analysis.trace)
    )


def _incomplete_error(found: "TraceAnalysis") -> LlmPerfError | None:
    if found.complete:
        return None
    fatal = next(problem for problem in found.problems if problem.fatal)
    return ParseError(f"The trace is incomplete, so it gives no figures: {fatal.what}.", fatal.remedy or "Record it again.")


def _analyze_file(file: Path, source: Path, use_cache: bool) -> "tuple[TraceAnalysis, tuple[str, ...]]":
    from llm_perf_opt.analysis.evidence import RunFacts
    from llm_perf_opt.analysis.trace_analysis import document_of

    made: list[TraceAnalysis] = []

    def analyze(trace: "Trace") -> None:
        made.append(document_of(trace, RunFacts(), str(source)))

    if not use_cache:
        from llm_perf_opt.traces.open_trace import read_trace

        analyze(read_trace(file))
        return made[0], ()
    from llm_perf_opt.analysis.trace.stages import stage_columns
    from llm_perf_opt.traces.trace_cache import cached_trace

    opened = cached_trace(file, columns=stage_columns, meanwhile=analyze)
    if isinstance(opened.tables, Missing):
        return made[0], (opened.tables.why,)
    try:
        write_whole(opened.tables, opened.tables / ANALYSIS_FILE, encoded({"version": made_by(), "document": made[0]}))
    except ResourceError as error:
        return made[0], (f"the analysis was not cached: {error.fact}",)
    return made[0], ()


class _CachedAnalysis(msgspec.Struct):
    version: str
    document: msgspec.Raw


def _cached(file: Path, source: Path) -> "TraceAnalysis | None":
    """Return the cached analysis of this file by this release, if there is one."""
    tables = fresh_tables(file)
    if tables is None or not (tables / ANALYSIS_FILE).is_file():
        return None
    from llm_perf_opt.analysis.trace.document import TraceAnalysis

    try:
        kept = msgspec.json.decode(read_bytes(tables / ANALYSIS_FILE), type=_CachedAnalysis)
        if kept.version != made_by():
            return None
        return msgspec.structs.replace(msgspec.json.decode(kept.document, type=TraceAnalysis), source=str(source))
    except (OSError, ParseError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # damaged: analyze again

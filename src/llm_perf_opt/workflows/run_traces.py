"""Reads the trace of a run, or takes any, and says all that it shows."""

from dataclasses import replace

import msgspec

from llm_perf_opt.analysis.evidence import RunFacts
from llm_perf_opt.analysis.trace.accounting import account
from llm_perf_opt.analysis.trace.document import TraceAnalysis
from llm_perf_opt.analysis.trace.gpu_metrics import gpu_metric_lines
from llm_perf_opt.analysis.trace.stages import find_stages, stage_columns
from llm_perf_opt.analysis.trace_analysis import analyzed, refused
from llm_perf_opt.config.passes import trace_files
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.profiling.timelines import expected_of
from llm_perf_opt.traces.events import Trace
from llm_perf_opt.traces.health import Expected, examined
from llm_perf_opt.traces.trace_cache import cached_trace


def document_of(trace: Trace, facts: RunFacts, source: str, expected: Expected | None = None) -> TraceAnalysis:
    """Health first: a trace that cannot carry numbers, or is not the `expected` one, gets none."""
    sound = examined(trace, expected)
    if not sound.complete:
        return refused(sound, source)
    stages = find_stages(sound)
    return analyzed(sound, stages, account(sound, stages), facts, source)


def read_run_trace(folder: RunFolder, facts: RunFacts) -> tuple[Maybe[TraceAnalysis], tuple[str, ...]]:
    """What the first sound trace of a run shows, else the first that is incomplete, else why there is none; and notes."""
    incomplete: TraceAnalysis | None = None
    why, notes = [], []
    for name, file in trace_files(folder).items():
        if not file.is_file():
            continue
        try:
            opened = cached_trace(file, folder.tables(name), columns=stage_columns)
        except ParseError as error:
            why.append(f"{name}: {error.fact}")
            continue
        if opened.note:
            notes.append(f"Trace of the {name} pass: {opened.note.rstrip('.')}.")
        found = document_of(
            opened.trace, replace(facts, trace_pass=name), str(file.relative_to(folder.path)), expected_of(folder, name)
        )
        if found.complete:
            return _with_metrics(found, folder, name), tuple(notes)
        incomplete = incomplete or found
    none = Missing("; ".join(why) or "neither its torch pass nor its nsys pass left a trace")
    return incomplete or none, tuple(notes)


def _with_metrics(found: TraceAnalysis, folder: RunFolder, read: str) -> TraceAnalysis:
    """The same with the samples of the GPU's metrics that another pass's trace holds: torch records none."""
    for name, file in trace_files(folder).items():
        if found.gpu_metrics or name == read or not file.is_file():
            continue
        try:
            trace = examined(cached_trace(file, folder.tables(name), columns=stage_columns).trace)
        except ParseError:
            continue  # said where that pass is looked at
        if trace.complete and len(trace.samples):
            found = msgspec.structs.replace(found, gpu_metrics=gpu_metric_lines(trace, find_stages(trace)))
    return found

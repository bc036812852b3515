"""Read the trace of one rank, in this process or in a child.

`main` with OPTIONS TRACE RESULT … reads several and leaves what they contribute as arrays:
traces of many ranks are read on all cores, and a child holds one at a time.
"""

import signal
import threading
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from llm_perf_opt.analysis.ranks.extract import rank_trace, without_figures
from llm_perf_opt.analysis.ranks.rank_trace import Causes, Intervals, Occurrences, RankFile, RankGroup, RankStep, RankTrace, Work
from llm_perf_opt.analysis.trace.document import ProblemLine
from llm_perf_opt.analysis.trace.stage_instances import TraceStages
from llm_perf_opt.analysis.trace.stages import find_stages, stage_columns
from llm_perf_opt.core.errors import LlmPerfError, ParseError, error_from
from llm_perf_opt.core.processes import Answer
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.run_folder import encoded, write_whole
from llm_perf_opt.core.user_files import read_bytes
from llm_perf_opt.traces.events import Columns, Trace

_TABLES: dict[str, type[Columns]] = {"collectives": Occurrences, "exposed": Intervals, "causes": Causes, "work": Work}
ONE_OF_MANY = "one_rank"
"""The problem that a trace is of one rank; here the others are given."""


class RankRead(msgspec.Struct, frozen=True):
    """What was read from one file."""

    trace: RankTrace
    problems: list[ProblemLine]
    complete: bool
    notes: list[str]
    analysis: msgspec.Raw | None = None
    """The analysis of the trace alone, if requested."""

    def file(self, rank: int, name: str) -> RankFile:
        """Return it as the file of a rank."""
        return RankFile(rank, name, self.trace, tuple(self.problems), self.complete)


def read_rank(source: Path, *, use_cache: bool, with_analysis: bool) -> RankRead:
    """Return what the trace of a rank contributes; an incomplete trace contributes its problems only."""
    from llm_perf_opt.traces.health import examined
    from llm_perf_opt.workflows.nsys_exports import readable_file

    file, notes = readable_file(source, use_cache)
    stages = _Stages()
    trace, more = _trace(file, use_cache, stages)
    trace = examined(trace)
    problems = [
        ProblemLine(problem.id, problem.what, problem.fatal, problem.remedy)
        for problem in trace.problems
        if problem.id not in (ONE_OF_MANY, "no_device_work")
    ]
    analysis = _analysis(trace, source) if with_analysis else None
    found = rank_trace(trace, stages(trace)) if trace.complete else _without_figures(trace)
    return RankRead(found, problems, trace.complete, [*notes, *more], analysis)


def _analysis(trace: Trace, source: Path) -> msgspec.Raw:
    """Return the analysis of a trace alone, as JSON."""
    from llm_perf_opt.analysis.evidence import RunFacts
    from llm_perf_opt.analysis.trace_analysis import trace_document

    return msgspec.Raw(encoded(trace_document(trace, RunFacts(), str(source))))


class _Stages:
    """Finds the stages of a trace once, for its tables and for the rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: TraceStages | None = None

    def __call__(self, trace: Trace) -> TraceStages:
        with self._lock:
            if self._found is None:
                self._found = find_stages(trace)
            return self._found


def _trace(file: Path, use_cache: bool, stages: _Stages) -> tuple[Trace, tuple[str, ...]]:
    if not use_cache:
        from llm_perf_opt.traces.open_trace import read_trace

        return read_trace(file), ()
    from llm_perf_opt.traces.trace_cache import cached_trace

    opened = cached_trace(file, columns=lambda trace: stage_columns(trace, stages(trace)))
    return opened.trace, (opened.tables.why,) if isinstance(opened.tables, Missing) else ()


def _without_figures(trace: Trace) -> RankTrace:
    why = "; ".join(problem.what for problem in trace.problems if problem.fatal)
    return without_figures(trace, f"the trace is incomplete: {why}")


# --- the child --------------------------------------------------------------------------------------------------------


_NOTHING = msgspec.Raw(b"null")


class _Stored(msgspec.Struct):
    """Everything but the arrays."""

    error: tuple[str, str, str] | None = None
    """Class, fact and remedy."""
    problems: list[ProblemLine] = msgspec.field(default_factory=list)
    complete: bool = False
    notes: list[str] = msgspec.field(default_factory=list)
    plain: dict[str, Any] = msgspec.field(default_factory=dict)
    groups: list[RankGroup] = msgspec.field(default_factory=list)
    steps: list[RankStep] = msgspec.field(default_factory=list)
    analysis: msgspec.Raw = _NOTHING


def store(read: RankRead, place: Path) -> None:
    """Write what was read to two files."""
    trace = read.trace
    arrays = {f"{table}.{name}": column for table in _TABLES for name, column in getattr(trace, table).columns().items()}
    kept = ("groups", "steps", *_TABLES)
    plain = {entry.name: getattr(trace, entry.name) for entry in fields(trace) if entry.name not in kept}
    np.savez(place.with_suffix(".npz"), allow_pickle=False, **arrays)
    stored = _Stored(None, read.problems, read.complete, read.notes, plain, list(trace.groups), list(trace.steps))
    stored.analysis = read.analysis or _NOTHING
    write_whole(place.parent, place.with_suffix(".json"), encoded(stored))


def stored_rank(place: Path) -> RankRead:
    """Return what a child wrote, or raise the error that it met."""
    stored = msgspec.json.decode(read_bytes(place.with_suffix(".json")), type=_Stored)
    if stored.error is not None:
        raise error_from(*stored.error)
    with np.load(place.with_suffix(".npz"), allow_pickle=False) as arrays:
        tables: dict[str, Any] = {
            table: kind(**{name: arrays[f"{table}.{name}"] for name in kind.none().columns()}) for table, kind in _TABLES.items()
        }
    plain = {**stored.plain, "names": tuple(stored.plain["names"])}
    trace = RankTrace(**plain, groups=tuple(stored.groups), steps=tuple(stored.steps), **tables)
    return RankRead(
        trace, stored.problems, stored.complete, stored.notes, None if stored.analysis == _NOTHING else stored.analysis
    )


NO_CACHE, WITH_ANALYSIS = "no-cache", "with-analysis"
"""Options of the child, separated by commas."""


def main(argv: Sequence[str]) -> int:
    """Read traces as a child."""
    options = argv[0].split(",")
    pairs = [(Path(file), Path(place)) for file, place in zip(argv[1::2], argv[2::2], strict=True)]
    read_all(pairs, use_cache=NO_CACHE not in options, with_analysis=WITH_ANALYSIS in options)
    return 0


def read_all(pairs: Sequence[tuple[Path, Path]], *, use_cache: bool, with_analysis: bool) -> None:
    """Read traces, one after the other, and write what each contributes, or its error, to its place."""
    for file, place in pairs:
        try:
            store(read_rank(file, use_cache=use_cache, with_analysis=with_analysis), place)
        except LlmPerfError as error:
            failed = _Stored(error=(type(error).__name__, error.fact, error.remedy))
            write_whole(place.parent, place.with_suffix(".json"), encoded(failed))


def check_stored(place: Path, file: str, done: Answer) -> None:
    """Raise a ParseError if a child left nothing, with how it ended."""
    if place.with_suffix(".json").is_file():
        return
    killed = done.exit_code == -signal.SIGKILL
    how = f"by signal {-done.exit_code}" if done.exit_code < 0 else f"with exit code {done.exit_code}"
    lines = done.errors.strip().splitlines()
    said = f": {lines[-1].strip()}" if lines else ""
    remedy = "It may have run out of memory." if killed else "Analyze this trace alone for the whole error."
    raise ParseError(f"{file} was not read: the process that read it ended {how}{said}.", remedy)

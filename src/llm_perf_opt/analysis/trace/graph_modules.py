"""Modules for a whole trace of CUDA graphs or compiled code, stage by stage, from an eager trace of the same model."""

from dataclasses import dataclass

import numpy as np

from llm_perf_opt.analysis.trace.alignment import MatchedBy, ModuleAlignment, align_modules
from llm_perf_opt.analysis.trace.attribution import Attribution
from llm_perf_opt.analysis.trace.document import BorrowedLine, BorrowedTable
from llm_perf_opt.analysis.trace.projection import NONE
from llm_perf_opt.analysis.trace.row_numbers import sums
from llm_perf_opt.analysis.trace.stage_instances import DECODE_STEP, MIXED_STEP, PREFILL, STEP, TraceStages
from llm_perf_opt.events import Int64, Trace, UInt8, WorkKind


@dataclass(frozen=True)
class AttributedTrace:
    """A trace with what has been found out about it."""

    trace: Trace
    stages: TraceStages
    attribution: Attribution


@dataclass(frozen=True)
class BorrowedModules:
    """Columns parallel to the device work of the trace that had no modules."""

    modules: tuple[str, ...]
    module: Int64
    """Index into `modules`, or -1. Work that had a module of its own keeps it."""
    matched_by: UInt8
    """A MatchedBy; NOTHING for work with a module of its own, too."""
    coverage: dict[str, float | None]
    """Share of the kernels' time: `own`, then by rule (`name`, `class`, `between`), and `nothing`."""


def borrow_modules(eager: AttributedTrace, other: AttributedTrace) -> BorrowedModules:
    """Lay each prefill and each step of `other` beside the last eager one of the same stage. Equal sequences are aligned once."""
    place = {name: index for index, name in enumerate(dict.fromkeys([*eager.attribution.modules, *other.attribution.modules]))}
    theirs = np.array([place[name] for name in eager.attribution.modules] + [NONE], np.int64)  # the last entry answers -1
    own = np.array([place[name] for name in other.attribution.modules] + [NONE], np.int64)
    module = own[other.attribution.module]
    matched_by = np.full(len(module), MatchedBy.NOTHING, np.uint8)
    for stage in (PREFILL, DECODE_STEP, MIXED_STEP, STEP):
        examples = _instances(eager, stage)
        if not examples:
            continue
        example = examples[-1]  # the last: by then, nothing is compiled, allocated or tuned any more
        names, modules = _names(eager.trace, example), theirs[eager.attribution.module[example]]
        known: dict[tuple[str, ...], ModuleAlignment] = {}
        for rows in _instances(other, stage):
            sequence = _names(other.trace, rows)
            if sequence not in known:
                known[sequence] = align_modules(names, modules, sequence, np.ones(len(rows), np.int64))
            open_rows = module[rows] == NONE
            module[rows[open_rows]] = known[sequence].module[open_rows]
            matched_by[rows[open_rows]] = known[sequence].matched_by[open_rows]
    return BorrowedModules(tuple(place), module, matched_by, _coverage(other, matched_by))


def borrowed_table(found: BorrowedModules, trace: Trace, source: str) -> BorrowedTable:
    """The kernels by their modules, the longest first."""
    rows = np.flatnonzero((trace.work.kind == WorkKind.KERNEL) & (found.module != NONE))
    duration = trace.work.end_ns - trace.work.start_ns
    whole = int(duration[trace.work.kind == WorkKind.KERNEL].sum())
    count = np.bincount(found.module[rows], minlength=len(found.modules)).tolist()
    time = sums(found.module[rows], duration[rows], len(found.modules)).tolist()
    lines = [
        BorrowedLine(name, count[place], time[place], time[place] / whole if whole else 0.0)
        for place, name in enumerate(found.modules)
        if count[place]
    ]
    return BorrowedTable(source, found.coverage, sorted(lines, key=lambda line: (-line.self_ns, line.name)))


def _instances(attributed: AttributedTrace, stage: str) -> list[Int64]:
    """The kernels of each instance of a stage, in the order of their start."""
    work = attributed.trace.work
    of = attributed.stages.of_stage(stage)
    rows = np.flatnonzero((of != NONE) & (work.kind == WorkKind.KERNEL))
    rows = rows[np.lexsort((work.start_ns[rows], of[rows]))]
    cuts = np.flatnonzero(np.diff(of[rows])) + 1
    return [part for part in np.split(rows, cuts) if len(part)]


def _names(trace: Trace, rows: Int64) -> tuple[str, ...]:
    return tuple(trace.name_of(int(name)) for name in trace.work.name[rows])


def _coverage(attributed: AttributedTrace, matched_by: UInt8) -> dict[str, float | None]:
    work = attributed.trace.work
    kernel = work.kind == WorkKind.KERNEL
    duration = (work.end_ns - work.start_ns)[kernel]
    total = int(duration.sum())
    own = (attributed.attribution.module != NONE)[kernel]
    parts = {"own": own} | {rule.name.lower(): ~own & (matched_by[kernel] == rule) for rule in MatchedBy if rule}
    parts["nothing"] = ~own & (matched_by[kernel] == MatchedBy.NOTHING)
    return {name: int(duration[mine].sum()) / total if total else None for name, mine in parts.items()}

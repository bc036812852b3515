"""Assign modules to the kernels of CUDA graphs or compiled code, per stage, from an eager trace of the same model.

Kernels are matched in order: first by name, then by class between two matches (if both sides have as many of a class), then
kernels between two of one module get that module.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np

from llm_perf_opt.analysis.kernels.classes import CLASSES, classify
from llm_perf_opt.analysis.trace.attribution import MODULE_LABEL, Attribution, CapturedGraphs, operator_names
from llm_perf_opt.analysis.trace.document import BorrowedLine, BorrowedTable, CaptureLine, CaptureTable
from llm_perf_opt.analysis.trace.intervals import matching, sums
from llm_perf_opt.analysis.trace.stage_instances import DECODE_STEP, PREFILL, TraceStages
from llm_perf_opt.analysis.trace.stage_launches import instance_kernels
from llm_perf_opt.core.stages import MIXED_STEP, STEP
from llm_perf_opt.traces.events import Bool, Int64, Trace, UInt8, WorkKind, different
from llm_perf_opt.traces.graph_capture import Capture, graph_captures, graph_replays, nodes_of
from llm_perf_opt.traces.projection import NONE, through


class MatchedBy(IntEnum):
    """The rule that assigned a module to a kernel."""

    NOTHING = 0
    NAME = 1
    CLASS = 2
    BETWEEN = 3
    CAPTURE = 4
    """By the captured launch of its graph node."""


@dataclass(frozen=True)
class ModuleAlignment:
    """Columns parallel to the kernels without modules."""

    module: Int64
    """Index of the eager pass's module, or -1."""
    partner: Int64
    """Index in the eager sequence, or -1."""
    matched_by: UInt8
    """A MatchedBy."""
    coverage: dict[MatchedBy, float | None]
    """Share of the kernels' time by rule; None if they took no time."""


def align_modules(eager_names: Sequence[str], eager_modules: Int64, names: Sequence[str], duration_ns: Int64) -> ModuleAlignment:
    """Assign the modules of an eager step's kernels to the kernels `names` of a step, both in order."""
    place = {name: index for index, name in enumerate(dict.fromkeys([*eager_names, *names]))}
    first = np.array([place[name] for name in eager_names], np.int64)
    second = np.array([place[name] for name in names], np.int64)
    partner = common_subsequence(first, second)
    by = np.where(partner == NONE, MatchedBy.NOTHING, MatchedBy.NAME).astype(np.uint8)
    class_of = np.array([CLASSES.index(classify(name)) for name in place], np.int64)
    _pair_classes(class_of[first], class_of[second], partner, by)
    module = np.full(len(second), NONE, np.int64)
    module[partner != NONE] = eager_modules[partner[partner != NONE]]
    by[(partner != NONE) & (module == NONE)] = MatchedBy.NOTHING
    _fill_between(module, by, partner, eager_modules)
    total = int(duration_ns.sum())
    coverage = {rule: int(duration_ns[by == rule].sum()) / total if total else None for rule in MatchedBy}
    return ModuleAlignment(module, partner, by, coverage)


def common_subsequence(first: Int64, second: Int64) -> Int64:
    """Return, per element of `second`, its partner in `first` in a longest common subsequence, or -1. Memory grows linearly.

    Common heads and tails are paired first; the middle is divided in two until it is short (Hirschberg's algorithm), with one
    vector operation per row, so two steps of some thousand kernels take well under a second.
    """
    partner = np.full(len(second), NONE, np.int64)
    todo = [(0, len(first), 0, len(second))]
    while todo:
        low, high, left, right = _trimmed(first, second, partner, *todo.pop())
        if low == high or left == right:
            continue
        if high - low == 1:
            found = np.flatnonzero(second[left:right] == first[low])
            if len(found):
                partner[left + found[0]] = low
            continue
        middle = (low + high) // 2
        ahead = _lengths(first[low:middle], second[left:right])
        behind = _lengths(first[middle:high][::-1], second[left:right][::-1])[::-1]
        cut = left + int((ahead + behind).argmax())
        todo += [(low, middle, left, cut), (middle, high, cut, right)]
    return partner


def _trimmed(
    first: Int64, second: Int64, partner: Int64, low: int, high: int, left: int, right: int
) -> tuple[int, int, int, int]:
    """Pair equal heads and tails, which some longest common subsequence always contains; return the remaining bounds."""
    shorter = min(high - low, right - left)
    differs = np.flatnonzero(first[low : low + shorter] != second[left : left + shorter])
    head = int(differs[0]) if len(differs) else shorter
    partner[left : left + head] = np.arange(low, low + head)
    low, left, shorter = low + head, left + head, shorter - head
    differs = np.flatnonzero(first[high - shorter : high][::-1] != second[right - shorter : right][::-1])
    tail = int(differs[0]) if len(differs) else shorter
    partner[right - tail : right] = np.arange(high - tail, high)
    return low, high - tail, left, right - tail


def _lengths(first: Int64, second: Int64) -> Int64:
    """Return the length of the longest common subsequence of `first` with each prefix of `second`."""
    row = np.zeros(len(second) + 1, np.int64)
    for element in first:
        through = row[:-1] + (second == element)
        row[1:] = np.maximum.accumulate(np.maximum(row[1:], through))
    return row


def _pair_classes(first: Int64, second: Int64, partner: Int64, by: UInt8) -> None:
    """Pair kernels by class between neighboring matches."""
    anchors = np.flatnonzero(partner != NONE)
    bounds = [(-1, -1), *zip(partner[anchors].tolist(), anchors.tolist(), strict=True), (len(first), len(second))]
    for (low, left), (high, right) in itertools.pairwise(bounds):
        if high - low < 2 or right - left < 2:
            continue
        theirs, ours = first[low + 1 : high], second[left + 1 : right]
        last = NONE
        for kind in dict.fromkeys(ours.tolist()):
            there, here = np.flatnonzero(theirs == kind), np.flatnonzero(ours == kind)
            # pairs must not cross earlier ones in this interval
            if len(there) == len(here) and there[0] > last:
                partner[left + 1 + here] = low + 1 + there
                by[left + 1 + here] = MatchedBy.CLASS
                last = int(there[-1])


def _fill_between(module: Int64, by: UInt8, partner: Int64, eager_modules: Int64) -> None:
    """Assign a module to kernels between two of that module. Layers repeat labels, so the eager pass must not have left the
    module in between."""
    known = np.flatnonzero(module != NONE)
    for left, right in zip(known[:-1].tolist(), known[1:].tolist(), strict=True):
        stayed = (eager_modules[partner[left] : partner[right] + 1] == module[left]).all()
        if right - left > 1 and module[left] == module[right] and stayed:
            module[left + 1 : right] = module[left]
            by[left + 1 : right] = MatchedBy.BETWEEN


@dataclass(frozen=True)
class AttributedTrace:
    """A trace with its stages and attribution."""

    trace: Trace
    stages: TraceStages
    attribution: Attribution


@dataclass(frozen=True)
class BorrowedModules:
    """Columns parallel to the device work of the trace without modules."""

    modules: tuple[str, ...]
    module: Int64
    """Index into `modules`, or -1. Work that has a module keeps it."""
    matched_by: UInt8
    """A MatchedBy; also NOTHING for work that already had a module."""
    coverage: dict[str, float | None]
    """Share of the kernels' time: `own`, then by rule (`name`, `class`, `between`, `capture`), and `nothing`."""
    operators: tuple[str, ...] = ()
    operator: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    """Index into `operators`, or -1; empty if only modules were taken."""


def borrow_modules(eager: AttributedTrace, other: AttributedTrace) -> BorrowedModules:
    """Align each prefill and step of `other` with the last eager one of the same stage. Equal sequences are aligned once."""
    place = {name: index for index, name in enumerate(dict.fromkeys([*eager.attribution.modules, *other.attribution.modules]))}
    theirs = np.array([place[name] for name in eager.attribution.modules] + [NONE], np.int64)  # the last entry is for -1
    own = np.array([place[name] for name in other.attribution.modules] + [NONE], np.int64)
    module = own[other.attribution.module]
    matched_by = np.full(len(module), MatchedBy.NOTHING, np.uint8)
    for stage in (PREFILL, DECODE_STEP, MIXED_STEP, STEP):
        examples = instance_kernels(eager.trace, eager.stages, stage)
        if not examples:
            continue
        example = examples[-1]  # the last, when compilation, allocation and tuning are done
        names, modules = _names(eager.trace, example), theirs[eager.attribution.module[example]]
        known: dict[tuple[str, ...], ModuleAlignment] = {}
        for rows in instance_kernels(other.trace, other.stages, stage):
            sequence = _names(other.trace, rows)
            if sequence not in known:
                known[sequence] = align_modules(names, modules, sequence, np.ones(len(rows), np.int64))
            open_rows = module[rows] == NONE
            module[rows[open_rows]] = known[sequence].module[open_rows]
            matched_by[rows[open_rows]] = known[sequence].matched_by[open_rows]
    return BorrowedModules(tuple(place), module, matched_by, _coverage(other, matched_by))


def borrow_from_capture(capture: Trace, other: AttributedTrace) -> BorrowedModules:
    """Assign to the kernels of each replayed graph the operator and module of its captured launch (`CapturedGraphs`)."""
    graphs = CapturedGraphs(capture, other.trace)
    operators = _Places(other.trace.name_of(name) for name in different(other.trace.operators.name).tolist())
    modules = _Places(other.attribution.modules)
    operator = through(other.attribution.operator, operators.of(map(other.trace.name_of, other.trace.operators.name.tolist())))
    module = through(other.attribution.module, modules.of(other.attribution.modules))
    matched_by = np.full(len(module), MatchedBy.NOTHING, np.uint8)
    for replay in graph_replays(other.trace, other.attribution.call):
        of_operators, of_modules = graphs.captures_of(replay)
        if of_operators is not None:
            operator[replay.work] = operators.of(graphs.operators[of_operators.begin])
            matched_by[replay.work] = MatchedBy.CAPTURE
        if of_modules is not None and any(graphs.modules[of_modules.begin]):
            module[replay.work] = modules.of(graphs.modules[of_modules.begin])
            matched_by[replay.work] = MatchedBy.CAPTURE
    found = BorrowedModules(tuple(modules), module, matched_by, {}, tuple(operators), operator)
    return replace(found, coverage=_coverage(other, matched_by, own=(operator != NONE) & (matched_by != MatchedBy.CAPTURE)))


class _Places(dict[str, int]):
    """Names in the order in which they were first seen."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.of(names)

    def of(self, names: Iterable[str]) -> Int64:
        """Return the place of each name; -1 for an empty one."""
        return np.array([self.setdefault(name, len(self)) if name else NONE for name in names], np.int64)


def borrowed_table(found: BorrowedModules, trace: Trace, source: str) -> BorrowedTable:
    """Return kernel time by module and operator, longest first."""
    operators = _lines(trace, found.operators, found.operator) if found.operators else []
    return BorrowedTable(source, found.coverage, _lines(trace, found.modules, found.module), operators)


MOST_LABELLED = 1000
"""Captures whose label is searched; an engine captures some dozens of graphs."""


def capture_table(trace: Trace) -> CaptureTable | None:
    """Return the captured graphs by label, and the operators that launched their nodes; None if the trace has no capture."""
    captures = graph_captures(trace)
    if not captures:
        return None
    modules = matching(trace, trace.ranges.name, MODULE_LABEL.fullmatch)
    labels: dict[str, CaptureLine] = {}
    for number, capture in enumerate(captures):
        label = _label_of(trace, capture, ~modules) if number < MOST_LABELLED else ""
        so_far = labels.get(label, CaptureLine(label, 0, 0, 0))
        wall_ns = so_far.wall_ns + capture.end_ns - capture.start_ns
        labels[label] = CaptureLine(label, so_far.graphs + 1, so_far.nodes + len(capture.nodes), wall_ns)
    operators = Counter(operator_names(trace, nodes_of(captures)))
    operators.pop("", None)
    return CaptureTable(list(labels.values()), dict(sorted(operators.items(), key=lambda item: (-item[1], item[0]))))


def _label_of(trace: Trace, capture: Capture, candidates: Bool) -> str:
    """Return the innermost of these ranges that is open around the whole capture on its thread; empty if none is."""
    ranges, calls = trace.ranges, trace.calls
    around = candidates & (ranges.start_ns <= capture.start_ns) & (ranges.end_ns >= capture.end_ns)
    around &= (ranges.process == calls.process[capture.begin]) & (ranges.thread == calls.thread[capture.begin])
    rows = np.flatnonzero(around)
    return trace.name_of(int(ranges.name[rows[-1]])) if len(rows) else ""


def _lines(trace: Trace, names: Sequence[str], number: Int64) -> list[BorrowedLine]:
    rows = np.flatnonzero((trace.work.kind == WorkKind.KERNEL) & (number != NONE))
    duration = trace.work.end_ns - trace.work.start_ns
    whole = int(duration[trace.work.kind == WorkKind.KERNEL].sum())
    count = np.bincount(number[rows], minlength=len(names)).tolist()
    time = sums(number[rows], duration[rows], len(names)).tolist()
    lines = [
        BorrowedLine(name, count[place], time[place], time[place] / whole if whole else 0.0)
        for place, name in enumerate(names)
        if count[place]
    ]
    return sorted(lines, key=lambda line: (-line.self_ns, line.name))


def _names(trace: Trace, rows: Int64) -> tuple[str, ...]:
    return tuple(trace.name_of(int(name)) for name in trace.work.name[rows])


def _coverage(attributed: AttributedTrace, matched_by: UInt8, own: Bool | None = None) -> dict[str, float | None]:
    work = attributed.trace.work
    kernel = work.kind == WorkKind.KERNEL
    duration = (work.end_ns - work.start_ns)[kernel]
    total = int(duration.sum())
    own = (attributed.attribution.module != NONE if own is None else own)[kernel]
    parts = {"own": own} | {rule.name.lower(): ~own & (matched_by[kernel] == rule) for rule in MatchedBy if rule}
    parts["nothing"] = ~own & (matched_by[kernel] == MatchedBy.NOTHING)
    return {name: int(duration[mine].sum()) / total if total else None for name, mine in parts.items()}

"""Attribute device time: kernel → launch call → operator → module → stage and step.

An operator or a module owns the work launched while it is open on the launching thread. The kernels of a replayed graph belong to
the operators and modules of its capture, if the trace has it. Its *self* time excludes inner ones, its
*total* time includes them; an operator inside another of the same name counts once.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llm_perf_opt.analysis.kernels.classes import KernelClass, classify
from llm_perf_opt.analysis.trace.intervals import distinct, renumbered, sums
from llm_perf_opt.analysis.trace.operator_classes import HostRow, row_of
from llm_perf_opt.analysis.trace.stage_instances import TraceStages, coverage_of
from llm_perf_opt.core.stages import PART_LABEL
from llm_perf_opt.traces.events import Int64, Operators, RangeKind, Ranges, Trace, different
from llm_perf_opt.traces.graph_capture import Capture, Replay, by_capture, graph_captures, graph_replays, nodes_of
from llm_perf_opt.traces.nesting import Nesting, depths, lanes_of, nest
from llm_perf_opt.traces.projection import NONE, launching_calls, through

MODULE_LABEL = re.compile(
    rf"nn\.Module: (?P<torch>.+)|{re.escape(PART_LABEL)}(?P<part>.+)|\{{'Module': '(?P<hooks>[^']+)'.*",
    re.DOTALL,
)
"""Labels of modules: torch's module calls (with_modules, with_stack), this tool's components, and the layer-wise NVTX hooks of
serving engines."""
MOST_ROUNDS = 64
"""Levels of nesting that are processed for all rows at once; deeper ones are processed row by row."""


@dataclass(frozen=True)
class Attribution:
    """Columns parallel to the device work; -1 if the level is unknown."""

    call: Int64
    """The launch call."""
    operator: Int64
    """Row of the innermost operator around the call."""
    top_operator: Int64
    """Row of the outermost operator around the call."""
    operator_parent: Int64
    """Per operator: the operator around it."""
    module_range: Int64
    """Row of the range that labels the module."""
    module: Int64
    """Index into `modules`."""
    stage: Int64
    """Index into the stages' names: the innermost stage."""
    step: Int64
    """Instance of the step."""
    modules: tuple[str, ...]
    coverage: dict[str, float | None]
    """Level (launch, operator, module, stage, step) → share of the summed device time that has one."""


@dataclass(frozen=True)
class OwnerRow:
    """One operator name or one module."""

    name: str
    calls: int
    """Instances that launched work, directly or through inner ones."""
    kernels: int
    """Device work launched directly, without inner ones."""
    self_ns: int
    total_ns: int
    share: float
    """`self_ns` / all device time; the shares add up to the level's coverage."""


def attribute(trace: Trace, stages: TraceStages) -> Attribution:
    """Return the owner of each row of device work on every level."""
    call = launching_calls(trace)
    of_operator, of_module = _origins(trace, call)
    operator, operators = _owner(trace, of_operator, trace.operators, np.arange(len(trace.operators)))
    modules, rows, of_range = _module_labels(trace)
    module, _ = _owner(trace, of_module, trace.ranges, rows)
    stage = through(stages.of_work, stages.instances.stage)
    step = stages.of_stage(stages.step_stage) if stages.step_stage else np.full(len(trace.work), NONE, np.int64)
    levels = {
        "launch": call,
        "operator": operator,
        "module": (named := through(module, of_range)),
        "stage": stage,
        "step": step,
    }
    duration = trace.work.end_ns - trace.work.start_ns
    return Attribution(
        call=call,
        operator=operator,
        top_operator=operators.outermost(operator),
        operator_parent=operators.parent,
        module_range=module,
        module=named,
        stage=stage,
        step=step,
        modules=modules,
        coverage={level: coverage_of(owner, duration) for level, owner in levels.items()},
    )


def has_modules(trace: Trace) -> bool:
    """Return whether any range of the trace labels a module."""
    return any(MODULE_LABEL.fullmatch(trace.name_of(int(index))) for index in different(trace.ranges.name))


def has_components(trace: Trace) -> bool:
    """Return whether any range of the trace labels a component of the model."""
    return any(trace.name_of(int(index)).startswith(PART_LABEL) for index in different(trace.ranges.name))


def operators_by_time(trace: Trace, attribution: Attribution) -> tuple[OwnerRow, ...]:
    """Return operators by their own device time, longest first."""
    names = trace.operators.name.astype(np.int64)
    found = _by_owner(trace, attribution.operator, attribution.operator_parent, names, len(trace.names))
    return _rows(trace, [(trace.name_of(name), figures) for name, figures in found.items()])


def modules_by_time(trace: Trace, attribution: Attribution) -> tuple[OwnerRow, ...]:
    """Return modules by their own device time, longest first."""
    _, rows, of_range = _module_labels(trace)
    owner = renumbered(attribution.module_range, rows, len(trace.ranges))
    picked = trace.ranges.rows(rows)
    nesting = nest(picked.start_ns, picked.end_ns, lanes_of((picked.process, picked.thread))[0])
    found = _by_owner(trace, owner, nesting.parent, of_range[rows], len(attribution.modules))
    return _rows(trace, [(attribution.modules[name], figures) for name, figures in found.items()])


def _origins(trace: Trace, call: Int64) -> tuple[Int64, Int64]:
    """Return the calls that own each row of work, for operators and for modules.

    For a replayed graph whose capture is in the trace, they are the captured launches.
    """
    graphs = CapturedGraphs(trace, trace)
    origins: tuple[Int64, Int64] = call.copy(), call.copy()
    for replay in graph_replays(trace, call) if graphs else ():
        for origin, capture in zip(origins, graphs.captures_of(replay), strict=True):
            if capture is not None:
                origin[replay.work] = capture.nodes
    return origins


_PRODUCTS = {KernelClass.GEMM, KernelClass.GEMV}
_ELSE = {KernelClass.COLLECTIVE, KernelClass.SAMPLING, KernelClass.MOE_ROUTING}
_NEVER_RUNS = {
    HostRow.MATMUL: {KernelClass.ATTENTION, KernelClass.NORM, *_ELSE},
    HostRow.NORM: {KernelClass.ATTENTION, *_PRODUCTS, *_ELSE},
    HostRow.MEMORY: {KernelClass.ATTENTION, KernelClass.NORM, *_PRODUCTS, *_ELSE},
    HostRow.ATTENTION: {KernelClass.NORM, *_ELSE},
    HostRow.COMMUNICATION: {KernelClass.ATTENTION, *_PRODUCTS},
}
"""Class of an operator → kernels that it cannot have launched."""


class CapturedGraphs:
    """The captured graphs of a trace, to find the one that a replay ran, in the same trace or in another.

    A replay ran a graph with as many nodes, of the same kinds in the same order, if no node contradicts its kernel: a matrix
    product does not launch a norm. If several captures fit, the operators are known only if all of them have the same, and so are
    the modules: the graphs of two layers differ in their modules alone.
    """

    def __init__(self, captured: Trace, replayed: Trace) -> None:
        captures = graph_captures(captured)
        nodes = nodes_of(captures)
        self.operators = by_capture(captures, operator_names(captured, nodes) if captures else ())
        """Begin of a capture → the operator of each node."""
        self.modules = by_capture(captures, module_names(captured, nodes) if captures else ())
        self._replayed = replayed
        self._by_kinds: dict[bytes, dict[object, Capture]] = {}
        for capture in captures:
            owners = self.operators[capture.begin], self.modules[capture.begin]
            if capture.kinds:
                self._by_kinds.setdefault(capture.kinds, {}).setdefault(owners, capture)
        self._found: dict[tuple[bytes, bytes], tuple[Capture | None, Capture | None]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_kinds)

    def captures_of(self, replay: Replay) -> tuple[Capture | None, Capture | None]:
        """Return a capture with the operators of this replay, and one with its modules; None where they are not known."""
        candidates = self._by_kinds.get(replay.kinds)
        if candidates is None:
            return None, None
        names = self._replayed.work.name[replay.work]
        known = replay.kinds, names.tobytes()  # almost all replays of a graph are alike
        if known not in self._found:
            kernels = [self._replayed.name_of(name) for name in names.tolist()]
            fitting = [each for each in candidates.values() if _fits(self.operators[each.begin], kernels)]
            operators, modules = ({owners[each.begin] for each in fitting} for owners in (self.operators, self.modules))
            self._found[known] = (
                fitting[0] if len(operators) == 1 else None,
                fitting[0] if len(modules) == 1 else None,
            )
        return self._found[known]


def _fits(operators: Sequence[str], kernels: Sequence[str]) -> bool:
    """Return whether these operators may have launched these kernels."""
    return all(
        classify(kernel) not in _NEVER_RUNS.get(row_of(operator, False), ())
        for operator, kernel in set(zip(operators, kernels, strict=True))
        if operator
    )


def operator_names(trace: Trace, calls: Int64) -> tuple[str, ...]:
    """Return the name of the innermost operator around each call; empty if there is none."""
    operator, _ = _owner(trace, calls, trace.operators, np.arange(len(trace.operators)))
    return tuple(trace.name_of(name) for name in through(operator, trace.operators.name).tolist())


def module_names(trace: Trace, calls: Int64) -> tuple[str, ...]:
    """Return the name of the innermost labeled module around each call; empty if there is none."""
    modules, rows, of_range = _module_labels(trace)
    module, _ = _owner(trace, calls, trace.ranges, rows)
    return tuple(modules[index] if index != NONE else "" for index in through(module, of_range).tolist())


def _owner(trace: Trace, call: Int64, table: Ranges | Operators, rows: Int64) -> tuple[Int64, Nesting]:
    """Return, per row of device work, the table's innermost row around its launch."""
    calls = trace.calls
    lane, call_lane = lanes_of((table.process[rows], table.thread[rows]), (calls.process, calls.thread))
    nesting = nest(table.start_ns[rows], table.end_ns[rows], lane)
    launching = distinct(call, len(calls))
    of_call = np.full(len(calls), NONE, np.int64)
    of_call[launching] = through(nesting.innermost(calls.start_ns[launching], call_lane[launching]), rows)
    return through(call, of_call), nesting


def _module_labels(trace: Trace) -> tuple[tuple[str, ...], Int64, Int64]:
    """Return the modules' names, the ranges that label one, and the module's index per range."""
    place: dict[str, int] = {}
    of_name = np.full(len(trace.names) + 1, NONE, np.int64)  # the last entry is for NO_NAME
    for index in different(trace.ranges.name):
        label = MODULE_LABEL.fullmatch(trace.name_of(int(index)))
        if label:
            name = next(group for group in label.groups() if group)
            of_name[index] = place.setdefault(name, len(place))
    of_range = of_name[trace.ranges.name]
    of_range[trace.ranges.kind != RangeKind.PUSH_POP] = NONE
    return tuple(place), np.flatnonzero(of_range != NONE), of_range


Figures = tuple[int, int, int, int]


def _by_owner(trace: Trace, owner: Int64, parent: Int64, name: Int64, names: int) -> dict[int, Figures]:
    """Return name → (instances, rows of work, self time, total time), going from each owner to those around it."""
    work = np.flatnonzero(owner != NONE)
    at = owner[work]
    duration = (trace.work.end_ns - trace.work.start_ns)[work]
    kernels = np.bincount(name[at], minlength=names)
    self_ns, total_ns = sums(name[at], duration, names), np.zeros(names, np.int64)
    outer = outermost_of_its_name(parent, name, distinct(at, len(parent)))
    reached = np.zeros(len(name), np.bool_)
    rounds = 0
    while len(at):
        rounds += 1
        if rounds > MOST_ROUNDS:  # process the remaining rows once each
            count, duration = _with_inner(parent, np.bincount(at, minlength=len(name)), sums(at, duration, len(name)))
            at = np.flatnonzero(count)
            reached[at] = True
            total_ns += sums(name[at[outer[at]]], duration[at[outer[at]]], names)
            break
        reached[at] = True
        counted = outer[at]
        total_ns += sums(name[at[counted]], duration[counted], names)
        above = parent[at]
        at, duration = above[above != NONE], duration[above != NONE]
    calls = np.bincount(name[reached], minlength=names)
    return {
        int(index): (int(calls[index]), int(kernels[index]), int(self_ns[index]), int(total_ns[index]))
        for index in np.flatnonzero(calls)
    }


def outermost_of_its_name(parent: Int64, name: Int64, rows: Int64) -> npt.NDArray[np.bool_]:
    """Return per row whether nothing around it has its name; valid for the given rows and all around them."""
    chain = rows
    asked = np.zeros(len(parent), np.bool_)
    rounds = 0
    while len(chain):
        rounds += 1
        if rounds > MOST_ROUNDS:
            return _outermost_by_place(parent, name)
        asked[chain] = True
        chain = distinct(parent[chain], len(parent))
        chain = chain[~asked[chain]]
    pending = np.flatnonzero(asked)
    outermost: npt.NDArray[np.bool_] = asked.copy()
    above = parent[pending]
    while len(pending):
        keep = above != NONE
        pending, above = pending[keep], above[keep]
        outermost[pending[name[above] == name[pending]]] = False
        keep = name[above] != name[pending]
        pending, above = pending[keep], parent[above[keep]]
    return outermost


def _with_inner(parent: Int64, *columns: Int64) -> tuple[Int64, ...]:
    """Return each column with the sums over a row and all rows inside it, innermost rows first."""
    rows = np.argsort(-depths(parent), kind="stable").tolist()
    above = parent.tolist()
    sums_: list[list[int]] = [column.tolist() for column in columns]
    for total in sums_:
        for row in rows:
            if above[row] != NONE:
                total[above[row]] += total[row]
    return tuple(np.array(total, np.int64) for total in sums_)


def _outermost_by_place(parent: Int64, name: Int64) -> npt.NDArray[np.bool_]:
    """Return per row whether nothing around it has its name, for any depth. Rows are numbered so that inner rows follow."""
    (size,) = _with_inner(parent, np.ones(len(parent), np.int64))
    above, sizes = parent.tolist(), size.tolist()
    place = [0] * len(above)
    free = [1] * len(above)
    behind = 0
    for row in np.argsort(depths(parent), kind="stable").tolist():
        outer = above[row]
        place[row] = behind if outer == NONE else place[outer] + free[outer]
        if outer == NONE:
            behind += sizes[row]
        else:
            free[outer] += sizes[row]
    first = np.array(place, np.int64)
    order = np.lexsort((first, name))
    end, of = (first + size)[order], name[order]
    reach = np.maximum.accumulate(end + of * (len(parent) + 1))  # every end of a name is above all ends of earlier names
    inside = np.append(False, (of[1:] == of[:-1]) & (first[order][1:] < reach[:-1] - of[:-1] * (len(parent) + 1)))
    outermost = np.ones(len(parent), np.bool_)
    outermost[order[inside]] = False
    return outermost


def _rows(trace: Trace, found: list[tuple[str, Figures]]) -> tuple[OwnerRow, ...]:
    whole = int((trace.work.end_ns - trace.work.start_ns).sum())
    rows = [
        OwnerRow(name, calls, kernels, self_ns, total_ns, self_ns / whole if whole else 0.0)
        for name, (calls, kernels, self_ns, total_ns) in found
    ]
    return tuple(sorted(rows, key=lambda row: (-row.self_ns, -row.total_ns, row.name)))

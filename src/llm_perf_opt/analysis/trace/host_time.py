"""Where the host time of a stage goes, for a program on the CPU: operators by class, and the time outside operators.

Every nanosecond of a stage belongs to the innermost operator that runs, or to none. The rows add up to the wall time exactly.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from llm_perf_opt.analysis.stats import apportion
from llm_perf_opt.analysis.trace.document import WHOLE
from llm_perf_opt.analysis.trace.intervals import Blocks, covered_before, exact_sum, matching, sums, union_blocks
from llm_perf_opt.analysis.trace.operator_classes import HostRow, row_of
from llm_perf_opt.analysis.trace.operators import labeled_instances
from llm_perf_opt.analysis.trace.stage_instances import DECODE, DECODE_STEP, PREFILL, TraceStages
from llm_perf_opt.core.stages import MIXED_STEP, PART_LABEL, PROFILER_OPERATORS, STEP
from llm_perf_opt.traces.events import Bool, Int64, Trace, different
from llm_perf_opt.traces.nesting import NONE, lanes_of, nest

OTHER = "other"
"""The component of what no component label encloses."""

_ROWS = list(HostRow)
_INDEX = {row: place for place, row in enumerate(_ROWS)}


@dataclass(frozen=True)
class HostTime:
    """The host time of one stage under the profiler."""

    stage: str
    unit: str
    """token, prefill or step; `decode` if its steps are unknown."""
    units: int
    wall_ns: int
    rows: Mapping[HostRow, int]
    """They add up to `wall_ns`."""
    events: Mapping[HostRow, int]
    """Recorded operators by the row that contains the profiler's cost of recording them."""
    labels: int
    """Labels of components; the cost of labels is in the row `python`."""
    stage_labels: int
    """All other labels."""
    calls: Mapping[HostRow, int]
    """Operators by the row of their own time."""
    by_name: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Operator → calls and own time."""
    components: Mapping[str, Mapping[HostRow, int]] = field(default_factory=dict)
    """Component → rows; empty if the trace labels no components. They add up to `rows`."""
    overlapping: bool = False
    """Whether operators of one thread overlap without nesting, so that their times were scaled to the time they cover."""


def host_times(trace: Trace, stages: TraceStages, smallest_ns: int = 0) -> list[HostTime]:
    """Return the host time of each stage. The first `smallest_ns` of each operator's own time count as its dispatch.

    A trace without stages has one, from the first to the last operator of the thread with the most operators.
    """
    trace = _without_profiler_operators(trace)
    if not len(trace.operators):
        return []
    lanes = _Lanes(trace, smallest_ns)
    names = [name for name in (PREFILL, DECODE, MIXED_STEP, STEP) if name in stages.names]
    found = [entry for name in names if (entry := _stage(trace, stages, name, lanes)) is not None]
    if found:
        return found
    whole = _whole(trace, lanes)
    return [whole] if whole.wall_ns else []


def _without_profiler_operators(trace: Trace) -> Trace:
    """Return the trace without operators of the profiler itself: their time is part of the cost of a label."""
    own = matching(trace, trace.operators.name, lambda name: name.startswith(PROFILER_OPERATORS))
    return replace(trace, operators=trace.operators.rows(~own)) if own.any() else trace


def _whole(trace: Trace, lanes: "_Lanes") -> HostTime:
    thread = int(np.bincount(lanes.lane).argmax())
    rows = lanes.lane == thread
    start, end = trace.operators.start_ns[rows].min(), trace.operators.end_ns[rows].max()
    found = _Sums()
    _add(trace, lanes, thread, union_blocks(np.array([start]), np.array([max(start, end)])), found)
    return found.result(WHOLE, WHOLE, 1)


class _Lanes:
    """Operators and labels of a trace by thread."""

    def __init__(self, trace: Trace, smallest_ns: int) -> None:
        table, ranges = trace.operators, trace.ranges
        self.lane, self.label_lane = lanes_of((table.process, table.thread), (ranges.process, ranges.thread))
        self.parent = nest(table.start_ns, table.end_ns, self.lane).parent
        self.smallest_ns = smallest_ns
        self.component = _component_labels(trace)
        inner = self.parent[self.parent != NONE]
        self.calls_others: Bool = np.bincount(inner, minlength=len(table)) > 0
        self.row = _rows_of(trace, self.calls_others)


def _rows_of(trace: Trace, calls_others: Bool) -> Int64:
    """Return the index in `_ROWS` of each operator's own time; each distinct name is looked up once."""
    names = trace.operators.name.astype(np.int64)
    table = np.zeros((len(trace.names) + 1, 2), np.int64)
    for index in different(names).tolist():
        name = trace.name_of(index)
        table[index] = [_INDEX[row_of(name, inside)] for inside in (False, True)]
    return np.asarray(table[names, calls_others.astype(np.int64)])


def _component_labels(trace: Trace) -> Bool:
    """Return which ranges label a component of the model."""
    marked = np.array([name.startswith(PART_LABEL) for name in trace.names] + [False], np.bool_)
    return np.asarray(marked[trace.ranges.name])


def _stage(trace: Trace, stages: TraceStages, name: str, lanes: _Lanes) -> HostTime | None:
    """Return the host time of a stage on the threads of its labels, or None if it has no labeled time."""
    windows = labeled_instances(trace, stages, name)
    lane = lanes.label_lane[windows.range]
    found = _Sums()
    for thread in different(lane).tolist():
        mine = lane == thread
        _add(trace, lanes, thread, union_blocks(windows.start_ns[mine], windows.end_ns[mine]), found)
    if not found.wall_ns:
        return None
    inner = DECODE_STEP if name == DECODE and DECODE_STEP in stages.names else name
    unit = {PREFILL: "prefill", DECODE: "token"}.get(name, "step") if inner != DECODE else DECODE
    return found.result(name, unit, len(stages.rows_of(inner)) or 1)


@dataclass
class _Sums:
    """Running sums over the threads of a stage."""

    wall_ns: int = 0
    rows: dict[HostRow, int] = field(default_factory=lambda: dict.fromkeys(HostRow, 0))
    events: dict[HostRow, int] = field(default_factory=lambda: dict.fromkeys(HostRow, 0))
    calls: dict[HostRow, int] = field(default_factory=lambda: dict.fromkeys(HostRow, 0))
    labels: int = 0
    stage_labels: int = 0
    by_name: dict[str, tuple[int, int]] = field(default_factory=dict)
    components: dict[str, dict[HostRow, int]] = field(default_factory=dict)
    overlapping: bool = False

    def add(self, names: list[str], ns: Int64) -> None:
        """Add the time of each component (rows of `ns`) in each row (columns)."""
        for name, times in zip(names, ns.tolist(), strict=True):
            known = self.components.setdefault(name, dict.fromkeys(HostRow, 0))
            for row, value in zip(_ROWS, times, strict=True):
                known[row] += value
                self.rows[row] += value

    def result(self, stage: str, unit: str, units: int) -> HostTime:
        timed = {name: rows for name, rows in self.components.items() if any(rows.values())}
        components = timed if any(name != OTHER for name in timed) else {}
        return HostTime(
            stage=stage,
            unit=unit,
            units=units,
            wall_ns=self.wall_ns,
            rows=self.rows,
            events=self.events,
            labels=self.labels,
            stage_labels=self.stage_labels,
            calls=self.calls,
            by_name=self.by_name,
            components=components,
            overlapping=self.overlapping,
        )


def _add(trace: Trace, lanes: _Lanes, thread: int, windows: Blocks, found: _Sums) -> None:
    """Add the time of one thread inside the windows."""
    table = trace.operators
    on_lane = np.flatnonzero(lanes.lane == thread)
    within = _inside(windows, table.start_ns[on_lane], table.end_ns[on_lane])
    counted = (within > 0) | _begins_inside(windows, table.start_ns[on_lane])
    rows, within = on_lane[counted], within[counted]
    own, inside_ns, overlapping = _own_times(trace, lanes, rows, within, windows)
    components = _Components(trace, lanes, thread)
    component = components.at(table.start_ns[rows])
    row = components.adjusted(lanes.row[rows], component)
    is_framework = row == _INDEX[HostRow.FRAMEWORK]
    dispatch = np.where(is_framework, 0, np.minimum(own, lanes.smallest_ns))
    ns = np.zeros((len(components.names), len(_ROWS)), np.int64)
    np.add.at(ns, (component, row), own - dispatch)
    np.add.at(ns, (component, np.full(len(rows), _INDEX[HostRow.FRAMEWORK])), dispatch)
    wall_ns = exact_sum(windows.end_ns - windows.start_ns)
    top = lanes.parent[rows] == NONE
    ns[:, _INDEX[HostRow.PYTHON]] = components.outside(windows, wall_ns - inside_ns, component[top], within[top])
    found.wall_ns += wall_ns
    found.overlapping |= overlapping
    labels = _begins_inside(windows, trace.ranges.start_ns) & (lanes.label_lane == thread)
    found.labels += int((labels & lanes.component).sum())
    found.stage_labels += int((labels & ~lanes.component).sum())
    found.add(components.names, ns)
    _count(found, trace, lanes, rows, row, own)


def _inside(windows: Blocks, start_ns: Int64, end_ns: Int64) -> Int64:
    """Return how much of each interval is inside the windows."""
    return covered_before(windows, end_ns) - covered_before(windows, start_ns)


def _begins_inside(windows: Blocks, start_ns: Int64) -> Bool:
    return np.asarray(_inside(windows, start_ns, start_ns + 1) > 0)


def _own_times(trace: Trace, lanes: _Lanes, rows: Int64, within: Int64, windows: Blocks) -> tuple[Int64, int, bool]:
    """Return each operator's own time, the time that all cover, and whether they overlap without nesting."""
    table = trace.operators
    place = np.full(len(table) + 1, NONE, np.int64)  # the last entry is for NONE
    place[rows] = np.arange(len(rows))
    parent = place[lanes.parent[rows]]
    inner = parent != NONE
    own = within - sums(parent[inner], within[inner], len(rows))
    covered = union_blocks(table.start_ns[rows], table.end_ns[rows])
    inside_ns = exact_sum(_inside(windows, covered.start_ns, covered.end_ns))
    if not (own < 0).any() and exact_sum(own) == inside_ns:
        return own, inside_ns, False
    own = np.maximum(own, 0)
    return np.array(apportion(inside_ns, own.tolist()), np.int64) if own.any() else own, inside_ns, True


class _Components:
    """The component labels of one thread."""

    def __init__(self, trace: Trace, lanes: _Lanes, thread: int) -> None:
        labels = np.flatnonzero(lanes.component & (lanes.label_lane == thread))
        indices = different(trace.ranges.name[labels]).tolist()
        self.names = [OTHER, *(trace.name_of(index).removeprefix(PART_LABEL) for index in indices)]
        self._start, self._end = trace.ranges.start_ns[labels], trace.ranges.end_ns[labels]
        self._component = np.searchsorted(np.array(indices, np.int64), trace.ranges.name[labels]) + 1
        self._nesting = nest(self._start, self._end, np.zeros(len(labels), np.int64))

    def at(self, moments: Int64) -> Int64:
        """Return the component at each moment."""
        if not len(self._start):
            return np.zeros(len(moments), np.int64)
        innermost = self._nesting.innermost(moments, np.zeros(len(moments), np.int64))
        return np.asarray(np.where(innermost == NONE, 0, self._component[innermost]), np.int64)

    def adjusted(self, row: Int64, component: Int64) -> Int64:
        """Return the rows, where a component tells more than the operator's name."""
        row = row.copy()
        for name, before, after in _BY_COMPONENT:
            if name in self.names:
                row[(component == self.names.index(name)) & (row == _INDEX[before])] = _INDEX[after]
        return row

    def outside(self, windows: Blocks, outside_ns: int, component: Int64, operator_ns: Int64) -> Int64:
        """Divide the time outside operators among the components: the time of their labels without outermost operators."""
        if not len(self._start):
            return np.array([outside_ns], np.int64)
        within = _inside(windows, self._start, self._end)
        inner = self._nesting.parent != NONE
        own = within - sums(self._nesting.parent[inner], within[inner], len(within))
        ns = sums(self._component, own, len(self.names)) - sums(component, operator_ns, len(self.names))
        ns = np.asarray(np.maximum(ns, 0), np.int64)
        ns[0] = 0
        if int(ns.sum()) > outside_ns:  # labels and operators overlap without nesting
            return np.array(apportion(outside_ns, ns.tolist()), np.int64)
        ns[0] = outside_ns - int(ns.sum())
        return ns


_BY_COMPONENT = (
    ("norms", HostRow.ELEMENTWISE, HostRow.NORM),
    ("attention_core", HostRow.MATMUL, HostRow.ATTENTION),
    ("vision_norms", HostRow.ELEMENTWISE, HostRow.NORM),
    ("vision_attention_core", HostRow.MATMUL, HostRow.ATTENTION),
)
"""Component, row by the operator's name, row in this component."""


def _count(found: _Sums, trace: Trace, lanes: _Lanes, rows: Int64, row: Int64, own: Int64) -> None:
    """Count operators by row, by name, and by the row that contains the cost of recording them: that of the one around it."""
    around = lanes.parent[rows]
    cost_row = np.where(around == NONE, _INDEX[HostRow.PYTHON], lanes.row[around])
    for counts, rows_of_each in ((found.calls, row), (found.events, cost_row)):
        for index, number in enumerate(np.bincount(rows_of_each, minlength=len(_ROWS)).tolist()):
            counts[_ROWS[index]] += number
    names = trace.operators.name[rows].astype(np.int64)
    calls, times = np.bincount(names, minlength=len(trace.names)), sums(names, own, len(trace.names))
    for index in np.flatnonzero(calls).tolist():
        earlier = found.by_name.get(trace.name_of(index), (0, 0))
        found.by_name[trace.name_of(index)] = (earlier[0] + int(calls[index]), earlier[1] + int(times[index]))

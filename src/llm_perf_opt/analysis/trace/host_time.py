"""Where the host's time went, of a trace without device work: operators by their own time, stage by stage, and what lies outside.

Operators of a stage are those on the thread of its label. A stage's wall time is the time in which such an operator was open, and
the rest: Python between operators, the profiler's own cost, waiting.
"""

import numpy as np

from llm_perf_opt.analysis.trace.attribution import outermost_of_its_name
from llm_perf_opt.analysis.trace.document import HostOperatorLine, HostStageLine, HostTable
from llm_perf_opt.analysis.trace.intervals import Blocks, covered_before, union_blocks
from llm_perf_opt.analysis.trace.nesting import NONE, Nesting, lanes_of, nest
from llm_perf_opt.analysis.trace.operators import doubled
from llm_perf_opt.analysis.trace.row_numbers import exact_sum, sums
from llm_perf_opt.analysis.trace.stage_instances import Instances, TraceStages
from llm_perf_opt.events import Int64, Trace, different


def host_table(trace: Trace, stages: TraceStages) -> HostTable:
    """Operators of the whole trace and of each stage, the most time of their own first."""
    table = trace.operators
    lane, label_lane = lanes_of((table.process, table.thread), (trace.ranges.process, trace.ranges.thread))
    nesting = nest(table.start_ns, table.end_ns, lane)
    every = np.arange(len(table))
    found = []
    for name in stages.names:
        instances = _labelled(trace, stages, name)
        found.append(_stage(trace, name, instances, label_lane[instances.range], lane, nesting))
    return HostTable(_operators(trace, nesting, every), found)


def _labelled(trace: Trace, stages: TraceStages, name: str) -> Instances:
    """The stage's instances, each with the row of a label on its thread: one that was put together has that of its first part."""
    every = stages.instances
    rows = stages.rows_of(name)
    label = every.range.copy()
    inner = np.flatnonzero((every.parent != NONE) & (every.range != NONE))[::-1]
    first = np.full(len(every), NONE, np.int64)
    first[every.parent[inner]] = every.range[inner]  # written last, and so kept: the first of one parent
    label[rows] = np.where(label[rows] == NONE, first[rows], label[rows])
    return Instances(**{**every.columns(), "range": label}).rows(rows[label[rows] != NONE])


def _stage(trace: Trace, name: str, instances: Instances, label_lane: Int64, lane: Int64, nesting: Nesting) -> HostStageLine:
    table = trace.operators
    mine = np.zeros(len(table), np.bool_)
    inside_ns = 0
    for one in different(label_lane).tolist():  # a thread each: few
        on_lane = np.flatnonzero(lane == one)
        of_lane = label_lane == one
        windows = union_blocks(instances.start_ns[of_lane], instances.end_ns[of_lane])
        begins = covered_before(windows, table.start_ns[on_lane] + 1) - covered_before(windows, table.start_ns[on_lane])
        mine[on_lane] = begins > 0
        open_ = union_blocks(table.start_ns[on_lane], table.end_ns[on_lane])
        inside_ns += _shared(open_, instances.start_ns[of_lane], instances.end_ns[of_lane])
    wall_ns = exact_sum(instances.end_ns - instances.start_ns)
    return HostStageLine(name, wall_ns, inside_ns, wall_ns - inside_ns, _operators(trace, nesting, np.flatnonzero(mine)))


def _shared(blocks: Blocks, start_ns: Int64, end_ns: Int64) -> int:
    """How much of the windows the blocks cover; windows that overlap count each for itself, as in the wall time."""
    return exact_sum(covered_before(blocks, end_ns) - covered_before(blocks, start_ns))


def _operators(trace: Trace, nesting: Nesting, rows: Int64) -> list[HostOperatorLine]:
    """These operators by name. An inner operator lies in the same stage as the one around it."""
    table = trace.operators
    duration = np.maximum(table.end_ns - table.start_ns, 0)
    inner = nesting.parent != NONE
    own = duration - sums(nesting.parent[inner], duration[inner], len(table))
    name = table.name.astype(np.int64)
    outer = outermost_of_its_name(nesting.parent, name, rows)
    names = len(trace.names)
    calls = np.bincount(name[rows[~doubled(nesting.parent, name)[rows]]], minlength=names)
    self_ns = sums(name[rows], own[rows], names)
    counted = rows[outer[rows]]
    total_ns = sums(name[counted], duration[counted], names)
    whole = int(self_ns.sum())
    lines = [
        HostOperatorLine(
            trace.name_of(int(index)),
            int(calls[index]),
            int(self_ns[index]),
            int(total_ns[index]),
            int(self_ns[index]) / whole if whole else 0.0,
        )
        for index in np.flatnonzero(calls)
    ]
    return sorted(lines, key=lambda line: (-line.self_ns, -line.total_ns, line.name))

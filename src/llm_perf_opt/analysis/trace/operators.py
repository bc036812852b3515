"""Operator tables and the device work of each stage, from a trace alone, for profilers that run inside an engine."""

import numpy as np

from llm_perf_opt.analysis.trace.attribution import attribute, operators_by_time, outermost_of_its_name
from llm_perf_opt.analysis.trace.document import HostOperatorLine, HostStageLine, HostTable
from llm_perf_opt.analysis.trace.intervals import Blocks, covered_before, exact_sum, sums, union_blocks
from llm_perf_opt.analysis.trace.stage_instances import Instances, TraceStages
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.core.records import Maybe, Missing, OperatorRow, StageActivity
from llm_perf_opt.core.stages import PROFILER_OPERATORS, Stage
from llm_perf_opt.traces.events import Int64, Trace, different, different_pairs
from llm_perf_opt.traces.nesting import NONE, Nesting, lanes_of, nest
from llm_perf_opt.traces.projection import Bool


def host_table(trace: Trace, stages: TraceStages) -> HostTable:
    """Return the operators of the whole trace and of each stage, longest self time first."""
    table = trace.operators
    lane, label_lane = lanes_of((table.process, table.thread), (trace.ranges.process, trace.ranges.thread))
    nesting = nest(table.start_ns, table.end_ns, lane)
    every = np.arange(len(table))
    found = []
    for name in stages.names:
        instances = labeled_instances(trace, stages, name)
        found.append(_stage(trace, name, instances, label_lane[instances.range], lane, nesting))
    return HostTable(_operators(trace, nesting, every), found)


def labeled_instances(trace: Trace, stages: TraceStages, name: str) -> Instances:
    """Return the stage's instances, each with a label on its thread; one without its own has that of its first inner one."""
    every = stages.instances
    rows = stages.rows_of(name)
    label = every.range.copy()
    inner = np.flatnonzero((every.parent != NONE) & (every.range != NONE))[::-1]
    first = np.full(len(every), NONE, np.int64)
    first[every.parent[inner]] = every.range[inner]  # in reverse order, so the first of each parent remains
    label[rows] = np.where(label[rows] == NONE, first[rows], label[rows])
    return Instances(**{**every.columns(), "range": label}).rows(rows[label[rows] != NONE])


def _stage(trace: Trace, name: str, instances: Instances, label_lane: Int64, lane: Int64, nesting: Nesting) -> HostStageLine:
    table = trace.operators
    mine = np.zeros(len(table), np.bool_)
    inside_ns = 0
    for thread in different(label_lane).tolist():
        on_lane = np.flatnonzero(lane == thread)
        of_lane = label_lane == thread
        windows = union_blocks(instances.start_ns[of_lane], instances.end_ns[of_lane])
        begins = covered_before(windows, table.start_ns[on_lane] + 1) - covered_before(windows, table.start_ns[on_lane])
        mine[on_lane] = begins > 0
        open_ = union_blocks(table.start_ns[on_lane], table.end_ns[on_lane])
        inside_ns += _shared(open_, instances.start_ns[of_lane], instances.end_ns[of_lane])
    wall_ns = exact_sum(instances.end_ns - instances.start_ns)
    return HostStageLine(name, wall_ns, inside_ns, wall_ns - inside_ns, _operators(trace, nesting, np.flatnonzero(mine)))


def _shared(blocks: Blocks, start_ns: Int64, end_ns: Int64) -> int:
    """Return how much of the windows the blocks cover; overlapping windows count separately, as in the wall time."""
    return exact_sum(covered_before(blocks, end_ns) - covered_before(blocks, start_ns))


def _operators(trace: Trace, nesting: Nesting, rows: Int64) -> list[HostOperatorLine]:
    """Return these operators by name; an inner operator is in the same stage as the one around it."""
    times = _host_times(trace, nesting, rows)
    whole = sum(self_ns for _, _, self_ns, _ in times)
    lines = [
        HostOperatorLine(name, calls, self_ns, total_ns, self_ns / whole if whole else 0.0)
        for name, calls, self_ns, total_ns in times
        if not name.startswith(PROFILER_OPERATORS)
    ]
    return sorted(lines, key=lambda line: (-line.self_ns, -line.total_ns, line.name))


def _host_times(trace: Trace, nesting: Nesting, rows: Int64) -> list[tuple[str, int, int, int]]:
    """Return name, calls, self time and total time of these operators; the total counts nested calls of one name once."""
    table, names = trace.operators, len(trace.names)
    duration = np.maximum(table.end_ns - table.start_ns, 0)
    inner = nesting.parent != NONE
    own = duration - sums(nesting.parent[inner], duration[inner], len(table))
    name = table.name.astype(np.int64)
    calls = np.bincount(name[rows[~_repeated(nesting.parent, name)[rows]]], minlength=names)
    outer = rows[outermost_of_its_name(nesting.parent, name, rows)[rows]]
    self_ns, total_ns = sums(name[rows], own[rows], names), sums(name[outer], duration[outer], names)
    return [
        (trace.name_of(int(index)), int(calls[index]), int(self_ns[index]), int(total_ns[index]))
        for index in np.flatnonzero(calls)
    ]


NO_MEMORY = "a trace does not show which operator allocated memory"


def operator_rows(trace: Trace, on_gpu: bool) -> tuple[OperatorRow, ...]:
    """Return every operator by name, longest self time first; totals count nested calls of one name once."""
    table = trace.operators
    nesting = nest(table.start_ns, table.end_ns, lanes_of((table.process, table.thread))[0])
    device = _device_times(trace) if on_gpu else None
    rows = []
    for name, calls, self_ns, total_ns in _host_times(trace, nesting, np.arange(len(table))):
        on_device: tuple[Maybe[int], Maybe[int]] = (Missing("the run is on the CPU"),) * 2
        if device is not None:
            on_device = device.get(name, (0, 0))
        rows.append(
            OperatorRow(
                name=name,
                calls=calls,
                cpu_total_ns=total_ns,
                cpu_self_ns=self_ns,
                device_total_ns=on_device[0],
                device_self_ns=on_device[1],
                cpu_memory_bytes=Missing(NO_MEMORY),
                device_memory_bytes=Missing(NO_MEMORY if on_gpu else "the run is on the CPU"),
                flops=Missing("a trace does not show the FLOPs of an operator"),
            )
        )
    return tuple(sorted(rows, key=_weight))


def _repeated(parent: Int64, name: Int64) -> Bool:
    """Return rows that are the only inner row of one with the same name: torch counts such a call once."""
    inner = np.flatnonzero(parent != NONE)
    children = np.bincount(parent[inner], minlength=len(parent))
    found = np.zeros(len(parent), np.bool_)
    found[inner] = (name[parent[inner]] == name[inner]) & (children[parent[inner]] == 1)
    return found


def stage_activity_of(trace: Trace) -> Maybe[tuple[StageActivity, ...]]:
    """Return device work by stage; Missing if the trace does not separate the stages."""
    stages = find_stages(trace)
    found = [entry for stage in (Stage.PREFILL, Stage.DECODE) if (entry := _activity(trace, stages, stage)) is not None]
    return tuple(found) if found else Missing(f"the trace does not separate prefill and decode ({stages.why})")


def _activity(trace: Trace, stages: TraceStages, stage: Stage) -> StageActivity | None:
    if stage.value not in stages.names:
        return None
    mine = stages.of_stage(stage.value) != NONE
    duration = (trace.work.end_ns - trace.work.start_ns)[mine]
    launches = len(different_pairs(trace.work.process[mine], trace.work.correlation[mine])[0])
    devices = len(different(trace.work.device[mine])) or 1
    return StageActivity(stage.value, launches, int(mine.sum()), int(duration.sum()), devices)


def _device_times(trace: Trace) -> dict[str, tuple[Maybe[int], Maybe[int]]]:
    """Return operator → device time with and without inner operators."""
    rows = operators_by_time(trace, attribute(trace, find_stages(trace)))
    return {row.name: (row.total_ns, row.self_ns) for row in rows}


def _weight(row: OperatorRow) -> tuple[int, int, str]:
    device = 0 if isinstance(row.device_self_ns, Missing) else row.device_self_ns
    return -device, -row.cpu_self_ns, row.name

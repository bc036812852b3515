"""The table of operators and the device work of each stage, from a trace alone: for profilers that run inside an engine."""

import numpy as np

from llm_perf_opt.analysis.trace.attribution import attribute, operators_by_time, outermost_of_its_name
from llm_perf_opt.analysis.trace.nesting import NONE, lanes_of, nest
from llm_perf_opt.analysis.trace.projection import Bool
from llm_perf_opt.analysis.trace.row_numbers import sums
from llm_perf_opt.analysis.trace.stage_instances import TraceStages
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.events import Int64, Trace, different, different_pairs
from llm_perf_opt.records import Maybe, Missing, OperatorRow, StageActivity
from llm_perf_opt.stages import Stage

NO_MEMORY = "a trace does not say whose memory it was"


def operator_rows(trace: Trace, on_gpu: bool) -> tuple[OperatorRow, ...]:
    """Every operator by name, the most self time first; an operator inside another of its name is counted once in totals."""
    table = trace.operators
    nesting = nest(table.start_ns, table.end_ns, lanes_of((table.process, table.thread))[0])
    duration = table.end_ns - table.start_ns
    inner = nesting.parent != NONE
    own = duration - sums(nesting.parent[inner], duration[inner], len(table))
    name = table.name.astype(np.int64)
    outer = outermost_of_its_name(nesting.parent, name, np.arange(len(table)))
    names = len(trace.names)
    calls = np.bincount(name[~doubled(nesting.parent, name)], minlength=names)
    self_ns, total_ns = sums(name, own, names), sums(name[outer], duration[outer], names)
    device = _device_times(trace) if on_gpu else None
    rows = []
    for index in np.flatnonzero(calls):
        on_device: tuple[Maybe[int], Maybe[int]] = (Missing("the run is on the CPU"),) * 2
        if device is not None:
            on_device = device.get(trace.name_of(int(index)), (0, 0))
        rows.append(
            OperatorRow(
                name=trace.name_of(int(index)),
                calls=int(calls[index]),
                cpu_total_ns=int(total_ns[index]),
                cpu_self_ns=int(self_ns[index]),
                device_total_ns=on_device[0],
                device_self_ns=on_device[1],
                cpu_memory_bytes=Missing(NO_MEMORY),
                device_memory_bytes=Missing(NO_MEMORY if on_gpu else "the run is on the CPU"),
            )
        )
    return tuple(sorted(rows, key=_weight))


def doubled(parent: Int64, name: Int64) -> Bool:
    """Rows that only repeat the one around them, of the same name and with nothing else inside: torch counts such a call once."""
    inner = np.flatnonzero(parent != NONE)
    children = np.bincount(parent[inner], minlength=len(parent))
    found = np.zeros(len(parent), np.bool_)
    found[inner] = (name[parent[inner]] == name[inner]) & (children[parent[inner]] == 1)
    return found


def stage_activity_of(trace: Trace) -> Maybe[tuple[StageActivity, ...]]:
    """Device work by stage; where the trace does not say which stage a step was, there is none."""
    stages = find_stages(trace)
    found = [entry for stage in (Stage.PREFILL, Stage.DECODE) if (entry := _activity(trace, stages, stage)) is not None]
    return tuple(found) if found else Missing(f"the trace does not tell prefill from decode ({stages.why})")


def _activity(trace: Trace, stages: TraceStages, stage: Stage) -> StageActivity | None:
    if stage.value not in stages.names:
        return None
    mine = stages.of_stage(stage.value) != NONE
    duration = (trace.work.end_ns - trace.work.start_ns)[mine]
    launches = len(different_pairs(trace.work.process[mine], trace.work.correlation[mine])[0])
    devices = len(different(trace.work.device[mine])) or 1
    return StageActivity(stage.value, launches, int(mine.sum()), int(duration.sum()), devices)


def _device_times(trace: Trace) -> dict[str, tuple[Maybe[int], Maybe[int]]]:
    """Operator → device time with and without inner operators."""
    rows = operators_by_time(trace, attribute(trace, find_stages(trace)))
    return {row.name: (row.total_ns, row.self_ns) for row in rows}


def _weight(row: OperatorRow) -> tuple[int, int, str]:
    device = 0 if isinstance(row.device_self_ns, Missing) else row.device_self_ns
    return -device, -row.cpu_self_ns, row.name

"""The input of findings for a program on the CPU: the budget of each stage, from its trace and its run."""

from collections.abc import Mapping

from llm_perf_opt.analysis.cpu_budget import CpuBudgetFacts, cpu_stage_budget
from llm_perf_opt.analysis.evidence import Evidence, HostStageEvidence, RunFacts, repeats_of, unit_roofline, unprofiled_wall
from llm_perf_opt.analysis.stats import percentile
from llm_perf_opt.analysis.trace.document import WHOLE
from llm_perf_opt.analysis.trace.host_time import HostTime, host_times
from llm_perf_opt.analysis.trace.operator_classes import HostRow
from llm_perf_opt.analysis.trace.stage_instances import PREFILL, TraceStages
from llm_perf_opt.core.host_records import ProfilerCost
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.traces.events import Trace

_ROW_OF_COMPONENT = {
    "attention_core": HostRow.ATTENTION,
    "norms": HostRow.NORM,
    "embedding": HostRow.MEMORY,
    "vision_attention_core": HostRow.ATTENTION,
    "vision_norms": HostRow.NORM,
}
"""Component of the cost model → the row whose operators do its work; the others are matrix products."""


def gather_cpu(trace: Trace, stages: TraceStages, facts: RunFacts) -> Evidence:
    """Return the evidence of every stage of a trace without device work."""
    cost = _profiler_cost(facts)
    smallest_ns = 0 if isinstance(cost, Missing) else round(cost.smallest_operator_ns)
    times = host_times(trace, stages, smallest_ns)
    return Evidence((), facts, stages.method, tuple(_stage(time, cost, facts) for time in times))


def _profiler_cost(facts: RunFacts) -> Maybe[ProfilerCost]:
    if isinstance(facts.torch, Missing):
        return facts.torch
    if facts.torch.cost is None:
        frames = facts.torch.preset == "max"
        return Missing("Python frames were recorded as well" if frames else "the run is from an older version, or of an engine")
    return facts.torch.cost


def _stage(time: HostTime, cost: Maybe[ProfilerCost], facts: RunFacts) -> HostStageEvidence:
    wall_ns, ends, source = unprofiled_wall(time.stage, time.unit, time.units, facts)
    if time.stage == WHOLE:
        source = f"{source}; the trace labels no stages"
    found = cpu_stage_budget(
        CpuBudgetFacts(
            time=time,
            wall_ns=wall_ns,
            wall_source=source,
            cost=cost,
            roofline_ns=_roofline(time, facts),
            waiting_ns=_waiting(time, facts),
            profiled_waiting_ns=_profiled_waiting(time, facts),
        )
    )
    timings = facts.timings
    per_request = 0 if isinstance(timings, Missing) or time.unit != "token" else timings.workload.decode_steps
    return HostStageEvidence(
        name=time.stage,
        unit=time.unit,
        units=time.units,
        budget=found.budget,
        unprofiled=wall_ns is not None,
        wall_ends_ns=ends,
        request_units=per_request,
        time=time,
        rows=found.rows,
    )


def _roofline(time: HostTime, facts: RunFacts) -> Maybe[Mapping[HostRow, int]]:
    """Return the roofline time of all units in the trace by the row whose operators do the work, in ns."""
    least = unit_roofline(time.stage, time.unit, time.units, facts)
    if isinstance(least, Missing):
        return least
    found: dict[HostRow, float] = {}
    for component in least[1].components:
        row = _ROW_OF_COMPONENT.get(component.name, HostRow.MATMUL)
        found[row] = found.get(row, 0.0) + component.seconds * 1e9 * repeats_of(time.stage, time.units)
    return {row: round(ns) for row, ns in found.items()}


def _waiting(time: HostTime, facts: RunFacts) -> Maybe[int]:
    """Return how long the main thread did not run in the stage, unprofiled: the median over the repeats."""
    timings = facts.timings
    if isinstance(timings, Missing):
        return timings
    unknown = Missing("the CPU time of the main thread was not recorded")
    found = []
    for iteration in timings.iterations:
        if time.stage == PREFILL:
            if iteration.prefill_cpu_ns is None:
                return unknown
            found.append(iteration.prefill_ns - iteration.prefill_cpu_ns)
        else:
            if len(iteration.steps_cpu_ns) < time.units:
                return unknown
            found.append(sum(iteration.steps_ns[: time.units]) - sum(iteration.steps_cpu_ns[: time.units]))
    return round(percentile(found, 0.5)) * repeats_of(time.stage, time.units) if found else unknown


def _profiled_waiting(time: HostTime, facts: RunFacts) -> Maybe[int]:
    """Return how long the main thread did not run in the trace: the waiting of the profiled stage, scaled to the trace's length.

    The trace of an engine begins and ends inside the stage. On a busy machine, the waiting of the whole stage may be longer than
    the trace.
    """
    if isinstance(facts.torch, Missing):
        return facts.torch
    wall, ran = facts.torch.stage_wall_ns.get(time.stage), facts.torch.stage_cpu_ns.get(time.stage)
    if wall is None or ran is None:
        return Missing("the CPU time of the main thread was not recorded")
    return round(time.wall_ns * max(wall - ran, 0) / wall) if wall else 0

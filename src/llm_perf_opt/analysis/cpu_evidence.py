"""The input of findings for a program on the CPU: the budget of each stage, from its trace and its run."""

from collections.abc import Mapping

from llm_perf_opt.analysis.cpu_budget import CpuBudgetFacts, cpu_stage_budget
from llm_perf_opt.analysis.evidence import Evidence, HostStageEvidence, RunFacts, unprofiled_wall
from llm_perf_opt.analysis.limits.efficiency import request_cost
from llm_perf_opt.analysis.limits.peaks import best_roofline_time
from llm_perf_opt.analysis.limits.roofline import RooflineTime
from llm_perf_opt.analysis.stats import percentile
from llm_perf_opt.analysis.trace.host_time import WHOLE, HostTime, host_times
from llm_perf_opt.analysis.trace.operator_classes import HostRow
from llm_perf_opt.analysis.trace.stage_instances import DECODE, PREFILL, TraceStages
from llm_perf_opt.core.host_records import ProfilerCost
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.stages import Stage
from llm_perf_opt.traces.events import Trace

_ROW_OF_COMPONENT = {"attention_core": HostRow.ATTENTION, "norms": HostRow.NORM, "embedding": HostRow.MEMORY}
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
    roofline = _roofline(time, facts)
    found = cpu_stage_budget(
        CpuBudgetFacts(
            time=time,
            wall_ns=wall_ns,
            wall_source=source,
            cost=cost,
            roofline_ns=roofline if isinstance(roofline, Missing) else _by_row(roofline),
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
        roofline=roofline,
        rows=found.rows,
    )


def _roofline(time: HostTime, facts: RunFacts) -> Maybe[RooflineTime]:
    """Return the roofline time of as many units as the trace contains."""
    if isinstance(facts.timings, Missing):
        return facts.timings
    if isinstance(facts.efficiency, Missing):
        return facts.efficiency
    if time.stage not in (PREFILL, DECODE) or time.unit == DECODE:
        return Missing("the cost model does not cover this stage")
    request = request_cost(facts.timings)
    cost = request if isinstance(request, Missing) else request.stage(Stage(time.stage), time.units)
    least = cost if isinstance(cost, Missing) else best_roofline_time(cost, facts.efficiency.peak_sets)
    return least if isinstance(least, Missing) else least[1]


def _by_row(roofline: RooflineTime) -> Mapping[HostRow, int]:
    """Return the roofline time by the row whose operators do the work, in ns."""
    found: dict[HostRow, float] = {}
    for component in roofline.components:
        row = _ROW_OF_COMPONENT.get(component.name, HostRow.MATMUL)
        found[row] = found.get(row, 0.0) + component.seconds * 1e9
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
    times = time.units if time.stage == PREFILL else 1
    return round(percentile(found, 0.5)) * times if found else unknown


def _profiled_waiting(time: HostTime, facts: RunFacts) -> Maybe[int]:
    if isinstance(facts.torch, Missing):
        return facts.torch
    wall, ran = facts.torch.stage_wall_ns.get(time.stage), facts.torch.stage_cpu_ns.get(time.stage)
    if wall is None or ran is None:
        return Missing("the CPU time of the main thread was not recorded")
    return wall - ran

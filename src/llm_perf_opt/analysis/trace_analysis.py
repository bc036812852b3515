"""The analysis of a trace, as one record."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from llm_perf_opt.analysis.cpu_evidence import gather_cpu
from llm_perf_opt.analysis.evidence import Evidence, HostStageEvidence, RunFacts, StageFigures, gather
from llm_perf_opt.analysis.findings.registry import find
from llm_perf_opt.analysis.kernels.classes import KernelClass
from llm_perf_opt.analysis.trace.accounting import Account, StageTime, account
from llm_perf_opt.analysis.trace.attribution import (
    OwnerRow,
    attribute,
    has_components,
    has_modules,
    modules_by_time,
    operators_by_time,
)
from llm_perf_opt.analysis.trace.document import (
    ON_CPU,
    BudgetLine,
    BudgetTable,
    ComponentTimeLine,
    GpuTotals,
    IdleLine,
    KernelLine,
    OwnerLine,
    ProblemLine,
    StageLine,
    StepLine,
    TraceAnalysis,
)
from llm_perf_opt.analysis.trace.gpu_metrics import device_lines, device_name, gpu_metric_lines
from llm_perf_opt.analysis.trace.graph_modules import capture_table
from llm_perf_opt.analysis.trace.intervals import exact_sum
from llm_perf_opt.analysis.trace.labels import label_lines
from llm_perf_opt.analysis.trace.operators import host_table
from llm_perf_opt.analysis.trace.stage_instances import TraceStages
from llm_perf_opt.analysis.trace.stage_launches import kernels_by_time
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.analysis.trace.step_components import component_table
from llm_perf_opt.core.records import Missing
from llm_perf_opt.traces.events import GPUS, Trace, different
from llm_perf_opt.traces.health import examined

_NOTHING = GpuTotals(None, None, None, None, None)


def document_of(trace: Trace, facts: RunFacts, source: str) -> TraceAnalysis:
    """Check a trace and return its analysis."""
    return trace_document(examined(trace), facts, source)


def trace_document(trace: Trace, facts: RunFacts, source: str) -> TraceAnalysis:
    """Return the analysis of a checked trace. An incomplete trace gets no figures."""
    if not trace.complete:
        return _incomplete(trace, source)
    stages = find_stages(trace)
    return _analyzed(trace, stages, account(trace, stages), facts, source)


def _incomplete(trace: Trace, source: str) -> TraceAnalysis:
    """Return the problems of an incomplete trace, without figures."""
    why = "; ".join(problem.what for problem in trace.problems if problem.fatal)
    bare = _without_figures(trace, source, f"the trace is incomplete: {why}")
    return msgspec.structs.replace(bare, complete=False, device=_device(trace), stage_why="the trace is incomplete")


def _without_figures(trace: Trace, source: str, why: str) -> TraceAnalysis:
    """Return an analysis that has only the problems of the trace."""
    return TraceAnalysis(
        source=source,
        complete=True,
        problems=_problems(trace),
        gpu=_NOTHING,
        stages=[],
        kernels=[],
        idle=[],
        findings=[],
        why=why,
        profiler=trace.source,
        device="",
        stage_method="none",
        stage_why="",
        stage_coverage=None,
        unknown_share=None,
        budgets=[],
        steps=[],
        modules=[],
    )


def _analyzed(trace: Trace, stages: TraceStages, account: Account, facts: RunFacts, source: str) -> TraceAnalysis:
    """Return the analysis of a complete trace with what is known about its run."""
    evidence = gather(trace, stages, account, facts)
    if not len(trace.work):
        return _host_only(trace, stages, evidence if facts.on_gpu else gather_cpu(trace, stages, facts), source)
    kernels = kernels_by_time(trace)
    total = account.total
    modules, operators = _owners(trace, stages)
    captures = capture_table(trace)
    is_capture = captures is not None and sum(line.nodes for line in captures.captures) > total.kernels.count
    return TraceAnalysis(
        source=source,
        complete=True,
        problems=_problems(trace),
        gpu=GpuTotals(total.kernels.count, total.kernels.sum_ns, total.busy_ns, total.idle_ns, total.span_ns),
        stages=[_stage(time) for time in account.stages],
        kernels=[KernelLine(row.name, row.kind.value, row.calls, row.total_ns, row.mean_ns, row.share) for row in kernels],
        idle=[IdleLine(cause.label, ns) for cause, ns in total.idle.items() if ns],
        findings=[] if is_capture else list(find(evidence)),
        why=_CAPTURE if is_capture else "",
        profiler=trace.source,
        device=_device(trace),
        stage_method=stages.method,
        stage_why=stages.why,
        stage_coverage=stages.coverage,
        unknown_share=sum(row.share for row in kernels if row.kind is KernelClass.OTHER) if kernels else None,
        budgets=[] if is_capture else [_budget(stage) for stage in evidence.stages],
        steps=_steps(account),
        modules=modules,
        operators=operators,
        devices=device_lines(trace, stages, account),
        gpu_metrics=gpu_metric_lines(trace, stages) if len(trace.samples) else [],
        labels=label_lines(trace, stages),
        components=None if has_components(trace) else component_table(trace, stages),
        captures=captures,
    )


def _stage(time: StageTime) -> StageLine:
    """Return the line of a stage. Without device work its figures are unknown: another thread may have launched it."""
    if not time.span_ns and not time.kernels:
        return StageLine(time.name, time.count, time.wall_ns, *[None] * 5)
    return StageLine(
        time.name, time.count, time.wall_ns, time.busy_ns, time.idle_ns, time.kernels, time.launches, time.kernel_ns, time.span_ns
    )


def _host_only(trace: Trace, stages: TraceStages, evidence: Evidence, source: str) -> TraceAnalysis:
    """Return the analysis of a trace without device work: budgets, stages and operators of the host, without GPU figures."""
    instances = stages.instances
    walls = {name: instances.rows(stages.rows_of(name)) for name in stages.names}
    of_a_cpu_run = not isinstance(evidence.facts.timings, Missing) and not evidence.facts.on_gpu
    no_gpu = of_a_cpu_run or trace.facts.get(GPUS) == "0"
    return msgspec.structs.replace(
        _without_figures(trace, source, "" if evidence.on_cpu else _NO_WORK.what),
        problems=_of_the_cpu(_problems(trace)) if no_gpu else _with_no_work(_problems(trace)),
        device=ON_CPU if evidence.on_cpu else "",
        budgets=[_cpu_budget(stage) for stage in evidence.on_cpu],
        stages=[StageLine(name, len(rows), exact_sum(rows.end_ns - rows.start_ns), *[None] * 5) for name, rows in walls.items()],
        findings=list(find(evidence)),
        stage_method=stages.method,
        stage_why=stages.why,
        steps=_host_steps(stages),
        host=host_table(trace, stages) if len(trace.operators) else None,
        labels=label_lines(trace, stages),
        captures=capture_table(trace),
    )


def _host_steps(stages: TraceStages) -> list[StepLine]:
    if stages.step_stage is None:
        return []
    rows = stages.instances.rows(stages.rows_of(stages.step_stage))
    walls = (rows.end_ns - rows.start_ns).tolist()
    return [StepLine(stages.step_stage, number, wall, *[None] * 6) for number, wall in enumerate(walls)]


_CAPTURE = "the trace records the capture of CUDA graphs, which is no step of the model"
_NO_WORK = ProblemLine(
    "no_device_work",
    "the trace contains no GPU work",
    fatal=False,
    remedy="If the program used a GPU, record CUDA activity as well.",
)


def _of_the_cpu(problems: list[ProblemLine]) -> list[ProblemLine]:
    """Leave out that there is no device work: there was no device to work on."""
    return [problem for problem in problems if problem.id != _NO_WORK.id]


def _with_no_work(problems: list[ProblemLine]) -> list[ProblemLine]:
    """Add the problem that there is no device work, unless the parser reported it."""
    return problems if any(problem.id == _NO_WORK.id for problem in problems) else [*problems, _NO_WORK]


def _problems(trace: Trace) -> list[ProblemLine]:
    return [ProblemLine(problem.id, problem.what, problem.fatal, problem.remedy) for problem in trace.problems]


def _steps(account: Account) -> list[StepLine]:
    steps = account.steps
    if steps is None:
        return []
    columns = (steps.wall_ns, steps.end_ns - steps.start_ns, steps.busy_ns, steps.idle_ns, steps.kernels, steps.kernel_ns)
    rows = zip(*(column.tolist() for column in (*columns, steps.launches)), strict=True)
    return [StepLine(steps.stage, number, *row) for number, row in enumerate(rows)]


def _owners(trace: Trace, stages: TraceStages) -> tuple[list[OwnerLine], list[OwnerLine]]:
    """Return modules and operators by their own device time."""
    labeled = has_modules(trace)
    if not labeled and not len(trace.operators):
        return [], []
    found = attribute(trace, stages)
    return _owner_lines(modules_by_time(trace, found) if labeled else ()), _owner_lines(operators_by_time(trace, found))


def _owner_lines(rows: Sequence[OwnerRow]) -> list[OwnerLine]:
    return [OwnerLine(row.name, row.calls, row.kernels, row.self_ns, row.total_ns, row.share) for row in rows]


def _budget(stage: StageFigures) -> BudgetTable:
    budget = stage.budget
    return BudgetTable(
        stage=budget.stage,
        unit=stage.unit,
        units=budget.units,
        wall_ns=budget.wall_ns,
        wall_source=budget.wall_source,
        busy_ns=budget.busy_ns,
        rows=[BudgetLine(row.key.value, row.label, row.ns, row.share, row.low_ns, row.high_ns) for row in budget.rows],
        problems=[problem.what for problem in budget.problems],
        notes=list(budget.notes),
        request_units=stage.request_units if stage.by_token else 0,
    )


def _cpu_budget(stage: HostStageEvidence) -> BudgetTable:
    components = [
        ComponentTimeLine(name, {row.value: ns for row, ns in rows.items() if ns}, sum(rows.values()))
        for name, rows in stage.time.components.items()
    ]
    return msgspec.structs.replace(_budget(stage), components=sorted(components, key=lambda line: -line.ns))


def _device(trace: Trace) -> str:
    """Return the names of the devices that had work; the machine may have more."""
    named = Counter(device_name(trace, number) for number in different(trace.work.device).tolist())
    names = [name if count == 1 else f"{count} × {name}" for name, count in named.items() if name]
    return ", ".join(names) or next((value for key, value in trace.facts.items() if key.startswith("device") and value), "")

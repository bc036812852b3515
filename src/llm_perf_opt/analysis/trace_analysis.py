"""Makes the record of all that is said of a trace."""

from collections import Counter
from collections.abc import Sequence

from llm_perf_opt.analysis.budget import StageBudget
from llm_perf_opt.analysis.evidence import Evidence, RunFacts, gather
from llm_perf_opt.analysis.findings.registry import find
from llm_perf_opt.analysis.kernels.classes import KernelClass
from llm_perf_opt.analysis.trace.accounting import Account, StageTime, account
from llm_perf_opt.analysis.trace.attribution import OwnerRow, attribute, has_modules, modules_by_time, operators_by_time
from llm_perf_opt.analysis.trace.document import (
    BudgetLine,
    BudgetTable,
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
from llm_perf_opt.analysis.trace.intervals import exact_sum
from llm_perf_opt.analysis.trace.labels import label_lines
from llm_perf_opt.analysis.trace.operators import host_table
from llm_perf_opt.analysis.trace.stage_instances import TraceStages
from llm_perf_opt.analysis.trace.stage_launches import kernels_by_time
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.traces.events import Trace, different
from llm_perf_opt.traces.health import examined

_NOTHING = GpuTotals(None, None, None, None, None)


def document_of(trace: Trace, facts: RunFacts, source: str) -> TraceAnalysis:
    """Return all that is said of a trace that nobody examined yet."""
    return trace_document(examined(trace), facts, source)


def trace_document(trace: Trace, facts: RunFacts, source: str) -> TraceAnalysis:
    """Return all that is said of an examined trace; one that cannot carry numbers gets none."""
    if not trace.complete:
        return refused(trace, source)
    stages = find_stages(trace)
    return analyzed(trace, stages, account(trace, stages), facts, source)


def refused(trace: Trace, source: str) -> TraceAnalysis:
    """An incomplete trace: its problems, and no number."""
    why = "; ".join(problem.what for problem in trace.problems if problem.fatal)
    return TraceAnalysis(
        source=source,
        complete=False,
        problems=_problems(trace),
        gpu=_NOTHING,
        stages=[],
        kernels=[],
        idle=[],
        findings=[],
        why=f"the trace is incomplete: {why}",
        profiler=trace.source,
        device=_device(trace),
        stage_method="none",
        stage_why="the trace is incomplete",
        stage_coverage=None,
        unknown_share=None,
        budgets=[],
        steps=[],
        modules=[],
    )


def analyzed(trace: Trace, stages: TraceStages, account: Account, facts: RunFacts, source: str) -> TraceAnalysis:
    """A sound trace, with what a run knows beside it."""
    evidence = gather(trace, stages, account, facts)
    if not len(trace.work):
        return _of_the_host_alone(trace, stages, evidence, source)
    kernels = kernels_by_time(trace)
    total = account.total
    modules, operators = _owners(trace, stages)
    return TraceAnalysis(
        source=source,
        complete=True,
        problems=_problems(trace),
        gpu=GpuTotals(total.kernels.count, total.kernels.sum_ns, total.busy_ns, total.idle_ns, total.span_ns),
        stages=[_stage(one) for one in account.stages],
        kernels=[KernelLine(row.name, row.kind.value, row.calls, row.total_ns, row.mean_ns, row.share) for row in kernels],
        idle=[IdleLine(cause.label, ns) for cause, ns in total.idle.items() if ns],
        findings=list(find(evidence)),
        why="",
        profiler=trace.source,
        device=_device(trace),
        stage_method=stages.method,
        stage_why=stages.why,
        stage_coverage=stages.coverage,
        unknown_share=sum(row.share for row in kernels if row.kind is KernelClass.OTHER) if kernels else None,
        budgets=[_budget(stage.budget, stage.unit) for stage in evidence.stages],
        steps=_steps(account),
        modules=modules,
        operators=operators,
        devices=device_lines(trace, stages, account),
        gpu_metrics=gpu_metric_lines(trace, stages) if len(trace.samples) else [],
        labels=label_lines(trace, stages),
    )


def _stage(one: StageTime) -> StageLine:
    """A stage that seems to have no work may have some that another thread launched, or none that was recorded: not known."""
    if not one.span_ns and not one.kernels:
        return StageLine(one.name, one.count, one.wall_ns, *[None] * 5)
    return StageLine(
        one.name, one.count, one.wall_ns, one.busy_ns, one.idle_ns, one.kernels, one.launches, one.kernel_ns, one.span_ns
    )


def _of_the_host_alone(trace: Trace, stages: TraceStages, evidence: Evidence, source: str) -> TraceAnalysis:
    """A trace without device work: what the host did in its stages and operators, and no number of a GPU.

    Of the findings those remain that are about trust in a run's figures.
    """
    instances = stages.instances
    walls = {name: instances.rows(stages.rows_of(name)) for name in stages.names}
    return TraceAnalysis(
        source=source,
        complete=True,
        problems=_with_no_work(_problems(trace)),
        gpu=_NOTHING,
        stages=[StageLine(name, len(rows), exact_sum(rows.end_ns - rows.start_ns), *[None] * 5) for name, rows in walls.items()],
        kernels=[],
        idle=[],
        findings=list(find(evidence)),
        why=_NO_WORK.what,
        profiler=trace.source,
        device="",
        stage_method=stages.method,
        stage_why=stages.why,
        stage_coverage=None,
        unknown_share=None,
        budgets=[],
        steps=_host_steps(stages),
        modules=[],
        host=host_table(trace, stages) if len(trace.operators) else None,
        labels=label_lines(trace, stages),
    )


def _host_steps(stages: TraceStages) -> list[StepLine]:
    if stages.step_stage is None:
        return []
    rows = stages.instances.rows(stages.rows_of(stages.step_stage))
    walls = (rows.end_ns - rows.start_ns).tolist()
    return [StepLine(stages.step_stage, number, wall, *[None] * 6) for number, wall in enumerate(walls)]


_NO_WORK = ProblemLine(
    "no_device_work",
    "the trace holds no work of a GPU",
    fatal=False,
    remedy="Record CUDA activity too, if the program used a GPU.",
)


def _with_no_work(said: list[ProblemLine]) -> list[ProblemLine]:
    """That there is no device work, unless the parser said so already."""
    return said if any(problem.id == _NO_WORK.id for problem in said) else [*said, _NO_WORK]


def _problems(trace: Trace) -> list[ProblemLine]:
    return [ProblemLine(one.id, one.what, one.fatal, one.remedy) for one in trace.problems]


def _steps(account: Account) -> list[StepLine]:
    steps = account.steps
    if steps is None:
        return []
    columns = (steps.wall_ns, steps.end_ns - steps.start_ns, steps.busy_ns, steps.idle_ns, steps.kernels, steps.kernel_ns)
    rows = zip(*(column.tolist() for column in (*columns, steps.launches)), strict=True)
    return [StepLine(steps.stage, number, *row) for number, row in enumerate(rows)]


def _owners(trace: Trace, stages: TraceStages) -> tuple[list[OwnerLine], list[OwnerLine]]:
    """Modules and operators by the device time of their own."""
    labeled = has_modules(trace)
    if not labeled and not len(trace.operators):
        return [], []
    found = attribute(trace, stages)
    return _owner_lines(modules_by_time(trace, found) if labeled else ()), _owner_lines(operators_by_time(trace, found))


def _owner_lines(rows: Sequence[OwnerRow]) -> list[OwnerLine]:
    return [OwnerLine(row.name, row.calls, row.kernels, row.self_ns, row.total_ns, row.share) for row in rows]


def _budget(budget: StageBudget, unit: str) -> BudgetTable:
    return BudgetTable(
        stage=budget.stage,
        unit=unit,
        units=budget.units,
        wall_ns=budget.wall_ns,
        wall_source=budget.wall_source,
        busy_ns=budget.busy_ns,
        rows=[BudgetLine(row.key.value, row.label, row.ns, row.share) for row in budget.rows],
        problems=[problem.what for problem in budget.problems],
        notes=list(budget.notes),
    )


def _device(trace: Trace) -> str:
    """The devices that worked: a machine may hold more."""
    named = Counter(device_name(trace, number) for number in different(trace.work.device).tolist())
    told = [name if count == 1 else f"{count} × {name}" for name, count in named.items() if name]
    return ", ".join(told) or next((value for key, value in trace.facts.items() if key.startswith("device") and value), "")

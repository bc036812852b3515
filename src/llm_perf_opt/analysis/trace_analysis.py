"""Makes the record of all that is said of a trace."""

from collections.abc import Sequence

from llm_perf_opt.analysis.accounting import Account
from llm_perf_opt.analysis.attribution import attribute, has_modules, modules_by_time
from llm_perf_opt.analysis.budget import StageBudget
from llm_perf_opt.analysis.evidence import RunFacts, gather
from llm_perf_opt.analysis.finding import Finding
from llm_perf_opt.analysis.findings import find
from llm_perf_opt.analysis.kernel_classes import KernelClass
from llm_perf_opt.analysis.kernel_summary import kernels_by_time
from llm_perf_opt.analysis.stage_instances import TraceStages
from llm_perf_opt.analysis.trace_document import (
    BudgetLine,
    BudgetTable,
    FindingLine,
    GpuTotals,
    IdleLine,
    KernelLine,
    OwnerLine,
    ProblemLine,
    StageLine,
    StepLine,
    TraceAnalysis,
)
from llm_perf_opt.events import Trace
from llm_perf_opt.records import Missing

_NOTHING = GpuTotals(None, None, None, None, None)


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


def analysed(trace: Trace, stages: TraceStages, account: Account, facts: RunFacts, source: str) -> TraceAnalysis:
    """A sound trace, with what a run knows beside it."""
    evidence = gather(trace, stages, account, facts)
    kernels = kernels_by_time(trace)
    total = account.total
    none = not len(trace.work)
    return TraceAnalysis(
        source=source,
        complete=True,
        problems=[*_problems(trace), *([_NO_WORK] if none else [])],
        gpu=GpuTotals(total.kernels.count, total.kernels.sum_ns, total.busy_ns, total.idle_ns, total.span_ns),
        stages=[
            StageLine(one.name, one.count, one.wall_ns, one.busy_ns, one.idle_ns, one.kernels, one.launches, one.kernel_ns)
            for one in account.stages
        ],
        kernels=[KernelLine(row.name, row.kind.value, row.calls, row.total_ns, row.mean_ns, row.share) for row in kernels],
        idle=[IdleLine(cause.label, ns) for cause, ns in total.idle.items() if ns],
        findings=finding_lines(find(evidence)),
        why="the trace holds no work of a GPU" if none else "",
        profiler=trace.source,
        device=_device(trace),
        stage_method=stages.method,
        stage_why=stages.why,
        stage_coverage=stages.coverage,
        unknown_share=sum(row.share for row in kernels if row.kind is KernelClass.OTHER) if kernels else None,
        budgets=[_budget(stage.budget, stage.unit) for stage in evidence.stages],
        steps=_steps(account),
        modules=_modules(trace, stages),
    )


_NO_WORK = ProblemLine(
    "no_device_work",
    "the trace holds no work of a GPU",
    fatal=False,
    remedy="Record CUDA activity too, if the program used a GPU.",
)


def _problems(trace: Trace) -> list[ProblemLine]:
    return [ProblemLine(one.id, one.what, one.fatal, one.remedy) for one in trace.problems]


def _steps(account: Account) -> list[StepLine]:
    steps = account.steps
    if steps is None:
        return []
    columns = (steps.wall_ns, steps.end_ns - steps.start_ns, steps.busy_ns, steps.idle_ns, steps.kernels, steps.kernel_ns)
    rows = zip(*(column.tolist() for column in (*columns, steps.launches)), strict=True)
    return [StepLine(steps.stage, number, *row) for number, row in enumerate(rows)]


def _modules(trace: Trace, stages: TraceStages) -> list[OwnerLine]:
    if not has_modules(trace):
        return []
    rows = modules_by_time(trace, attribute(trace, stages))
    return [OwnerLine(row.name, row.calls, row.kernels, row.self_ns, row.total_ns, row.share) for row in rows]


def finding_lines(found: Sequence[Finding]) -> list[FindingLine]:
    """Findings as they are printed and kept."""
    return [_finding(finding) for finding in found]


def _finding(finding: Finding) -> FindingLine:
    saving = finding.saving
    known = None if isinstance(saving, Missing) else saving
    return FindingLine(
        id=finding.id,
        claim=finding.claim,
        saving_ns=known.expected_ns if known else None,
        evidence=list(finding.evidence),
        to_try=str(finding.to_try),
        kind=finding.kind.value,
        stage=finding.stage,
        saving_low_ns=known.low_ns if known else None,
        saving_high_ns=known.high_ns if known else None,
        saving_per=known.unit if known else "",
        saving_why=saving.why if isinstance(saving, Missing) else "",
        units=finding.units,
        confidence=finding.confidence,
        because=finding.because,
        overrides=list(finding.to_try.overrides),
        change=finding.to_try.change,
        counted=known.counted if known else 0,
    )


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
    return next((value for key, value in trace.facts.items() if key.startswith("device") and value), "")

"""Builds one side of a comparison from its runs; kernels, budget and counters come from the most typical run."""

import math
from collections.abc import Sequence

from llm_perf_opt.analysis.comparison.compare import Side
from llm_perf_opt.analysis.comparison.figures import ComparedFigure
from llm_perf_opt.analysis.comparison.kernels import ComparedKernel
from llm_perf_opt.analysis.kernels.classes import classify
from llm_perf_opt.analysis.kernels.evidence import KernelEvidence
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.stats import percentile
from llm_perf_opt.analysis.trace.document import TraceAnalysis
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.stages import Stage


def side_of(runs: Sequence[RunAnalysis]) -> Side:
    """Return the side: its runs in the order they were made, with traces and counters of the typical one."""
    runs = sorted(runs, key=lambda run: run.manifest.created)
    typical = typical_run(runs)
    kernels, trace = runs[typical].kernels, runs[typical].trace
    return Side(
        tuple(runs),
        typical=typical,
        kernels=kernels if isinstance(kernels, Missing) else _kernels(kernels),
        budget=trace if isinstance(trace, Missing) else _budget(trace),
        counters=kernels if isinstance(kernels, Missing) else _counters(kernels),
        budget_steps=0 if isinstance(trace, Missing) else next((t.units for t in trace.budgets if t.stage == Stage.DECODE), 0),
        kernel_steps=0 if isinstance(kernels, Missing) else kernels.decode_steps,
    )


def typical_run(runs: Sequence[RunAnalysis]) -> int:
    """Return the index of the run with the most details; among equals, the one nearest to the median end-to-end time."""
    details = [sum(not isinstance(value, Missing) for value in (run.torch, run.trace, run.kernels)) for run in runs]
    times = [_end_to_end(run) for run in runs]
    known = [time for time in times if time is not None]
    middle = percentile(known, 0.5) if known else 0.0
    apart = [math.inf if time is None else abs(time - middle) for time in times]
    return min(range(len(runs)), key=lambda index: (-details[index], apart[index], index))


def _end_to_end(run: RunAnalysis) -> float | None:
    if isinstance(run.timings, Missing) or not run.timings.iterations:
        return None
    return percentile([repeat.prefill_ns + sum(repeat.steps_ns) for repeat in run.timings.iterations], 0.5)


def _kernels(found: KernelEvidence) -> list[ComparedKernel]:
    rows = []
    for stage in found.stages:
        steps = _steps(found, stage.stage)
        for row in stage.rows:
            role = classify(row.spelled).value
            rows.append(ComparedKernel(row.spelled, stage.stage, role, row.calls / steps, round(row.total_ns / steps)))
    return rows


def _steps(found: KernelEvidence, stage: str) -> int:
    return max(1, found.decode_steps) if stage == Stage.DECODE else 1


def _budget(trace: TraceAnalysis) -> Maybe[Sequence[ComparedFigure]]:
    if not trace.complete:
        return Missing(f"the trace is incomplete: {trace.why}")
    return [
        ComparedFigure(f"{table.stage}/{row.label}, per {table.unit}", "ns", row.ns / max(1, table.units))
        for table in trace.budgets
        for row in table.rows
    ]


def _counters(found: KernelEvidence) -> list[ComparedFigure]:
    rows = []
    for stage in found.stages:
        steps = _steps(found, stage.stage)
        for name, unit, value in (("FLOPs executed", "FLOP", stage.flops), ("DRAM bytes", "byte", stage.dram_bytes)):
            per_unit = value if isinstance(value, Missing) else value / steps
            rows.append(ComparedFigure(f"{stage.stage}/{name} of the counted kernels", unit, per_unit))
        rows.append(ComparedFigure(f"{stage.stage}/kernel time with counters", "share", stage.counters))
    return rows

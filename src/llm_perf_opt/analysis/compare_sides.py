"""One side of a comparison from its runs: the kernels, budget and counters of the first of them, per token and per prefill."""

from collections.abc import Sequence
from dataclasses import dataclass

from llm_perf_opt.analysis.compare import Side
from llm_perf_opt.analysis.kernel_classes import classify
from llm_perf_opt.analysis.kernel_evidence import KernelEvidence
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.trace_document import TraceAnalysis
from llm_perf_opt.records import Maybe, Missing
from llm_perf_opt.stages import Stage


@dataclass(frozen=True)
class ComparedKernel:
    """A kernel of a stage, per token in decode: two timelines may hold different numbers of steps."""

    name: str
    stage: str
    role: str
    calls: int
    time_ns: int


@dataclass(frozen=True)
class ComparedFigure:
    """One figure of a budget or of counters."""

    key: str
    unit: str
    value: Maybe[float]


def side_of(runs: Sequence[RunAnalysis]) -> Side:
    """The runs, and what the first one's traces and counters say."""
    first = runs[0]
    kernels, trace = first.kernels, first.trace
    return Side(
        tuple(runs),
        kernels=kernels if isinstance(kernels, Missing) else _kernels(kernels),
        budget=trace if isinstance(trace, Missing) else _budget(trace),
        counters=kernels if isinstance(kernels, Missing) else _counters(kernels),
    )


def _kernels(found: KernelEvidence) -> list[ComparedKernel]:
    rows = []
    for stage in found.stages:
        steps = _steps(found, stage.stage)
        for row in stage.rows:
            calls = max(1, round(row.calls / steps))
            rows.append(ComparedKernel(row.spelled, stage.stage, classify(row.spelled).value, calls, round(row.total_ns / steps)))
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
        for name, value in (("FLOPs executed", stage.flops), ("DRAM bytes", stage.dram_bytes)):
            unit = "FLOP" if "FLOP" in name else "byte"
            per_unit = value if isinstance(value, Missing) else value / steps
            rows.append(ComparedFigure(f"{stage.stage}/{name} of the counted kernels", unit, per_unit))
        rows.append(ComparedFigure(f"{stage.stage}/kernel time with counters", "share", stage.counters))
    return rows

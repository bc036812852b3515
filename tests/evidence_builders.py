"""Evidence made by hand: one decode of ten steps and one prefill, whose figures are round."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from builders import MS
from llm_perf_opt.analysis.budget import BudgetFacts, stage_budget
from llm_perf_opt.analysis.evidence import UNITS, Evidence, RunFacts, StageEvidence
from llm_perf_opt.analysis.kernels.classes import classify
from llm_perf_opt.analysis.trace.accounting import StageTime
from llm_perf_opt.analysis.trace.host_calls import Fusion, HostCallCounts
from llm_perf_opt.analysis.trace.idle import IdleCause
from llm_perf_opt.analysis.trace.stage_launches import KernelTotal
from llm_perf_opt.core.records import Maybe, Missing

QUIET = HostCallCounts(syncs=0, sync_ns=0, items=0, allocations=0, allocation_ns=0, to_device=0, to_host=0, copied_bytes=0)
NOTHING_TO_FUSE = Fusion(
    kept_kernels=1000, kept_ns=80 * MS, fusable_kernels=0, fusable_ns=0, runs=0, sizes=0, least_ns=0, most_ns=0
)


def stage_evidence(
    name: str = "decode",
    *,
    wall_ns: int = 100 * MS,
    busy_ns: int = 90 * MS,
    kernels: Sequence[tuple[str, int, int]] = (("nvjet_sm90_tst_128x8", 1000, 80 * MS),),
    launches: int = 1000,
    idle: Mapping[IdleCause, int] | None = None,
    roofline_ns: Maybe[int] | None = None,
    **changes: Any,
) -> StageEvidence:
    """Return a stage of ten units (a prefill: one) that by default keeps the device busy."""
    units = 1 if name == "prefill" else 10
    causes = {IdleCause.LAUNCH_BOUND: 10 * MS} if idle is None else dict(idle)
    total = sum(ns for _, _, ns in kernels)
    idle_ns, calls = sum(causes.values()), sum(calls for _, calls, _ in kernels)
    time = StageTime(name, units, wall_ns, busy_ns + idle_ns, busy_ns, idle_ns, calls, total, launches, causes)
    budget = stage_budget(
        BudgetFacts(
            stage=name,
            units=units,
            wall_ns=wall_ns,
            wall_source="the unprofiled pass, median of 10 repeats",
            unprofiled=True,
            trace_wall_ns=time.span_ns,
            span_ns=time.span_ns,
            busy_ns=busy_ns,
            compute_ns=busy_ns,
            idle=causes,
            roofline_ns=Missing("no cost model") if roofline_ns is None else roofline_ns,
        )
    )
    made = StageEvidence(
        name=name,
        unit=UNITS[name],
        units=units,
        time=time,
        budget=budget,
        kernels=tuple(KernelTotal(text, classify(text), calls, ns, ns / calls, ns / total) for text, calls, ns in kernels),
        fusion=NOTHING_TO_FUSE,
        calls=QUIET,
        queued_gap_ns=1000.0,
        counters=Missing("no counters were read"),
        unprofiled=True,
    )
    return replace(made, **changes)


def evidence(*stages: StageEvidence, **facts: Any) -> Evidence:
    """These stages, with what a run knows."""
    return Evidence(stages, RunFacts(**facts))

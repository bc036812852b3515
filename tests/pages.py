"""A run with everything that a page can show, under names of the tests' choice; and points of a sweep."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from builders import MS, clean_timings, default_config, gpu_sample, model_facts, operator, run_analysis, telemetry, torch_pass
from kernel_fixtures import counted, traced_uses
from llm_perf_opt.analysis.budget import BudgetKey
from llm_perf_opt.analysis.kernels.evidence import KernelEvidence
from llm_perf_opt.analysis.kernels.table import kernel_table
from llm_perf_opt.analysis.limits.efficiency import efficiency
from llm_perf_opt.analysis.limits.hardware import hardware_named
from llm_perf_opt.analysis.metrics import context_drift, metrics, stage_timings
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.sweep import SweepEntry
from llm_perf_opt.analysis.telemetry import summarize_telemetry
from llm_perf_opt.analysis.trace.document import BudgetLine, BudgetTable, Finding, GpuTotals, TraceAnalysis
from llm_perf_opt.core.machine_records import KernelUse, Telemetry
from llm_perf_opt.core.records import Missing, PartTime, StageActivity
from llm_perf_opt.core.warnings import RunWarning, WarningId
from llm_perf_opt.counters.catalog import roles

READINGS = telemetry(gpu=[gpu_sample(number * 100 * MS, power_mw=300_000 + 1000 * number) for number in range(17)])


def full_analysis(names: Sequence[str] = (), **changes: Any) -> RunAnalysis:
    """A GPU run, its kernels recorded on an H200; `names` stand wherever a name comes from a trace, a model or a tool."""
    name = names[0] if names else "qwen2"
    facts = model_facts(
        name=name, device="cuda:0", device_name="NVIDIA H200", dtype="bf16", architecture=default_config().model.architecture
    )
    timings = clean_timings(model=facts)
    parts = tuple(
        PartTime(stage, part, 1, 5 * MS) for stage in ("prefill", "decode") for part in ("mlp", "attention_core", *names)
    )
    activity = tuple(StageActivity(stage, 10, 10, 20 * MS) for stage in ("prefill", "decode"))
    operators = tuple(
        operator(each or "empty", calls=number + 1, device_self_ns=number * MS)
        for number, each in enumerate(["aten::mm", "aten::add", "aten::cat", *names])
    )
    torch = torch_pass(parts=parts, activity=activity, operators=operators)
    found = efficiency(timings, torch, hardware_named("h200"), Missing("no ceilings were measured"))
    uses = [
        *traced_uses(),
        KernelUse("decode", "never_counted", 1, 128, 3, MS),
        *[KernelUse("decode", each, 1, 128, 3, MS) for each in names if each],
    ]
    stages = kernel_table(uses, dict(counted()), roles("gh100"))
    kernels = KernelEvidence({"prefill": "Nsight Systems"}, 8, stages, (), Missing("not run"), tuple(names))
    analysis = run_analysis(
        run=f"baseline/{name}/x",
        timings=timings,
        metrics=metrics(timings),
        stages=stage_timings(timings, torch),
        drift=context_drift(timings),
        efficiency=found,
        torch=torch,
        telemetry=summarize_telemetry(READINGS, timings),
        kernels=kernels,
        trace=trace_analysis(names),
        warnings=tuple(RunWarning(WarningId.THROTTLED, name) for name in names),
    )
    return replace(analysis, **changes)


def trace_analysis(names: Sequence[str] = ()) -> TraceAnalysis:
    """A budget of 10 ms per token and as many findings as there are names, or four."""
    amounts = {BudgetKey.ROOFLINE: MS, BudgetKey.ABOVE_ROOFLINE: 2 * MS, BudgetKey.LAUNCH: 6 * MS, BudgetKey.HOST: MS}
    rows = [BudgetLine(key.value, key.label, 8 * ns, ns / (10 * MS)) for key, ns in amounts.items()]
    rows[0] = BudgetLine(rows[0].key, names[0], rows[0].ns, rows[0].share) if names else rows[0]
    budget = BudgetTable("decode", "token", 8, 80 * MS, "the unprofiled pass", 24 * MS, rows, [], list(names))
    findings = [
        Finding(
            id=f"f{number}",
            headline=f"Finding {number}: {each}.",
            claim=f"Finding {number}: {each}. There is more to it.",
            saving_ns=MS * (9 - number),
            evidence=[each],
            to_try=each,
            kind="latency",
            stage="decode",
            saving_low_ns=0,
            saving_high_ns=9 * MS,
            saving_per="token",
            saving_why="",
            units=8,
            confidence="high",
            because=each,
            overrides=[],
            change="",
        )
        for number, each in enumerate(names or ["one", "two", "three", "four"])
    ]
    none = GpuTotals(None, None, None, None, None)
    return TraceAnalysis(
        source="raw/torch/trace.json.gz",
        complete=True,
        problems=[],
        gpu=none,
        stages=[],
        kernels=[],
        idle=[],
        findings=findings,
        why="",
        profiler="torch",
        device="NVIDIA H200",
        stage_method="labels",
        stage_why="",
        stage_coverage=None,
        unknown_share=None,
        budgets=[budget],
        steps=[],
        modules=[],
    )


def readings() -> Telemetry:
    """What the sampler saw in it."""
    return READINGS


def sweep_entries(why: str = "out of memory") -> list[SweepEntry]:
    """Batch 1 to 8 with a step that takes longer the larger the batch is, and a point that failed."""
    entries: list[SweepEntry] = []
    for batch in (1, 2, 4, 8):
        step = 10 * MS + batch * MS
        base = clean_timings().iterations[0]
        timings = clean_timings([replace(base, steps_ns=(step, step, step), prefill_ns=20 * MS * batch)] * 6)
        architecture = default_config().model.architecture
        timings = replace(
            timings,
            workload=replace(timings.workload, batch_size=batch, prompt_tokens=(10,) * batch),
            model=replace(timings.model, architecture=architecture, dtype="bf16", device_name="NVIDIA H200"),
        )
        none = Missing("the run was made without the torch pass")
        found = efficiency(timings, none, hardware_named("h200"), Missing("none"))
        analysis = run_analysis(timings=timings, metrics=metrics(timings), efficiency=found, torch=none)
        name = f"{len(entries):03d}"
        entries.append(SweepEntry((f"runtime.batch_size={batch}",), "complete", "", name, analysis, f"{name}/report.html"))
    entries.append(SweepEntry(("runtime.batch_size=16",), "failed", why, "", Missing(why)))
    return entries

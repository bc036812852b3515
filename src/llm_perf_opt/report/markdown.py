"""report.md, stakeholder_summary.md and operators.md from one analysis."""

import shlex
from collections.abc import Sequence
from typing import Any

from llm_perf_opt.analysis.latency import compile_seconds
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.telemetry import TelemetrySummary
from llm_perf_opt.core.records import CleanTimings, Distribution, Missing, OperatorRow, StageTiming
from llm_perf_opt.core.terminal import visible
from llm_perf_opt.core.warnings import RunWarning
from llm_perf_opt.report.advice import budget_section, finding_sentences, findings_section, trial_sentences
from llm_perf_opt.report.device_tables import devices_section
from llm_perf_opt.report.efficiency import efficiency_section, efficiency_sentences
from llm_perf_opt.report.environment import environment_rows
from llm_perf_opt.report.gpu_metrics import metrics_section
from llm_perf_opt.report.image_links import images
from llm_perf_opt.report.kernel_evidence import kernels_section
from llm_perf_opt.report.labels import labels_section
from llm_perf_opt.report.passes import passes_section
from llm_perf_opt.report.substages import substage_notes
from llm_perf_opt.report.text import (
    bounds,
    escape,
    gibibytes,
    growth,
    known_within,
    milliseconds,
    percent,
    reason,
    significant,
    spread,
    table,
    with_unit,
)
from llm_perf_opt.report.what_ran import what_ran

TOP_OPERATORS = 15


def report(analysis: RunAnalysis) -> str:
    """The whole report."""
    sections = [
        _title(analysis),
        _inputs(analysis),
        _warnings(analysis.warnings),
        images(analysis),
        _environment(analysis),
        _aggregates(analysis),
        _stages(analysis),
        devices_section(analysis.trace),
        labels_section(analysis.trace),
        budget_section(analysis.trace),
        findings_section(analysis.trace, analysis.verified),
        efficiency_section(analysis.efficiency, () if isinstance(analysis.kernels, Missing) else analysis.kernels.hfus),
        _operators(analysis),
        kernels_section(analysis.kernels),
        metrics_section(analysis.trace),
        _telemetry(analysis),
        _assumptions(analysis),
        passes_section(analysis),
        _repeat(analysis),
    ]
    return "\n".join(section for section in sections if section)


def stakeholder_summary(analysis: RunAnalysis) -> str:
    """One page for who decides: what was run, how fast it is, what dominates, how far to trust it."""
    lines = [f"# {escape(analysis.run)}: summary\n"]
    timings = analysis.timings
    if isinstance(timings, Missing):
        lines += [f"This run has no timings: {escape(timings.why)}\n", escape(analysis.manifest.remedy)]
        return "\n".join(lines) + "\n"
    lines.append(escape(what_ran(timings)) + "\n")
    lines += [f"- {sentence}" for sentence in _narrative(analysis, timings)]
    lines.append("")
    lines.append(_inputs(analysis))
    lines.append(_warnings(analysis.warnings) or _all_well(analysis))
    lines.append(images(analysis))
    lines.append("Every figure is a median of unprofiled repeats; definitions, intervals and spread are in report.md.\n")
    return "\n".join(lines)


def _all_well(analysis: RunAnalysis) -> str:
    if isinstance(analysis.telemetry, Missing):
        return "No warnings: the spread target was reached. The machine's load was not watched.\n"
    return "No warnings: the machine was quiet and the spread target was reached.\n"


def operators_page(analysis: RunAnalysis) -> str:
    """Every operator of the torch pass."""
    torch = analysis.torch
    if isinstance(torch, Missing):
        return f"# Operators\n\n{reason(torch)}\n"
    note = (
        f"torch.profiler, preset {torch.preset}, prefill and {torch.decode_steps} decode steps. Its times are inflated "
        f"({_inflation_words(analysis.stages)}); they say where time goes, not how much there is.\n"
    )
    return f"# Operators\n\n{note}\n{_operator_table(torch.operators)}"


# --- sections ---------------------------------------------------------------------------------------------------------


def _title(analysis: RunAnalysis) -> str:
    words = {
        "complete": "Every pass is complete.",
        "partial": f"**This run is partial**: {escape(analysis.manifest.why)}",
        "failed": f"**This run failed**: {escape(analysis.manifest.why)}",
    }[analysis.manifest.status]
    if analysis.damaged:
        words = f"**This run is damaged**: {escape(f'{analysis.damaged.fact} {analysis.damaged.remedy}')}"
    ran = "" if isinstance(analysis.timings, Missing) else escape(what_ran(analysis.timings)) + "\n\n"
    return f"# {escape(analysis.run)}\n\n{ran}{words}\n"


def _warnings(warnings: Sequence[RunWarning]) -> str:
    if not warnings:
        return ""
    return "## Warnings\n\n" + "".join(f"- {escape(warning.text)}\n" for warning in warnings)


def _inputs(analysis: RunAnalysis) -> str:
    if not analysis.inputs:
        return ""
    return "## What was measured\n\n" + "".join(f"- {escape(note.text)}\n" for note in analysis.inputs)


def _environment(analysis: RunAnalysis) -> str:
    if not analysis.env:
        return "## Environment\n\nn/a: env.json was not written before the run ended, or is damaged\n"
    rows = environment_rows(analysis.env, analysis.timings)
    return "## Environment\n\n" + table(["", ""], [[name, escape(value)] for name, value in rows])


def _aggregates(analysis: RunAnalysis) -> str:
    timings = analysis.timings
    if isinstance(timings, Missing):
        return f"## Aggregates\n\n{reason(timings)}\n"
    rows = []
    for metric in analysis.metrics:
        value = metric.value
        if isinstance(value, Missing):
            rows.append([metric.label, reason(value), "", "", "0"])
        else:
            cells = [with_unit(value.median, metric.unit), bounds(value, metric.unit), spread(value, metric.unit)]
            rows.append([metric.label, *cells, str(value.n)])
    parts = [
        "## Aggregates\n",
        table(["", "median", "95 % interval of the median", "interquartile range", "n"], rows, "lrrrr"),
        _percentiles(analysis),
        _other_figures(analysis, timings),
        "Definitions:\n",
        "".join(f"- **{metric.label}**: {metric.definition}\n" for metric in analysis.metrics),
    ]
    return "\n".join(parts)


def _percentiles(analysis: RunAnalysis) -> str:
    """p90 and p99 over the repeats, only for the figures that carry them."""
    rows = []
    for metric in analysis.metrics:
        value = metric.value
        if metric.unit == "ns" and not metric.key.startswith("itl") and isinstance(value, Distribution):
            if isinstance(value.p90, Missing):
                return f"Percentiles over the repeats: {value.p90}.\n"
            rows.append([metric.label, with_unit(value.p90, "ns"), with_unit(value.p99, "ns")])
    return table(["over the repeats", "p90", "p99"], rows, "lrr") if rows else ""


def _other_figures(analysis: RunAnalysis, timings: CleanTimings) -> str:
    drift = analysis.drift
    grown = reason(drift) if isinstance(drift, Missing) else escape(growth(drift))
    extra = compile_seconds(timings)
    first = milliseconds(timings.warmup[0].wall_ns) if timings.warmup else "n/a: no warm-up"
    memory = timings.memory
    rows = [
        ["Decode step's growth with context", grown],
        ["Warm-up", f"{len(timings.warmup)} iterations, the first {first}"],
        [
            "Warm-up beyond settled times (compiling, allocating, noise)",
            reason(extra) if isinstance(extra, Missing) else f"{significant(extra, 3)} s over the warm-up",
        ],
        ["Loading", f"{significant(timings.load_s, 3)} s"],
        ["Repeats", f"{len(timings.iterations)}: {escape(timings.stopped)}"],
        ["Clock", timings.clock],
        ["Peak memory, allocator (tensors)", gibibytes(memory.allocated_bytes)],
        ["Peak memory, allocator (reserved)", gibibytes(memory.reserved_bytes)],
        ["Device memory in use at the end, everyone", gibibytes(memory.device_used_bytes)],
        ["Peak resident memory of the process", gibibytes(memory.process_rss_bytes)],
        ["Weights", f"{gibibytes(timings.model.weight_bytes)} ({timings.model.parameters:,} parameters)"],
    ]
    return table(["", ""], rows)


def _stages(analysis: RunAnalysis) -> str:
    if not analysis.stages:
        why = analysis.damaged.fact if analysis.damaged else "no iteration was measured"
        return f"## Per-stage timings\n\n{reason(Missing(why))}\n"
    rows = [_stage_row(stage) for stage in analysis.stages]
    torch = analysis.torch
    equal = (
        ""
        if isinstance(torch, Missing)
        else f" The torch pass took {torch.decode_steps} decode steps; its factors compare as many."
    )
    header = [
        "stage",
        "runs",
        "one run, median",
        "95 % interval",
        "interquartile range",
        "n",
        "share",
        "under torch.profiler",
    ]
    return (
        "## Per-stage timings\n\nUnprofiled. A parent includes its children; runs are per iteration; "
        f"a step's value is the iteration's median step.{equal}\n\n" + table(header, rows, "lrrrrrrr")
    ) + substage_notes(analysis.stages)


def _stage_row(stage: StageTiming) -> list[str]:
    inflated = stage.inflation
    profiled = reason(inflated) if isinstance(inflated, Missing) else f"{milliseconds(stage.profiled_ns)} (× {inflated:.2f})"
    time = stage.time_ns
    return [
        "&nbsp;&nbsp;" * stage.depth + escape(stage.name),
        str(stage.per_iteration),
        milliseconds(time.median),
        bounds(time, "ns"),
        spread(time, "ns"),
        str(time.n),
        percent(stage.share),
        profiled,
    ]


def _operators(analysis: RunAnalysis) -> str:
    torch = analysis.torch
    if isinstance(torch, Missing):
        return f"## Top operators\n\n{reason(torch)}\n"
    shown = torch.operators[:TOP_OPERATORS]
    note = (
        f"From prefill and {torch.decode_steps} decode steps under torch.profiler (preset {torch.preset}; "
        f"{_inflation_words(analysis.stages)}): "
        f"{len(shown)} of {len(torch.operators)} operators, by self time. All are in operators.md and ops.csv, "
        f"the trace in raw/torch/{escape(torch.trace_file)}.\n"
    )
    return f"## Top operators\n\n{note}\n{_operator_table(shown)}"


def _operator_table(rows: Sequence[OperatorRow]) -> str:
    on_gpu = any(not isinstance(row.device_self_ns, Missing) for row in rows)
    with_memory = any(not isinstance(row.cpu_memory_bytes, Missing) for row in rows)
    weight = sum(_self_ns(row) for row in rows) or 1
    header = ["operator", "calls", "CPU self", "CPU total", "CPU mean"]
    header += ["device self", "device total"] if on_gpu else []
    header += ["CPU memory"] if with_memory else []
    header += ["device memory"] if with_memory and on_gpu else []
    header += ["share of self time shown"]
    body = []
    for row in rows:
        cells = [escape(row.name), f"{row.calls:,}", milliseconds(row.cpu_self_ns), milliseconds(row.cpu_total_ns)]
        cells.append(milliseconds(row.cpu_total_ns / row.calls) if row.calls else "n/a: no call")
        cells += [milliseconds(row.device_self_ns), milliseconds(row.device_total_ns)] if on_gpu else []
        cells += [gibibytes(row.cpu_memory_bytes)] if with_memory else []
        cells += [gibibytes(row.device_memory_bytes)] if with_memory and on_gpu else []
        body.append([*cells, percent(_self_ns(row) / weight)])
    missing = [] if on_gpu else ["Device time is n/a: the run is on the CPU."]
    first = rows[0].cpu_memory_bytes if rows else None
    missing += [f"Memory is {reason(first)}."] if isinstance(first, Missing) else []
    return table(header, body, "l" + "r" * (len(header) - 1)) + ("\n" + " ".join(missing) + "\n" if missing else "")


def _self_ns(row: OperatorRow) -> int:
    return row.cpu_self_ns if isinstance(row.device_self_ns, Missing) else row.device_self_ns


def _inflation_words(stages: Sequence[StageTiming]) -> str:
    parts = [
        f"{stage.name} × {stage.inflation:.2f}"
        for stage in stages
        if not isinstance(stage.inflation, Missing) and stage.name in ("prefill", "decode")
    ]
    return f"profiled against unprofiled time: {', '.join(parts)}" if parts else "inflation n/a: no unprofiled time to compare"


def _telemetry(analysis: RunAnalysis) -> str:
    telemetry = analysis.telemetry
    if isinstance(telemetry, Missing):
        return f"## Power, clocks and load\n\n{reason(telemetry)}\n"
    rows = [
        [
            reading.name,
            _number(reading.low),
            _number(reading.median),
            _number(reading.high),
            reading.unit,
            str(reading.n),
        ]
        for reading in telemetry.readings
    ]
    parts = [
        "## Power, clocks and load\n",
        (escape(telemetry.note) + "\n") if telemetry.note else "",
        table(["while the repeats ran", "least", "median", "most", "unit", "n"], rows, "lrrrlr"),
        _energy_table(telemetry),
    ]
    return "\n".join(part for part in parts if part)


def _number(value: Any) -> str:
    return reason(value) if isinstance(value, Missing) else significant(value, 3)


def _energy_table(telemetry: TelemetrySummary) -> str:
    rows = []
    for row in telemetry.energy:
        both = row.from_counter_j, row.from_power_j
        rows.append(
            [
                row.window,
                f"{row.seconds:.3f} s",
                *[reason(v) if isinstance(v, Missing) else f"{significant(v)} J" for v in both],
            ]
        )
    return table(["energy over", "window", "from the counter", "from the power readings"], rows, "lrrr")


def _assumptions(analysis: RunAnalysis) -> str:
    return "## Assumptions\n\n" + "".join(f"- {escape(text)}\n" for text in analysis.assumptions)


def _repeat(analysis: RunAnalysis) -> str:
    return f"## To repeat\n\n```\n{visible(shlex.join(analysis.manifest.command)).replace('```', '` ` `')}\n```\n"


# --- narrative --------------------------------------------------------------------------------------------------------


def _narrative(analysis: RunAnalysis, timings: CleanTimings) -> list[str]:
    """Sentences that each rest on a figure of this run."""
    sentences = []
    ttft, tpot, rate = (analysis.metric(key) for key in ("ttft", "tpot", "decode_rate"))
    if ttft and isinstance(ttft.value, Distribution):
        sentences.append(f"The first token takes {milliseconds(ttft.value.median)}{_plus_minus(ttft.value)}.")
    if tpot and rate and isinstance(tpot.value, Distribution) and isinstance(rate.value, Distribution):
        sentences.append(
            f"Each further token takes {milliseconds(tpot.value.median)}{_plus_minus(tpot.value)}: "
            f"{significant(rate.value.median)} tokens/s for the batch of {timings.workload.batch_size}."
        )
    prefill, decode = analysis.stage("prefill"), analysis.stage("decode")
    if prefill and decode:
        longer, shorter = (decode, prefill) if decode.share >= prefill.share else (prefill, decode)
        sentences.append(
            f"Of the {milliseconds(_whole(analysis))} of a request, {longer.name} is {percent(longer.share, 0)} "
            f"and {shorter.name} {percent(shorter.share, 0)}: most of the time goes to {longer.name}."
        )
    sentences += efficiency_sentences(analysis.efficiency)
    shares = {stage.name: stage.share for stage in (prefill, decode) if stage}
    sentences += finding_sentences(analysis.trace, shares)
    sentences += trial_sentences(analysis.verified)
    if not isinstance(analysis.drift, Missing):
        sentences.append(f"A decode step's growth with the context: {escape(growth(analysis.drift))}.")
    if not isinstance(analysis.torch, Missing) and analysis.torch.operators:
        rows = analysis.torch.operators
        whole = sum(_self_ns(row) for row in rows) or 1
        top = rows[0]
        sentences.append(
            f"The operator with the most {'device' if not isinstance(top.device_self_ns, Missing) else 'CPU'} time is "
            f"{escape(top.name)}: {percent(_self_ns(top) / whole, 0)} of the total over {top.calls:,} calls."
        )
    return sentences


def _whole(analysis: RunAnalysis) -> float:
    whole = analysis.stage("profile")
    return whole.time_ns.median if whole else 0.0


def _plus_minus(value: Distribution) -> str:
    relative = value.ci_relative
    if isinstance(relative, Missing):
        return f" ({known_within(value, 'ns')})"
    return f" (median of {value.n}, ± {relative * 100:.1f} %)"

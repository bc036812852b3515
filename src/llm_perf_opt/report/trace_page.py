"""What is said of a trace, for a terminal of a hundred columns: health, stages, budget, idle causes, kernels,
modules, operators, findings.
"""

import textwrap
from collections.abc import Callable, Sequence

from llm_perf_opt.analysis.kernels.names import short_name
from llm_perf_opt.analysis.trace.document import (
    OVERLAP,
    BudgetTable,
    Finding,
    HostTable,
    OwnerLine,
    StageLine,
    ThroughputLine,
    TraceAnalysis,
)
from llm_perf_opt.core.terminal import one_line
from llm_perf_opt.report.device_tables import DEVICE_HEADER, STAGE_HEADER, device_rows, device_stage_rows
from llm_perf_opt.report.gpu_metrics import metric_header, metric_rows
from llm_perf_opt.report.labels import LABEL_HEADER, label_rows
from llm_perf_opt.report.text import columns, milliseconds, significant

WIDTH = 100
_NAME = 52
_OWNERS = 8
"""Modules and operators to list at most: the page is about kernels; --json has them all."""


def trace_text(found: TraceAnalysis, top: int = 15) -> str:
    """The whole page."""
    parts = [_head(found)]
    if found.complete:
        parts += [_gpu(found), _devices(found), _stages(found), _labels(found, top), _host_operators(found.host, top)]
        parts += [*[_budget(budget) for budget in found.budgets], _idle(found)]
        parts += [_kernels(found, top), _owners("Modules", found.modules, top), _owners("Operators", found.operators, top)]
        parts += [_borrowed(found, top), _metrics(found, top), _findings(found)]
    return "\n".join(part for part in parts if part)


def _head(found: TraceAnalysis) -> str:
    lines = [one_line(found.source), f"trace     {found.profiler}{', ' + one_line(found.device) if found.device else ''}"]
    state = "complete" if found.complete else "INCOMPLETE: no number of it can be believed"
    lines.append(f"health    {state}{'' if found.problems else ', no problems'}")
    for problem in found.problems:
        lines += _wrapped(f"{'fatal' if problem.fatal else 'note'}: {problem.what}", "          ")
        lines += _wrapped(f"→ {problem.remedy}", "          ") if problem.remedy else []
    if not found.complete:
        lines += _wrapped(f"figures   n/a: {found.why}", "")
    return "\n".join(lines) + "\n"


def _gpu(found: TraceAnalysis) -> str:
    gpu = found.gpu
    if not gpu.span_ns or gpu.busy_ns is None or gpu.idle_ns is None or gpu.kernel_ns is None:
        return f"GPU       n/a: {found.why or 'its work has no length'}\n"
    several = len(found.devices) > 1
    which = f" on {len(found.devices)} devices" if several else ""
    busy = "at least one busy for" if several else "busy"
    words = (
        f"GPU       {gpu.kernels:,} kernels{which}, {ms(gpu.kernel_ns)} of kernel time; {busy} {ms(gpu.busy_ns)} "
        f"({gpu.busy_ns / gpu.span_ns:.1%}), idle {ms(gpu.idle_ns)} of a span of {ms(gpu.span_ns)}"
    )
    return "\n".join(_wrapped(words, "          ")) + "\n"


def _devices(found: TraceAnalysis) -> str:
    """Each device by itself, where there are several: together they say only when one of them was busy."""
    if len(found.devices) < 2:
        return ""
    rows = [[row[0], short(row[1], 24), *row[2:]] for row in device_rows(found.devices)]
    lines = ["Devices, each by itself", columns(DEVICE_HEADER, rows, "llrrrrrr")]
    stages = device_stage_rows(found.devices)
    lines += ["Stages on each device", columns(STAGE_HEADER, stages, "llrrrrr")] if stages else []
    return "\n".join(lines) + "\n"


def _stages(found: TraceAnalysis) -> str:
    covered = "" if found.stage_coverage is None else f", {found.stage_coverage:.1%} of the device time"
    if not found.stages:
        return f"Stages: none found ({one_line(found.stage_why)})\n"
    head = _wrapped(f"Stages, by {found.stage_method} ({one_line(found.stage_why)}{covered})", "")
    if all(one.gpu_busy_ns is None for one in found.stages):
        return "\n".join([*head, _host_stages(found.stages, found.host)]) + "\n"
    rows = [
        [
            one.name,
            f"{one.count:,}",
            ms(one.wall_ns),
            _maybe(one.gpu_busy_ns, ms),
            _maybe(one.idle_ns, ms),
            _maybe(one.span_ns, ms),
            _maybe(one.kernels, _count),
            _maybe(one.launches, _count),
        ]
        for one in found.stages
    ]
    header = ["stage", "count", "wall, profiled", "GPU busy", "GPU idle", "GPU span", "kernels", "launches"]
    return "\n".join([*head, columns(header, rows, "lrrrrrrr")]) + "\n"


def _labels(found: TraceAnalysis, top: int) -> str:
    """What the program marked that is no stage."""
    if not found.labels:
        return ""
    rows = [[short(row[0]), *row[1:]] for row in label_rows(found.labels[:top])]
    head = f"Labels that mark no stage: the first {len(rows)} of {len(found.labels)}; kernels launched within them"
    return head + "\n" + columns(LABEL_HEADER, rows, "lrrrr") + "\n"


def _host_stages(stages: Sequence[StageLine], host: HostTable | None) -> str:
    """Stages of a trace without device work: wall time, and where operators are recorded, how much of it they were open."""
    if host is None:
        return columns(
            ["stage", "count", "wall, profiled"], [[one.name, f"{one.count:,}", ms(one.wall_ns)] for one in stages], "lrr"
        )
    inside = {one.name: one for one in host.stages}
    rows = [
        [
            one.name,
            f"{one.count:,}",
            ms(one.wall_ns),
            ms(inside[one.name].operator_ns) if one.name in inside else "n/a",
            ms(inside[one.name].outside_ns) if one.name in inside else "n/a",
        ]
        for one in stages
    ]
    return columns(["stage", "count", "wall, profiled", "in operators", "outside them"], rows, "lrrrr")


def _host_operators(host: HostTable | None, top: int) -> str:
    """Operators by host time, for the whole trace and for each stage that says more than another."""
    if host is None or not host.operators:
        return ""
    tables = [("the whole trace", host.operators)]
    tables += [(one.name, one.operators) for one in host.stages if one.name in _TELLING_STAGES and one.operators]
    parts = []
    for where, lines in tables:
        rows = [
            [short(row.name), f"{row.calls:,}", ms(row.self_ns), ms(row.total_ns), f"{row.share:.1%}"]
            for row in lines[: min(top, _OWNERS)]
        ]
        head = f"Operators by host time of their own, {where}: the first {len(rows)} of {len(lines)} (below the profiler)"
        parts.append(head + "\n" + columns(["operator", "calls", "own", "with inner", "share"], rows, "lrrrr") + "\n")
    return "\n".join(parts)


_TELLING_STAGES = ("prefill", "decode", "mixed_step", "step")
"""Those whose operators are listed: a step's are those of its decode, and `profile` is the whole."""


def _budget(budget: BudgetTable) -> str:
    per = f", {ms(budget.wall_ns / budget.units)} per {budget.unit}" if budget.units > 1 else ""
    many = f"{budget.units} {budget.unit}s" if budget.units > 1 else f"one {budget.unit}"
    lines = _wrapped(f"Where {budget.stage} goes: {ms(budget.wall_ns)} for {many}{per}; from {one_line(budget.wall_source)}", "")
    rows = [[row.label, ms(row.ns), ms(row.ns / budget.units), f"{row.share:.1%}"] for row in budget.rows]
    rows.append(["sum", ms(budget.wall_ns), ms(budget.wall_ns / budget.units), "100.0%"])
    lines.append(columns(["", "time", f"per {budget.unit}", "share"], rows, "lrrr"))
    for text in (*[f"PROBLEM: {problem}" for problem in budget.problems], *budget.notes):
        lines += _wrapped(f"- {one_line(text)}", "  ")
    return "\n".join(lines) + "\n"


def _idle(found: TraceAnalysis) -> str:
    whole = sum(line.ns for line in found.idle)
    if not whole:
        return ""
    rows = [[line.cause, ms(line.ns), f"{line.ns / whole:.1%}"] for line in sorted(found.idle, key=lambda one: -one.ns)]
    return "Why the device was idle (as recorded, below the profiler)\n" + columns(["cause", "time", "share"], rows, "lrr") + "\n"


def _kernels(found: TraceAnalysis, top: int) -> str:
    if not found.kernels:
        return ""
    rows = [
        [short_name(row.name, _NAME), row.kind, f"{row.calls:,}", ms(row.total_ns), ms(row.mean_ns), f"{row.share:.1%}"]
        for row in found.kernels[:top]
    ]
    head = f"Kernels: the longest {len(rows)} of {len(found.kernels)}"
    if found.unknown_share:
        head += f"; {found.unknown_share:.1%} of the time is of no known class"
    return head + "\n" + columns(["kernel", "class", "calls", "total", "mean", "share"], rows, "llrrrr") + "\n"


def _owners(what: str, rows: Sequence[OwnerLine], top: int) -> str:
    """Modules or operators by the device time that is their own."""
    if not rows:
        return ""
    shown = [
        [short(row.name), f"{row.calls:,}", f"{row.kernels:,}", ms(row.self_ns), ms(row.total_ns), f"{row.share:.1%}"]
        for row in rows[: min(top, _OWNERS)]
    ]
    owned = sum(row.share for row in rows)
    head = f"{what} by device time of their own: the first {len(shown)} of {len(rows)}; {owned:.1%} of the device time has one"
    return head + "\n" + columns([what.lower(), "calls", "launched", "own", "with inner", "share"], shown, "lrrrrr") + "\n"


def _borrowed(found: TraceAnalysis, top: int) -> str:
    """Modules by another trace, with how much each way of finding them covers."""
    table = found.borrowed
    if table is None:
        return ""
    shares = ", ".join(f"{rule} {share:.1%}" for rule, share in table.coverage.items() if share)
    lines = _wrapped(f"Modules by the eager trace {one_line(table.source)}; of the kernel time, by rule: {shares}", "")
    rows = [[short(row.name), f"{row.kernels:,}", ms(row.self_ns), f"{row.share:.1%}"] for row in table.rows[: min(top, _OWNERS)]]
    return "\n".join([*lines, columns(["module", "kernels", "own", "share"], rows, "lrrr")]) + "\n"


def _metrics(found: TraceAnalysis, top: int) -> str:
    """What nsys sampled of the GPU, by stage."""
    if not found.gpu_metrics:
        return ""
    header, rows = metric_header(found.gpu_metrics), metric_rows(found.gpu_metrics)
    head = f"Metrics of the GPU, means (samples): the first {min(top, len(rows))} of {len(rows)}"
    shown = [[short(row[0], 34), *row[1:]] for row in rows[:top]]
    return head + "\n" + columns(header, shown, "l" + "r" * (len(header) - 1)) + "\n"


def _findings(found: TraceAnalysis) -> str:
    if not found.findings and found.gpu.kernels is None:
        return f"Findings: n/a: {found.why}, and the rules are about a GPU's work.\n"
    if not found.findings:
        return "Findings: none. No rule found anything above its threshold.\n"
    lines = ["What to change first"]
    for number, finding in enumerate(found.findings, 1):
        lines += finding_lines(number, finding)
    lines += _wrapped(OVERLAP, "") if len(found.findings) > 1 else []
    return "\n".join(lines) + "\n"


def finding_lines(number: int, finding: Finding) -> list[str]:
    """One finding with its saving, its evidence and what to try."""
    lines = _wrapped(f"{number}. [{finding.id}] {one_line(finding.claim)}", "   ")
    effect = f"throughput: {throughput_words(finding.throughput)}" if finding.throughput else f"saves: {saving_words(finding)}"
    lines += _wrapped(f"   {effect} ({finding.confidence} confidence: {one_line(finding.because)})", "          ")
    for row in finding.evidence:
        lines += _wrapped(f"   · {one_line(row)}", "     ")
    lines += _wrapped(f"   try: {one_line(finding.to_try)}", "        ")
    if finding.overrides and finding.change:
        lines += _wrapped(f"   in other programs: {one_line(finding.change)}", "        ")
    return lines


def saving_words(finding: Finding) -> str:
    """The saving with its bounds, or why there is none."""
    if finding.saving_ns is None or finding.saving_low_ns is None or finding.saving_high_ns is None:
        return f"n/a: {finding.saving_why}"
    if finding.saving_high_ns == 0:
        return "nothing on the wall clock"
    low, high = ms(finding.saving_low_ns), ms(finding.saving_high_ns)
    return f"about {ms(finding.saving_ns)} per {finding.saving_per} ({low} to {high})"


def throughput_words(found: ThroughputLine) -> str:
    """Tokens per second now and at the larger batch, and how long a token takes then. Nothing of it is a saving."""
    low, high = significant(found.tokens_per_s_after_low), significant(found.tokens_per_s_after_high)
    longest = f", {ms(found.step_after_high_ns)} at worst" if found.step_after_high_ns > found.step_after_ns else ""
    return (
        f"{significant(found.tokens_per_s)} tokens/s at batch {found.batch:,}, about {significant(found.tokens_per_s_after)} "
        f"({low} to {high}) at batch {found.batch_after:,}, where a token takes about {ms(found.step_after_ns)}{longest}, not "
        f"{ms(found.step_ns)}"
    )


def ms(ns: float) -> str:
    """Nanoseconds in the unit that suits them."""
    return milliseconds(ns)


def short(name: str, most: int = _NAME) -> str:
    """A name of an operator, a module or a device, cut in the middle: both ends tell them apart."""
    text = one_line(name)
    tail = min(15, most // 3)
    return text if len(text) <= most else f"{text[: most - tail - 1]}…{text[-tail:]}"


def _maybe(value: int | None, show: Callable[[int], str]) -> str:
    return "n/a" if value is None else show(value)


def _count(value: int) -> str:
    return f"{value:,}"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]

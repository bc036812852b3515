"""What is said of a trace, for a terminal of a hundred columns: health, stages, budget, idle causes, kernels, findings."""

import textwrap

from llm_perf_opt.analysis.trace_document import OVERLAP, BudgetTable, FindingLine, TraceAnalysis
from llm_perf_opt.report.text import columns, significant

WIDTH = 100
_NAME = 52


def trace_text(found: TraceAnalysis, top: int = 15) -> str:
    """The whole page."""
    parts = [_head(found)]
    if found.complete:
        parts += [_gpu(found), _stages(found), *[_budget(budget) for budget in found.budgets], _idle(found)]
        parts += [_kernels(found, top), _findings(found)]
    return "\n".join(part for part in parts if part)


def _head(found: TraceAnalysis) -> str:
    lines = [plain(found.source), f"trace     {found.profiler}{', ' + plain(found.device) if found.device else ''}"]
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
    words = (
        f"GPU       {gpu.kernels:,} kernels, {ms(gpu.kernel_ns)} of kernel time; busy {ms(gpu.busy_ns)} "
        f"({gpu.busy_ns / gpu.span_ns:.1%}), idle {ms(gpu.idle_ns)} of a span of {ms(gpu.span_ns)}"
    )
    return "\n".join(_wrapped(words, "          ")) + "\n"


def _stages(found: TraceAnalysis) -> str:
    covered = "" if found.stage_coverage is None else f", {found.stage_coverage:.1%} of the device time"
    if not found.stages:
        return f"Stages: none found ({plain(found.stage_why)})\n"
    rows = [
        [
            one.name,
            f"{one.count:,}",
            ms(one.wall_ns),
            ms(one.gpu_busy_ns),
            ms(one.idle_ns),
            f"{one.kernels:,}",
            f"{one.launches:,}",
        ]
        for one in found.stages
    ]
    head = f"Stages, by {found.stage_method} ({plain(found.stage_why)}{covered})"
    header = ["stage", "count", "wall, profiled", "GPU busy", "GPU idle", "kernels", "launches"]
    return "\n".join([*_wrapped(head, ""), columns(header, rows, "lrrrrrr")]) + "\n"


def _budget(budget: BudgetTable) -> str:
    per = f", {ms(budget.wall_ns / budget.units)} per {budget.unit}" if budget.units > 1 else ""
    many = f"{budget.units} {budget.unit}s" if budget.units > 1 else f"one {budget.unit}"
    lines = _wrapped(f"Where {budget.stage} goes: {ms(budget.wall_ns)} for {many}{per}; from {plain(budget.wall_source)}", "")
    rows = [[row.label, ms(row.ns), ms(row.ns / budget.units), f"{row.share:.1%}"] for row in budget.rows]
    rows.append(["sum", ms(budget.wall_ns), ms(budget.wall_ns / budget.units), "100.0%"])
    lines.append(columns(["", "time", f"per {budget.unit}", "share"], rows, "lrrr"))
    for text in (*[f"PROBLEM: {problem}" for problem in budget.problems], *budget.notes):
        lines += _wrapped(f"- {plain(text)}", "  ")
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
        [short(row.name), row.kind, f"{row.calls:,}", ms(row.total_ns), us(row.mean_ns), f"{row.share:.1%}"]
        for row in found.kernels[:top]
    ]
    head = f"Kernels: the longest {len(rows)} of {len(found.kernels)}"
    if found.unknown_share:
        head += f"; {found.unknown_share:.1%} of the time is of no known class"
    return head + "\n" + columns(["kernel", "class", "calls", "total", "mean", "share"], rows, "llrrrr") + "\n"


def _findings(found: TraceAnalysis) -> str:
    if not found.findings:
        return "Findings: none. No rule found anything above its threshold.\n"
    lines = ["What to change first"]
    for number, finding in enumerate(found.findings, 1):
        lines += finding_lines(number, finding)
    lines += _wrapped(OVERLAP, "") if len(found.findings) > 1 else []
    return "\n".join(lines) + "\n"


def finding_lines(number: int, finding: FindingLine) -> list[str]:
    """One finding with its saving, its evidence and what to try."""
    lines = _wrapped(f"{number}. [{finding.id}] {plain(finding.claim)}", "   ")
    lines += _wrapped(
        f"   saves: {saving_words(finding)} ({finding.confidence} confidence: {plain(finding.because)})", "          "
    )
    for row in finding.evidence:
        lines += _wrapped(f"   · {plain(row)}", "     ")
    lines += _wrapped(f"   try: {plain(finding.to_try)}", "        ")
    return lines


def saving_words(finding: FindingLine) -> str:
    """The saving with its bounds, or why there is none."""
    if finding.saving_ns is None or finding.saving_low_ns is None or finding.saving_high_ns is None:
        return f"n/a: {finding.saving_why}"
    if finding.saving_high_ns == 0:
        return "nothing on the wall clock"
    low, high = ms(finding.saving_low_ns), ms(finding.saving_high_ns)
    return f"about {ms(finding.saving_ns)} per {finding.saving_per} ({low} to {high})"


def ms(ns: float) -> str:
    """Nanoseconds as milliseconds."""
    return f"{significant(ns / 1e6)} ms"


def us(ns: float) -> str:
    """Nanoseconds as microseconds."""
    return f"{significant(ns / 1e3, 3)} µs"


def plain(text: str) -> str:
    """A text from a trace on one line, without anything a terminal obeys."""
    return "".join(char if char.isprintable() else " " for char in text)


def short(name: str) -> str:
    """A kernel's name, cut in the middle: both ends tell kernels apart."""
    text = plain(name)
    return text if len(text) <= _NAME else f"{text[: _NAME - 16]}…{text[-15:]}"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]

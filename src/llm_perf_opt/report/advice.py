"""Findings and their trials: in the terminal, in the report, as data."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from llm_perf_opt.analysis.trace.document import OVERLAP, BudgetTable, Finding, TraceAnalysis
from llm_perf_opt.analysis.verification import Trial, Verification
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.terminal import one_line
from llm_perf_opt.report.text import columns, escape, milliseconds, percent, reason, significant, table
from llm_perf_opt.report.trace_page import finding_lines, ms, saving_words, throughput_words

THROUGHPUT = "throughput"
WITHIN = 0.25
"""A predicted time this near to the measured one is called right."""


def advice_text(findings: Sequence[Finding]) -> str:
    """For the terminal."""
    if not findings:
        return "Nothing found: no rule found anything above its threshold.\n"
    lines = [line for number, finding in enumerate(findings, 1) for line in finding_lines(number, finding)]
    return "\n".join([*lines, OVERLAP]) + "\n"


def trials_text(found: Verification) -> str:
    """Predicted against measured, for the terminal."""
    rows = [trial_cells(trial) for trial in found.trials]
    lines = [f"Tried, each alone, against {one_line(found.base)}", columns(TRIAL_HEADER, rows, "lrrrrrl")]
    if found.remeasured:
        lines.append(f"The base was measured again: {one_line(found.remeasured)}.")
    return "\n" + "\n".join(lines) + "\n"


def verification_json(found: Verification) -> dict[str, Any]:
    """With the figures that follow from the others."""
    trials = [
        asdict(trial) | {"saving_ns": trial.saving_ns, "predicted_ns": trial.predicted_ns, "error": trial.error}
        for trial in found.trials
    ]
    return {"base": found.base, "remeasured": found.remeasured, "trials": trials}


def budget_section(trace: Maybe[TraceAnalysis]) -> str:
    """Where the time goes, stage by stage."""
    if isinstance(trace, Missing):
        return f"## Where the time goes\n\n{reason(trace)}\n"
    if not trace.budgets:
        return f"## Where the time goes\n\nn/a: {escape(trace.why or 'the trace shows no stage: ' + trace.stage_why)}\n"
    head = (
        f"Rows sum to the wall time to the nanosecond. Kernels' times from {escape(trace.source)}; "
        f"stages by {escape(trace.stage_method)} ({escape(trace.stage_why)}).\n"
    )
    return "\n".join(["## Where the time goes\n", head, *[_budget(budget) for budget in trace.budgets]])


def findings_section(trace: Maybe[TraceAnalysis], verified: Verification | None) -> str:
    """What to change first, and what became of it where it was tried."""
    if isinstance(trace, Missing):
        return f"## What to change first\n\n{reason(trace)}\n"
    if not trace.complete:
        return f"## What to change first\n\nn/a: {escape(trace.why)}\n"
    parts = ["## What to change first\n"]
    if not trace.findings:
        parts.append(f"Nothing was found above the rules' thresholds{'' if trace.budgets else ': ' + escape(trace.why)}.\n")
    for number, finding in enumerate(trace.findings, 1):
        parts.append(_finding(number, finding))
    if len(trace.findings) > 1:
        parts.append(f"{OVERLAP}\n")
    if verified is not None and verified.trials:
        parts += [
            f"### Tried, each alone, against {escape(verified.base)}\n",
            table(TRIAL_HEADER, [[escape(cell) for cell in trial_cells(trial)] for trial in verified.trials], "lrrrrrl"),
        ]
        if verified.remeasured:
            parts.append(f"The base was measured again: {escape(verified.remeasured)}.\n")
    return "\n".join(parts)


def trial_sentences(found: Verification | None) -> list[str]:
    """What became of findings that were tried, for the summary: predicted against measured."""
    return [] if found is None else [f"Tried, {escape(trial.id)}: {escape(trial_words(trial))}" for trial in found.trials]


def trial_words(trial: Trial) -> str:
    """One trial in a sentence."""
    overrides = f"{' '.join(trial.overrides)}: " if trial.overrides else ""
    if trial.saving_ns is None or trial.before_ns is None or trial.after_ns is None:
        return f"{overrides}not measured: {trial.why.rstrip('.')}."
    of_rate = trial.kind == THROUGHPUT
    before, after = (token_rate(ns) if of_rate else ms(ns) for ns in (trial.before_ns, trial.after_ns))
    per = "" if of_rate else f" per {trial.unit}"
    expected = ""
    if trial.predicted_ns:
        expected = f" where {token_rate(trial.predicted_ns) if of_rate else ms(trial.predicted_ns)} was predicted"
    return f"{overrides}{before} became {after}{per}{expected} ({_verdict(trial)})."


def finding_sentences(trace: Maybe[TraceAnalysis], shares: Mapping[str, float] | None = None) -> list[str]:
    """The finding that saves a request most, for the summary. `shares`: which part of a request each stage is."""
    if isinstance(trace, Missing):
        return []
    found = next((one for one in trace.findings if _saves(one)), None)
    if found is None:
        return []
    saved = escape(saving_words(found))
    if found.overrides:
        tried = f"Try {_code(found.to_try)}: this saves {saved}."
    else:
        tried = f"What to do: {escape(found.to_try.rstrip('.'))}. The change would save {saved}."
    said = [f"What to change first: {escape(found.claim)} {tried}"]
    if shares and found.stage in shares:
        said += [_of_a_request(trace, found, shares[found.stage]), _elsewhere(trace, found, max(shares, key=shares.__getitem__))]
    return [" ".join(text for text in said if text)]


def _code(words: str) -> str:
    return f"`{one_line(words).replace('`', ' ')}`"


def _saves(finding: Finding) -> bool:
    return finding.kind == "latency" and bool(finding.saving_ns)


def _of_a_request(trace: TraceAnalysis, finding: Finding, share: float) -> str:
    """The saving as a share of its stage in the trace, whose steps may be longer than the request's others, times the stage's."""
    budget = next((one for one in trace.budgets if one.stage == finding.stage and one.wall_ns), None)
    if budget is None or finding.saving_ns is None:
        return ""
    saved = share * finding.saving_ns * budget.units / budget.wall_ns
    share_words = f"about {percent(saved, 0)}" if saved >= 0.01 else "under 1 %"
    return f"That is {share_words} of a request, with {finding.confidence} confidence."


def _elsewhere(trace: TraceAnalysis, found: Finding, longest: str) -> str:
    """Why the first change is not one to the stage that takes most of the time."""
    if found.stage == longest:
        return ""
    number = next((place for place, one in enumerate(trace.findings, 1) if _saves(one) and one.stage == longest), 0)
    if number:
        return f"What saves most in {longest} is finding {number} of the report."
    return f"For {longest}, where most of the time goes, no rule has a change that makes a request faster."


def _budget(budget: BudgetTable) -> str:
    many = f"{budget.units} {budget.unit}s" if budget.units > 1 else f"one {budget.unit}"
    rows = [
        [escape(row.label), milliseconds(row.ns), milliseconds(row.ns / budget.units), percent(row.share)] for row in budget.rows
    ]
    rows.append(["sum", milliseconds(budget.wall_ns), milliseconds(budget.wall_ns / budget.units), "100.0 %"])
    said = [f"- **{escape(problem)}**\n" for problem in budget.problems] + [f"- {escape(note)}\n" for note in budget.notes]
    header = [f"{budget.stage}, {many}", "time", f"per {budget.unit}", "share"]
    return f"{table(header, rows, 'lrrr')}\nWall time from {escape(budget.wall_source)}.\n\n{''.join(said)}"


def _finding(number: int, finding: Finding) -> str:
    lines = [
        f"{number}. **{escape(finding.claim)}**",
        f"   - {_effect(finding)}; {finding.confidence} confidence: {escape(finding.because)}",
        *[f"   - {escape(row)}" for row in finding.evidence],
        f"   - try: {_code(finding.to_try) if finding.overrides else escape(finding.to_try)}",
    ]
    if finding.overrides and finding.change:
        lines.append(f"   - in other programs: {escape(finding.change)}")
    return "\n".join(lines) + "\n"


def _effect(finding: Finding) -> str:
    if finding.throughput is not None:
        return f"throughput: {escape(throughput_words(finding.throughput))}"
    return f"saves: {escape(saving_words(finding))}"


TRIAL_HEADER = ["finding", "before", "predicted", "measured", "saved", "predicted saving", "verdict"]


def trial_cells(trial: Trial) -> list[str]:
    """A row of the trials: times, or tokens per second of what is for throughput."""
    if trial.before_ns is None or trial.after_ns is None or trial.saving_ns is None:
        return [trial.id, "", "", "", "", _maybe(trial.predicted_saving_ns), f"n/a: {trial.why}"]
    if trial.kind == THROUGHPUT:
        return [
            trial.id,
            token_rate(trial.before_ns),
            "n/a" if not trial.predicted_ns else token_rate(trial.predicted_ns),
            token_rate(trial.after_ns),
            "no time: throughput",
            "no time: throughput",
            _verdict(trial),
        ]
    return [
        trial.id,
        ms(trial.before_ns),
        _maybe(trial.predicted_ns),
        ms(trial.after_ns),
        ms(trial.saving_ns),
        _maybe(trial.predicted_saving_ns),
        _verdict(trial),
    ]


def _maybe(ns: int | None) -> str:
    return "n/a" if ns is None else ms(ns)


def _verdict(trial: Trial) -> str:
    if trial.saving_ns is None or trial.error is None or trial.spread_ns is None:
        return "n/a"
    of_rate = trial.kind == THROUGHPUT
    near = f"predicted tokens/s {1 / (1 + trial.error) - 1:+.0%}" if of_rate else f"predicted time {trial.error:+.0%}"
    if abs(trial.saving_ns) <= trial.spread_ns:
        return f"no difference beyond the spread; {near}"
    if trial.saving_ns < 0:
        return f"{'fewer tokens/s' if of_rate else 'slower'}; {near}"
    better = "more tokens/s" if of_rate else "saves"
    return f"{'holds' if abs(trial.error) <= WITHIN else f'{better}, but not as predicted'}; {near}"


def token_rate(ns: int) -> str:
    """A token's share of the batch's step as tokens per second."""
    return f"{significant(1e9 / ns)} tokens/s"

"""Findings and their trials: as blocks of a report, for the terminal, as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from llm_perf_opt.analysis.trace.document import OVERLAP, Finding, ThroughputLine, TraceAnalysis
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.units import durations
from llm_perf_opt.report.document import Block, Cell, Column, Item, Items, Paragraph, Table, cell, numbers
from llm_perf_opt.report.terminal import block_text
from llm_perf_opt.report.text import duration, percent, signed_percent, significant, then

if TYPE_CHECKING:  # slow to import, and not needed to show a cached analysis
    from llm_perf_opt.analysis.run_analysis import RunAnalysis
    from llm_perf_opt.analysis.verification import Trial, Verification

THROUGHPUT = "throughput"
WITHIN = 0.25
"""A prediction within this relative error holds."""
_NOTHING = "No findings: no rule found anything above its threshold."


def findings_of(analysis: "RunAnalysis") -> Maybe[Sequence[Finding]]:
    """Return the findings, the largest saving first."""
    return then(analysis.trace, _findings_in)


def _findings_in(trace: TraceAnalysis) -> Maybe[Sequence[Finding]]:
    return trace.findings if trace.complete else Missing(trace.why)


def finding_blocks(findings: Sequence[Finding], tried: "Verification | None" = None) -> list[Block]:
    """Return every finding with its saving, its evidence, what to try, and the result of its trial."""
    blocks: list[Block] = []
    if findings:
        trials = trials_of(tried)
        items = [_item(finding, trials.get(finding.id)) for finding in findings]
        blocks.append(Items(items, "findings", ordered=True))
    else:
        blocks.append(Paragraph(_NOTHING))
    blocks += [Paragraph(OVERLAP, "foot")] if len(findings) > 1 else []
    return [*blocks, *([trials_table(tried)] if tried is not None and tried.trials else [])]


def gist_items(findings: Sequence[Finding], tried: "Verification | None") -> Items:
    """Return findings for the summary: saving, headline, and how to try each."""
    trials = trials_of(tried)
    return Items([_gist(finding, trials.get(finding.id)) for finding in findings], "gists")


def trials_of(found: "Verification | None") -> "dict[str, Trial]":
    """Return the trials by finding."""
    return {} if found is None else {trial.id: trial for trial in found.trials}


def advice_text(findings: Sequence[Finding]) -> str:
    """Return the findings for the terminal."""
    return "\n".join(block_text(block) for block in finding_blocks(findings)) + "\n"


def trials_text(found: "Verification") -> str:
    """Return predicted and measured times for the terminal."""
    return f"\n{block_text(trials_table(found))}\n"


def verification_json(found: "Verification") -> dict[str, Any]:
    """Return the trials with their derived figures."""
    trials = [
        asdict(trial) | {"saving_ns": trial.saving_ns, "predicted_ns": trial.predicted_ns, "error": trial.error}
        for trial in found.trials
    ]
    return {"base": found.base, "remeasured": found.remeasured, "trials": trials}


# --- one finding ----------------------------------------------------------------------------------------------------------


def _item(finding: Finding, trial: "Trial | None") -> Item:
    details = [*finding.evidence, f"try: {finding.to_try}"] if finding.to_try else list(finding.evidence)
    if finding.overrides and finding.change:
        details.append(f"in other programs: {finding.change}")
    if trial is not None:
        details.append(f"tried: {trial_words(replace(trial, overrides=()))}")
    effect = f"{_effect(finding)} ({finding.confidence} confidence: {finding.because})"
    return Item(f"[{finding.id}] {finding.claim}", effect, details)


def _gist(finding: Finding, trial: "Trial | None") -> Item:
    attempt = f"Try {' '.join(finding.overrides)}" if finding.overrides else "See below for the change"
    outcome = f" Tried: {trial_words(replace(trial, overrides=()))}" if trial is not None else ""
    effect = _effect(finding)
    return Item(f"{effect[0].upper()}{effect[1:]}; {finding.confidence} confidence.", f"{finding.headline} {attempt}.{outcome}")


def _effect(finding: Finding) -> str:
    if finding.throughput is not None:
        return f"throughput: {throughput_words(finding.throughput)}"
    return f"saving {saving_words(finding)}" if finding.saving_ns is None else f"saves {saving_words(finding)}"


def saving_words(finding: Finding) -> str:
    """Return the saving with its range, or why there is none."""
    if finding.saving_ns is None or finding.saving_low_ns is None or finding.saving_high_ns is None:
        return f"n/a: {finding.saving_why}"
    if finding.saving_high_ns == 0:
        return "no wall-clock time"
    within = durations(finding.saving_low_ns, finding.saving_high_ns, 3)
    return f"about {duration(finding.saving_ns, 3)} per {finding.saving_per} ({within})"


def throughput_words(found: ThroughputLine) -> str:
    """Return tokens per second now and at the larger batch, and the time per token there. This is not a saving."""
    low, high = significant(found.tokens_per_s_after_low), significant(found.tokens_per_s_after_high)
    longest = f", {duration(found.step_after_high_ns)} at worst" if found.step_after_high_ns > found.step_after_ns else ""
    return (
        f"{significant(found.tokens_per_s)} tokens/s at batch {found.batch:,}, about {significant(found.tokens_per_s_after)} "
        f"({low} to {high}) at batch {found.batch_after:,}, where a token takes about {duration(found.step_after_ns)}"
        f"{longest}, instead of {duration(found.step_ns)}"
    )


# --- trials ---------------------------------------------------------------------------------------------------------------


def trials_table(found: "Verification") -> Table:
    """Return the trials of findings."""
    names = ("before", "predicted", "measured", "saved", "predicted saving")
    table = Table(
        "trials", f"Trials, each change alone, against {found.base}", [Column("finding"), *numbers(*names), Column("verdict")]
    )
    for trial in found.trials:
        table.add(trial.id, *_trial_cells(trial))
    table.foot = f"The base was measured again: {found.remeasured}." if found.remeasured else ""
    return table


def _trial_cells(trial: "Trial") -> list[Cell | Missing | str]:
    """Return times; for a throughput finding, tokens per second."""
    if trial.before_ns is None or trial.after_ns is None or trial.saving_ns is None:
        why = Missing(trial.why or "not measured")
        return [why, why, why, why, _time(trial.predicted_saving_ns), why]
    if trial.kind == THROUGHPUT:
        none = Missing("a throughput change makes no request faster")
        predicted = cell(trial.predicted_ns, token_rate) if trial.predicted_ns else _UNPREDICTED
        measured = (cell(trial.before_ns, token_rate), predicted, cell(trial.after_ns, token_rate))
        return [*measured, none, none, _verdict(trial)]
    ns = (trial.before_ns, trial.predicted_ns, trial.after_ns, trial.saving_ns, trial.predicted_saving_ns)
    return [*[_time(value) for value in ns], _verdict(trial)]


_UNPREDICTED = Missing("no prediction")


def _time(ns: int | None) -> Cell | Missing:
    return _UNPREDICTED if ns is None else cell(ns, duration)


def trial_words(trial: "Trial") -> str:
    """Return one trial in a sentence."""
    overrides = f"{' '.join(trial.overrides)}: " if trial.overrides else ""
    if trial.saving_ns is None or trial.before_ns is None or trial.after_ns is None:
        return f"{overrides}not measured: {trial.why.rstrip('.')}."
    of_rate = trial.kind == THROUGHPUT
    show = token_rate if of_rate else duration
    per = "" if of_rate else f" per {trial.unit}"
    expected = f", predicted {show(trial.predicted_ns)}" if trial.predicted_ns else ""
    return f"{overrides}{show(trial.before_ns)} became {show(trial.after_ns)}{per}{expected} ({_verdict(trial)})."


def _verdict(trial: "Trial") -> str:
    if trial.saving_ns is None or trial.error is None or trial.spread_ns is None:
        return "n/a"
    of_rate = trial.kind == THROUGHPUT
    error = 1 / (1 + trial.error) - 1 if of_rate else trial.error
    near = f"predicted {'tokens/s' if of_rate else 'time'} {signed_percent(error, 0)}"
    if abs(trial.saving_ns) <= trial.spread_ns:
        return f"no difference beyond the spread; {near}"
    if trial.saving_ns < 0:
        return f"{'fewer tokens/s' if of_rate else 'slower'}; {near}"
    better = "more tokens/s" if of_rate else "saves"
    return f"{'holds' if abs(trial.error) <= WITHIN else f'{better}, but not as predicted'}; {near}"


def token_rate(ns: float) -> str:
    """Return the time per token of a batch as tokens per second."""
    return f"{significant(1e9 / ns)} tokens/s"


# --- in the summary -------------------------------------------------------------------------------------------------------


def finding_sentences(trace: Maybe[TraceAnalysis], shares: Mapping[str, float] | None = None) -> list[str]:
    """Return the finding that saves most, for the summary; `shares` are the shares of the stages in a request."""
    if isinstance(trace, Missing):
        return []
    found = next((finding for finding in trace.findings if _saves(finding)), None)
    if found is None:
        return []
    saved = saving_words(found)
    if found.overrides:
        tried = f"Try {found.to_try}: this saves {saved}."
    else:
        tried = f"What to do: {found.to_try.rstrip('.')}. The change would save {saved}."
    parts = [f"What to change first: {found.claim} {tried}"]
    if shares and found.stage in shares:
        longest = max(shares, key=shares.__getitem__)
        parts += [_of_a_request(trace, found, shares[found.stage]), _elsewhere(trace, found, longest)]
    return [" ".join(text for text in parts if text)]


def _saves(finding: Finding) -> bool:
    return finding.kind == "latency" and bool(finding.saving_ns)


def _of_a_request(trace: TraceAnalysis, finding: Finding, share: float) -> str:
    """Return the saving as a share of a request: its share of the stage in the trace times the share of the stage."""
    budget = next((budget for budget in trace.budgets if budget.stage == finding.stage and budget.wall_ns), None)
    if budget is None or finding.saving_ns is None:
        return ""
    saved = share * finding.saving_ns * budget.units / budget.wall_ns
    words = f"about {percent(saved, 0)}" if saved >= 0.01 else "less than 1 %"
    return f"That is {words} of a request, with {finding.confidence} confidence."


def _elsewhere(trace: TraceAnalysis, found: Finding, longest: str) -> str:
    """Return what to do about the longest stage, if the finding is about another one."""
    if found.stage == longest:
        return ""
    number = next((place for place, other in enumerate(trace.findings, 1) if _saves(other) and other.stage == longest), 0)
    if number:
        return f"The largest saving in {longest} is finding {number} of the report."
    return f"For {longest}, where most of the time goes, no rule found a change that makes a request faster."

"""Budget and findings of a run as the page shows them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llm_perf_opt.analysis.budget import BudgetKey
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.trace.document import BudgetTable, Finding
from llm_perf_opt.analysis.verification import Trial
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.report.advice import trial_words
from llm_perf_opt.report.chart_data import Use, Waterfall, coarse_waterfalls
from llm_perf_opt.report.text import milliseconds
from llm_perf_opt.report.trace_page import saving_words, throughput_words

_PLACES = {key.value: place for place, key in enumerate(BudgetKey)}
"""A row has the same color in every stage."""


@dataclass(frozen=True)
class FindingView:
    """One finding in words."""

    gist: tuple[str, str]
    """For the first screen: what it saves; then the headline and the override that tries it."""
    claim: str
    detail: str
    """What it would save, how sure that is, and what to try."""
    grounds: str
    """Why so sure, and the rows it stands on."""


def budget_of(analysis: RunAnalysis) -> Maybe[tuple[Waterfall, ...]]:
    """A waterfall per stage: of the trace's budget, or of floor and the rest where no trace tells more."""
    trace = analysis.trace
    if not isinstance(trace, Missing) and trace.complete and trace.budgets:
        return tuple(_waterfall(table) for table in trace.budgets)
    coarse = coarse_waterfalls(analysis.efficiency)
    if isinstance(coarse, Missing):
        return coarse
    why = trace.why if isinstance(trace, Missing) else trace.why or "the trace shows no device work in its stages"
    return tuple(Waterfall(one.stage, one.title, one.uses, (f"In no more detail: {why}.",)) for one in coarse)


def _waterfall(table: BudgetTable) -> Waterfall:
    """Per unit of the stage. The rows are whole nanoseconds of all units together, so a unit's are rounded once, at the end."""
    units = max(table.units, 1)
    reached = 0
    begun = 0
    uses = []
    for row in table.rows:
        begun += row.ns
        until = round(begun / units)  # rounding the running sum keeps the whole exact
        uses.append(Use(row.label, until - reached, color=_PLACES.get(row.key, 0)))
        reached = until
    per = f" per {table.unit}" if table.units > 1 else ""
    many = f"Of the {table.units} {table.unit}s in the trace, their mean. " if table.units > 1 else ""
    title = f"{table.stage}, {milliseconds(table.wall_ns / units)}{per}"
    return Waterfall(table.stage, title, tuple(uses), (f"{many}Time: {table.wall_source}.", *table.problems, *table.notes))


def findings_of(analysis: RunAnalysis) -> Maybe[Sequence[FindingView]]:
    """What to change, the largest saving first."""
    trace = analysis.trace
    if isinstance(trace, Missing):
        return trace
    if not trace.complete:
        return Missing(trace.why)
    tried = {} if analysis.verified is None else {trial.id: trial for trial in analysis.verified.trials}
    return [_view(finding, tried.get(finding.id)) for finding in trace.findings]


def _view(finding: Finding, trial: Trial | None) -> FindingView:
    words = _effect(finding)
    attempt = f"Try: {finding.to_try}" if finding.to_try else ""
    detail = f"{words} {attempt}" if attempt else words
    if trial is not None:
        detail = f"{detail} — {_tried(trial)}" if attempt else f"{detail} {_tried(trial)}"
    grounds = f"Confidence {finding.confidence}: {finding.because}. Stands on: {'; '.join(finding.evidence)}."
    attempt = f"Try {' '.join(finding.overrides)}" if finding.overrides else "What to change stands below"
    outcome = f" {_tried(trial)}" if trial is not None else ""
    return FindingView((words, f"{finding.headline} {attempt}.{outcome}"), finding.claim, detail, grounds)


def _effect(finding: Finding) -> str:
    if finding.throughput is not None:
        return f"Throughput: {throughput_words(finding.throughput)}; confidence {finding.confidence}."
    saving = saving_words(finding)
    return f"Saving {saving}." if finding.saving_ns is None else f"Saves {saving}, confidence {finding.confidence}."


def _tried(trial: Trial) -> str:
    return f"Tried: {trial_words(replace(trial, overrides=()))}"

"""Findings and their trials: as blocks of a report, for the terminal, as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from llm_perf_opt.analysis.trace.document import OVERLAP, UNPROFILED, BudgetTable, Finding, TraceAnalysis
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.secrets import shown_command
from llm_perf_opt.core.units import durations
from llm_perf_opt.report.document import Advice, AdviceCards, Banner, Block, Cell, Column, Item, Paragraph, Table, cell, numbers
from llm_perf_opt.report.terminal import block_text
from llm_perf_opt.report.text import capitalized, duration, percent, signed_percent, significant, then

if TYPE_CHECKING:  # slow to import, and not needed to show a cached analysis
    from llm_perf_opt.analysis.run_analysis import RunAnalysis
    from llm_perf_opt.analysis.verification import Trial, Verification

THROUGHPUT = "throughput"
TRUST = "trust"
WITHIN = 0.25
"""A prediction within this relative error holds."""
_NOTHING = "No findings: no rule found anything above its threshold."


@dataclass(frozen=True)
class FindingSource:
    """What a card needs to know about the run of a finding; by default, nothing."""

    command: Sequence[str] = ()
    """The command line of the run; empty for a trace."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """The share of each stage in a request."""
    budgets: Sequence[BudgetTable] = ()
    trials: "Mapping[str, Trial]" = field(default_factory=dict)
    request_ns: float = 0.0
    """Unprofiled time of a request; 0 if it is unknown."""


def source_of(analysis: "RunAnalysis") -> FindingSource:
    """Return what the cards of a run need."""
    shares = {stage.name: stage.share for stage in (analysis.stage("prefill"), analysis.stage("decode")) if stage}
    budgets = () if isinstance(analysis.trace, Missing) else analysis.trace.budgets
    whole = analysis.stage("profile")
    return FindingSource(
        analysis.manifest.command, shares, budgets, trials_of(analysis.verified), whole.time_ns.median if whole else 0.0
    )


def findings_of(analysis: "RunAnalysis") -> Maybe[Sequence[Finding]]:
    """Return the findings, the largest saving first."""
    return then(analysis.trace, _findings_in)


def _findings_in(trace: TraceAnalysis) -> Maybe[Sequence[Finding]]:
    return trace.findings if trace.complete else Missing(trace.why)


def changes(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that are changes; the others are about trust in the figures."""
    return [finding for finding in findings if finding.kind != TRUST]


def finding_blocks(findings: Sequence[Finding], source: FindingSource | None = None) -> list[Block]:
    """Return every change with its saving, its evidence, what to try, and the result of its trial."""
    found = changes(findings)
    blocks: list[Block] = [advice_cards(found, source) if found else Paragraph(_NOTHING)]
    return [*blocks, *([Paragraph(OVERLAP, "foot")] if len(found) > 1 else [])]


def advice_cards(findings: Sequence[Finding], source: FindingSource | None = None) -> AdviceCards:
    """Return findings as cards."""
    known = source or FindingSource()
    return AdviceCards([_card(finding, known) for finding in findings])


def banner_items(findings: Sequence[Finding]) -> list[Item]:
    """Return the reasons not to trust the figures: what is wrong, what it means, and as details why and what to do."""
    items = []
    for finding in findings:
        if finding.kind == TRUST:
            head = "" if not finding.title or finding.headline.startswith(finding.title) else f"{finding.title}."
            details = (_rest(finding), *finding.evidence, f"What to do: {finding.to_try}" if finding.to_try else "")
            items.append(Item(head, finding.headline, [capitalized(text) for text in details if text]))
    return items


def trials_of(found: "Verification | None") -> "dict[str, Trial]":
    """Return the trials by finding."""
    return {} if found is None else {trial.id: trial for trial in found.trials}


def advice_text(findings: Sequence[Finding], source: FindingSource | None = None) -> str:
    """Return the findings for the terminal."""
    items = banner_items(findings)
    blocks: list[Block] = [*([Banner(items)] if items else []), *finding_blocks(findings, source)]
    return "\n".join(block_text(block) for block in blocks) + "\n"


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


def _card(finding: Finding, source: FindingSource) -> Advice:
    command = change_command(finding, source.command)
    trial = source.trials.get(finding.id)
    rest = (_at_larger_batch(finding), request_words(finding, source), f"{finding.confidence} confidence")
    effect, within = _effect(finding)
    return Advice(
        finding.id,
        finding.title or finding.headline,
        effect,
        within,
        "; ".join(text for text in rest if text),
        finding.headline if finding.title else "",
        "" if trial is None else trial_words(replace(trial, overrides=())),
        command,
        "" if command else finding.to_try,
        _details(finding),
    )


def _details(finding: Finding) -> list[str]:
    because = f"{finding.confidence} confidence: {finding.because}" if finding.because else ""
    elsewhere = f"in other programs: {finding.change}" if finding.overrides and finding.change else ""
    return [text for text in (_rest(finding), *finding.evidence, because, elsewhere) if text]


def _rest(finding: Finding) -> str:
    """Return what the claim adds to the headline."""
    return finding.claim.removeprefix(finding.headline).strip()


def _effect(finding: Finding) -> tuple[str, str]:
    """Return what a change does in a few words, and the interval."""
    found = finding.throughput
    if found is not None:
        low, high = significant(found.tokens_per_s_after_low), significant(found.tokens_per_s_after_high)
        return f"raises throughput to about {significant(found.tokens_per_s_after)} tokens/s", f"{low} – {high}"
    if finding.saving_ns is None or finding.saving_low_ns is None or finding.saving_high_ns is None:
        return f"saving n/a: {finding.saving_why}", ""
    if finding.saving_high_ns == 0:
        return "saves no wall-clock time", ""
    within = durations(finding.saving_low_ns, finding.saving_high_ns, 3)
    return f"saves about {duration(finding.saving_ns, 3)} per {finding.saving_per}", within


def _at_larger_batch(finding: Finding) -> str:
    """Return the throughput now, and how long a token takes at the larger batch; empty for a change of latency."""
    found = finding.throughput
    if found is None:
        return ""
    longest = f" ({duration(found.step_after_high_ns)} at worst)" if found.step_after_high_ns > found.step_after_ns else ""
    return (
        f"{significant(found.tokens_per_s)} tokens/s at batch {found.batch:,} now; at batch {found.batch_after:,}, "
        f"a token takes about {duration(found.step_after_ns)}{longest} instead of {duration(found.step_ns)}"
    )


_FOLDERS = ("hydra.run.dir=", "artifacts.")
"""Overrides that name the folder of a run."""


def change_command(finding: Finding, command: Sequence[str] = ()) -> str:
    """Return the run's command with the overrides of the finding; for a trace or a point of a sweep, the overrides alone."""
    return changed_command(finding.overrides, command) or " ".join(finding.overrides)


def is_single_run(command: Sequence[str]) -> bool:
    """Return whether a command makes one run each time: not that of a sweep, of one of its points, or of another program."""
    sweeping = has_option(command, "-m", "--multirun", "--resume", "--point")
    return list(command[:2]) == ["llm-perf", "run"] and not sweeping


def has_option(command: Sequence[str], *names: str) -> bool:
    """Return whether a command has one of these options, also as `--name=VALUE`."""
    return any(word.partition("=")[0] in names for word in command)


def changed_command(overrides: Sequence[str], command: Sequence[str]) -> str:
    """Return the command of a run with other values; empty if it is not the command of a single run, or nothing changes."""
    if not overrides or not is_single_run(command):
        return ""
    replaced = [f"{override.partition('=')[0]}=" for override in overrides]
    kept = [word for word in command[2:] if not word.lstrip("+").startswith((*replaced, *_FOLDERS))]
    return shown_command(["llm-perf", "run", *overrides, *kept])  # what changes comes first: lines may be long


def request_words(finding: Finding, source: FindingSource) -> str:
    """Return the saving over a whole request and its share of it; empty if either is unknown."""
    budget = next((budget for budget in source.budgets if budget.stage == finding.stage and budget.wall_ns), None)
    share = source.shares.get(finding.stage)
    if budget is None or share is None or not finding.saving_ns:
        return ""
    if source.request_ns and budget.wall_source.startswith(UNPROFILED):
        saved = finding.weight_ns / source.request_ns
    else:  # a saving under the profiler, or of a request of unknown length
        saved = share * finding.saving_ns * budget.units / budget.wall_ns
    words = f"about {percent(saved, 0)}" if saved >= 0.01 else "less than 1 %"
    return f"{duration(finding.weight_ns, 3)} per request ({words} of it)"


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
    expected = f"predicted {show(trial.predicted_ns)} → " if trial.predicted_ns else ""
    return f"{overrides}{expected}measured {show(trial.after_ns)}{per}, before {show(trial.before_ns)} ({_verdict(trial)})."


def _verdict(trial: "Trial") -> str:
    from llm_perf_opt.analysis.comparison.statistics import LEAST_REPEATS  # imports numpy

    if trial.saving_ns is None or trial.error is None or trial.spread_ns is None:
        return "n/a"
    of_rate = trial.kind == THROUGHPUT
    error = 1 / (1 + trial.error) - 1 if of_rate else trial.error
    near = f"predicted {'tokens/s' if of_rate else 'time'} {signed_percent(error, 0)}"
    near += "; the tokens differ" if trial.same_tokens is False else ""
    if trial.repeats is not None and trial.repeats < LEAST_REPEATS:
        return f"too few repeats for a verdict: {trial.repeats} of {LEAST_REPEATS} (runtime.min_repeats); {near}"
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


def elsewhere_sentences(findings: Sequence[Finding], shares: Mapping[str, float]) -> list[str]:
    """Return what to do about the longest stage of a request, if the first finding is about another one."""
    saving = [(number, finding) for number, finding in enumerate(changes(findings), 1) if _saves(finding)]
    if not saving or not shares or saving[0][1].stage not in shares:
        return []
    longest = max(shares, key=shares.__getitem__)
    number = next((number for number, finding in saving if finding.stage == longest), 0)
    if number == saving[0][0]:
        return []
    if number:
        return [f"The largest saving in {longest} is finding {number} of the report."]
    return [f"For {longest}, where most of the time goes, no rule found a change that makes a request faster."]


def _saves(finding: Finding) -> bool:
    return finding.kind == "latency" and bool(finding.saving_ns)

"""stakeholder_summary.md: one page for decision makers."""

from collections.abc import Sequence

from llm_perf_opt.analysis.limits.efficiency import Efficiency
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.core.records import CleanTimings, Distribution, Missing, StageTiming, TorchPass
from llm_perf_opt.core.stages import Stage
from llm_perf_opt.report.charts import Figure
from llm_perf_opt.report.document import AdviceCards, Banner, Block, Chart, Document, Paragraph, Section, bullets, when_known
from llm_perf_opt.report.findings import (
    advice_cards,
    banner_items,
    changes,
    elsewhere_sentences,
    findings_of,
    source_of,
    trial_words,
)
from llm_perf_opt.report.run_document import ROOFLINE, WATERFALL, images_of, input_blocks, warning_blocks
from llm_perf_opt.report.run_tables import self_ns, what_ran
from llm_perf_opt.report.text import duration, fine_percent, growth, known, known_within, percent, significant, then

TOP_FINDINGS = 3
_NOTHING = "The evidence supports no change that saves enough to be listed."
_CLOSING = "Every figure is a median of unprofiled repeats; definitions, intervals and spread are in report.md."


def summary_document(analysis: RunAnalysis) -> Document:
    """Return the summary: what ran, how fast it is, what dominates, and how reliable the figures are."""
    title, timings = f"{analysis.run}: summary", analysis.timings
    if isinstance(timings, Missing):
        remedy = Section("remedy", "", [Paragraph(analysis.manifest.remedy)])
        return Document(title, f"This run has no timings: {timings.why}", "", [remedy])
    made = images_of(analysis)
    nothing: Figure = {}
    images = [Chart(image.file, image.title, nothing, image=image) for image in (WATERFALL, ROOFLINE) if image.file in made]
    measured = input_blocks(analysis)
    sections = [
        Section("narrative", "", [bullets(_narrative(analysis, timings))]),
        Section("findings", "What to change first", _changes(analysis)),
        *([Section("inputs", "What was measured", measured)] if measured else []),
        Section("warnings", "Warnings", [*warning_blocks(analysis), *images, Paragraph(_CLOSING)]),
    ]
    return Document(title, what_ran(timings), "", sections)


def _narrative(analysis: RunAnalysis, timings: CleanTimings) -> list[str]:
    """Return sentences, each with a figure of this run."""
    sentences = []
    ttft, tpot, rate = (analysis.metric(key) for key in ("ttft", "tpot", "decode_rate"))
    if ttft and isinstance(ttft.value, Distribution):
        sentences.append(f"The first token takes {duration(ttft.value.median)}{_plus_minus(ttft.value)}.")
    if tpot and rate and isinstance(tpot.value, Distribution) and isinstance(rate.value, Distribution):
        sentences.append(
            f"Each further token takes {duration(tpot.value.median)}{_plus_minus(tpot.value)}: "
            f"{significant(rate.value.median)} tokens/s for the batch of {timings.workload.batch_size}."
        )
    prefill, decode = analysis.stage("prefill"), analysis.stage("decode")
    if prefill and decode:
        longer, shorter = (decode, prefill) if decode.share >= prefill.share else (prefill, decode)
        sentences.append(
            f"Of the {duration(_whole(analysis))} of a request, {longer.name} is {percent(longer.share, 0)} "
            f"and {shorter.name} {percent(shorter.share, 0)}: most of the time goes to {longer.name}."
        )
    sentences += known(then(analysis.efficiency, lambda found: _bounds(found, analysis.stages)), [])
    sentences += known(then(analysis.drift, lambda drift: [f"Growth of a decode step with the context: {growth(drift)}."]), [])
    return [*sentences, *known(then(analysis.torch, _top_operator), [])]


def _changes(analysis: RunAnalysis) -> list[Block]:
    """Return the first findings as cards, without their details, and trials that are on none of them."""
    source = source_of(analysis)

    def build(found: Sequence[Finding]) -> list[Block]:
        items = banner_items(found)
        cards = [card._replace(details=()) for card in advice_cards(changes(found)[:TOP_FINDINGS], source).cards]
        blocks: list[Block] = [Banner([item._replace(details=()) for item in items])] if items else []
        blocks.append(AdviceCards(cards) if cards else Paragraph(_NOTHING))
        return [*blocks, *[Paragraph(text) for text in elsewhere_sentences(found, source.shares)]]

    found = known(findings_of(analysis), ())
    shown = {finding.id for finding in changes(found)[:TOP_FINDINGS]}
    others = [f"Tried {trial.id}: {trial_words(trial)}" for trial in source.trials.values() if trial.id not in shown]
    return [*when_known("Findings:", findings_of(analysis), build), *([bullets(others)] if others else [])]


def _bounds(found: Efficiency, stages: Sequence[StageTiming]) -> list[str]:
    return [*[f"{stage.binds}: {stage.because}." for stage in found.stages], *_substages(found, stages)]


def _substages(found: Efficiency, stages: Sequence[StageTiming]) -> list[str]:
    """Return the time and MFU of the sub-stages of prefill, at the best known peaks, without those inside another."""
    outer = {stage.name for stage in stages if stage.parent == Stage.PREFILL.value}
    words = []
    for entry in (entry for entry in found.substages if entry.name in outer):
        best = [mfu for each in entry.against if (mfu := known(each.mfu, None)) is not None]
        words += [f"{entry.name} {duration(entry.time_ns.median)} (MFU {fine_percent(mfu)})" for mfu in best[-1:]]
    return [f"Sub-stages of prefill: {', '.join(words)}."] if words else []


def _top_operator(torch: TorchPass) -> list[str]:
    if not torch.operators:
        return []
    top, whole = torch.operators[0], sum(map(self_ns, torch.operators)) or 1
    clock = "CPU" if isinstance(top.device_self_ns, Missing) else "device"
    share = percent(self_ns(top) / whole, 0)
    return [f"The operator with the most {clock} time is {top.name}: {share} of the total over {top.calls:,} calls."]


def _whole(analysis: RunAnalysis) -> float:
    whole = analysis.stage("profile")
    return whole.time_ns.median if whole else 0.0


def _plus_minus(value: Distribution) -> str:
    within = then(value.ci_relative, lambda relative: f"median of {value.n}, ± {percent(relative)}")
    return f" ({known(within, known_within(value, 'ns'))})"

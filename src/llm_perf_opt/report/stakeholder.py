"""stakeholder_summary.md: one page for decision makers."""

from llm_perf_opt.analysis.limits.efficiency import Efficiency
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.core.records import CleanTimings, Distribution, Missing, TorchPass
from llm_perf_opt.report.charts import Figure
from llm_perf_opt.report.document import Block, Chart, Document, Paragraph, Section, bullets
from llm_perf_opt.report.findings import finding_sentences, trial_words
from llm_perf_opt.report.run_document import ROOFLINE, WATERFALL, images_of, warning_blocks
from llm_perf_opt.report.run_tables import self_ns, what_ran
from llm_perf_opt.report.text import duration, growth, known, known_within, percent, significant, then

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
    measured: list[Block] = [bullets([note.text for note in analysis.inputs])] if analysis.inputs else []
    sections = [
        Section("narrative", "", [bullets(_narrative(analysis, timings))]),
        *([Section("inputs", "What was measured", measured)] if measured else []),
        Section("warnings", "Warnings", [*warning_blocks(analysis)[-1:], *images, Paragraph(_CLOSING)]),
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
    sentences += known(then(analysis.efficiency, _bounds), [])
    shares = {stage.name: stage.share for stage in (prefill, decode) if stage}
    sentences += finding_sentences(analysis.trace, shares)
    tried = () if analysis.verified is None else analysis.verified.trials
    sentences += [f"Tried {trial.id}: {trial_words(trial)}" for trial in tried]
    sentences += known(then(analysis.drift, lambda drift: [f"Growth of a decode step with the context: {growth(drift)}."]), [])
    return [*sentences, *known(then(analysis.torch, _top_operator), [])]


def _bounds(found: Efficiency) -> list[str]:
    return [f"{stage.binds}: {stage.because}." for stage in found.stages]


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

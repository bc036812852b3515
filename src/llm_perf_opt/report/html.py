"""report.html of a run: for who decides first, for the engineer below; from the same records as the Markdown pages."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from llm_perf_opt import __version__
from llm_perf_opt.analysis.limits.efficiency_metrics import EFFICIENCY_METRICS
from llm_perf_opt.analysis.regions.records import RegionReport
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.trace.document import OVERLAP
from llm_perf_opt.core.machine_records import Telemetry
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing
from llm_perf_opt.report.chart_data import Roofline, Waterfall, roofline
from llm_perf_opt.report.charts import icicle_chart, roofline_chart, steps_chart, telemetry_chart, waterfall_chart
from llm_perf_opt.report.device_tables import device_html_tables
from llm_perf_opt.report.efficiency import used_verdicts
from llm_perf_opt.report.environment import environment_rows
from llm_perf_opt.report.gpu_metrics import metric_html_tables
from llm_perf_opt.report.html_tables import Column, HtmlTable
from llm_perf_opt.report.kernel_remarks import stage_remarks
from llm_perf_opt.report.labels import label_html_tables
from llm_perf_opt.report.page import Absent, Block, Card, Cards, Chart, Code, Items, Page, Section, Table, Words, render
from llm_perf_opt.report.passes import passes_table
from llm_perf_opt.report.run_budget import FindingView, budget_of, findings_of
from llm_perf_opt.report.run_tables import (
    counters_table,
    energy_table,
    kernels_table,
    limits_table,
    metrics_table,
    operators_table,
    other_figures_table,
    parts_table,
    roofs_table,
    stages_table,
    telemetry_table,
    trials_table,
)
from llm_perf_opt.report.svg import roofline_svg, waterfalls_svg
from llm_perf_opt.report.text import known_within, with_unit
from llm_perf_opt.report.what_ran import what_ran

TOP_FINDINGS = 3
_CARDS = ("ttft", "tpot", "e2e", "decode_rate")
_MOST_NODES = 400


@dataclass(frozen=True)
class Shown:
    """What is drawn twice, in the page and as still images."""

    budget: Maybe[tuple[Waterfall, ...]]
    roofline: Maybe[Roofline]


def shown_of(analysis: RunAnalysis) -> Shown:
    """The charts of a run."""
    return Shown(budget_of(analysis), roofline(analysis.efficiency, analysis.kernels))


def run_page(analysis: RunAnalysis, samples: Maybe[Telemetry], regions: Maybe[RegionReport]) -> str:
    """The whole page as one file. `samples` are the sampler's readings, `regions` the ranges of the timeline."""
    shown = shown_of(analysis)
    timings = analysis.timings
    ran = f"This run has no timings: {timings.why}" if isinstance(timings, Missing) else what_ran(timings)
    sections = [
        _summary(analysis, shown),
        _all_findings(analysis),
        _timings(analysis),
        _limits(analysis, shown),
        _kernels(analysis),
        _operators(analysis),
        _tree(analysis, regions),
        _telemetry(analysis, samples),
        _environment(analysis),
        _assumptions(analysis),
        _definitions(analysis),
        _repeat(analysis),
    ]
    return render(Page(analysis.run, ran, _notice(analysis), sections, f"llm-perf {__version__}"))


def _notice(analysis: RunAnalysis) -> str:
    if analysis.damaged:
        return f"This run is damaged: {analysis.damaged.fact} {analysis.damaged.remedy}"
    manifest = analysis.manifest
    return "" if manifest.status == "complete" else f"This run is {manifest.status}: {manifest.why} {manifest.remedy}".strip()


# --- the first screen -------------------------------------------------------------------------------------------------


def _summary(analysis: RunAnalysis, shown: Shown) -> Section:
    blocks: list[Block] = []
    cards = [_card(analysis, key) for key in _CARDS]
    blocks.append(Cards([card for card in cards if card is not None]))
    blocks += _verdicts(analysis)
    if analysis.warnings:
        many = len(analysis.warnings)
        blocks.append(Words(f"{many} warning{'s' if many > 1 else ''} below the charts.", "pointer"))
    blocks += _findings(findings_of(analysis), TOP_FINDINGS)
    blocks += waterfall_blocks(shown.budget)
    blocks += _meanings(analysis)
    if analysis.inputs:
        blocks += [Words("What was measured", "heading"), Items([("", note.text) for note in analysis.inputs], "inputs")]
    if analysis.warnings:
        blocks.append(Words("Warnings", "heading"))
        blocks.append(Items([("", warning.text) for warning in analysis.warnings], "warnings"))
    elif not isinstance(analysis.timings, Missing):
        quiet = "The machine's load was not watched." if isinstance(analysis.telemetry, Missing) else "The machine was quiet."
        blocks.append(Words(f"No warnings: the spread target was reached. {quiet}"))
    return Section("summary", "Summary", blocks)


def _card(analysis: RunAnalysis, key: str) -> Card | None:
    metric = analysis.metric(key)
    if metric is None:
        return None
    value = metric.value
    if isinstance(value, Missing):
        return Card(metric.label, "n/a", value.why)
    return Card(metric.label, with_unit(value.median, metric.unit), known_within(value, metric.unit))


def _verdicts(analysis: RunAnalysis) -> list[Block]:
    found = analysis.efficiency
    if isinstance(found, Missing):
        return [Absent("What bounds each stage:", found.why)]
    return [Items([(f"{stage.binds}:", f"{stage.because}.") for stage in found.stages], "verdicts")]


def _meanings(analysis: RunAnalysis) -> list[Block]:
    """What the verdicts' words mean, below what the first screen is for."""
    found = analysis.efficiency
    if isinstance(found, Missing):
        return []
    return [Words(" ".join(f"{word.capitalize()}: {meaning}" for word, meaning in used_verdicts(found)), "foot")]


def waterfall_blocks(budget: Maybe[tuple[Waterfall, ...]]) -> list[Block]:
    """A chart per stage."""
    if isinstance(budget, Missing):
        return [Absent("Where the time goes:", budget.why)]
    return [
        Chart(
            f"waterfall-{number}",
            f"Where the time goes: {data.title}",
            waterfall_chart(data),
            waterfalls_svg([data]),
            data.notes,
            half=True,
        )
        for number, data in enumerate(budget)
    ]


def _findings(found: Maybe[Sequence[FindingView]], most: int) -> list[Block]:
    if isinstance(found, Missing):
        return [Absent("What to change first:", found.why)]
    if not found:
        return [Words("What to change first: nothing that the evidence supports saves enough to be named.")]
    shown = [finding.gist for finding in found[:most]]
    more = len(found) - most
    rest = f" {more} more {'is' if more == 1 else 'are'} below, with what all of them stand on." if more > 0 else ""
    return [Words("What to change first", "heading"), Items(shown, "gists"), Words(f"{OVERLAP}{rest}", "foot")]


def _all_findings(analysis: RunAnalysis) -> Section:
    found = findings_of(analysis)
    if isinstance(found, Missing):
        return Section("findings", "Findings", [Absent("Findings:", found.why)])
    items = [(finding.claim, f"{finding.detail} — {finding.grounds}") for finding in found]
    blocks: list[Block] = [Items(items, "findings") if items else Words("No rule found anything worth naming.")]
    if analysis.verified is not None and analysis.verified.trials:
        blocks.append(Table(trials_table(analysis.verified)))
    return Section("findings", "Findings", blocks)


# --- below it ---------------------------------------------------------------------------------------------------------


def _timings(analysis: RunAnalysis) -> Section:
    timings = analysis.timings
    if isinstance(timings, Missing):
        return Section("timings", "Timings", [Absent("Timings:", timings.why)])
    blocks: list[Block] = [Table(metrics_table(analysis)), Table(stages_table(analysis))]
    chart = steps_chart(timings)
    if isinstance(chart, Missing):
        blocks.append(Absent("Decode steps over the context:", chart.why))
    else:
        blocks.append(Chart("steps", "Decode steps as the context grows, unprofiled", chart))
    blocks += [Table(made) for made in (*device_html_tables(analysis.trace), *label_html_tables(analysis.trace))]
    blocks.append(Table(other_figures_table(analysis, timings)))
    return Section("timings", "Stages and steps", blocks)


def _limits(analysis: RunAnalysis, shown: Shown) -> Section:
    found = analysis.efficiency
    if isinstance(found, Missing):
        return Section("limits", "Limits", [Absent("Roofline:", found.why)])
    blocks: list[Block] = []
    if isinstance(shown.roofline, Missing):
        blocks.append(Absent("Roofline:", shown.roofline.why))
    else:
        data = shown.roofline
        caption = "Roofline: what ran, below the limits of the datasheet and of this machine; larger marks took longer"
        blocks.append(Chart("roofline", caption, roofline_chart(data), roofline_svg(data), data.left_out))
    hfus = () if isinstance(analysis.kernels, Missing) else analysis.kernels.hfus
    blocks += [Table(roofs_table(found)), Table(limits_table(found, hfus)), Table(parts_table(found))]
    blocks += [Words(note, "foot") for note in found.notes]
    return Section("limits", "Roofline and limits", blocks)


def _kernels(analysis: RunAnalysis) -> Section:
    found = analysis.kernels
    if isinstance(found, Missing):
        return Section("kernel-list", "Kernels", [Absent("Kernels:", found.why)])
    blocks: list[Block] = [Table(kernels_table(found))]
    for stage in found.stages:
        counted = stage.counters
        if isinstance(counted, Missing):
            blocks.append(Absent(f"Counters of {stage.stage}:", counted.why))
    if any(not isinstance(stage.counters, Missing) for stage in found.stages):
        blocks.append(Table(counters_table(found)))
    blocks += [Table(made) for made in metric_html_tables(analysis.trace)]
    blocks += [Words(f"{stage.stage}: {remark}", "foot") for stage in found.stages for remark in stage_remarks(stage)]
    blocks += [Words(f"Kernels of {stage} are from {source}.", "foot") for stage, source in found.sources.items()]
    blocks += [Words(note, "foot") for note in found.notes]
    return Section("kernel-list", "Kernels and counters", blocks)


def _operators(analysis: RunAnalysis) -> Section:
    torch = analysis.torch
    if isinstance(torch, Missing):
        return Section("operator-list", "Operators", [Absent("Operators:", torch.why)])
    factors = [
        f"{stage.name} × {stage.inflation:.2f}"
        for stage in analysis.stages
        if not isinstance(stage.inflation, Missing) and stage.name in ("prefill", "decode")
    ]
    words = (
        f"torch.profiler, preset {torch.preset}, prefill and {torch.decode_steps} decode steps. Its times say where time goes, "
        f"not how much there is: {', '.join(factors) or 'no unprofiled time to compare'} of the unprofiled."
    )
    return Section("operator-list", "Operators", [Words(words), Table(operators_table(torch))])


def _tree(analysis: RunAnalysis, regions: Maybe[RegionReport]) -> Section:
    nodes, what = _nodes(analysis, regions)
    chart = nodes if isinstance(nodes, Missing) else icicle_chart(nodes, what)
    if isinstance(chart, Missing):
        return Section("tree", "Model by time", [Absent("Parts of the model by time:", chart.why)])
    return Section("tree", "Model by time", [Chart("icicle", f"Parts of the model by {what}; a click opens a part", chart)])


Nodes = list[tuple[tuple[str, ...], int]]


def _nodes(analysis: RunAnalysis, regions: Maybe[RegionReport]) -> tuple[Maybe[Nodes], str]:
    """The parts that the torch pass labeled; where there are none, the ranges of the timeline."""
    torch = analysis.torch
    parts = torch if isinstance(torch, Missing) else torch.parts
    if not isinstance(parts, Missing) and not isinstance(torch, Missing):
        totals: dict[str, int] = {}
        for part in parts:
            totals[part.stage] = totals.get(part.stage, 0) + part.time_ns
        nodes: Nodes = [((stage,), ns) for stage, ns in totals.items()]
        nodes += [((part.stage, part.part), part.time_ns) for part in parts]
        clock = "host time" if isinstance(torch.activity, Missing) else "kernel time"
        return nodes, f"{clock} under torch.profiler (prefill and {torch.decode_steps} decode steps)"
    if not isinstance(regions, Missing) and regions.groups and any(region.kernel_ns for region in regions.groups[0].regions):
        found = [(region.path, region.kernel_ns) for region in regions.groups[0].regions]
        found.sort(key=lambda node: len(node[0]))
        return found[:_MOST_NODES], "kernel time in the ranges of the timeline"
    return parts if isinstance(parts, Missing) else Missing("nothing was labeled"), ""


def _telemetry(analysis: RunAnalysis, samples: Maybe[Telemetry]) -> Section:
    summary = analysis.telemetry
    if isinstance(summary, Missing):
        return Section("telemetry", "Power, clocks and load", [Absent("Readings:", summary.why)])
    blocks: list[Block] = [Words(summary.note, "foot")] if summary.note else []
    chart: Maybe[tuple[dict[str, object], str]] = (
        samples if isinstance(samples, Missing) else _readings(samples, analysis.timings)
    )
    if isinstance(chart, Missing):
        blocks.append(Absent("Readings over time:", chart.why))
    else:
        figure, note = chart
        caption = "Readings over time; blue: the measured repeats, orange: their prefill"
        blocks.append(Chart("readings-chart", caption, figure, notes=[note] if note else []))
    blocks += [Table(telemetry_table(summary)), Table(energy_table(summary))]
    return Section("telemetry", "Power, clocks and load", blocks)


def _readings(samples: Telemetry, timings: Maybe[CleanTimings]) -> Maybe[tuple[dict[str, object], str]]:
    return timings if isinstance(timings, Missing) else telemetry_chart(samples, timings)


def _environment(analysis: RunAnalysis) -> Section:
    blocks: list[Block] = []
    if analysis.env:
        table = HtmlTable("environment-table", "Machine and software", [Column("what"), Column("value")])
        for name, value in environment_rows(analysis.env, analysis.timings):
            table.add(name, value)
        blocks.append(Table(table))
    else:
        blocks.append(Absent("Environment:", "env.json was not written before the run ended, or is damaged"))
    blocks.append(Table(passes_table(analysis)))
    return Section("environment", "Environment and passes", blocks)


def _assumptions(analysis: RunAnalysis) -> Section:
    items = [("", text) for text in analysis.assumptions]
    return Section("assumptions", "Assumptions", [Items(items) if items else Absent("Assumptions:", "nothing was measured")])


_TERMS = (
    ("Share", "of a stage: its time over the time of all repeats; of a kernel: its time over the kernel time of its stage."),
    (
        "Rates of a kernel",
        "counted FLOPs and DRAM bytes over its time in the timeline; of a part: the cost model's over its time.",
    ),
    ("n/a", "a value that could not be had; the mark beside it leads to the reason below the table."),
)


def _definitions(analysis: RunAnalysis) -> Section:
    items = [(f"{metric.label}:", metric.definition) for metric in analysis.metrics]
    items += [(f"{metric.label} = {metric.formula}.", metric.definition) for metric in EFFICIENCY_METRICS]
    items += [(f"{name}:", text) for name, text in _TERMS]
    return Section("definitions", "Definitions", [Items(items)])


def _repeat(analysis: RunAnalysis) -> Section:
    blocks: list[Block] = [Words("The run:"), Code(shlex.join(analysis.manifest.command))]
    blocks += [Words("This page anew, from the run's folder:"), Code("llm-perf report RUN")]
    passes = [(f"{entry.name}:", shlex.join(entry.argv)) for entry in analysis.manifest.passes if entry.argv]
    blocks += [Words("What each pass started:"), Items(passes, "commands")] if passes else []
    return Section("repeat", "To repeat", blocks)

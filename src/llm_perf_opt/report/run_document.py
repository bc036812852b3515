"""The report of a run, rendered as report.html and report.md: the summary first, then the details."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from llm_perf_opt.analysis.kernels.evidence import KernelEvidence
from llm_perf_opt.analysis.limits.binding import EFFICIENCY_METRICS, EVIDENCE
from llm_perf_opt.analysis.limits.efficiency import Efficiency
from llm_perf_opt.analysis.regions.records import RegionReport
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.telemetry import TelemetrySummary
from llm_perf_opt.analysis.trace.document import ON_CPU, TraceAnalysis
from llm_perf_opt.core.machine_records import Telemetry
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing, TorchPass
from llm_perf_opt.core.run_status import status_of
from llm_perf_opt.core.secrets import shown_command
from llm_perf_opt.report.chart_data import Roofline, Waterfall, budget_of, roofline
from llm_perf_opt.report.charts import Figure, icicle_chart, roofline_chart, steps_chart, telemetry_chart, waterfall_chart
from llm_perf_opt.report.document import (
    Block,
    Chart,
    Code,
    Document,
    Image,
    Item,
    Items,
    Paragraph,
    Section,
    Unavailable,
    bullets,
    when_known,
)
from llm_perf_opt.report.efficiency import (
    components_table,
    limits_table,
    peaks_table,
    stage_facts,
    substage_limits_tables,
    used_verdicts,
    verdict_items,
)
from llm_perf_opt.report.engine_tables import engine_memory_tables, engine_tables
from llm_perf_opt.report.findings import finding_blocks, findings_of, has_option, source_of, trials_table
from llm_perf_opt.report.graph_tables import structure_tables, without_operator
from llm_perf_opt.report.kernel_tables import MOST_ROWS, kernel_blocks, provenance
from llm_perf_opt.report.overview import overview_blocks
from llm_perf_opt.report.run_ranks import rank_sections
from llm_perf_opt.report.run_tables import (
    energy_table,
    environment_table,
    exporter_tables,
    metrics_table,
    operators_table,
    other_figures_table,
    passes_table,
    stages_table,
    substage_tables,
    telemetry_table,
    what_ran,
)
from llm_perf_opt.report.svg import roofline_svg, waterfalls_svg
from llm_perf_opt.report.text import capitalized, known, then, times
from llm_perf_opt.report.trace_document import budget_table, component_tables, device_tables, gpu_metric_tables, label_tables

WATERFALL = Image("Where the time goes", "waterfall.svg")
ROOFLINE = Image("Roofline", "roofline.svg")
_MOST_NODES = 400
_NO_ENV = "env.json was not written before the run ended, or is damaged"


def run_document(analysis: RunAnalysis, samples: Maybe[Telemetry], regions: Maybe[RegionReport]) -> Document:
    """Return the report of a run; `samples` are the readings of the sampler, `regions` the NVTX ranges of the timeline."""
    timings = analysis.timings
    ran = f"This run has no timings: {timings.why}" if isinstance(timings, Missing) else what_ran(timings)
    sections = [
        _summary(analysis),
        _findings(analysis),
        _budget(analysis),
        *_titled("warnings", "Warnings", warning_blocks(analysis)),
        *_titled("inputs", "What was measured", input_blocks(analysis)),
        _timings(analysis),
        Section("limits", "Roofline", when_known("Roofline:", analysis.efficiency, lambda found: _limits(analysis, found))),
        *rank_sections(analysis.ranks),
        _kernels(analysis),
        _operators(analysis),
        _tree(analysis, regions),
        _telemetry(analysis, samples),
        _environment(analysis),
        Section("assumptions", "Assumptions", _assumptions(analysis)),
        _definitions(analysis),
        _repeat(analysis),
    ]
    return Document(analysis.run, ran, notice_of(analysis), sections)


def operators_document(analysis: RunAnalysis) -> Document:
    """Return the page with every operator of the torch pass."""
    blocks = when_known("Operators:", analysis.torch, lambda torch: _torch_blocks(analysis, torch, None))
    return Document("Operators", "", "", [Section("operators", "", blocks)])


def images_of(analysis: RunAnalysis) -> dict[str, str]:
    """Return the SVG images of the charts of a run by file name."""
    shown = {
        WATERFALL.file: then(budget_of(analysis), waterfalls_svg),
        ROOFLINE.file: then(roofline(analysis.efficiency, analysis.kernels), roofline_svg),
    }
    return {name: svg for name, svg in shown.items() if not isinstance(svg, Missing)}


def notice_of(analysis: RunAnalysis) -> str:
    """Return a notice if the run is damaged or not complete, with what to do; otherwise empty."""
    if analysis.damaged:
        return f"This run is {status_of(analysis.damaged)}: {analysis.damaged.fact} {analysis.damaged.remedy}"
    manifest = analysis.manifest
    return "" if manifest.status == "complete" else f"This run is {manifest.status}: {manifest.why} {manifest.remedy}".strip()


# --- summary -------------------------------------------------------------------------------------------------


def _summary(analysis: RunAnalysis) -> Section:
    return Section("summary", "Summary", [*overview_blocks(analysis), *_without_bars(analysis)])


def _without_bars(analysis: RunAnalysis) -> list[Block]:
    """Return why the summary cannot show where the time goes, if it cannot."""
    return when_known("Where the time goes:", budget_of(analysis), lambda _: [])


def _findings(analysis: RunAnalysis) -> Section:
    tried = analysis.verified
    trials = [trials_table(tried)] if tried is not None and tried.trials else []
    blocks = when_known("Findings:", findings_of(analysis), lambda found: finding_blocks(found, source_of(analysis)))
    return Section("findings", "What to change first", [*blocks, *trials])


def _titled(name: str, title: str, blocks: Sequence[Block]) -> list[Section]:
    """Return a section, unless it has nothing to show."""
    return [Section(name, title, blocks)] if blocks else []


def input_blocks(analysis: RunAnalysis) -> list[Block]:
    """Return notes on the prompts and weights, if anything was measured."""
    return [bullets([note.text for note in analysis.inputs], "inputs")] if analysis.inputs else []


def warning_blocks(analysis: RunAnalysis) -> list[Block]:
    """Return the warnings, or a paragraph that there are none."""
    if analysis.warnings:
        return [bullets([warning.text for warning in analysis.warnings], "warnings")]
    if isinstance(analysis.timings, Missing):
        return []
    quiet = "The load of the machine was not sampled." if isinstance(analysis.telemetry, Missing) else "The machine was quiet."
    return [Paragraph(f"No warnings: the spread target was reached. {quiet}")]


def waterfall_charts(waterfalls: Sequence[Waterfall]) -> list[Block]:
    """Return a chart per stage."""
    return [
        Chart(
            f"waterfall-{number}",
            f"Where the time goes: {data.title}",
            waterfall_chart(data),
            waterfalls_svg([data]),
            data.notes,
            half=True,
            image=WATERFALL,
        )
        for number, data in enumerate(waterfalls)
    ]


# --- details ---------------------------------------------------------------------------------------------------------


def _budget(analysis: RunAnalysis) -> Section:
    found = known(budget_of(analysis), ())
    if not isinstance(analysis.trace, Missing) and analysis.trace.complete and analysis.trace.budgets:
        found = tuple(replace(data, notes=()) for data in found)  # the tables below have them
    charts = waterfall_charts(found)
    return Section("budget", "Where the time goes", [*charts, *when_known("Budget:", analysis.trace, budget_blocks)])


def budget_blocks(trace: TraceAnalysis) -> list[Block]:
    """Return the budget of each stage, with its problems."""
    if not trace.budgets:
        return [Unavailable("Budget:", trace.why or f"the trace has no stages: {trace.stage_why}")]
    work = "Operator" if trace.device == ON_CPU else "Kernel"
    stages = f"stages by {trace.stage_method}" + (f" ({trace.stage_why})" if trace.stage_why else "")
    blocks: list[Block] = [
        Paragraph(f"The rows add up exactly to the wall time. {work} times come from {trace.source}; {stages}.")
    ]
    for number, budget in enumerate(trace.budgets):
        blocks += [bullets([f"{capitalized(text)}." for text in budget.problems], "warnings")] if budget.problems else []
        blocks += [budget_table(number, budget), *component_tables(number, budget)]
    return [*blocks, *structure_tables(trace.components)]


def _timings(analysis: RunAnalysis) -> Section:
    blocks = when_known("Timings:", analysis.timings, lambda timings: _timed(analysis, timings))
    return Section("timings", "Stages and steps", blocks)


def _timed(analysis: RunAnalysis, timings: CleanTimings) -> list[Block]:
    none = analysis.damaged.fact if analysis.damaged else "no iteration was measured"
    stages: list[Block] = [stages_table(analysis)] if analysis.stages else [Unavailable("Stages:", none)]
    steps = when_known(
        "Decode steps over the context:",
        steps_chart(timings),
        lambda chart: [Chart("steps", "Decode steps as the context grows, unprofiled", chart)],
    )
    traced: list[Block] = []
    if not isinstance(analysis.trace, Missing):
        traced = [*device_tables(analysis.trace.devices), *label_tables(analysis.trace.labels)]
    tables = [metrics_table(analysis), *stages, *substage_tables(analysis.stages)]
    return [*tables, *steps, *traced, other_figures_table(analysis, timings), *engine_memory_tables(timings)]


def _limits(analysis: RunAnalysis, found: Efficiency) -> list[Block]:
    hfus = () if isinstance(analysis.kernels, Missing) else analysis.kernels.hfus
    tables = [peaks_table(found), limits_table(found, hfus), *substage_limits_tables(found), components_table(found)]
    charts = when_known("Roofline:", roofline(found, analysis.kernels), _roofline_charts)
    meanings = " ".join([*[f"{word.capitalize()}: {meaning}" for word, meaning in used_verdicts(found)], EVIDENCE])
    notes = [bullets(found.notes, "foot")] if found.notes else []
    return [verdict_items(found), Paragraph(meanings, "foot"), *charts, stage_facts(found), *tables, *notes]


def _roofline_charts(data: Roofline) -> list[Block]:
    caption = "Roofline: stages, components and kernels below the datasheet and measured peaks; larger marks took longer"
    return [Chart("roofline", caption, roofline_chart(data), roofline_svg(data), data.left_out, image=ROOFLINE)]


def _kernels(analysis: RunAnalysis) -> Section:
    def build(found: KernelEvidence) -> list[Block]:
        sampled = () if isinstance(analysis.trace, Missing) else analysis.trace.gpu_metrics
        sources = provenance(found)
        notes = [bullets(sources, "foot")] if sources else []
        return [*kernel_blocks(found.stages, found.hfus), *gpu_metric_tables(sampled), *notes]

    return Section("kernel-list", "Kernels and counters", when_known("Kernels:", analysis.kernels, build))


def _operators(analysis: RunAnalysis) -> Section:
    blocks = when_known("Operators:", analysis.torch, lambda torch: _torch_blocks(analysis, torch, MOST_ROWS))
    return Section("operator-list", "Operators", blocks)


def _torch_blocks(analysis: RunAnalysis, torch: TorchPass, most: int | None) -> list[Block]:
    timed = [stage for stage in analysis.stages if stage.name in ("prefill", "decode")]
    factors = [text for stage in timed if (text := known(then(stage.inflation, _factor(stage.name)), ""))]
    inflated = (
        f"compared with the unprofiled pass, {', '.join(factors)}"
        if factors
        else "inflation n/a: no unprofiled time to compare with"
    )
    text = (
        f"torch.profiler, preset {torch.preset}, prefill and {torch.decode_steps} decode steps: {len(torch.operators)} operators "
        f"by self time. Its times show where the time goes, not how long it takes: {inflated}. "
        f"The trace is raw/torch/{torch.trace_file}."
    )
    return [Paragraph(text + without_operator(analysis.trace)), operators_table(torch.operators, most)]


def _factor(stage: str) -> Callable[[float], str]:
    return lambda inflation: f"{stage} {times(inflation)}"


def _tree(analysis: RunAnalysis, regions: Maybe[RegionReport]) -> Section:
    nodes, what = _nodes(analysis, regions)
    caption = f"Components of the model by {what}; click a component to open it"
    blocks = when_known(
        "Components of the model by time:",
        then(nodes, lambda found: icicle_chart(found, what)),
        lambda chart: [Chart("icicle", caption, chart)],
    )
    return Section("tree", "Model by time", blocks)


Nodes = list[tuple[tuple[str, ...], int]]


def _nodes(analysis: RunAnalysis, regions: Maybe[RegionReport]) -> tuple[Maybe[Nodes], str]:
    """Return the components that the torch pass labeled; without any, the ranges of the timeline."""
    torch = analysis.torch
    parts = then(torch, lambda found: found.parts)
    if not isinstance(parts, Missing) and not isinstance(torch, Missing):
        totals: dict[str, int] = {}
        for part in parts:
            totals[part.stage] = totals.get(part.stage, 0) + part.time_ns
        nodes: Nodes = [((stage,), ns) for stage, ns in totals.items()]
        nodes += [((part.stage, part.part), part.time_ns) for part in parts]
        clock = "host time" if isinstance(torch.activity, Missing) else "kernel time"
        return nodes, f"{clock} under torch.profiler (prefill and {torch.decode_steps} decode steps)"
    ranges = known(then(regions, lambda report: report.groups), ())
    if ranges and any(region.kernel_ns for region in ranges[0].regions):
        found = sorted(((region.path, region.kernel_ns) for region in ranges[0].regions), key=lambda node: len(node[0]))
        return found[:_MOST_NODES], "kernel time in the ranges of the timeline"
    return then(parts, lambda _: Missing("nothing was labeled")), ""


def _telemetry(analysis: RunAnalysis, samples: Maybe[Telemetry]) -> Section:
    def build(summary: TelemetrySummary) -> list[Block]:
        drawn = then(samples, lambda readings: then(analysis.timings, lambda timings: telemetry_chart(readings, timings)))
        note = [Paragraph(summary.note, "foot")] if summary.note else []
        charts = when_known("Readings over time:", drawn, _readings_charts)
        return [*note, *charts, telemetry_table(summary), energy_table(summary), *exporter_tables(summary)]

    return Section("telemetry", "Power, clocks and load", when_known("Readings:", analysis.telemetry, build))


def _readings_charts(drawn: tuple[Figure, str]) -> list[Block]:
    figure, note = drawn
    caption = "Readings over time; blue: the measured repeats, orange: their prefill"
    return [Chart("readings-chart", caption, figure, notes=[note] if note else [])]


def _environment(analysis: RunAnalysis) -> Section:
    machine: Block = environment_table(analysis.env, analysis.timings) if analysis.env else Unavailable("Environment:", _NO_ENV)
    return Section("environment", "Environment and passes", [machine, passes_table(analysis), *engine_tables(analysis)])


def _assumptions(analysis: RunAnalysis) -> list[Block]:
    return [bullets(analysis.assumptions) if analysis.assumptions else Unavailable("Assumptions:", "nothing was measured")]


_TERMS = (
    ("Share", "for a stage, its time over the time of all repeats; for a kernel, its time over the kernel time of its stage."),
    (
        "Rates",
        "for a kernel, counted FLOPs and DRAM bytes over its time in the timeline; for a component, those of the cost model.",
    ),
    ("n/a", "the value is missing; the mark refers to the reason below the table."),
)


def _definitions(analysis: RunAnalysis) -> Section:
    items = [Item(f"{metric.label}:", metric.definition) for metric in analysis.metrics]
    items += [Item(f"{metric.label} = {metric.formula}.", metric.definition) for metric in EFFICIENCY_METRICS]
    items += [Item(f"{name}:", text) for name, text in _TERMS]
    return Section("definitions", "Definitions", [Items(items)])


def _repeat(analysis: RunAnalysis) -> Section:
    command = analysis.manifest.command
    blocks: list[Block] = [Paragraph("The run:"), Code(shown_command(command))]
    if has_option(command, "--point"):
        blocks.append(Paragraph("A point that is complete is not run again: move or remove its folder first."))
    blocks += [Paragraph("To regenerate the reports from the run folder:"), Code("llm-perf report RUN")]
    passes = [Item(f"{entry.name}:", shown_command(entry.argv)) for entry in analysis.manifest.passes if entry.argv]
    blocks += [Paragraph("The command of each pass:"), Items(passes, "commands")] if passes else []
    return Section("repeat", "To repeat", blocks)

"""Metrics of the GPU that nsys sampled, as means by stage."""

from collections.abc import Sequence

from llm_perf_opt.analysis.trace.document import GpuMetricLine, TraceAnalysis
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.report.html_tables import Cell, Column, HtmlTable, name_cell, numbers
from llm_perf_opt.report.text import escape, significant, table

SAMPLED = (
    "Means of the samples that nsys took while the stage's work ran on the device, idle time between its kernels counted, below "
    "the profiler. Units are in the names, percent unless they tell another; in brackets the number of samples."
)
_WHOLE = "all work"


def metric_header(lines: Sequence[GpuMetricLine]) -> list[str]:
    """Metric, device where there are several, then the stages."""
    several = len({line.device for line in lines}) > 1
    return ["metric", *(["device"] if several else []), *[stage or _WHOLE for stage in _stages(lines)]]


def metric_rows(lines: Sequence[GpuMetricLine]) -> list[list[str]]:
    """One row per metric and device, one column per stage."""
    found = {(line.metric, line.device, line.stage): line for line in lines}
    several = len({line.device for line in lines}) > 1
    rows = []
    for metric, device in dict.fromkeys((line.metric, line.device) for line in lines):
        cells = [_cell(found.get((metric, device, stage))) for stage in _stages(lines)]
        rows.append([metric, *([str(device)] if several else []), *cells])
    return rows


def metrics_section(trace: Maybe[TraceAnalysis]) -> str:
    """For report.md; empty where nothing was sampled."""
    if isinstance(trace, Missing) or not trace.gpu_metrics:
        return ""
    header = metric_header(trace.gpu_metrics)
    rows = [[escape(row[0]), *row[1:]] for row in metric_rows(trace.gpu_metrics)]
    return f"## Metrics of the GPU\n\n{SAMPLED}\n\n{table(header, rows, 'l' + 'r' * (len(header) - 1))}"


def metric_html_tables(trace: Maybe[TraceAnalysis]) -> list[HtmlTable]:
    """For report.html; none where nothing was sampled."""
    if isinstance(trace, Missing) or not trace.gpu_metrics:
        return []
    header = metric_header(trace.gpu_metrics)
    made = HtmlTable("gpu-metrics", "Metrics of the GPU, sampled by nsys", [Column(header[0]), *numbers(*header[1:])])
    for row in metric_rows(trace.gpu_metrics):
        made.add(name_cell(row[0]), *map(Cell, row[1:]))
    made.foot = SAMPLED
    return [made]


def _stages(lines: Sequence[GpuMetricLine]) -> list[str]:
    return list(dict.fromkeys(line.stage for line in lines))


def _cell(line: GpuMetricLine | None) -> str:
    return "n/a: no sample" if line is None else f"{significant(line.mean, 3)} ({line.samples:,})"

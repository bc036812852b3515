"""Sampled metrics in every page, and nowhere where nothing was sampled."""

from msgspec.structs import replace

from llm_perf_opt.analysis.trace.document import GpuMetricLine
from llm_perf_opt.core.records import Missing
from llm_perf_opt.report.gpu_metrics import metric_header, metric_html_tables, metric_rows, metrics_section
from llm_perf_opt.report.html import run_page
from llm_perf_opt.report.markdown import report
from pages import full_analysis, readings, trace_analysis

LINES = [
    GpuMetricLine("", 0, "SMs Active", 10, 12.5, 0, 40),
    GpuMetricLine("", 0, "<b>|x", 10, 3.0, 3, 3),
    GpuMetricLine("decode", 0, "SMs Active", 4, 33.333, 20, 40),
]


def test_metrics_are_rows_and_stages_columns() -> None:
    assert metric_header(LINES) == ["metric", "all work", "decode"]
    assert metric_rows(LINES) == [["SMs Active", "12.5 (10)", "33.3 (4)"], ["<b>|x", "3.00 (10)", "n/a: no sample"]]
    both = [*LINES, GpuMetricLine("", 1, "SMs Active", 10, 1.0, 0, 2)]
    assert metric_header(both)[:2] == ["metric", "device"]
    assert metric_rows(both)[-1] == ["SMs Active", "1", "1.00 (10)", "n/a: no sample"]


def test_names_are_data_in_every_page() -> None:
    analysis = full_analysis(trace=replace(trace_analysis(), gpu_metrics=LINES))
    assert "\\<b\\>\\|x" in report(analysis)
    page = run_page(analysis, readings(), Missing("no ranges"))
    assert "&lt;b&gt;|x" in page
    assert "<b>|x" not in page


def test_nothing_sampled_nothing_shown() -> None:
    assert metrics_section(trace_analysis()) == ""
    assert metric_html_tables(Missing("no trace")) == []
    assert "Metrics of the GPU" not in report(full_analysis())

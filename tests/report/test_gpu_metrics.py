"""Sampled metrics in every page, and nowhere where nothing was sampled."""

from msgspec.structs import replace

from llm_perf_opt.analysis.trace.document import GpuMetricLine
from llm_perf_opt.core.records import Missing
from llm_perf_opt.report.trace_document import gpu_metric_tables
from pages import full_analysis, readings, trace_analysis
from rendered import report, run_page

LINES = [
    GpuMetricLine("", 0, "SMs Active", 10, 12.5, 0, 40),
    GpuMetricLine("", 0, "<b>|x", 10, 3.0, 3, 3),
    GpuMetricLine("decode", 0, "SMs Active", 4, 33.333, 20, 40),
]


def texts(lines: list[GpuMetricLine]) -> list[list[str]]:
    (table,) = gpu_metric_tables(lines)
    assert table.reasons == ["no sample"]
    return [[column.name for column in table.columns], *[[cell.text for cell in row] for row in table.rows]]


def test_metrics_are_rows_and_stages_columns() -> None:
    assert texts(LINES) == [
        ["metric", "all work", "decode"],
        ["SMs Active", "12.5 (10)", "33.3 (4)"],
        ["<b>|x", "3.00 (10)", "n/a"],
    ]
    both = texts([*LINES, GpuMetricLine("", 1, "SMs Active", 10, 1.0, 0, 2)])
    assert both[0][:2] == ["metric", "device"]
    assert both[-1] == ["SMs Active", "1", "1.00 (10)", "n/a"]


def test_names_are_data_in_every_page() -> None:
    analysis = full_analysis(trace=replace(trace_analysis(), gpu_metrics=LINES))
    assert "\\<b\\>\\|x" in report(analysis)
    page = run_page(analysis, readings(), Missing("no ranges"))
    assert "&lt;b&gt;|x" in page
    assert "<b>|x" not in page


def test_nothing_sampled_nothing_shown() -> None:
    assert gpu_metric_tables([]) == []
    assert "sampled by nsys" not in report(full_analysis())

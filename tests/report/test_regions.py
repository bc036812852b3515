"""The page of NVTX regions."""

from dataclasses import replace

from kernel_fixtures import launch
from llm_perf_opt.analysis.regions.counters import CountedStage
from llm_perf_opt.analysis.regions.records import Selection
from llm_perf_opt.analysis.regions.regions import RegionOptions, regions
from llm_perf_opt.core.records import Missing
from llm_perf_opt.report.markdown import escape
from llm_perf_opt.traces.events import RangeKind, WorkKind
from llm_perf_opt.traces.health import examined
from llm_perf_opt.traces.nsys_sqlite import read_nsys
from nsys_databases import DECODE, TRUNCATED
from rendered import regions_page
from trace_builders import Builder


def test_the_real_decode_report() -> None:
    page = regions_page(regions(examined(read_nsys(DECODE))))
    assert "## Process 2517 python3, device 0 (NVIDIA H200)" in page
    assert "| decode/decode_step | 8 | 654.0 ms | 4.651 ms | 100.0 % | 4.651 ms |" in page
    sums = "outermost regions and the rows below them have 4,651,439 ns of kernel time, the trace has 4,651,439 ns"
    assert f"The table adds up: {sums}" in page


def test_the_truncated_report_shows_problems_and_no_sums() -> None:
    page = regions_page(regions(examined(read_nsys(TRUNCATED))))
    assert "**This trace is incomplete.**" in page
    assert "8 of 8 decode_step" in page
    assert "kernel time |" not in page
    assert "n/a" in page


def test_names_cannot_become_markup() -> None:
    made = Builder()
    made.range(0, 100, "<script>|`x`|\n# heading")
    made.range(0, 100, "[a](http://b)", kind=RangeKind.START_END)
    made.launch(10, 20, 30, "evil|<b>\n| 1 |")
    page = regions_page(regions(made.trace(), RegionOptions(kernels=Selection(exclude=("nothing|*",)))))
    assert "<script>" not in page
    assert "<b>" not in page
    assert "\n# heading" not in page
    assert "[a](" not in page
    widths = {line.count("|") - line.count("\\|") for line in page.splitlines() if line.startswith("| evil")}
    assert widths <= {5, 6}


def test_counters_exclusions_and_free_ranges_are_shown() -> None:
    made = Builder()
    made.range(0, 100, "decode")
    made.range(0, 100, "request", kind=RangeKind.START_END)
    made.launch(10, 20, 30, "gemm")
    made.launch(11, 30, 33, "norm")
    made.launch(110, 130, 134, "gemm")
    trace = made.trace()
    sampled = launch("gemm", 1, 32, read=4096, time=9)
    sampled.counters["lost.sum"] = Missing("the tool says n/a")
    units = {"dram__bytes_read.sum": "byte", "gpu__time_duration.sum": "ns"}
    counters = [CountedStage("decode", trace.work.kind == WorkKind.KERNEL, (sampled,), units)]
    shown = ("dram__bytes_read.sum", "gpu__time_duration.sum", "lost.sum")
    options = RegionOptions(kernels=Selection(exclude=("norm",)), counters=shown)
    page = regions_page(replace(regions(trace, options, counters), notes=("Counters of prefill: n/a: <why>.",)))
    assert "| (excluded kernels) |" in page
    assert "| (outside any region) |" in page
    assert f"| decode | {escape('dram__bytes_read.sum')} | 4,096 | byte | sum | 100.0 % |" in page
    assert f"| decode | {escape('gpu__time_duration.sum')} (by Nsight Compute's clock, each launch alone) | 9.000 | ns |" in page
    assert "| decode | lost.sum | n/a (a) |" in page
    assert f"- {escape('Counters of prefill: n/a: <why>.')}" in page
    assert "| LLM@request | 1 |" in page
    assert "Kernels: without norm." in page


def test_an_empty_trace_says_so() -> None:
    assert "neither ranges nor device work" in regions_page(regions(Builder().trace()))


def test_all_together() -> None:
    made = Builder()
    made.range(0, 100, "decode")
    assert "## All processes and devices" in regions_page(regions(made.trace(), RegionOptions(aggregate=True)))

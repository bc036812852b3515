"""Devices side by side: shown where there are several, and not where one did all."""

from msgspec.structs import replace

from llm_perf_opt.analysis.trace.document import DeviceLine, DeviceStageLine
from llm_perf_opt.core.records import Missing
from llm_perf_opt.report.device_tables import device_html_tables, device_rows, devices_section
from llm_perf_opt.report.html import run_page
from llm_perf_opt.report.markdown import report
from llm_perf_opt.report.trace_document import trace_text
from pages import full_analysis, readings, trace_analysis

MS = 1_000_000


def line(device: int, busy: int, idle: int, name: str = "NVIDIA H200") -> DeviceLine:
    stage = DeviceStageLine("decode", busy, idle, busy + idle, 7, busy)
    return DeviceLine(device, name, 7, busy, busy, idle, busy + idle, [], [stage, DeviceStageLine("prefill", 0, 0, 0, 0, 0)])


def test_rows_add_up_and_a_stage_without_work_is_left_out() -> None:
    both = replace(trace_analysis(), devices=[line(0, 30 * MS, 10 * MS), line(1, 20 * MS, 20 * MS)])
    assert [row[-4:] for row in device_rows(both.devices)] == [
        ["30.00 ms", "10.00 ms", "40.00 ms", "75.0 %"],
        ["20.00 ms", "20.00 ms", "40.00 ms", "50.0 %"],
    ]
    text = devices_section(both)
    assert "at least one" in text
    assert "| decode | 1 | 20.00 ms | 20.00 ms | 40.00 ms | 50.0 % | 7 |" in text
    assert "prefill" not in text
    assert [table.id for table in device_html_tables(both)] == ["devices", "device-stages"]


def test_one_device_is_not_shown_twice() -> None:
    one = replace(trace_analysis(), devices=[line(0, 30 * MS, 10 * MS)])
    assert devices_section(one) == ""
    assert device_html_tables(one) == []
    assert devices_section(Missing("no trace")) == ""


def test_a_name_is_data_in_every_page() -> None:
    hostile = "<b>|H200"
    both = replace(trace_analysis(), devices=[line(0, 30 * MS, 10 * MS, hostile), line(1, MS, MS, hostile)])
    analysis = full_analysis(trace=both)
    assert "\\<b\\>\\|H200" in report(analysis)
    page = run_page(analysis, readings(), Missing("no ranges"))
    assert "&lt;b&gt;|H200" in page
    assert "<b>|H200" not in page
    assert "Devices, each by itself" in trace_text(both)
    assert max(map(len, trace_text(both).splitlines())) <= 100

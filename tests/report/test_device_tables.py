"""Devices side by side: shown where there are several, and not where one did all."""

from msgspec.structs import replace

from llm_perf_opt.analysis.trace.document import DeviceLine, DeviceStageLine
from llm_perf_opt.core.records import Missing
from llm_perf_opt.report.trace_document import TOGETHER, device_tables, trace_text
from pages import full_analysis, readings, trace_analysis
from rendered import report, run_page

MS = 1_000_000


def line(device: int, busy: int, idle: int, name: str = "NVIDIA H200") -> DeviceLine:
    stage = DeviceStageLine("decode", busy, idle, busy + idle, 7, busy)
    return DeviceLine(device, name, 7, busy, busy, idle, busy + idle, [], [stage, DeviceStageLine("prefill", 0, 0, 0, 0, 0)])


def test_rows_add_up_and_a_stage_without_work_is_left_out() -> None:
    whole, stages = device_tables([line(0, 30 * MS, 10 * MS), line(1, 20 * MS, 20 * MS)])
    assert (whole.id, stages.id) == ("devices", "device-stages")
    assert [[cell.text for cell in row[-4:]] for row in whole.rows] == [
        ["30.00 ms", "10.00 ms", "40.00 ms", "75.0 %"],
        ["20.00 ms", "20.00 ms", "40.00 ms", "50.0 %"],
    ]
    assert whole.foot == TOGETHER
    rows = [[cell.text for cell in row] for row in stages.rows]
    assert ["decode", "1", "20.00 ms", "20.00 ms", "40.00 ms", "50.0 %", "7"] in rows
    assert {row[0] for row in rows} == {"decode"}


def test_one_device_is_not_shown_twice() -> None:
    assert device_tables([line(0, 30 * MS, 10 * MS)]) == []
    one = replace(trace_analysis(), devices=[line(0, 30 * MS, 10 * MS)])
    assert 'id="devices"' not in run_page(full_analysis(trace=one))


def test_a_name_is_data_in_every_page() -> None:
    hostile = "<b>|H200"
    both = replace(trace_analysis(), devices=[line(0, 30 * MS, 10 * MS, hostile), line(1, MS, MS, hostile)])
    analysis = full_analysis(trace=both)
    assert "\\<b\\>\\|H200" in report(analysis)
    page = run_page(analysis, readings(), Missing("no ranges"))
    assert "&lt;b&gt;|H200" in page
    assert "<b>|H200" not in page
    assert "Stages on each device" in trace_text(both)
    assert max(map(len, trace_text(both).splitlines())) <= 100

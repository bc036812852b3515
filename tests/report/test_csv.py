"""Tables as CSV: read back cell by cell, with nothing a spreadsheet would run."""

import csv
import io
from dataclasses import fields

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from builders import HOSTILE_NAMES, cpu_sample, gpu_sample, operator, telemetry
from llm_perf_opt.core.machine_records import CpuSample, GpuSample
from llm_perf_opt.core.records import Missing, OperatorRow
from llm_perf_opt.core.terminal import one_line
from llm_perf_opt.report.csv import operators_csv, telemetry_csv


def read(text: str) -> list[dict[str, str]]:
    rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    assert {len(row) for row in rows} == {len(rows[0])}, "as many cells in every row"
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def test_an_operator_is_a_row_and_a_missing_value_an_empty_cell() -> None:
    (row,) = read(operators_csv((operator(calls=4, cpu_total_ns=8, cpu_self_ns=6, cpu_memory_bytes=-1024),)))
    assert row == {
        "name": "aten::mm",
        "calls": "4",
        "cpu_total_ns": "8",
        "cpu_self_ns": "6",
        "device_total_ns": "",
        "device_self_ns": "",
        "cpu_memory_bytes": "-1024",
        "device_memory_bytes": "",
        "flops": "",
    }


def test_without_operators_the_header_still_stands() -> None:
    assert operators_csv(()) == ",".join(field.name for field in fields(OperatorRow)) + "\n"


@pytest.mark.parametrize(
    "name", ["=cmd()", "+1", "-1+1", "@SUM(A1)", "\t=cmd()", "\r=cmd()", "\n=cmd()", "  =cmd()", '=HYPERLINK("x")']
)
def test_a_formula_is_kept_text(name: str) -> None:
    (row,) = read(operators_csv((operator(name),)))
    assert row["name"].startswith("'")
    assert row["name"].endswith(name.strip())


@pytest.mark.parametrize("name", ["aten::mm", "a=b", "a-b", "void k<float>(int)", "é"])
def test_an_ordinary_name_is_left_as_it_is(name: str) -> None:
    (row,) = read(operators_csv((operator(name),)))
    assert row["name"] == name


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_hostile_name_stays_in_its_cell(name: str) -> None:
    text = operators_csv((operator(name), operator("after")))
    assert text.count("\n") == 3, "one line each, for tools that read lines"
    assert read(text)[1]["name"] == "after"


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(alphabet=st.characters(), max_size=20), max_size=4))
@example(["\ud800"])
@example(["a\rb"])
def test_any_names_are_read_back_on_their_rows(names: list[str]) -> None:
    text = operators_csv(tuple(operator(name) for name in names))
    text.encode()
    rows = read(text)
    assert len(rows) == len(names)
    for row, name in zip(rows, names, strict=True):
        shown = one_line(name)
        assert row["name"] in (shown, f"'{shown}")


def test_readings_of_both_kinds_come_in_the_order_of_time() -> None:
    record = telemetry(gpu=[gpu_sample(20, power_mw=Missing("NVML: Not Supported")), gpu_sample(5)], cpu=[cpu_sample(10)])
    rows = read(telemetry_csv(record))
    assert [row["at_ns"] for row in rows] == ["5", "10", "20"]
    assert [row["power_mw"] for row in rows] == ["300000", "", ""]
    assert [row["machine_pct"] for row in rows] == ["", "200.0", ""]
    named = {field.name for kind in (GpuSample, CpuSample) for field in fields(kind)}
    assert set(rows[0]) == named


def test_without_readings_the_header_still_stands() -> None:
    assert read(telemetry_csv(telemetry())) == []
    assert telemetry_csv(telemetry()).startswith("at_ns,power_mw,")

"""What a sweep says in sentences."""

from dataclasses import replace
from typing import Any

from llm_perf_opt.analysis.sweep_ran import Ran
from llm_perf_opt.analysis.sweep_rows import SweepRow, sweep_rows
from llm_perf_opt.records import Missing
from llm_perf_opt.report.sweep_words import troubles, what_points_ran
from pages import sweep_entries

RAN = Ran("NVIDIA H200", "a processor", "qwen2", 1_540_000_000, "bf16", "static cache", "512", 33, {"torch": "2.11.0"})


def rows_that_ran(*changes: dict[str, Any]) -> list[SweepRow]:
    rows = sweep_rows(sweep_entries())
    return [replace(row, ran=replace(RAN, **change)) for row, change in zip(rows, changes, strict=False)]


def test_what_is_the_same_in_all_points_is_said_once() -> None:
    said = dict(what_points_ran(rows_that_ran({}, {}, {})))
    assert said["Device:"] == "NVIDIA H200, beside a processor."
    assert said["Model:"] == "qwen2 (1.54 B parameters, bf16)."
    assert said["Software:"] == "torch 2.11.0."
    assert troubles(rows_that_ran({}, {}, {})) == []


def test_what_differs_is_said_with_its_points() -> None:
    said = dict(what_points_ran(rows_that_ran({}, {"new_tokens": 9}, {})))
    assert said["Request:"] == ("512 prompt tokens, 33 new tokens (points 0, 2); 512 prompt tokens, 9 new tokens (point 1).")


def test_another_version_of_something_is_told() -> None:
    ((head, text),) = troubles(rows_that_ran({}, {"software": {"torch": "2.10.0"}}, {}))
    assert head == "The points did not run with one software:"
    assert "torch 2.11.0 (2 points), 2.10.0 (1 point)" in text


def test_another_model_that_nobody_asked_for_is_told() -> None:
    rows = rows_that_ran({}, {"model": "tiny"})
    ((head, text),) = troubles(rows)
    assert head == "The points did not run one model, and none was swept over:"
    assert "tiny" in text
    assert troubles([replace(row, values={"model": row.values["runtime.batch_size"]}) for row in rows]) == []


def test_nothing_is_said_of_points_that_did_not_run() -> None:
    failed = sweep_rows(sweep_entries("no memory"))[-1:]
    assert isinstance(failed[0].ran, Missing)
    assert what_points_ran(failed) == []
    assert troubles(failed) == [("Point 4 (batch_size 16) is failed and not ranked:", "no memory")]

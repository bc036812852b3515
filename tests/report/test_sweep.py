"""What a sweep says in sentences."""

from dataclasses import replace
from typing import Any

from builders import MS
from llm_perf_opt.analysis.stats import summarize
from llm_perf_opt.analysis.sweep import PointFacts, SweepRow, sweep_rows
from llm_perf_opt.core.records import Missing
from llm_perf_opt.report.document import Item
from llm_perf_opt.report.sweep import SweepReport, headline, troubles, what_points_ran
from llm_perf_opt.report.sweep_charts import bar_words, tradeoff_chart
from markdown_reader import read
from pages import sweep_entries
from rendered import sweep_markdown

RAN = PointFacts("NVIDIA H200", "a processor", "qwen2", 1_540_000_000, "bf16", "static cache", "512", 33, {"torch": "2.11.0"})


def rows_that_ran(*changes: dict[str, Any]) -> list[SweepRow]:
    rows = sweep_rows(sweep_entries())
    return [replace(row, ran=replace(RAN, **change)) for row, change in zip(rows, changes, strict=False)]


def test_what_is_the_same_in_all_points_is_said_once() -> None:
    said = {item.head: item.text for item in what_points_ran(rows_that_ran({}, {}, {}))}
    assert said["Device:"] == "NVIDIA H200, host a processor."
    assert said["Model:"] == "qwen2 (1.54 B parameters, bf16)."
    assert said["Software:"] == "torch 2.11.0."
    assert troubles(rows_that_ran({}, {}, {})) == []


def test_what_differs_is_said_with_its_points() -> None:
    said = {item.head: item.text for item in what_points_ran(rows_that_ran({}, {"new_tokens": 9}, {}))}
    assert said["Request:"] == ("512 prompt tokens, 33 new tokens (points 0, 2); 512 prompt tokens, 9 new tokens (point 1).")


def test_another_version_of_something_is_told() -> None:
    ((head, text, _),) = troubles(rows_that_ran({}, {"software": {"torch": "2.10.0"}}, {}))
    assert head == "The points ran with different software:"
    assert "torch 2.11.0 (2 points), 2.10.0 (1 point)" in text


def test_another_model_that_nobody_asked_for_is_told() -> None:
    rows = rows_that_ran({}, {"model": "tiny"})
    ((head, text, _),) = troubles(rows)
    assert head == "The points ran different models, although the sweep does not vary the model:"
    assert "tiny" in text
    assert troubles([replace(row, values={"model": row.values["runtime.batch_size"]}) for row in rows]) == []


def test_nothing_is_said_of_points_that_did_not_run() -> None:
    failed = sweep_rows(sweep_entries("no memory"))[-1:]
    assert isinstance(failed[0].ran, Missing)
    assert what_points_ran(failed) == []
    assert troubles(failed) == [Item("Point 4 (batch_size 16) is failed and not ranked:", "no memory")]


def _best(rows: list[SweepRow]) -> list[str]:
    return headline(rows)[1:]


def test_the_best_is_said_for_each_workload() -> None:
    """A point with a shorter prompt is no better one."""
    same, other = _best(rows_that_ran({}, {}, {})), _best(rows_that_ran({}, {}, {"prompt_tokens": "16"}))
    assert [text.partition(" is ")[0] for text in same] == [
        "The shortest TPOT over batch sizes 1, 2, 4",
        "The highest decode throughput",
    ]
    assert [text.partition(", the ")[0] for text in other] == [
        *["For qwen2 (1,540,000,000 parameters), 512 prompt tokens, 33 new tokens"] * 2,
    ], "one point alone is no best one"
    assert "at batch_size 2." in other[1], "of batch 1 and 2, the most throughput"


def test_points_of_a_workload_each_have_no_best() -> None:
    (said,) = _best(rows_that_ran({}, {"prompt_tokens": "16"}, {"prompt_tokens": "8"}))
    assert said.startswith("No two points have the same workload")


def test_a_token_of_a_larger_batch_is_not_called_slower() -> None:
    """Two settings at each of two batches: the shorter of each."""
    rows = rows_that_ran({}, {}, {}, {})
    shared = [replace(row, batch=batch, values={"n": str(row.number)}) for row, batch in zip(rows, (1, 1, 8, 8), strict=True)]
    first, second, third = _best(shared)
    assert first.startswith("The shortest TPOT at batch 1 is 11.00 ms, at n 0.")
    assert second.startswith("The shortest TPOT at batch 8 is 14.00 ms, at n 2.")
    assert third.startswith("The highest decode throughput is ")


def test_bars_of_few_repeats_are_called_a_range() -> None:
    rows = list(sweep_rows(sweep_entries()))[:4]
    assert bar_words(rows) == "95 % intervals"
    few = [replace(row, metrics={"tpot": summarize([11 * MS, 12 * MS])}) for row in rows]
    for words in (bar_words(few), bar_words([*rows[:2], *few[2:]])):
        assert "range of the repeats" in words
    assert bar_words(few).startswith("the range")
    report = SweepReport("x", "now", ("llm-perf",), few, "runs/1")
    table = read(sweep_markdown(report)).tables[0]
    assert dict(zip(table[0], table[1], strict=True))["TPOT"] == ("11.50 ms (range: 11.00 – 12.00 ms, n = 2)")
    chart = tradeoff_chart([replace(row, metrics={**row.metrics, "decode_rate": summarize([1.0, 2.0])}) for row in few], [])
    assert not isinstance(chart, Missing)
    assert "TPOT 11.50 ms (range: 11.00 – 12.00 ms, n = 2)" in chart["data"][-1]["hovertext"][0]

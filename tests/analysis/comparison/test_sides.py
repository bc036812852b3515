"""The traces of two sides: figures per token."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as altered

from builders import MS
from llm_perf_opt.analysis.comparison.compare import Comparison, Side, compare
from llm_perf_opt.analysis.comparison.effects import Judgement
from llm_perf_opt.analysis.comparison.sides import side_of
from llm_perf_opt.analysis.comparison.statistics import ACCELERATOR_SPREAD
from llm_perf_opt.analysis.kernels.evidence import KernelEvidence
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.trace.document import BudgetTable, TraceAnalysis
from llm_perf_opt.core.records import CleanTimings, Missing
from llm_perf_opt.report.compare import left_out
from llm_perf_opt.report.compare_document import comparison_text
from markdown_reader import read
from pages import full_analysis, trace_analysis
from rendered import comparison_html, comparison_page


def with_budgets(*budgets: tuple[str, str, int]) -> TraceAnalysis:
    """The budget of 10 ms a unit, for each stage, unit and number of units."""
    made = trace_analysis()
    (table,) = made.budgets
    per_unit = [altered(row, ns=row.ns // table.units) for row in table.rows]
    return altered(
        made,
        budgets=[
            BudgetTable(stage, unit, units, 10 * MS * units, "the unprofiled pass", 0,
                        [altered(row, ns=row.ns * units) for row in per_unit], [], [])
            for stage, unit, units in budgets
        ],
    )  # fmt: skip


def traced(units: int, steps: int | None = None, slower: float = 1.0, name: str = "a") -> RunAnalysis:
    """A run with a budget over so many tokens, and kernels of so many steps."""
    run = full_analysis()
    assert isinstance(run.kernels, KernelEvidence)
    assert isinstance(run.timings, CleanTimings)
    times = [replace(one, steps_ns=tuple(round(step * slower) for step in one.steps_ns)) for one in run.timings.iterations]
    return replace(
        run,
        run=f"runs/{name}",
        trace=with_budgets(("prefill", "prefill", 1), ("decode", "token", units)),
        kernels=replace(run.kernels, decode_steps=steps or units),
        timings=replace(run.timings, iterations=tuple(times)),
    )


def held(base: RunAnalysis, new: RunAnalysis) -> Comparison:
    return compare(side_of([base]), side_of([new]), judgement=Judgement(process_spread=ACCELERATOR_SPREAD))


def values(side: Side) -> dict[str, Any]:
    assert not isinstance(side.budget, Missing)
    return {figure.key: figure.value for figure in side.budget}


def test_a_budget_is_per_token_and_kernels_are_too() -> None:
    side = side_of([traced(8)])
    found = values(side)
    assert found["decode/launch gaps, per token"] == 6 * MS
    assert sum(value for key, value in found.items() if key.startswith("decode/")) == 10 * MS
    assert (side.budget_steps, side.kernel_steps) == (8, 8)
    twice = side_of([traced(16, steps=16)])
    assert values(twice) == found, "twice the tokens take twice the time: a token takes the same"
    assert not isinstance(side.kernels, Missing)
    assert not isinstance(twice.kernels, Missing)
    decode = [[kernel.time_ns for kernel in one if kernel.stage == "decode"] for one in (side.kernels, twice.kernels)]
    assert decode[1] == pytest.approx([time / 2 for time in decode[0]], abs=1)


def test_every_page_states_the_number_of_decode_tokens() -> None:
    found = held(traced(2), traced(2, slower=0.5, name="b"))
    for page in (read(comparison_page(found)).text, comparison_html(found)):
        assert "of the 2 tokens in the trace of each side" in page
        assert "A request has 3 decode steps" in page
    changed = traced(2, slower=0.5, name="b")
    changed = replace(changed, trace=with_budgets(("decode", "token", 2)))
    assert isinstance(changed.trace, TraceAnalysis)
    (table,) = changed.trace.budgets
    halved = altered(changed.trace, budgets=[altered(table, rows=[altered(row, ns=row.ns // 2) for row in table.rows])])
    why = comparison_text(held(traced(2), replace(changed, trace=halved)))
    assert "Why decode is faster, from the budgets of one trace of 2 tokens per side: launch gaps, per token" in why
    whole = held(traced(3), traced(3, name="b"))
    assert "the mean of the 3 tokens in the trace of each side." in read(comparison_page(whole)).text
    assert "need not sum to TPOT" not in comparison_page(whole)


def test_traces_of_different_length_are_not_compared_in_decode() -> None:
    found = held(traced(16), traced(8, slower=0.5, name="b"))
    assert not isinstance(found.budget, Missing)
    assert {row.key.partition("/")[0] for row in found.budget} == {"prefill"}
    assert not isinstance(found.kernels, Missing)
    assert {pair.stage for pair in found.kernels.pairs} == {"prefill"}
    assert not any(kernel.stage == "decode" for kernel in (*found.kernels.appeared, *found.kernels.vanished))
    assert not isinstance(found.counters, Missing)
    assert {row.key.partition("/")[0] for row in found.counters} == {"prefill"}
    why = "the traces contain 16 decode steps on one side and 8 on the other"
    assert [text.partition(":")[0] for text in left_out(found) if why in text] == [
        "decode in the budget",
        "decode in the kernels",
    ]
    for page in (read(comparison_page(found)).text, comparison_html(found)):
        assert f"Decode is not compared: {why}" in page
    assert f"Why decode is faster is unknown: {why}" in comparison_text(found)


def test_the_table_of_kernels_states_that_decode_is_per_token() -> None:
    page = comparison_page(held(traced(8), traced(8, name="b")))
    section = page[page.index("## Kernels") : page.index("## Operators")]
    assert "decode per token" in section


def test_a_kernel_of_one_step_in_eight_has_its_real_rate() -> None:
    """One launch in eight steps is less than one per token; whole counts stay whole."""
    runs = [traced(8, name=name) for name in ("a", "b")]
    kernels = runs[0].kernels
    assert isinstance(kernels, KernelEvidence)
    (decode,) = (stage for stage in kernels.stages if stage.stage == "decode")
    rows = (replace(decode.rows[0], calls=1, total_ns=8_000), *(replace(row, calls=16) for row in decode.rows[1:]))
    runs = [replace(run, kernels=replace(kernels, stages=(replace(decode, rows=rows),))) for run in runs]
    side = side_of([runs[0]])
    assert not isinstance(side.kernels, Missing)
    assert [(one.calls, one.time_ns) for one in side.kernels][:2] == [(0.125, 1_000), (2, round(rows[1].total_ns / 8))]
    found = held(*runs)
    (table,) = (table for table in read(comparison_page(found)).tables if table[0][:2] == ["stage", "difference"])
    assert {tuple(row[-2:]) for row in table[1:]} == {("0.125", "0.125"), ("2", "2")}
    html = comparison_html(found)
    assert "0.125" in html[html.index('<table id="matched-kernels"') :]

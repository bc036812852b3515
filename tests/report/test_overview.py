"""The first screen of a run: cards, bars and banner on the page; the summary at the end of `llm-perf run`."""

import re
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as altered

from builders import HOSTILE_NAMES, MS, clean_timings, empty_analysis, iteration, run_analysis
from llm_perf_opt.analysis.metrics import metrics
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.trace.document import BudgetLine, Finding, TraceAnalysis
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.warnings import RunWarning, WarningId
from llm_perf_opt.report.chart_data import OTHER, Use, Waterfall, budget_of
from llm_perf_opt.report.charts import SERIES
from llm_perf_opt.report.document import Banner, Cards, Paragraph, StackedBar
from llm_perf_opt.report.findings import advice_text
from llm_perf_opt.report.overview import TERMINAL_WIDTH, next_command, overview_blocks, overview_text, stage_bars
from markdown_reader import read
from pages import full_analysis, trace_analysis
from rendered import report, run_page, stakeholder_summary

COMMAND = ("llm-perf", "run", "model=tiny", "+runtime.cache=dynamic", "++hydra.run.dir=/tmp/x")
LINES = 22
"""Of 24: the path of the report and the suggestion follow."""


def change(**values: Any) -> Finding:
    first = trace_analysis().findings[0]
    given: dict[str, Any] = {"title": "Use a static cache", "overrides": ["runtime.cache=static"], "id": "static"}
    return altered(first, **{**given, **values})


def doubt() -> Finding:
    words = "Small differences are noise."
    return change(
        id="noisy_machine", kind="trust", title="The machine was not quiet", headline=words, claim=words,
        saving_ns=None, overrides=[], to_try="Stop other programs.", evidence=["load 9"],
    )  # fmt: skip


def analysis_of(*findings: Finding, **changes: Any) -> RunAnalysis:
    made = full_analysis(trace=altered(trace_analysis(), findings=list(findings)))
    return replace(made, manifest=replace(made.manifest, command=COMMAND), **changes)


def rows(*keys: str, ns: int = MS) -> list[BudgetLine]:
    return [BudgetLine(key, f"label of {key}", ns * (number + 1), 0.1) for number, key in enumerate(keys)]


def budgeted(found: TraceAnalysis, lines: list[BudgetLine]) -> TraceAnalysis:
    whole = sum(line.ns for line in lines)
    return altered(found, budgets=[altered(found.budgets[0], rows=lines, units=1, wall_ns=whole)])


# --- cards ------------------------------------------------------------------------------------------------------------------


def test_a_card_has_title_saving_request_evidence_and_the_command() -> None:
    found = change(before_ns=10 * MS)
    page = run_page(analysis_of(found))
    assert "<h3>Use a static cache</h3>" in page
    assert ">Saves about 9.00 ms per token <span>(0 – 9.00 ms)</span>" in page
    assert re.search(r'class="request">72\.0 ms per request \(about \d+ % of it\); high confidence<', page)
    assert "<code>llm-perf run runtime.cache=static model=tiny</code>" in page, "the old value and the folder are gone"
    assert "<details><summary>Evidence and details</summary>" in page
    text = read(report(analysis_of(found)))
    assert "1. Use a static cache" in text.headings
    assert "llm-perf run runtime.cache=static model=tiny\n" in text.fences


def test_a_point_of_a_sweep_and_a_trace_get_the_settings_alone() -> None:
    analysis = analysis_of(change())
    swept = replace(analysis, manifest=replace(analysis.manifest, command=("llm-perf", "run", "-m", "runtime.batch_size=1,2")))
    assert "<code>runtime.cache=static</code>" in run_page(swept)
    assert "try: runtime.cache=static\n" in advice_text([change()])


def test_a_finding_without_a_title_has_its_headline() -> None:
    page = run_page(analysis_of(change(title="", headline="It waits.", claim="It waits.")))
    assert "<h3>It waits.</h3>" in page
    assert 'class="evidence"' not in page


def test_advice_comes_first_and_doubts_are_a_banner() -> None:
    analysis = analysis_of(change(), doubt())
    (banner,) = [block for block in overview_blocks(analysis) if isinstance(block, Banner)]
    assert [(item.head, item.text) for item in banner.items] == [("The machine was not quiet.", "Small differences are noise.")]
    assert banner.items[0].details == ["Load 9", "What to do: Stop other programs."]
    for text in (run_page(analysis), report(analysis), stakeholder_summary(analysis), advice_text([change(), doubt()])):
        assert "2. The machine" not in text
        assert "The machine was not quiet" in text
    page = run_page(analysis)
    assert page.count('<li id="finding-') == 1
    assert page.index('class="banner"') < page.index("Use a static cache")


def test_doubts_alone_are_no_finding() -> None:
    page = run_page(analysis_of(doubt()))
    assert '<li id="finding-' not in page
    assert "No findings" in page


def test_warnings_are_pointed_at_and_serious_ones_are_shown() -> None:
    given = (RunWarning(WarningId.IMPLAUSIBLE, "MFU is 130 %."), RunWarning(WarningId.THROTTLED, "It was hot."))
    (banner,) = [block for block in overview_blocks(analysis_of(warnings=given)) if isinstance(block, Banner)]
    assert [item.text for item in banner.items] == ["MFU is 130 %. See 1 warning below."]
    assert overview_blocks(analysis_of(warnings=given[1:]))[0] == Paragraph("See 1 warning below.", "pointer")
    assert not [block for block in overview_blocks(analysis_of(warnings=())) if isinstance(block, Banner)]


def test_why_a_run_is_partial_is_in_the_notice_and_not_below_it_again() -> None:
    made = analysis_of(warnings=(RunWarning(WarningId.RUN_INCOMPLETE, "The run is partial: the disk was full."),))
    partial = replace(made, manifest=replace(made.manifest, status="partial", why="the disk was full."))
    assert not [block for block in overview_blocks(partial) if isinstance(block, Banner)]
    assert report(partial).split("## Summary")[0].count("the disk was full.") == 1


# --- figures and bars ---------------------------------------------------------------------------------------------------------


def test_the_figures_have_their_distance_from_the_roofline() -> None:
    (cards,) = [block for block in overview_blocks(full_analysis()) if isinstance(block, Cards)]
    far = {card.name.split("(")[-1].rstrip(")"): card.distance for card in cards.cards}
    assert re.fullmatch(r"[\d,.]+ × roofline", far["TTFT"])
    assert re.fullmatch(r"[\d,.]+ × roofline", far["TPOT"])
    assert far["End to end"] == ""


def test_a_bar_shows_any_rows_in_colors_that_differ() -> None:
    keys = ("floor", "python", "framework", "matmul", "waiting")
    found = stage_bars(full_analysis(trace=budgeted(trace_analysis(), rows(*keys))))
    assert not isinstance(found, Missing)
    (bar,) = found
    assert [share.label for share in bar.shares] == [f"label of {key}" for key in keys]
    assert len({share.color for share in bar.shares}) == len(keys)
    assert sum(share.size for share in bar.shares) == pytest.approx(1)
    assert "label of python 13.3 %" in bar.description


def test_a_row_has_the_same_color_in_every_stage() -> None:
    made = trace_analysis()
    first = altered(made.budgets[0], stage="prefill", rows=rows("a", "b"))
    second = altered(made.budgets[0], rows=rows("floor", "b"))
    found = budget_of(full_analysis(trace=altered(made, budgets=[first, second])))
    assert not isinstance(found, Missing)
    colors = [{use.label: use.color for use in one.uses} for one in found]
    assert colors[0]["label of b"] == colors[1]["label of b"]
    assert colors[1]["label of floor"] == 0
    assert all(color < len(SERIES) for one in colors for color in one.values())


def test_small_rows_are_folded_and_the_sum_stays() -> None:
    data = Waterfall("decode", "decode", tuple(Use(f"u{number}", number) for number in (5, 0, 1, 9, 2, 7)))
    kept = data.largest(4)
    assert [(use.label, use.ns) for use in kept] == [("u5", 5), ("u9", 9), ("u7", 7), ("other (2 rows)", 3)]
    assert kept[-1].color == OTHER
    assert len(data.largest(5)) == 5


def test_a_negative_row_is_named_and_not_drawn() -> None:
    lines = [BudgetLine("floor", "roofline", 12 * MS, 1.2), BudgetLine("disagreement", "beyond", -2 * MS, -0.2)]
    found = stage_bars(full_analysis(trace=budgeted(trace_analysis(), lines)))
    assert not isinstance(found, Missing)
    assert [(share.time, share.size) for share in found[0].shares] == [("12.00 ms", 1.0), ("-2.000 ms", 0.0)]


def test_figures_of_other_steps_say_which() -> None:
    """The trace has fewer steps than the request, whose time per token and distance differ from those of the first ones."""
    made = trace_analysis()
    lines = [BudgetLine("floor", "roofline", 2 * MS, 0.4), BudgetLine("host", "host", 3 * MS, 0.6)]
    first = altered(made.budgets[0], rows=lines, units=2, wall_ns=5 * MS)
    analysis = full_analysis(trace=altered(made, budgets=[altered(first, request_units=31)]))
    found = stage_bars(analysis)
    assert not isinstance(found, Missing)
    assert "steps 1–2 of 31" in found[0].title
    assert "2.50 × roofline" in found[0].detail
    cards = {card.name: card.distance for block in overview_blocks(analysis) if isinstance(block, Cards) for card in block.cards}
    assert [name for name, words in cards.items() if "steps 1–31" in words] == ["Time per output token (TPOT)"]
    for text in (overview_text(analysis), run_page(analysis), read(report(analysis)).text):
        assert "steps 1–2 of 31" in " ".join(text.split())
        assert re.search(r"steps 1–31\b", text)
    for whole in (0, 2):  # unknown, and all
        every = full_analysis(trace=altered(made, budgets=[altered(first, request_units=whole)]))
        assert "steps 1–" not in overview_text(every) + run_page(every)


def test_the_interval_of_a_row_is_shown_everywhere() -> None:
    line = BudgetLine("python", "Python", 4 * MS, 0.4, 3 * MS, 5 * MS)
    analysis = full_analysis(trace=budgeted(trace_analysis(), [line, BudgetLine("floor", "roofline", 6 * MS, 0.6)]))
    for text in (run_page(analysis), report(analysis)):
        assert text.count("3.00 – 5.00 ms") == 2, "in the legend and in the table of the budget"
    assert ">interval</th>" not in run_page(full_analysis())


# --- the terminal -------------------------------------------------------------------------------------------------------------


def test_the_summary_fits_a_screen() -> None:
    lines = budgeted(trace_analysis(), rows(*"abcdefgh"))
    found = altered(lines, findings=[change(), change(id="x"), doubt()])
    analysis = replace(full_analysis(trace=found), manifest=replace(full_analysis().manifest, command=COMMAND))
    text = overview_text(analysis)
    assert len(text.splitlines()) <= LINES
    assert all(len(line) <= TERMINAL_WIDTH for line in text.splitlines())
    shown = re.findall(r"^ +[\d.]+ % +[\d.]+ ms +(.+)$", text, re.M)
    assert shown == ["label of h", "label of g", "label of f", "label of e", "other (4 rows)"]
    assert "What to change first: Use a static cache\n  saves about 9.00 ms per token (0 – 9.00 ms);" in text
    assert "\n  llm-perf run runtime.cache=static model=tiny\n" in text
    assert "Note: The machine was not quiet." in text
    assert next_command(analysis, "a b") == "llm-perf advise 'a b' --verify"


@pytest.mark.parametrize("repeats", [1, 2, 5, 10])
def test_a_line_of_figures_is_whole(repeats: int) -> None:
    """The range of a few repeats has its unit, as the interval of many has."""
    timings = clean_timings([iteration(prefill_ns=1_234_567_890 + number * 98_765_432) for number in range(repeats)])
    given = run_analysis(timings=timings, metrics=metrics(timings), efficiency=Missing("there is no cost model"))
    lines = overview_text(given).splitlines()
    figures = [line for line in lines if line.startswith(("Time to first token", "End to end"))]
    assert len(figures) == 2
    assert all(line.endswith(")") and len(line) <= TERMINAL_WIDTH for line in figures), figures


def test_without_a_setting_nothing_is_verified() -> None:
    assert next_command(analysis_of(change(overrides=[])), "x") == "llm-perf advise x"
    assert next_command(analysis_of(doubt()), "x") == ""
    assert "no rule found anything" in overview_text(analysis_of(doubt()))


def test_what_is_missing_is_said() -> None:
    text = overview_text(run_analysis(trace=Missing("no pass left a trace")))
    assert "What to change first: n/a: no pass left a trace" in text
    assert overview_text(empty_analysis("killed"))
    assert next_command(empty_analysis("killed"), "x") == ""


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_names_cannot_break_the_summary(name: str) -> None:
    analysis = full_analysis([name or "x"])
    text = overview_text(analysis)
    assert all(char.isprintable() or char == "\n" for char in text)
    assert len(text.splitlines()) <= LINES
    assert isinstance(overview_blocks(analysis)[-1], StackedBar)

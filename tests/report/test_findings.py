"""Budgets and findings in the report: names are data, what is missing says why."""

from dataclasses import replace as altered

import pytest
from msgspec.structs import replace

from builders import HOSTILE_NAMES, MS, run_analysis
from evidence_builders import evidence, stage_evidence
from llm_perf_opt.analysis.findings.finding import Grounds, Saving, ToTry, finding, saving_of, without_overrides
from llm_perf_opt.analysis.trace.document import BudgetLine, BudgetTable, GpuTotals, ThroughputLine, TraceAnalysis
from llm_perf_opt.analysis.verification import Trial, Verification
from llm_perf_opt.core.records import Missing
from llm_perf_opt.report.findings import advice_text, elsewhere_sentences, finding_blocks, findings_of, request_words, source_of
from llm_perf_opt.report.run_document import budget_blocks
from llm_perf_opt.report.trace_document import trace_text
from markdown_reader import read
from rendered import markdown_of, report, run_page, stakeholder_summary


def document(name: str = "a kernel") -> TraceAnalysis:
    stage = evidence(stage_evidence()).stages[0]
    grounds = Grounds((f"row of {name}",), "low", f"because {name}")
    change = ToTry(("runtime.cache=static",), f"change {name}")
    found = finding("some_rule", ("decode", 10), (f"It is {name}.",), grounds, saving_of(stage, 0, 5e6, 1e7), change)
    budget = BudgetTable(
        "decode", "token", 10, 100, f"from {name}", 60,
        [BudgetLine("below_roof", "kernels", 60, 0.6), BudgetLine("launch_gaps", "gaps", 40, 0.4)], [], [f"note of {name}"],
    )  # fmt: skip
    return TraceAnalysis(
        source=name, complete=True, problems=[], gpu=GpuTotals(1, 60, 60, 40, 100), stages=[], kernels=[], idle=[],
        findings=[found], why="", profiler="torch", device=name, stage_method="labels", stage_why=name,
        stage_coverage=1.0, unknown_share=0.0, budgets=[budget], steps=[], modules=[],
    )  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_names_are_data(name: str) -> None:
    made = document(name)
    page = markdown_of([*budget_blocks(made), *finding_blocks(made.findings)])
    (table,) = read(page).tables
    assert len(table) == 4  # the header, two rows and the sum
    assert set(read(page).markup) <= {"strong"}
    assert all(char.isprintable() or char == "\n" for char in trace_text(made) + advice_text(made.findings))


def test_the_report_and_the_summary_hold_both_sections() -> None:
    analysis = run_analysis(trace=document())
    assert {"Where the time goes", "What to change first", "1. It is a kernel."} <= set(read(report(analysis)).headings)
    assert {"What to change first", "1. It is a kernel."} <= set(read(stakeholder_summary(analysis)).headings)


def test_the_summary_says_what_the_change_saves_and_how_to_make_it() -> None:
    page = read(stakeholder_summary(run_analysis(trace=document())))
    assert "Saves about 500 µs per token (0 – 1.00 ms)" in page.text
    assert "runtime.cache=static " in page.fences[0]
    assert "row of a kernel" not in page.text, "the details are in the report"
    words = document()
    in_words = replace(words, findings=[replace(words.findings[0], overrides=[], to_try="Do it otherwise.")])
    assert "Do it otherwise." in stakeholder_summary(run_analysis(trace=in_words))


def test_the_summary_says_what_that_is_of_a_request_and_why_it_is_not_of_the_longest_stage() -> None:
    """A finding of prefill beside a decode that takes most of the time must not read as a contradiction."""
    made = document()
    decode, of_decode = made.findings[0], replace(made.budgets[0], wall_ns=20 * MS)
    of_prefill = replace(of_decode, stage="prefill", unit="prefill", units=1, wall_ns=10 * MS)
    made = replace(made, budgets=[of_prefill, of_decode])
    shares = {"prefill": 0.1, "decode": 0.9}
    source = altered(source_of(run_analysis(trace=made)), shares=shares)
    assert request_words(decode, source) == "5.00 ms per request (about 22 % of it)"  # 0.5 of 2 ms per token; decode is 90 %
    prefill = replace(decode, stage="prefill", saving_per="prefill", units=1, saving_ns=5 * MS)
    assert request_words(prefill, source) == "5.00 ms per request (about 5 % of it)"
    assert "less than 1 % of it" in request_words(replace(prefill, saving_ns=MS // 2), source)
    assert request_words(decode, altered(source, shares={})) == ""
    unprofiled = altered(source, budgets=[replace(of_decode, wall_source="the unprofiled pass")], request_ns=50 * MS)
    assert request_words(decode, unprofiled) == "5.00 ms per request (about 10 % of it)", "both of the same request"
    (alone,) = elsewhere_sentences([prefill], shares)
    assert alone.startswith("For decode, where most of the time goes, no rule found")
    of_none = replace(decode, kind="throughput")
    assert elsewhere_sentences([prefill, of_none, decode], shares) == ["The largest saving in decode is finding 3 of the report."]
    assert elsewhere_sentences([decode, prefill], shares) == []
    assert elsewhere_sentences([prefill], {"profile": 1.0}) == []


def test_what_is_missing_says_why() -> None:
    none = Missing("no pass left a trace")
    page = read(report(run_analysis(trace=none))).text
    for what in ("Budget:", "Findings:"):
        assert f"{what} n/a: no pass left a trace" in page
    assert advice_text([]).startswith("No findings")


def test_the_terminal_gives_the_change_in_words_beside_the_overrides() -> None:
    """Whoever brought a trace of another program has no use for overrides of this one."""
    change = ToTry(("runtime.compile=default",), "Compile the step.")
    grounds = Grounds((), "low", "a guess")
    found = finding("launch_bound_decode", ("decode", 1), ("It waits.",), grounds, Saving(1, 0, 2, "token"), change)
    text = advice_text([found])
    assert "try: runtime.compile=default" in text
    assert "in other programs: Compile the step." in text
    words = advice_text([without_overrides(found)])
    assert "try: Compile the step." in words
    assert "in other programs" not in words


TRIED = Verification(
    "the-run", "", (
        Trial("some_rule", ("runtime.cache=static",), "token", "x", "", 9 * MS, 8 * MS, 9 * MS, 10 * MS, 2 * MS, 1000),
        Trial("other_rule", ("runtime.batch_size=2",), "token", "", "it did not fit", 1, 0, 2),
    ),
)  # fmt: skip


def test_what_was_tried_stands_in_every_report() -> None:
    analysis = run_analysis(trace=document(), verified=TRIED)
    page = "".join(char for char in run_page(analysis, Missing("none"), Missing("none")))
    for text in (stakeholder_summary(analysis), report(analysis), page):
        assert "10.00 ms" in text
        assert "2.000 ms" in text, "as measured"
        assert "1.000 ms" in text, "as predicted"
        assert "it did not fit" in text
    assert all("some_rule" in text.replace("\\", "") for text in (report(analysis), page))
    assert "Tried" not in stakeholder_summary(run_analysis(trace=document()))


def test_throughput_is_no_saving() -> None:
    more = ThroughputLine(1, 8, 19 * MS, 20 * MS, 19 * MS, 30 * MS, 52.63, 400.0, 266.7, 421.1)
    made = document()
    line = replace(
        made.findings[0], id="small_batch", kind="throughput", throughput=more, saving_ns=None, saving_low_ns=None,
        saving_high_ns=None, saving_why="a single request is no faster",
    )  # fmt: skip
    made = replace(made, findings=[line])
    analysis = run_analysis(trace=made)
    assert findings_of(analysis) == [line]
    for text in (advice_text(made.findings), report(analysis), trace_text(made), run_page(analysis)):
        assert not any(words in text.lower() for words in ("saves about", "saves nothing", "saving n/a"))
        assert "52.63 tokens/s at batch 1" in " ".join(text.split())
        assert "400.0" in text
        assert "20.00 ms" in text, "how long a token takes at that batch"
    assert elsewhere_sentences(made.findings, {"decode": 1.0}) == [], "it makes no request faster"

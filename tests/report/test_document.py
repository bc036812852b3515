"""One document, three renderers: what report.html shows, report.md shows, and the terminal."""

import html
import re
from dataclasses import replace

import pytest
from msgspec.structs import replace as altered

from builders import HOSTILE_NAMES, MS, empty_analysis, run_analysis
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.trace.document import DeviceLine, DeviceStageLine, GpuMetricLine, LabelLine
from llm_perf_opt.analysis.verification import Trial, Verification
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.terminal import one_line
from llm_perf_opt.report.document import (
    Cell,
    Column,
    Document,
    Item,
    Items,
    Paragraph,
    Section,
    Share,
    StackedBar,
    Table,
    cell,
    name_cell,
    numbers,
)
from llm_perf_opt.report.html import render_html
from llm_perf_opt.report.markdown import render_markdown
from llm_perf_opt.report.run_document import run_document
from llm_perf_opt.report.terminal import WIDTH, block_text, render_text, table_text
from llm_perf_opt.report.trace_document import trace_document
from markdown_reader import read, uneven_tables
from pages import full_analysis, readings, trace_analysis

NONE = Missing("no timeline")


def html_tables(source: str) -> list[list[list[str]]]:
    """Every table of the page as a browser shows its cells, the header first."""
    found = []
    for table in re.findall(r"<table[^>]*>(.*?)</table>", source, re.S):
        rows = re.findall(r"<tr>(.*?)</tr>", table, re.S)
        found.append([[shown(text) for text in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S)] for row in rows])
    return found


def shown(markup: str) -> str:
    """The text of a cell as Markdown has it: the mark of a reason in brackets, a separator of lines as a space."""
    text = re.sub(r"<sup>(.*?)</sup>", r" (\1)", markup).replace(r"\u2028", " ")
    return flat(html.unescape(re.sub(r"<[^>]+>", "", text)))


def flat(text: str) -> str:
    return " ".join(one_line(text).split())


def everything() -> RunAnalysis:
    """A run with every table there is: several devices, labels, sampled metrics, a trial."""
    stage = DeviceStageLine("decode", MS, MS, 2 * MS, 7, MS)
    devices = [DeviceLine(number, "NVIDIA H200", 7, MS, MS, MS, 2 * MS, [], [stage]) for number in (0, 1)]
    metrics = [GpuMetricLine("", 0, "SMs Active", 10, 12.5, 0, 40), GpuMetricLine("decode", 1, "SMs Active", 4, 33.3, 20, 40)]
    trace = altered(trace_analysis(), devices=devices, gpu_metrics=metrics, labels=[LabelLine("mine", 1, MS, None, None)])
    trial = Trial("f0", ("runtime.cache=static",), "token", "x", "", 9 * MS, 8 * MS, 9 * MS, 10 * MS, 2 * MS, 1000)
    return full_analysis(trace=trace, verified=Verification("the-run", "", (trial,)))


@pytest.mark.parametrize(
    "analysis",
    [everything(), run_analysis(), empty_analysis("killed"), replace(run_analysis(), stages=()), full_analysis(HOSTILE_NAMES)],
    ids=["everything", "cpu", "failed", "no stages", "hostile names"],
)
def test_every_table_of_the_page_is_in_the_markdown_with_equal_cells(analysis: RunAnalysis) -> None:
    document = run_document(analysis, readings(), NONE)
    page, text = html_tables(render_html(document)), read(render_markdown(document))
    assert len(page) == len(document.tables)
    assert [[[flat(one) for one in row] for row in table] for table in text.tables] == page
    for table in (whole.shown for whole in document.tables):
        for why in table.dropped:
            assert flat(why) in flat(text.text)
        for mark, why in table.marked_reasons:
            assert f"n/a ({mark}): {flat(why)}" in flat(text.text)


def test_the_run_with_everything_has_every_table() -> None:
    ids = [table.id for table in run_document(everything(), readings(), NONE).tables]
    assert len(ids) == len(set(ids))
    assert {
        *("trials", "budget-0", "metrics", "stages", "devices", "device-stages", "labels", "figures", "roofs", "limits-table"),
        *("components", "kernels", "counters", "gpu-metrics", "operators", "readings", "energy", "environment-table", "passes"),
    } <= set(ids)


def test_the_sections_are_the_same_in_both() -> None:
    document = run_document(everything(), readings(), NONE)
    titles = [section.title for section in document.sections]
    assert re.findall(r'<h2 id="[^"]+">([^<]+)</h2>', render_html(document)) == titles
    headings = read(render_markdown(document)).headings
    assert [heading for heading in headings if heading in titles] == titles


def test_a_missing_value_is_marked_once_per_table() -> None:
    table = Table("t", "T", [Column("a"), *numbers("b", "c")], foot="The foot.")
    table.add("x", cell(Missing("no <b>"), str), cell(3, lambda value: f"{value} ms"))
    table.add("y", cell(Missing("no <b>"), str), cell(Missing("other"), str))
    table.add("z", cell(4, str), cell(Missing("other"), str))
    marked = [[one.text + one.note for one in row] for row in table.rows]
    assert marked == [["x", "n/aa", "3 ms"], ["y", "n/aa", "n/ab"], ["z", "4", "n/ab"]]
    assert table.rows[0][2].order == 3.0
    page = read(render_markdown(Document("x", "", "", [Section("s", "S", [table])])))
    assert page.tables == [[["a", "b", "c"], ["x", "n/a (a)", "3 ms"], ["y", "n/a (a)", "n/a (b)"], ["z", "4", "n/a (b)"]]]
    assert "n/a (a): no <b>\n" in page.text
    assert "n/a (b): other\n" in page.text
    assert table_text(table).splitlines() == [
        "T",
        "a        b        c",
        "x  n/a (a)     3 ms",
        "y  n/a (a)  n/a (b)",
        "z        4  n/a (b)",
        "n/a (a): no <b>",
        "n/a (b): other",
        "The foot.",
    ]


def sparse(*rows: tuple[Cell | Missing | str, ...]) -> Table:
    table = Table("t", "T", [Column("a"), *numbers("b", "c", "d")], foot="The foot.")
    for row in rows:
        table.add(*row)
    return table


def test_a_column_without_a_value_becomes_a_note() -> None:
    none, other = Missing("too few <values>"), Missing("other")
    table = sparse(("x", none, other, "1"), ("y", none, "2", none), ("z", none, "", "3"))
    kept = table.shown
    assert [column.name for column in kept.columns] == ["a", "c", "d"]
    assert [[one.text + one.note for one in row] for row in kept.rows] == [
        ["x", "n/ab", "1"], ["y", "2", "n/aa"], ["z", "", "3"],
    ]  # fmt: skip
    assert kept.reasons == ["too few <values>", "other"]
    assert kept.dropped == ["b: n/a: too few <values>"]
    assert len(table.columns) == 4, "the table itself keeps it"
    document = Document("x", "", "", [Section("s", "S", [table])])
    assert html_tables(render_html(document)) == read(render_markdown(document)).tables
    for text in (html.unescape(render_html(document)), read(render_markdown(document)).text, table_text(table)):
        assert "b: n/a: too few <values>" in text


def test_columns_that_are_missing_for_the_same_reason_share_a_note() -> None:
    none = Missing("on a CPU")
    assert sparse(("x", "1", none, none), ("y", "2", none, "")).shown.dropped == ["c, d: n/a: on a CPU"]


def test_a_row_without_any_value_does_not_keep_a_column() -> None:
    """Its reason is in another column; the column is dropped for the reason of the other rows."""
    few, untimed = Missing("3 values"), Missing("not timed")
    table = sparse(("x", "1", few, "n"), ("y", untimed, untimed, "n"))
    assert table.shown.dropped == ["c: n/a: 3 values"]
    assert table.shown.reasons == ["not timed"]


def test_a_table_keeps_its_columns_if_none_would_be_left_or_the_reasons_are_many() -> None:
    bare = sparse(("x", Missing("1"), Missing("1"), Missing("1")))
    assert bare.shown is bare
    many = sparse(*[(str(number), "1", Missing(f"reason {number}"), "2") for number in range(4)])
    assert many.shown is many
    empty = sparse(("x", "", "1", "2"))
    assert empty.shown is empty, "nothing is missing in an empty column"


def test_a_link_leads_next_to_the_page_in_both() -> None:
    table = Table("t", "T", [Column("#")])
    table.add(Cell("0", link="a b)/report.html"))
    document = Document("x", "", "", [Section("s", "S", [table])])
    assert "[0](./a%20b%29/report.html)" in render_markdown(document)
    assert 'href="./a%20b%29/report.html"' in render_html(document)


@pytest.mark.parametrize("name", [*HOSTILE_NAMES, "- a", "1. a", "+ a", "= a", "---", "1) a", "**a** ", " a", "a\\"])
def test_names_become_no_markup_wherever_they_are(name: str) -> None:
    table = Table("t", name, [Column(name)], foot=name)
    table.add(Cell(name, below=name, indent=1))
    table.add(Missing(name))
    items = Items([Item(name, name, [name]), Item("", name)], ordered=True)
    source = render_markdown(Document(f"A {name}", name, name, [Section("s", f"B {name}", [table, items])]))
    assert uneven_tables(source) == []
    page = read(source)
    assert len(page.headings) == 2
    assert set(page.markup) <= {"strong"}
    assert len(page.tables) == 1


def test_a_reader_sees_the_words_of_a_bar_as_they_are() -> None:
    shares = [Share("a_b", "1.617 µs", "< 0.1 %", 0.001, "red"), Share("c*d*", "3 ms", "99.9 %", 0.999, "blue", "2 – 4 ms")]
    page = read(render_markdown(Document("x", "", "", [Section("s", "S", [StackedBar("b", "T", "D", shares)])])))
    assert "a_b: 1.617 µs, < 0.1 %" in page.text
    assert "c*d*: 3 ms, 99.9 % (2 – 4 ms)" in page.text
    assert set(page.markup) <= {"strong"}


def test_the_terminal_cuts_names_so_that_rows_fit() -> None:
    table = Table("t", "T", [Column("kernel"), *numbers("calls", "time")])
    table.add(name_cell("a" * 200 + "the end"), "1", "3 ms")
    (row,) = table_text(table).splitlines()[2:]
    assert len(row) == WIDTH
    assert "…" in row
    assert "the end" in row
    assert table.rows[0][0].text.endswith("the end"), "the document keeps the whole"


def test_the_terminal_breaks_no_line_between_a_number_and_its_unit() -> None:
    for value in ("83.82 ms", "12 ns", "9.5 %", "3.00 GiB"):
        before = "x" * (WIDTH - value.index(" "))
        assert block_text(Paragraph(f"{before[1:-1]} {value} of it")).splitlines() == [before[1:-1], f"{value} of it"]
    assert block_text(Paragraph(f"{'x' * (WIDTH - 2)} 3 steps")).splitlines()[1] == "steps"


def test_the_report_of_a_trace_is_a_document_too() -> None:
    document = trace_document(trace_analysis())
    assert [table.id for table in document.tables] == ["budget-0"]
    assert len(html_tables(render_html(document))) == len(read(render_markdown(document)).tables) == 1
    assert "Where decode goes: 80.00 ms for 8 tokens" in render_text(document)


def test_a_trace_without_stages_is_not_counted() -> None:
    found = trace_analysis()
    whole = altered(found, budgets=[altered(found.budgets[0], stage="trace", unit="trace", units=1)])
    assert "Where the time of the trace goes: 80.00 ms\n" in render_text(trace_document(whole))

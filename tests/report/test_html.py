"""report.html: what stands in it."""

import re
from dataclasses import replace

import pytest

from builders import MS, empty_analysis, run_analysis
from llm_perf_opt.analysis.metrics import NO_DECODE, metrics
from llm_perf_opt.analysis.stats import summarize
from llm_perf_opt.analysis.sweep import pareto_front, sweep_rows
from llm_perf_opt.core.records import Missing
from llm_perf_opt.report.document import (
    Advice,
    AdviceCards,
    Banner,
    Block,
    Card,
    Cards,
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
    Unavailable,
    name_cell,
)
from llm_perf_opt.report.html import MOST_BYTES, render_html
from llm_perf_opt.report.kernel_tables import MOST_ROWS, kernels_table
from llm_perf_opt.report.sweep import SweepReport
from llm_perf_opt.report.sweep_charts import parameter_chart, tradeoff_chart
from markdown_reader import read, uneven_tables
from pages import full_analysis, readings, sweep_entries
from rendered import run_page, sweep_markdown, sweep_page

NONE = Missing("no timeline")


def visible(source: str) -> str:
    without = re.sub(r"<script.*?</script>|<style.*?</style>|<svg.*?</svg>", "", source, flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", without))


def test_every_section_is_there_and_is_linked() -> None:
    source = run_page(full_analysis(), readings(), NONE)
    ids = re.findall(r'<section id="([^"]+)"', source)
    assert ids == re.findall(r'<li><a href="#([^"]+)"', source)
    assert ids[:7] == ["summary", "findings", "budget", "warnings", "timings", "limits", "kernel-list"]
    assert ids[7:] == ["operator-list", "tree", "telemetry", "environment", "assumptions", "definitions", "repeat"]
    assert len(source.encode()) < MOST_BYTES
    every = re.findall(r' id="([^"]+)"', re.sub(r"<script>.*?</script>", "", source, flags=re.S))
    assert len(every) == len(set(every)), "an id twice"


def test_the_first_screen_has_figures_budget_and_findings() -> None:
    source = run_page(full_analysis(), readings(), NONE)
    first = visible(source[source.index('<section id="summary"') : source.index('<section id="budget"')])
    assert "× roofline" in first
    assert "decode, 10.00 ms per token" in first
    assert "launch gaps 6.000 ms 60.0 %" in first
    assert first.count("Saves about") == 4


def test_every_metric_shown_is_defined() -> None:
    analysis = full_analysis()
    source = run_page(analysis, readings(), NONE)
    definitions = visible(source[source.index('<section id="definitions"') :])
    for metric in analysis.metrics:
        assert metric.label in definitions
    for word in ("MFU", "HFU", "MBU", "Roofline time", "Ridge"):
        assert word in definitions


def test_missing_parts_say_why() -> None:
    why = Missing("it was asked for without")
    missing = replace(run_analysis(), kernels=why, torch=why, telemetry=why, efficiency=why, trace=why)
    page = visible(run_page(missing, why, why))
    assert page.count("n/a: it was asked for without") >= 6


def test_a_failed_run_says_so_first() -> None:
    page = visible(run_page(empty_analysis("killed"), NONE, NONE))
    assert page.index("This run is failed: killed Try a smaller model.") < page.rindex("What to change first")
    assert "None" not in page


def test_a_page_stays_small_whatever_the_trace_holds() -> None:
    analysis = full_analysis()
    assert not isinstance(analysis.kernels, Missing)
    stage = analysis.kernels.stages[-1]
    row = stage.rows[0]
    many = tuple(replace(row, name=f"kernel_{number}", spelled="k" * 2000) for number in range(5000))
    kernels = replace(analysis.kernels, stages=(replace(stage, rows=many, total_ns=sum(one.total_ns for one in many)),))
    table = kernels_table(kernels.stages)
    assert len(table.rows) == MOST_ROWS + 1
    assert table.rows[-1][1].text == f"{5000 - MOST_ROWS:,} others"
    assert sum(cells[3].order or 0 for cells in table.rows) == sum(one.total_ns for one in many)
    assert len(run_page(replace(analysis, kernels=kernels), readings(), NONE).encode()) < MOST_BYTES


def test_a_sweep_names_the_command_that_goes_on_with_it() -> None:
    entries = sweep_entries()
    page = sweep_page(SweepReport("x", "now", ("llm-perf",), sweep_rows(entries), "runs/my sweeps/1"))
    assert "llm-perf run --resume &#39;runs/my sweeps/1&#39;" in page
    assert "SWEEP" not in visible(page)
    whole = sweep_page(SweepReport("x", "now", ("llm-perf",), sweep_rows(entries[:-1]), "runs/1"))
    assert "--resume" not in whole, "nothing is left to be run"


def test_a_sweep_with_one_new_token_shows_what_there_is_and_why_no_more() -> None:
    entries = []
    for entry in sweep_entries()[:-1]:
        assert not isinstance(entry.analysis, Missing)
        assert not isinstance(entry.analysis.timings, Missing)
        timings = entry.analysis.timings
        single = replace(
            timings,
            iterations=tuple(replace(one, steps_ns=()) for one in timings.iterations),
            workload=replace(timings.workload, new_tokens=1),
        )
        entries.append(replace(entry, analysis=replace(entry.analysis, timings=single, metrics=metrics(single))))
    rows = sweep_rows(entries)
    page = visible(sweep_page(SweepReport("x", "now", ("llm-perf",), rows, "runs/1")))
    assert f"Latency against throughput: n/a: no point has a TPOT: {NO_DECODE}" in page
    chart = parameter_chart(rows, "runtime.batch_size")
    assert not isinstance(chart, Missing)
    assert [trace["y"] for trace in chart["data"]] == [[20.0, 40.0, 80.0, 160.0]]
    assert [key for key in chart["layout"] if key.startswith("yaxis")] == ["yaxis"]
    assert chart["layout"]["xaxis"]["anchor"] == "y"


def test_marks_of_kernels_stand_on_the_page_with_what_they_mean() -> None:
    page = visible(run_page(full_analysis(), readings(), NONE))
    assert " †" in page
    assert re.search(r"decode: † For \d+ of \d+ kernels", page)
    assert "the duration under Nsight Compute differs by more than 25 %" in page
    assert "packed half FLOPs per call, at most" in page


def test_a_sweep_shows_how_well_its_figures_are_known() -> None:
    rows = []
    for row, tpot in zip(sweep_rows(sweep_entries()), (20, 21, 22, 18), strict=False):
        noisy = summarize([tpot * MS * share for share in (0.7, 0.8, 0.9, 1.1, 1.2, 1.3)])
        rows.append(replace(row, metrics={**row.metrics, "tpot": noisy}, warnings=2))
    report = SweepReport("x", "now", ("llm-perf",), rows, "runs/1")
    points, bounds = read(sweep_markdown(report)).tables
    columns = dict(zip(bounds[0], bounds[1], strict=True))
    assert (columns["warnings"], columns["repeats"]) == ("2", "6")
    assert dict(zip(points[0], points[1], strict=True))["TPOT"] == "20.00 ms (14.00 – 26.00 ms)"
    page = visible(sweep_page(report))
    assert "The shortest TPOT over batch sizes 1, 2, 4, 8 is shared by 4 points" in page
    assert "batch_size 8 (18.00 ms), batch_size 1 (20.00 ms)" in page
    assert "20.00 ms (14.00 – 26.00 ms)" in page
    chart = tradeoff_chart(rows, pareto_front(rows))
    assert not isinstance(chart, Missing)
    bars = chart["data"][2]["error_x"]
    assert (bars["array"][0], bars["arrayminus"][0]) == (pytest.approx(6), pytest.approx(6))
    assert chart["layout"]["xaxis"]["range"][1] > 22 * 1.3


def test_a_point_without_what_the_front_is_of_is_not_said_to_be_beaten() -> None:
    rows = list(sweep_rows(sweep_entries()))[:3]
    none = Missing("one new token comes from prefill alone")
    rows[1] = replace(rows[1], metrics={**rows[1].metrics, "tpot": none, "decode_rate": none})
    report = SweepReport("x", "now", ("llm-perf",), rows, "runs/1")
    source = sweep_markdown(report)
    table = read(source).tables[0]
    cells = [dict(zip(table[0], row, strict=True)) for row in table[1:]]
    letter = cells[1]["TPOT"]
    assert letter.startswith("n/a (")
    assert [row["front"] in ("yes", "no") for row in cells] == [True, False, True]
    assert cells[1]["front"] == letter
    assert f"{letter}: {none.why}" in read(source).text
    assert "n/a" in visible(sweep_page(report))


def test_a_front_of_one_point_is_marked() -> None:
    rows = sweep_rows(sweep_entries())[:1]
    chart = tradeoff_chart(rows, pareto_front(rows))
    assert not isinstance(chart, Missing)
    front = chart["data"][0]
    assert (len(front["x"]), front["marker"]["symbol"]) == (1, "circle-open")
    assert "markers" in front["mode"]


def test_a_sweep_in_markdown_is_sound() -> None:
    rows = sweep_rows(sweep_entries("out of | <b>memory</b>\n# not a heading"))
    source = sweep_markdown(SweepReport("a|b", "now", ("llm-perf",), rows, "sweeps/x"))
    assert uneven_tables(source) == []
    page = read(source)
    plain = read(sweep_markdown(SweepReport("x", "now", ("llm-perf",), sweep_rows(sweep_entries()), "sweeps/x")))
    assert page.headings == ["Sweep a|b", *plain.headings[1:]]
    assert page.markup == plain.markup
    assert [len(table) for table in page.tables] == [6, 6]
    assert "out of | <b>memory</b> # not a heading" in page.text


def test_code_in_any_text_is_markup_and_names_stay_as_they_are() -> None:
    """Every text of every kind of block has a command between backticks; attributes and names are not sentences."""
    said = "see `llm-perf doctor`, and a < b"
    table = Table("t", said, [Column("what"), Column("value")], foot=said, dropped=[said])
    table.add(Cell(said, below=said), Missing(said))
    table.add(name_cell("a`b`c `d`"), "1")
    facets = Table("f", said, [Column("what"), Column("value")], facets=("what",))
    facets.add(Cell(said, below=said), "1")
    advice = Advice("id", said, said, "", said, said, said, "", said, [said])
    share = Share("label", "1 ms", "100 %", 1.0, "#000000")
    blocks: list[Block] = [
        Paragraph(said), Items([Item(said, said, [said])]), Unavailable("What:", said), Cards([Card("name", "1", said)]),
        Banner([Item(said, said, [said]), Item(said, said)]), AdviceCards([advice]), StackedBar("b", "title", said, [share]),
        table, facets,
    ]  # fmt: skip
    document = Document("title", said, said, [Section("s", "Section", blocks)])
    page = re.sub(r"<script.*?</script>|<style.*?</style>", "", render_html(document), flags=re.DOTALL)
    shown = re.sub(r'="[^"]*"', "", page)
    assert shown.count("<code>llm-perf doctor</code>, and a &lt; b") == shown.count("llm-perf doctor") > 20
    assert re.findall(r"[^>]*`[^<]*", shown) == ["a`b`c `d`"]
    assert "<code>" not in "".join(re.findall(r'="[^"]*"', page))

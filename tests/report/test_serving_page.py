"""The page of a run under load in a real browser."""

from dataclasses import replace
from pathlib import Path

import pytest

from chromium import Chromium
from llm_perf_opt.analysis.serving.points import MeasuredLoad, analyze_point
from llm_perf_opt.analysis.serving.slo import Slo
from llm_perf_opt.core.missing import Missing
from llm_perf_opt.core.serving_records import LoadPoint, LoadRecords, ServedRequest
from llm_perf_opt.report.html import render_html
from llm_perf_opt.report.serving_document import serving_document, serving_summary
from llm_perf_opt.report.serving_tables import throughput_table
from llm_perf_opt.workflows.run_reader import RunReader
from llm_perf_opt.workflows.serving import analyze_serving
from serving_loads import write_serving_run

ATTACK = "</script><img src=x onerror='window.hacked = 1'>"


def test_the_page_is_drawn_and_fits(chromium: Chromium, tmp_path: Path) -> None:
    folder = write_serving_run(tmp_path / "run", [8.0, 16.0, 40.0], count=60, slo={"ttft": 200_000_000}, profiled=16.0)
    found = analyze_serving(RunReader(folder))
    assert not isinstance(found.server, Missing)
    hostile = replace(found, server=replace(found.server, model=ATTACK, engine=ATTACK, argv=(ATTACK,)))
    page = tmp_path / "report.html"
    page.write_text(render_html(serving_document(hostile)), encoding="utf-8")
    chromium.size(1280, 900)
    chromium.console.clear()
    chromium.requests.clear()
    chromium.open(page)
    assert chromium.console == []
    assert chromium.requests == [page.resolve().as_uri()]
    assert chromium.ask("window.hacked") is None
    for chart in ("curve-chart", "server-chart"):
        assert chromium.ask(f"document.querySelectorAll('#{chart} .js-line').length") >= 3
    for width in (1280, 800):
        chromium.size(width, 900)
        assert chromium.ask("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("rates", [[8.0], [8.0, 16.0], [8.0, 40.0], [40.0, 80.0]])
def test_summaries_are_whole_sentences(tmp_path: Path, rates: list[float]) -> None:
    found = analyze_serving(RunReader(write_serving_run(tmp_path / "run", rates, count=40)))
    for block in serving_summary(found).sections[0].blocks:
        for item in getattr(block, "items", ()):
            assert item.text.endswith(".")
            assert "n/a" not in item.text


def test_the_share_of_good_requests_names_those_that_were_cut() -> None:
    slo = Slo({"ttft": 100})
    found = analyze_point(
        MeasuredLoad(
            LoadPoint(1, "rate", 8.0, "poisson", "x", "f", 3, 0, 9, "complete"),
            LoadRecords("x", (ServedRequest("a", 1, 9, (2,)), ServedRequest("b", 2, 9, error="not finished", cut=True))),
            *[Missing("not recorded")] * 3,
        ),
        slo,
    )
    row = throughput_table([found], slo).rows[0]
    assert any(getattr(cell, "below", "").endswith(", 1 undecided)") for cell in row)

"""The page of many runs: hostile names stay text, charts show every commit, and it works in a real browser."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from builders import HOSTILE_NAMES
from chromium import Chromium
from command import llm_perf
from docs_commands import commands
from fleets import Made, made_run
from llm_perf_opt.analysis.fleet import Fleet
from llm_perf_opt.report.fleet import fleet_document
from llm_perf_opt.report.fleet_charts import trend_svg
from llm_perf_opt.report.html import MOST_WITHOUT_SCRIPT, render_html
from llm_perf_opt.report.markdown import render_markdown
from llm_perf_opt.workflows.fleet import Filters, find_fleet, view_fleet

ATTACKS = (
    "<script>window.hacked = 1</script>",
    "</script><img src=x onerror='window.hacked = 1'>",
    "<svg onload='window.hacked = 1'>",
    "javascript:window.hacked=1",
    *HOSTILE_NAMES,
)
LINKS_IN_SIGHT = """[...new Set([...document.querySelectorAll('#{} a')].map(link => {{
    const inside = link.closest('.scroll').getBoundingClientRect(), shown = link.getBoundingClientRect();
    return shown.left >= inside.left && shown.right <= inside.right; }}))]"""
COMMITS = [f"{number:x}" * 40 for number in range(6)]


def fleet(folder: Path, runs: list[Made]) -> Fleet:
    for number, made in enumerate(runs):
        run = made_run(folder / "runs" / f"{number:03d}", replace(made, minute=number))
        run.page_file.write_text("x")
    index, found = find_fleet(folder / "runs", Filters())
    return view_fleet(index, found, "tpot", Filters(), page=folder / "runs" / "index.html")


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    runs = [Made(hardware=name, why=name, status="partial") for name in ATTACKS]
    runs += [Made(hardware=name, commit=commit) for name in ATTACKS[:4] for commit in ("a" * 40, f"b{name}")]
    source = render_html(fleet_document(fleet(tmp_path, runs)))
    assert source.count("<script") == 4  # the data of charts and of rows, and two scripts
    markup = re.sub(r"<script.*?</script>", "", source, flags=re.S)
    for tag in ("<img", "<svg onload", 'href="javascript'):
        assert tag not in markup
    assert "&lt;img src=x" in markup


def test_a_chart_has_every_run_and_marks_uncommitted_changes(tmp_path: Path) -> None:
    runs = [Made(commit=commit, tpot_ms=10 + place) for place, commit in enumerate(COMMITS) for _ in range(2)]
    found = fleet(tmp_path, [*runs, Made(commit=COMMITS[-1], dirty=True)])
    (series,) = found.series
    drawn = trend_svg(series, "tpot", "ns")
    assert drawn.count("<title>") == 7
    assert drawn.count('r="2.5"') == 12
    assert drawn.count('fill="none" stroke="#E69F00"') == 1
    assert len(re.findall(r"[\d.]+,[\d.]+", re.findall(r'<polyline points="([^"]+)"', drawn)[0])) == 6
    assert "10.00 ms" in drawn


def test_all_renderers_show_verdict_cautions_and_what_is_left_out(tmp_path: Path) -> None:
    runs = [Made(commit="b" * 40), Made(commit="a" * 40, tpot_ms=12), Made(status="failed", why="killed")]
    document = fleet_document(fleet(tmp_path, runs))
    for text in (render_html(document), render_markdown(document)):
        assert "slower" in text
        assert "Too few runs" in text
        assert "failed (1)" in text
        assert "first measured" in text


def test_an_empty_folder_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    assert "no ranked run has tpot" in render_html(fleet_document(fleet(tmp_path, [])))


def test_the_commands_of_the_documentation(tmp_path: Path) -> None:
    fleet(tmp_path, [Made(commit="b" * 40), Made(commit="a" * 40, tpot_ms=12)])
    listed = [words for words in commands("fleet.md") if words[0] == "runs"]
    assert len(listed) == 6
    for words in listed:
        done = llm_perf(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "index.html").is_file()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fleet")
    many = [
        Made(commit=commit, tpot_ms=10 + batch, model=model, batch=batch)
        for commit in COMMITS
        for model in ("one", "two")
        for batch in (1, 8, 16, 32, 64)
    ]
    partial = [*ATTACKS, "There is no nsys; see `llm-perf doctor`."]
    found = fleet(folder, [*many, *[Made(hardware=name, status="partial", why=name) for name in partial]])
    path = folder / "runs" / "index.html"
    path.write_text(render_html(fleet_document(found)), encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (800, "dark")])
def test_the_page_works_from_disk(chromium: Chromium, page: Path, width: int, scheme: str) -> None:
    chromium.size(width, 900)
    chromium.scheme(scheme)
    chromium.console.clear()
    chromium.requests.clear()
    chromium.open(page)
    rows = "document.querySelectorAll('#runs-table tbody tr').length"
    whole = 60 + len(ATTACKS) + 1
    assert whole > MOST_WITHOUT_SCRIPT
    assert chromium.ask(rows) == whole
    for table in ("best-table", "runs-table"):
        assert chromium.ask(LINKS_IN_SIGHT.format(table)) == [True], table
    assert chromium.ask("document.querySelector('h1').textContent") == "Overview of runs"
    told = "[...document.querySelectorAll('#runs-table td code')].map(code => code.textContent)"
    assert "llm-perf doctor" in chromium.ask(told)
    pick = """(() => {{ const field = [...document.querySelectorAll('[data-rows="runs-table"] label')]
        .find(label => label.textContent.startsWith('{name}')).querySelector('select');
        field.value = [...field.options].find(option => option.dataset.text === '{value}').value;
        field.dispatchEvent(new Event('change')); }})()"""
    chromium.ask(pick.format(name="model", value="two"))
    assert chromium.ask(rows) == 30
    chromium.ask(pick.format(name="batch", value="8 × 128 + 8"))
    assert chromium.ask(rows) == 6
    headings = "[...document.querySelectorAll('#runs-table th')]"
    chromium.ask(f"{headings}.find(cell => cell.textContent === 'tpot').querySelector('button').click()")
    assert chromium.ask("document.querySelector('#runs-table a').getAttribute('href')").endswith("/report.html")
    assert chromium.ask("[...document.querySelectorAll('.drawings figure')].filter(one => !one.hidden).length") == 1
    chromium.ask("document.querySelector('.pick select').value = '3'")
    chromium.ask("document.querySelector('.pick select').dispatchEvent(new Event('change'))")
    assert chromium.ask("document.querySelectorAll('.drawings figure')[3].hidden") is False
    assert chromium.ask("typeof window.hacked") == "undefined"
    assert chromium.ask("document.documentElement.scrollWidth <= window.innerWidth") is True
    assert chromium.console == []
    assert [url for url in chromium.requests if not url.startswith("file:")] == []

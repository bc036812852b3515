"""The pages in a real browser: opened from disk, nothing fetched, charts drawn, tables alive, hostile names harmless."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as altered

from builders import HOSTILE_NAMES, clean_timings, empty_analysis, iteration, run_analysis, workload
from chromium import Chromium
from llm_perf_opt.analysis.comparison.compare import Side, compare
from llm_perf_opt.analysis.comparison.effects import Judgement
from llm_perf_opt.analysis.comparison.figures import ComparedFigure
from llm_perf_opt.analysis.comparison.kernels import ComparedKernel
from llm_perf_opt.analysis.sweep import sweep_rows
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.terminal import visible
from llm_perf_opt.core.units import FLOP_RATE
from llm_perf_opt.report.html import MOST_BYTES
from llm_perf_opt.report.sweep import SweepReport
from pages import full_analysis, readings, sweep_entries, trace_analysis
from rendered import comparison_html, run_page, sweep_page

NO_REGIONS = Missing("no timeline")
ATTACKS = (
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<svg onload='window.hacked = 1'>",
    "<a href='javascript:window.hacked=1'>click</a>",
    "<b>bold</b> &lt;i&gt; %{x} $\\alpha$",
    "<!-- <script>",
    "\u2028\u2029 </title></style>",
    "half \ud800 a character",
    *HOSTILE_NAMES,
)
CHARTS = ["waterfall-0", "steps", "roofline", "icicle", "readings-chart"]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(run_page(full_analysis(), readings(), NO_REGIONS), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def hostile_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "a b#c%20?.html"
    path.write_text(run_page(full_analysis(ATTACKS), readings(), NO_REGIONS), encoding="utf-8")
    return path


def opened(chromium: Chromium, path: Path, width: int = 1280, scheme: str = "light") -> Chromium:
    """The page, with nothing remembered of those before."""
    chromium.size(width, 900)
    chromium.scheme(scheme)
    chromium.console.clear()
    chromium.requests.clear()
    chromium.open(path)
    return chromium


def column(browser: Chromium, table: str, index: int) -> list[str]:
    found: list[str] = browser.ask(
        f"[...document.querySelectorAll('#{table} tbody tr:not([hidden])')].map(row => row.cells[{index}].textContent)"
    )
    return found


def drawn(browser: Chromium, chart: str) -> int:
    """How many marks a chart has."""
    marks = ", ".join(f"#{chart} {mark}" for mark in (".point", ".points path", ".js-line", ".js-fill", ".slice"))
    found: int = browser.ask(f"document.querySelectorAll('{marks}').length")
    return found


def test_it_opens_from_disk_without_an_error_or_a_request(chromium: Chromium, run_file: Path) -> None:
    browser = opened(chromium, run_file)
    assert browser.ask("location.protocol") == "file:"
    assert browser.console == []
    assert browser.requests == [run_file.resolve().as_uri()]
    assert run_file.stat().st_size <= MOST_BYTES


def test_a_request_would_be_refused_and_seen(chromium: Chromium, run_file: Path) -> None:
    """That nothing leaves is the policy's doing, and this test would see it."""
    browser = opened(chromium, run_file)
    assert browser.ask("fetch('http://127.0.0.1:9/x').then(() => 'sent', () => 'refused')") == "refused"
    assert any("Content Security Policy" in text for text in browser.console)
    assert not any(url.startswith("http") for url in browser.requests)


@pytest.mark.parametrize("chart", CHARTS)
def test_every_chart_is_drawn(chromium: Chromium, run_file: Path, chart: str) -> None:
    browser = opened(chromium, run_file)
    assert browser.ask(f"document.querySelectorAll('#{chart} svg').length") >= 1
    assert drawn(browser, chart) >= 1
    box = browser.box(f"#{chart} .main-svg")
    assert box["width"] > 300
    assert box["height"] > 100


def test_no_button_sends_a_chart_away(chromium: Chromium, run_file: Path) -> None:
    browser = opened(chromium, run_file)
    titles = browser.ask(
        "[...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title + ' ' + (b.dataset.attr || ''))"
    )
    assert titles
    assert not [title for title in titles if "cloud" in title.lower() or "studio" in title.lower() or "edit" in title.lower()]
    assert browser.ask("document.querySelectorAll('a[href^=http]').length") == 0


@pytest.mark.parametrize("width", [1280, 800])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_window_and_text_can_be_read(
    chromium: Chromium, run_file: Path, width: int, scheme: str
) -> None:
    browser = opened(chromium, run_file, width, scheme)
    assert browser.ask("document.documentElement.scrollWidth") <= width
    colors = browser.ask(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor,"
        " getComputedStyle(document.querySelector('#steps .xtick text')).fill]"
    )
    text, ground, tick = (sum(int(part) for part in color[4:-1].split(",")[:3]) / 3 for color in colors)
    assert abs(text - ground) > 120
    assert abs(tick - ground) > 120
    assert (ground < 128) == (scheme == "dark")


def test_the_first_screen_ends_with_what_to_change(chromium: Chromium, run_file: Path) -> None:
    browser = opened(chromium, run_file)
    boxes = [browser.box(selector) for selector in (".cards", ".bar .stack", ".advice > li:first-child .effect")]
    assert [box["y"] for box in boxes] == sorted(box["y"] for box in boxes)
    assert boxes[-1]["y"] + boxes[-1]["height"] < 800
    widths = browser.ask("[...document.querySelectorAll('#bar-0 .stack span')].map(part => part.getBoundingClientRect().width)")
    assert widths[2] / sum(widths) == pytest.approx(0.6, abs=0.02), "launch gaps are 60 %"
    assert len(set(browser.ask("[...document.querySelectorAll('#bar-0 .legend i')].map(i => i.style.background)"))) == 4


def test_a_command_can_be_copied(chromium: Chromium, tmp_path: Path) -> None:
    made = trace_analysis()
    findings = [altered(made.findings[0], title="Do it", overrides=["runtime.cache=static"])]
    path = tmp_path / "report.html"
    path.write_text(run_page(full_analysis(trace=altered(made, findings=findings))), encoding="utf-8")
    browser = opened(chromium, path)
    assert "runtime.cache=static" in browser.ask("document.querySelector('.command code').textContent")
    browser.ask("document.querySelector('.command button').click()")
    browser.until("['Copied', 'Selected'].includes(document.querySelector('.command button').textContent)")
    assert not browser.ask("document.querySelector('.advice details').open")
    assert browser.requests == [path.resolve().as_uri()]


def cut_off(browser: Chromium, chart: str, texts: str) -> list[str]:
    """Which of the texts reach beyond a chart's sides."""
    found: list[str] = browser.ask(
        f"(() => {{ const box = document.querySelector('{chart}').getBoundingClientRect();"
        f" return [...document.querySelectorAll('{texts}')].filter(text => {{"
        " const at = text.getBoundingClientRect(); return at.left < box.left - 1 || at.right > box.right + 1; })"
        ".map(text => text.textContent) })()"
    )
    return found


def test_no_label_of_a_waterfall_is_cut_off(chromium: Chromium, run_file: Path) -> None:
    for width in (1280, 800):
        browser = opened(chromium, run_file, width)
        assert cut_off(browser, "#waterfall-0 .main-svg", "#waterfall-0 .bartext, #waterfall-0 .ytick text") == []


def _rate(text: str) -> float:
    number, _, unit = text.replace(",", "").partition(" ")
    return float(number) * {name: base for base, name in FLOP_RATE}.get(unit, 1.0)


def test_a_table_sorts_both_ways_with_missing_values_last(chromium: Chromium, run_file: Path) -> None:
    browser = opened(chromium, run_file)
    heading = "document.querySelectorAll('#kernels th')[6]"
    before = column(browser, "kernels", 6)
    assert any(text.startswith("n/a") for text in before)
    browser.ask(f"{heading}.querySelector('button').click()")
    assert browser.ask(f"{heading}.getAttribute('aria-sort')") == "descending"
    down = column(browser, "kernels", 6)
    known = [_rate(text) for text in down if not text.startswith("n/a")]
    assert known == sorted(known, reverse=True)
    assert down[: len(known)] == [text for text in down if not text.startswith("n/a")]
    browser.ask(f"{heading}.querySelector('button').click()")
    assert browser.ask(f"{heading}.getAttribute('aria-sort')") == "ascending"
    up = column(browser, "kernels", 6)
    assert [text for text in up if not text.startswith("n/a")] == sorted(
        (text for text in down if not text.startswith("n/a")), key=_rate
    )
    assert up[-1].startswith("n/a")
    assert sorted(up) == sorted(before)


def test_sorting_by_keyboard(chromium: Chromium, run_file: Path) -> None:
    browser = opened(chromium, run_file)
    browser.ask("document.querySelector('#operators th:nth-child(2) button').focus()")
    browser.press("Enter")
    assert [int(text) for text in column(browser, "operators", 1)] == [3, 2, 1]


def test_the_skip_link_is_the_first_stop(chromium: Chromium, run_file: Path) -> None:
    browser = opened(chromium, run_file)
    browser.press("Tab")
    assert browser.ask("document.activeElement.className") == "skip"
    browser.press("Enter")
    assert browser.ask("location.hash") == "#content"


def test_a_table_filters_and_says_how_many_are_left(chromium: Chromium, run_file: Path) -> None:
    browser = opened(chromium, run_file)
    rows = len(column(browser, "operators", 0))
    browser.ask(
        "(() => { const f = document.querySelector('input[data-for=operators]'); f.value = 'ATEN::C';"
        "f.dispatchEvent(new Event('input')); })()"
    )
    assert column(browser, "operators", 0) == ["aten::cat"]
    assert browser.ask("document.querySelector('#operators-box .count').textContent") == f"1 of {rows} rows"


def test_hostile_names_do_not_execute_and_are_shown(chromium: Chromium, hostile_file: Path) -> None:
    browser = opened(chromium, hostile_file)
    assert browser.ask("typeof window.hacked") == "undefined"
    assert browser.console == []
    assert len(browser.requests) == 1
    assert browser.ask("document.querySelectorAll('main img, main script, main a[href^=javascript], h1 *').length") == 0
    shown = "".join(" ".join(column(browser, "operators", 0)).split())
    for name in ATTACKS:
        readable = visible(name)
        assert "".join(readable.split()) in shown


def test_hostile_names_are_text_in_charts_too(chromium: Chromium, hostile_file: Path) -> None:
    browser = opened(chromium, hostile_file)
    labels = browser.ask("[...document.querySelectorAll('#icicle .slicetext')].map(t => t.textContent)")
    assert any("<script>" in text for text in labels)
    assert browser.ask("document.querySelectorAll('.chart a, .chart img, .chart script').length") == 0
    for number in range(len(ATTACKS) + 4):  # the pointer over every slice: what hovering shows is made of the same names
        place = browser.ask(
            f"(() => {{ const s = document.querySelectorAll('#icicle .slice')[{number}]; if (!s) return null;"
            "s.scrollIntoView({block: 'center'}); const r = s.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        if place:
            browser.move(*place)
    assert browser.ask("document.querySelectorAll('.hoverlayer a, .hoverlayer script').length") == 0
    assert browser.ask("typeof window.hacked") == "undefined"


def test_hovering_shows_a_name_as_it_is(chromium: Chromium, hostile_file: Path) -> None:
    browser = opened(chromium, hostile_file)
    name = ATTACKS[0]
    browser.ask("Plotly.Fx.hover('waterfall-0', [{curveNumber: 0, pointNumber: 0}])")
    browser.until("document.querySelector('#waterfall-0 .hoverlayer text') !== null")
    assert name in browser.ask("document.querySelector('#waterfall-0 .hoverlayer').textContent")


def test_a_run_without_anything_still_has_a_page(chromium: Chromium, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(run_page(empty_analysis("killed <b>hard</b>"), Missing("no telemetry"), NO_REGIONS), encoding="utf-8")
    browser = opened(chromium, path)
    assert browser.console == []
    assert "killed <b>hard</b>" in browser.ask("document.body.textContent")
    assert browser.ask("document.querySelectorAll('b').length") == 0


def test_a_sweep_is_one_page(chromium: Chromium, tmp_path: Path) -> None:
    path = tmp_path / "sweep.html"
    rows = sweep_rows(sweep_entries("out of <b>memory</b>"))
    report = SweepReport("sweeps/x", "2026-01-02", ("llm-perf", "run", "-m"), rows, "runs/sweeps/x y")
    path.write_text(sweep_page(report), encoding="utf-8")
    browser = opened(chromium, path)
    assert browser.console == []
    assert browser.requests == [path.resolve().as_uri()]
    assert drawn(browser, "tradeoff-chart") >= 4
    assert drawn(browser, "parameter-0") >= 3
    links = browser.ask("[...document.querySelectorAll('#points-table a')].map(a => a.getAttribute('href'))")
    assert links == [f"./{number:03d}/report.html" for number in range(4)]
    assert column(browser, "points-table", 2) == ["complete"] * 4 + ["failed"]
    said = browser.ask("document.querySelector('#points .warnings').textContent")
    assert "Point 4 (batch_size 16) is failed and not ranked: out of <b>memory</b>" in said
    for width in (1280, 800):
        browser.size(width, 900)
        assert browser.ask("document.documentElement.scrollWidth") <= width


def test_a_sweep_over_two_parameters_is_read_whole(chromium: Chromium, tmp_path: Path) -> None:
    """No label of a chart is cut at its edge, and at 1280 pixels no table has to be moved sideways."""
    entries = [
        replace(entry, swept=(*entry.swept, f"model={'qwen2_5_1_5b' if number else 'a-name-that-is-too-long-for-a-label'}"))
        for number, entry in enumerate(sweep_entries())
    ]
    path = tmp_path / "sweep.html"
    path.write_text(sweep_page(SweepReport("x", "now", ("llm-perf",), sweep_rows(entries), "runs/x")), encoding="utf-8")
    for width in (1280, 800):
        browser = opened(chromium, path, width)
        assert browser.console == []
        cut = browser.ask(
            "(() => { const box = document.querySelector('#tradeoff-chart').getBoundingClientRect();"
            " return [...document.querySelectorAll('#tradeoff-chart .textpoint')].filter(label => {"
            " const at = label.getBoundingClientRect(); return at.left < box.left || at.right > box.right"
            " || at.top < box.top || at.bottom > box.bottom; }).map(label => label.textContent) })()"
        )
        assert cut == []
        assert browser.ask("document.querySelectorAll('#tradeoff-chart .textpoint').length") == 4
        if width == 1280:
            wide = "[...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth).length"
            assert browser.ask(wide) == 0


def test_in_print_everything_is_dark_on_white(chromium: Chromium, run_file: Path) -> None:
    browser = opened(chromium, run_file, scheme="dark")
    browser.call("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert browser.ask("getComputedStyle(document.documentElement).getPropertyValue('--ground').trim()") == "#fff"
    assert browser.ask("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert json.dumps(browser.console) == "[]"
    browser.call("Emulation.setEmulatedMedia", media="")


def test_a_comparison_is_one_page_and_its_names_are_text(chromium: Chromium, tmp_path: Path) -> None:
    base = run_analysis(timings=clean_timings([iteration() for _ in range(8)]))
    kernels = [ComparedKernel(name, "decode", "GEMM", 2, 1000 + number) for number, name in enumerate(ATTACKS)]
    figures = [ComparedFigure(f"decode/{name}, per token", "ns", 1e6) for name in ATTACKS[:4]]
    sides = [Side((replace(base, run=run),), kernels, figures) for run in (ATTACKS[0], ATTACKS[1])]
    path = tmp_path / "comparison.html"
    path.write_text(comparison_html(compare(sides[0], sides[1])), encoding="utf-8")
    browser = opened(chromium, path)
    assert browser.ask("typeof window.hacked") == "undefined"
    assert browser.console == []
    assert browser.requests == [path.resolve().as_uri()]
    assert browser.ask("document.querySelectorAll('#changes .scatterlayer .point').length") > 0
    assert ATTACKS[2] in str(browser.ask("document.body.innerText"))


def test_a_comparison_is_read_whole_in_a_narrow_window(chromium: Chromium, tmp_path: Path) -> None:
    """No title or label of the chart of changes is cut at its edge, and no table of changes has to be moved sideways."""
    words = workload(prompt_tokens=(512, 512), padded_tokens=512)
    sides = []
    for tenth in (10, 1):  # restless, and decode ten times faster: the widest figures that a table of changes is likely to hold
        times = [1_234_567 + 345_678 * (number % 4) for number in range(10)]
        timings = clean_timings([iteration(10 * time, [tenth * time] * 3) for time in times], workload=words)
        sides.append(Side((run_analysis(timings=timings, run=f"runs/{tenth}"),)))
    path = tmp_path / "comparison.html"
    path.write_text(
        comparison_html(compare(sides[0], sides[1], judgement=Judgement(process_spread=0.01))),
        encoding="utf-8",
    )
    for width in (1280, 800):
        browser = opened(chromium, path, width)
        assert cut_off(browser, "#changes .main-svg", "#changes .xtitle, #changes .ytick text") == []
        assert browser.ask("document.querySelectorAll('#changes .xtitle').length") == 1
        wide = "[...document.querySelectorAll('.scroll')].filter(b => b.scrollWidth > b.clientWidth).map(b => b.ariaLabel)"
        assert browser.ask(wide) == []
        assert browser.ask("document.documentElement.scrollWidth") <= width

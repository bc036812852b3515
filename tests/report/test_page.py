"""The page's frame: one file, nothing fetched, nothing in it that a name could turn into markup or script."""

import base64
import hashlib
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import HOSTILE_NAMES
from llm_perf_opt.core.records import Missing
from llm_perf_opt.report.document import (
    Cell,
    Chart,
    Code,
    Column,
    Document,
    Item,
    Items,
    Paragraph,
    Section,
    Table,
    Unavailable,
    mark,
)
from llm_perf_opt.report.html import render_html, script_data

MARKUP = ("</script><script>window.hacked = 1</script>", "<!--", "]]>", "<img src=x onerror=hacked()>", "\u2028\u2029", "\"'&")


def page(*blocks: object, title: str = "A run") -> str:
    return render_html(Document(title, "What ran", "", [Section("one", "One", blocks)]))  # type: ignore[arg-type]


def scripts(source: str) -> list[str]:
    return re.findall(r"<script>(.*?)</script>", source, re.S)


def test_only_its_own_scripts_may_run() -> None:
    source = page(Chart("c", "A chart", {"data": [], "layout": {}}))
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', source)
    assert policy is not None
    words = policy[1].replace("&#39;", "'")
    assert "default-src 'none'" in words
    assert "unsafe-eval" not in words
    directive = re.search(r"script-src ([^;]+)", words)
    assert directive is not None
    assert "unsafe" not in directive[1]
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts(source)}
    assert set(directive[1].split()) == hashes
    assert len(hashes) == 2, "the library and the page's own"


def test_the_library_is_there_once_and_only_where_it_is_needed() -> None:
    with_chart = page(Chart("c", "A chart", {"data": [], "layout": {}}), Chart("d", "Another", {"data": [], "layout": {}}))
    without = page(Paragraph("No chart."))
    assert len(scripts(with_chart)) == 2
    assert len(scripts(without)) == 1
    assert len(without) < 30_000


def test_nothing_outside_the_file_is_named_where_it_would_be_fetched() -> None:
    source = page(Paragraph("x"), Chart("c", "A chart", {"data": [], "layout": {}}))
    frame = re.sub(r"<script>.*?</script>", "", source, flags=re.S)
    assert not re.search(r"<(link|img|iframe|object|embed|base|form)\b", frame)
    assert not re.search(r"\bsrc=", frame)
    assert "http" not in re.sub(r"http-equiv|http://www\.w3\.org/2000/svg", "", frame)


@pytest.mark.parametrize("name", [*HOSTILE_NAMES, *MARKUP])
def test_names_stay_text(name: str) -> None:
    table = Table("t", name, [Column(name)], tools=True, foot=name)
    table.add(Cell(name or "-", whole=name, link=name, below=name, indent=2))
    table.add(Missing(name))
    source = page(
        Paragraph(name), Items([Item(name, name, [name])], ordered=True), Code(name), Unavailable(name, name), table,
        Chart("c", name, {"data": [{"name": name}], "layout": {}}, notes=[name]), title=name,
    )  # fmt: skip
    assert source.count("<script") == 3, "the data, the library and the page's own"
    data = re.search(r'<script type="application/json" id="charts">(.*?)</script>', source, re.S)
    assert data is not None
    assert json.loads(data[1])["c"]["data"][0]["name"] == name
    frame = re.sub(r"<script.*?</script>", "", source, flags=re.S)
    assert "<img" not in frame
    assert "<b>" not in frame
    assert 'href="javascript' not in frame


@given(st.text())
def test_data_in_a_script_comes_back_whole_and_cannot_leave_it(text: str) -> None:
    written = script_data({"name": text})
    assert json.loads(written) == {"name": text}
    assert not set(written) & set("<>&\u2028\u2029")


def test_half_a_character_can_be_written() -> None:
    source = page(Paragraph("a\ud800b\x00c\u202ed"), Chart("c", "C", {"data": [{"name": "a\ud800b"}], "layout": {}}))
    assert r"<p>a\ud800b\x00c\u202ed</p>" in source
    assert '"a\\ud800b"' in source
    assert source.encode()


def test_a_number_that_is_none_is_a_defect() -> None:
    with pytest.raises(ValueError, match="JSON"):
        script_data(float("nan"))


def test_a_missing_value_has_its_reason_once() -> None:
    table = Table("t", "T", [Column("a"), Column("b", number=True)])
    table.add("x", Missing("no counters"))
    table.add("y", Missing("no trace"))
    table.add("z", Missing("no counters"))
    source = page(table)
    assert source.count("n/a: no counters") == 1
    assert source.count("n/a<sup>a</sup>") == 2
    assert source.count("n/a<sup>b</sup>") == 1
    assert [mark(0), mark(25), mark(26)] == ["a", "z", "26"]


def test_without_the_library_the_images_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    from llm_perf_opt.report import html as module

    monkeypatch.setattr(module, "_plotly", lambda: "")
    source = page(Chart("c", "A chart", {"data": [], "layout": {}}, still="<svg></svg>"), Chart("d", "Another", {"data": []}))
    assert "plotly was not installed" in source
    assert "<svg></svg>" in source
    assert source.count("n/a: this chart needs plotly") == 1, "of the second one, which has no image"
    assert len(scripts(source)) == 1


def test_a_row_must_fill_its_table() -> None:
    table = Table("t", "T", [Column("a"), Column("b")])
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        table.add("x")

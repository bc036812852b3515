"""Still images: well-formed, with every figure in them, whatever the names are."""

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import HOSTILE_NAMES, MS
from llm_perf_opt.core.terminal import one_line
from llm_perf_opt.report.chart_data import Point, RoofLine, Roofline, Use, Waterfall, roof_corners, roofline_extent
from llm_perf_opt.report.svg import roofline_svg, waterfalls_svg

SVG = "{http://www.w3.org/2000/svg}"


def texts(source: str) -> list[str]:
    return ["".join(node.itertext()) for node in ET.fromstring(source).iter(f"{SVG}text")]


def bars(source: str) -> list[tuple[float, float]]:
    """Left and right end of every bar, the ground left out."""
    rects = list(ET.fromstring(source).iter(f"{SVG}rect"))[1:]
    return [(float(rect.attrib["x"]), float(rect.attrib["x"]) + float(rect.attrib["width"])) for rect in rects]


def test_each_use_begins_where_the_one_before_ended() -> None:
    source = waterfalls_svg([Waterfall("decode", "decode, 10 ms per token", (Use("floor", 2 * MS), Use("launch gaps", 8 * MS)))])
    (first, second, whole) = bars(source)
    assert first[1] == pytest.approx(second[0], abs=0.11)
    assert second[1] == pytest.approx(whole[1], abs=0.11)
    assert first[0] == whole[0]
    assert (second[1] - second[0]) / (first[1] - first[0]) == pytest.approx(4, rel=0.01)
    said = texts(source)
    assert "decode, 10 ms per token" in said
    assert "2.000 ms · 20.0 %" in said
    assert "10.00 ms" in said


def test_a_negative_use_goes_back() -> None:
    source = waterfalls_svg([Waterfall("decode", "decode", (Use("kernels", 12 * MS), Use("disagreement", -2 * MS)))])
    kernels, back, whole = bars(source)
    assert back[1] == pytest.approx(kernels[1], abs=0.11)
    assert back[0] == pytest.approx(whole[1], abs=0.11)
    assert "-2.000 ms · -20.0 %" in texts(source)


def test_a_stage_of_no_time_is_still_an_image() -> None:
    assert "0 ms" in texts(waterfalls_svg([Waterfall("decode", "decode", (Use("floor", 0),))]))


def a_roofline(name: str = "mlp") -> Roofline:
    points = (
        Point("stage", "decode", "decode", 1.0, 1e12, 5 * MS), Point("component", "decode", name, 2.0, 2e12, 2 * MS),
        Point("kernel", "prefill", name, 300.0, 4e14, MS),
    )  # fmt: skip
    return Roofline("bf16", (RoofLine("datasheet", 989e12, 4.8e12), RoofLine("measured", 800e12, 4e12)), points)


def test_every_point_and_every_roof_is_drawn_inside() -> None:
    root = ET.fromstring(roofline_svg(a_roofline()))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    lines = [node.attrib["points"] for node in root.iter(f"{SVG}polyline")]
    assert len(lines) == 2
    for pair in " ".join(lines).split():
        x, y = (float(number) for number in pair.split(","))
        assert 0 <= x <= width
        assert 0 <= y <= height
    assert len(list(root.iter(f"{SVG}title"))) == 3
    said = texts(roofline_svg(a_roofline()))
    assert {"datasheet peak", "measured peak", "decode: whole", "decode: components", "prefill: kernels"} <= set(said)


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_names_stay_text(name: str) -> None:
    root = ET.fromstring(roofline_svg(a_roofline(name)))
    shown = one_line(name)
    assert any("".join(node.itertext()).startswith(f"{shown} (decode)") for node in root.iter(f"{SVG}title"))
    assert not list(root.iter(f"{SVG}script"))
    ET.fromstring(waterfalls_svg([Waterfall(name, name, (Use(name, MS),))]))


positive = st.floats(min_value=1e-3, max_value=1e18)


@given(peak=positive, bandwidth=positive, low=st.floats(1e-6, 1e3), factor=st.floats(1.1, 1e6))
def test_a_roof_is_the_lower_of_its_two_limits(peak: float, bandwidth: float, low: float, factor: float) -> None:
    corners = roof_corners(RoofLine("r", peak, bandwidth), low, low * factor)
    assert corners[0][0] == low
    assert corners[-1][0] == low * factor
    for x, y in corners:
        assert y == pytest.approx(min(x * bandwidth, peak))


def test_without_a_bandwidth_the_roof_is_flat() -> None:
    assert roof_corners(RoofLine("r", 5.0, None), 1.0, 10.0) == [(1.0, 5.0), (10.0, 5.0)]


@given(st.lists(st.tuples(st.floats(1e-6, 1e6), st.floats(1.0, 1e15)), max_size=8))
def test_the_axes_hold_every_point(places: list[tuple[float, float]]) -> None:
    points = tuple(Point("kernel", "decode", "k", x, y, 1) for x, y in places)
    (left, right), (bottom, top) = roofline_extent(Roofline("bf16", (RoofLine("r", 1e12, 1e10),), points))
    for x, y in places:
        assert left < x < right
        assert bottom < y < top

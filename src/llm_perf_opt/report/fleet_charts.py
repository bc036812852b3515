"""A metric over commits as an inline SVG, in the colors of the page."""

import math
from collections.abc import Callable, Sequence

from llm_perf_opt.analysis.fleet import Point, Series
from llm_perf_opt.core.units import TIME, in_unit, scale_of
from llm_perf_opt.report.colors import BLUE, ORANGE, plain
from llm_perf_opt.report.text import significant, with_unit

_WIDTH, _HEIGHT = 960, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 20, 14, 78
_MOST_LABELS = 16
_TICKS = 5
_MARGIN = 0.08
"""Space above and below the values, as a share of their range."""
_FLAT = 0.02
"""The least range of the axis, as a share of the values: noise alone does not fill the chart."""


def trend_svg(series: Series, key: str, unit: str) -> str:
    """Return the metric over commits: a line through commits, a dot per run, a ring for uncommitted changes."""
    low, high = _extent(series.points, key)
    points = list(enumerate(series.points))

    def across(place: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (place + 0.5) / len(points)

    def up(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (value - low) / (high - low)

    parts = _axis(low, high, unit, up)
    every = math.ceil(len(points) / _MOST_LABELS)
    for place, point in points:
        if place % every == 0:
            at = f'transform="translate({across(place):.1f} {_HEIGHT - _BOTTOM + 14}) rotate(-30)"'
            parts.append(f'<text {at} text-anchor="end" font-size="11">{plain(point.version)}</text>')
    clean = [(place, point) for place, point in points if point.is_clean]
    line = " ".join(f"{across(place):.1f},{up(point.value):.1f}" for place, point in clean)
    if len(clean) > 1:
        parts.append(f'<polyline points="{line}" fill="none" stroke="{BLUE}" stroke-width="2"/>')
    for place, point in points:
        parts += _marks(point, key, unit, across(place), up)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{plain(series.name)}">'
        '<g font-family="Helvetica, Arial, sans-serif" font-size="12" fill="currentColor">'
    )
    return head + "".join(parts) + "</g></svg>"


def starts_above_zero(series: Series, key: str) -> bool:
    """Return whether the axis of the chart leaves out zero."""
    return _extent(series.points, key)[0] > 0


def _extent(points: Sequence[Point], key: str) -> tuple[float, float]:
    """Return the ends of the axis: those of the values and their intervals, and a margin."""
    ends = [end for point in points for end in (point.low, point.high, *(run.readings[key].median for run in point.runs))]
    low, high = min(ends), max(ends)
    apart = max(high - low, _FLAT * abs(high), 1e-9)
    middle = (low + high) / 2
    low, high = min(low, middle - apart / 2), max(high, middle + apart / 2)
    return max(0.0, low - _MARGIN * apart), high + _MARGIN * apart


def _axis(low: float, high: float, unit: str, up: Callable[[float], float]) -> list[str]:
    scale = scale_of(high, TIME)
    parts = []
    for value in _ticks(low, high):
        text = f"{in_unit(value, scale)} {scale[1]}" if unit == "ns" else significant(value)
        y = up(value)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" stroke-opacity="0.15"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{plain(text)}</text>'
        )
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """Return round values inside the axis."""
    rough = (high - low) / _TICKS
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]


def _marks(point: Point, key: str, unit: str, x: float, up: Callable[[float], float]) -> list[str]:
    color, fill = (BLUE, BLUE) if point.is_clean else (ORANGE, "none")
    words = f"{point.version}: {with_unit(point.value, unit)}, {len(point.runs)} run{'' if len(point.runs) == 1 else 's'}"
    bar = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{up(point.low):.1f}" y2="{up(point.high):.1f}" stroke="{color}"/>'
    dots = [
        f'<circle cx="{x:.1f}" cy="{up(run.readings[key].median):.1f}" r="2.5" fill="{color}" fill-opacity="0.5"/>'
        for run in point.runs
        if len(point.runs) > 1
    ]
    mark = (
        f'<g><circle cx="{x:.1f}" cy="{up(point.value):.1f}" r="4" fill="{fill}" stroke="{color}" stroke-width="2"/>'
        f"<title>{plain(words)}</title></g>"
    )
    return [bar, *dots, mark]

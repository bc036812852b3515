"""Waterfall, roofline and staircase as SVG images: for Markdown, for slides, and for pages where no script runs.

Written directly, so that neither a browser nor a drawing library is needed. The background is white.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10

from llm_perf_opt.report.chart_data import Roofline, Waterfall, intensity_ticks, rate_ticks, roof_corners, roofline_extent
from llm_perf_opt.report.colors import BLUE, GRAY, ORANGE, SERIES, STAGE_COLORS, color_of, plain
from llm_perf_opt.report.text import duration, flops_per_s, percent

WIDTH = 960
_FONT = 'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#222"'
_DASHES = ("", ' stroke-dasharray="8 5"', ' stroke-dasharray="2 4"')
_BAR = 30
_LABELS = 330
_TEXT = 150


def waterfalls_svg(waterfalls: Sequence[Waterfall]) -> str:
    """Return the waterfalls of all stages, one below the other."""
    parts: list[str] = []
    top = 10
    for data in waterfalls:
        top = _waterfall(data, top, parts)
    return _document(WIDTH, top + 10, "Where the time goes", parts)


def _waterfall(data: Waterfall, top: int, parts: list[str]) -> int:
    whole = data.total_ns
    left, right = _LABELS, WIDTH - _TEXT
    ends = [0]
    for use in data.uses:
        ends.append(ends[-1] + use.ns)
    low, high = min(ends), max([*ends, 1])

    def across(ns: float) -> float:
        return left + (right - left) * (ns - low) / (high - low)

    parts.append(f'<text x="10" y="{top + 16}" font-weight="bold">{plain(data.title)}</text>')
    y = top + 30
    rows = [(use.label, begin, use.ns, color_of(use.color)) for use, begin in zip(data.uses, ends, strict=False)]
    for name, begin, ns, color in [*rows, ("measured", 0, whole, GRAY)]:
        start, stop = sorted((across(begin), across(begin + ns)))
        text = duration(ns) + (f" · {percent(ns / whole)}" if whole and name != "measured" else "")
        parts.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{plain(_short(name, 46))}</text>')
        parts.append(f'<rect x="{start:.1f}" y="{y}" width="{max(stop - start, 1):.1f}" height="{_BAR - 8}" fill="{color}"/>')
        parts.append(f'<text x="{stop + 6:.1f}" y="{y + 15}">{text}</text>')
        y += _BAR
    return y + 14


def roofline_svg(data: Roofline) -> str:
    """Return a log-log chart: stages as stars, components as diamonds, kernels as circles."""
    width, height, left, right, bottom, top = WIDTH, 560, 130, 20, 110, 20
    (x_low, x_high), (y_low, y_high) = roofline_extent(data)

    def across(value: float) -> float:
        return left + (width - left - right) * (log10(value) - log10(x_low)) / (log10(x_high) - log10(x_low))

    def up(value: float) -> float:
        return height - bottom - (height - top - bottom) * (log10(value) - log10(y_low)) / (log10(y_high) - log10(y_low))

    parts: list[str] = []
    for value, text in intensity_ticks(x_low, x_high):
        parts.append(f'<line x1="{across(value):.1f}" x2="{across(value):.1f}" y1="{top}" y2="{height - bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{across(value):.1f}" y="{height - bottom + 18}" text-anchor="middle">{text}</text>')
    for value, text in rate_ticks(y_low, y_high):
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{up(value):.1f}" y2="{up(value):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{up(value) + 4:.1f}" text-anchor="end">{text}</text>')
    middle = (left + width - right) / 2
    parts.append(f'<text x="{middle}" y="{height - bottom + 40}" text-anchor="middle">arithmetic intensity, FLOP/byte</text>')
    parts.append(
        f'<text transform="translate(18 {(top + height - bottom) / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"achieved rate ({plain(data.dtype)})</text>"
    )
    for number, roof in enumerate(data.roofs):
        line = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in roof_corners(roof, x_low, x_high))
        parts.append(f'<polyline points="{line}" fill="none" stroke="#555" stroke-width="2"{_DASHES[number % 3]}/>')
    longest = max([point.time_ns for point in data.points if point.kind != "stage"] or [1])
    order = {"kernel": 0, "component": 1, "stage": 2}
    for point in sorted(data.points, key=lambda point: order[point.kind]):
        size = 9.0 if point.kind == "stage" else 3 + 6 * (point.time_ns / longest) ** 0.5
        shape = _mark(
            point.kind, across(point.flops_per_byte), up(point.flops_per_s), size, STAGE_COLORS.get(point.stage, SERIES[2])
        )
        text = f"{point.name} ({point.stage}): {duration(point.time_ns)}, {flops_per_s(point.flops_per_s)}"
        parts.append(f"<g>{shape}<title>{plain(text)}</title></g>")
    parts += _legend(data, height - bottom + 70, left)
    return _document(width, height, "Roofline", parts)


@dataclass(frozen=True)
class Stair:
    """One configuration of a staircase, in ns."""

    name: str
    measured: float
    low: float
    high: float
    predicted: tuple[float, float, float] | None
    """Expected, low and high; None without a prediction."""
    roofline: float | None


def stairs_svg(title: str, stairs: Sequence[Stair]) -> str:
    """Return a bar per configuration, its interval, and marks at the predicted and the roofline time."""
    left, right, row = 300, WIDTH - 150, 34
    most = max([stair.high for stair in stairs] + [stair.predicted[2] for stair in stairs if stair.predicted] + [1.0])

    def across(ns: float) -> float:
        return left + (right - left) * max(ns, 0.0) / most

    parts = [f'<text x="10" y="22" font-weight="bold">{plain(title)}</text>']
    for number, stair in enumerate(stairs):
        y = 40 + number * row
        end = across(stair.measured)
        parts.append(f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">{plain(_short(f"{number}: {stair.name}", 44))}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{max(end - left, 1):.1f}" height="22" fill="{BLUE}" fill-opacity="0.6"/>')
        if stair.high > stair.low:
            parts.append(_line(across(stair.low), across(stair.high), y + 11, "#222"))
        if stair.predicted:
            expected, low, high = (across(ns) for ns in stair.predicted)
            parts += [_line(low, high, y + 3, ORANGE), _mark("component", expected, y + 3, 5, ORANGE)]
        if stair.roofline:
            x = across(stair.roofline)
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 4}" y2="{y + 26}" stroke="#555" stroke-dasharray="3 3"/>')
        parts.append(f'<text x="{max(end, across(stair.high)) + 8:.1f}" y="{y + 16}">{duration(stair.measured)}</text>')
    return _document(WIDTH, 50 + len(stairs) * row, "Staircase of the search", parts)


def _line(start: float, end: float, y: float, color: str) -> str:
    return f'<line x1="{start:.1f}" x2="{end:.1f}" y1="{y}" y2="{y}" stroke="{color}" stroke-width="2"/>'


def _legend(data: Roofline, y: int, left: int) -> list[str]:
    entries = [
        (f'<line x1="0" x2="24" y1="-4" y2="-4" stroke="#555" stroke-width="2"{_DASHES[number % 3]}/>', f"{roof.name} peak")
        for number, roof in enumerate(data.roofs)
    ]
    for kind, stage in dict.fromkeys((point.kind, point.stage) for point in data.points):
        mark = _mark(kind, 12, -4, 6, STAGE_COLORS.get(stage, SERIES[2]))
        entries.append((mark, f"{stage}: {'whole' if kind == 'stage' else f'{kind}s'}"))
    parts = []
    x = left
    for mark, words in entries:
        if x > WIDTH - 190:
            x, y = left, y + 22
        parts.append(f'<g transform="translate({x} {y})">{mark}<text x="30" y="0">{plain(words)}</text></g>')
        x += 45 + 8 * len(words)
    return parts


def _mark(kind: str, x: float, y: float, size: float, color: str) -> str:
    if kind == "kernel":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}" fill="{color}" fill-opacity="0.5" stroke="{color}"/>'
    if kind == "component":
        corners = [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)]
    else:
        right = [(0.4, -0.4), (1.4, -0.4), (0.6, 0.3), (0.9, 1.3)]
        corners = [(0, -1.4), *right, (0, 0.7), *[(-dx, dy) for dx, dy in reversed(right)]]
    points = " ".join(f"{x + dx * size:.1f},{y + dy * size:.1f}" for dx, dy in corners)
    return f'<polygon points="{points}" fill="{color}" stroke="#222"/>'


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _document(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{plain(title)}"><rect width="{width}" height="{height}" fill="#fff"/><g {_FONT}>'
    )
    return head + "\n".join(parts) + "</g></svg>\n"

"""Charts of a sweep."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llm_perf_opt.analysis.limits.binding import UNKNOWN, shown_verdict
from llm_perf_opt.analysis.sweep import SweepRow, by_workload, front_line, swept_keys
from llm_perf_opt.core.records import Distribution, Maybe, Missing
from llm_perf_opt.report.charts import GRAY, Figure, color_of, label, time_unit
from llm_perf_opt.report.text import duration, known, known_within, missing, present, significant, then, words

_LONGEST_LABEL = 36
"""Characters that fit in half of a narrow chart."""
_SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "star")


@dataclass(frozen=True)
class Quantity:
    """A quantity that is plotted over a swept parameter."""

    name: str
    key: str
    is_time: bool
    least: Callable[[SweepRow], Maybe[float]] | None
    """The value at the roofline time."""

    def value(self, row: SweepRow) -> Maybe[float]:
        """Return the median."""
        return row.median(self.key)

    def axis(self, rows: Sequence[SweepRow]) -> tuple[float, str]:
        """Return the size of one unit of the axis, and the title of the axis."""
        if not self.is_time:
            return 1.0, self.name
        size, unit = _time_axis(rows, self.key)
        return size, f"{self.name}, {unit}"


_QUANTITIES = (
    Quantity("TTFT", "ttft", True, None),
    Quantity("TPOT", "tpot", True, lambda row: row.roofline_ns),
    Quantity("decode tokens/s", "decode_rate", False, lambda row: row.roofline_rate),
)


def _time_axis(rows: Sequence[SweepRow], key: str) -> tuple[float, str]:
    return time_unit(present(row.median(key) for row in rows))


def bar_words(rows: Sequence[SweepRow]) -> str:
    """Return what the error bars of the ranked points show."""
    found = present(value for row in rows if row.ranked for value in row.metrics.values())
    few = missing(("", value.ci_low) for value in found)
    if not few:
        return "95 % intervals"
    ranges = "the range of the repeats, too few for a 95 % interval"
    return ranges if len(few) == len(found) else f"95 % intervals; for some points, {ranges}"


def tradeoff_chart(rows: Sequence[SweepRow], front: Sequence[SweepRow]) -> Maybe[Figure]:
    """Return every point that has figures, and the front as a line."""
    placed = [(row, place) for row in rows if row.ranked and (place := _place(row)) is not None]
    if not placed:
        return _why_none(rows)
    size, unit = _time_axis([row for row, _ in placed], "tpot")
    placed = [(row, (x / size, y)) for row, (x, y) in placed]
    farthest = max(max(x, _ends(row, "tpot", size)[1]) for row, (x, _) in placed)
    traces = _front_traces(front, size)
    bounds = list(dict.fromkeys(_bound_words(row) for row, _ in placed))
    for number, bound in enumerate(bounds):
        members = [(row, place) for row, place in placed if _bound_words(row) == bound]
        traces.append({
            "type": "scatter", "mode": "markers+text" if len(placed) <= 24 else "markers", "name": f"decode {label(bound)}",
            "x": [place[0] for _, place in members], "y": [place[1] for _, place in members],
            "text": [_short_label(row) for row, _ in members], "cliponaxis": False,
            # labels in the right half extend to the left, so that none is cut off
            "textposition": ["top left" if place[0] > 0.5 * farthest else "bottom right" for _, place in members],
            "marker": {"size": 11, "symbol": _SYMBOLS[number % len(_SYMBOLS)], "color": color_of(number)},
            "error_x": _bars([row for row, _ in members], "tpot", size),
            "error_y": _bars([row for row, _ in members], "decode_rate"),
            "hovertext": [_hover(row) for row, _ in members], "hoverinfo": "text",
        })  # fmt: skip
    rates = [end for row, (_, y) in placed for end in (y, *_ends(row, "decode_rate"))]
    layout = {
        "xaxis": {"title": {"text": f"TPOT, {unit} (less is better)"}, "range": [0, 1.15 * farthest]},
        "yaxis": {"title": {"text": "decode tokens/s (more is better)"}, **_rate_axis(rates)},
        "legend": {"orientation": "h", "y": -0.2},
        "hovermode": "closest",
        "height": 520,
    }
    return {"data": traces, "layout": layout}


def _front_traces(front: Sequence[SweepRow], size: float) -> list[Figure]:
    """Return rings around the points of the front, and a rising line per workload."""

    def at(rows: Sequence[SweepRow]) -> Figure:
        places = [place for row in rows if (place := _place(row)) is not None]
        return {"type": "scatter", "x": [x / size for x, _ in places], "y": [y for _, y in places], "hoverinfo": "skip"}

    line = {"mode": "lines", "showlegend": False, "line": {"dash": "dash", "color": GRAY}}
    ring = {"size": 20, "symbol": "circle-open", "color": GRAY, "line": {"width": 2}}
    return [
        {**at(front), "mode": "markers", "name": "on the front", "marker": ring},
        *[{**at(front_line(members)), "name": "the front", **line} for members in by_workload(front).values()],
    ]


def _short_label(row: SweepRow) -> str:
    """Return the values of a point; if they are too long for a label, its number in the table."""
    return label(row.label) if len(row.label) <= _LONGEST_LABEL else f"# {row.number}"


def _why_none(rows: Sequence[SweepRow]) -> Missing:
    """Return why no point can be placed, such as a single new token, which has no decode step."""
    lost = missing((key, row.median(key)) for row in rows if row.status == "complete" for key in ("tpot", "decode_rate"))
    return Missing(f"no point has a TPOT: {lost[0][1]}" if lost else "no point has figures")


def _rate_axis(rates: Sequence[float]) -> Figure:
    wide = _if_wide(rates)
    if not wide:
        return {"range": [0, 1.15 * max(rates)]}
    return {**wide, "range": [math.log10(min(rates)) - 0.25, math.log10(max(rates)) + 0.25]}


def _place(row: SweepRow) -> tuple[float, float] | None:
    latency, rate = known(row.median("tpot"), None), known(row.median("decode_rate"), None)
    return None if latency is None or rate is None else (latency, rate)


def _bound_words(row: SweepRow) -> str:
    return known(then(row.decode_bound, shown_verdict), f"bound: {UNKNOWN}")


def _hover(row: SweepRow) -> str:
    tpot = row.metrics.get("tpot")
    within = f" ({known_within(tpot, 'ns')})" if isinstance(tpot, Distribution) else ""
    lines = [f"<b>{label(row.label)}</b>", f"TPOT {label(words(row.median('tpot'), duration))}{within}"]
    lines.append(known(then(row.median("decode_rate"), lambda rate: f"{significant(rate)} decode tokens/s"), ""))
    lines.append(f"TTFT {label(words(row.median('ttft'), duration))}")
    lines.append(label(_bound_words(row)))
    return "<br>".join(line for line in lines if line)


def _ends(row: SweepRow, key: str, size: float = 1.0) -> tuple[float, float]:
    """Return the ends of the interval or range of a metric; NaN without a value."""
    reach = row.interval(key)
    return (math.nan, math.nan) if reach is None else (reach.low / size, reach.high / size)


def _bars(rows: Sequence[SweepRow], key: str, size: float = 1.0) -> Figure:
    """Return the error bars of the rows that have a value."""
    reaches = [reach for row in rows if (reach := row.interval(key)) is not None]
    return {
        "type": "data", "symmetric": False, "thickness": 1, "width": 4,
        "array": [max(reach.high - reach.median, 0.0) / size for reach in reaches],
        "arrayminus": [max(reach.median - reach.low, 0.0) / size for reach in reaches],
    }  # fmt: skip


def parameter_chart(rows: Sequence[SweepRow], key: str) -> Maybe[Figure]:
    """Return latencies and throughput over the values of one parameter, with a line per setting of the others."""
    others = [other for other in swept_keys(rows) if other != key]
    groups: dict[str, list[SweepRow]] = {}
    for row in rows:
        if row.ranked and key in row.values and present(quantity.value(row) for quantity in _QUANTITIES):
            setting = ", ".join(f"{other.rsplit('.', 1)[-1]} {row.values.get(other, '')}" for other in others)
            groups.setdefault(setting, []).append(row)
    if not groups:
        return Missing("no point has figures")
    shown = [quantity for quantity in _QUANTITIES if present(quantity.value(row) for rows in groups.values() for row in rows)]
    as_numbers = all(number_of(row.values[key]) is not None for members in groups.values() for row in members)
    layout: Figure = {"height": 210 * len(shown) + 70, "legend": {"orientation": "h", "y": -0.12}, "hovermode": "closest"}
    traces: list[Figure] = []
    for place, quantity in enumerate(shown):
        axis = "" if place == 0 else str(place + 1)
        height = 1 / len(shown)
        low = 1 - (place + 1) * height
        domain = [low + 0.06 * height, low + 0.94 * height]
        size, title_of_axis = quantity.axis([row for members in groups.values() for row in members])
        layout[f"yaxis{axis}"] = {"title": {"text": title_of_axis}, "domain": domain, "rangemode": "tozero"}
        for number, (setting, members) in enumerate(groups.items()):
            ordered = sorted(members, key=lambda row: number_of(row.values[key]) or 0.0) if as_numbers else members
            common = {"yaxis": f"y{axis}", "xaxis": "x", "type": "scatter", "legendgroup": f"g{number}"}
            title = label(setting) or "measured"
            traces.append({
                **common, **_line(ordered, key, quantity, quantity.value, as_numbers, size), "mode": "lines+markers",
                "name": title, "showlegend": place == 0, "line": {"color": color_of(number)},
                "marker": {"symbol": _SYMBOLS[number % len(_SYMBOLS)], "size": 8},
                "error_y": _bars(ordered, quantity.key, size),
            })  # fmt: skip
            if quantity.least is not None:
                traces.append({
                    **common, **_line(ordered, key, quantity, quantity.least, as_numbers, size), "mode": "lines",
                    "name": f"{title}: roofline",
                    "showlegend": place == 1, "line": {"dash": "dash", "color": color_of(number)},
                })  # fmt: skip
    last = "" if len(shown) == 1 else str(len(shown))
    if shown[-1] is _QUANTITIES[-1]:
        layout[f"yaxis{last}"] |= _if_wide([y for trace in traces if trace["yaxis"] == f"y{last}" for y in trace["y"]])
    layout["xaxis"] = {"title": {"text": label(key)}, "anchor": f"y{last}", **({} if as_numbers else {"type": "category"})}
    if as_numbers:
        layout["xaxis"] |= _values_axis(sorted({x for trace in traces for x in trace["x"]}))
    return {"data": [trace for trace in traces if trace["x"]], "layout": layout}


_WIDE = 10.0
_MOST_TICKS = 12


def _if_wide(values: Sequence[float]) -> Figure:
    """Return a logarithmic axis if the values span too much for a linear one."""
    wide = bool(values) and min(values) > 0 and max(values) >= _WIDE * min(values)
    return {"type": "log", "dtick": 1} if wide else {}


def _values_axis(values: Sequence[float]) -> Figure:
    """Return the axis of a swept number; its values are the ticks if they are few."""
    axis = _if_wide(values)
    if axis and len(values) <= _MOST_TICKS:
        axis |= {"tickmode": "array", "tickvals": list(values), "ticktext": [f"{value:g}" for value in values]}
    return axis


def _line(
    rows: Sequence[SweepRow],
    key: str,
    quantity: Quantity,
    value: Callable[[SweepRow], Maybe[float]],
    as_numbers: bool,
    size: float,
) -> Figure:
    shown = duration if quantity.is_time else significant
    points = [(row, found) for row in rows for found in present([value(row)])]
    return {
        "x": [number_of(row.values[key]) if as_numbers else label(row.values[key]) for row, _ in points],
        "y": [found / size for _, found in points],
        "hovertext": [f"<b>{label(row.label)}</b><br>{shown(found)}" for row, found in points],
        "hoverinfo": "text",
    }


def number_of(text: str) -> float | None:
    """Return a swept value as a number, or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < 1e300 else None

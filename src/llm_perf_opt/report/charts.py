"""Charts as Plotly figures: data and layout, drawn by the script of the page, which also sets the colors of the theme.

Plotly interprets some tags in labels and hover texts; `label` escapes names so that they appear literally.
"""

from collections.abc import Sequence
from typing import Any

from llm_perf_opt.analysis.separable import stages_unavailable, steps_unavailable
from llm_perf_opt.analysis.stats import percentile
from llm_perf_opt.analysis.telemetry import measured_window
from llm_perf_opt.core.machine_records import CpuSample, GpuSample, Telemetry
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing
from llm_perf_opt.core.terminal import one_line
from llm_perf_opt.core.units import TIME, scale_of
from llm_perf_opt.report.chart_data import Roofline, Ticks, Waterfall, intensity_ticks, rate_ticks, roof_corners, roofline_extent
from llm_perf_opt.report.colors import BLUE as BLUE
from llm_perf_opt.report.colors import GRAY as GRAY
from llm_perf_opt.report.colors import GREEN as GREEN
from llm_perf_opt.report.colors import ORANGE as ORANGE
from llm_perf_opt.report.colors import PURPLE as PURPLE
from llm_perf_opt.report.colors import SERIES as SERIES
from llm_perf_opt.report.colors import SKY as SKY
from llm_perf_opt.report.colors import STAGE_COLORS as STAGE_COLORS
from llm_perf_opt.report.colors import VERMILLION as VERMILLION
from llm_perf_opt.report.colors import YELLOW as YELLOW
from llm_perf_opt.report.colors import color_of as color_of
from llm_perf_opt.report.text import bytes_per_s, duration, flops_per_s, percent, present, significant

Figure = dict[str, Any]
"""`data` and `layout` of Plotly."""

MOST_READINGS = 4000
"""Most readings of one quantity on the telemetry chart."""
MOST_SHADED = 200
"""Most iterations whose prefill is shaded."""
_SYMBOLS = {"stage": "star", "component": "diamond", "kernel": "circle"}
_DASHES = ("solid", "dash", "dot", "dashdot")


def label(name: str) -> str:
    """Return a name as Plotly shows it literally, on one line."""
    return one_line(name).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def wrapped(text: str, width: int = 26) -> str:
    """Return a text in lines of at most `width` characters, broken between words."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return "<br>".join(label(line) for line in lines)


def waterfall_chart(data: Waterfall) -> Figure:
    """Return a bar per use, each starting where the previous one ends; the last bar is the total."""
    names, bases, lengths, texts, hovers, colors = [], [], [], [], [], []
    reached = 0
    whole = data.total_ns
    size, unit = time_unit([whole, *[use.ns for use in data.uses]])
    for use in data.uses:
        names.append(wrapped(use.label))
        bases.append(reached / size)
        lengths.append(use.ns / size)
        share = percent(use.ns / whole) if whole else "n/a"
        texts.append(f"{duration(use.ns)} · {share}")
        hovers.append(
            f"<b>{label(use.label)}</b><br>{duration(use.ns)}, {share}" + (f"<br>{label(use.note)}" if use.note else "")
        )
        colors.append(color_of(use.color))
        reached += use.ns
    names.append("measured")
    bases.append(0)
    lengths.append(whole / size)
    texts.append(duration(whole))
    hovers.append(f"<b>{label(data.title)}</b><br>{duration(whole)}")
    colors.append(GRAY)
    trace = {
        "type": "bar", "orientation": "h", "y": list(range(len(names))), "x": lengths, "base": bases,
        "marker": {"color": colors}, "text": texts, "textposition": "outside", "cliponaxis": False, "hovertext": hovers,
        "hoverinfo": "text",
    }  # fmt: skip
    # Leave room on the axis for the text next to the longest bar.
    longest = max([abs(base + length) for base, length in zip(bases, lengths, strict=True)] or [1.0]) or 1.0
    lowest = min(0.0, *[base + length for base, length in zip(bases, lengths, strict=True)])
    layout = {
        "xaxis": {"title": {"text": unit}, "range": [lowest * 1.05, longest * 1.62], "zeroline": True},
        "yaxis": {
            "autorange": "reversed",
            "tickmode": "array",
            "tickvals": list(range(len(names))),
            "ticktext": names,
            "automargin": True,
        },
        "showlegend": False,
        "height": 60 + 38 * len(names),
        "margin": {"l": 10, "r": 10, "t": 10, "b": 45},
    }
    return {"data": [trace], "layout": layout}


def roofline_chart(data: Roofline) -> Figure:
    """Return the peaks as lines and the points, on logarithmic axes."""
    (low, high), (bottom, top) = roofline_extent(data)
    traces: list[Figure] = []
    for number, roof in enumerate(data.roofs):
        corners = roof_corners(roof, low, high)
        bandwidth = roof.bandwidth_bytes_per_s
        moved = f" and {bytes_per_s(bandwidth)}" if bandwidth else ""
        text = f"<b>{label(roof.name)}</b><br>{flops_per_s(roof.peak_flops_per_s)}{moved}"
        traces.append({
            "type": "scatter", "mode": "lines", "name": f"{label(roof.name)} peak", "x": [x for x, _ in corners],
            "y": [y for _, y in corners], "line": {"dash": _DASHES[number % len(_DASHES)], "width": 2, "color": GRAY},
            "hovertext": [text] * len(corners), "hoverinfo": "text",
        })  # fmt: skip
    groups = list(dict.fromkeys((point.kind, point.stage) for point in data.points))
    longest = max([point.time_ns for point in data.points if point.kind != "stage"] or [1])
    for kind, stage in groups:
        members = [point for point in data.points if (point.kind, point.stage) == (kind, stage)]
        traces.append({
            "type": "scatter", "mode": "markers", "name": f"{label(stage)}: {'whole' if kind == 'stage' else f'{kind}s'}",
            "x": [point.flops_per_byte for point in members], "y": [point.flops_per_s for point in members],
            "marker": {
                "symbol": _SYMBOLS[kind],
                "color": STAGE_COLORS.get(stage, SERIES[2]),
                "opacity": 0.6 if kind == "kernel" else 1,
                "size": [18 if kind == "stage" else 6 + 12 * (point.time_ns / longest) ** 0.5 for point in members],
                "line": {"width": 1},
            },
            "hovertext": [
                f"<b>{label(point.name)}</b><br>{label(point.stage)}, {duration(point.time_ns)}<br>"
                f"{flops_per_s(point.flops_per_s)}, {bytes_per_s(point.flops_per_s / point.flops_per_byte)}<br>"
                f"{significant(point.flops_per_byte)} FLOP/byte<br>{label(point.detail)}"
                for point in members
            ],
            "hoverinfo": "text",
        })  # fmt: skip
    layout = {
        "xaxis": {
            "type": "log",
            "title": {"text": "arithmetic intensity, FLOP/byte"},
            "range": _log_range(low, high),
            **_marks(intensity_ticks(low, high)),
        },
        "yaxis": {
            "type": "log",
            "title": {"text": f"achieved rate ({label(data.dtype)})"},
            "range": _log_range(bottom, top),
            **_marks(rate_ticks(bottom, top)),
        },
        "legend": {"orientation": "h", "y": -0.2},
        "hovermode": "closest",
        "height": 560,
    }
    return {"data": traces, "layout": layout}


def time_unit(values_ns: Sequence[float]) -> tuple[float, str]:
    """Return the unit of a time axis, in nanoseconds, and its name; the longest time decides."""
    longest = max((abs(value) for value in values_ns), default=0.0)
    return scale_of(longest, TIME) if longest else (1e6, "ms")


def _marks(ticks: Ticks) -> Figure:
    """Return an axis with these ticks only: Plotly's own would use other units."""
    return {"tickmode": "array", "tickvals": [value for value, _ in ticks], "ticktext": [text for _, text in ticks]}


def _log_range(low: float, high: float) -> list[float]:
    from math import log10

    return [log10(low), log10(high)]


def steps_chart(timings: CleanTimings) -> Maybe[Figure]:
    """Return the median time of each decode step over its context, with the middle half of the repeats."""
    mixed = steps_unavailable(timings)
    if mixed is not None:
        return mixed
    steps = min((len(iteration.steps_ns) for iteration in timings.iterations), default=0)
    if not steps:
        return Missing("the request has no decode step")
    size, unit = time_unit([ns for iteration in timings.iterations for ns in iteration.steps_ns[:steps]])
    columns = [[iteration.steps_ns[step] / size for iteration in timings.iterations] for step in range(steps)]
    contexts = [timings.workload.padded_tokens + 1 + step for step in range(steps)]
    median, low, high = ([percentile(column, share) for column in columns] for share in (0.5, 0.25, 0.75))
    band = {
        "type": "scatter", "mode": "lines", "name": "middle half of the repeats", "x": contexts + contexts[::-1],
        "y": high + low[::-1], "fill": "toself", "line": {"width": 0}, "fillcolor": "rgba(86,180,233,0.35)",
        "hoverinfo": "skip",
    }  # fmt: skip
    line = {
        "type": "scatter", "mode": "lines+markers" if steps < 200 else "lines", "name": "median step", "x": contexts,
        "y": median, "line": {"color": BLUE}, "marker": {"size": 5},
        "hovertemplate": f"context %{{x}} tokens<br>%{{y:.4g}} {unit}<extra></extra>",
    }  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "context the step attends to, tokens"}},
        "yaxis": {"title": {"text": f"decode step, {unit}"}, "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": -0.25},
        "height": 380,
    }
    return {"data": [band, line], "layout": layout}


def icicle_chart(nodes: Sequence[tuple[tuple[str, ...], int]], what: str) -> Maybe[Figure]:
    """Return nested shares of time. `nodes` are paths with the time of the whole node, parents before their children."""
    known = [(path, ns) for path, ns in nodes if ns > 0]
    if not known:
        return Missing("nothing took any time")
    ids = {path: f"n{number}" for number, (path, _) in enumerate(known)}
    whole = sum(ns for path, ns in known if path[:-1] not in ids)
    root = "all"  # Plotly draws nothing if there are several roots
    trace = {
        "type": "icicle", "ids": [root, *[ids[path] for path, _ in known]],
        "labels": [f"{label(what)}: {duration(whole)}", *[label(path[-1]) or "(no name)" for path, _ in known]],
        "parents": ["", *[ids.get(path[:-1], root) for path, _ in known]], "values": [whole, *[ns for _, ns in known]],
        "branchvalues": "total", "tiling": {"orientation": "v"}, "pathbar": {"visible": False},
        "root": {"color": "rgba(140, 140, 140, 0.25)"},  # without a color, the root is an empty box
        "hovertext": [
            f"<b>all</b><br>{duration(whole)} of {label(what)}",
            *[
                f"<b>{' › '.join(label(step) for step in path)}</b><br>{duration(ns)} of {label(what)}, {percent(ns / whole)}"
                for path, ns in known
            ],
        ],
        "hoverinfo": "text", "textinfo": "label", "maxdepth": 6, "marker": {"line": {"width": 1}},
    }  # fmt: skip
    return {
        "data": [trace],
        "layout": {"height": 420, "margin": {"l": 5, "r": 5, "t": 36, "b": 5}, "iciclecolorway": list(SERIES)},
    }


def telemetry_chart(samples: Telemetry, timings: CleanTimings) -> Maybe[tuple[Figure, str]]:
    """Return the readings over time since the first repeat, with each prefill shaded, and a note on what is left out."""
    begin, end = measured_window(timings)
    rows = _rows_by_device(samples.gpu) if samples.gpu else _cpu_rows(samples.cpu)
    rows = [(name, unit, points) for name, unit, points in rows if points]
    if not rows:
        return Missing(samples.header.gpu_note or "the sampler took no readings")
    stride = max(1, -(-max(len(points) for _, _, points in rows) // MOST_READINGS))
    traces: list[Figure] = []
    layout: Figure = {"height": 170 * len(rows) + 60, "showlegend": False, "grid": {"rows": len(rows), "columns": 1}}
    for number, (name, unit, points) in enumerate(rows):
        axis = "" if number == 0 else str(number + 1)
        shown = points[::stride]
        traces.append({
            "type": "scatter", "mode": "lines", "name": name, "x": [(at - begin) / 1e9 for at, _ in shown],
            "y": [value for _, value in shown], "xaxis": "x", "yaxis": f"y{axis}", "line": {"color": color_of(number)},
            "hovertemplate": f"%{{x:.3f}} s<br>{label(name)} %{{y:.4g}} {unit}<extra></extra>",
        })  # fmt: skip
        height = 1 / len(rows)
        low = 1 - (number + 1) * height
        layout[f"yaxis{axis}"] = {
            "title": {"text": f"{wrapped(name, 16)}<br>{unit}"},
            "domain": [low + 0.05 * height, low + 0.95 * height],
            "rangemode": "tozero",
        }
    layout["xaxis"] = {
        "title": {"text": "seconds after the first repeat began"},
        "anchor": f"y{len(rows)}" if len(rows) > 1 else "y",
    }
    layout["shapes"] = _shading(timings, begin, end)
    note = f"The chart shows one of every {stride} readings; nvml.csv has all." if stride > 1 else ""
    return {"data": traces, "layout": layout}, note


def _shading(timings: CleanTimings, begin: int, end: int) -> list[Figure]:
    """Return the shading of the measured window and of every prefill."""

    def band(start: int, stop: int, color: str) -> Figure:
        return {
            "type": "rect",
            "xref": "x",
            "yref": "paper",
            "x0": (start - begin) / 1e9,
            "x1": (stop - begin) / 1e9,
            "y0": 0,
            "y1": 1,
            "fillcolor": color,
            "opacity": 0.15,
            "line": {"width": 0},
            "layer": "below",
        }

    prefills = [
        band(iteration.started_ns, iteration.started_ns + iteration.prefill_ns, ORANGE)
        for iteration in timings.iterations[: MOST_SHADED if stages_unavailable(timings) is None else 0]
    ]
    return [band(begin, end, BLUE), *prefills]


Row = tuple[str, str, list[tuple[int, float]]]


def _rows_by_device(samples: Sequence[GpuSample]) -> list[Row]:
    """Return the readings of each GPU; of several, only power and utilization."""
    devices = sorted({sample.device for sample in samples})
    if len(devices) == 1:
        return _gpu_rows(samples)
    found = {device: _gpu_rows([sample for sample in samples if sample.device == device]) for device in devices}
    return [
        (f"{name}, GPU {device}", unit, points)
        for device, rows in found.items()
        for name, unit, points in rows
        if name in ("GPU power", "GPU utilization")
    ]


def _gpu_rows(samples: Sequence[GpuSample]) -> list[Row]:
    def of(value: Sequence[Maybe[int]], factor: float = 1.0) -> list[tuple[int, float]]:
        return [(s.at_ns, v * factor) for s, one in zip(samples, value, strict=True) for v in present([one])]

    return [
        ("GPU power", "W", of([s.power_mw for s in samples], 1e-3)),
        ("SM clock", "MHz", of([s.sm_clock_mhz for s in samples])),
        ("GPU temperature", "°C", of([s.temperature_c for s in samples])),
        ("GPU utilization", "%", of([s.gpu_utilisation_pct for s in samples])),
    ]


def _cpu_rows(samples: Sequence[CpuSample]) -> list[Row]:
    frequency = [(s.at_ns, mhz) for s in samples for mhz in present([s.frequency_mhz])]
    return [
        ("busy, whole machine", "processors", [(s.at_ns, s.machine_pct / 100) for s in samples]),
        ("busy, measured process", "processors", [(s.at_ns, s.ours_pct / 100) for s in samples]),
        ("processor frequency", "MHz", frequency),
    ]

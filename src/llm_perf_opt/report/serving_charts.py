"""Charts of a server under load: throughput and latency over the load, and the server's metrics over time."""

from collections.abc import Callable, Sequence

from llm_perf_opt.analysis.serving.knee import Knee
from llm_perf_opt.analysis.serving.points import PointAnalysis
from llm_perf_opt.analysis.serving.requests import Estimate, Latency
from llm_perf_opt.analysis.serving.server import ServerState
from llm_perf_opt.analysis.serving.serving_analysis import ServingAnalysis
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.report.charts import BLUE, GRAY, GREEN, ORANGE, PURPLE, VERMILLION, Figure, label, time_unit
from llm_perf_opt.report.serving_text import point_words
from llm_perf_opt.report.text import duration, known, percent, present, significant, then

MOST_SAMPLES = 4000
"""Samples of one quantity on the chart of the server's metrics."""
_WIDE = 20.0
_PANELS = ((0.69, 1.0), (0.345, 0.635), (0.0, 0.29))


def curve_chart(found: ServingAnalysis) -> Maybe[Figure]:
    """Return throughput, TTFT and TPOT over the load, with a line at the knee."""
    points = found.curve
    if not points:
        return Missing("no load has figures")
    closed = points[0].point.kind == "concurrency"
    traces = [*_throughput(points, closed), *_latency(points, "ttft", 2), *_latency(points, "tpot", 3)]
    units = {place: time_unit(_ends(points, key)) for key, place in (("ttft", 2), ("tpot", 3))}
    layout: Figure = {
        "height": 680,
        "xaxis": {
            "title": {"text": "requests at a time" if closed else "offered load, requests/s"},
            "anchor": "y3",
            "rangemode": "tozero",
        },
        "yaxis": {"title": {"text": "output tokens/s" if closed else "requests/s"}, "domain": _PANELS[0], "rangemode": "tozero"},
        "yaxis2": {"title": {"text": f"TTFT, {units[2][1]}"}, "domain": _PANELS[1], **_axis(_ends(points, "ttft"))},
        "yaxis3": {"title": {"text": f"TPOT, {units[3][1]}"}, "domain": _PANELS[2], "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": -0.12},
        "hovermode": "closest",
        "shapes": known(then(found.knee, _knee_line), []),
    }
    return {"data": [trace for trace in traces if trace["x"]], "layout": layout}


def _axis(values: Sequence[float]) -> Figure:
    """Return a logarithmic axis if the values span too much for one from zero: waiting can be a thousand times a prefill."""
    wide = bool(values) and min(values) > 0 and max(values) >= _WIDE * min(values)
    return {"type": "log", "dtick": 1} if wide else {"rangemode": "tozero"}


def _knee_line(knee: Knee) -> list[Figure]:
    if knee.status != "found":
        return []
    at = known(knee.carried, 0.0)
    line = {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper", "line": {"dash": "dot", "color": GRAY}}
    return [line]


def _throughput(points: Sequence[PointAnalysis], closed: bool) -> list[Figure]:
    value: Callable[[PointAnalysis], Maybe[float]] = (
        (lambda point: point.output_rate) if closed else (lambda point: point.request_rate)
    )
    unit = "output tokens/s" if closed else "requests/s"
    traces = [_line(points, value, f"completed, {unit}", BLUE, lambda rate: f"{significant(rate)} {unit}")]
    if not closed:
        loads = [point.point.asked for point in points]
        traces.append({
            "type": "scatter", "mode": "lines", "name": "as many as offered", "x": [0, max(loads)], "y": [0, max(loads)],
            "line": {"dash": "dash", "color": GRAY}, "hoverinfo": "skip",
        })  # fmt: skip
        rate = _line(
            points,
            lambda point: then(point.goodput, lambda good: good.rate),
            "meet the objective, requests/s",
            GREEN,
            significant,
        )
        traces.append(rate)
    return traces


def _line(
    points: Sequence[PointAnalysis],
    value: Callable[[PointAnalysis], Maybe[float]],
    name: str,
    color: str,
    show: Callable[[float], str],
) -> Figure:
    placed = [(point, found) for point in points for found in present([value(point)])]
    return {
        "type": "scatter", "mode": "lines+markers", "name": name, "line": {"color": color}, "marker": {"size": 8},
        "x": [point.point.asked for point, _ in placed], "y": [found for _, found in placed],
        "hovertext": [f"<b>{label(point_words(point))}</b><br>{label(show(found))}" for point, found in placed],
        "hoverinfo": "text",
    }  # fmt: skip


def _estimates(point: PointAnalysis, key: str, name: str) -> Estimate | None:
    found: Maybe[Estimate] = then(point.latencies[key], lambda latency: _of(latency, name))
    return known(found, None)


def _of(latency: Latency, name: str) -> Maybe[Estimate]:
    found: Maybe[Estimate] = getattr(latency, name)
    return found


def _ends(points: Sequence[PointAnalysis], key: str) -> list[float]:
    found = [_estimates(point, key, name) for point in points for name in ("p50", "p90")]
    return [estimate.value for estimate in found if estimate is not None]


def _latency(points: Sequence[PointAnalysis], key: str, panel: int) -> list[Figure]:
    """Return the median and p90 of a latency, with error bars."""
    size, _ = time_unit(_ends(points, key))
    traces = []
    for name, color, dash in (("p50", ORANGE, "solid"), ("p90", VERMILLION, "dash"), ("p99", PURPLE, "dot")):
        placed = [(point, found) for point in points if (found := _estimates(point, key, name)) is not None]
        traces.append({
            "type": "scatter", "mode": "lines+markers", "name": name, "legendgroup": name, "showlegend": panel == 2, "xaxis": "x",
            "yaxis": f"y{panel}", "line": {"color": color, "dash": dash}, "marker": {"size": 7},
            "x": [point.point.asked for point, _ in placed], "y": [found.value / size for _, found in placed],
            "error_y": {
                "type": "data", "symmetric": False, "thickness": 1, "width": 4,
                "array": [max(known(found.high, found.value) - found.value, 0.0) / size for _, found in placed],
                "arrayminus": [max(found.value - known(found.low, found.value), 0.0) / size for _, found in placed],
            },
            "hovertext": [
                f"<b>{label(point_words(point))}</b><br>{key.upper()} {name} {duration(found.value)}" for point, found in placed
            ],
            "hoverinfo": "text",
        })  # fmt: skip
    return traces


def server_chart(points: Sequence[PointAnalysis]) -> Maybe[Figure]:
    """Return running and waiting requests and the use of the KV cache over time, with the loads shaded."""
    sampled = [point for point in points if point.states]
    if not sampled:
        return Missing("the server's metrics were not sampled")
    start = min(point.start_ns for point in sampled)
    states = sorted({state.at_ns: state for point in sampled for state in point.states}.values(), key=lambda state: state.at_ns)
    states = states[:: max(1, -(-len(states) // MOST_SAMPLES))]
    lines = (
        ("running requests", "running", BLUE, "y"), ("waiting requests", "waiting", VERMILLION, "y"),
        ("KV cache in use", "kv_usage", GREEN, "y2"),
    )  # fmt: skip
    traces = [_over_time(states, start, *line) for line in lines]
    shapes = [
        {
            "type": "rect", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "x0": (point.states[0].at_ns - start) / 1e9,
            "x1": (point.states[-1].at_ns - start) / 1e9, "fillcolor": GRAY, "opacity": 0.12, "line": {"width": 0},
            "layer": "below",
        }
        for point in sampled
    ]  # fmt: skip
    notes = [
        {
            "x": (point.states[0].at_ns + point.states[-1].at_ns - 2 * start) / 2e9, "y": 1.0, "yref": "paper",
            "text": f"{point.point.asked:,.4g}{' (profiled)' if point.point.profiled else ''}", "yanchor": "bottom",
            "showarrow": False, "font": {"size": 11},
        }
        for point in sampled
    ]  # fmt: skip
    layout: Figure = {
        "height": 480, "margin": {"t": 40}, "xaxis": {"title": {"text": "time, s"}, "anchor": "y2"}, "shapes": shapes,
        "annotations": notes,
        "yaxis": {"title": {"text": "requests"}, "domain": [0.42, 1.0], "rangemode": "tozero"},
        "yaxis2": {"title": {"text": "KV cache, %"}, "domain": [0.0, 0.34], "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": -0.2}, "hovermode": "closest",
    }  # fmt: skip
    return {"data": [trace for trace in traces if trace["x"]], "layout": layout}


def _over_time(states: Sequence[ServerState], start: int, name: str, field: str, color: str, axis: str) -> Figure:
    placed = [(state.at_ns, value) for state in states for value in present([getattr(state, field)])]
    size = 100.0 if axis == "y2" else 1.0
    show: Callable[[float], str] = percent if axis == "y2" else significant
    return {
        "type": "scatter", "mode": "lines", "name": name, "xaxis": "x", "yaxis": axis, "line": {"color": color, "shape": "hv"},
        "x": [(at - start) / 1e9 for at, _ in placed], "y": [value * size for _, value in placed],
        "hovertext": [f"{name}: {show(value)}" for _, value in placed], "hoverinfo": "text",
    }  # fmt: skip

"""Charts of a search: the staircase of kept steps, and predictions against measurements."""

from collections.abc import Sequence

from llm_perf_opt.analysis.tuning.calibration import CalibrationPoint
from llm_perf_opt.analysis.tuning.goals import GOALS, in_ns
from llm_perf_opt.analysis.tuning.records import StageDistance, Step, TuneResult
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.report.charts import BLUE, GRAY, ORANGE, Figure, color_of, label, time_unit
from llm_perf_opt.report.svg import Stair, stairs_svg
from llm_perf_opt.report.text import duration

_LONGEST = 28


def _stairs(found: TuneResult) -> list[Stair]:
    """Return the base and every kept step that improved the objective, in ns."""
    goal = GOALS[found.objective]
    value = None if found.base_value is None else in_ns(goal, found.base_value)
    if value is None:
        return []
    steps = [step for step in found.kept if step.goal == found.objective and step.measured_ns is not None]
    base = (steps[0].before_ns if steps else None) or value  # next to the first step, so that its height is that of the step
    return [
        Stair("base", base, base, base, None, _roofline(value, found.base_distance, goal.name)),
        *[_stair(step) for step in steps],
    ]


def _stair(step: Step) -> Stair:
    measured, before, decision = float(step.measured_ns or 0), step.before_ns, step.decision
    low = high = measured
    if before and decision is not None and decision.low is not None and decision.high is not None:
        ends = [1 + decision.low, 1 + decision.high]
        values = [before / end if GOALS[step.goal].higher_is_better else before * end for end in ends]
        low, high = min(values), max(values)
    predicted = step.predicted
    return Stair(
        " ".join(text.rpartition(".")[2] for text in step.change), measured, low, high,
        None if predicted is None else (predicted.expected_ns, predicted.low_ns, predicted.high_ns),
        _roofline(measured, step.distance, step.goal),
    )  # fmt: skip


def _roofline(measured: float, distance: StageDistance | None, goal: str) -> float | None:
    """Return the roofline time in the unit of the stair: a share of the measured time, if that is the time of a stage."""
    return measured / distance.times if distance is not None and goal in ("tpot", "ttft") else None


def staircase_chart(found: TuneResult) -> Maybe[tuple[Figure, str]]:
    """Return the staircase as a Plotly figure and as an SVG."""
    stairs = _stairs(found)
    if not stairs:
        return Missing(f"{found.objective} is not a time or a rate, or the base was not measured")
    size, unit = time_unit([stair.measured for stair in stairs])
    names = [f"{number}: {label(stair.name[:_LONGEST])}" for number, stair in enumerate(stairs)]
    traces: list[Figure] = [{
        "type": "scatter", "mode": "lines+markers", "name": "measured", "x": names,
        "y": [stair.measured / size for stair in stairs],
        "line": {"shape": "hv", "color": BLUE}, "marker": {"size": 9},
        "error_y": _bars([(stair.measured, stair.low, stair.high) for stair in stairs], size),
        "hovertext": [f"{label(stair.name)}<br>{duration(stair.measured)}" for stair in stairs], "hoverinfo": "text",
    }]  # fmt: skip
    predicted = [(name, stair.predicted) for name, stair in zip(names, stairs, strict=True) if stair.predicted]
    if predicted:
        traces.append({
            "type": "scatter", "mode": "markers", "name": "predicted", "x": [name for name, _ in predicted],
            "y": [values[0] / size for _, values in predicted], "marker": {"size": 10, "symbol": "diamond-open", "color": ORANGE},
            "error_y": _bars([values for _, values in predicted], size),
        })  # fmt: skip
    roofline = [(name, stair.roofline) for name, stair in zip(names, stairs, strict=True) if stair.roofline]
    if roofline:
        traces.append({
            "type": "scatter", "mode": "lines+markers", "name": "roofline time", "x": [name for name, _ in roofline],
            "y": [value / size for _, value in roofline], "line": {"dash": "dash", "color": GRAY, "shape": "hv"},
        })  # fmt: skip
    layout = {
        "yaxis": {"title": {"text": f"{_what(found)}, {unit}"}, "rangemode": "tozero"},
        "xaxis": {"type": "category"}, "legend": {"orientation": "h", "y": -0.25}, "height": 420,
    }  # fmt: skip
    return {"data": traces, "layout": layout}, staircase_svg(found)


def _what(found: TuneResult) -> str:
    return "time per output token" if found.objective == "throughput" else found.objective.upper()


def _bars(values: Sequence[tuple[float, float, float]], size: float) -> Figure:
    """Return error bars from (value, low, high)."""
    return {
        "type": "data", "symmetric": False, "thickness": 1, "width": 4,
        "array": [max(high - value, 0.0) / size for value, _, high in values],
        "arrayminus": [max(value - low, 0.0) / size for value, low, _ in values],
    }  # fmt: skip


def staircase_svg(found: TuneResult) -> str:
    """Return the staircase as an SVG."""
    return stairs_svg(f"{_what(found)}: measured (bar, 98 % interval), predicted (diamond), roofline (dashed)", _stairs(found))


def calibration_chart(points: Sequence[CalibrationPoint]) -> Maybe[Figure]:
    """Return predicted against measured time, a color per finding."""
    sound = [point for point in points if point.sound]
    if not sound:
        return Missing("no trial has a prediction and a measurement")
    size, unit = time_unit([value for point in sound for value in (point.predicted_ns, point.measured_ns)])
    ends = [
        min(min(point.predicted_ns, point.measured_ns) for point in sound),
        max(max(point.predicted_ns, point.measured_ns) for point in sound),
    ]
    traces: list[Figure] = [{
        "type": "scatter", "mode": "lines", "name": "exact", "x": [end / size for end in ends], "y": [end / size for end in ends],
        "line": {"dash": "dash", "color": GRAY}, "hoverinfo": "skip",
    }]  # fmt: skip
    for number, finding in enumerate(dict.fromkeys(point.finding for point in sound)):
        members = [point for point in sound if point.finding == finding]
        traces.append({
            "type": "scatter", "mode": "markers", "name": label(finding), "x": [point.measured_ns / size for point in members],
            "y": [point.predicted_ns / size for point in members], "marker": {"size": 9, "color": color_of(number)},
            "hovertext": [_hover(point) for point in members],
            "hoverinfo": "text",
        })  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": f"measured, {unit}"}}, "yaxis": {"title": {"text": f"predicted, {unit}"}},
        "legend": {"orientation": "h", "y": -0.2}, "height": 460, "hovermode": "closest",
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def _hover(point: CalibrationPoint) -> str:
    return f"{label(point.model)}<br>predicted {duration(point.predicted_ns)}, measured {duration(point.measured_ns)}"

"""The data of the charts, shared by the interactive page and the SVG images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor, log10
from typing import Literal

from llm_perf_opt.analysis.budget import BudgetKey
from llm_perf_opt.analysis.kernels.evidence import KernelEvidence
from llm_perf_opt.analysis.kernels.names import short_name
from llm_perf_opt.analysis.limits.efficiency import ComponentEfficiency, Efficiency, StageEfficiency
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.trace.document import UNPROFILED, BudgetTable
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.units import FLOP_RATE, duration, in_unit, scaled
from llm_perf_opt.report.text import known, missing, then

MOST_KERNEL_POINTS = 60
"""Most kernels per stage on the roofline; the longest are drawn."""
OTHER = 7
"""Position of gray in the palette, for what is folded into one row."""
_NAME_WIDTH = 60

_COUNTED = "executed FLOPs over DRAM bytes, counted"

PointKind = Literal["stage", "component", "kernel"]


@dataclass(frozen=True)
class Use:
    """One row of a waterfall."""

    label: str
    ns: int
    note: str = ""
    color: int = 0
    """Position in the palette."""
    low_ns: int | None = None
    """The interval of `ns`, if it is an estimate."""
    high_ns: int | None = None


@dataclass(frozen=True)
class Waterfall:
    """Where the time of a stage goes; the uses sum to the whole."""

    stage: str
    title: str
    """Stage, total time and the steps that it covers if not all, such as `decode, 18.09 ms per token, steps 1–16 of 63`."""
    uses: tuple[Use, ...]
    notes: tuple[str, ...] = ()
    times_roofline: float | None = None
    """This time divided by its own roofline time; None if that is unknown or the time is not unprofiled."""
    whole: str = ""
    """The steps that the figures of the whole request cover, such as `steps 1–63`, if the time covers only the first of them."""

    @property
    def total_ns(self) -> int:
        """All uses together."""
        return sum(use.ns for use in self.uses)

    def largest(self, most: int) -> list[Use]:
        """Return at most `most` uses that are not zero, in order; the smallest are folded into `other`."""
        uses = [use for use in self.uses if use.ns]
        if len(uses) <= most:
            return uses
        kept = sorted(uses, key=lambda use: -abs(use.ns))[: most - 1]
        rest = sum(use.ns for use in uses if use not in kept)
        other = Use(f"other ({len(uses) - len(kept)} rows)", rest, color=OTHER)
        return [*[use for use in uses if use in kept], other]


@dataclass(frozen=True)
class RoofLine:
    """A pair of peaks; without a bandwidth, only the flat line."""

    name: str
    peak_flops_per_s: float
    bandwidth_bytes_per_s: float | None


@dataclass(frozen=True)
class Point:
    """A stage, component or kernel on the roofline."""

    kind: PointKind
    stage: str
    name: str
    flops_per_byte: float
    flops_per_s: float
    time_ns: int
    detail: str = ""


@dataclass(frozen=True)
class Roofline:
    """The peaks, and the points below them."""

    dtype: str
    roofs: tuple[RoofLine, ...]
    points: tuple[Point, ...]
    left_out: tuple[str, ...] = field(default=())
    """What the chart does not show, and why."""


def coarse_waterfalls(found: Maybe[Efficiency]) -> Maybe[tuple[Waterfall, ...]]:
    """Return roofline time and the time above it, for a run without a detailed budget."""
    return then(found, lambda efficiency: _coarse(efficiency.stages))


def _coarse(stages: Sequence[StageEfficiency]) -> Maybe[tuple[Waterfall, ...]]:
    made = []
    for stage in stages:
        best = next((entry for entry in reversed(stage.against) if known(entry.roofline, None)), None)
        if best is None:
            return Missing("no peak is known to compare with")
        whole = round(stage.time_ns.median)
        least = min(round(known(then(best.roofline, lambda least: least.seconds), 0.0) * 1e9), whole)
        uses = (
            Use(BudgetKey.ROOFLINE.label, least, f"at the {best.peaks.name} peaks"),
            Use("above the roofline time", whole - least, color=1),
        )
        title = f"{stage.stage}, {duration(whole)} per request"
        made.append(Waterfall(stage.stage, title, uses, times_roofline=whole / least if least else None))
    return tuple(made) or Missing("no stage was measured")


def budget_of(analysis: RunAnalysis) -> Maybe[tuple[Waterfall, ...]]:
    """Return a waterfall per stage: the budget of the trace, or without one, roofline time and the rest."""
    trace = analysis.trace
    if not isinstance(trace, Missing) and trace.complete and trace.budgets:
        keys = dict.fromkeys(row.key for table in trace.budgets for row in table.rows)
        places = {key: place + (place >= OTHER) for place, key in enumerate(sorted(keys, key=_known_order))}
        return tuple(_waterfall(table, places) for table in trace.budgets)
    why = trace.why or "the trace shows no device work in its stages"
    made = then(
        coarse_waterfalls(analysis.efficiency),
        lambda found: tuple(replace(item, notes=(f"No more detail of {item.stage}: {why}.",)) for item in found),
    )
    return known(made, Missing(why)) if analysis.stages else made  # a budget needs no peaks: without a trace, that is the reason


_KNOWN = [key.value for key in BudgetKey]


def _known_order(key: str) -> int:
    """Return a sort key that puts the rows of every budget in their usual order, and unknown ones after them."""
    return _KNOWN.index(key) if key in _KNOWN else len(_KNOWN)


def _waterfall(table: BudgetTable, places: Mapping[str, int]) -> Waterfall:
    """Return the budget per unit, rounded so that the rows still sum to the total; `places` are positions in the palette."""
    units = max(table.units, 1)
    reached = 0
    begun = 0
    uses = []
    for row in table.rows:
        begun += row.ns
        until = round(begun / units)  # rounding the running sum keeps the total exact
        low, high = (None if ns is None else round(ns / units) for ns in (row.low_ns, row.high_ns))
        uses.append(Use(row.label, until - reached, color=places[row.key], low_ns=low, high_ns=high))
        reached = until
    per = f" per {table.unit}" if table.units > 1 else ""
    many = f"Mean of the {table.units} {table.unit}s in the trace. " if table.units > 1 else ""
    title = ", ".join(filter(None, (table.stage, f"{duration(table.wall_ns / units)}{per}", table.scope)))
    notes = (f"{many}Time: {table.wall_source}.", *table.problems, *table.notes)
    whole = f"steps 1–{table.request_units}" if table.scope else ""
    return Waterfall(table.stage, title, tuple(uses), notes, _times_roofline(table), whole)


def _times_roofline(table: BudgetTable) -> float | None:
    """Return the distance of a budget from its own roofline time; None for a time under the profiler."""
    least = next((row.ns for row in table.rows if row.key == BudgetKey.ROOFLINE.value), 0)
    if least <= 0 or table.problems or not table.wall_source.startswith(UNPROFILED):
        return None  # passes that contradict each other have no common factor
    return table.wall_ns / least


def roofline(found: Maybe[Efficiency], kernels: Maybe[KernelEvidence]) -> Maybe[Roofline]:
    """Return stages and components from the cost model, and kernels from their counters."""
    return then(found, lambda efficiency: _roofline(efficiency, kernels))


def _roofline(found: Efficiency, kernels: Maybe[KernelEvidence]) -> Maybe[Roofline]:
    peaks = [(roof, known(roof.peak_flops_per_s, None)) for roof in found.peak_sets]
    lines = [RoofLine(roof.name, peak, known(roof.bandwidth_bytes_per_s, None)) for roof, peak in peaks if peak is not None]
    if not lines:
        reasons = [why for _, why in missing((roof.name, roof.peak_flops_per_s) for roof in found.peak_sets)]
        return Missing(f"no peak is known: {reasons[0] if reasons else 'none'}")
    points: list[Point] = []
    nothing: list[str] = []
    for stage in found.stages:
        points.append(_stage_point(stage))
        for part in known(stage.components, ()):
            point = _part_point(stage.stage, part)
            if point is not None:
                points.append(point)
            elif part.roofline is not None and known(part.time_ns, None) is not None:
                nothing.append(f"{part.name} of {stage.stage}")
    left_out = [f"Not shown, because they have no FLOPs or no bytes: {', '.join(nothing)}."] if nothing else []
    if isinstance(kernels, Missing):
        left_out.append(f"No kernels: {kernels.why}.")
    else:
        found_points, remarks = _kernel_points(kernels)
        points += found_points
        left_out += remarks
    drawable = [point for point in points if point.flops_per_byte > 0 and point.flops_per_s > 0]
    return Roofline(found.dtype, tuple(lines), tuple(drawable), tuple(left_out))


def _stage_point(stage: StageEfficiency) -> Point:
    return Point(
        "stage",
        stage.stage,
        stage.stage,
        stage.cost.flops_per_byte,
        stage.flops_per_s,
        round(stage.time_ns.median),
        "the whole stage, unprofiled: model FLOPs over minimum bytes",
    )


def _part_point(stage: str, part: ComponentEfficiency) -> Point | None:
    least, time = part.roofline, known(part.time_ns, None)
    if least is None or time is None or not least.flops or not least.bytes:
        return None
    rate = least.flops / max(time, 1) * 1e9
    detail = "model FLOPs over minimum bytes"
    return Point("component", stage, part.name, least.flops / least.bytes, rate, time, detail)


def _kernel_points(kernels: KernelEvidence) -> tuple[list[Point], list[str]]:
    points, remarks = [], []
    for stage in kernels.stages:
        placed = [
            Point("kernel", stage.stage, short_name(row.name, _NAME_WIDTH), intensity, rate, row.total_ns, _COUNTED)
            for row in stage.rows
            if (intensity := known(row.flops_per_byte, 0.0)) > 0 and (rate := known(row.flops_per_s, 0.0)) > 0
        ]
        points += placed[:MOST_KERNEL_POINTS]
        without = len(stage.rows) - len(placed)
        if isinstance(stage.counters, Missing):
            remarks.append(f"No kernels of {stage.stage}: {stage.counters.why}.")
        elif without:
            remarks.append(
                f"{without} of {len(stage.rows)} kernels of {stage.stage} were not counted, or have no FLOPs or no DRAM bytes."
            )
        if len(placed) > MOST_KERNEL_POINTS:
            remarks.append(f"Of {stage.stage}, the {MOST_KERNEL_POINTS} longest of {len(placed)} counted kernels are shown.")
    return points, remarks


def axis_range(values: Sequence[float], room: float = 2.0) -> tuple[float, float]:
    """Return the ends of a log axis around these values, a factor `room` beyond them."""
    return min(values) / room, max(values) * room


def roofline_extent(data: Roofline) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the ends of both axes, so that every point and every ridge is inside."""
    ridges = [roof.peak_flops_per_s / roof.bandwidth_bytes_per_s for roof in data.roofs if roof.bandwidth_bytes_per_s]
    across = [point.flops_per_byte for point in data.points] + ridges
    x = axis_range(across or [1.0, 100.0], 4.0)
    heights = [point.flops_per_s for point in data.points] + [roof.peak_flops_per_s for roof in data.roofs]
    return x, axis_range(heights, 2.5)


Ticks = list[tuple[float, str]]
"""Positions and labels of the ticks on an axis."""


def intensity_ticks(low: float, high: float) -> Ticks:
    """Return a tick per decade of intensity."""
    return [(value, in_unit(value, (1.0, ""), 1)) for value in _decades(low, high)]


def rate_ticks(low: float, high: float) -> Ticks:
    """Return a tick per decade of rate, each in its own unit: 100 GFLOP/s, 1 TFLOP/s."""
    return [(value, scaled(value, FLOP_RATE, 1)) for value in _decades(low, high)]


def _decades(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(ceil(log10(low)), floor(log10(high)) + 1)]


def roof_corners(roof: RoofLine, low: float, high: float) -> list[tuple[float, float]]:
    """Return the corners of a roofline between two intensities."""
    if roof.bandwidth_bytes_per_s is None:
        return [(low, roof.peak_flops_per_s), (high, roof.peak_flops_per_s)]
    ridge = roof.peak_flops_per_s / roof.bandwidth_bytes_per_s
    corners = [(low, min(low * roof.bandwidth_bytes_per_s, roof.peak_flops_per_s))]
    if low < ridge < high:
        corners.append((ridge, roof.peak_flops_per_s))
    corners.append((high, min(high * roof.bandwidth_bytes_per_s, roof.peak_flops_per_s)))
    return corners

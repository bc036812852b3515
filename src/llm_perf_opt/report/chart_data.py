"""What the charts show, before anything is drawn: the same figures for the interactive page and for the still images."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, log10
from typing import Literal

from llm_perf_opt.analysis.kernels.evidence import KernelEvidence
from llm_perf_opt.analysis.kernels.names import short_name
from llm_perf_opt.analysis.limits.efficiency import Efficiency, PartEfficiency, StageEfficiency
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.units import FLOP_RATE, in_unit, scaled

MOST_KERNEL_POINTS = 60
"""Of each stage on the roofline, the longest: the others lie among them and take no time."""
_NAME_WIDTH = 60

PointKind = Literal["stage", "part", "kernel"]


@dataclass(frozen=True)
class Use:
    """One row of a waterfall."""

    label: str
    ns: int
    note: str = ""
    color: int = 0
    """Its place in the palette."""


@dataclass(frozen=True)
class Waterfall:
    """Where the time of a stage goes; the uses sum to the whole."""

    stage: str
    title: str
    """What one bar to the right edge is, such as `decode: 18.09 ms per step`."""
    uses: tuple[Use, ...]
    notes: tuple[str, ...] = ()

    @property
    def total_ns(self) -> int:
        """All uses together."""
        return sum(use.ns for use in self.uses)


@dataclass(frozen=True)
class RoofLine:
    """A pair of limits; without a bandwidth only the flat part."""

    name: str
    peak_flops_per_s: float
    bandwidth_bytes_per_s: float | None


@dataclass(frozen=True)
class Point:
    """One thing that ran, on the roofline."""

    kind: PointKind
    stage: str
    name: str
    flops_per_byte: float
    flops_per_s: float
    time_ns: int
    detail: str = ""


@dataclass(frozen=True)
class Roofline:
    """Limits and what came near them."""

    dtype: str
    roofs: tuple[RoofLine, ...]
    points: tuple[Point, ...]
    left_out: tuple[str, ...] = field(default=())
    """What has no place on it, and why."""


def coarse_waterfalls(found: Maybe[Efficiency]) -> Maybe[tuple[Waterfall, ...]]:
    """Floor and the time above it, for a run whose budget cannot be told in more detail."""
    if isinstance(found, Missing):
        return found
    made = []
    for stage in found.stages:
        best = next((entry for entry in reversed(stage.against) if not isinstance(entry.floor, Missing)), None)
        if best is None or isinstance(best.floor, Missing):
            return Missing("no limit is known to compare with")
        whole = round(stage.time_ns.median)
        least = min(round(best.floor.seconds * 1e9), whole)
        uses = (
            Use("floor: the least work at the best known limits", least, f"on the {best.roof.name} limits"),
            Use("above the floor", whole - least, color=1),
        )
        made.append(Waterfall(stage.stage, f"{stage.stage}, one request", uses))
    return tuple(made) or Missing("no stage was measured")


def roofline(found: Maybe[Efficiency], kernels: Maybe[KernelEvidence]) -> Maybe[Roofline]:
    """Stages and parts from the cost model, kernels from their counters; what cannot be drawn on log axes is said."""
    if isinstance(found, Missing):
        return found
    roofs = tuple(_roof_lines(found))
    if not roofs:
        why = next(
            (roof.peak_flops_per_s for roof in found.roofs if isinstance(roof.peak_flops_per_s, Missing)),
            Missing("none is known"),
        )
        return Missing(f"no limit is known: {why.why}")
    points: list[Point] = []
    nothing: list[str] = []
    for stage in found.stages:
        points.append(_stage_point(stage))
        if not isinstance(stage.parts, Missing):
            for part in stage.parts:
                point = _part_point(stage.stage, part)
                if point is not None:
                    points.append(point)
                elif part.floor is not None and not isinstance(part.time_ns, Missing):
                    nothing.append(f"{part.name} of {stage.stage}")
    left_out = [f"Without FLOPs or without bytes, so not on log axes: {', '.join(nothing)}."] if nothing else []
    if isinstance(kernels, Missing):
        left_out.append(f"No kernels: {kernels.why}.")
    else:
        found_points, said = _kernel_points(kernels)
        points += found_points
        left_out += said
    drawable = [point for point in points if point.flops_per_byte > 0 and point.flops_per_s > 0]
    return Roofline(found.dtype, roofs, tuple(drawable), tuple(left_out))


def _roof_lines(found: Efficiency) -> Iterable[RoofLine]:
    for roof in found.roofs:
        if isinstance(roof.peak_flops_per_s, Missing):
            continue
        bandwidth = roof.bandwidth_bytes_per_s
        yield RoofLine(roof.name, roof.peak_flops_per_s, None if isinstance(bandwidth, Missing) else bandwidth)


def _stage_point(stage: StageEfficiency) -> Point:
    return Point(
        "stage",
        stage.stage,
        stage.stage,
        stage.cost.flops_per_byte,
        stage.flops_per_s,
        round(stage.time_ns.median),
        "the whole stage, unprofiled: model FLOPs over least bytes",
    )


def _part_point(stage: str, part: PartEfficiency) -> Point | None:
    least = part.floor
    if least is None or isinstance(part.time_ns, Missing) or not least.flops or not least.bytes:
        return None
    seconds = max(part.time_ns, 1) / 1e9
    return Point(
        "part", stage, part.name, least.flops / least.bytes, least.flops / seconds, part.time_ns, "model FLOPs over least bytes"
    )


def _kernel_points(kernels: KernelEvidence) -> tuple[list[Point], list[str]]:
    points, said = [], []
    for stage in kernels.stages:
        placed: list[Point] = []
        without = 0
        for row in stage.rows:
            intensity, rate = row.flops_per_byte, row.flops_per_s
            if isinstance(intensity, Missing) or isinstance(rate, Missing) or intensity <= 0 or rate <= 0:
                without += 1
                continue
            name = short_name(row.name, _NAME_WIDTH)
            placed.append(
                Point("kernel", stage.stage, name, intensity, rate, row.total_ns, "executed FLOPs over DRAM bytes, counted")
            )
        points += placed[:MOST_KERNEL_POINTS]
        if isinstance(stage.counters, Missing):
            said.append(f"No kernels of {stage.stage}: {stage.counters.why}.")
        elif without:
            said.append(
                f"{without} of {len(stage.rows)} kernels of {stage.stage} were not counted, or have no FLOPs or no DRAM bytes."
            )
        if len(placed) > MOST_KERNEL_POINTS:
            said.append(f"Of {stage.stage} the {MOST_KERNEL_POINTS} longest of {len(placed)} counted kernels are drawn.")
    return points, said


def axis_range(values: Sequence[float], room: float = 2.0) -> tuple[float, float]:
    """The ends of a log axis around these values, a factor `room` beyond them."""
    return min(values) / room, max(values) * room


def roofline_extent(data: Roofline) -> tuple[tuple[float, float], tuple[float, float]]:
    """The ends of both axes: every point and every ridge is inside."""
    ridges = [roof.peak_flops_per_s / roof.bandwidth_bytes_per_s for roof in data.roofs if roof.bandwidth_bytes_per_s]
    across = [point.flops_per_byte for point in data.points] + ridges
    x = axis_range(across or [1.0, 100.0], 4.0)
    heights = [point.flops_per_s for point in data.points] + [roof.peak_flops_per_s for roof in data.roofs]
    return x, axis_range(heights, 2.5)


Ticks = list[tuple[float, str]]
"""Where a mark stands on an axis, and what it says."""


def intensity_ticks(low: float, high: float) -> Ticks:
    """The decades between two intensities, as plain numbers."""
    return [(value, in_unit(value, (1.0, ""), 1)) for value in _decades(low, high)]


def rate_ticks(low: float, high: float) -> Ticks:
    """The decades between two rates, each in its own unit: 100 GFLOP/s, 1 TFLOP/s."""
    return [(value, scaled(value, FLOP_RATE, 1)) for value in _decades(low, high)]


def _decades(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(ceil(log10(low)), floor(log10(high)) + 1)]


def roof_corners(roof: RoofLine, low: float, high: float) -> list[tuple[float, float]]:
    """The line of a roof between two intensities."""
    if roof.bandwidth_bytes_per_s is None:
        return [(low, roof.peak_flops_per_s), (high, roof.peak_flops_per_s)]
    ridge = roof.peak_flops_per_s / roof.bandwidth_bytes_per_s
    corners = [(low, min(low * roof.bandwidth_bytes_per_s, roof.peak_flops_per_s))]
    if low < ridge < high:
        corners.append((ridge, roof.peak_flops_per_s))
    corners.append((high, min(high * roof.bandwidth_bytes_per_s, roof.peak_flops_per_s)))
    return corners

"""The energy of the measured window, from the readings of every GPU."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llm_perf_opt.analysis.separable import stages_unavailable
from llm_perf_opt.core.machine_records import GpuSample, Telemetry
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing
from llm_perf_opt.core.units import duration

INTERVALS_PER_STAGE = 2
"""The energy of a stage shorter than this many sampling intervals is unknown."""

Window = tuple[int, int]
Point = tuple[int, float]


@dataclass(frozen=True)
class Energy:
    """Energy of a window, from both sources of the driver. They can disagree, so both are shown."""

    window: str
    seconds: float
    from_counter_j: Maybe[float]
    """Difference of the driver's energy counter over the window."""
    from_power_j: Maybe[float]
    """Integral of the power readings over the window."""


def measured_window(timings: CleanTimings) -> Window:
    """Return the window from the start of the first repeat to the end of the last, including pauses between them."""
    first, last = timings.iterations[0], timings.iterations[-1]
    return first.started_ns, last.started_ns + last.wall_ns


def energy_of(telemetry: Telemetry, timings: CleanTimings, window: Window) -> tuple[Energy, ...]:
    """Return the energy of the repeats, of all prefills and of all decodes, summed over the GPUs."""
    if not telemetry.gpu:
        why = Missing(f"no GPU readings: {telemetry.header.gpu_note or 'none were taken'}")
        return (Energy("measured repeats", (window[1] - window[0]) / 1e9, why, why),)
    prefill = [(it.started_ns, it.started_ns + it.prefill_ns) for it in timings.iterations]
    decode = [(it.started_ns + it.prefill_ns, it.started_ns + it.total_ns) for it in timings.iterations if it.steps_ns]
    rows = [_energy_of("measured repeats", telemetry, [window], resolved=True)]
    unavailable = stages_unavailable(timings)
    if unavailable is not None:
        seconds = (window[1] - window[0]) / 1e9
        return (*rows, *[Energy(f"{name}, all repeats", seconds, unavailable, unavailable) for name in ("prefill", "decode")])
    for name, windows in (("prefill, all repeats", prefill), ("decode, all repeats", decode)):
        if windows:
            shortest = min(end - begin for begin, end in windows) / 1e9
            resolved = shortest >= INTERVALS_PER_STAGE * telemetry.header.interval_s
            rows.append(_energy_of(name, telemetry, windows, resolved))
    return tuple(rows)


def _energy_of(name: str, telemetry: Telemetry, windows: Sequence[Window], resolved: bool) -> Energy:
    seconds = sum(end - begin for begin, end in windows) / 1e9
    if not resolved:
        shortest = min(end - begin for begin, end in windows)
        why = Missing(
            f"it lasts {duration(shortest, 3)}, less than {INTERVALS_PER_STAGE} sampling intervals of "
            f"{telemetry.header.interval_s * 1e3:g} ms"
        )
        return Energy(name, seconds, why, why)
    return Energy(
        name,
        seconds,
        _over_devices(telemetry, lambda sample: sample.energy_mj, windows, _difference),
        _over_devices(telemetry, lambda sample: sample.power_mw, windows, _integral),
    )


def by_device(samples: Sequence[GpuSample]) -> dict[int, list[GpuSample]]:
    """Return the readings of each GPU, by its index."""
    found: dict[int, list[GpuSample]] = {device: [] for device in sorted({sample.device for sample in samples})}
    for sample in samples:
        found[sample.device].append(sample)
    return found


def _over_devices(
    telemetry: Telemetry,
    thousandths: Callable[[GpuSample], Maybe[int]],
    windows: Sequence[Window],
    of: Callable[[Sequence[Point], Window], Maybe[float]],
) -> Maybe[float]:
    """Return the sum over all GPUs; missing if it is missing for one."""
    total = 0.0
    for samples in by_device(telemetry.gpu).values():
        part = _summed(_points(samples, thousandths), windows, of)
        if isinstance(part, Missing):
            return part
        total += part
    return total


def _points(samples: Sequence[GpuSample], thousandths: Callable[[GpuSample], Maybe[int]]) -> Maybe[list[Point]]:
    """Return the available readings in W or J, or the driver's reason if there are none."""
    answers = [(sample.at_ns, thousandths(sample)) for sample in samples]
    points = [(at, value * 1e-3) for at, value in answers if not isinstance(value, Missing)]
    return points or next(value for _, value in answers if isinstance(value, Missing))


def _summed(
    points: Maybe[list[Point]], windows: Sequence[Window], of: Callable[[Sequence[Point], Window], Maybe[float]]
) -> Maybe[float]:
    if isinstance(points, Missing):
        return points
    total = 0.0
    for window in windows:
        part = of(points, window)
        if isinstance(part, Missing):
            return part
        total += part
    return total


def _at(points: Sequence[Point], moment: int) -> Maybe[float]:
    """Return the value at a moment by linear interpolation."""
    for (t0, v0), (t1, v1) in itertools.pairwise(points):
        if t0 <= moment <= t1:
            return v0 if t1 == t0 else v0 + (v1 - v0) * (moment - t0) / (t1 - t0)
    return Missing("the readings do not cover the window")


def _difference(points: Sequence[Point], window: Window) -> Maybe[float]:
    begin, end = _at(points, window[0]), _at(points, window[1])
    if isinstance(begin, Missing) or isinstance(end, Missing):
        return begin if isinstance(begin, Missing) else end
    return end - begin


def _integral(points: Sequence[Point], window: Window) -> Maybe[float]:
    """Return the integral by the trapezoidal rule, cut exactly at the ends of the window."""
    begin, end = _at(points, window[0]), _at(points, window[1])
    if isinstance(begin, Missing) or isinstance(end, Missing):
        return begin if isinstance(begin, Missing) else end
    inner = [point for point in points if window[0] < point[0] < window[1]]
    corners = [(window[0], begin), *inner, (window[1], end)]
    return sum((t1 - t0) * 1e-9 * (v0 + v1) / 2 for (t0, v0), (t1, v1) in itertools.pairwise(corners))

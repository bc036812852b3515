"""Telemetry of the measured window: energy, clocks, throttling, other processes."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from llm_perf_opt.analysis.energy import Energy as Energy
from llm_perf_opt.analysis.energy import Window, by_device, energy_of
from llm_perf_opt.analysis.energy import measured_window as measured_window
from llm_perf_opt.analysis.limits.hardware import devices_of
from llm_perf_opt.analysis.stats import percentile
from llm_perf_opt.core.machine_records import CpuSample, ExporterReading, GpuSample, Telemetry
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing
from llm_perf_opt.core.warnings import RunWarning, WarningId

S = TypeVar("S", GpuSample, CpuSample, ExporterReading)

NEIGHBOR_PROCESSORS = 0.25
"""Other processes that use more processors than this cause a warning."""
NEIGHBOR_GPU_PCT = 5
"""A GPU that is busier than this before the run causes a warning."""
THROTTLE_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""Bits of NVML's clock-event reasons that mean throttling; idle and application clocks are not among them."""


@dataclass(frozen=True)
class Reading:
    """One telemetry quantity over the measured window."""

    name: str
    unit: str
    n: int
    low: Maybe[float]
    median: Maybe[float]
    high: Maybe[float]


@dataclass(frozen=True)
class ExporterSeries:
    """One series of an exporter over the measured window."""

    name: str
    """`NAME{labels}`, as the exporter writes it."""
    kind: str
    """counter, gauge, …; empty if the exporter does not say."""
    n: int
    """Versions of the file with this series."""
    low: float
    median: float
    high: float
    increase: Maybe[float]
    """Of a counter, between the first and the last version during the repeats."""
    increase_s: Maybe[float]
    """Seconds between these versions."""


NOT_SAMPLED = Missing("processor use was not sampled")


@dataclass(frozen=True)
class TelemetrySummary:
    """Telemetry during the repeats of the unprofiled pass."""

    readings: tuple[Reading, ...]
    energy: tuple[Energy, ...]
    note: str
    """What could not be sampled, and why."""
    warnings: tuple[RunWarning, ...]
    others: Maybe[float] = NOT_SAMPLED
    """Mean number of processors that other processes used during the repeats."""
    exporter: tuple[ExporterSeries, ...] = ()
    """What the file of `profiling.nvml.prometheus` contained."""
    exporter_note: str = ""
    """How often the file changed, and what of it could not be read."""


def summarize_telemetry(telemetry: Telemetry, timings: CleanTimings) -> TelemetrySummary:
    """Return readings, energy and warnings over the window of the repeats."""
    window = measured_window(timings)
    gpu = _inside(telemetry.gpu, window)
    cpu = _inside(telemetry.cpu, window)
    return TelemetrySummary(
        readings=(*_readings_by_device(gpu), *_cpu_readings(cpu)),
        energy=energy_of(telemetry, timings, window),
        note=f"No GPU readings: {telemetry.header.gpu_note}." if telemetry.header.gpu_note else "",
        warnings=(
            *_throttling(gpu),
            *_neighbors(telemetry, timings, cpu, gpu),
            *_wrong_device(telemetry, timings),
            *_one_of_several(telemetry, timings),
        ),
        others=_others(cpu),
        exporter=_exporter_series(_in_effect(telemetry.exporter, window), window),
        exporter_note=_exporter_note(telemetry.exporter, window),
    )


def _inside(samples: Sequence[S], window: Window) -> list[S]:
    return [sample for sample in samples if window[0] <= sample.at_ns <= window[1]]


def _one_of_several(telemetry: Telemetry, timings: CleanTimings) -> list[RunWarning]:
    """Warn if the model ran on more devices than the sampler read."""
    devices, sampled = devices_of(timings), len(by_device(telemetry.gpu))
    if sampled >= devices or not telemetry.gpu:
        return []
    some = "only one was sampled: power, energy and memory are those of that device"
    if sampled > 1:
        some = f"only {sampled} were sampled: power, energy and memory are those of these devices"
    words = f"The model ran on {devices} devices, but {some}."
    return [RunWarning(WarningId.ONE_OF_SEVERAL_WATCHED, words)]


# --- readings ---------------------------------------------------------------------------------------------------------


def _reading(name: str, unit: str, samples: Sequence[S], value: Callable[[S], Maybe[float]]) -> Reading:
    answers = [value(sample) for sample in samples]
    present = [float(answer) for answer in answers if not isinstance(answer, Missing)]
    if not present:
        why = next((answer for answer in answers if isinstance(answer, Missing)), Missing("there is no reading in the window"))
        return Reading(name, unit, 0, why, why, why)
    return Reading(name, unit, len(present), min(present), percentile(present, 0.5), max(present))


def _scaled(value: Maybe[int], factor: float) -> Maybe[float]:
    return value if isinstance(value, Missing) else value * factor


def _readings_by_device(samples: Sequence[GpuSample]) -> list[Reading]:
    """Return the readings of each GPU; of several, with the number of the GPU in their names."""
    found = by_device(samples)
    if len(found) < 2:
        return _gpu_readings(samples)
    return [
        replace(reading, name=f"{reading.name}, GPU {device}") for device, own in found.items() for reading in _gpu_readings(own)
    ]


def _gpu_readings(samples: Sequence[GpuSample]) -> list[Reading]:
    if not samples:
        return []
    return [
        _reading("GPU power", "W", samples, lambda s: _scaled(s.power_mw, 1e-3)),
        _reading("SM clock", "MHz", samples, lambda s: s.sm_clock_mhz),
        _reading("memory clock", "MHz", samples, lambda s: s.memory_clock_mhz),
        _reading("GPU temperature", "°C", samples, lambda s: s.temperature_c),
        _reading("GPU utilization", "%", samples, lambda s: s.gpu_utilisation_pct),
        _reading("memory-controller utilization", "%", samples, lambda s: s.memory_utilisation_pct),
        _reading("GPU memory in use", "GiB", samples, lambda s: _scaled(s.memory_used_bytes, 2**-30)),
    ]


def _cpu_readings(samples: Sequence[CpuSample]) -> list[Reading]:
    return [
        _reading("processors busy, whole machine", "processors", samples, lambda s: s.machine_pct / 100),
        _reading("processors busy, measured process", "processors", samples, lambda s: s.ours_pct / 100),
        _reading("resident memory, measured process", "GiB", samples, lambda s: s.rss_bytes * 2**-30),
        _reading("processor frequency", "MHz", samples, lambda s: s.frequency_mhz),
    ]


def _in_effect(readings: Sequence[ExporterReading], window: Window) -> list[ExporterReading]:
    """Return the versions of the file in the window, and the last one before it: it is valid until the file changes."""
    before = [reading for reading in readings if reading.at_ns < window[0]][-1:]
    return [*before, *_inside(readings, window)]


def _exporter_series(readings: Sequence[ExporterReading], window: Window) -> tuple[ExporterSeries, ...]:
    found = []
    for name in sorted({name for reading in readings for name in reading.series}):
        values = [reading.series[name] for reading in readings if name in reading.series]
        kind = next((kind for reading in readings if (kind := reading.kinds.get(name.partition("{")[0]))), "")
        increase = _increase(name, _inside(readings, window)) if kind == "counter" else (_NO_COUNTER, _NO_COUNTER)
        found.append(ExporterSeries(name, kind, len(values), min(values), percentile(values, 0.5), max(values), *increase))
    return tuple(found)


_NO_COUNTER = Missing("not a counter")
_READ_ONCE = Missing("it was not read twice during the repeats")
_RESTARTED = Missing("the counter restarted during the repeats")


def _increase(name: str, readings: Sequence[ExporterReading]) -> tuple[Maybe[float], Maybe[float]]:
    """Return by how much a counter grew between the first and the last reading, and the seconds between them."""
    values = [(reading.at_ns, reading.series[name]) for reading in readings if name in reading.series]
    if len(values) < 2:
        return _READ_ONCE, _READ_ONCE
    if any(after < before for (_, before), (_, after) in itertools.pairwise(values)):
        return _RESTARTED, _RESTARTED
    (begin, first), (end, last) = values[0], values[-1]
    return last - first, (end - begin) / 1e9


def _exporter_note(readings: Sequence[ExporterReading], window: Window) -> str:
    if not readings:
        return ""
    inside = _inside(readings, window)
    words = f"The exporter's file changed {'once' if len(inside) == 1 else f'{len(inside)} times'} during the repeats"
    if not inside:
        words = "The exporter's file did not change during the repeats: its values are those from before"
    troubles = list(dict.fromkeys(reading.why for reading in readings if reading.why))
    return f"{words}.{' Not read: ' + '; '.join(troubles) + '.' if troubles else ''}"


UTILIZATION_PERIOD_S = 1.0
"""The longest period that a reading of GPU utilization covers (NVML: between 1/6 s and 1 s)."""
LEAST_READINGS = 3
LEAST_REQUESTS = 3
"""The fewest readings, and requests that they cover, whose mean is taken as the mean of all repeats."""


def device_busy_share(telemetry: Maybe[Telemetry], timings: CleanTimings) -> Maybe[float]:
    """Return the share of the repeats' time during which kernels ran, from the driver's utilization, over all stages."""
    if isinstance(telemetry, Missing):
        return telemetry
    if not timings.model.device.startswith("cuda"):
        return Missing("the model ran on the CPU")
    devices = max(len(by_device(telemetry.gpu)), 1)
    if devices_of(timings) > devices:
        return Missing(f"only {'one' if devices == 1 else devices} of {devices_of(timings)} devices was sampled")
    if not timings.iterations:
        return Missing("no iteration was measured")
    begin, end = measured_window(timings)
    begin += round(UTILIZATION_PERIOD_S * 1e9)  # earlier readings also cover time before the repeats
    samples = _inside(telemetry.gpu, (begin, end))
    if any(not isinstance(sample.processes, Missing) and sample.processes > 1 for sample in samples):
        return Missing("other processes shared the GPU while it was sampled")
    answers = [sample.gpu_utilisation_pct for sample in samples]
    known = [answer for answer in answers if not isinstance(answer, Missing)]
    covered_s = len(known) * telemetry.header.interval_s / devices
    if (
        len(known) < LEAST_READINGS
        or covered_s < LEAST_REQUESTS * percentile([it.wall_ns for it in timings.iterations], 0.5) / 1e9
    ):
        why = next((answer.why for answer in answers if isinstance(answer, Missing)), "")
        return Missing(why or f"the repeats were too short for the sampler: only {len(known)} readings lie within them")
    return sum(known) / len(known) / 100


# --- warnings ---------------------------------------------------------------------------------------------------------


def throttle_names(bits: int) -> list[str]:
    """Return the throttling reasons set in `bits`."""
    return [name for bit, name in THROTTLE_REASONS.items() if bits & bit]


def _throttling(samples: Sequence[GpuSample]) -> list[RunWarning]:
    known = [s.throttle_bits for s in samples if not isinstance(s.throttle_bits, Missing)]
    counts: dict[str, int] = {}
    for bits in known:
        for name in throttle_names(bits):
            counts[name] = counts.get(name, 0) + 1
    return [
        RunWarning(WarningId.THROTTLED, f"The GPU was throttled ({name}) in {count} of {len(known)} readings while measuring.")
        for name, count in counts.items()
    ]


def _others(cpu: Sequence[CpuSample]) -> Maybe[float]:
    if not cpu:
        return Missing("processor use was not sampled during the repeats")
    return sum(max(0.0, sample.machine_pct - sample.ours_pct) for sample in cpu) / len(cpu) / 100


def _neighbors(
    telemetry: Telemetry, timings: CleanTimings, cpu: Sequence[CpuSample], gpu: Sequence[GpuSample]
) -> list[RunWarning]:
    warnings = []
    others = _others(cpu)
    if not isinstance(others, Missing) and others > NEIGHBOR_PROCESSORS:
        words = f"Other processes used {others:.2f} of {telemetry.header.processors} processors on average while measuring."
        warnings.append(RunWarning(WarningId.BUSY_PROCESSORS, words))
    counts = [sample.processes for sample in gpu if not isinstance(sample.processes, Missing)]
    if counts and max(counts) > 1:
        warnings.append(RunWarning(WarningId.SHARED_GPU, f"{max(counts)} processes shared the GPU while measuring."))
    before = [
        sample.gpu_utilisation_pct
        for sample in telemetry.gpu
        if sample.at_ns < timings.device_untouched_until_ns and not isinstance(sample.gpu_utilisation_pct, Missing)
    ]
    if before and percentile(before, 0.5) > NEIGHBOR_GPU_PCT:
        words = f"The GPU was {percentile(before, 0.5):.0f} % busy before this run used it: another process is using it."
        warnings.append(RunWarning(WarningId.BUSY_GPU_BEFORE, words))
    return warnings


def _wrong_device(telemetry: Telemetry, timings: CleanTimings) -> list[RunWarning]:
    if telemetry.gpu and not timings.model.device.startswith("cuda"):
        words = "The telemetry is that of the GPU, but the model ran on the CPU."
        return [RunWarning(WarningId.WRONG_DEVICE_WATCHED, words)]
    return []

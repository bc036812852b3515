"""What a GPU's clocks, power and neighbors are while its ceilings are measured."""

import time
from typing import Any

from llm_perf_opt.analysis.telemetry import NEIGHBOUR_GPU_PCT, throttle_names
from llm_perf_opt.core.machine_records import GpuSample
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.runners.measure.ceiling_kernels import Room
from llm_perf_opt.runners.measure.ceiling_timing import Conditions
from llm_perf_opt.runners.measure.gpu import read, sample


class Watch:
    """Reads a GPU while it works: few quantities, because a series is over in milliseconds."""

    def __init__(self, library: Maybe[Any], handle: Maybe[Any]) -> None:
        self._library: Any = library
        self._handle: Any = handle
        self.why = next((part for part in (library, handle) if isinstance(part, Missing)), None)
        self.clocks_mhz: list[int] = []
        self.power_w: list[float] = []
        self.temperatures_c: list[int] = []
        self.throttled: dict[str, int] = {}
        self.readings = 0

    def before(self) -> Maybe[GpuSample]:
        """Everything the driver tells, before the device is touched."""
        return self.why or sample(self._library, self._handle, time.monotonic_ns())

    def power_limit_w(self) -> Maybe[float]:
        """Where the driver holds the card back."""
        if self.why:
            return self.why
        library, handle = self._library, self._handle
        return read(library, lambda: int(library.nvmlDeviceGetEnforcedPowerLimit(handle)) / 1e3)

    def __call__(self) -> str:
        """Clock, power and throttling now, remembered and in words."""
        if self.why:
            return ""
        library, handle = self._library, self._handle
        clock = read(library, lambda: int(library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM)))
        reasons = read(library, lambda: int(library.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
        power = read(library, lambda: int(library.nvmlDeviceGetPowerUsage(handle)))
        warmth = read(library, lambda: int(library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU)))
        self.readings += 1
        said = []
        if not isinstance(clock, Missing):
            self.clocks_mhz.append(clock)
            said.append(f"SM {clock} MHz")
        if not isinstance(power, Missing):
            self.power_w.append(power / 1e3)
            said.append(f"{power / 1e3:.0f} W")
        if not isinstance(warmth, Missing):
            self.temperatures_c.append(warmth)
        if not isinstance(reasons, Missing):
            names = throttle_names(reasons)
            said += names
            for name in names:
                self.throttled[name] = self.throttled.get(name, 0) + 1
        return ", ".join(said)

    def during(self) -> str:
        """All readings together, in words."""
        if self.why:
            return f"clocks and power could not be read: {self.why.why}"
        said = []
        if self.clocks_mhz:
            said.append(f"SM clock {_span(self.clocks_mhz)} MHz")
        if self.power_w:
            limit = self.power_limit_w()
            allowed = "" if isinstance(limit, Missing) else f" of {limit:.0f}"
            # Cards since Ampere tell the average of the last second, in which most of the time was rest.
            said.append(f"power {_span([round(watts) for watts in self.power_w])}{allowed} W averaged by the driver")
        if self.temperatures_c:
            said.append(f"{_span(self.temperatures_c)} °C")
        slowed = [f"{name} in {count} of {self.readings} readings" for name, count in self.throttled.items()]
        said.append(f"throttled by {', '.join(slowed)}" if slowed else "not throttled")
        return f"while measuring: {', '.join(said)}"


def _span(values: list[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def gpu_conditions(room: Room, reading: Maybe[GpuSample], during: str) -> Conditions:
    """The card as it was found, and as it was while it worked."""
    memory = f"second-level cache {room.cache_bytes / 2**20:.0f} MiB, {room.bytes / 2**20:.0f} MiB gone through in turn"
    if isinstance(reading, Missing):
        return Conditions((memory, during))
    said = [
        f"{value if scale == 1 else round(value * scale)} {unit}"
        for value, scale, unit in (
            (reading.sm_clock_mhz, 1, "MHz SM"),
            (reading.memory_clock_mhz, 1, "MHz memory"),
            (reading.power_mw, 1e-3, "W"),
            (reading.temperature_c, 1, "°C"),
            (reading.gpu_utilisation_pct, 1, "% busy"),
        )
        if not isinstance(value, Missing)
    ]
    if not isinstance(reading.processes, Missing):
        said.append(f"{reading.processes} processes on it")
    busy = reading.gpu_utilisation_pct
    doubt = ""
    if not isinstance(busy, Missing) and busy > NEIGHBOUR_GPU_PCT:
        doubt = f"the GPU was {busy} % busy with other work before measuring, the figures are too low"
    return Conditions((memory, f"before measuring: {', '.join(said)}", during), doubt)

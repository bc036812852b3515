"""What the machine did and can do: telemetry samples, measured peaks."""

from dataclasses import dataclass
from typing import Literal

from llm_perf_opt.core.records import Distribution, Maybe


@dataclass(frozen=True)
class GpuSample:
    """One reading of one GPU."""

    at_ns: int
    power_mw: Maybe[int]
    sm_clock_mhz: Maybe[int]
    memory_clock_mhz: Maybe[int]
    temperature_c: Maybe[int]
    gpu_utilisation_pct: Maybe[int]
    memory_utilisation_pct: Maybe[int]
    memory_used_bytes: Maybe[int]
    throttle_bits: Maybe[int]
    energy_mj: Maybe[int]
    """The driver's running energy counter."""
    processes: Maybe[int]
    """Compute processes on the device, ours among them."""


@dataclass(frozen=True)
class CpuSample:
    """One reading of the host."""

    at_ns: int
    machine_pct: float
    """All processors, 100 = one whole processor."""
    ours_pct: float
    """The measured process and its children, same scale."""
    rss_bytes: int
    frequency_mhz: Maybe[float]


@dataclass(frozen=True)
class TelemetryHeader:
    """The sampler's first line."""

    interval_s: float
    processors: int
    gpu_note: str
    """Why there are no GPU readings; empty where there are."""


@dataclass(frozen=True)
class Telemetry:
    """The sampler's whole output."""

    header: TelemetryHeader
    gpu: tuple[GpuSample, ...]
    cpu: tuple[CpuSample, ...]


CeilingUnit = Literal["FLOP/s", "B/s", "ns"]


@dataclass(frozen=True)
class CeilingRow:
    """One thing the device was driven to its limit at."""

    key: str
    label: str
    unit: CeilingUnit
    value: Maybe[Distribution]
    how: str
    """The operation that reached it, with its sizes."""
    conditions: str = ""
    """Clock, power and throttling while it was reached."""


@dataclass(frozen=True)
class Ceilings:
    """What a device reached when it had nothing else to do: the measured counterpart of its datasheet."""

    device_kind: Literal["cpu", "cuda"]
    device_name: str
    device_id: str
    """Tells one device from another of the same name."""
    driver: Maybe[str]
    torch_version: str
    threads: int
    """Of the framework on the host."""
    taken: str
    """UTC, ISO 8601."""
    budget_s: float
    """The time it was given."""
    seconds: float
    """The time it took."""
    conditions: tuple[str, ...]
    rows: tuple[CeilingRow, ...]

    def row(self, key: str) -> CeilingRow | None:
        """The row with this key."""
        return next((row for row in self.rows if row.key == key), None)


@dataclass(frozen=True)
class FoundCeilings:
    """Ceilings, and where they came from."""

    ceilings: Ceilings
    cached: bool
    """Whether they were measured before, not now."""
    cache_file: Maybe[str]
    notes: tuple[str, ...] = ()
    """What did not go as it should: a cache that is damaged or cannot be written."""
    doubts: tuple[str, ...] = ()
    """What disturbed the measurement: such figures are shown, but nothing is held against them."""

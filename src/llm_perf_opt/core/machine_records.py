"""What the machine did and can do: telemetry samples, measured peaks."""

from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from types import GenericAlias
from typing import Any, Literal

import msgspec

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.records import Distribution, Maybe, Missing
from llm_perf_opt.core.run_folder import read_record


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


# --- kernel records ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CountedKernel:
    """One launch that Nsight Compute replayed."""

    name: str
    """As the tool spells it."""
    process: int
    device: int
    stream: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    ranges: tuple[str, ...]
    """The NVTX ranges it was launched in, outermost first, as `DOMAIN@name`; start/end ranges, which do not nest, before the
    push/pop ones. Of the default domain the name alone."""
    counters: dict[str, Maybe[float]] = field(default_factory=dict)
    """Counter → value in base units (bytes, ns, FLOP, %)."""


@dataclass(frozen=True)
class CounterProblem:
    """Something that makes counters, or some of them, unfit for a number."""

    id: str
    what: str
    fatal: bool
    remedy: str = ""


@dataclass(frozen=True)
class CounterReport:
    """One report of Nsight Compute."""

    kernels: tuple[CountedKernel, ...]
    units: dict[str, str]
    """Counter → its base unit, as the tool names it."""
    problems: tuple[CounterProblem, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
    """What it says of the machine, where it does: device_name, compute_capability, process."""

    @property
    def complete(self) -> bool:
        """Whether its figures may be believed."""
        return not any(problem.fatal for problem in self.problems)


@dataclass(frozen=True)
class KernelUse:
    """One kernel in one launch size, as a trace saw it in a stage."""

    stage: str
    name: str
    """As the trace spells it."""
    grid: int
    """Blocks in all (x·y·z); 0: not known."""
    block: int
    """Threads of a block; 0: not known."""
    calls: int
    total_ns: int


# --- stored ceilings --------------------------------------------------------------------------------------------------


def read_ceilings(path: Path) -> FoundCeilings:
    """What `write_record` wrote of FoundCeilings, or a ParseError."""
    stored: Any = read_record(path, _FOUND)
    try:
        rows = tuple(CeilingRow(**{**_values(row), "value": _value(row.value)}) for row in stored.ceilings.rows)
    except msgspec.ValidationError as error:
        raise ParseError(f"{path} cannot be read: {error}", "The file is damaged, or was written by another version.") from error
    ceilings = Ceilings(**{**_values(stored.ceilings), "rows": rows})
    return FoundCeilings(**{**_values(stored), "ceilings": ceilings})


def _value(stored: dict[str, Any]) -> Distribution | Missing:
    if stored.keys() == {"why"}:
        return msgspec.convert(stored, Missing)
    return msgspec.convert(stored, Distribution)


def _values(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _stored(kind: type, **replaced: Any) -> Any:
    """The same record with other types for some fields: msgspec does not read a union of two records."""
    return make_dataclass(
        f"Stored{kind.__name__}", [(field.name, replaced.get(field.name, field.type)) for field in fields(kind)]
    )


_ROWS = GenericAlias(list, (_stored(CeilingRow, value=dict[str, Any]),))
_FOUND = _stored(FoundCeilings, ceilings=_stored(Ceilings, rows=_ROWS))

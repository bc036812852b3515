"""Records of the machine: telemetry samples, measured peaks, hardware counters."""

from dataclasses import MISSING, dataclass, field, fields, make_dataclass
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
    """The energy counter of the driver."""
    processes: Maybe[int]
    """Compute processes on the device; those of the measured program count as one."""
    device: int = 0
    """Index of the GPU."""


@dataclass(frozen=True)
class CpuSample:
    """One reading of the host."""

    at_ns: int
    machine_pct: float
    """Load of all processors; 100 is one processor."""
    ours_pct: float
    """Load of the measured process and its children, on the same scale."""
    rss_bytes: int
    frequency_mhz: Maybe[float]


@dataclass(frozen=True)
class TelemetryHeader:
    """The first line of the sampler's output."""

    interval_s: float
    processors: int
    gpu_note: str
    """Why there are no GPU readings; empty if there are some."""


@dataclass(frozen=True)
class ExporterReading:
    """One version of the file of an exporter, in the Prometheus text format."""

    at_ns: int
    written_utc_ns: int
    """When the file was last changed; 0: unknown."""
    series: dict[str, float]
    """`NAME{labels}` → value."""
    kinds: dict[str, str] = field(default_factory=dict)
    """NAME → counter, gauge, …"""
    why: str = ""
    """Why the file, or a part of it, could not be read; empty if it could."""


@dataclass(frozen=True)
class Telemetry:
    """All output of the sampler."""

    header: TelemetryHeader
    gpu: tuple[GpuSample, ...]
    cpu: tuple[CpuSample, ...]
    exporter: tuple[ExporterReading, ...] = ()


_NOT_RECORDED = Missing("not recorded")

CeilingUnit = Literal["FLOP/s", "B/s", "ns"]


@dataclass(frozen=True)
class CeilingRow:
    """One measured peak of a device."""

    key: str
    label: str
    unit: CeilingUnit
    value: Maybe[Distribution]
    how: str
    """The operation that reached it, with its sizes."""
    conditions: str = ""
    """Clock, power and throttling during the measurement."""
    instructions: str = ""
    """The CPU's instruction set for this number format; empty if it does not apply or is unknown."""
    native: bool | None = None
    """Whether these instructions multiply the format itself. False: it is converted (emulated). None: it does not apply."""
    work: float | None = None
    """Of a time that stands for known work (`model_gemv_…`, `model_gemm_…`): the bytes or FLOPs of that work."""
    gpus: int = 1
    """GPUs that took part: two or more for a copy between GPUs and an all-reduce."""

    @property
    def rate(self) -> Maybe[float]:
        """The work per second, from the median time."""
        if isinstance(self.value, Missing):
            return self.value
        return Missing("it has no known work") if self.work is None else self.work / (self.value.median * 1e-9)


@dataclass(frozen=True)
class CacheLevel:
    """One level of the caches of a CPU."""

    level: int
    bytes: int
    """All caches of this level that the usable processors have, together."""


@dataclass(frozen=True)
class LinearLayer:
    """All weight matrices of a model that have the same shape and multiply the same number of rows."""

    in_features: int
    out_features: int
    count: int
    """How many matrices of this shape one step uses."""
    prefill_rows: int
    """Rows of the activations in prefill; 0 if prefill does not use it."""
    decode_rows: int


@dataclass(frozen=True)
class ModelLinears:
    """The matrix products of a model with its weights, for one workload."""

    name: str
    dtype: str
    """The number format in which the model ran."""
    parameters: int
    """All parameters. Their size decides from which cache or memory the weights come."""
    layers: tuple[LinearLayer, ...]
    compiled: bool = False
    """Whether the run used torch.compile, which cannot use every int8 kernel."""
    experts: bool = False
    """Whether the model has experts, whose weights are not quantized."""


@dataclass(frozen=True)
class Ceilings:
    """The measured peaks of an otherwise idle device: the counterpart of its datasheet."""

    device_kind: Literal["cpu", "cuda"]
    device_name: str
    device_id: str
    """Distinguishes devices of the same name."""
    driver: Maybe[str]
    torch_version: str
    threads: int
    """Host threads of the framework."""
    taken: str
    """When they were measured: UTC, ISO 8601."""
    budget_s: float
    """The time that the measurement was allowed."""
    seconds: float
    """The time that the measurement took."""
    conditions: tuple[str, ...]
    rows: tuple[CeilingRow, ...]
    """By key:

    - `gemm_<dtype>`: FLOP/s of matrix products.
    - `read`, `copy`, `gemv`: B/s from memory (DRAM); `read_l1`, `read_l2`, `read_l3`: B/s from a cache level, all threads.
    - `threads_<n>_gemm`, `threads_<n>_gemv`: FLOP/s and B/s with n threads.
    - `model_gemv_<dtype>`: ns of all products with weights in one decode step; `work` is the bytes of these weights.
      `int8`: int8 weights, multiplied by the kernel that a run with `runtime.quantization=int8` would use. It keeps the
      activations in the dtype of the run or rounds them to int8 too.
    - `model_gemm_<dtype>`: ns of all products with weights in one prefill; `work` is their FLOPs.
    - `threads_<n>_model_gemv`: as `model_gemv_<dtype>` in the dtype of the run, with n threads.
    - `dispatch`, `view_call`, `module_call`: ns of host time per call.
    - `h2d_pinned`, `d2h_pinned`, `h2d_pageable`, `d2h_pageable`: B/s between host and GPU, from or to pinned or pageable memory.
    - `peer_copy`: B/s to another GPU; `all_reduce`: bus bandwidth of an all-reduce over all GPUs, what each sends per second.
    - `launch_…`, `sync`, `item`: ns, on a GPU.
    """
    caches: tuple[CacheLevel, ...] = ()
    """Of a CPU, in ascending order; empty if unknown."""
    processors: int = 0
    """Processors that the process could use; 0 in older files."""
    core_cpus: tuple[int, ...] = ()
    """The first CPU of each core; empty if unknown. Fewer than `processors`: the CPU has hyperthreads."""
    model: ModelLinears | None = None
    """The model of the `model_…` rows."""

    def row(self, key: str) -> CeilingRow | None:
        """Return the row with this key."""
        return next((row for row in self.rows if row.key == key), None)


@dataclass(frozen=True)
class FoundCeilings:
    """Measured peaks, and where they came from."""

    ceilings: Ceilings
    cached: bool
    """Whether they were read from the cache."""
    cache_file: Maybe[str]
    notes: tuple[str, ...] = ()
    """Problems with the cache: damaged, or not writable."""
    doubts: tuple[str, ...] = ()
    """What disturbed the measurement. Disturbed peaks are shown, but nothing is compared with them."""


# --- hardware counters ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CountedKernel:
    """One launch that Nsight Compute replayed."""

    name: str
    """As Nsight Compute spells it."""
    process: int
    device: int
    stream: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    ranges: tuple[str, ...]
    """The NVTX ranges it was launched in, outermost first, as `DOMAIN@name`, or `name` in the default domain. Start/end ranges,
    which do not nest, come before push/pop ranges."""
    counters: dict[str, Maybe[float]] = field(default_factory=dict)
    """Counter → value in base units (bytes, ns, FLOP, %)."""


@dataclass(frozen=True)
class CounterProblem:
    """A problem that makes some or all counters unusable."""

    id: str
    what: str
    fatal: bool
    remedy: str = ""


@dataclass(frozen=True)
class CounterReport:
    """One report of Nsight Compute."""

    kernels: tuple[CountedKernel, ...]
    units: dict[str, str]
    """Counter → its base unit, as Nsight Compute names it."""
    problems: tuple[CounterProblem, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
    """What the report states about the machine: device_name, compute_capability, process."""

    @property
    def complete(self) -> bool:
        """Whether no problem makes its numbers wrong."""
        return not any(problem.fatal for problem in self.problems)


@dataclass(frozen=True)
class KernelUse:
    """A kernel with one launch size in one stage of a trace."""

    stage: str
    name: str
    """As the trace spells it."""
    grid: int
    """Total blocks (x·y·z); 0: unknown."""
    block: int
    """Threads per block; 0: unknown."""
    calls: int
    total_ns: int


# --- reading stored peaks ---------------------------------------------------------------------------------------------


def read_ceilings(path: Path) -> FoundCeilings:
    """Return the FoundCeilings that `write_record` wrote, or raise a ParseError."""
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
    """Return a copy of a record type with other types for some fields: msgspec cannot read a union of two records."""
    columns: list[Any] = []
    for entry in fields(kind):
        default = {} if entry.default is MISSING else {"default": entry.default}
        columns.append((entry.name, replaced.get(entry.name, entry.type), field(**default)))
    return make_dataclass(f"Stored{kind.__name__}", columns)


_ROWS = GenericAlias(list, (_stored(CeilingRow, value=dict[str, Any]),))
_FOUND = _stored(FoundCeilings, ceilings=_stored(Ceilings, rows=_ROWS))

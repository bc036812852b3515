"""Measure the peaks of an NVIDIA GPU."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llm_perf_opt.analysis.telemetry import NEIGHBOR_GPU_PCT, throttle_names
from llm_perf_opt.core.machine_records import GpuSample
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.runners.measure.ceiling_kernels import (
    Arena,
    Multiply,
    Room,
    Shape,
    copy_rate,
    gemm_rate,
    gemv_rate,
    read_rate,
)
from llm_perf_opt.runners.measure.ceiling_timing import (
    Conditions,
    Measured,
    Pace,
    Quantity,
    Stopwatch,
    Trial,
    host_latency,
    time_per_unit,
)
from llm_perf_opt.runners.measure.ceiling_transfers import transfer_quantities
from llm_perf_opt.runners.measure.clock import CudaEventClock
from llm_perf_opt.runners.measure.gpu import read, sample

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Series are short and the GPU rests before each: under sustained load it reaches its power limit and slows down, and a stage of
# a few milliseconds would then be faster than the measured peak.
_GEMM_PACE = Pace(most_samples=50, sample_ns=300_000, burst_s=0.08, rest_s=0.15)
_MEMORY_PACE = Pace(most_samples=50, sample_ns=200_000, burst_s=0.05, rest_s=0.03)
_LAUNCH_PACE = Pace(most_samples=100, sample_ns=100_000, burst_s=1.0, rest_s=0.0)
_SHAPES: tuple[Shape, ...] = (
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (4096, 4096, 4096),
    (4096, 4096, 8192),
    (8192, 8192, 8192),
)
_READ_COLUMNS = 8192
_GEMV_COLUMNS = (8192, 16384)
_CHUNKS = 4
_CHUNK_CACHES = 16
_LEAST_CHUNK_BYTES = 256 * 2**20
_MOST_CHUNK_BYTES = 2**30
_MEMORY_SHARE = 0.4
_WAKE_S = 0.3
_LAUNCHES = 200
_GRAPH_KERNELS = 1000
_HOLD_FACTOR = 4
"""The device is kept busy for this many times the host's time, so that it stays behind the host."""
_CYCLES_PER_NS = 2.2
"""At least the clock of any GPU, so that the device is never busy for too short."""


def gpu_room(device: "torch.device") -> Room:
    """Return the memory for the measurements: much larger than the L2 cache, but not most of the free memory."""
    import torch

    cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
    chunk = min(_MOST_CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, _CHUNK_CACHES * cache))
    free = torch.cuda.mem_get_info(device)[0]
    return Room(min(_CHUNKS * chunk, int(free * _MEMORY_SHARE)), cache)


def wake(device: "torch.device") -> None:
    """Run light work until the GPU has left its idle clocks and the libraries are loaded."""
    import torch

    left, right = (torch.randn((1024, 1024), device=device) for _ in range(2))
    until = time.monotonic() + _WAKE_S
    while time.monotonic() < until:
        for _ in range(20):
            torch.mm(left, right)
        torch.cuda.synchronize(device)


def gpu_quantities(device: "torch.device", room: Room, watch: Callable[[], str]) -> tuple[Quantity, ...]:
    """Return the quantities of a GPU; a dtype that its generation does not support is Missing."""
    import torch

    clock = CudaEventClock(device)
    gemm, memory = Stopwatch(clock, _GEMM_PACE, watch), Stopwatch(clock, _MEMORY_PACE, watch)
    arena = Arena(room, device, _CHUNKS)
    capability = torch.cuda.get_device_capability(device)
    gemv_dtype = torch.bfloat16 if capability >= (8, 0) else torch.float16

    def product(name: str, dtype: "torch.dtype", needs: tuple[int, int], tf32: bool = False) -> Quantity:
        def measure(seconds: float) -> Maybe[Measured]:
            if capability < needs:
                return Missing(f"{name} needs compute capability {_dotted(needs)}; this GPU has {_dotted(capability)}")
            with fp32_products(tf32):
                multiply = _scaled(device) if name == "fp8" else None
                return gemm_rate(gemm, arena, _SHAPES, dtype, seconds, multiply)

        return Quantity(f"gemm_{name}", f"GEMM {name}", "FLOP/s", 1.0 if capability >= needs else 0.0, measure)

    return (
        product("bf16", torch.bfloat16, (8, 0)),
        product("fp16", torch.float16, (5, 3)),
        product("tf32", torch.float32, (8, 0), tf32=True),
        product("fp32", torch.float32, (0, 0)),
        product("fp8", torch.float8_e4m3fn, (8, 9)),
        Quantity("read", "read bandwidth", "B/s", 0.6, lambda s: read_rate(memory, arena, _READ_COLUMNS, s)),
        Quantity("copy", "copy bandwidth", "B/s", 0.6, lambda s: copy_rate(memory, arena, _READ_COLUMNS, s)),
        Quantity("gemv", "GEMV bandwidth", "B/s", 0.6, lambda s: gemv_rate(memory, arena, gemv_dtype, _GEMV_COLUMNS, s)),
        *transfer_quantities(device, clock, watch),
        *_latencies(device, clock),
    )


def _scaled(device: "torch.device") -> Multiply:
    """Return a product of two fp8 matrices with one scale each and fast accumulation, as inference uses it."""
    import torch

    one = torch.ones((), device=device)

    def multiply(left: "Tensor", right: "Tensor") -> object:
        return torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return multiply


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


@contextmanager
def fp32_products(tf32: bool) -> Iterator[None]:
    """Compute products of fp32 matrices in tf32 or strictly in fp32 while the context is open."""
    import torch

    # torch 2.9 renamed the switch, and one process must not use both names.
    settings: Any = torch.backends.cuda.matmul
    name, value = ("fp32_precision", "tf32" if tf32 else "ieee") if hasattr(settings, "fp32_precision") else ("allow_tf32", tf32)
    before = getattr(settings, name)
    setattr(settings, name, value)
    try:
        yield
    finally:
        setattr(settings, name, before)


# --- latencies --------------------------------------------------------------------------------------------------------


def _latencies(device: "torch.device", clock: CudaEventClock) -> tuple[Quantity, ...]:
    """Return the costs of launching a kernel and of waiting for it, with an almost empty kernel."""
    import torch

    stopwatch = Stopwatch(clock, _LAUNCH_PACE)
    tiny = torch.ones(1, device=device)

    def launches(_: int = 0) -> None:
        for _ in range(_LAUNCHES):
            tiny.add_(1)

    def wait() -> None:
        torch.cuda.synchronize(device)

    def launch_and_wait() -> None:
        tiny.add_(1)
        torch.cuda.synchronize(device)

    def eager(seconds: float) -> Measured:
        how = f"{_LAUNCHES} in-place additions to one element, device clock: the slower of host and kernel"
        return time_per_unit(stopwatch, Trial(how, _LAUNCHES, launches), seconds)

    def in_graph(seconds: float) -> Measured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_GRAPH_KERNELS):
                tiny.add_(1)
        how = f"one graph of {_GRAPH_KERNELS} in-place additions to one element, device clock"
        return time_per_unit(stopwatch, Trial(how, _GRAPH_KERNELS, lambda _: graph.replay()), seconds)

    def enqueue(seconds: float) -> Measured:
        host_ns = host_latency("", launches, 0.0, prepare=wait).value.median
        cycles = int(host_ns * _HOLD_FACTOR * _CYCLES_PER_NS)

        def hold() -> None:
            wait()
            torch.cuda._sleep(cycles)

        how = f"{_LAUNCHES} in-place additions to one element enqueued behind a kernel that holds the GPU, host clock"
        return host_latency(how, launches, seconds, per=_LAUNCHES, prepare=hold, most=50)

    def latency(key: str, label: str, how: str, action: Callable[[], object]) -> Quantity:
        return Quantity(key, label, "ns", 0.2, lambda s: host_latency(how, action, s, prepare=wait))

    return (
        Quantity("launch_eager", "launch interval, eager", "ns", 0.4, eager),
        Quantity("launch_graph", "kernel interval, CUDA graph", "ns", 0.3, in_graph),
        Quantity("dispatch", "host time per operator", "ns", 0.4, enqueue),
        latency("sync", "synchronize", "device synchronize with nothing outstanding, host clock", wait),
        latency(
            "launch_sync",
            "launch and synchronize",
            "one addition to one element and a device synchronize, host clock",
            launch_and_wait,
        ),
        latency("item", ".item()", "one element to the host with nothing outstanding, host clock", tiny.item),
    )


# --- conditions --------------------------------------------------------------------------------------------------------


class Watch:
    """Reads a GPU while it works: few quantities, because a series takes milliseconds."""

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
        """Return a full reading, before the device is used."""
        return self.why or sample(self._library, self._handle, time.monotonic_ns())

    def power_limit_w(self) -> Maybe[float]:
        """Return the enforced power limit."""
        if self.why:
            return self.why
        library, handle = self._library, self._handle
        return read(library, lambda: int(library.nvmlDeviceGetEnforcedPowerLimit(handle)) / 1e3)

    def __call__(self) -> str:
        """Record clock, power and throttling, and return them as text."""
        if self.why:
            return ""
        library, handle = self._library, self._handle
        clock = read(library, lambda: int(library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM)))
        reasons = read(library, lambda: int(library.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
        power = read(library, lambda: int(library.nvmlDeviceGetPowerUsage(handle)))
        temperature = read(library, lambda: int(library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU)))
        self.readings += 1
        parts = []
        if not isinstance(clock, Missing):
            self.clocks_mhz.append(clock)
            parts.append(f"SM {clock} MHz")
        if not isinstance(power, Missing):
            self.power_w.append(power / 1e3)
            parts.append(f"{power / 1e3:.0f} W")
        if not isinstance(temperature, Missing):
            self.temperatures_c.append(temperature)
        if not isinstance(reasons, Missing):
            names = throttle_names(reasons)
            parts += names
            for name in names:
                self.throttled[name] = self.throttled.get(name, 0) + 1
        return ", ".join(parts)

    def during(self) -> str:
        """Return a summary of all readings as text."""
        if self.why:
            return f"clocks and power could not be read: {self.why.why}"
        parts = []
        if self.clocks_mhz:
            parts.append(f"SM clock {_span(self.clocks_mhz)} MHz")
        if self.power_w:
            limit = self.power_limit_w()
            allowed = "" if isinstance(limit, Missing) else f" of {limit:.0f}"
            # GPUs since Ampere report the average of the last second, which was mostly rest.
            parts.append(f"power {_span([round(watts) for watts in self.power_w])}{allowed} W averaged by the driver")
        if self.temperatures_c:
            parts.append(f"{_span(self.temperatures_c)} °C")
        slowed = [f"{name} in {count} of {self.readings} readings" for name, count in self.throttled.items()]
        parts.append(f"throttled by {', '.join(slowed)}" if slowed else "not throttled")
        return f"while measuring: {', '.join(parts)}"


def _span(values: list[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def gpu_conditions(room: Room, reading: Maybe[GpuSample], during: str) -> Conditions:
    """Return the state of the GPU before and during the measurement."""
    memory = f"L2 cache {room.cache_bytes / 2**20:.0f} MiB, {room.bytes / 2**20:.0f} MiB used in turn"
    if isinstance(reading, Missing):
        return Conditions((memory, during))
    parts = [
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
        parts.append(f"{reading.processes} processes on it")
    busy = reading.gpu_utilisation_pct
    doubt = ""
    if not isinstance(busy, Missing) and busy > NEIGHBOR_GPU_PCT:
        doubt = f"the GPU was {busy} % busy with other work before measuring, so the results are too low"
    return Conditions((memory, f"before measuring: {', '.join(parts)}", during), doubt)

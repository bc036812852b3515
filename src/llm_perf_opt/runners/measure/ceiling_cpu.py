"""Measure the peaks of the CPU."""

import ctypes
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_perf_opt.analysis.telemetry import NEIGHBOR_PROCESSORS
from llm_perf_opt.core.host import (
    available_memory_bytes,
    cache_bytes,
    cpu_has_native_bf16,
    last_level_cache_bytes,
    physical_cores,
    usable_cpus,
)
from llm_perf_opt.core.instruction_sets import instruction_set
from llm_perf_opt.core.machine_records import CeilingUnit
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.runners.measure.ceiling_kernels import (
    Arena,
    Room,
    Shape,
    cache_read_rate,
    copy_rate,
    gemm_rate,
    gemm_trial,
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
    best_rate,
    host_difference,
    host_latency,
)
from llm_perf_opt.runners.measure.clock import HostClock

if TYPE_CHECKING:
    import torch

_PACE = Pace(most_samples=50, sample_ns=200_000, burst_s=60.0, rest_s=0.0)
_SHAPES: tuple[Shape, ...] = tuple((n, n, n) for n in (64, 128, 256, 512, 1024, 2048, 4096))
"""The smallest are for formats without a fast kernel: one product of 256×256 matrices can take 0.2 s."""
_COLUMNS = 4096
_CHUNKS = 8
_ASSUMED_CACHE_BYTES = 64 * 2**20
_ARENA_CACHES = 3
_LEAST_ARENA_BYTES = 256 * 2**20
_MOST_ARENA_BYTES = 4 * 2**30
_MEMORY_SHARE = 0.25
_OPERATORS = 500
_VECTOR = 512
_LEVEL_CHUNKS = 2
_LEVEL_COLUMNS = 1024
_SCALING_SHAPE: Shape = (512, 512, 512)
_LARGE_SCALING_SHAPE: Shape = (1024, 1024, 1024)
_FEW_PROCESSORS = 8
"""Up to this many, a product of 512×512 matrices occupies all of them."""


def host_room() -> Room:
    """Return the memory for the measurements: larger than the last-level caches, at most a quarter of the free memory."""
    known = last_level_cache_bytes()
    cache = _ASSUMED_CACHE_BYTES if isinstance(known, Missing) else known
    wanted = min(_MOST_ARENA_BYTES, max(_LEAST_ARENA_BYTES, _ARENA_CACHES * cache))
    note = f"assumed, because {known.why}" if isinstance(known, Missing) else ""
    return Room(min(wanted, int(available_memory_bytes() * _MEMORY_SHARE)), cache, note)


def cpu_quantities(device: "torch.device", room: Room) -> tuple[Quantity, ...]:
    """Return the quantities of a CPU; those that only a GPU has are Missing."""
    import torch

    stopwatch = Stopwatch(HostClock(), _PACE)
    arena = Arena(room, device, _CHUNKS)
    gemv_dtype = torch.bfloat16 if cpu_has_native_bf16() else torch.float32
    return (
        *_products(stopwatch, arena),
        Quantity("read", "read bandwidth", "B/s", 1.2, lambda s: read_rate(stopwatch, arena, _COLUMNS, s)),
        *_cache_reads(stopwatch, device),
        Quantity("copy", "copy bandwidth", "B/s", 0.8, lambda s: copy_rate(stopwatch, arena, _COLUMNS, s)),
        Quantity("gemv", "GEMV bandwidth", "B/s", 1.0, lambda s: gemv_rate(stopwatch, arena, gemv_dtype, (_COLUMNS,), s)),
        *_thread_scaling(stopwatch, arena),
        _absent("launch_eager", "launch interval, eager", "ns"),
        _absent("launch_graph", "kernel interval, CUDA graph", "ns"),
        Quantity("dispatch", "host time per operator", "ns", 0.2, _dispatch),
        Quantity("view_call", "host time per view", "ns", 0.2, _view_call),
        Quantity("module_call", "host time per module call", "ns", 0.3, _module_call),
        _absent("sync", "synchronize", "ns"),
        _absent("launch_sync", "launch and synchronize", "ns"),
        _absent("item", ".item()", "ns"),
    )


# --- matrix products --------------------------------------------------------------------------------------------------


def _products(stopwatch: Stopwatch, arena: Arena) -> tuple[Quantity, ...]:
    """Return the products in each format, including those that the CPU only emulates."""
    import torch

    def product(name: str, dtype: "torch.dtype", weight: float) -> Quantity:
        def measure(seconds: float) -> Maybe[Measured]:
            return gemm_rate(stopwatch, arena, _SHAPES, dtype, seconds, others=[_matrix_vector(arena, dtype)])

        return with_instructions(Quantity(f"gemm_{name}", f"GEMM {name}", "FLOP/s", weight, measure), name)

    return (
        product("bf16", torch.bfloat16, 1.4),
        product("fp16", torch.float16, 1.4),
        with_instructions(Quantity("gemm_int8", "GEMM int8", "FLOP/s", 0.6, lambda s: _int8_rate(stopwatch, arena, s)), "int8"),
        _absent("gemm_tf32", "GEMM tf32", "FLOP/s", "a CPU has no tf32"),
        product("fp32", torch.float32, 2.0),
        _absent("gemm_fp8", "GEMM fp8", "FLOP/s", "not measured on a CPU"),
    )


def with_instructions(quantity: Quantity, dtype: str) -> Quantity:
    """Return the quantity with the CPU's instruction set for products in this format."""
    found = instruction_set(dtype)
    return quantity if isinstance(found, Missing) else replace(quantity, instructions=found.name, native=found.native)


def _matrix_vector(arena: Arena, dtype: "torch.dtype") -> Trial:
    """Return a matrix-vector product in the cache: where the library has no fast GEMM of a format, it is faster than one."""
    import torch

    matrix = arena.filled(dtype)[: _VECTOR * _VECTOR].view(_VECTOR, _VECTOR)
    vector = torch.randn(_VECTOR).to(dtype)
    return Trial(f"{_VECTOR}×{_VECTOR} matrix times vector", 2.0 * matrix.numel(), lambda _: torch.mv(matrix, vector))


def _int8_rate(stopwatch: Stopwatch, arena: Arena, seconds: float) -> Maybe[Measured]:
    import torch

    try:
        return gemm_rate(stopwatch, arena, _SHAPES, torch.int8, seconds, lambda left, right: torch._int_mm(left, right.t()))
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        return Missing(f"this torch has no int8 product on this CPU: {str(error).splitlines()[0][:100]}")


# --- caches and threads -----------------------------------------------------------------------------------------------


def _cache_reads(stopwatch: Stopwatch, device: "torch.device") -> tuple[Quantity, ...]:
    """Return the read bandwidth of each cache level, with half of its size: the other half may hold other data."""
    import torch

    levels = cache_bytes()
    if isinstance(levels, Missing):
        return tuple(_absent(f"read_l{level}", f"read bandwidth, L{level}", "B/s", levels.why) for level in (1, 2, 3))

    def read(level: int, size: int) -> Quantity:
        def measure(seconds: float) -> Maybe[Measured]:
            if level == max(levels):
                return read_rate(stopwatch, Arena(Room(size // 2, 0), device, _LEVEL_CHUNKS), _LEVEL_COLUMNS, seconds)
            return cache_read_rate(stopwatch, size // usable_cpus() // 2, torch.get_num_threads(), seconds)

        return Quantity(f"read_l{level}", f"read bandwidth, L{level}", "B/s", 0.4, measure)

    return tuple(read(level, size) for level, size in levels.items())


def thread_counts() -> tuple[int, ...]:
    """Return the numbers of threads to compare: powers of two, the physical cores and all usable processors."""
    most, cores = usable_cpus(), physical_cores()
    powers = [1 << power for power in range(most.bit_length())]
    return tuple(sorted({*powers, most, *([] if isinstance(cores, Missing) else [cores])}))


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Let torch and its libraries use this many threads while the context is open.

    On aarch64, oneDNN with the Arm Compute Library keeps the threads it started with, so products run in OpenBLAS meanwhile.
    """
    import torch

    settings: Any = torch.backends.mkldnn
    before, enabled, set_blas_threads = torch.get_num_threads(), settings.enabled, _blas_threads()
    torch.set_num_threads(count)
    set_blas_threads(count)
    settings.enabled = enabled and platform.machine() != "aarch64"
    try:
        yield
    finally:
        torch.set_num_threads(before)
        set_blas_threads(before)
        settings.enabled = enabled


def other_kernel(dtype: str) -> str:
    """Return why `using_threads` would measure another kernel than a run in this format uses, or an empty string."""
    import torch

    if platform.machine() != "aarch64" or dtype == "fp32" or not torch.backends.mkldnn.is_available():
        return ""
    if dtype == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return ""
    if dtype == "fp16" and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return ""
    return f"products in {dtype} run in oneDNN, which keeps the number of threads it started with on aarch64"


def _blas_threads() -> Callable[[int], object]:
    """Return what sets the threads of the OpenBLAS that comes with torch on aarch64: `torch.set_num_threads` does not."""
    import torch

    for file in Path(torch.__file__).parent.glob("lib/libopenblas*"):
        try:
            setter: Callable[[int], object] = ctypes.CDLL(str(file)).openblas_set_num_threads
        except (OSError, AttributeError):
            continue
        return setter
    return lambda _: None


def _thread_scaling(stopwatch: Stopwatch, arena: Arena) -> Iterator[Quantity]:
    """Yield a product and a matrix-vector product from memory for each number of threads."""
    import torch

    counts = thread_counts()
    shape = _SCALING_SHAPE if usable_cpus() <= _FEW_PROCESSORS else _LARGE_SCALING_SHAPE

    def gemm(count: int, seconds: float) -> Maybe[Measured]:
        with using_threads(count):
            return best_rate(stopwatch, [gemm_trial(arena, shape, torch.float32)], seconds)

    def gemv(count: int, seconds: float) -> Maybe[Measured]:
        with using_threads(count):
            return gemv_rate(stopwatch, arena, torch.float32, (_COLUMNS,), seconds)

    for count in counts:
        name = f"{count} thread{'s' if count > 1 else ''}"
        weight = 1.0 / len(counts)
        yield Quantity(f"threads_{count}_gemm", f"GEMM fp32, {name}", "FLOP/s", weight, partial(gemm, count))
        yield Quantity(f"threads_{count}_gemv", f"GEMV fp32, {name}", "B/s", weight, partial(gemv, count))


# --- calls ------------------------------------------------------------------------------------------------------------


def _dispatch(seconds: float) -> Measured:
    import torch

    tiny = torch.ones(1)

    def operators() -> None:
        for _ in range(_OPERATORS):
            tiny.add_(tiny)  # a Python number would be converted by four more operators

    return host_latency(f"{_OPERATORS} in-place additions to one element", operators, seconds, per=_OPERATORS)


def _view_call(seconds: float) -> Measured:
    import torch

    tiny = torch.ones(1)

    def views() -> None:
        for _ in range(_OPERATORS):
            tiny.view(1, 1)

    return host_latency(f"{_OPERATORS} views of one element", views, seconds, per=_OPERATORS)


def _module_call(seconds: float) -> Maybe[Measured]:
    import torch

    module, tiny = torch.nn.Identity(), torch.ones(1)

    def called() -> None:
        for _ in range(_OPERATORS):
            module(tiny)

    def bare() -> None:
        for _ in range(_OPERATORS):
            module.forward(tiny)

    how = f"{_OPERATORS} calls of nn.Identity, minus as many of its forward alone"
    return host_difference(how, called, bare, seconds, per=_OPERATORS)


def _absent(key: str, label: str, unit: CeilingUnit, why: str = "the run is on the CPU") -> Quantity:
    return Quantity(key, label, unit, 0.0, lambda _: Missing(why))


# --- conditions -------------------------------------------------------------------------------------------------------


def host_conditions(room: Room, others: float) -> Conditions:
    """Return threads, caches and the load by other processes."""
    import torch

    note = f" ({room.cache_note})" if room.cache_note else ""
    cores = physical_cores()
    shared = "" if isinstance(cores, Missing) or cores == usable_cpus() else f" ({cores} cores with hyperthreads)"
    notes = (
        f"{torch.get_num_threads()} threads on {usable_cpus()} usable CPUs{shared}, "
        f"torch kernels for {torch.backends.cpu.get_cpu_capability()}",
        f"last-level cache {room.cache_bytes / 2**20:.0f} MiB{note}, {room.bytes / 2**20:.0f} MiB used in turn",
    )
    busy = others > NEIGHBOR_PROCESSORS
    doubt = f"other processes used {others:.2f} CPUs meanwhile, so the results are too low" if busy else ""
    return Conditions(notes, doubt)

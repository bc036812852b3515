"""Measure the peaks of the CPU."""

import os
import time
from typing import TYPE_CHECKING

from llm_perf_opt.analysis.telemetry import NEIGHBOR_PROCESSORS
from llm_perf_opt.core.host import available_memory_bytes, cpu_has_native_bf16, last_level_cache_bytes, usable_cpus
from llm_perf_opt.core.machine_records import CeilingUnit
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.runners.measure.ceiling_kernels import Arena, Room, Shape, copy_rate, gemm_rate, gemv_rate, read_rate
from llm_perf_opt.runners.measure.ceiling_timing import Conditions, Measured, Pace, Quantity, Stopwatch, host_latency
from llm_perf_opt.runners.measure.clock import HostClock

if TYPE_CHECKING:
    import torch

_PACE = Pace(most_samples=50, sample_ns=200_000, burst_s=60.0, rest_s=0.0)
_SHAPES: tuple[Shape, ...] = tuple((n, n, n) for n in (256, 512, 1024, 2048, 4096))
_COLUMNS = 4096
_CHUNKS = 8
_ASSUMED_CACHE_BYTES = 64 * 2**20
_ARENA_CACHES = 3
_LEAST_ARENA_BYTES = 256 * 2**20
_MOST_ARENA_BYTES = 4 * 2**30
_MEMORY_SHARE = 0.25
_OPERATORS = 500


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
    native = cpu_has_native_bf16()
    gemv_dtype = torch.bfloat16 if native else torch.float32

    def gemm_bf16(seconds: float) -> Maybe[Measured]:
        if not native:
            return Missing("the CPU has no native bf16")
        return gemm_rate(stopwatch, arena, _SHAPES, torch.bfloat16, seconds)

    return (
        Quantity("gemm_bf16", "GEMM bf16", "FLOP/s", 2.0 if native else 0.0, gemm_bf16),
        _absent("gemm_fp16", "GEMM fp16", "FLOP/s", "not measured on a CPU"),
        _absent("gemm_tf32", "GEMM tf32", "FLOP/s", "a CPU has no tf32"),
        Quantity("gemm_fp32", "GEMM fp32", "FLOP/s", 3.0, lambda s: gemm_rate(stopwatch, arena, _SHAPES, torch.float32, s)),
        _absent("gemm_fp8", "GEMM fp8", "FLOP/s", "not measured on a CPU"),
        Quantity("read", "read bandwidth", "B/s", 1.5, lambda s: read_rate(stopwatch, arena, _COLUMNS, s)),
        Quantity("copy", "copy bandwidth", "B/s", 1.0, lambda s: copy_rate(stopwatch, arena, _COLUMNS, s)),
        Quantity("gemv", "GEMV bandwidth", "B/s", 1.5, lambda s: gemv_rate(stopwatch, arena, gemv_dtype, (_COLUMNS,), s)),
        _absent("launch_eager", "launch interval, eager", "ns"),
        _absent("launch_graph", "kernel interval, CUDA graph", "ns"),
        Quantity("dispatch", "host time per operator", "ns", 0.3, _dispatch),
        _absent("sync", "synchronize", "ns"),
        _absent("launch_sync", "launch and synchronize", "ns"),
        _absent("item", ".item()", "ns"),
    )


def _dispatch(seconds: float) -> Measured:
    import torch

    tiny = torch.ones(1)

    def operators() -> None:
        for _ in range(_OPERATORS):
            tiny.add_(1)

    return host_latency(f"{_OPERATORS} in-place additions to one element", operators, seconds, per=_OPERATORS)


def _absent(key: str, label: str, unit: CeilingUnit, why: str = "the run is on the CPU") -> Quantity:
    return Quantity(key, label, unit, 0.0, lambda _: Missing(why))


class OtherProcesses:
    """CPU use of other processes, on the CPUs that this one may use, since construction."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._busy_s = self._busy()
        self._ours_s = time.process_time()

    def cpus(self) -> float:
        """Return the average, in CPUs."""
        seconds = time.monotonic() - self._begun
        others = self._busy() - self._busy_s - (time.process_time() - self._ours_s)
        return max(0.0, others / seconds) if seconds else 0.0

    def _busy(self) -> float:
        import psutil

        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        every = psutil.cpu_times(percpu=True)
        # iowait is part of idle, and guest time is part of user and nice.
        not_busy = ("idle", "iowait", "guest", "guest_nice")
        counted = [times for number, times in enumerate(every) if usable is None or number in usable]
        return float(sum(value for times in counted for name, value in times._asdict().items() if name not in not_busy))


def host_conditions(room: Room, others: float) -> Conditions:
    """Return threads, caches and the load by other processes."""
    import torch

    note = f" ({room.cache_note})" if room.cache_note else ""
    notes = (
        f"{torch.get_num_threads()} threads on {usable_cpus()} usable CPUs",
        f"last-level cache {room.cache_bytes / 2**20:.0f} MiB{note}, {room.bytes / 2**20:.0f} MiB used in turn",
    )
    busy = others > NEIGHBOR_PROCESSORS
    doubt = f"other processes used {others:.2f} CPUs meanwhile, so the results are too low" if busy else ""
    return Conditions(notes, doubt)

"""The operations that reach a device's peaks, on random data larger than its last-level cache."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.runners.measure.ceiling_timing import LEAST_SAMPLES, Measured, Stopwatch, Trial, best_rate

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Shape = tuple[int, int, int]
"""Rows, columns and depth of a product: m, n, k."""
Multiply = Callable[["Tensor", "Tensor"], object]
"""An m×k matrix times the transpose of an n×k matrix, as in a linear layer."""

_RANDOM_ELEMENTS = 65 * 2**16
"""Random numbers are drawn once and repeated, because drawing all would take longer than measuring. Not a power of two, so that
matrices differ."""
_GEMM_TRIALS = 3
_GEMM_PROBES = 3
_CACHE_READ_BYTES = 8 * 2**20
"""What each thread reads in one call: much longer than starting the call takes."""
_CACHES_BEYOND = 2
"""Buffers used in turn must be this many times the cache, so that none is still cached when it is used again."""


@dataclass(frozen=True)
class Room:
    """The memory that measurements may use, and the cache that it must exceed."""

    bytes: int
    cache_bytes: int
    cache_note: str = ""

    @property
    def shortage(self) -> Missing | None:
        """Why bandwidth cannot be measured in this much memory, or None."""
        needed = _CACHES_BEYOND * self.cache_bytes
        if self.bytes >= needed:
            return None
        return Missing(
            f"exceeding the last-level cache needs {needed / 2**20:.0f} MiB, but only {self.bytes / 2**20:.0f} MiB can be used"
        )


class Arena:
    """One block of memory that all measurements use, filled with random numbers of one dtype at a time."""

    def __init__(self, room: Room, device: "torch.device", chunks: int) -> None:
        import torch

        self.room = room
        self._bytes = torch.empty(room.bytes // 4096 * 4096, dtype=torch.uint8, device=device)
        self._chunks = chunks
        self._filled: torch.dtype | None = None

    def filled(self, dtype: "torch.dtype") -> "Tensor":
        """Return the whole block as random numbers of a dtype."""
        import torch

        if self._filled != dtype:
            draws = torch.randn(_RANDOM_ELEMENTS, device=self._bytes.device).to(dtype).view(torch.uint8)
            whole = self._bytes.numel() // draws.numel() * draws.numel()
            if whole:
                tiles = self._bytes[:whole].view(-1, draws.numel())
                tiles.copy_(draws.expand_as(tiles))
            self._bytes[whole:].copy_(draws[: self._bytes.numel() - whole])
            self._filled = dtype
        return self._bytes.view(dtype)

    def chunks(self, dtype: "torch.dtype", columns: int) -> "list[Tensor]":
        """Return consecutive matrices of this many columns that together fill the block."""
        values = self.filled(dtype)
        rows = values.numel() // self._chunks // columns
        size = rows * columns
        return [values[start : start + size].view(rows, columns) for start in range(0, size * self._chunks, size)]


# --- compute ----------------------------------------------------------------------------------------------------------


def gemm_rate(
    stopwatch: Stopwatch,
    arena: Arena,
    shapes: Sequence[Shape],
    dtype: "torch.dtype",
    seconds: float,
    multiply: Multiply | None = None,
    others: Sequence[Trial] = (),
) -> Maybe[Measured]:
    """Return the best rate of `others` and of the largest shapes that fit the time, estimated from the smallest ones.

    `shapes` ascend.
    """
    fitting = [shape for shape in shapes if _sets(arena, shape, dtype) >= 1]
    if not fitting:
        return Missing(f"two {_times(shapes[0])} operands do not fit in {arena.room.bytes / 2**20:.0f} MiB")
    trial_ns = seconds * 1e9 / _GEMM_TRIALS
    rate = 0.0
    for shape in fitting[:_GEMM_PROBES]:
        if rate and LEAST_SAMPLES * _flops(shape) / rate > trial_ns:
            break
        probe = gemm_trial(arena, shape, dtype, multiply)
        rate = max(rate, probe.work / stopwatch.probe_ns(probe))
    in_time = [shape for shape in fitting if LEAST_SAMPLES * _flops(shape) / rate <= trial_ns] or fitting[:1]
    trials = [gemm_trial(arena, shape, dtype, multiply) for shape in in_time[-_GEMM_TRIALS:]]
    return best_rate(stopwatch, [*trials, *others], seconds)


def gemm_trial(arena: Arena, shape: Shape, dtype: "torch.dtype", multiply: Multiply | None = None) -> Trial:
    """Return a product that uses other operands of the arena in each call."""
    import torch

    m, n, k = shape
    values = arena.filled(dtype)
    size = (m + n) * k
    sets = _sets(arena, shape, dtype)
    pairs = []
    for start in range(0, sets * size, size):
        left, right = values[start : start + m * k], values[start + m * k : start + size]
        pairs.append((left.view(m, k), right.view(n, k)))
    chosen = multiply or _into(torch.empty((m, n), dtype=dtype, device=values.device))
    name = f"{_times(shape)}, {sets} operand pairs in turn" if sets > 1 else _times(shape)
    return Trial(name, _flops(shape), lambda number: chosen(*pairs[number % sets]))


def _into(out: "Tensor") -> Multiply:
    import torch

    return lambda left, right: torch.mm(left, right.t(), out=out)


def _sets(arena: Arena, shape: Shape, dtype: "torch.dtype") -> int:
    m, n, k = shape
    return arena.room.bytes // 4096 * 4096 // ((m + n) * k * dtype.itemsize)


def _flops(shape: Shape) -> float:
    return 2.0 * math.prod(shape)


def _times(shape: Shape) -> str:
    return "×".join(map(str, shape))


# --- memory -----------------------------------------------------------------------------------------------------------


def read_rate(stopwatch: Stopwatch, arena: Arena, columns: int, seconds: float) -> Maybe[Measured]:
    """Return the bytes per second of the fastest reduction; which one that is depends on the device."""
    import torch

    if arena.room.shortage:
        return arena.room.shortage
    matrices = arena.chunks(torch.float32, columns)
    flat = [matrix.view(-1) for matrix in matrices]
    halves = [values[: values.numel() // 2 * 2].view(2, -1) for values in flat]
    vector = torch.randn(columns, device=flat[0].device)
    count, size = len(flat), flat[0].nbytes
    mebibytes = f"of {size / 2**20:.0f} MiB fp32, {count} buffers in turn"
    return best_rate(
        stopwatch,
        [
            Trial(f"sum {mebibytes}", size, lambda number: flat[number % count].sum()),
            Trial(f"row sums {mebibytes}", size, lambda number: matrices[number % count].sum(1)),
            Trial(f"maximum {mebibytes}", size, lambda number: flat[number % count].amax()),
            Trial(f"dot product {mebibytes}", size, lambda number: torch.dot(*halves[number % count])),
            Trial(f"matrix–vector product {mebibytes}", size, lambda number: torch.mv(matrices[number % count], vector)),
        ],
        seconds,
    )


def cache_read_rate(stopwatch: Stopwatch, bytes_each: int, threads: int, seconds: float) -> Measured:
    """Return the bytes per second that all threads together read, each the same `bytes_each` again and again."""
    import torch

    values = torch.randn(max(1, bytes_each // 4))
    repeats = max(threads, _CACHE_READ_BYTES * threads // values.nbytes)
    rows, moved = values.expand(repeats, -1), repeats * values.nbytes
    name = f"of {values.nbytes / 2**10:.0f} KiB fp32 per thread, {repeats} times"
    return best_rate(
        stopwatch,
        [
            Trial(f"sum {name}", moved, lambda _: rows.sum(1)),
            Trial(f"maximum {name}", moved, lambda _: rows.amax(1)),
        ],
        seconds,
    )


def copy_rate(stopwatch: Stopwatch, arena: Arena, columns: int, seconds: float) -> Maybe[Measured]:
    """Return the bytes read plus bytes written per second, from one buffer to another."""
    import torch

    if arena.room.shortage:
        return arena.room.shortage
    buffers = arena.chunks(torch.float32, columns)
    count, size = len(buffers), buffers[0].nbytes
    mebibytes = f"{size / 2**20:.0f} MiB read and as much written, {count} buffers in turn"

    def pair(number: int) -> "tuple[Tensor, Tensor]":
        return buffers[number % count], buffers[(number + count // 2) % count]

    def negate(number: int) -> object:
        source, target = pair(number)
        return torch.neg(source, out=target)

    def copy(number: int) -> object:
        source, target = pair(number)
        return target.copy_(source)

    return best_rate(
        stopwatch, [Trial(f"copy, {mebibytes}", 2 * size, copy), Trial(f"negation, {mebibytes}", 2 * size, negate)], seconds
    )


def gemv_rate(
    stopwatch: Stopwatch, arena: Arena, dtype: "torch.dtype", columns: Sequence[int], seconds: float
) -> Maybe[Measured]:
    """Return the bytes of the matrix per second in a product with one vector, as in decode."""
    import torch

    if arena.room.shortage:
        return arena.room.shortage
    trials = []
    for width in columns:
        matrices = arena.chunks(dtype, width)
        vector = torch.randn(width, device=matrices[0].device).to(dtype)
        size = f"{matrices[0].shape[0]}×{width} {str(dtype).removeprefix('torch.')}, {len(matrices)} matrices in turn"
        trials += _gemv_trials(matrices, vector, size)
    return best_rate(stopwatch, trials, seconds)


def _gemv_trials(matrices: "Sequence[Tensor]", vector: "Tensor", size: str) -> list[Trial]:
    import torch

    count, moved = len(matrices), matrices[0].nbytes
    row = vector.view(1, -1)
    return [
        Trial(f"mv {size}", moved, lambda number: torch.mv(matrices[number % count], vector)),
        Trial(f"linear {size}", moved, lambda number: torch.nn.functional.linear(row, matrices[number % count])),
    ]

"""Measure the links of an NVIDIA GPU: to and from the host, to another GPU, and an all-reduce over all of them."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from llm_perf_opt.analysis.telemetry import NEIGHBOR_GPU_PCT
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.runners.measure.ceiling_timing import Measured, Pace, Quantity, Stopwatch, Trial, best_rate
from llm_perf_opt.runners.measure.clock import Clock
from llm_perf_opt.runners.measure.gpu import handle_of, nvml, sample

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_PACE = Pace(most_samples=30, sample_ns=0, burst_s=0.1, rest_s=0.0)
_CHUNKS = 4
_CHUNK_BYTES = 64 * 2**20
"""Long enough that starting a copy does not matter, short enough for the time that the measurement has."""
_SHARE = 0.2
"""Time of each quantity relative to a matrix product's."""


def transfer_quantities(device: "torch.device", clock: Clock, watch: Callable[[], str]) -> tuple[Quantity, ...]:
    """Return the copies between host and device, and what needs a second GPU; without one, that is Missing."""
    stopwatch = Stopwatch(clock, _PACE, watch)

    def copy(key: str, label: str, to_device: bool, pinned: bool) -> Quantity:
        return Quantity(key, label, "B/s", _SHARE, lambda s: _host_rate(stopwatch, device, to_device, pinned, s))

    others = other_gpus(device)
    alone = others if isinstance(others, Missing) else None

    def with_others(key: str, label: str, measure: Callable[[list[int], float], Maybe[Measured]]) -> Quantity:
        def measured(seconds: float) -> Maybe[Measured]:
            return others if isinstance(others, Missing) else measure(others, seconds)

        return Quantity(key, label, "B/s", 0.0 if alone else _SHARE, measured)

    return (
        copy("h2d_pinned", "host to device, pinned", True, True),
        copy("d2h_pinned", "device to host, pinned", False, True),
        copy("h2d_pageable", "host to device, pageable", True, False),
        copy("d2h_pageable", "device to host, pageable", False, False),
        with_others("peer_copy", "copy to another GPU", lambda found, s: _peer_rate(stopwatch, device, found[0], s)),
        with_others("all_reduce", "all-reduce bus bandwidth", lambda found, s: _all_reduce_rate(stopwatch, device, found, s)),
    )


def other_gpus(device: "torch.device") -> Maybe[list[int]]:
    """Return the numbers of the other GPUs, if there are any and no process uses them."""
    import torch

    own = device.index or 0
    others = [number for number in range(torch.cuda.device_count()) if number != own]
    if not others:
        return Missing("it needs two GPUs, and this process sees one")
    with nvml() as library:
        if isinstance(library, Missing):
            return others
        for number in others:
            handle = handle_of(library, number)
            if isinstance(handle, Missing):
                continue
            found = sample(library, handle, time.monotonic_ns())
            busy = not isinstance(found.gpu_utilisation_pct, Missing) and found.gpu_utilisation_pct > NEIGHBOR_GPU_PCT
            if busy or (not isinstance(found.processes, Missing) and found.processes > 0):
                return Missing(f"GPU {number} is in use")
    return others


def _host_rate(stopwatch: Stopwatch, device: "torch.device", to_device: bool, pinned: bool, seconds: float) -> Measured:
    import torch

    host = host_buffer(pinned)
    there = torch.empty(host.shape, dtype=torch.uint8, device=device)
    sources, targets = (host, there) if to_device else (there, host)
    kind = "pinned" if pinned else "pageable"
    words = f"copy of {host[0].nbytes / 2**20:.0f} MiB {'from' if to_device else 'to'} {kind} memory, {_CHUNKS} buffers in turn"
    trial = Trial(words, host[0].nbytes, lambda number: _copy(sources, targets, number, pinned))
    return best_rate(stopwatch, [trial], seconds)


def _copy(sources: "Tensor", targets: "Tensor", number: int, wait_later: bool) -> None:
    targets[number % _CHUNKS].copy_(sources[number % _CHUNKS], non_blocking=wait_later)


def host_buffer(pinned: bool) -> "Tensor":
    """Return host memory whose pages exist, as one row per buffer."""
    import torch

    return torch.empty((_CHUNKS, _CHUNK_BYTES), dtype=torch.uint8, pin_memory=pinned).fill_(1)


def _peer_rate(stopwatch: Stopwatch, device: "torch.device", other: int, seconds: float) -> Measured:
    import torch

    here, there = (
        torch.ones((_CHUNKS, _CHUNK_BYTES), dtype=torch.uint8, device=place) for place in (device, torch.device("cuda", other))
    )
    direct = torch.cuda.can_device_access_peer(device, other)
    way = "directly" if direct else "through the host: the GPUs have no peer access"
    words = f"copy of {_CHUNK_BYTES / 2**20:.0f} MiB to GPU {other}, {way}, {_CHUNKS} buffers in turn"
    trial = Trial(words, _CHUNK_BYTES, lambda number: _copy(here, there, number, True))
    return replace(best_rate(stopwatch, [trial], seconds), gpus=2)


def _all_reduce_rate(stopwatch: Stopwatch, device: "torch.device", others: list[int], seconds: float) -> Maybe[Measured]:
    """Return the bus bandwidth: what a ring sends from each GPU, 2(N-1)/N of the tensor, per second."""
    import torch

    places = [device, *(torch.device("cuda", number) for number in others)]
    tensors = [torch.ones(_CHUNK_BYTES // 2, dtype=torch.bfloat16, device=place) for place in places]
    if not torch.cuda.nccl.is_available(tensors):
        return Missing("this torch has no NCCL")
    sent = 2 * (len(places) - 1) / len(places) * tensors[0].nbytes
    words = f"all-reduce of {_CHUNK_BYTES / 2**20:.0f} MiB bf16 over {len(places)} GPUs, NCCL, one process"
    trial = Trial(words, sent, lambda _: torch.cuda.nccl.all_reduce(tensors))
    return replace(best_rate(stopwatch, [trial], seconds), gpus=len(places))

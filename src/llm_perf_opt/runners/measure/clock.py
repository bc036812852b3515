"""Clocks that time steps without waiting for the device between them."""

import itertools
import time
from typing import Any, Literal, Protocol

ClockName = Literal["cuda events", "host clock"]


class Clock(Protocol):
    """Marks points on the device's timeline and reads them after the work is done."""

    name: ClockName

    def synchronize(self) -> None:
        """Wait until the device is idle."""

    def begin(self) -> None:
        """Start an iteration and discard the previous marks."""

    def mark(self) -> int:
        """Mark this point and return the mark's number."""

    def read_ns(self) -> list[int]:
        """Return each mark's offset from the first in integer nanoseconds; call after `synchronize`."""

    def read_cpu_ns(self) -> list[int]:
        """Return the CPU time of the calling thread at each mark, from the first; empty if it is not recorded."""


class HostClock:
    """The monotonic clock of the host, for work that is done when its call returns.

    With `cpu_time`, a mark also reads the CPU time of the thread.
    """

    name: ClockName = "host clock"

    def __init__(self, cpu_time: bool = False) -> None:
        self._cpu_time = cpu_time
        self._marks: list[int] = []
        self._cpu_marks: list[int] = []

    def synchronize(self) -> None:
        """Do nothing: a CPU has no outstanding work."""

    def begin(self) -> None:
        """Discard the marks."""
        self._marks = []
        self._cpu_marks = []

    def mark(self) -> int:
        """Read the monotonic clock."""
        if self._cpu_time:
            self._cpu_marks.append(time.thread_time_ns())
        self._marks.append(time.monotonic_ns())
        return len(self._marks) - 1

    def read_ns(self) -> list[int]:
        """Return the offsets from the first mark."""
        return [mark - self._marks[0] for mark in self._marks]

    def read_cpu_ns(self) -> list[int]:
        """Return the offsets of the CPU time from the first mark; empty without `cpu_time`."""
        return [mark - self._cpu_marks[0] for mark in self._cpu_marks]


class CudaEventClock:
    """CUDA events on the current stream. Events are reused, so that a mark costs one call."""

    name: ClockName = "cuda events"

    def __init__(self, device: Any) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._used = 0

    def synchronize(self) -> None:
        """Wait for the device."""
        self._torch.cuda.synchronize(self._device)

    def begin(self) -> None:
        """Reuse the events from the first."""
        self._used = 0

    def mark(self) -> int:
        """Record an event on the current stream."""
        if self._used == len(self._events):
            self._events.append(self._torch.cuda.Event(enable_timing=True))
        self._events[self._used].record()
        self._used += 1
        return self._used - 1

    def read_ns(self) -> list[int]:
        """Return the offsets from the first event, summed over neighbors: long spans lose precision in float milliseconds."""
        offsets = [0]
        used = self._events[: self._used]
        for earlier, later in itertools.pairwise(used):
            offsets.append(offsets[-1] + round(earlier.elapsed_time(later) * 1_000_000))
        return offsets

    def read_cpu_ns(self) -> list[int]:
        """Return nothing: the thread only launches the work."""
        return []


def clock_for(device: Any) -> Clock:
    """Return the clock of a torch device."""
    return CudaEventClock(device) if device.type == "cuda" else HostClock(cpu_time=True)

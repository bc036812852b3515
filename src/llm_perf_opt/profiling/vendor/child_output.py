"""What a child prints: messages to its parent, and log. And a descriptor that tells when it has ended."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from io import RawIOBase
from typing import Any

from llm_perf_opt.runners.child import MESSAGE_PREFIX

_MAX_LINE = 1 << 20

OnMessage = Callable[[dict[str, Any]], None]
OnTick = Callable[[], None]
"""Called once a second while a child runs, whatever it says: for whoever shows that it is still at work."""
TICK_S = 1.0


def no_tick() -> None:
    """Nobody shows it."""


class LineReader:
    """Splits output into messages and log."""

    def __init__(self, file: RawIOBase, on_message: OnMessage) -> None:
        self._file = file
        self._on_message = on_message
        self._rest = b""

    def feed(self, chunk: bytes) -> None:
        """Take what was read."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._line(line)
        if len(self._rest) > _MAX_LINE:
            self._line(self._rest)
            self._rest = b""

    def close(self) -> None:
        """Take the last line, which may have no end."""
        if self._rest:
            self._line(self._rest)
            self._rest = b""

    def note(self, text: str) -> None:
        """A line of our own in the log."""
        self._file.write(f"llm-perf: {text}\n".encode())

    def _line(self, line: bytes) -> None:
        before, prefix, rest = line.partition(MESSAGE_PREFIX.encode())
        if prefix:  # not always at the beginning: nsys prints its progress without ending the line
            with suppress(ValueError):
                message = json.loads(rest)
                if isinstance(message, dict):
                    self._on_message(message)
                    line = before
                    if not before:
                        return
        self._file.write(line + b"\n")


class pidfd:  # noqa: N801 - reads as a function at its call
    """A descriptor that becomes readable when a process ends; None where the system has none."""

    def __init__(self, pid: int) -> None:
        self._fd: int | None = None
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):  # an old kernel, or one that may not be asked: the end of the pipe tells as well
                self._fd = os.pidfd_open(pid)

    def __enter__(self) -> int | None:
        return self._fd

    def __exit__(self, *exception: object) -> None:
        if self._fd is not None:
            os.close(self._fd)

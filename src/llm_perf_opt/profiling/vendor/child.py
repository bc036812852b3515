"""What a child prints: messages to its parent, and log. And a descriptor that tells when it has ended."""

import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any

from llm_perf_opt.core.errors import CaptureError, LlmPerfError, ResourceError
from llm_perf_opt.core.run_folder import LEAST_FREE_BYTES
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


# --- disk watch -------------------------------------------------------------------------------------------------------


BYTES_PER_GB = 10**9


class DiskWatch:
    """Looks at the folders a tool writes to. Cheap: they hold a handful of files."""

    def __init__(
        self, folders: Sequence[Path], max_bytes: int, *, interval_s: float = 1.0, least_free_bytes: int = LEAST_FREE_BYTES
    ) -> None:
        self.folders = tuple(folders)
        self.max_bytes = max_bytes
        self.interval_s = interval_s
        self._least_free_bytes = least_free_bytes
        self._next = 0.0
        self._before = self.used_bytes()

    def used_bytes(self) -> int:
        """Disk space that the folders take now."""
        return sum(_allocated(folder) for folder in self.folders)

    def due(self) -> bool:
        """Whether it is time to look again."""
        return time.monotonic() >= self._next

    def problem(self) -> LlmPerfError | None:
        """Why the tool must be stopped, if it must."""
        self._next = time.monotonic() + self.interval_s
        written = self.used_bytes() - self._before
        if written > self.max_bytes:
            return CaptureError(
                f"What the tool wrote grew to {written / BYTES_PER_GB:.2f} GB, above the "
                f"{self.max_bytes / BYTES_PER_GB:g} GB of profiling.max_trace_gb, and the pass was stopped.",
                "Raise profiling.max_trace_gb, or record less: fewer new tokens, fewer kernels, fewer traced APIs.",
            )
        for folder in self.folders:
            with suppress(OSError):  # not there yet
                free = os.statvfs(folder)
                if free.f_bavail * free.f_frsize < self._least_free_bytes:
                    return ResourceError(
                        f"The disk of {folder} has {free.f_bavail * free.f_frsize / 1e6:.0f} MB left, "
                        f"less than {self._least_free_bytes / 1e6:.0f} MB, and the pass was stopped.",
                        "Free some space, put the run elsewhere with hydra.run.dir=DIR, or set TMPDIR to a larger disk.",
                    )
        return None


def _allocated(folder: Path) -> int:
    return sum(state.st_blocks * 512 for state in _files(folder))


def _files(folder: Path) -> Iterator[os.stat_result]:
    """Every regular file below a folder; what goes away meanwhile is passed over."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        with suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                yield entry.stat(follow_symlinks=False)


# --- descendants ------------------------------------------------------------------------------------------------------


MARK = "LLM_PERF_CHILD"
"""Names the children that a process descends from, outermost first."""
_PROC = Path("/proc")


def new_mark() -> str:
    """A mark for a child; it keeps those that we carry ourselves."""
    return ":".join(filter(None, (os.environ.get(MARK, ""), uuid.uuid4().hex)))


@dataclass(frozen=True)
class _Seen:
    parent: int
    session: int
    began: int
    """In clock ticks since the system started."""
    ended: bool


class Descendants:
    """A child and what it has started. Nothing is known of it where there is no /proc; then the process group must do."""

    def __init__(self, child: int, mark: str) -> None:
        self._child = child
        self._mark = f"{MARK}={mark}".encode()
        self._ours: dict[int, int] = {}
        self._strangers: dict[int, int] = {}

    def look(self, *, child_is_known: bool) -> None:
        """Record who is there now. `child_is_known`: it has not been waited for, so that its pid is still its own."""
        seen = _processes()
        for pid, process in seen.items():
            if self._ours.get(pid) == process.began or self._strangers.get(pid) == process.began:
                continue
            environment = _environment(pid)
            if self._mark in environment or (child_is_known and self._child in (pid, process.session)):
                self._ours[pid] = process.began
            elif environment:  # it has none for a moment while it starts a program, so that it is looked at again
                self._strangers[pid] = process.began
        grown = True
        while grown:  # children of ours whose environment cannot be read
            found = {
                pid: process.began
                for pid, process in seen.items()
                if self._ours.get(pid) != process.began
                and process.parent in seen
                and self._ours.get(process.parent) == seen[process.parent].began
            }
            self._ours.update(found)
            grown = bool(found)

    def alive(self) -> list[int]:
        """Pids of those recorded that still run."""
        seen = _processes()
        return [pid for pid, began in self._ours.items() if pid in seen and seen[pid].began == began and not seen[pid].ended]

    def send(self, number: signal.Signals) -> None:
        """Signal every one of them, and nobody else."""
        for pid, began in self._ours.items():
            _signal(pid, began, number)


def _processes() -> dict[int, _Seen]:
    found = {}
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if entry.name.isdigit():
            process = _read(int(entry.name))
            if process is not None:
                found[int(entry.name)] = process
    return found


def _read(pid: int) -> _Seen | None:
    """One process, or None when it is gone."""
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rfind(b")") + 2 :].split()  # a name may hold blanks and brackets
    return _Seen(parent=int(fields[1]), session=int(fields[3]), began=int(fields[19]), ended=fields[0] in (b"Z", b"X"))


def _environment(pid: int) -> bytes:
    try:
        return (_PROC / str(pid) / "environ").read_bytes()
    except OSError:  # another user's, or gone
        return b""


def _signal(pid: int, began: int, number: signal.Signals) -> None:
    with suppress(OSError):  # gone, or no longer ours to signal
        if not hasattr(os, "pidfd_open"):
            current = _read(pid)
            if current is not None and current.began == began:
                os.kill(pid, number)
            return
        handle = os.pidfd_open(pid)  # from here on the pid cannot pass to another process unnoticed
        try:
            current = _read(pid)
            if current is not None and current.began == began:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)

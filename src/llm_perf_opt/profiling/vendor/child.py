"""A running child as seen by its parent: its output, its disk use and its descendants."""

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
from typing import Any, Protocol

from llm_perf_opt.core.errors import CaptureError, LlmPerfError, ResourceError
from llm_perf_opt.core.run_folder import LEAST_FREE_BYTES
from llm_perf_opt.core.secrets import concealed
from llm_perf_opt.runners.child import MESSAGE_PREFIX

_MAX_LINE = 1 << 20

OnMessage = Callable[[dict[str, Any]], None]
OnTick = Callable[[], None]
"""Called once a second while a child runs."""
TICK_S = 1.0


def no_tick() -> None:
    """Do nothing."""


class LineReader:
    """Splits output into messages and log; the log has `***` in place of credentials."""

    def __init__(self, file: RawIOBase, on_message: OnMessage, credentials: Sequence[bytes] = ()) -> None:
        self._file = file
        self._on_message = on_message
        self._credentials = credentials
        self._rest = b""

    def feed(self, chunk: bytes) -> None:
        """Process a chunk of output."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._line(line)
        if len(self._rest) > _MAX_LINE:
            self._line(self._rest)
            self._rest = b""

    def close(self) -> None:
        """Process the last line, which may have no newline."""
        if self._rest:
            self._line(self._rest)
            self._rest = b""

    def note(self, text: str) -> None:
        """Write a line of llm-perf's own to the log."""
        self._file.write(f"llm-perf: {text}\n".encode())

    def _line(self, line: bytes) -> None:
        before, prefix, rest = line.partition(MESSAGE_PREFIX.encode())
        if prefix:  # not always at the start: nsys prints progress without a newline
            with suppress(ValueError):
                message = json.loads(rest)
                if isinstance(message, dict):
                    self._on_message(message)
                    line = before
                    if not before:
                        return
        self._file.write(concealed(line, self._credentials) + b"\n")


class pidfd:  # noqa: N801 - reads as a function at its call
    """A descriptor that becomes readable when a process ends; None if the system has no pidfd."""

    def __init__(self, pid: int) -> None:
        self._fd: int | None = None
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):  # an old kernel, or no permission: the end of the pipe shows it too
                self._fd = os.pidfd_open(pid)

    def __enter__(self) -> int | None:
        return self._fd

    def __exit__(self, *exception: object) -> None:
        if self._fd is not None:
            os.close(self._fd)


# --- disk watch -------------------------------------------------------------------------------------------------------


BYTES_PER_GB = 10**9


class Watch(Protocol):
    """Checks now and then whether a running child must be stopped."""

    interval_s: float

    def due(self) -> bool:
        """Return whether it is time to check again."""

    def problem(self) -> LlmPerfError | None:
        """Return why the child must be stopped, or None."""


class DiskWatch:
    """Checks the size of the folders that a tool writes to. Cheap: they contain few files."""

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
        """Return the disk space that the folders use."""
        return sum(state.st_blocks * 512 for folder in self.folders for state in _files(folder))

    def due(self) -> bool:
        """Return whether it is time to check again."""
        return time.monotonic() >= self._next

    def problem(self) -> LlmPerfError | None:
        """Return why the tool must be stopped, or None."""
        self._next = time.monotonic() + self.interval_s
        written = self.used_bytes() - self._before
        if written > self.max_bytes:
            return CaptureError(
                f"The files of the tool grew to {written / BYTES_PER_GB:.2f} GB, above the "
                f"{self.max_bytes / BYTES_PER_GB:g} GB of profiling.max_trace_gb, so the pass was stopped.",
                "Raise profiling.max_trace_gb, or record less: fewer new tokens, fewer kernels, fewer traced APIs.",
            )
        for folder in self.folders:
            with suppress(OSError):  # not there yet
                free = os.statvfs(folder)
                if free.f_bavail * free.f_frsize < self._least_free_bytes:
                    return ResourceError(
                        f"The disk of {folder} has {free.f_bavail * free.f_frsize / 1e6:.0f} MB left, "
                        f"less than {self._least_free_bytes / 1e6:.0f} MB, so the pass was stopped.",
                        "Free some space, choose another disk with hydra.run.dir=DIR, or set TMPDIR to a larger disk.",
                    )
        return None


def _files(folder: Path) -> Iterator[os.stat_result]:
    """Yield every regular file below a folder; files that disappear meanwhile are skipped."""
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
"""Environment variable with the marks of the children that a process descends from, outermost first."""
_PROC = Path("/proc")


def new_mark() -> str:
    """Return a mark for a child, after the marks of this process."""
    return ":".join(filter(None, (os.environ.get(MARK, ""), uuid.uuid4().hex)))


@dataclass(frozen=True)
class _Seen:
    parent: int
    session: int
    began: int
    """In clock ticks since the system started."""
    ended: bool


class Descendants:
    """A child and all processes that it has started. Without /proc it is empty, and only the process group is signaled."""

    def __init__(self, child: int, mark: str) -> None:
        self._child = child
        self._mark = f"{MARK}={mark}".encode()
        self._ours: dict[int, int] = {}
        self._others: dict[int, int] = {}

    def look(self, *, child_is_known: bool) -> None:
        """Record the running descendants. `child_is_known`: the child has not been waited for, so its pid is still valid.

        Processes of its session are its own even later: its pid is not given to another process while they run.
        """
        seen = _processes()
        is_ours = child_is_known or self._child not in seen
        for pid, process in seen.items():
            if self._ours.get(pid) == process.began or self._others.get(pid) == process.began:
                continue
            environment = _environment(pid)
            if self._mark in environment or (is_ours and self._child in (pid, process.session)):
                self._ours[pid] = process.began
            elif environment:  # it is empty for a moment during exec, so such a process is checked again
                self._others[pid] = process.began
        grown = True
        while grown:  # descendants whose environment cannot be read
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
        """Return the pids of the recorded processes that still run."""
        seen = _processes()
        return [pid for pid, began in self._ours.items() if pid in seen and seen[pid].began == began and not seen[pid].ended]

    def send(self, number: signal.Signals) -> None:
        """Signal every recorded process."""
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
    """Return a process, or None if it is gone."""
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rfind(b")") + 2 :].split()  # a name may contain spaces and parentheses
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
        handle = os.pidfd_open(pid)  # from here on, reuse of the pid is detected
        try:
            current = _read(pid)
            if current is not None and current.began == began:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)

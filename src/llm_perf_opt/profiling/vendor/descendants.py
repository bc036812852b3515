"""The processes that a child has started, however far they went: so that exactly these are ended and no others.

Nsight Systems puts its agent into a session of its own below init, and the measured program into another. Neither the parent's
pid nor a process group leads to them, so every child gets a mark in its environment, which all its descendants inherit. A process
is known by its pid together with the time it began, which excludes a stranger who got the same pid later.
"""

import os
import signal
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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

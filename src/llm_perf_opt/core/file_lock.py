"""Locks that processes share. They end with their process."""

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llm_perf_opt.core.errors import ResourceError
from llm_perf_opt.core.inside import open_lock

_POLL_S = 0.02


_THREADS = threading.Lock()
"""The locks of files are between processes only."""
_PATIENCE_S = 60.0
"""How long to wait for others that change a file; each takes milliseconds."""


@contextmanager
def changing(root: Path, path: Path) -> Iterator[None]:
    """Hold the lock of a file below `root` that several processes change, while it is read, changed and replaced.

    Raise a ResourceError if that is impossible: a change by another process could be lost.
    """
    with _THREADS, locked(root, path.with_name(f".{path.name}.lock"), _PATIENCE_S) as held:
        if not held:
            raise ResourceError(
                f"{path} cannot be changed: the lock .{path.name}.lock next to it was not obtained within {_PATIENCE_S:.0f} s.",
                "Another process holds it, or this file system has no locks or is not writable.",
            )
        yield


@contextmanager
def locked(root: Path, path: Path, patience_s: float) -> Iterator[bool]:
    """Hold an exclusive lock on a file, which is created. Yield False if others hold it for longer than `patience_s`.

    A POSIX record lock (fcntl), which NFS passes on to other machines. False also where locks do not work.
    """
    try:
        descriptor = open_lock(root, path)
    except OSError:  # a read-only or full file system: what is written there fails as well, and is reported
        yield False
        return
    try:
        yield _taken(descriptor, time.monotonic() + patience_s)
    finally:
        os.close(descriptor)


def _taken(descriptor: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError):  # which of them depends on the system
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        except OSError:
            return False


def folder_lock(path: Path, kind: int) -> int | None:
    """Return a lock on a folder, which ends with its descriptor or its process; None if the file system has no locks.

    Raise BlockingIOError if another process holds one.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor

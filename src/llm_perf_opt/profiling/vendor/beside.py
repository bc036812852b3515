"""A copy of this process that does one piece of work beside it and is gone: nothing to import anew, nothing to send there.

A fork copies only the thread that asks for it, so a lock that another thread holds stays locked in the copy for ever. It is made
only where no other Python thread runs; the copy does plain computing, starts nothing, and ends without any clean-up of its own.
Whoever asks must be able to do the work itself: there may be no copy, and it may fail.
"""

import ctypes
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

from llm_perf_opt.host import usable_cpus

_PR_SET_PDEATHSIG = 1
"""As linux/prctl.h has it."""


class Beside:
    """The copy at work. `result` or `abandon` must be called, or it is waited for by nobody."""

    def __init__(self, pid: int, written: int) -> None:
        self._pid: int | None = pid
        self._written = written

    def result(self) -> bytes | None:
        """What it has written, once it has ended; None where it failed."""
        status = self._wait()
        if status != 0:
            os.close(self._written)
            return None
        with os.fdopen(self._written, "rb") as file:
            file.seek(0)
            return file.read()

    def abandon(self) -> None:
        """End it: what it does is of no use any more."""
        if self._pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._wait()
            os.close(self._written)

    def _wait(self) -> int | None:
        """Its exit status; None where somebody else has collected it, as a handler of the caller's may."""
        if self._pid is None:
            return None
        try:
            status: int | None = os.waitpid(self._pid, 0)[1]
        except ChildProcessError:
            status = None
        self._pid = None  # only now: one who is interrupted while waiting must still be able to end it
        return status


def beside(work: Callable[[BinaryIO], None]) -> Beside | None:
    """Do `work` in a copy of this process; it writes its result to the file it is given. None where no copy can be made."""
    if sys.platform != "linux" or threading.active_count() > 1 or usable_cpus() < 2:
        return None
    parent = os.getpid()
    try:
        written = os.memfd_create("llm-perf-beside")
    except OSError:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # says that native threads exist: those of numpy, which sleep
            pid = os.fork()
    except OSError:
        os.close(written)
        return None
    if pid == 0:
        _do_and_end(work, written, parent)
    return Beside(pid, written)


def _do_and_end(work: Callable[[BinaryIO], None], written: int, parent: int) -> None:
    """In the copy: whatever happens, nothing of the original's goes on here."""
    status = 1
    try:
        _end_with(parent)
        with os.fdopen(written, "wb") as file:
            work(file)
        status = 0
    finally:
        os._exit(status)


def _end_with(parent: int) -> None:
    """Have the kernel end this copy when the original ends, however it does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was quicker
        os._exit(1)

"""Run statements of a database so that a signal or a limit of time ends them at once."""

import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from llm_perf_opt.core.processes import uninterrupted

R = TypeVar("R")
_POLL_S = 0.2


class Interruptible(Protocol):
    """A connection whose running statement another thread can end."""

    def interrupt(self) -> None:
        """End the running statement."""


class OverdueError(Exception):
    """The statements took longer than they may."""


def run_statements(
    connection: Interruptible, work: Callable[[], R], within_s: float | None = None, tick: Callable[[], object] = lambda: None
) -> R:
    """Return what `work` returns, which runs statements of the connection. Raise OverdueError after `within_s` seconds.

    It runs in another thread while this one waits, calls `tick` several times a second and handles signals. These are held back
    until the statement has stopped: closing a database that another thread uses crashes the process, and an exception in the
    middle of `wait` would leave its lock in any state.
    """
    found: list[R] = []
    failure: list[BaseException] = []
    ended = threading.Event()
    last = None if within_s is None else time.monotonic() + within_s

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            failure.append(error)
        finally:
            ended.set()

    def wait_s() -> float:
        return _POLL_S if last is None else min(_POLL_S, last - time.monotonic())

    with uninterrupted() as signals:
        threading.Thread(target=run, daemon=True).start()
        try:
            while not signals and (left_s := wait_s()) > 0 and not ended.wait(left_s):
                tick()
            overdue = not signals and not ended.is_set()
        finally:
            while not ended.is_set():  # a statement that had not started misses the interrupt, so it is sent again
                connection.interrupt()
                ended.wait(_POLL_S)
    if failure and overdue:
        raise OverdueError from failure[0]
    if failure:
        raise failure[0]
    return found[0]

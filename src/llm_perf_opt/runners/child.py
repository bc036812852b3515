"""The child side of a pass: messages to the parent, errors, and exit when the parent exits."""

import json
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from llm_perf_opt.core.errors import CaptureError, LlmPerfError, ResourceError

MESSAGE_PREFIX = "@llm-perf "
"""Marks a line of a child's output as a message to the parent; all other lines are log."""
PARENT_VARIABLE = "LLM_PERF_PARENT_PID"
"""The process that a child must not outlive, even if a profiler runs between them."""


def send(event: str, **fields: Any) -> None:
    """Send a message to the parent, as a line of standard output."""
    print(MESSAGE_PREFIX + json.dumps({"event": event, **fields}), flush=True)


def send_workers() -> None:
    """Tell the parent which processes this one has started: they belong to the measured program."""
    import psutil

    with suppress(psutil.Error):
        found = [process.pid for process in psutil.Process().children(recursive=True)]
        if found:
            send("workers", pids=found)


def enable_interrupts() -> None:
    """Restore Ctrl-C in a child: a shell that starts llm-perf in the background makes it ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def die_with_parent() -> None:
    """Kill this process and its descendants when the program that started the pass exits, even if a profiler runs between them.

    An engine's processes would keep the device's memory. A thread waits on a pidfd. Does nothing if PARENT_VARIABLE is unset or
    the kernel has no pidfd.
    """
    pid = os.environ.get(PARENT_VARIABLE, "")
    if not pid.isdigit() or not hasattr(os, "pidfd_open"):
        return
    try:
        parent = os.pidfd_open(int(pid))
    except ProcessLookupError:
        sys.exit(1)
    except OSError:  # an old kernel, or no permission
        return

    def wait() -> None:
        select.select([parent], [], [])
        _kill_descendants()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="die-with-parent", daemon=True).start()


def _kill_descendants() -> None:
    import psutil

    with suppress(psutil.Error):
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it has ended
                process.kill()


@contextmanager
def report_errors(translate: Callable[[Exception], LlmPerfError]) -> Iterator[None]:
    """Wrap a child's `main`: send an error to the parent as a message and write its traceback to the log."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except LlmPerfError as error:
        _fail(error)
    except Exception as error:  # noqa: BLE001 - reported to the parent; the traceback is in the log
        _fail(translate(error))


def _fail(error: LlmPerfError) -> None:
    traceback.print_exc(file=sys.stderr)
    send("error", kind=type(error).__name__, fact=error.fact, remedy=error.remedy)
    sys.exit(error.exit_code)


def framework_error(error: Exception, *, memory: str, disk: str, otherwise: str) -> LlmPerfError:
    """Return an error of the framework as an LlmPerfError with the matching remedy."""
    text = " ".join(str(error).split())
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError) or "can't allocate memory" in text:
        return ResourceError(f"Out of memory: {text[:300]}", memory)
    if "No space left" in text:
        return ResourceError(f"No space left on the disk: {text[:200]}", disk)
    return CaptureError(f"{type(error).__name__}: {text[:400]}", otherwise)

"""The measured process and whoever started it: messages, last words, and an end when the parent ends."""

import json
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llm_perf_opt.core.errors import CaptureError, LlmPerfError, ResourceError

MESSAGE_PREFIX = "@llm-perf "
"""What follows this in a line of a child's output is a message to its parent; everything else is log."""


PARENT_VARIABLE = "LLM_PERF_PARENT_PID"
"""Tells a child, also one below another tool, whose end is its own."""


def send(event: str, **fields: Any) -> None:
    """Tell the parent something; printed as an ordinary line where there is no parent."""
    print(MESSAGE_PREFIX + json.dumps({"event": event, **fields}), flush=True)


def heed_interrupts() -> None:
    """Called by a child: be interruptible, even if a script started llm-perf in the background, where shells ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def die_with_parent() -> None:
    """Called by a child: end it when the program that started the pass is gone, however many tools stand between them.

    A thread sleeps in the kernel until then. Does nothing where the kernel cannot tell, or nobody said whose child it is.
    """
    named = os.environ.get(PARENT_VARIABLE, "")
    if not named.isdigit() or not hasattr(os, "pidfd_open"):
        return
    try:
        parent = os.pidfd_open(int(named))
    except ProcessLookupError:
        sys.exit(1)
    except OSError:  # an old kernel, or one that may not be asked
        return

    def wait() -> None:
        select.select([parent], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="die-with-parent", daemon=True).start()


@contextmanager
def last_words(translated: Callable[[Exception], LlmPerfError]) -> Iterator[None]:
    """The body of a child's `main`: an error is told to the parent as a message, its traceback is left in the log."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except LlmPerfError as error:
        _fail(error)
    except Exception as error:  # noqa: BLE001 - a child's last word to its parent; the traceback is in the log
        _fail(translated(error))


def _fail(error: LlmPerfError) -> None:
    traceback.print_exc(file=sys.stderr)
    send("error", kind=type(error).__name__, fact=error.fact, remedy=error.remedy)
    sys.exit(error.exit_code)


def framework_error(error: Exception, *, memory: str, disk: str, otherwise: str) -> LlmPerfError:
    """An error of the framework as one of ours, with the remedy that fits."""
    text = " ".join(str(error).split())
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError) or "can't allocate memory" in text:
        return ResourceError(f"Out of memory: {text[:300]}", memory)
    if "No space left" in text:
        return ResourceError(f"No space left on the disk: {text[:200]}", disk)
    return CaptureError(f"{type(error).__name__}: {text[:400]}", otherwise)

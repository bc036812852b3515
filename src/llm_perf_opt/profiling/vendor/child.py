"""Both ends of a child process: its last words, and what its end means to whoever started it."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm_perf_opt.core.errors import CaptureError, Interrupted, LlmPerfError, error_from
from llm_perf_opt.profiling.vendor.launch import Finished
from llm_perf_opt.profiling.vendor.logs import words_of_the_program

_RAISED = re.compile(r"[\w.]+(Error|Exception)(: .|$)")
"""The last line of a traceback, below those of the code that it went through."""


class UnexplainedEndError(CaptureError):
    """A child ended badly without a word of its own: only its exit code or signal is known, and whoever knows more is right."""


def told_error(message: dict[str, Any]) -> LlmPerfError | None:
    """The error in a child's message, if it holds one."""
    if message.get("event") != "error":
        return None
    return error_from(str(message.get("kind")), str(message.get("fact")), str(message.get("remedy")))


def verdict(
    what: str, finished: Finished, said: Sequence[LlmPerfError], log: Path, *, limit: str, longer: str, smaller: str
) -> LlmPerfError | None:
    """What a child's end means: why we stopped it, then its own words, then its exit code. None: it ended well.

    `limit` names the time it had, `longer` and `smaller` say what to do when it ran out of time or memory.
    """
    if finished.stopped is not None:
        return finished.stopped
    if said:
        return said[0]
    if finished.timed_out:
        return CaptureError(
            f"{what} took longer than {limit} and was ended after {finished.seconds:.0f} s.", f"{longer} See {log}."
        )
    if finished.exit_code == 0:
        return None
    if finished.exit_code == 130:
        return Interrupted("Interrupted.", "What was captured so far is kept.")
    if finished.signal_name == "SIGKILL":
        return CaptureError(
            f"{what} was killed (SIGKILL).", f"Often that is the system running out of memory: {smaller} See {log}."
        )
    how = f"by {finished.signal_name}" if finished.signal_name else f"with exit code {finished.exit_code}"
    return UnexplainedEndError(f"{what} was ended {how}{_complaint(log)}.", f"See {log}.")


def _complaint(log: Path) -> str:
    """The line of a log that most likely says what went wrong."""
    try:
        lines = words_of_the_program(log.read_text(errors="replace"))
    except OSError:
        return ""
    raised = [line for line in lines if _RAISED.match(line)][-1:]
    loud = raised or [line for line in lines if "error" in line.lower()] or lines[-1:]
    return f": {loud[0].removeprefix('==ERROR==').strip()[:300]}" if loud else ""

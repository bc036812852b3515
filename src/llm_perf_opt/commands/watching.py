"""How far a long reading of data is, and how it ends when the user stops it."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from llm_perf_opt.errors import Interrupted, LlmPerfError, Terminated
from llm_perf_opt.records import PassRecord

if TYPE_CHECKING:
    from llm_perf_opt.commands.progress import QuietProgress

_TELL_EVERY_S = 0.1
_WHY: dict[type[BaseException], str] = {KeyboardInterrupt: "it was interrupted"}


@contextmanager
def watched(name: str, label: str, quiet: bool) -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Shows the phases of a long reading. Ctrl-C and SIGTERM end it alike: what was being made is removed first."""
    from llm_perf_opt.commands.progress import progress_for

    begun = time.monotonic()
    try:
        with stopped_alike(), progress_for(quiet) as progress:
            progress.pass_started(name, label)
            try:
                yield lambda phase, total: _Phase(progress, name, phase, total).advance
            except BaseException as error:
                why = error.fact if isinstance(error, LlmPerfError) else _WHY.get(type(error), type(error).__name__)
                progress.pass_ended(PassRecord(name, "failed", seconds=time.monotonic() - begun, why=why))
                raise
            progress.pass_ended(PassRecord(name, "complete", seconds=time.monotonic() - begun))
    except KeyboardInterrupt as error:
        raise Interrupted("Interrupted.", "Nothing half-made is left.") from error


@contextmanager
def stopped_alike() -> Iterator[None]:
    """SIGTERM, and the end of the terminal, stop what is done inside as Ctrl-C does: it can clean up behind itself."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, _stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM, as a scheduler sends it, ends a capture as Ctrl-C does: what there is is kept and reported; only the code differs.

    It is heard once: a second one must not break into the clearing up that the first began.
    """
    told = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal told
        del number, frame
        if not told:
            told = True
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except (Interrupted, KeyboardInterrupt) as error:
        if not told:
            raise
        raise Terminated("Ended by SIGTERM.", error.remedy if isinstance(error, Interrupted) else "") from error
    finally:
        signal.signal(signal.SIGTERM, previous)


def _stop(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt


class _Phase:
    """One phase of known length."""

    def __init__(self, progress: "QuietProgress", name: str, phase: str, total: int) -> None:
        self._progress, self._name, self._phase, self._total = progress, name, phase, total
        self._done = 0
        self._told_at = 0.0
        self.advance(0)

    def advance(self, count: int) -> None:
        """So many bytes more."""
        self._done += count
        if time.monotonic() - self._told_at < _TELL_EVERY_S and self._done < self._total:
            return
        self._told_at = time.monotonic()
        text = f"{self._done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB"
        message = {"event": "progress", "phase": self._phase, "done": self._done, "at_most": self._total, "text": text}
        self._progress.pass_message(self._name, message)

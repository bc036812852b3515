"""Progress of a capture on standard error: bars on a terminal, plain lines elsewhere, nothing with --quiet."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TextIO, cast

from llm_perf_opt.cli.signals import LastingFile
from llm_perf_opt.core.errors import Interrupted, LlmPerfError
from llm_perf_opt.core.records import PassRecord
from llm_perf_opt.core.terminal import one_line, raw_stream
from llm_perf_opt.core.units import byte_count
from llm_perf_opt.profiling.passes import TICK
from llm_perf_opt.report.text import duration, seconds


class QuietProgress:
    """Shows nothing."""

    def pass_started(self, name: str, label: str) -> None:
        """Ignored."""

    def pass_message(self, name: str, message: dict[str, Any]) -> None:
        """Ignored."""

    def pass_ended(self, entry: PassRecord) -> None:
        """Ignored."""

    def __enter__(self) -> "QuietProgress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None


PLAIN_EVERY_S = 10.0
"""Without a terminal, print a line at most this often during a phase."""
DRAW_EVERY_S = 1.0
"""A redraw of three bars takes the parent 2.6 ms of processor time (rich 15, one core of an aarch64 server), 0.3 % of a core at
this rate. Between redraws it sleeps on the child's pipe: a parent that polls slows the measured process."""


class PlainProgress(QuietProgress):
    """A line when a pass starts, changes phase or ends, and occasionally in between."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phase = ""
        self._printed_at = self._begun = 0.0

    def pass_started(self, name: str, label: str) -> None:
        """Announce the pass."""
        self._begun = self._clock()
        self._print(f"{name}: {label}")
        self._phase = ""

    def pass_message(self, name: str, message: dict[str, Any]) -> None:
        """Announce a new phase, and the progress of a long one."""
        phase = _phase(message)
        due = self._clock() - self._printed_at > PLAIN_EVERY_S
        if phase and phase != self._phase:
            self._phase = phase
            self._print(f"{name}: {phase}")
        elif phase and due:
            self._print(f"{name}: {phase} {message.get('text') or _estimate(message)}")
        elif message == TICK and due:
            self._print(f"{name}: {self._phase or 'starting'} ({seconds(self._clock() - self._begun)})")

    def pass_ended(self, entry: PassRecord) -> None:
        """Announce the result."""
        took = f" in {seconds(entry.seconds)}" if entry.seconds is not None else ""
        self._print(f"{entry.name}: {entry.status}{took}{': ' + entry.why if entry.why else ''}")

    def _print(self, text: str) -> None:
        self._printed_at = self._clock()
        print(text, file=LastingFile(sys.stderr, may_break=True), flush=True)


class BarProgress(QuietProgress):
    """A bar per pass with the latest iteration's time, redrawn once a second even if the child is silent."""

    def __init__(self, terminal: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        file = LastingFile(
            raw_stream(terminal or sys.stderr), may_break=True
        )  # rich writes control codes, so its input is cleaned instead
        self._progress = Progress(
            TextColumn("{task.fields[pass_name]:<8}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=Console(file=cast("TextIO", file), force_terminal=terminal is not None or None),
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            get_time=clock,
        )
        self._clock = clock
        self._drawn_at = 0.0
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> "BarProgress":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def pass_started(self, name: str, label: str) -> None:
        """Add a bar."""
        self._tasks[name] = self._progress.add_task(_plain(label), total=None, pass_name=_plain(name))
        self._draw()

    def pass_message(self, name: str, message: dict[str, Any]) -> None:
        """Move the bar."""
        task = self._tasks.get(name)
        if task is None:
            return
        phase = _phase(message)
        if message.get("event") == "progress" and phase:
            words = f"{phase} {message.get('text') or _estimate(message)}"
            self._progress.update(task, total=message.get("at_most"), completed=message.get("done"), description=_plain(words))
        elif phase:
            self._progress.update(task, description=_plain(phase))
        if self._clock() - self._drawn_at >= DRAW_EVERY_S:
            self._draw()

    def pass_ended(self, entry: PassRecord) -> None:
        """Fill the bar, or show why the pass failed."""
        task = self._tasks.get(entry.name)
        if task is None:
            return
        words = entry.status if not entry.why else f"{entry.status}: {entry.why}"
        good = entry.status == "complete"
        self._progress.update(task, total=1, completed=1 if good else 0, description=_plain(words))
        self._progress.stop_task(task)
        self._draw()

    def _draw(self) -> None:
        self._drawn_at = self._clock()
        self._progress.refresh()


def progress_for(quiet: bool) -> QuietProgress:
    """Return the display for this output: bars on a terminal, lines elsewhere."""
    if quiet:
        return QuietProgress()
    return BarProgress() if sys.stderr.isatty() else PlainProgress()


def _plain(text: str) -> str:
    """Return the text without markup for the display or commands for the terminal."""
    from rich.markup import escape

    return escape(one_line(text))


def _estimate(message: dict[str, Any]) -> str:
    each = duration(float(message.get("estimate_ns", 0)))
    return f"{message.get('done')} of at most {message.get('at_most')}, {each} each"


def _phase(message: dict[str, Any]) -> str:
    if message.get("event") == "phase":
        return str(message.get("text", ""))
    return str(message.get("phase", "")) if message.get("event") == "progress" else ""


# --- long reads ---------------------------------------------------------------------------------------------------------

_UPDATE_EVERY_S = 0.1
_WHY: dict[type[BaseException], str] = {KeyboardInterrupt: "it was interrupted"}


@contextmanager
def watched(name: str, label: str, quiet: bool) -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Show the phases of a long read. On Ctrl-C and SIGTERM, unfinished output is removed first."""
    begun = time.monotonic()
    try:
        with progress_for(quiet) as progress:
            progress.pass_started(name, label)
            try:
                yield lambda phase, total: _Phase(progress, name, phase, total).advance
            except BaseException as error:
                why = error.fact if isinstance(error, LlmPerfError) else _WHY.get(type(error), type(error).__name__)
                progress.pass_ended(PassRecord(name, "failed", seconds=time.monotonic() - begun, why=why))
                raise
            progress.pass_ended(PassRecord(name, "complete", seconds=time.monotonic() - begun))
    except KeyboardInterrupt as error:
        raise Interrupted("Interrupted.", "Nothing unfinished was left behind.") from error


class _Phase:
    """A phase of known length."""

    def __init__(self, progress: QuietProgress, name: str, phase: str, total: int) -> None:
        self._progress, self._name, self._phase, self._total = progress, name, phase, total
        self._done = 0
        self._updated_at = 0.0
        self.advance(0)

    def advance(self, count: int) -> None:
        """Advance by this many bytes."""
        self._done += count
        if time.monotonic() - self._updated_at < _UPDATE_EVERY_S and self._done < self._total:
            return
        self._updated_at = time.monotonic()
        text = f"{byte_count(self._done)} of {byte_count(self._total)}"
        message = {"event": "progress", "phase": self._phase, "done": self._done, "at_most": self._total, "text": text}
        self._progress.pass_message(self._name, message)

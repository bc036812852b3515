"""Shows a capture as it goes: bars on a terminal, plain lines elsewhere, nothing when quiet. Always on standard error."""

import sys
import time
from types import TracebackType
from typing import Any

from llm_perf_opt.records import PassRecord
from llm_perf_opt.report.text import milliseconds
from llm_perf_opt.terminal import one_line, raw_stream


class QuietProgress:
    """Says nothing."""

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
"""Without a terminal, a line at most this often while a phase goes on."""


class PlainProgress(QuietProgress):
    """A line when something begins, changes phase or ends, and now and then in between."""

    def __init__(self) -> None:
        self._phase = ""
        self._said_at = 0.0

    def pass_started(self, name: str, label: str) -> None:
        """Announce the pass."""
        self._say(f"{name}: {label}")
        self._phase = ""

    def pass_message(self, name: str, message: dict[str, Any]) -> None:
        """Announce a new phase, and where a long one stands."""
        phase = _phase(message)
        if not phase:
            return
        if phase != self._phase:
            self._phase = phase
            self._say(f"{name}: {phase}")
        elif time.monotonic() - self._said_at > PLAIN_EVERY_S:
            self._say(f"{name}: {phase} {message.get('text') or _estimate(message)}")

    def pass_ended(self, entry: PassRecord) -> None:
        """Tell how it went."""
        took = f" in {entry.seconds:.1f} s" if entry.seconds is not None else ""
        self._say(f"{entry.name}: {entry.status}{took}{': ' + entry.why if entry.why else ''}")

    def _say(self, text: str) -> None:
        self._said_at = time.monotonic()
        print(text, file=sys.stderr, flush=True)


class BarProgress(QuietProgress):
    """A bar per pass with the latest iteration's time. It redraws only when the child speaks, so that nobody spins meanwhile."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.fields[pass_name]:<8}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=Console(file=raw_stream(sys.stderr)),  # it draws: what it is given is cleaned instead
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> "BarProgress":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def pass_started(self, name: str, label: str) -> None:
        """A new bar."""
        self._tasks[name] = self._progress.add_task(_plain(label), total=None, pass_name=_plain(name))
        self._progress.refresh()

    def pass_message(self, name: str, message: dict[str, Any]) -> None:
        """Move the bar."""
        task = self._tasks.get(name)
        phase = _phase(message)
        if task is None or not phase:
            return
        if message.get("event") == "progress":
            words = f"{phase} {message.get('text') or _estimate(message)}"
            self._progress.update(task, total=message.get("at_most"), completed=message.get("done"), description=_plain(words))
        else:
            self._progress.update(task, description=_plain(phase))
        self._progress.refresh()

    def pass_ended(self, entry: PassRecord) -> None:
        """Fill the bar, or say why not."""
        task = self._tasks.get(entry.name)
        if task is None:
            return
        words = entry.status if not entry.why else f"{entry.status}: {entry.why}"
        good = entry.status == "complete"
        self._progress.update(task, total=1, completed=1 if good else 0, description=_plain(words))
        self._progress.stop_task(task)
        self._progress.refresh()


def progress_for(quiet: bool) -> QuietProgress:
    """The display that fits: a terminal gets bars."""
    if quiet:
        return QuietProgress()
    return BarProgress() if sys.stderr.isatty() else PlainProgress()


def _plain(text: str) -> str:
    """A text that is neither markup to the display nor a command to the terminal."""
    from rich.markup import escape

    return escape(one_line(text))


def _estimate(message: dict[str, Any]) -> str:
    each = milliseconds(float(message.get("estimate_ns", 0)))
    return f"{message.get('done')} of at most {message.get('at_most')}, {each} each"


def _phase(message: dict[str, Any]) -> str:
    if message.get("event") == "phase":
        return str(message.get("text", ""))
    return str(message.get("phase", "")) if message.get("event") == "progress" else ""

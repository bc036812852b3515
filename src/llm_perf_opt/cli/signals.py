"""An orderly end on signals and closed terminals."""

import os
import select
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO, cast

from llm_perf_opt.core.errors import HungUp, Interrupted, Preempted, Terminated, interrupted


class LastingFile:
    """A file that, once it `may_break`, ignores failed writes."""

    def __init__(self, file: TextIO, *, may_break: bool = False) -> None:
        self._file = file
        self.may_break = may_break

    def write(self, text: str) -> int:
        """Write the text if possible."""
        try:
            return self._file.write(text)
        except OSError:
            if not self.may_break:
                raise
            return len(text)

    def flush(self) -> None:
        """Flush if possible."""
        try:
            self._file.flush()
        except OSError:
            if not self.may_break:
                raise

    def close_if_gone(self) -> None:
        """Redirect the file, including what it still buffers, to /dev/null if nobody can read it any more."""
        with suppress(OSError, ValueError):  # no real file, or closed: then there is nothing to do
            descriptor = self._file.fileno()
            if _is_gone(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _is_gone(descriptor: int) -> bool:
    """Return whether it is a terminal that was closed, or a pipe without a reader."""
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISCHR(kind):
        return not os.isatty(descriptor)
    if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


_ENDS: dict[int, tuple[type[Interrupted], str]] = {
    signal.SIGINT: (Interrupted, "Interrupted."),
    signal.SIGTERM: (Terminated, "Ended by SIGTERM."),
    signal.SIGUSR2: (Preempted, "Ended by SIGUSR2: the scheduler is about to end the job."),
    signal.SIGHUP: (HungUp, "Ended by SIGHUP: the terminal was closed."),
}


@contextmanager
def graceful_exit() -> Iterator[None]:
    """Handle SIGTERM and SIGUSR2 (schedulers) and SIGHUP (a closed terminal) like Ctrl-C: keep and report what was captured.

    Only the exit code differs. After the first signal, further ones are ignored, so that they cannot interrupt the cleanup; only
    Ctrl-C again does. If SIGHUP is ignored, as under nohup, it stays ignored. Whatever a library makes of the exception of a
    signal, as an import or a database does, the command ends as the signal asks. The app opens it around every command.
    """
    received: list[int] = []
    output = [LastingFile(sys.stdout), LastingFile(sys.stderr)]

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGHUP:
            for file in output:
                file.may_break = True
        if not received or number == signal.SIGINT:
            received.append(number)
            raise KeyboardInterrupt(
                *([] if number == signal.SIGINT else [_ENDS[number][1]])
            )  # recorded in run.json and the pages

    handled = [number for number in _ENDS if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGTERM]
    previous = {number: signal.signal(number, stop) for number in handled}
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = cast("tuple[TextIO, TextIO]", tuple(output))
    try:
        yield
    except KeyboardInterrupt as error:
        raise _end_of(received, error) if received else interrupted(error, "") from error
    except (Exception, SystemExit) as error:  # typer exits without a message if the arguments are still being read
        if not received:
            raise
        raise _end_of(received, error) from error
    finally:
        sys.stdout, sys.stderr = streams
        if any(file.may_break for file in output):
            for file in output:
                file.close_if_gone()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end_of(received: list[int], error: BaseException) -> Interrupted:
    """Return the error for a command that a signal ended, with what `error` says besides."""
    kind, fact = _ENDS[received[0]]
    if not isinstance(error, Interrupted):
        return kind(fact, "")
    more = error.fact.removeprefix("Interrupted.").removeprefix(fact).strip()
    return kind(f"{fact} {more}".strip(), error.remedy)


def forget_interrupt() -> None:
    """Make Python exit with the code of this command after an interrupt that was handled.

    If the interrupt came while `exec` ran a string, as `dataclass` does at every import, `python -m` would end by SIGINT instead.
    The next evaluation of a string clears that mark.
    """
    eval("None")  # noqa: S307 - a constant

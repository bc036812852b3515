"""Standard output and error that may go away: a closed terminal, a reader that ended."""

import os
import select
import stat
from contextlib import suppress
from typing import Any, TextIO


class LastingFile:
    """A file whose loss ends nothing, once it `may_break`: what cannot be written is not shown."""

    def __init__(self, file: TextIO, *, may_break: bool = False) -> None:
        self._file = file
        self.may_break = may_break

    def write(self, text: str) -> int:
        """Written where it can be."""
        try:
            return self._file.write(text)
        except OSError:
            if not self.may_break:
                raise
            return len(text)

    def flush(self) -> None:
        """Likewise."""
        try:
            self._file.flush()
        except OSError:
            if not self.may_break:
                raise

    def close_if_gone(self) -> None:
        """Let what is written to it from now on, and what it still holds, go nowhere if nobody can read it."""
        with suppress(OSError, ValueError):  # no real file, or closed: then there is nothing to do
            descriptor = self._file.fileno()
            if _is_gone(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _is_gone(descriptor: int) -> bool:
    """Whether it is a terminal that was hung up, which answers no question any more, or a pipe that nobody reads."""
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISCHR(kind):
        return not os.isatty(descriptor)
    if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))

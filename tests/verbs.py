"""`llm-perf` in this process: the whole of the command, from the words to the exit code, without starting Python again."""

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import patch

from llm_perf_opt import cli
from llm_perf_opt.commands import shared


@dataclass(frozen=True)
class Done:
    """What the command came to."""

    code: int
    out: str
    err: str


def llm_perf(*words: object, encoding: str = "utf-8") -> Done:
    """Run a verb as a user types it, into streams as strict as a terminal's."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding, newline="\n") for _ in range(2)]
    with (
        patch.object(sys, "argv", ["llm-perf", *map(str, words)]),
        patch.object(sys, "stdout", streams[0]),
        patch.object(sys, "stderr", streams[1]),
        patch.object(shared, "_debug", False),
    ):
        code = _ended()
    out, err = (_written(stream) for stream in streams)
    return Done(code, out, err)


def _ended() -> int:
    try:
        cli.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0


def _written(stream: io.TextIOWrapper) -> str:
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode(stream.encoding)


def clean_end(done: Done, codes: Sequence[int] = (0, 2, 3, 4, 5, 6)) -> bool:
    """Whether it ended well or with an error of its own, and not with one of Python's."""
    return done.code in codes and "defect of llm-perf" not in done.err and "Traceback" not in done.err

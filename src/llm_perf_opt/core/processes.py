"""Run short commands with a time limit."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llm_perf_opt.core.errors import ResourceError, interrupted

GRACE_S = (30.0, 5.0, 5.0)
"""How long a child may take to end after SIGINT, SIGTERM and SIGKILL. A second Ctrl-C sends the next signal at once."""
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def ask(argv: Sequence[str], timeout_s: float = 15.0, *, whatever_code: bool = False) -> str | None:
    """Return the output of a short command, or None if it is missing, fails or hangs.

    With `whatever_code`, ignore the exit code (nsys lists its reports and exits with 1).
    """
    try:
        done = subprocess.run(  # noqa: S603 - an argv list, never a shell
            list(argv),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if whatever_code or done.returncode == 0 else None


@dataclass(frozen=True)
class Answer:
    """The result of a command, whatever its exit code."""

    exit_code: int
    output: bytes
    errors: str
    timed_out: bool = False


def answer(
    argv: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    timeout_s: float,
    stdin: Path | None = None,
) -> Answer:
    """Run a command in a folder with exactly this environment and a file as input. At the time limit, end it and its children."""
    with (stdin or Path(os.devnull)).open("rb") as fed:
        try:
            child = subprocess.Popen(  # noqa: S603 - an argv list, never a shell
                list(argv),
                cwd=folder,
                env=dict(environment),
                stdin=fed,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise ResourceError(
                f"{argv[0]} cannot be started in {folder}: {error.strerror}.", "Check that it is installed and executable."
            ) from error
        try:
            output, errors = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            end(child)
            output, errors = child.communicate()
            return Answer(child.returncode, output, errors.decode(errors="replace"), True)
        except KeyboardInterrupt as error:
            end(child)
            raise interrupted(error, "Completed results are kept.") from None
    return Answer(child.returncode, output, errors.decode(errors="replace"))


def answers(commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> list[Answer]:
    """Run several commands at once, each until it ends, and return their results. If interrupted, end all of them."""
    children: list[subprocess.Popen[bytes]] = []
    found = []
    try:
        for argv in commands:
            children.append(
                subprocess.Popen(  # noqa: S603 - an argv list, never a shell
                    list(argv),
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            )
        for child in children:
            _, errors = child.communicate()
            found.append(Answer(child.returncode, b"", errors.decode(errors="replace")))
    except OSError as error:
        raise ResourceError(f"{error.filename} cannot be started: {error.strerror}.", "Check that it is installed.") from error
    finally:
        for child in children:
            end(child)
    return found


def end(child: "subprocess.Popen[bytes]") -> None:
    """End a child: send SIGINT, then SIGTERM, then SIGKILL to its process group."""
    for number, patience in zip(END_SIGNALS, GRACE_S, strict=True):
        if child.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            child.wait(patience)


def under_nsys() -> bool:
    """Return whether nsys profiles this process, which it shows in an environment variable."""
    return "NSYS_PROFILING_SESSION_ID" in os.environ

"""Run short commands with a time limit."""

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeAlias

from llm_perf_opt.core.errors import ResourceError, interrupted
from llm_perf_opt.core.inside import PRIVATE, open_new

GRACE_S = (30.0, 5.0, 5.0)
"""How long a child may take to end after SIGINT, SIGTERM and SIGKILL. A second Ctrl-C sends the next signal at once."""
SHORT_GRACE_S = (10.0, 5.0, 5.0)
"""The same after a signal of a scheduler: Slurm kills the job 30 s after SIGTERM, and the run must be closed before that."""
LAUNCHER_PID = "LLM_PERF_LAUNCHER_PID"
"""The process that a point of a sweep ends with."""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
"""Signals that ask this program to end."""
IMPORTING_NOTHING_HERE = "import sys; sys.path[:1] = filter(None, sys.path[:1]); "
"""Begins the code of `python -c`: nothing is imported from the working folder, which may be anybody's."""
RUN_MODULE = (
    f"{IMPORTING_NOTHING_HERE}import runpy; del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
"""The code that is `-m` without the working folder: Python 3.10 does not know PYTHONSAFEPATH."""
_KNOWS_SAFE_PATH = sys.version_info >= (3, 11)
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


_LONGEST_ARGUMENT = 10_000
"""Far more than a name or a path has; Linux starts no program with an argument of 128 KiB."""


def argument_problem(text: str) -> str:
    """Return why a text from a file or a server cannot be given to a program as an argument; empty if it can.

    A program would read a leading dash as an option, and a newline or another control character may end a line of its log.
    """
    if text.startswith("-"):
        return "a program would read it as an option"
    if len(text) > _LONGEST_ARGUMENT:
        return f"it has {len(text):,} characters, more than {_LONGEST_ARGUMENT:,}"
    odd = next((char for char in text if not char.isprintable()), "")
    return f"it contains the character U+{ord(odd):04X}" if odd else "" if text.strip() else "it is empty"


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


def run_logged(argv: Sequence[str], *, folder: Path, environment: Mapping[str, str], log: Path) -> int:
    """Run a command to its end, with its output in a file, and return its exit code. If interrupted, end it.

    Looks up every second: an interrupt from another thread, as a worker of Ray sends it, does not end a longer wait.
    """
    with open_new(log.parent, log, PRIVATE) as out:
        try:
            child = subprocess.Popen(  # noqa: S603 - an argv list, never a shell
                list(argv),
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ResourceError(f"{argv[0]} cannot be started in {folder}: {error.strerror}.", "Check its path.") from error
    try:
        with _ended(child.pid) as ended:
            while child.poll() is None:
                select.select([ended] if ended is not None else [], [], [], 1.0)
    except KeyboardInterrupt as error:
        with suppress(ProcessLookupError):  # SIGTERM first: SIGINT may be blocked here, as below Ray, and so in the child
            child.terminate()
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            child.wait(GRACE_S[0])
        end(child)
        raise interrupted(error, "Completed results are kept.") from None
    return child.returncode


@contextmanager
def _ended(pid: int) -> Iterator[int | None]:
    """Yield a descriptor that becomes readable when a child has ended; None if the kernel does not have such."""
    try:
        descriptor = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except OSError:
        descriptor = None
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def answers(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str], meanwhile: Callable[[], None] = lambda: None
) -> list[Answer]:
    """Run several commands at once, each until it ends, and return their results. If interrupted, end all of them.

    `meanwhile` is called while they run.
    """
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
        meanwhile()
        for child in children:
            _, errors = child.communicate()
            found.append(Answer(child.returncode, b"", errors.decode(errors="replace")))
    except OSError as error:
        raise ResourceError(f"{error.filename} cannot be started: {error.strerror}.", "Check that it is installed.") from error
    finally:
        for child in children:
            end(child)
    return found


Process: TypeAlias = "subprocess.Popen[bytes]"


def start_member(argv: Sequence[str], environment: Mapping[str, str]) -> Process:
    """Start a process in the session of this one, with its output and errors in one pipe."""
    try:
        return subprocess.Popen(  # noqa: S603 - an argv list, never a shell
            list(argv),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        raise ResourceError(f"{argv[0]} cannot be started: {error.strerror}.", "Check that it is installed.") from error


def has_ended(child: Process, within_s: float) -> bool:
    """Wait for a process at most this long and return whether it has ended."""
    with suppress(subprocess.TimeoutExpired):
        child.wait(max(0.0, within_s))
    return child.poll() is not None


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


def module_argv(module: str, *words: str) -> list[str]:
    """Return the command of a module for this interpreter, with nothing imported from the working folder.

    Since Python 3.11 it needs PYTHONSAFEPATH as well.
    """
    return [sys.executable, *(("-m",) if _KNOWS_SAFE_PATH else ("-c", RUN_MODULE)), module, *words]


def become(argv: Sequence[str]) -> NoReturn:
    """Replace this program by a Python program in the same process, after its output is written."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(argv[0], list(argv), {**os.environ, "PYTHONSAFEPATH": "1"})  # noqa: S606 - an argv list, never a shell


def process_start(pid: int) -> float:
    """Return when a process started; 0 if there is none."""
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return 0.0


def is_running(pid: int, started: float) -> bool:
    """Return whether this very process still runs: not another one that was given its pid."""
    return started > 0 and abs(process_start(pid) - started) < 1.0


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by SIGSTOP or a debugger."""
    import psutil

    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def end_with_launcher() -> None:
    """End this process with SIGTERM when the process in LAUNCHER_PID has ended, such as a worker of Ray that was killed.

    Such a worker blocks SIGINT, and its children inherit that: passes could not be interrupted.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    pid = os.environ.pop(LAUNCHER_PID, "")
    if not pid.isdecimal() or not hasattr(os, "pidfd_open"):
        return
    try:
        launcher = os.pidfd_open(int(pid))
    except ProcessLookupError:  # it has ended
        os.kill(os.getpid(), signal.SIGTERM)
        return
    except OSError:  # the kernel does not have pidfds
        return

    def wait() -> None:
        select.select([launcher], [], [])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="end-with-launcher", daemon=True).start()


@contextmanager
def uninterrupted() -> Iterator[Sequence[int]]:
    """Hold back signals that ask this program to end until the block is done, and yield those received so far.

    Does nothing outside the main thread.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    previous = {number: signal.getsignal(number) for number in STOPS}
    held = {number: handler for number, handler in previous.items() if handler is not signal.SIG_IGN and handler is not None}
    try:
        for number in held:
            signal.signal(number, lambda got, _frame: received.append(got))
        yield received
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[0])

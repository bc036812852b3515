"""Start and stop the processes of passes. A child and its descendants are stopped by recorded pid, never by name."""

import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

from llm_perf_opt.core.errors import CaptureError, Interrupted, LlmPerfError, error_from, interrupted, words_of
from llm_perf_opt.core.inside import PRIVATE, disk_error, open_new, open_to_append
from llm_perf_opt.core.processes import END_SIGNALS, GRACE_S, SHORT_GRACE_S, end, module_argv
from llm_perf_opt.core.secrets import printed_credentials
from llm_perf_opt.profiling.vendor.child import (
    MARK,
    TICK_S,
    Descendants,
    LineReader,
    OnMessage,
    OnTick,
    Watch,
    new_mark,
    no_tick,
    pidfd,
)
from llm_perf_opt.profiling.vendor.logs import program_output, with_cause
from llm_perf_opt.runners.child import PARENT_VARIABLE

REPORT_GRACE_S = (120.0, 20.0, 5.0)
"""Seconds after SIGINT, SIGTERM and SIGKILL for a tool that writes its report when it is interrupted."""
SETTLE_S = 3.0
"""Seconds that processes may outlive a child before they are stopped."""
_RAISED = re.compile(r"[\w.]+(Error|Exception)(: .|$)")
"""The last line of a traceback."""


@dataclass(frozen=True)
class Finished:
    """How a child ended."""

    exit_code: int
    """Negative: the signal that ended it."""
    seconds: float
    timed_out: bool
    stopped: LlmPerfError | None = None
    """Why it was stopped, if neither the timeout nor the user stopped it."""

    @property
    def signal_name(self) -> str:
        """Name of the signal that ended it, if one did."""
        return signal.Signals(-self.exit_code).name if self.exit_code < 0 else ""


def child_environment() -> dict[str, str]:
    """Return the environment of a measured process: offline, with GPUs in NVML's order, importing nothing from its folder."""
    fixed = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",
        PARENT_VARIABLE: str(os.getpid()),
    }
    return {**os.environ, **fixed}


def program_environment() -> dict[str, str]:
    """Return the environment of a user's program: unchanged."""
    return dict(os.environ)


@dataclass(frozen=True)
class Callbacks:
    """Receivers of a child's progress."""

    on_message: OnMessage
    on_start: Callable[[int], None] = lambda _: None
    """Given the child's pid."""
    on_tick: OnTick = no_tick
    """Called once a second."""


def _start(argv: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start a process in its own session, or raise a CaptureError."""
    try:
        return subprocess.Popen(list(argv), start_new_session=True, **options)  # noqa: S603 - an argv list, never a shell
    except (OSError, ValueError) as error:  # ValueError: arguments with a null character
        fact = f"{argv[0]} cannot be started: {words_of(error)}."
        raise CaptureError(fact, "Check that it is installed and executable.") from error


def run_child(
    argv: Sequence[str],
    *,
    log: Path,
    timeout_s: float,
    callbacks: Callbacks,
    environment: Mapping[str, str] | None = None,
    watch: Watch | None = None,
    grace_s: tuple[float, float, float] | None = None,
) -> Finished:
    """Run a child to its end. Its output goes to `log`, its messages to `callbacks`.

    It is stopped at the timeout or when `watch` finds a problem, with `grace_s` after each signal. All processes that it started
    and left behind are stopped too, in whatever session they are.
    """
    begun = time.monotonic()
    mark = new_mark()
    given = environment or child_environment()
    with open_to_append(log.parent, log, PRIVATE) as file:
        # Before the child starts: an interrupt between its start and the block below would leave it behind.
        reader = LineReader(file, callbacks.on_message, printed_credentials(argv, given))
        child = _start(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**given, MARK: mark},
        )
        running = _Running(child, Descendants(child.pid, mark), reader, grace_s or GRACE_S, callbacks.on_tick)
        stopped: LlmPerfError | None = None
        try:
            callbacks.on_start(child.pid)
            outcome = running.follow(begun + timeout_s, watch)
            stopped = outcome if isinstance(outcome, LlmPerfError) else None
            if outcome != "ended":
                running.end()
            running.stop_leftovers()
        except KeyboardInterrupt as error:
            if "SLURM_JOB_ID" in os.environ:  # SIGKILL follows soon
                running.hurry()
            running.end()
            running.stop_leftovers()
            raise interrupted(error, "What was captured so far is kept.") from None
        except OSError as error:  # the log cannot be written: the disk is full
            running.end(read_output=False)
            running.stop_leftovers()
            raise disk_error(error, log) from error
        except BaseException:
            running.end(read_output=False)
            running.stop_leftovers()
            raise
        finally:
            running.close()
    return Finished(child.wait(), time.monotonic() - begun, outcome == "late", stopped)


class UnexplainedEndError(CaptureError):
    """A child failed without an error message: only its exit code or signal is known. A more specific error takes precedence."""


def error_in(message: dict[str, Any]) -> LlmPerfError | None:
    """Return the error in a child's message, if there is one."""
    if message.get("event") != "error":
        return None
    return error_from(str(message.get("kind")), str(message.get("fact")), str(message.get("remedy")))


def verdict(
    what: str, finished: Finished, errors: Sequence[LlmPerfError], log: Path, *, limit: str, longer: str, smaller: str
) -> LlmPerfError | None:
    """Return the error of a child, from why it was stopped, its own messages or its exit code; None: it succeeded.

    `limit` names the timeout, `longer` and `smaller` are remedies for running out of time or memory.
    """
    if finished.stopped is not None:
        return finished.stopped
    if errors:
        return with_cause(errors[0], _text_of(log))
    if finished.timed_out:
        return CaptureError(
            f"{what} took longer than {limit} and was stopped after {finished.seconds:.0f} s.", f"{longer} See {log}."
        )
    if finished.exit_code == 0:
        return None
    if finished.exit_code == 130:
        return Interrupted("Interrupted.", "What was captured so far is kept.")
    if finished.signal_name == "SIGKILL":
        return CaptureError(f"{what} was killed (SIGKILL).", f"The system has probably run out of memory: {smaller} See {log}.")
    how = f"was killed by {finished.signal_name}" if finished.signal_name else f"ended with exit code {finished.exit_code}"
    return UnexplainedEndError(f"{what} {how}{_error_line(log)}.", f"See {log}.")


def _error_line(log: Path) -> str:
    """Return the line of a log that most likely describes the error, after a colon."""
    lines = program_output(_text_of(log))
    raised = [line for line in lines if _RAISED.match(line)][-1:]
    found = raised or [line for line in lines if "error" in line.lower()] or lines[-1:]
    return f": {found[0].removeprefix('==ERROR==').strip()[:300]}" if found else ""


def _text_of(log: Path) -> str:
    try:
        return log.read_text(errors="replace")
    except OSError:
        return ""


def convert(argv: Sequence[str], *, log: Path, timeout_s: float, output: Path | None = None) -> Finished:
    """Run a tool that converts a file: its output goes to `log`, or its standard output to `output`."""
    begun = time.monotonic()
    with ExitStack() as opened:
        errors = opened.enter_context(open_to_append(log.parent, log, PRIVATE))
        out = errors if output is None else opened.enter_context(open_new(output.parent, output))
        child = _start(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=errors)
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            end(child)
            return Finished(child.wait(), time.monotonic() - begun, True)
        except KeyboardInterrupt as error:
            end(child)
            raise interrupted(error, "What was captured so far is kept.") from None
    return Finished(child.wait(), time.monotonic() - begun, False)


class _Running:
    """A running child: reads its output, stops it, and stops what it left behind."""

    def __init__(
        self,
        child: "subprocess.Popen[bytes]",
        descendants: Descendants,
        reader: LineReader,
        grace_s: tuple[float, float, float],
        on_tick: OnTick,
    ) -> None:
        self._child = child
        self._descendants = descendants
        self._reader = reader
        self._grace_s = grace_s
        self._on_tick = on_tick

    def follow(self, deadline: float, watch: Watch | None = None) -> Literal["ended", "late"] | LlmPerfError:
        """Copy output until the child ends, the deadline passes or the watch finds a problem. Never busy-waits."""
        assert self._child.stdout is not None  # noqa: S101 - opened with PIPE
        pipe = self._child.stdout.fileno()
        tick_at = time.monotonic() + TICK_S
        with selectors.DefaultSelector() as selector, pidfd(self._child.pid) as ended:
            selector.register(pipe, selectors.EVENT_READ)
            if ended is not None:
                selector.register(ended, selectors.EVENT_READ)
            while True:
                now = time.monotonic()
                left = deadline - now
                if left <= 0:
                    return "late"
                if now >= tick_at:
                    self._on_tick()
                    tick_at = now + TICK_S
                waits = (left, tick_at - now, watch.interval_s if watch else left)
                ready = {key.fd for key, _ in selector.select(min(waits))}
                if pipe in ready:
                    chunk = os.read(pipe, 65536)
                    self._reader.feed(chunk)
                    if not chunk:
                        break
                elif ended in ready:  # a grandchild may keep the pipe open; the child's output has been read
                    break
                if watch and watch.due():
                    self._descendants.look(child_is_known=self._child.returncode is None)
                    problem = watch.problem()
                    if problem is not None:
                        return problem
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(max(0.1, deadline - time.monotonic()))
            return "ended"
        return "late"

    def hurry(self) -> None:
        """Allow less time after each signal."""
        first, second, third = (min(pair) for pair in zip(self._grace_s, SHORT_GRACE_S, strict=True))
        self._grace_s = (first, second, third)

    def end(self, read_output: bool = True) -> None:
        """Send SIGINT to the child's group, so that a tool writes its report; then SIGTERM and SIGKILL to all descendants.

        Its output is read meanwhile, because it could block on a full pipe.
        """
        for number, patience in zip(END_SIGNALS, self._grace_s, strict=True):
            if self._child.poll() is not None:
                return
            self._descendants.look(child_is_known=True)
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, number)
            if number is not signal.SIGINT:
                self._descendants.send(number)
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                if read_output:
                    self.follow(time.monotonic() + patience)
                else:
                    self._child.wait(patience)

    def stop_leftovers(self) -> None:
        """Stop processes that outlived the child, such as an agent of nsys: they would disturb the next measurement."""
        self._descendants.look(child_is_known=self._child.returncode is None)
        if not self._wait_for_all(SETTLE_S):
            with suppress(OSError):  # the disk may be full, which has been reported
                self._reader.note(f"stopped processes that outlived {self._child.pid}: {self._descendants.alive()}")
            for number, patience in ((signal.SIGTERM, self._grace_s[1]), (signal.SIGKILL, self._grace_s[2])):
                self._descendants.look(child_is_known=False)
                self._descendants.send(number)
                if self._wait_for_all(patience):
                    break

    def _wait_for_all(self, patience_s: float) -> bool:
        """Return whether all of them ended within this time. They are not children of this process, so it must poll."""
        deadline = time.monotonic() + patience_s
        while self._descendants.alive():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True

    def close(self) -> None:
        """Read what is left in the pipe, without waiting for more."""
        if self._child.stdout is not None:
            os.set_blocking(self._child.stdout.fileno(), False)
            with suppress(OSError):  # nothing left, or the disk is full, which has been reported
                while chunk := os.read(self._child.stdout.fileno(), 65536):
                    self._reader.feed(chunk)
                self._reader.close()
            self._child.stdout.close()


class Companion:
    """A process that runs next to another until its standard input is closed."""

    def __init__(self, argv: Sequence[str], log: Path, ready: str, patience_s: float = 60.0) -> None:
        self.argv = tuple(argv)
        self._begun = time.monotonic()
        self._log = open_to_append(log.parent, log, PRIVATE)
        self._child = subprocess.Popen(  # noqa: S603 - an argv list, never a shell
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            env=child_environment(),
        )
        assert self._child.stdout is not None  # noqa: S101 - opened with PIPE
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.stdout, selectors.EVENT_READ)
            line = self._child.stdout.readline() if selector.select(patience_s) else b""
        if line.decode(errors="replace").strip() != ready:
            end(self._child)
            self._log.close()
            raise CaptureError(f"{argv[0]} did not start (exit code {self._child.returncode}).", f"See {log}.")

    def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        if self._child.stdin is not None:
            with suppress(BrokenPipeError):
                self._child.stdin.write(line.encode() + b"\n")
                self._child.stdin.flush()

    def stop(self) -> Finished:
        """Close its input and wait; stop it if it does not exit."""
        if self._child.stdin is not None:
            with suppress(BrokenPipeError):
                self._child.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(5)
        end(self._child)
        if self._child.stdout is not None:
            self._child.stdout.close()
        self._log.close()
        return Finished(self._child.wait(), time.monotonic() - self._begun, False)


@overload
def build_work_argv(config: Path, settings: str, out: Path, decode_steps: int | None = None) -> list[str]: ...
@overload
def build_work_argv(module: str, overrides: Sequence[str]) -> list[str]: ...
def build_work_argv(*places: Any, **named: Any) -> list[str]:
    """Return the command of the measured process: of a resolved configuration and the name of a pass.

    As the profiling guides write it, of a module and its overrides: `build_work_argv(module, overrides)`.
    """
    if len(places) + len(named) == 2:
        return _module_argv(*places, **named)
    return _pass_argv(*places, **named)


def _module_argv(module: str, overrides: Sequence[str]) -> list[str]:
    return module_argv(module, *overrides)


def _pass_argv(config: Path, settings: str, out: Path, decode_steps: int | None = None) -> list[str]:
    module = "llm_perf_opt.runners.llm_profile_runner"
    argv = module_argv(module, "--config", str(config), "--pass", settings, "--out", str(out))
    return argv if decode_steps is None else [*argv, "--decode-steps", str(decode_steps)]

"""The only place that starts processes. A child and its descendants are ended by recorded pid, never by name."""

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llm_perf_opt.core.errors import CaptureError, Interrupted, LlmPerfError, error_from, interrupted
from llm_perf_opt.core.processes import END_SIGNALS, GRACE_S, end
from llm_perf_opt.core.run_folder import disk_error
from llm_perf_opt.profiling.vendor.child import (
    MARK,
    TICK_S,
    Descendants,
    DiskWatch,
    LineReader,
    OnMessage,
    OnTick,
    new_mark,
    no_tick,
    pidfd,
)
from llm_perf_opt.profiling.vendor.logs import words_of_the_program
from llm_perf_opt.runners.child import PARENT_VARIABLE

REPORT_GRACE_S = (120.0, 20.0, 5.0)
"""The same for a tool that writes its report when it is interrupted."""
SETTLE_S = 3.0
"""How long processes that outlive a child may take to end by themselves."""
_RAISED = re.compile(r"[\w.]+(Error|Exception)(: .|$)")
"""The last line of a traceback, below those of the code that it went through."""


@dataclass(frozen=True)
class Finished:
    """How a child ended."""

    exit_code: int
    """Negative: the signal that ended it."""
    seconds: float
    timed_out: bool
    stopped: LlmPerfError | None = None
    """Why it was ended before its time, where neither time nor the user ended it."""

    @property
    def signal_name(self) -> str:
        """Name of the signal that ended it, if one did."""
        return signal.Signals(-self.exit_code).name if self.exit_code < 0 else ""


def child_environment() -> dict[str, str]:
    """The environment of a measured process: nothing is fetched, and GPUs are counted as NVML counts them."""
    fixed = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        PARENT_VARIABLE: str(os.getpid()),
    }
    return {**os.environ, **fixed}


def program_environment() -> dict[str, str]:
    """The environment of a user's own program: ours, as it is. A model hub and the order of GPUs are its own affair."""
    return dict(os.environ)


@dataclass(frozen=True)
class Callbacks:
    """Who is told how a child goes."""

    on_message: OnMessage
    on_start: Callable[[int], None] = lambda _: None
    """Given the child's pid."""
    on_tick: OnTick = no_tick
    """Called once a second."""


def run_child(
    argv: Sequence[str],
    *,
    log: Path,
    timeout_s: float,
    callbacks: Callbacks,
    environment: Mapping[str, str] | None = None,
    watch: DiskWatch | None = None,
    grace_s: tuple[float, float, float] | None = None,
) -> Finished:
    """Run a child to its end. Everything it prints goes to `log`, its messages to `callbacks`.

    It is ended when its time is over or when `watch` says so, with `grace_s` after each signal; so is everything it started
    and left behind, whatever session that went to.
    """
    begun = time.monotonic()
    mark = new_mark()
    with log.open("ab", buffering=0) as file:
        try:
            child = subprocess.Popen(  # noqa: S603 - an argv list, never a shell
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**(environment or child_environment()), MARK: mark},
            )
        except OSError as error:
            raise CaptureError(
                f"{argv[0]} cannot be started: {error.strerror}.", "Check that it is installed and may be run."
            ) from error
        running = _Running(
            child, Descendants(child.pid, mark), LineReader(file, callbacks.on_message), grace_s or GRACE_S, callbacks.on_tick
        )
        stopped: LlmPerfError | None = None
        try:
            callbacks.on_start(child.pid)
            outcome = running.follow(begun + timeout_s, watch)
            stopped = outcome if isinstance(outcome, LlmPerfError) else None
            if outcome != "ended":
                running.end()
            running.clear_away()
        except KeyboardInterrupt as error:
            running.end()
            running.clear_away()
            raise interrupted(error, "What was captured so far is kept.") from None
        except OSError as error:  # the log cannot be written: the disk is full
            running.end(heard=False)
            running.clear_away()
            raise disk_error(error, log) from error
        except BaseException:
            running.end(heard=False)
            running.clear_away()
            raise
        finally:
            running.close()
    return Finished(child.wait(), time.monotonic() - begun, outcome == "late", stopped)


class UnexplainedEndError(CaptureError):
    """A child ended badly without a word of its own: only its exit code or signal is known, and whoever knows more is right."""


def error_in(message: dict[str, Any]) -> LlmPerfError | None:
    """Return the error in a child's message, if it holds one."""
    if message.get("event") != "error":
        return None
    return error_from(str(message.get("kind")), str(message.get("fact")), str(message.get("remedy")))


def verdict(
    what: str, finished: Finished, said: Sequence[LlmPerfError], log: Path, *, limit: str, longer: str, smaller: str
) -> LlmPerfError | None:
    """Return what a child's end means: why we stopped it, then its own words, then its exit code. None: it ended well.

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


def convert(argv: Sequence[str], *, log: Path, timeout_s: float, output: Path | None = None) -> Finished:
    """Run a tool that makes one file of another: what it prints goes to `log`, or its standard output to `output`."""
    begun = time.monotonic()
    with log.open("ab") as said, (output or log).open("wb" if output else "ab") as out:
        try:
            child = subprocess.Popen(  # noqa: S603 - an argv list, never a shell
                list(argv), stdin=subprocess.DEVNULL, stdout=out, stderr=said, start_new_session=True
            )
        except OSError as error:
            raise CaptureError(
                f"{argv[0]} cannot be started: {error.strerror}.", "Check that it is installed and may be run."
            ) from error
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
    """A child that runs: hearing it, ending it, and clearing away what it left."""

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

    def follow(self, deadline: float, watch: DiskWatch | None = None) -> Literal["ended", "late"] | LlmPerfError:
        """Copy output until the child ends, time runs out or the watch finds a problem. Sleeps in the kernel, never spins."""
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
                elif ended in ready:  # a grandchild may still hold the pipe; what the child wrote has been read
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

    def end(self, heard: bool = True) -> None:
        """SIGINT to the child's group, so that a tool stops its program and writes its report; then SIGTERM and SIGKILL to all.

        Its output is read meanwhile, or it might wait for room in the pipe for ever.
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
                if heard:
                    self.follow(time.monotonic() + patience)
                else:
                    self._child.wait(patience)

    def clear_away(self) -> None:
        """End what outlived the child: an agent of nsys, a server that the program started. It disturbs what is measured next."""
        self._descendants.look(child_is_known=self._child.returncode is None)
        if not self._wait_for_all(SETTLE_S):
            with suppress(OSError):  # the log's disk may be full, which has been told
                self._reader.note(f"ended processes that outlived {self._child.pid}: {self._descendants.alive()}")
            for number, patience in ((signal.SIGTERM, self._grace_s[1]), (signal.SIGKILL, self._grace_s[2])):
                self._descendants.look(child_is_known=False)
                self._descendants.send(number)
                if self._wait_for_all(patience):
                    break

    def _wait_for_all(self, patience_s: float) -> bool:
        """Whether all of them ended within this time. They are not our children, so that nothing wakes us."""
        deadline = time.monotonic() + patience_s
        while self._descendants.alive():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True

    def close(self) -> None:
        """Read what is still in the pipe, without waiting for more."""
        if self._child.stdout is not None:
            os.set_blocking(self._child.stdout.fileno(), False)
            with suppress(OSError):  # nothing there, or the log's disk is full, which has been told
                while chunk := os.read(self._child.stdout.fileno(), 65536):
                    self._reader.feed(chunk)
                self._reader.close()
            self._child.stdout.close()


class Companion:
    """A process that runs beside another until its standard input is closed."""

    def __init__(self, argv: Sequence[str], log: Path, ready: str, patience_s: float = 20.0) -> None:
        self.argv = tuple(argv)
        self._begun = time.monotonic()
        self._log = log.open("ab")
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
            heard = self._child.stdout.readline() if selector.select(patience_s) else b""
        if heard.decode(errors="replace").strip() != ready:
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
        """Close its input and wait; end it if it does not heed."""
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


def build_work_argv(config_file: Path, which: str, out: Path, decode_steps: int | None = None) -> list[str]:
    """The command of the measured process: it gets the resolved configuration, not the overrides again."""
    module = "llm_perf_opt.runners.llm_profile_runner"
    argv = [sys.executable, "-m", module, "--config", str(config_file), "--pass", which, "--out", str(out)]
    return argv if decode_steps is None else [*argv, "--decode-steps", str(decode_steps)]

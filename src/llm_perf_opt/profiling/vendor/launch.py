"""The only place that starts processes. A child runs in a session of its own; it is ended by its recorded pid, never by name."""

import json
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any

from llm_perf_opt.errors import CaptureError, Interrupted
from llm_perf_opt.run_folder import disk_error

MESSAGE_PREFIX = "@llm-perf "
"""A line of a child's output that begins so is a message to its parent; every other line is log."""
GRACE_S = (10.0, 5.0, 5.0)
"""How long a child may take to end after SIGINT, SIGTERM and SIGKILL."""
_MAX_LINE = 1 << 20

_PARENT = "LLM_PERF_PARENT_PID"
"""Tells a child, also one below another tool, whose end is its own."""

OnMessage = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Finished:
    """How a child ended."""

    exit_code: int
    """Negative: the signal that ended it."""
    seconds: float
    timed_out: bool

    @property
    def signal_name(self) -> str:
        """Name of the signal that ended it, if one did."""
        return signal.Signals(-self.exit_code).name if self.exit_code < 0 else ""


def send(event: str, **fields: Any) -> None:
    """Tell the parent something; printed as an ordinary line where there is no parent."""
    print(MESSAGE_PREFIX + json.dumps({"event": event, **fields}), flush=True)


def child_environment() -> dict[str, str]:
    """The environment of a measured process: nothing is fetched, and GPUs are counted as NVML counts them."""
    fixed = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        _PARENT: str(os.getpid()),
    }
    return {**os.environ, **fixed}


def run_child(
    argv: Sequence[str],
    *,
    log: Path,
    timeout_s: float,
    on_message: OnMessage,
    on_start: Callable[[int], None] = lambda _: None,
    environment: Mapping[str, str] | None = None,
) -> Finished:
    """Run a child to its end, sleeping meanwhile: everything it prints goes to `log`, its messages to `on_message`."""
    begun = time.monotonic()
    with log.open("ab", buffering=0) as file:
        try:
            child = subprocess.Popen(  # noqa: S603 - an argv list, never a shell
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=dict(environment or child_environment()),
            )
        except OSError as error:
            raise CaptureError(
                f"{argv[0]} cannot be started: {error.strerror}.", "Check that it is installed and may be run."
            ) from error
        try:
            on_start(child.pid)
            timed_out = not _follow(child, file, begun + timeout_s, on_message)
            if timed_out:
                end(child)
        except KeyboardInterrupt:
            end(child)
            _drain(child, file, on_message)
            raise Interrupted("Interrupted.", "What was captured so far is kept.") from None
        except OSError as error:  # the log cannot be written: the disk is full
            end(child)
            raise disk_error(error, log) from error
        except BaseException:
            end(child)
            raise
        finally:
            if child.stdout:
                child.stdout.close()
    return Finished(child.wait(), time.monotonic() - begun, timed_out)


def ask(argv: Sequence[str], timeout_s: float = 15.0) -> str | None:
    """The output of a short command, or None when it is not there, fails or hangs."""
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
    return done.stdout.strip() if done.returncode == 0 else None


def end(child: "subprocess.Popen[bytes]") -> None:
    """SIGINT, then SIGTERM, then SIGKILL to the child's own process group."""
    for number, patience in zip((signal.SIGINT, signal.SIGTERM, signal.SIGKILL), GRACE_S, strict=True):
        if child.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            child.wait(patience)


def _follow(child: "subprocess.Popen[bytes]", file: RawIOBase, deadline: float, on_message: OnMessage) -> bool:
    """Copy output until the child ends; False when time ran out first. Sleeps in the kernel, never polls."""
    assert child.stdout is not None  # noqa: S101 - opened with PIPE
    reader = _LineReader(file, on_message)
    pipe = child.stdout.fileno()
    with selectors.DefaultSelector() as selector, _pidfd(child.pid) as ended:
        selector.register(pipe, selectors.EVENT_READ)
        if ended is not None:
            selector.register(ended, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            ready = {key.fd for key, _ in selector.select(left)}
            if pipe in ready:
                chunk = os.read(pipe, 65536)
                reader.feed(chunk)
                if not chunk:
                    break
            elif ended in ready:  # a grandchild may still hold the pipe; what the child wrote has been read
                break
    reader.close()
    with suppress(subprocess.TimeoutExpired):
        child.wait(max(0.1, deadline - time.monotonic()))
        return True
    return False


def _drain(child: "subprocess.Popen[bytes]", file: RawIOBase, on_message: OnMessage) -> None:
    """What an ended child still said."""
    assert child.stdout is not None  # noqa: S101 - opened with PIPE
    os.set_blocking(child.stdout.fileno(), False)
    reader = _LineReader(file, on_message)
    with suppress(BlockingIOError):
        while chunk := os.read(child.stdout.fileno(), 65536):
            reader.feed(chunk)
    reader.close()


class _LineReader:
    """Splits output into messages and log."""

    def __init__(self, file: RawIOBase, on_message: OnMessage) -> None:
        self._file = file
        self._on_message = on_message
        self._rest = b""

    def feed(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._line(line)
        if len(self._rest) > _MAX_LINE:
            self._line(self._rest)
            self._rest = b""

    def close(self) -> None:
        if self._rest:
            self._line(self._rest)
            self._rest = b""

    def _line(self, line: bytes) -> None:
        if line.startswith(MESSAGE_PREFIX.encode()):
            with suppress(ValueError):
                message = json.loads(line[len(MESSAGE_PREFIX) :])
                if isinstance(message, dict):
                    self._on_message(message)
                    return
        self._file.write(line + b"\n")


class _pidfd:  # noqa: N801 - reads as a function at its call
    """A descriptor that becomes readable when a process ends; None where the system has none."""

    def __init__(self, pid: int) -> None:
        self._fd: int | None = None
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):  # an old kernel, or one that may not be asked: the end of the pipe tells as well
                self._fd = os.pidfd_open(pid)

    def __enter__(self) -> int | None:
        return self._fd

    def __exit__(self, *exception: object) -> None:
        if self._fd is not None:
            os.close(self._fd)


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


def build_work_argv(config_file: Path, which: str, out: Path) -> list[str]:
    """The command of the measured process: it gets the resolved configuration, not the overrides again."""
    module = "llm_perf_opt.runners.llm_profile_runner"
    return [sys.executable, "-m", module, "--config", str(config_file), "--pass", which, "--out", str(out)]


def die_with_parent() -> None:
    """Called by a child: end it when the program that started the pass is gone, however many tools stand between them.

    A thread sleeps in the kernel until then. Does nothing where the kernel cannot tell, or nobody said whose child it is.
    """
    named = os.environ.get(_PARENT, "")
    if not named.isdigit() or not hasattr(os, "pidfd_open"):
        return
    try:
        parent = os.pidfd_open(int(named))
    except ProcessLookupError:
        sys.exit(1)
    except OSError:  # an old kernel, or one that may not be asked
        return

    def wait() -> None:
        select.select([parent], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="die-with-parent", daemon=True).start()

"""The server of a serving run: started in its own process group and always stopped, or attached to by its address."""

import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llm_perf_opt.core.errors import CaptureError, LlmPerfError
from llm_perf_opt.core.processes import module_argv
from llm_perf_opt.profiling.serving.http import ask
from llm_perf_opt.profiling.vendor.launch import Callbacks, Finished, error_in, run_child, verdict
from llm_perf_opt.profiling.vendor.logs import program_output

GRACE_S = (20.0, 5.0, 5.0)
"""Seconds after SIGINT, SIGTERM and SIGKILL for a server, which ends its workers first."""
_HEALTH_EVERY_S = 0.5
_LAST_LINES = 5


class _StopRequestedError(LlmPerfError):
    """The server is not needed any more."""


class _StopWatch:
    """Tells the reader of a server's output to end the server."""

    interval_s = 0.25

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop

    def due(self) -> bool:
        return self._stop.is_set()

    def problem(self) -> LlmPerfError | None:
        return _StopRequestedError("The run has ended.") if self._stop.is_set() else None


class ServerProcess:
    """A server in a process of its own. A thread reads its output; `stop` ends it and everything that it started."""

    def __init__(self, argv: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.argv = tuple(argv)
        self.log = log
        self.messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._environment = environment
        self._stop = threading.Event()
        self._pid = 0
        self._finished: Finished | None = None
        self._failed: LlmPerfError | None = None
        self._errors: list[LlmPerfError] = []
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    def start(self) -> None:
        """Start it."""
        self._thread.start()

    def _run(self) -> None:
        try:
            self._finished = run_child(
                self.argv,
                log=self.log,
                timeout_s=float("inf"),
                callbacks=Callbacks(on_message=self._take, on_start=self._began),
                environment=self._environment,
                watch=_StopWatch(self._stop),
                grace_s=GRACE_S,
            )
        except LlmPerfError as error:
            self._failed = error

    def _began(self, pid: int) -> None:
        self._pid = pid

    def _take(self, message: dict[str, Any]) -> None:
        error = error_in(message)
        if error is not None:
            self._errors.append(error)
        self.messages.put(message)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Wait for its end, at most this long."""
        self._thread.join(seconds)

    def stop(self) -> None:
        """End it and all processes that it started. A second Ctrl-C kills them at once."""
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._thread.join(0.5)
            except KeyboardInterrupt:
                with suppress(ProcessLookupError, PermissionError):
                    if not self._pid:  # not started yet; 0 would be this process's own group
                        continue
                    os.killpg(self._pid, signal.SIGKILL)

    @property
    def seconds(self) -> float | None:
        """How long it ran; None while it runs."""
        return self._finished.seconds if self._finished else None

    @property
    def exit_code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._finished.exit_code if self._finished else None

    def death(self) -> LlmPerfError:
        """Return why it ended by itself, with the last lines of its log."""
        self.wait(GRACE_S[0])
        if self._failed is not None:
            return self._failed
        found = None
        if self._finished is not None:
            found = verdict(
                "The server",
                self._finished,
                self._errors,
                self.log,
                limit="the run allows",
                longer="Raise --timeout-s.",
                smaller="use a smaller model or dtype, or lower the engine's memory arguments.",
            )
        if self._errors and found is not None:
            return found
        fact = found.fact if found else "The server ended by itself."
        return CaptureError(fact + last_lines(self.log), found.remedy if found else f"See {self.log}.")


def last_lines(log: Path, count: int = _LAST_LINES) -> str:
    """Return the last lines of a log as the end of a message."""
    try:
        lines = [line for line in program_output(log.read_text(errors="replace")) if line.strip()]
    except OSError:
        return ""
    return "".join(f"\n  {line.strip()[:200]}" for line in ["Last lines of its log:", *lines[-count:]]) if lines else ""


def runner_argv(config: Path, folder: Path, port: int, traces: Path | None, spans: str, code: Sequence[str] = ()) -> list[str]:
    """Return the command of the process that runs an engine's server. `code`: settings that can run code, as typed."""
    argv = module_argv("llm_perf_opt.runners.server", "--config", str(config), "--folder", str(folder))
    argv += ["--port", str(port)]
    argv += ["--traces", str(traces)] if traces else []
    argv += ["--spans", spans] if spans else []
    return [*argv, *code]


def wait_until_ready(
    server: ServerProcess, health_url: str, limit_s: float, on_message: Callable[[dict[str, Any]], None]
) -> None:
    """Return when the server has reported its settings and answers its health check.

    Raise if it ends before, or takes longer than the limit. The server reports its settings before it answers, but they may be
    read after the first answer.
    """
    deadline, told = time.monotonic() + limit_s, False
    while True:
        alive = server.alive
        answers = alive and ask(health_url).code == 200
        while not server.messages.empty():
            message = server.messages.get()
            told = told or message.get("event") == "server"
            on_message(message)
        if not alive:
            raise server.death()
        if answers and told:
            return
        if time.monotonic() >= deadline:
            missing = "answers, but has not reported its settings" if answers else "was not ready"
            raise CaptureError(
                f"The server {missing} after {limit_s:.0f} s.{last_lines(server.log)}",
                f"Raise --startup-s. See {server.log}.",
            )
        on_message({"event": "tick"})
        server.wait(_HEALTH_EVERY_S)


def model_folder() -> "tempfile.TemporaryDirectory[str]":
    """Return a temporary folder for a model with random weights; it outlives the server."""
    return tempfile.TemporaryDirectory(prefix="llm-perf-model-")

"""Has this machine's ceilings measured, or read from where they are kept, in a process of its own."""

import sys
import tempfile
from pathlib import Path
from typing import Any

from llm_perf_opt.errors import CaptureError, ConfigError, LlmPerfError, nearest
from llm_perf_opt.listener import Listener
from llm_perf_opt.profiling.vendor.child import told_error, verdict
from llm_perf_opt.profiling.vendor.launch import run_child
from llm_perf_opt.records import FoundCeilings, PassRecord
from llm_perf_opt.stored_ceilings import read_ceilings

DEVICES = ("auto", "cpu", "cuda")
_NAME = "ceilings"
_TIMEOUT_S = 120.0
"""Beyond ten times the measuring time: loading the framework can be slow, hanging must end."""


def build_ceilings_argv(
    device: str, device_index: int, out: Path, *, refresh: bool, threads: int | None, budget_s: float | None
) -> list[str]:
    """The command of the measuring process."""
    argv = [sys.executable, "-m", "llm_perf_opt.profiling.ceilings", "--device", device, "--device-index", str(device_index)]
    argv += ["--out", str(out)]
    argv += ["--refresh"] if refresh else []
    argv += ["--threads", str(threads)] if threads is not None else []
    return argv + (["--budget-s", str(budget_s)] if budget_s is not None else [])


def find_ceilings(
    device: str,
    device_index: int,
    listener: Listener,
    *,
    refresh: bool = False,
    threads: int | None = None,
    budget_s: float | None = None,
) -> FoundCeilings:
    """The device's ceilings. `threads` and `budget_s`: none is the framework's own choice and the default time."""
    if device not in DEVICES:
        raise ConfigError(f"--device {device} is not known.{nearest(device, DEVICES)}", f"Known: {', '.join(DEVICES)}.")
    listener.pass_started(_NAME, "what this machine can do")
    with tempfile.TemporaryDirectory(prefix="llm-perf-") as folder:
        out = Path(folder) / "ceilings.json"
        argv = build_ceilings_argv(device, device_index, out, refresh=refresh, threads=threads, budget_s=budget_s)
        seconds = _launch(argv, listener, _TIMEOUT_S + 10 * (budget_s or 0))
        found = read_ceilings(out)
    listener.pass_ended(PassRecord(_NAME, "complete", tuple(argv), 0, round(seconds, 3)))
    return found


def _launch(argv: list[str], listener: Listener, timeout_s: float) -> float:
    """Run the measuring process; its log is kept only where it failed for no reason a user would know."""
    descriptor = tempfile.NamedTemporaryFile(prefix="llm-perf-ceilings-", suffix=".log", delete=False)  # noqa: SIM115
    descriptor.close()
    log = Path(descriptor.name)
    said: list[LlmPerfError] = []

    def hear(message: dict[str, Any]) -> None:
        error = told_error(message)
        if error is not None:
            said.append(error)
        listener.pass_message(_NAME, message)

    keep = False
    try:
        finished = run_child(argv, log=log, timeout_s=timeout_s, on_message=hear)
        error = verdict(
            "Measuring the ceilings",
            finished,
            said,
            log,
            limit=f"{timeout_s:.0f} s",
            longer="Is the device busy?",
            smaller="free some.",
        )
        keep = isinstance(error, CaptureError)
        if error is not None:
            if keep and said:
                error = CaptureError(error.fact, f"The whole error is in {log}.")
            listener.pass_ended(
                PassRecord(_NAME, "failed", tuple(argv), finished.exit_code, round(finished.seconds, 3), why=error.fact)
            )
            raise error
        return finished.seconds
    finally:
        if not keep:
            log.unlink(missing_ok=True)

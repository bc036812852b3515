"""Has this machine's ceilings measured, or read from where they are kept, in a process of its own."""

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from llm_perf_opt.core.errors import CaptureError, ConfigError, LlmPerfError, nearest
from llm_perf_opt.core.machine_records import FoundCeilings
from llm_perf_opt.core.records import PassRecord
from llm_perf_opt.core.stored_ceilings import read_ceilings
from llm_perf_opt.profiling.passes import TICK, Listener
from llm_perf_opt.profiling.vendor.child import told_error, verdict
from llm_perf_opt.profiling.vendor.launch import Callbacks, run_child

DEVICES = ("auto", "cpu", "cuda")
_NAME = "ceilings"
_TIMEOUT_S = 120.0
"""Beyond ten times the measuring time: loading the framework can be slow, hanging must end."""


def build_ceilings_argv(
    device: str, device_index: int, out: Path, *, refresh: bool, threads: int | None, budget_s: float | None
) -> list[str]:
    """The command of the measuring process."""
    if device not in DEVICES:
        raise ConfigError(f"--device {device} is not known.{nearest(device, DEVICES)}", f"Known: {', '.join(DEVICES)}.")
    argv = [
        sys.executable,
        "-m",
        "llm_perf_opt.runners.measure.ceilings",
        "--device",
        device,
        "--device-index",
        str(device_index),
    ]
    argv += ["--out", str(out)]
    argv += ["--refresh"] if refresh else []
    argv += ["--threads", str(threads)] if threads is not None else []
    return argv + (["--budget-s", str(budget_s)] if budget_s is not None else [])


def run_ceilings(argv: list[str], listener: Listener, *, out: Path, log: Path, budget_s: float | None = None) -> None:
    """Run the measuring process (see `build_ceilings_argv`); it leaves its result at `out`."""
    listener.pass_started(_NAME, "what this machine can do")
    timeout_s = _TIMEOUT_S + 10 * (budget_s or 0)
    said: list[LlmPerfError] = []

    def hear(message: dict[str, Any]) -> None:
        error = told_error(message)
        if error is not None:
            said.append(error)
        listener.pass_message(_NAME, message)

    finished = None
    try:
        on_tick = partial(listener.pass_message, _NAME, TICK)
        finished = run_child(argv, log=log, timeout_s=timeout_s, callbacks=Callbacks(on_message=hear, on_tick=on_tick))
        words = {"limit": f"{timeout_s:.0f} s", "longer": "Is the device busy?", "smaller": "free some."}
        error = verdict("Measuring the ceilings", finished, said, log, **words)
        if isinstance(error, CaptureError) and said:
            error = CaptureError(error.fact, f"The whole error is in {log}.")
    except LlmPerfError as raised:
        error = raised
    listener.pass_ended(
        PassRecord(
            _NAME,
            "complete" if error is None else "failed",
            tuple(argv),
            finished.exit_code if finished else None,
            round(finished.seconds, 3) if finished else None,
            why=error.fact if error else "",
        )
    )
    if error is not None:
        raise error


def find_ceilings(
    device: str,
    device_index: int,
    listener: Listener,
    *,
    refresh: bool = False,
    threads: int | None = None,
    budget_s: float | None = None,
) -> FoundCeilings:
    """The device's ceilings, outside a run: the log is kept only where it failed for no reason a user would know."""
    with tempfile.TemporaryDirectory(prefix="llm-perf-") as folder:
        out, log = Path(folder) / "ceilings.json", Path(folder) / "log.txt"
        try:
            argv = build_ceilings_argv(device, device_index, out, refresh=refresh, threads=threads, budget_s=budget_s)
            run_ceilings(argv, listener, out=out, log=log, budget_s=budget_s)
            return read_ceilings(out)
        except CaptureError as error:
            with tempfile.NamedTemporaryFile(prefix="llm-perf-ceilings-", suffix=".log", delete=False) as kept:
                kept.write(log.read_bytes() if log.exists() else b"")
            raise CaptureError(error.fact, f"The whole error is in {kept.name}.") from error

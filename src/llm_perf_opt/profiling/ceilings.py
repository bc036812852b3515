"""Measure this machine's peaks, or read them from the cache, in a separate process."""

import sys
import tempfile
from pathlib import Path

from llm_perf_opt import __version__
from llm_perf_opt.config.passes import label_of
from llm_perf_opt.core.errors import CaptureError, ConfigError, LlmPerfError, nearest
from llm_perf_opt.core.machine_records import FoundCeilings, read_ceilings
from llm_perf_opt.core.records import SCHEMA, Manifest
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.profiling.passes import Capture, Listener, PassOutcome, PassPlan, framework, run_pass

DEVICES = ("auto", "cpu", "cuda")
_NAME = "ceilings"
_TIMEOUT_S = 120.0
"""More than ten times the measuring time: loading the framework can be slow."""


def _measure(folder: RunFolder, listener: Listener, words: list[str], budget_s: float | None = None) -> FoundCeilings:
    """Run the measuring process with these arguments and return its result."""
    out = folder.ceilings_file
    argv = [sys.executable, "-m", "llm_perf_opt.runners.measure.ceilings", *words, "--out", str(out)]
    argv += ["--budget-s", str(budget_s)] if budget_s is not None else []
    timeout_s = _TIMEOUT_S + 10 * (budget_s or 0)

    def check(ended: LlmPerfError | None) -> PassOutcome:
        return PassOutcome(ended, "read from the cache" if ended is None and folder.parsed(out, read_ceilings).cached else "")

    listener.pass_started(_NAME, label_of(_NAME))
    plan = PassPlan(
        _NAME, argv, timeout_s, framework(), limit=f"the limit of {timeout_s:.0f} s", longer="Check whether the device is busy."
    )
    run_pass(folder, plan, listener, check=check)
    return folder.parsed(out, read_ceilings)


def find_ceilings(
    device: str,
    device_index: int,
    listener: Listener,
    *,
    refresh: bool = False,
    threads: int | None = None,
    budget_s: float | None = None,
) -> FoundCeilings:
    """Return the device's peaks outside a run; after an unexpected failure the log is kept."""
    if device not in DEVICES:
        raise ConfigError(f"--device {device} is not known.{nearest(device, DEVICES)}", f"Known: {', '.join(DEVICES)}.")
    words = [*_arguments(device, device_index, threads), *(["--refresh"] if refresh else [])]
    with tempfile.TemporaryDirectory(prefix="llm-perf-") as place:
        folder = RunFolder(Path(place))
        folder.write_manifest(Manifest(SCHEMA, __version__, "partial", "", ()))
        try:
            return _measure(folder, listener, words, budget_s)
        except CaptureError as error:
            log = folder.log_file(_NAME)
            with tempfile.NamedTemporaryFile(prefix="llm-perf-ceilings-", suffix=".log", delete=False) as kept:
                kept.write(log.read_bytes() if log.exists() else b"")
            raise CaptureError(error.fact, f"The full error is in {kept.name}.") from error


def _arguments(device: str, device_index: int, threads: int | None) -> list[str]:
    words = ["--device", device, "--device-index", str(device_index)]
    return words + (["--threads", str(threads)] if threads is not None else [])


def launch(capture: Capture) -> None:
    """Measure the peaks. If that fails, the run continues and reports the error at its end."""
    threads = capture.config.hardware.cpu_threads if capture.config else None
    _measure(capture.folder, capture.listener, _arguments(capture.device, capture.device_index, threads))

"""Measure this machine's peaks, or read them from the cache, in a separate process."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from llm_perf_opt import __version__
from llm_perf_opt.analysis.cost_model.linears import linear_layers
from llm_perf_opt.analysis.cost_model.work import Logits, Step
from llm_perf_opt.analysis.limits.efficiency import request_cost
from llm_perf_opt.analysis.limits.hardware import devices_of
from llm_perf_opt.config.passes import label_of
from llm_perf_opt.core.errors import CaptureError, ConfigError, LlmPerfError, ParseError, nearest
from llm_perf_opt.core.machine_records import FoundCeilings, ModelLinears, read_ceilings
from llm_perf_opt.core.processes import module_argv
from llm_perf_opt.core.records import SCHEMA, CleanTimings, Manifest, Maybe, Missing
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.profiling.passes import Capture, Listener, PassOutcome, PassPlan, framework, run_pass
from llm_perf_opt.traces.pass_records import read_timings

DEVICES = ("auto", "cpu", "cuda")
_NAME = "ceilings"
_TIMEOUT_S = 600.0
"""Far more than measuring takes: a limit on hangs. Loading the framework is slow on a busy machine."""


def _measure(
    folder: RunFolder,
    listener: Listener,
    words: list[str],
    budget_s: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> FoundCeilings:
    """Run the measuring process with these arguments and return its result."""
    out = folder.ceilings_file
    argv = module_argv("llm_perf_opt.runners.measure.ceilings", *words, "--out", str(out))
    argv += ["--budget-s", str(budget_s)] if budget_s is not None else []
    timeout_s = _TIMEOUT_S + 10 * (budget_s or 0)

    def check(ended: LlmPerfError | None) -> PassOutcome:
        return PassOutcome(ended, "read from the cache" if ended is None and folder.parsed(out, read_ceilings).cached else "")

    listener.pass_started(_NAME, label_of(_NAME))
    plan = PassPlan(
        _NAME,
        argv,
        timeout_s,
        framework(),
        environment=environment,
        limit=f"the limit of {timeout_s:.0f} s",
        longer="Check whether the device is busy.",
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
    """Measure the peaks and the model's own shapes. If that fails, the run continues and reports the error at its end."""
    hardware = capture.config.hardware if capture.config else None
    words = _arguments(capture.device, capture.device_index, hardware.threads if hardware else None)
    words += ["--cpus", hardware.cpus] if hardware and hardware.cpus else []
    words += _model_words(capture.folder)
    _measure(capture.folder, capture.listener, words, capture.profiling.ceilings_s, capture.environment)


def _model_words(folder: RunFolder) -> list[str]:
    """Write the matrices of the model that the unprofiled pass ran; without its result, only the device is measured."""
    try:
        timings = folder.parsed(folder.raw("clean") / "timings.json", read_timings)
    except ParseError:
        return []
    found = model_linears(timings)
    if isinstance(found, Missing) or timings.model.device.startswith("cuda"):
        return []
    file = folder.raw(_NAME) / "model.json"
    folder.write_record(file, found)
    return ["--model", str(file)]


def model_linears(timings: CleanTimings) -> Maybe[ModelLinears]:
    """Return the products with weights of the timed request; Missing if its cost is unknown or it ran on several devices."""
    request = request_cost(timings)
    if isinstance(request, Missing):
        return request
    if devices_of(timings) > 1:
        return Missing("the weights are split over several devices")
    work = timings.workload
    logits: Logits = "last" if timings.model.logits == "last token" else "all"
    return ModelLinears(
        name=timings.model.name,
        dtype=request.formats.weights,
        parameters=request.architecture.params,
        layers=linear_layers(
            request.architecture, Step(work.batch_size, work.padded_tokens, 0, logits), Step(work.batch_size, 1), request.modules
        ),
        compiled=timings.model.compile != "none",
        experts=request.architecture.has_experts,
    )

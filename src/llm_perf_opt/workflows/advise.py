"""Findings of a run, and trials of them: each change alone, on the same machine, against the unprofiled times of the run."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.tuning.calibration import point_of
from llm_perf_opt.analysis.tuning.outcomes import can_be_learned_from
from llm_perf_opt.analysis.verification import Trial, Verification, measured, unmeasured
from llm_perf_opt.config.code_settings import CodeSetting, Stored, code_settings
from llm_perf_opt.config.composition import Composed, compose, with_overrides
from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.core.errors import ConfigError, Interrupted, LlmPerfError, ParseError, ResourceError, unreported
from llm_perf_opt.core.records import CleanTimings, Missing
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.profiling.capture import capture
from llm_perf_opt.profiling.passes import Listener
from llm_perf_opt.profiling.provenance import environment
from llm_perf_opt.workflows.analyze_run import analyze, report_run, reread, write_reports
from llm_perf_opt.workflows.calibration import add_calibration
from llm_perf_opt.workflows.run_reader import RunReader

_MACHINE = (("host",), ("cpu", "name"), ("gpu", "name"), ("gpu_driver",))
"""The values in env.json that identify a machine."""
RunOne = Callable[[RunConfig, str], tuple[RunReader, LlmPerfError | None]]
"""Captures and reports one configuration in a folder next to the original run; the text names it."""


def findings_of(path: Path) -> tuple[RunReader, RunAnalysis, list[Finding]]:
    """Analyze a run and return it with its findings. Raise ParseError if it has no complete trace."""
    run, analysis = reread(path)
    trace = analysis.trace
    if isinstance(trace, Missing):
        again = "--passes program,torch" if run.manifest.kind == "exec" else "profiling=minimal or full"
        raise ParseError(f"{path} has no trace to analyze: {trace.why}.", f"Run it again with {again}.")
    if not trace.complete:
        raise ParseError(f"The trace is incomplete, so there are no findings: {trace.why}.", "Record it again.")
    return run, analysis, trace.findings


def to_try(findings: Sequence[Finding], top: int) -> list[Finding]:
    """Return the first `top` findings that are configuration changes and predict an improvement."""
    return [finding for finding in findings if finding.overrides and (finding.saving_high_ns or finding.throughput)][:top]


def verify(
    run: RunReader,
    analysis: RunAnalysis,
    findings: Sequence[Finding],
    command: Sequence[str],
    listener: Listener,
    *,
    remeasure: bool = False,
    code: Sequence[str] = (),
) -> tuple[Verification, LlmPerfError | None]:
    """Try each finding alone, and write verify.json and the reports. An interruption keeps the trials made so far.

    `code`: settings of the run and of the findings that can run code, as typed.
    """
    values, folder = _settings(run), run.folder
    stored = stored_run(run, ["llm-perf", "advise", str(folder.path), "--verify"], code)
    asked = [code_settings(asdict(overridden(values, ()))), *(_asked(values, finding) for finding in findings)]
    stored.check_words(one for settings in asked for one in settings)
    allowed = stored.allowed(one for settings in asked for one in settings)
    require_same_device(folder, analysis, values)
    run_one = partial(_run, folder, command, listener, allowed)
    base = _base(folder, analysis, values, run_one, remeasure)
    trials: list[tuple[Trial, RunReader | None]] = []
    interrupted: LlmPerfError | None = None
    for finding in findings:
        trial, made, error = _try(values, finding, base.timings, run_one)
        trials.append((trial, made))
        if isinstance(error, Interrupted):
            interrupted = error
            break
    found = Verification(base.run, base.remeasured, tuple(trial for trial, _ in trials))
    folder.write_record(folder.verify_file, found)
    _keep(trials, base)
    write_reports(run, replace(analysis, verified=found))
    return found, interrupted


def stored_run(run: RunReader, command: Sequence[str], code: Sequence[str]) -> Stored:
    """Return the file with the settings of a run, and those that can run code and were typed after `command`."""
    return Stored(run.folder.config_file, shlex.join(command), tuple(code))


def _asked(values: Mapping[str, Any], finding: Finding) -> tuple[CodeSetting, ...]:
    """Return what a finding sets that can run code: a run may propose anything."""
    try:
        return code_settings(asdict(overridden(values, finding.overrides)))
    except ConfigError:  # its trial reports it
        return ()


def _keep(trials: Sequence[tuple[Trial, RunReader | None]], base: "_Base") -> None:
    """Keep predictions and measurements for the intervals of later predictions on this kind of device."""
    points, model = [], base.timings.model
    for trial, made in trials:
        if made is not None and not trial.why and can_be_learned_from([base.analysis, analyze(made, traces=False)]):
            known = {"device": model.device_name, "model": model.name, "run": str(made.folder.path)}
            points.append(point_of(trial, **known, made=made.manifest.created))
    add_calibration([point for point in points if point is not None])  # a cache: verify.json has the trials if it fails


def overridden(values: Mapping[str, Any], overrides: Sequence[str], *, profiled: bool = False) -> RunConfig:
    """Return the configuration of a run with some values replaced; unless `profiled`, with no profiling but its telemetry.

    Raise ConfigError if a value is invalid.
    """
    config = with_overrides(values, overrides)
    if profiled:
        return config
    return replace(config, profiling=replace(compose(["profiling=none"]).config.profiling, nvml=config.profiling.nvml))


def _settings(run: RunReader) -> dict[str, Any]:
    if not run.settings:
        raise ParseError(f"{run.folder.config_file} has no configuration.", "The run cannot be repeated without it.")
    return run.settings


@dataclass(frozen=True)
class _Base:
    """The times to compare with."""

    timings: CleanTimings
    run: str
    """The run they come from."""
    analysis: RunAnalysis
    """Of that run."""
    remeasured: str = ""
    """Why they were measured again; empty if they were not."""


def _base(folder: RunFolder, analysis: RunAnalysis, values: Mapping[str, Any], run_one: RunOne, remeasure: bool) -> _Base:
    timings = analysis.timings
    why = "requested with --remeasure" if remeasure else _other_machine(analysis.env, values)
    if isinstance(timings, Missing) or not timings.iterations:
        why = why or "the run has no unprofiled times"
    elif not why:
        return _Base(timings, folder.path.name, analysis)
    run, error = run_one(overridden(values, ()), "base")
    again = run.timings
    if error is not None:
        raise error
    if isinstance(again, Missing) or not again.iterations:
        raise ParseError(f"The base could not be measured again in {run.folder.path}.", "See run.json there for the reason.")
    return _Base(again, run.folder.path.name, analyze(run, traces=False), why)


def require_same_device(folder: RunFolder, analysis: RunAnalysis, values: Mapping[str, Any]) -> None:
    """Raise ResourceError if the run used a GPU that this machine does not have: findings apply to that device only."""
    if not _used_gpu(analysis, values):
        return
    ran, gpu = analysis.env.get("gpu"), _this_machine(values).get("gpu")
    name = str(ran.get("name")) if isinstance(ran, Mapping) else "a GPU"
    if not isinstance(gpu, Mapping):
        raise ResourceError(
            f"{folder.path.name} ran on {name}, and this machine has no GPU to try its findings on ({gpu}).",
            "Try them on the machine of the run; `llm-perf advise RUN` lists them on any machine.",
        )
    if isinstance(ran, Mapping) and gpu.get("name") != ran.get("name"):
        raise ResourceError(
            f"{folder.path.name} ran on {name}, and this machine has {gpu.get('name')}: predictions for one GPU cannot be tried "
            "on another.",
            "Use a machine with that GPU, or run the configuration on this machine and use the new run.",
        )


def _used_gpu(analysis: RunAnalysis, values: Mapping[str, Any]) -> bool:
    """Return whether the run used a GPU: from its times, or else from its configuration and its machine."""
    if not isinstance(analysis.timings, Missing):
        return not analysis.timings.model.device.startswith("cpu")
    hardware = values.get("hardware")
    device = hardware.get("device") if isinstance(hardware, Mapping) else None
    return device == "cuda" or (device != "cpu" and isinstance(analysis.env.get("gpu"), Mapping))


def _this_machine(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment of this machine, with the device index of the run."""
    hardware = values.get("hardware")
    return environment(hardware.get("device_index", 0) if isinstance(hardware, Mapping) else 0)


def _other_machine(env: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    here = _this_machine(values)
    for path in _MACHINE:
        if _fact(env, path) != _fact(here, path):
            return f"the run is from another machine: its {' '.join(path).replace('_', ' ')} differs"
    return ""


def _fact(env: Mapping[str, Any], path: Sequence[str]) -> str:
    value: Any = env
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else value
    return str(value)


def _try(
    values: Mapping[str, Any], finding: Finding, base: CleanTimings, run_one: RunOne
) -> tuple[Trial, RunReader | None, LlmPerfError | None]:
    try:
        run, error = run_one(overridden(values, finding.overrides), finding.id)
    except LlmPerfError as raised:
        return unmeasured(finding, raised.fact), None, raised
    timings, name = run.timings, run.folder.path.name
    unfinished = error is not None and not run.manifest.has_times
    if unfinished or isinstance(timings, Missing) or not timings.iterations:
        why = error.fact if error else "the trial left no unprofiled times"
        return unmeasured(finding, why, name), run, error
    return measured(finding, base, timings, name), run, error


def _run(
    folder: RunFolder,
    command: Sequence[str],
    listener: Listener,
    code: tuple[CodeSetting, ...],
    config: RunConfig,
    name: str,
) -> tuple[RunReader, LlmPerfError | None]:
    """Capture and report a run next to the original."""
    place = folder.path.with_name(f"{folder.path.name}-verify-{name}")
    return captured_run(Composed(config, place, code=code), command, listener)


def captured_run(composed: Composed, command: Sequence[str], listener: Listener) -> tuple[RunReader, LlmPerfError | None]:
    """Capture and report a run. Return it with the error that ended it, also if an interrupt ended its report.

    Its times can be used if `has_times` of its manifest is true, whatever was interrupted after them.
    """
    made, error = capture(composed, command, listener)
    run = RunReader(made)
    try:
        report_run(run)
    except (KeyboardInterrupt, Interrupted) as stopped:
        error = unreported(stopped, made.path, error)
    return run, error

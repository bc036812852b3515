"""Findings of a run, and the trying of them: each alone, on the same machine, against the run's unprofiled times."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.verification import Trial, Verification, measured, unmeasured
from llm_perf_opt.config.composition import Composed, compose, with_overrides
from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.core.errors import Interrupted, LlmPerfError, ParseError, ResourceError
from llm_perf_opt.core.records import CleanTimings, Missing
from llm_perf_opt.core.run_folder import RunFolder, write_record
from llm_perf_opt.profiling.capture import capture
from llm_perf_opt.profiling.passes import Listener
from llm_perf_opt.profiling.provenance import environment
from llm_perf_opt.workflows.analyze_run import report_run, reread, write_reports
from llm_perf_opt.workflows.run_reader import RunReader

_MACHINE = (("host",), ("cpu", "name"), ("gpu", "name"), ("gpu_driver",))
"""What tells one machine from another in env.json."""
RunOne = Callable[[RunConfig, str], tuple[RunReader, LlmPerfError | None]]
"""Captures and reports one configuration next to the original; the text is its name."""


def findings_of(path: Path) -> tuple[RunReader, RunAnalysis, list[Finding]]:
    """The run, analyzed anew, with its findings; a ParseError where it has no sound trace to find anything in."""
    run, analysis = reread(path)
    trace = analysis.trace
    if isinstance(trace, Missing):
        raise ParseError(f"{path} has no trace to find anything in: {trace.why}.", "Run it with profiling=minimal or full.")
    if not trace.complete:
        raise ParseError(f"Nothing is claimed from an incomplete trace: {trace.why}.", "Record it again.")
    return run, analysis, trace.findings


def to_try(findings: Sequence[Finding], top: int) -> list[Finding]:
    """The first findings that are plain configuration and promise something."""
    return [finding for finding in findings if finding.overrides and (finding.saving_high_ns or finding.throughput)][:top]


def verify(
    run: RunReader,
    analysis: RunAnalysis,
    findings: Sequence[Finding],
    command: Sequence[str],
    listener: Listener,
    *,
    remeasure: bool = False,
) -> tuple[Verification, LlmPerfError | None]:
    """Try each finding alone; what was tried before an interruption is kept in verify.json and shown in the report."""
    values, folder = _values(run), run.folder
    _refuse_another_device(folder, analysis, values)
    base = _base(folder, analysis, values, partial(_run, folder, command, listener), remeasure)
    trials: list[Trial] = []
    interrupted: LlmPerfError | None = None
    for finding in findings:
        trial, error = _try(values, finding, base.timings, partial(_run, folder, command, listener))
        trials.append(trial)
        if isinstance(error, Interrupted):
            interrupted = error
            break
    found = Verification(base.run, base.remeasured, tuple(trials))
    write_record(folder.verify_file, found)
    write_reports(run, replace(analysis, verified=found))
    return found, interrupted


def overridden(values: Mapping[str, Any], overrides: Sequence[str]) -> RunConfig:
    """A run's configuration with some values replaced, unprofiled; a ConfigError where that means nothing."""
    config = with_overrides(values, overrides)
    return replace(config, profiling=compose(["profiling=none"]).config.profiling)


def _values(run: RunReader) -> dict[str, Any]:
    if not run.settings:
        raise ParseError(f"{run.folder.config_file} holds no configuration.", "The run cannot be repeated without it.")
    return run.settings


@dataclass(frozen=True)
class _Base:
    """The times to compare with, whose they are, and why they were taken again: empty where they were not."""

    timings: CleanTimings
    run: str
    remeasured: str = ""


def _base(folder: RunFolder, analysis: RunAnalysis, values: Mapping[str, Any], run_one: RunOne, remeasure: bool) -> _Base:
    timings = analysis.timings
    why = "it was asked for" if remeasure else _other_machine(analysis.env, values)
    if isinstance(timings, Missing) or not timings.iterations:
        why = why or "the run has no unprofiled times"
    elif not why:
        return _Base(timings, folder.path.name)
    run, error = run_one(overridden(values, ()), "base")
    again = run.timings
    if error is not None:
        raise error
    if isinstance(again, Missing) or not again.iterations:
        raise ParseError(f"The base could not be measured again in {run.folder.path}.", "run.json there says why.")
    return _Base(again, run.folder.path.name, why)


def _refuse_another_device(folder: RunFolder, analysis: RunAnalysis, values: Mapping[str, Any]) -> None:
    """A ResourceError where the run was on a GPU that is not here: what a finding says is of that device alone."""
    if not _on_a_gpu(analysis, values):
        return
    ran, gpu = analysis.env.get("gpu"), _here(values).get("gpu")
    name = str(ran.get("name")) if isinstance(ran, Mapping) else "a GPU"
    if not isinstance(gpu, Mapping):
        raise ResourceError(
            f"{folder.path.name} was run on {name}, and this machine has no GPU to try its findings on ({gpu}).",
            "Verify on the machine of the run; without --verify the findings are listed anywhere.",
        )
    if isinstance(ran, Mapping) and gpu.get("name") != ran.get("name"):
        raise ResourceError(
            f"{folder.path.name} was run on {name}, and this machine has {gpu.get('name')}: what is predicted for the one "
            "cannot be tried on the other.",
            "Verify on a machine with that GPU, or run the configuration here and verify that run.",
        )


def _on_a_gpu(analysis: RunAnalysis, values: Mapping[str, Any]) -> bool:
    """By what the run says of its device; where it left no times, by what it was asked for and what its machine had."""
    if not isinstance(analysis.timings, Missing):
        return not analysis.timings.model.device.startswith("cpu")
    hardware = values.get("hardware")
    asked = hardware.get("device") if isinstance(hardware, Mapping) else None
    return asked == "cuda" or (asked != "cpu" and isinstance(analysis.env.get("gpu"), Mapping))


def _here(values: Mapping[str, Any]) -> dict[str, Any]:
    """This machine, with the device that the run's configuration asks for."""
    hardware = values.get("hardware")
    return environment(hardware.get("device_index", 0) if isinstance(hardware, Mapping) else 0)


def _other_machine(env: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    here = _here(values)
    for path in _MACHINE:
        if _fact(env, path) != _fact(here, path):
            return f"the run is of another machine: its {' '.join(path).replace('_', ' ')} differs"
    return ""


def _fact(env: Mapping[str, Any], path: Sequence[str]) -> str:
    value: Any = env
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else value
    return str(value)


def _try(values: Mapping[str, Any], finding: Finding, base: CleanTimings, run_one: RunOne) -> tuple[Trial, LlmPerfError | None]:
    try:
        run, error = run_one(overridden(values, finding.overrides), finding.id)
    except LlmPerfError as raised:
        return unmeasured(finding, raised.fact), raised
    timings, name = run.timings, run.folder.path.name
    if error is not None or isinstance(timings, Missing) or not timings.iterations:
        why = error.fact if error else "it left no unprofiled times"
        return unmeasured(finding, why, name), error
    return measured(finding, base, timings, name), None


def _run(
    folder: RunFolder, command: Sequence[str], listener: Listener, config: RunConfig, name: str
) -> tuple[RunReader, LlmPerfError | None]:
    """A run next to the original, with a report of its own."""
    composed = Composed(config, folder.path.with_name(f"{folder.path.name}-verify-{name}"))
    made, error = capture(composed, command, listener)
    run = RunReader(made)
    report_run(run)
    return run, error

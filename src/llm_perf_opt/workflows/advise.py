"""Findings of a run, and the trying of them: each alone, on the same machine, against the run's unprofiled times."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.trace.document import FindingLine
from llm_perf_opt.analysis.verification import Trial, Verification, measured, unmeasured
from llm_perf_opt.config.composition import Composed, compose, with_overrides
from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.core.errors import Interrupted, LlmPerfError, ParseError, ResourceError
from llm_perf_opt.core.records import CleanTimings, Missing
from llm_perf_opt.core.run_folder import RunFolder, read_values, write_record
from llm_perf_opt.profiling.capture import capture
from llm_perf_opt.profiling.passes import Listener
from llm_perf_opt.profiling.provenance import environment
from llm_perf_opt.workflows.analyze_run import analyze, reread, write_reports

_MACHINE = (("host",), ("cpu", "name"), ("gpu", "name"), ("gpu_driver",))
"""What tells one machine from another in env.json."""


def findings_of(path: Path) -> tuple[RunFolder, RunAnalysis, list[FindingLine]]:
    """The run, analyzed anew, with its findings; a ParseError where it has no sound trace to find anything in."""
    folder, analysis = reread(path)
    trace = analysis.trace
    if isinstance(trace, Missing):
        raise ParseError(f"{path} has no trace to find anything in: {trace.why}.", "Run it with profiling=minimal or full.")
    if not trace.complete:
        raise ParseError(f"Nothing is claimed from an incomplete trace: {trace.why}.", "Record it again.")
    return folder, analysis, trace.findings


def to_try(findings: Sequence[FindingLine], top: int) -> list[FindingLine]:
    """The first findings that are plain configuration and promise something."""
    return [finding for finding in findings if finding.overrides and (finding.saving_high_ns or finding.throughput)][:top]


def verify(
    folder: RunFolder,
    findings: Sequence[FindingLine],
    command: Sequence[str],
    listener: Listener,
    *,
    remeasure: bool = False,
) -> tuple[Verification, LlmPerfError | None]:
    """Try each finding alone; what was tried before an interruption is kept in verify.json and shown in the report."""
    values = _values(folder)
    _refuse_another_device(folder, values)
    base, where, why = _base(folder, values, command, listener, remeasure)
    trials: list[Trial] = []
    interrupted: LlmPerfError | None = None
    for finding in findings:
        trial, error = _try(folder, values, finding, base, command, listener)
        trials.append(trial)
        if isinstance(error, Interrupted):
            interrupted = error
            break
    found = Verification(where, why, tuple(trials))
    write_record(folder.verify_file, found)
    write_reports(folder, analyze(folder))
    return found, interrupted


def overridden(values: Mapping[str, Any], overrides: Sequence[str]) -> RunConfig:
    """A run's configuration with some values replaced, unprofiled; a ConfigError where that means nothing."""
    config = with_overrides(values, overrides)
    return replace(config, profiling=compose(["profiling=none"]).config.profiling)


def _values(folder: RunFolder) -> dict[str, Any]:
    values = read_values(folder.config_file)
    if not values:
        raise ParseError(f"{folder.config_file} holds no configuration.", "The run cannot be repeated without it.")
    return values


def _base(
    folder: RunFolder, values: Mapping[str, Any], command: Sequence[str], listener: Listener, remeasure: bool
) -> tuple[CleanTimings, str, str]:
    """The times to compare with, whose they are, and why they were taken again."""
    analysis = analyze(folder)
    timings = analysis.timings
    why = "it was asked for" if remeasure else _other_machine(analysis.env, values)
    if isinstance(timings, Missing) or not timings.iterations:
        why = why or "the run has no unprofiled times"
    elif not why:
        return timings, folder.path.name, ""
    run, error = _run(folder, overridden(values, ()), "base", command, listener)
    again = analyze(run).timings
    if error is not None:
        raise error
    if isinstance(again, Missing) or not again.iterations:
        raise ParseError(f"The base could not be measured again in {run.path}.", "run.json there says why.")
    return again, run.path.name, why


def _refuse_another_device(folder: RunFolder, values: Mapping[str, Any]) -> None:
    """A ResourceError where the run was on a GPU that is not here: what a finding says is of that device alone."""
    analysis = analyze(folder, traces=False)
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


def _try(
    folder: RunFolder,
    values: Mapping[str, Any],
    finding: FindingLine,
    base: CleanTimings,
    command: Sequence[str],
    listener: Listener,
) -> tuple[Trial, LlmPerfError | None]:
    try:
        config = overridden(values, finding.overrides)
        run, error = _run(folder, config, finding.id, command, listener)
    except LlmPerfError as raised:
        return unmeasured(finding, raised.fact), raised
    timings = analyze(run).timings
    if error is not None or isinstance(timings, Missing) or not timings.iterations:
        why = error.fact if error else "it left no unprofiled times"
        return unmeasured(finding, why, run.path.name), error
    return measured(finding, base, timings, run.path.name), None


def _run(
    folder: RunFolder, config: RunConfig, name: str, command: Sequence[str], listener: Listener
) -> tuple[RunFolder, LlmPerfError | None]:
    """A run beside the original, with a report of its own."""
    composed = Composed(config, folder.path.with_name(f"{folder.path.name}-verify-{name}"))
    run, error = capture(composed, command, listener)
    write_reports(run, analyze(run))
    return run, error

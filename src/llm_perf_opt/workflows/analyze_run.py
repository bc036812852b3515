"""Analyze a run and write its reports. Reads only the run folder, so it works on any machine."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from llm_perf_opt.analysis.cost_model.cost import compute_dtype
from llm_perf_opt.analysis.cpu_budget import cpu_verdict
from llm_perf_opt.analysis.evidence import RunFacts
from llm_perf_opt.analysis.kernels.evidence import STAGES, KernelEvidence
from llm_perf_opt.analysis.limits.binding import NEITHER
from llm_perf_opt.analysis.limits.efficiency import Efficiency, efficiency
from llm_perf_opt.analysis.limits.hardware import Hardware, devices_of, given_hardware, hardware_of_device, more_devices
from llm_perf_opt.analysis.metrics import context_drift, metrics, stage_timings
from llm_perf_opt.analysis.overhead import overheads
from llm_perf_opt.analysis.rank_run import RankRun, rank_run
from llm_perf_opt.analysis.run_analysis import RunAnalysis, measured_inputs, with_weights
from llm_perf_opt.analysis.stability import movement_warnings, run_stability
from llm_perf_opt.analysis.telemetry import TelemetrySummary, device_busy_share, summarize_telemetry
from llm_perf_opt.analysis.trace.document import ON_CPU, TraceAnalysis
from llm_perf_opt.analysis.trace.gpu_metrics import gpu_metric_lines
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.analysis.trace.step_components import with_components
from llm_perf_opt.analysis.trace_analysis import trace_document
from llm_perf_opt.config.passes import trace_files
from llm_perf_opt.core.errors import ConfigError, ImplausibleError, ResourceError
from llm_perf_opt.core.machine_records import Ceilings
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing, TorchPass
from llm_perf_opt.core.run_folder import UNUSABLE, RunFolder
from llm_perf_opt.core.warnings import RunWarning, WarningId
from llm_perf_opt.report.csv import operators_csv, telemetry_csv
from llm_perf_opt.report.html import render_html
from llm_perf_opt.report.kernel_tables import kernels_document
from llm_perf_opt.report.markdown import render_markdown
from llm_perf_opt.report.regions import regions_document
from llm_perf_opt.report.run_document import images_of, operators_document, run_document
from llm_perf_opt.report.stakeholder import summary_document
from llm_perf_opt.workflows.analyze_kernels import analyze_kernels, analyze_regions
from llm_perf_opt.workflows.queries import write_run_tables
from llm_perf_opt.workflows.rank_reader import ONE_OF_MANY
from llm_perf_opt.workflows.run_reader import Damaged, RunReader
from llm_perf_opt.workflows.run_warnings import (
    assumptions_of,
    counter_warnings,
    missing_gpu_metrics,
    partly_collected,
    rank_warnings,
    run_warnings,
    shape_warnings,
)

GROUPS_OF_EVERY_RUN = ("model", "runtime")
"""Groups of settings that every run has."""
GROUPS_OF_ENV = ("cpu", "memory", "packages", "tool", "variables", "working_folder")
"""The keys of env.json whose values are mappings."""
_NOT_READ = Missing("the traces were not read")


def analyze(
    run: RunReader, limits: dict[str, float] | None = None, *, traces: bool = True, like: RunReader | None = None
) -> RunAnalysis:
    """Return the analysis of a run. Without `traces` it is much faster, and kernels and trace are missing.

    `like`: another run on this machine. Its peaks are used if both have the same hardware settings, which include the threads.
    """
    if run.manifest.kind == "serving":
        raise ConfigError(f"{run.folder.path} is a run under load, which has no stages.", "`llm-perf report` shows it.")
    timings = run.timings
    measured = timings if not isinstance(timings, Missing) and timings.iterations else None
    torch, how = _torch(run, measured) if traces else (run.torch, "")
    untimed = timings if isinstance(timings, Missing) else Missing("no iteration was measured")
    stages = stage_timings(measured, torch) if measured else ()
    config, odd_config = _settings(run)
    peaks = _ceilings(like if like and _settings(like)[0].get("hardware") == config.get("hardware") else run)
    distance = _efficiency(run, torch, measured or untimed, limits, peaks)
    kernels, implausible_count = _kernels(run, measured, distance.found) if traces else (_NOT_READ, None)
    summary = _telemetry_summary(run, measured or untimed)
    env, odd_env = environment_of(run)
    costs = overheads(measured, torch, run.wrapped)
    facts = RunFacts(
        timings=measured or untimed,
        efficiency=distance.found,
        kernels=kernels,
        telemetry=summary,
        ceilings=peaks,
        hardware=_datasheet(run, measured, limits) if measured else untimed,
        overheads=costs,
        config=config,
        torch=torch,
        env=env,
    )
    trace = _trace(run, facts) if traces else _NOT_READ
    ranks = rank_run(measured or untimed, run.ranks() if traces else _NOT_READ)
    trace = _of_all_ranks(trace, ranks)
    steadiness = run_stability(measured) if measured else {}
    return RunAnalysis(
        run="/".join(part for part in run.folder.path.parts[-3:] if part != run.folder.path.anchor),
        manifest=run.manifest,
        config=config,
        env=env,
        timings=timings if isinstance(timings, Missing) else with_weights(timings, config),
        metrics=metrics(measured) if measured else (),
        stages=stages,
        drift=context_drift(measured) if measured else untimed,
        efficiency=_on_those_devices(_noted(distance.found, how), trace, facts.timings),
        torch=torch,
        telemetry=summary,
        kernels=kernels,
        overheads=costs,
        warnings=(
            *run_warnings(run.manifest, timings, stages, summary),
            *rank_warnings(ranks),
            *shape_warnings(config),
            *odd_config,
            *odd_env,
            *movement_warnings(steadiness),
            *distance.warnings,
            *counter_warnings(kernels, implausible_count),
            *missing_gpu_metrics(run.manifest, trace),
            *partly_collected(run.manifest, config),
            *(_unkept_tables(run) if traces else ()),
        ),
        assumptions=assumptions_of(timings),
        trace=trace,
        verified=None if isinstance(run.verified, Missing) else run.verified,
        impossible=distance.impossible or implausible_count,
        damaged=run.damage,
        prompts_sha256=run.prompts_sha256,
        inputs=measured_inputs(timings, config),
        stability=steadiness,
        ranks=ranks,
    )


def write_reports(run: RunReader, analysis: RunAnalysis) -> None:
    """Write every report and table of a run; each file is replaced atomically."""
    folder = run.folder
    unwritten = write_run_tables(folder, analysis, run.telemetry)
    if unwritten is not None:
        analysis = _warned(analysis, [RunWarning(WarningId.TABLES_NOT_WRITTEN, unwritten.why)])
    found = analyze_regions(run, analysis.config)
    for name, svg in images_of(analysis).items():
        folder.write(folder.path / name, svg.encode())
    report = run_document(analysis, run.telemetry, found)
    try:
        folder.write(folder.page_file, render_html(report).encode())
    except ResourceError as error:  # jinja2 is not installed; the Markdown pages do not need it
        words = f"No report.html: {error.fact} {error.remedy}"
        analysis = _warned(analysis, [RunWarning(WarningId.PAGE_NOT_WRITTEN, words)])
        report = run_document(analysis, run.telemetry, found)
    if not isinstance(analysis.trace, Missing):
        folder.write_record(folder.findings_file, analysis.trace)
    if analysis.ranks is not None and not isinstance(analysis.ranks.traces, Missing):
        folder.write_record(folder.ranks_file, analysis.ranks.traces)
    if not isinstance(found, Missing):
        folder.write(folder.regions_file, render_markdown(regions_document(found)).encode())
        folder.write_record(folder.regions_json_file, found)
    if not isinstance(analysis.torch, Missing):
        folder.write(folder.ops_csv_file, operators_csv(analysis.torch.operators).encode())
    if not isinstance(run.telemetry, Missing) and not isinstance(analysis.telemetry, Missing):
        folder.write(folder.nvml_csv_file, telemetry_csv(run.telemetry).encode())
    documents = (report, summary_document(analysis), operators_document(analysis), kernels_document(analysis.kernels))
    for file, document in zip(_last_files(folder), documents, strict=True):
        folder.write(file, render_markdown(document).encode())


def _last_files(folder: RunFolder) -> tuple[Path, ...]:
    """Return the pages that every run has, which are written after all other files; report.html needs a package."""
    return folder.report_file, folder.summary_file, folder.operators_file, folder.kernels_file


def is_reported(folder: RunFolder) -> bool:
    """Return whether every report and table of a run was written."""
    return all(file.exists() for file in _last_files(folder))


def report_run(run: RunReader, limits: dict[str, float] | None = None) -> RunAnalysis:
    """Analyze a run and write its reports; `limits` (peak_tflops, bandwidth_gbs) replace those of the configuration."""
    analysis = analyze(run, limits)
    write_reports(run, analysis)
    return analysis


def reread(path: Path) -> tuple[RunReader, RunAnalysis]:
    """Analyze a run and write its reports; if the folder is not writable, add a warning to the analysis instead."""
    run = RunReader.open(path)
    analysis = analyze(run)
    try:
        write_reports(run, analysis)
    except ResourceError as error:
        words = f"The reports of the run were not regenerated: {error.fact}"
        analysis = _warned(analysis, [RunWarning(WarningId.REPORTS_NOT_WRITTEN, words)])
    return run, analysis


def _warned(analysis: RunAnalysis, warnings: Iterable[RunWarning]) -> RunAnalysis:
    return replace(analysis, warnings=(*analysis.warnings, *warnings))


# --- efficiency -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Distance:
    """The distance of a run from the peaks of its device."""

    found: Maybe[Efficiency]
    impossible: ImplausibleError | None = None
    warnings: tuple[RunWarning, ...] = ()


def _efficiency(
    run: RunReader, torch: Maybe[TorchPass], timings: Maybe[CleanTimings], limits: dict[str, float] | None, peaks: Maybe[Ceilings]
) -> _Distance:
    """Return the distance from the peaks; for an implausible figure, no distance, the error and a warning."""
    if isinstance(timings, Missing):
        return _Distance(timings)
    warnings = _peak_warnings(run, _ceilings(run))
    if limits is not None:
        peaks = Missing("other peaks were given for this report")
    try:
        datasheet, at_work = _datasheet(run, timings, limits), device_busy_share(run.telemetry, timings)
        return _Distance(efficiency(timings, torch, datasheet, peaks, at_work), None, warnings)
    except ImplausibleError as error:
        words = f"{error.fact} {error.remedy}"
        return _Distance(Missing(words), error, (*warnings, RunWarning(WarningId.IMPLAUSIBLE, words)))


def _on_those_devices(found: Maybe[Efficiency], trace: Maybe[TraceAnalysis], timings: Maybe[CleanTimings]) -> Maybe[Efficiency]:
    """Return no distance if the peaks are those of fewer devices than the trace shows at work in a stage."""
    if isinstance(trace, Missing):
        return found
    working = [
        sum(any(stage.name == name and stage.kernels for stage in device.stages) for device in trace.devices) for name in STAGES
    ]
    return more_devices(max(working), devices_of(timings)) or _judged_by_budget(found, trace)


def _judged_by_budget(found: Maybe[Efficiency], trace: TraceAnalysis) -> Maybe[Efficiency]:
    """Return the efficiency of a CPU run with verdicts that follow from its budgets."""
    if isinstance(found, Missing) or trace.device != ON_CPU:
        return found
    shares = {table.stage: {row.key: row.share for row in table.rows} for table in trace.budgets}
    stages = []
    for stage in found.stages:
        if stage.verdict == NEITHER and stage.stage in shares and not isinstance(stage.distance, Missing):
            word, because = cpu_verdict(stage.distance, shares[stage.stage])
            stage = replace(stage, verdict=word, because=because)
        stages.append(stage)
    return replace(found, stages=tuple(stages))


def _noted(found: Maybe[Efficiency], note: str) -> Maybe[Efficiency]:
    return found if isinstance(found, Missing) or not note else replace(found, notes=(*found.notes, note))


def _torch(run: RunReader, timings: CleanTimings | None) -> tuple[Maybe[TorchPass], str]:
    """Return the torch pass; without labels of components, with those that the order of its kernels shows, and how."""
    torch = run.torch
    if isinstance(torch, Missing) or not isinstance(torch.parts, Missing) or timings is None:
        return torch, ""
    for recorded in run.traces():
        if not isinstance(recorded, Missing) and recorded.name == "torch":
            usable = recorded.trace.complete and len(recorded.trace.work)
            return with_components(torch, recorded.trace, timings.model) if usable else (torch, "")
    return torch, ""


def _kernels(
    run: RunReader, timings: CleanTimings | None, efficiency: Maybe[Efficiency]
) -> tuple[Maybe[KernelEvidence], ImplausibleError | None]:
    """Return kernels and counters; for an implausible share of the peak, without it and with the error."""
    try:
        return analyze_kernels(run, timings, efficiency), None
    except ImplausibleError as error:
        return analyze_kernels(run, None, efficiency), error


def _datasheet(run: RunReader, timings: CleanTimings, limits: dict[str, float] | None) -> Maybe[Hardware]:
    """Return the peaks that the user gave, now or in the configuration, or else those of the datasheet."""
    given = limits or run.settings.get("hardware")
    if not isinstance(given, dict):
        given = {}
    if given.get("peak_tflops") and given.get("bandwidth_gbs"):
        dtype = compute_dtype(timings.model.dtype)
        return given_hardware(dtype=dtype, peak_tflops=given["peak_tflops"], bandwidth_gbs=given["bandwidth_gbs"])
    return hardware_of_device(timings.model.device_name)


def _ceilings(run: RunReader) -> Maybe[Ceilings]:
    """Return the measured peaks, unless something disturbed the measurement."""
    found = run.ceilings
    if isinstance(found, Missing):
        return found
    return Missing(f"the measured peaks are not used: {'; '.join(found.doubts)}") if found.doubts else found.ceilings


def _peak_warnings(run: RunReader, peaks: Maybe[Ceilings]) -> tuple[RunWarning, ...]:
    """Return a warning if peaks were measured and are not used."""
    if isinstance(run.ceilings, Damaged):
        return (RunWarning(WarningId.PEAKS_NOT_USED, run.ceilings.why),)
    if isinstance(run.ceilings, Missing) or not isinstance(peaks, Missing):
        return ()
    advice = "Run `llm-perf ceilings` on a quiet machine, then repeat the run."
    return (RunWarning(WarningId.PEAKS_NOT_USED, f"{peaks.why[0].upper()}{peaks.why[1:]}. {advice}"),)


def _telemetry_summary(run: RunReader, timings: Maybe[CleanTimings]) -> Maybe[TelemetrySummary]:
    if isinstance(run.telemetry, Missing):
        return run.telemetry
    return timings if isinstance(timings, Missing) else summarize_telemetry(run.telemetry, timings)


# --- trace ------------------------------------------------------------------------------------------------------------


def _trace(run: RunReader, facts: RunFacts) -> Maybe[TraceAnalysis]:
    """Return the analysis of the first complete trace, else of the first incomplete one, else why there is none."""
    incomplete: TraceAnalysis | None = None
    why = []
    for recorded in run.traces():
        if isinstance(recorded, Missing):
            why.append(recorded.why)
            continue
        source = str(trace_files(run.folder)[recorded.name].relative_to(run.folder.path))
        found = trace_document(recorded.trace, replace(facts, trace_pass=recorded.name), source)
        if found.complete:
            return _with_metrics(found, run)
        incomplete = incomplete or found
    return incomplete or Missing("; ".join(why) or _no_trace(run))


def _no_trace(run: RunReader) -> str:
    """Return why no pass left a trace."""
    entries = [entry for name in trace_files(run.folder) if (entry := run.manifest.pass_named(name)) is not None]
    words = [f"{entry.outcome}: {entry.why}".rstrip(".") if entry.why else "left no trace" for entry in entries]
    found = "; ".join(f"the {entry.name} pass {what}" for entry, what in zip(entries, words, strict=True))
    return found or "the run was made without a pass that leaves a trace (torch or nsys)"


def _of_all_ranks(trace: Maybe[TraceAnalysis], ranks: RankRun | None) -> Maybe[TraceAnalysis]:
    """Return the trace without the note that it is of one rank, if the others were read too."""
    if isinstance(trace, Missing) or ranks is None or isinstance(ranks.traces, Missing):
        return trace
    return msgspec.structs.replace(trace, problems=[problem for problem in trace.problems if problem.id != ONE_OF_MANY])


def _with_metrics(found: TraceAnalysis, run: RunReader) -> TraceAnalysis:
    """Add GPU-metric samples from the trace of another pass: torch records none."""
    for recorded in run.traces() if not found.gpu_metrics else ():
        if not isinstance(recorded, Missing) and recorded.trace.complete and len(recorded.trace.samples):
            lines = gpu_metric_lines(recorded.trace, find_stages(recorded.trace))
            return msgspec.structs.replace(found, gpu_metrics=lines)
    return found


def _unkept_tables(run: RunReader) -> list[RunWarning]:
    """Return a warning for each trace whose tables could not be written."""
    read = [trace for trace in run.traces() if not isinstance(trace, Missing)]
    notes = {trace.name: trace.tables.why.rstrip(".") for trace in read if isinstance(trace.tables, Missing)}
    return [RunWarning(WarningId.TRACE_TABLES_NOT_KEPT, f"Trace of the {name} pass: {why}.") for name, why in notes.items()]


# --- settings and environment -----------------------------------------------------------------------------------------


def _settings(run: RunReader) -> tuple[dict[str, Any], list[RunWarning]]:
    """Return the settings of the run, and a warning if config.yaml does not contain the settings of a run."""
    if not run.folder.config_file.exists():
        return {}, []
    if run.manifest.kind == "exec":  # a program has no model or runtime of llm-perf
        return run.settings, []
    odd = [group for group in GROUPS_OF_EVERY_RUN if not isinstance(run.settings.get(group), dict)]
    name = run.folder.config_file.name
    why = f"The settings are unknown: {name} is invalid: {_mappings(odd)}."
    return ({}, [RunWarning(WarningId.SETTINGS_UNKNOWN, why)]) if odd else (run.settings, [])


def _mappings(names: Sequence[str]) -> str:
    return f"{', '.join(names)} must be {'a mapping' if len(names) == 1 else 'mappings'}"


def environment_of(run: RunReader) -> tuple[dict[str, Any], list[RunWarning]]:
    """Return the machine and the software, without invalid groups, and a warning about those."""
    found = run.env
    if isinstance(found, Damaged):
        return {}, [RunWarning(WarningId.ENVIRONMENT_UNKNOWN, f"The environment is unknown: {found.why}")]
    if isinstance(found, Missing):
        return {}, []
    lost = {name: value for name, value in found.items() if isinstance(value, str) and value.startswith(UNUSABLE)}
    odd = [name for name in GROUPS_OF_ENV if not isinstance(found.get(name, {}), dict)]
    shapes = [name for name in odd if name not in lost]
    reasons = [f"{name}: {value.removeprefix(UNUSABLE)}" for name, value in lost.items()]
    reasons += [_mappings(shapes)] if shapes else []
    why = f"{run.folder.env_file.name} is invalid and only partly used: {'; '.join(reasons)}."
    kept = {name: value for name, value in found.items() if name not in odd}
    return kept, [RunWarning(WarningId.ENVIRONMENT_UNKNOWN, why)] if reasons else []

"""raw/ → analysis → reports. Reads nothing but the run folder, so it works on another machine, years later."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from llm_perf_opt.analysis.dtypes import compute_dtype
from llm_perf_opt.analysis.evidence import RunFacts
from llm_perf_opt.analysis.kernels.evidence import STAGES, KernelEvidence
from llm_perf_opt.analysis.latency import context_drift, metrics, stage_timings
from llm_perf_opt.analysis.limits.efficiency import Efficiency, efficiency
from llm_perf_opt.analysis.limits.hardware import (
    Hardware,
    devices_of,
    given_hardware,
    hardware_of_device,
    more_devices,
)
from llm_perf_opt.analysis.measured_inputs import measured_inputs
from llm_perf_opt.analysis.overhead import overheads, without_profiler_events
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.stability import movement_warnings, run_stability
from llm_perf_opt.analysis.telemetry import TelemetrySummary, device_at_work, summarize_telemetry
from llm_perf_opt.analysis.trace.document import TraceAnalysis
from llm_perf_opt.analysis.verification import Verification
from llm_perf_opt.core.errors import ImplausibleError, ParseError, ResourceError
from llm_perf_opt.core.machine_records import Ceilings, Telemetry
from llm_perf_opt.core.records import CleanTimings, Manifest, Maybe, Missing, TorchPass, WrappedPass
from llm_perf_opt.core.run_folder import RunFolder, check_plain, read_record, read_values, write_record, write_whole
from llm_perf_opt.core.stored_ceilings import read_ceilings
from llm_perf_opt.report.csv import operators_csv, telemetry_csv
from llm_perf_opt.report.html import render_html
from llm_perf_opt.report.kernel_tables import kernels_document
from llm_perf_opt.report.markdown import render_markdown
from llm_perf_opt.report.regions import regions_document
from llm_perf_opt.report.run_document import images_of, operators_document, run_document
from llm_perf_opt.report.stakeholder import summary_document
from llm_perf_opt.traces.telemetry import read_telemetry
from llm_perf_opt.traces.timings import damaged_timings, read_timings
from llm_perf_opt.workflows.run_kernels import read_kernels
from llm_perf_opt.workflows.run_regions import read_regions
from llm_perf_opt.workflows.run_tables import write_run_tables
from llm_perf_opt.workflows.run_traces import read_run_trace
from llm_perf_opt.workflows.run_warnings import assumptions_of, counter_warnings, missing_gpu_metrics, run_warnings

R = TypeVar("R")

GROUPS_OF_EVERY_RUN = ("model", "runtime")
"""Groups of settings without which nothing runs."""
GROUPS_OF_ENV = ("cpu", "memory", "packages", "tool", "variables", "working_folder")
"""What is a mapping in env.json."""
_NOT_READ = Missing("the traces were not read")


def analyze(folder: RunFolder, limits: dict[str, float] | None = None, *, traces: bool = True) -> RunAnalysis:
    """Everything that can be said of a run, from what its passes left; without its `traces` a good deal faster."""
    manifest = folder.manifest()
    timings: Maybe[CleanTimings] = _pass_record(manifest, "clean", folder.clean_file, read_timings)
    torch: Maybe[TorchPass] = _pass_record(manifest, "torch", folder.torch_file, _torch_pass)
    measured = timings if not isinstance(timings, Missing) and timings.iterations else None
    untimed = timings if isinstance(timings, Missing) else Missing("no iteration was measured")
    telemetry = _telemetry(folder, manifest)
    stages = stage_timings(measured, torch) if measured else ()
    found, impossible, limit_warnings = _efficiency(folder, manifest, measured or untimed, torch, limits, telemetry)
    kernels, impossible_count = _kernels(folder, measured, found) if traces else (_NOT_READ, None)
    summary: Maybe[TelemetrySummary] = telemetry if isinstance(telemetry, Missing) else untimed
    if measured and not isinstance(telemetry, Missing):
        summary = summarize_telemetry(telemetry, measured)
    config, odd_config = _settings(folder)
    env, odd_env = _env(folder)
    costs = overheads(measured, torch, _wrapped(folder, manifest))
    ceilings = _ceilings(folder, manifest)[0]
    facts = RunFacts(
        timings=measured or untimed,
        efficiency=found,
        kernels=kernels,
        telemetry=summary,
        ceilings=ceilings,
        hardware=_datasheet(folder, measured, limits) if measured else untimed,
        overheads=costs,
        config=config,
    )
    trace, notes = read_run_trace(folder, facts) if traces else (_NOT_READ, ())
    steadiness = run_stability(measured) if measured else {}
    found = _on_those_devices(found, trace, facts.timings)
    return RunAnalysis(
        run="/".join(part for part in folder.path.parts[-3:] if part != folder.path.anchor),
        manifest=manifest,
        config=config,
        env=env,
        timings=timings,
        metrics=metrics(measured) if measured else (),
        stages=stages,
        drift=context_drift(measured) if measured else untimed,
        efficiency=found,
        torch=torch,
        telemetry=summary,
        kernels=kernels,
        overheads=costs,
        warnings=(
            *run_warnings(manifest, timings, stages, summary),
            *odd_config,
            *odd_env,
            *movement_warnings(steadiness),
            *limit_warnings,
            *counter_warnings(kernels, impossible_count),
            *missing_gpu_metrics(manifest, trace),
            *notes,
        ),
        assumptions=assumptions_of(timings),
        trace=trace,
        verified=_verified(folder),
        impossible=impossible or impossible_count,
        damaged=damaged_timings(folder, manifest),
        prompts_sha256=_prompts(folder),
        inputs=measured_inputs(timings, config),
        stability=steadiness,
    )


def write_reports(folder: RunFolder, analysis: RunAnalysis) -> None:
    """Every page and table that is made from the analysis; each appears whole."""
    note = write_run_tables(folder, analysis)
    if note:
        analysis = replace(analysis, warnings=(*analysis.warnings, note))
    found = read_regions(folder, analysis.config)
    samples = _telemetry(folder, analysis.manifest)
    for name, svg in images_of(analysis).items():
        write_whole(folder.path / name, svg.encode())
    report = run_document(analysis, samples, found)
    try:
        write_whole(folder.page_file, render_html(report).encode())
    except ResourceError as error:  # a package that a capturing machine may lack: the Markdown pages need none
        analysis = replace(analysis, warnings=(*analysis.warnings, f"No report.html: {error.fact} {error.remedy}"))
        report = run_document(analysis, samples, found)
    pages = {
        folder.report_file: report,
        folder.summary_file: summary_document(analysis),
        folder.operators_file: operators_document(analysis),
        folder.kernels_file: kernels_document(analysis.kernels),
    }
    for file, document in pages.items():
        write_whole(file, render_markdown(document).encode())
    if not isinstance(analysis.trace, Missing):
        write_record(folder.findings_file, analysis.trace)
    if not isinstance(found, Missing):
        write_whole(folder.regions_file, render_markdown(regions_document(found)).encode())
        write_record(folder.regions_json_file, found)
    if not isinstance(analysis.torch, Missing):
        write_whole(folder.ops_csv_file, operators_csv(analysis.torch.operators).encode())
    if not isinstance(analysis.telemetry, Missing):
        write_whole(folder.nvml_csv_file, telemetry_csv(read_telemetry(folder.telemetry_file)).encode())


def _pass_record(manifest: Manifest, name: str, path: Path, read: Callable[[Path], R]) -> Maybe[R]:
    """A pass's record, or why it is not there."""
    entry = manifest.pass_named(name)
    if entry is None:
        return Missing(f"the run was asked for without the {name} pass")
    if path.exists():
        try:
            return read(path)
        except ParseError as error:
            return Missing(error.fact)
    return Missing(f"the {name} pass is {entry.status}: {entry.why or 'it left no result'}")


def _efficiency(
    folder: RunFolder,
    manifest: Manifest,
    timings: Maybe[CleanTimings],
    torch: Maybe[TorchPass],
    limits: dict[str, float] | None,
    telemetry: Maybe[Telemetry],
) -> tuple[Maybe[Efficiency], ImplausibleError | None, list[str]]:
    """The distance from the limits; or, where a figure cannot be, no such section and the reason as the first thing to read."""
    if isinstance(timings, Missing):
        return timings, None, []
    ceilings, warnings = _ceilings(folder, manifest)
    if limits is not None:
        ceilings = Missing("other limits were given for this report")
    try:
        datasheet, at_work = _datasheet(folder, timings, limits), device_at_work(telemetry, timings)
        return efficiency(timings, torch, datasheet, ceilings, at_work), None, warnings
    except ImplausibleError as error:
        return Missing(f"{error.fact} {error.remedy}"), error, [*warnings, f"{error.fact} {error.remedy}"]


def _on_those_devices(found: Maybe[Efficiency], trace: Maybe[TraceAnalysis], timings: Maybe[CleanTimings]) -> Maybe[Efficiency]:
    """No distance from limits that are of fewer devices than the trace shows at work in a stage."""
    if isinstance(trace, Missing):
        return found
    working = [sum(any(stage.name == name and stage.kernels for stage in one.stages) for one in trace.devices) for name in STAGES]
    return more_devices(max(working), devices_of(timings)) or found


def _kernels(
    folder: RunFolder, timings: CleanTimings | None, efficiency: Maybe[Efficiency]
) -> tuple[Maybe[KernelEvidence], ImplausibleError | None]:
    """Kernels and counters; without the share of the peak where that cannot be."""
    try:
        return read_kernels(folder, timings, efficiency), None
    except ImplausibleError as error:
        return read_kernels(folder, None, efficiency), error


def _wrapped(folder: RunFolder, manifest: Manifest) -> dict[str, WrappedPass]:
    """What the measured process timed below each outside tool."""
    found = {}
    for entry in manifest.passes:
        path = folder.wrapped_file(entry.name)
        if path.exists():
            try:
                found[entry.name] = read_record(path, WrappedPass)
            except ParseError:  # damaged: its overhead is not told, its pass's own record still stands
                continue
    return found


def _torch_pass(path: Path) -> TorchPass:
    return without_profiler_events(read_record(path, TorchPass))


def _verified(folder: RunFolder) -> Verification | None:
    """What became of findings that were tried; a damaged record is as good as none, for the trials' own runs stand."""
    if not folder.verify_file.exists():
        return None
    try:
        return read_record(folder.verify_file, Verification)
    except ParseError:
        return None


def _datasheet(folder: RunFolder, timings: CleanTimings, limits: dict[str, float] | None) -> Maybe[Hardware]:
    """What the user says of the device, now or in the configuration, else the table's entry for its name."""
    given = limits or read_values(folder.config_file).get("hardware")
    if not isinstance(given, dict):
        given = {}
    if given.get("peak_tflops") and given.get("bandwidth_gbs"):
        dtype = compute_dtype(timings.model.dtype)
        return given_hardware(dtype=dtype, peak_tflops=given["peak_tflops"], bandwidth_gbs=given["bandwidth_gbs"])
    return hardware_of_device(timings.model.device_name)


def _ceilings(folder: RunFolder, manifest: Manifest) -> tuple[Maybe[Ceilings], list[str]]:
    """The measured limits and what is to be said of them; figures that something disturbed are no limit."""
    entry = manifest.pass_named("ceilings")
    if entry is None:
        return Missing("the run was asked for without measured ceilings"), []
    if not folder.ceilings_file.exists():
        return Missing(f"the ceilings are {entry.status}: {entry.why or 'none were left'}"), []
    try:
        found = read_ceilings(folder.ceilings_file)
    except ParseError as error:
        return Missing(error.fact), [error.fact]
    if found.doubts:
        why = f"the measured ceilings are not used: {'; '.join(found.doubts)}"
        return Missing(why), [f"{why[0].upper()}{why[1:]}. Run `llm-perf ceilings` on a quiet machine, then the run again."]
    return found.ceilings, []


def _telemetry(folder: RunFolder, manifest: Manifest) -> Maybe[Telemetry]:
    entry = manifest.pass_named("nvml")
    if entry is None:
        return Missing("the run was asked for without telemetry")
    if not folder.telemetry_file.exists():
        return Missing(f"telemetry is {entry.status}: {entry.why or 'it left no result'}")
    try:
        return read_telemetry(folder.telemetry_file)
    except ParseError as error:
        return Missing(error.fact)


def _prompts(folder: RunFolder) -> Maybe[str]:
    if not folder.clean_inputs_file.exists():
        return Missing("it has no record of them")
    try:
        said = read_record(folder.clean_inputs_file, dict[str, Any]).get("sha256")
    except ParseError:
        return Missing("its record of them is damaged")
    return said if isinstance(said, str) and said else Missing("its record of them has no checksum")


def _settings(folder: RunFolder) -> tuple[dict[str, Any], list[str]]:
    """What the run was asked for, and why it is not known: the record is missing, or is YAML but none of a run's settings."""
    if not folder.config_file.exists():
        return {}, []
    values = read_values(folder.config_file)
    odd = [group for group in GROUPS_OF_EVERY_RUN if not isinstance(values.get(group), dict)]
    why = f"The settings are not known: {folder.config_file.name} cannot be right, {', '.join(odd)} should hold names and values."
    return ({}, [why]) if odd else (values, [])


def _env(folder: RunFolder) -> tuple[dict[str, Any], list[str]]:
    """The machine and the software, and what of it cannot be used: a group that is no group is left out."""
    if not folder.env_file.exists():
        return {}, []
    try:
        found = read_record(folder.env_file, dict[str, Any])
        check_plain(found)
    except (ParseError, ValueError) as error:
        why = error.fact if isinstance(error, ParseError) else f"{folder.env_file} cannot be right: {error}."
        return {}, [f"The environment is not known: {why}"]
    odd = [name for name in GROUPS_OF_ENV if not isinstance(found.get(name, {}), dict)]
    why = f"{folder.env_file.name} cannot be right and is used in part: {', '.join(odd)} should hold names and values."
    return {name: value for name, value in found.items() if name not in odd}, [why] if odd else []


def reanalyze(path: Path, limits: dict[str, float] | None = None) -> tuple[RunFolder, RunAnalysis]:
    """Make the reports of an existing run anew; `limits` (peak_tflops, bandwidth_gbs) stand in for the configuration's."""
    folder = RunFolder.open(path)
    analysis = analyze(folder, limits)
    write_reports(folder, analysis)
    return folder, analysis


def reread(path: Path) -> tuple[RunFolder, RunAnalysis]:
    """The same for verbs that show the analysis: where the folder cannot be written to, the reports lack, not the answer."""
    folder = RunFolder.open(path)
    analysis = analyze(folder)
    try:
        write_reports(folder, analysis)
    except ResourceError as error:
        note = f"The run's reports were not made anew: {error.fact}"
        analysis = replace(analysis, warnings=(*analysis.warnings, note))
    return folder, analysis

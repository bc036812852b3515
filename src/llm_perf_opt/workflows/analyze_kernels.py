"""Kernels and NVTX regions of a run or a program, from its timelines and counters."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from llm_perf_opt.analysis.kernels.evidence import (
    PROGRAM,
    STAGES,
    KernelEvidence,
    disagreements,
    hfus_of,
    outcome,
    uses_of,
)
from llm_perf_opt.analysis.kernels.selection import Launch
from llm_perf_opt.analysis.kernels.table import kernel_table
from llm_perf_opt.analysis.limits.efficiency import Efficiency
from llm_perf_opt.analysis.limits.hardware import devices_of, hardware_of_device
from llm_perf_opt.analysis.limits.peaks import RateLimits, limits_of
from llm_perf_opt.analysis.regions.counters import CountedStage
from llm_perf_opt.analysis.regions.records import RegionReport, Selection
from llm_perf_opt.analysis.regions.regions import RegionOptions, regions
from llm_perf_opt.analysis.trace.stage_launches import kernels_per_instance, stage_launches
from llm_perf_opt.config.schema import RegionsConfig
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.machine_records import CounterReport
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing
from llm_perf_opt.core.warnings import RunWarning, WarningId
from llm_perf_opt.counters.catalog import CounterRoles, chip_of_device, roles
from llm_perf_opt.profiling.timelines import Refused, Timeline
from llm_perf_opt.profiling.vendor.ncu import asked_counters
from llm_perf_opt.traces.events import Trace, WorkKind
from llm_perf_opt.traces.projection import NONE, Projection, project, step_of_work
from llm_perf_opt.workflows.run_reader import Damaged, RunReader, Untested

_UNTIMED = Missing("no iteration was measured")
_COUNTING = (*(f"ncu_{stage}" for stage in STAGES), "ncu")
"""The passes whose counters are of the program itself."""


def analyze_kernels(run: RunReader, timings: CleanTimings | None, efficiency: Maybe[Efficiency]) -> Maybe[KernelEvidence]:
    """Return the kernels by stage with their counters, or why the run has none."""
    recorded = _launches(run)
    launches, why = recorded.of_stage, recorded.why
    if not launches:
        return Missing("; ".join(why) or "the run was asked for without a pass that records kernels")
    reports = {stage: run.counters(f"ncu_{stage}") for stage in launches}
    uses = [use for stage, members in launches.items() for use in uses_of(stage, members)]
    stages = kernel_table(uses, reports, _roles(reports, timings), limits=_limits(reports, timings, efficiency))
    steps = len({launch.step for launch in launches.get("decode", [])})
    counted = [what_was_counted(run, f"ncu_{one.stage}", one.stage, reports[one.stage], one.counters) for one in stages]
    notes = [*why, *(note for one in counted for note in one.notes)]
    told = (warning for one in counted for warning in one.warnings)
    warnings = tuple(dict.fromkeys((*recorded.warnings, *told)))
    devices = {stage: len({launch.device for launch in members}) for stage, members in launches.items()}
    hfus = hfus_of(stages, steps, timings, efficiency, devices)
    sharing = devices_of(timings or _UNTIMED)
    return KernelEvidence(recorded.sources, steps, stages, hfus, run.selftest, tuple(notes), devices, sharing, warnings)


@dataclass(frozen=True)
class _Launches:
    of_stage: dict[str, list[Launch]]
    """Of the first timeline that has any."""
    sources: dict[str, str]
    why: list[str]
    """What could not be used."""
    warnings: tuple[RunWarning, ...]


def _launches(run: RunReader) -> _Launches:
    found: dict[str, list[Launch]] = {}
    sources: dict[str, str] = {}
    why: list[str] = []
    warnings: list[RunWarning] = []
    counts: dict[str, dict[str, float]] = {}
    for timeline in run.timelines:
        if not isinstance(timeline, Timeline):
            why += [timeline.why] if len(found) < len(STAGES) else []
            warnings += [RunWarning(WarningId.TRACE_NOT_USED, _sentence(timeline))] if isinstance(timeline, Refused) else []
            continue
        projection = project(timeline.trace)
        each = {name: kernels_per_instance(timeline.trace, projection, stage) for name, stage in STAGES.items()}
        counts[timeline.source] = {name: count for name, count in each.items() if count is not None}
        if len(found) == len(STAGES):
            continue
        before = len(found)
        inside = {name: stage_launches(timeline.trace, projection, stage) for name, stage in STAGES.items()}
        for name, launches in inside.items():
            if name not in found and launches:
                found[name], sources[name] = launches, timeline.source
        if len(found) > before:
            why += _outside(timeline, sum(len(launches) for launches in inside.values()))
        if not len(timeline.trace.work):
            why.append(f"{timeline.source} recorded no work of a GPU: the run is on the CPU")
    stages = {name: found[name] for name in STAGES if name in found}
    return _Launches(stages, sources, why, (*warnings, *disagreements(counts)))


def _sentence(missing: Missing) -> str:
    return f"{missing.why[0].upper()}{missing.why[1:]}."


def _outside(timeline: Timeline, inside: int) -> list[str]:
    """Kernels of a timeline that no stage holds: they are in none of the tables."""
    kernels = int((timeline.trace.work.kind == WorkKind.KERNEL).sum())
    if kernels <= inside:
        return []
    words = f"{kernels - inside:,} of {kernels:,} kernels of {timeline.source} were launched outside prefill and the decode steps"
    return [f"{words}; they are in no table here."]


def _roles(reports: dict[str, Maybe[CounterReport]], timings: CleanTimings | None) -> Maybe[CounterRoles]:
    """What the counters of the chip mean that they were read on."""
    for report in reports.values():
        if not isinstance(report, Missing):
            return roles_of(report, timings.model.device_name if timings else "")
    return Missing("no counters were read")


def roles_of(report: CounterReport, device_name: str = "") -> Maybe[CounterRoles]:
    """What the counters mean on the chip that the report names, or on that of the device."""
    name = report.facts.get("device_name") or device_name
    chip = chip_of_device(name) if name else Missing("the counters do not say which GPU they are of")
    return chip if isinstance(chip, Missing) else roles(chip)


def _limits(reports: dict[str, Maybe[CounterReport]], timings: CleanTimings | None, efficiency: Maybe[Efficiency]) -> RateLimits:
    """Of the device that the counters are of."""
    names = [report.facts.get("device_name", "") for report in reports.values() if not isinstance(report, Missing)]
    name = next((name for name in names if name), timings.model.device_name if timings else "")
    roofs = () if isinstance(efficiency, Missing) else efficiency.peak_sets
    return limits_of(hardware_of_device(name), next((roof for roof in roofs if roof.name == "datasheet"), None))


@dataclass(frozen=True)
class WhatWasCounted:
    """What is to be said of a pass of Nsight Compute."""

    notes: tuple[str, ...] = ()
    warnings: tuple[RunWarning, ...] = ()
    """Counters that were read and are not used for want of a verdict; less counted than planned."""


def what_was_counted(run: RunReader, name: str, stage: str, report: Maybe[CounterReport], joined: Maybe[float]) -> WhatWasCounted:
    """What a pass was told to count in a stage, what it counted (`joined`: the share of the stage's time), what was left out."""
    warnings = [RunWarning(WarningId.COUNTERS_UNTESTED, _sentence(report))] if isinstance(report, Untested) else []
    chosen = run.selection(name)
    if isinstance(chosen, Missing):
        return WhatWasCounted((chosen.why,) if isinstance(chosen, Damaged) else (), tuple(warnings))
    launches: Maybe[int] = report if isinstance(report, Missing) else len(report.kernels)
    found = outcome(chosen, stage, launches, joined)
    warnings += [found.warning] if found.warning else []
    return WhatWasCounted((found.note, *chosen.notes), tuple(warnings))


# --- regions ----------------------------------------------------------------------------------------------------------


def analyze_regions(run: RunReader, config: Mapping[str, Any]) -> Maybe[RegionReport]:
    """Return every NVTX region with what it launched, from the run's best timeline, or why the run has none."""
    why = []
    for timeline in run.timelines:
        if isinstance(timeline, Timeline):
            return _region_report(run, timeline.trace, _options(config))
        why.append(timeline.why)
    return Missing("; ".join(why) or "the run was asked for without a pass that records a timeline")


def _region_report(run: RunReader, trace: Trace, options: RegionOptions) -> RegionReport:
    projection = project(trace)
    counted, notes = _counted(run, trace, projection)
    shown = _shown(run, counted)
    return replace(regions(trace, replace(options, counters=shown), counted, projection), notes=tuple(notes))


def _options(config: Mapping[str, Any]) -> RegionOptions:
    """As the run was configured; a run of an earlier version shows everything."""
    profiling = config.get("profiling")
    asked = profiling.get("regions") if isinstance(profiling, dict) else None
    if asked is None:
        return RegionOptions()
    try:
        found = msgspec.convert(asked, RegionsConfig)
    except msgspec.ValidationError as error:
        raise ParseError(f"config.yaml: profiling.regions cannot be read: {error}.") from error
    return RegionOptions(
        aggregate=found.aggregate,
        kernels=Selection(found.kernels_include, found.kernels_exclude),
        regions=Selection(found.include, found.exclude),
    )


def _counted(run: RunReader, trace: Trace, projection: Projection) -> tuple[list[CountedStage], list[str]]:
    """What was counted in each stage, with the kernels of the trace that it stands for; and why a stage has none."""
    inside = {f"ncu_{name}": (name, step_of_work(trace, projection, stage) != NONE) for name, stage in STAGES.items()}
    inside["ncu"] = (PROGRAM, projection.call_of_work != NONE)
    found: list[CountedStage] = []
    notes: list[str] = []
    for name, (stage, work) in inside.items():
        if run.manifest.pass_named(name) is None:
            continue
        report = run.counters(name)
        fatal = None if isinstance(report, Missing) else next((one for one in report.problems if one.fatal), None)
        if isinstance(report, Missing):
            notes.append(f"Counters of {stage}: {report}.")
        elif fatal is not None:
            notes.append(f"Counters of {stage}: n/a: they cannot be believed: {fatal.what}")
        else:
            found.append(CountedStage(stage, work, report.kernels, report.units))
    return found, notes


def _shown(run: RunReader, counted: list[CountedStage]) -> tuple[str, ...]:
    """The counters that were asked for, had or not; the tool's table holds every other form of them too. Of a section's, all."""
    if not counted:
        return ()
    entries = [run.manifest.pass_named(name) for name in _COUNTING]
    asked = [asked_counters(entry.argv) for entry in entries if entry is not None]
    names = {name for one in asked for name in one.metrics}
    if any(one.whole_groups for one in asked):
        # without a suffix it is a fact of the device or the launch
        names |= {name for stage in counted for kernel in stage.kernels for name in kernel.counters if "." in name}
    return tuple(sorted(names))

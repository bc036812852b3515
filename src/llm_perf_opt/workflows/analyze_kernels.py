"""Kernels and NVTX regions of a run or a program, from its timelines and counters."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from llm_perf_opt.analysis.kernels.evidence import PROGRAM, STAGES, KernelEvidence, disagreements, hfus_of, outcome, uses_of
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
from llm_perf_opt.workflows.run_reader import COUNTING_PASSES, Damaged, RunReader, Untested

_UNTIMED = Missing("no iteration was measured")


def analyze_kernels(run: RunReader, timings: CleanTimings | None, efficiency: Maybe[Efficiency]) -> Maybe[KernelEvidence]:
    """Return the kernels by stage with their counters, or why the run has none."""
    recorded = _launches(run)
    launches, why = recorded.of_stage, recorded.why
    if not launches:
        return Missing("; ".join(why) or "no requested pass records kernels")
    reports = {stage: run.counters(f"ncu_{stage}") for stage in launches}
    uses = [use for stage, members in launches.items() for use in uses_of(stage, members)]
    stages = kernel_table(uses, reports, _roles(reports, timings), limits=_limits(reports, timings, efficiency))
    steps = len({launch.step for launch in launches.get("decode", [])})
    counted = [counting_notes(run, f"ncu_{stage.stage}", stage.stage, reports[stage.stage], stage.counters) for stage in stages]
    notes = [*why, *(note for pass_notes in counted for note in pass_notes.notes)]
    warnings = tuple(dict.fromkeys((*recorded.warnings, *(warning for pass_notes in counted for warning in pass_notes.warnings))))
    devices = {stage: len({launch.device for launch in members}) for stage, members in launches.items()}
    hfus = hfus_of(stages, steps, timings, efficiency, devices)
    sharing = devices_of(timings or _UNTIMED)
    return KernelEvidence(recorded.sources, steps, stages, hfus, run.selftest, tuple(notes), devices, sharing, warnings)


@dataclass(frozen=True)
class _Launches:
    """The launches of each stage, from the first timeline that has any."""

    of_stage: dict[str, list[Launch]]
    sources: dict[str, str]
    why: list[str]
    """What could not be used, with the reason."""
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
            why += _outside_stages(timeline, sum(len(launches) for launches in inside.values()))
        if not len(timeline.trace.work):
            why.append(f"{timeline.source} recorded no GPU work: the run is on the CPU")
    stages = {name: found[name] for name in STAGES if name in found}
    return _Launches(stages, sources, why, (*warnings, *disagreements(counts)))


def _sentence(missing: Missing) -> str:
    return f"{missing.why[0].upper()}{missing.why[1:]}."


def _outside_stages(timeline: Timeline, inside: int) -> list[str]:
    """Return a note about kernels that are in no stage, and so in no table."""
    kernels = int((timeline.trace.work.kind == WorkKind.KERNEL).sum())
    if kernels <= inside:
        return []
    words = f"{kernels - inside:,} of {kernels:,} kernels of {timeline.source} were launched outside prefill and the decode steps"
    return [f"{words}; they are in no table."]


def _roles(reports: dict[str, Maybe[CounterReport]], timings: CleanTimings | None) -> Maybe[CounterRoles]:
    """Return the roles of the counters on the chip they were read on."""
    for report in reports.values():
        if not isinstance(report, Missing):
            return roles_of(report, timings.model.device_name if timings else "")
    return Missing("no counters were read")


def roles_of(report: CounterReport, device_name: str = "") -> Maybe[CounterRoles]:
    """Return the roles of the counters on the chip that the report names, or else on the chip of the device."""
    name = report.facts.get("device_name") or device_name
    chip = chip_of_device(name) if name else Missing("the counters do not name their GPU")
    return chip if isinstance(chip, Missing) else roles(chip)


def _limits(reports: dict[str, Maybe[CounterReport]], timings: CleanTimings | None, efficiency: Maybe[Efficiency]) -> RateLimits:
    """Return the peaks of the device that the counters were read on."""
    names = [report.facts.get("device_name", "") for report in reports.values() if not isinstance(report, Missing)]
    name = next((name for name in names if name), timings.model.device_name if timings else "")
    roofs = () if isinstance(efficiency, Missing) else efficiency.peak_sets
    return limits_of(hardware_of_device(name), next((roof for roof in roofs if roof.name == "datasheet"), None))


@dataclass(frozen=True)
class CountingNotes:
    """Notes and warnings about a pass of Nsight Compute."""

    notes: tuple[str, ...] = ()
    warnings: tuple[RunWarning, ...] = ()
    """Counters that are not used because no self-test checked them, or fewer counted than planned."""


def counting_notes(run: RunReader, name: str, stage: str, report: Maybe[CounterReport], joined: Maybe[float]) -> CountingNotes:
    """Return what a pass was to count in a stage, what it counted (`joined`: the share of the stage's time) and left out."""
    warnings = [RunWarning(WarningId.COUNTERS_UNTESTED, _sentence(report))] if isinstance(report, Untested) else []
    chosen = run.selection(name)
    if isinstance(chosen, Missing):
        return CountingNotes((chosen.why,) if isinstance(chosen, Damaged) else (), tuple(warnings))
    launches: Maybe[int] = report if isinstance(report, Missing) else len(report.kernels)
    found = outcome(chosen, stage, launches, joined)
    warnings += [found.warning] if found.warning else []
    return CountingNotes((found.note, *chosen.notes), tuple(warnings))


# --- regions ----------------------------------------------------------------------------------------------------------


def analyze_regions(run: RunReader, config: Mapping[str, Any]) -> Maybe[RegionReport]:
    """Return every NVTX region with its launches, from the best timeline of the run, or why there is none."""
    why = []
    for timeline in run.timelines:
        if isinstance(timeline, Timeline):
            return _region_report(run, timeline.trace, _options(config))
        why.append(timeline.why)
    return Missing("; ".join(why) or "no requested pass records a timeline")


def _region_report(run: RunReader, trace: Trace, options: RegionOptions) -> RegionReport:
    projection = project(trace)
    counted, notes = _stage_counters(run, trace, projection)
    shown = _shown_counters(run, counted)
    return replace(regions(trace, replace(options, counters=shown), counted, projection), notes=tuple(notes))


def _options(config: Mapping[str, Any]) -> RegionOptions:
    """Return the options in the configuration of the run; without any, as in earlier versions, show everything."""
    profiling = config.get("profiling")
    options = profiling.get("regions") if isinstance(profiling, dict) else None
    if options is None:
        return RegionOptions()
    try:
        found = msgspec.convert(options, RegionsConfig)
    except msgspec.ValidationError as error:
        raise ParseError(f"config.yaml: profiling.regions cannot be read: {error}.") from error
    return RegionOptions(
        aggregate=found.aggregate,
        kernels=Selection(found.kernels_include, found.kernels_exclude),
        regions=Selection(found.include, found.exclude),
    )


def _stage_counters(run: RunReader, trace: Trace, projection: Projection) -> tuple[list[CountedStage], list[str]]:
    """Return the counters of each stage with the kernels of the trace they apply to, and why a stage has none."""
    inside = {f"ncu_{name}": (name, step_of_work(trace, projection, stage) != NONE) for name, stage in STAGES.items()}
    inside["ncu"] = (PROGRAM, projection.call_of_work != NONE)
    found: list[CountedStage] = []
    notes: list[str] = []
    for name, (stage, work) in inside.items():
        if run.manifest.pass_named(name) is None:
            continue
        report = run.counters(name)
        fatal = None if isinstance(report, Missing) else next((problem for problem in report.problems if problem.fatal), None)
        if isinstance(report, Missing):
            notes.append(f"Counters of {stage}: {report}.")
        elif fatal is not None:
            notes.append(f"Counters of {stage}: n/a: they are not valid: {fatal.what}")
        else:
            found.append(CountedStage(stage, work, report.kernels, report.units))
    return found, notes


def _shown_counters(run: RunReader, counted: list[CountedStage]) -> tuple[str, ...]:
    """Return the requested counters, and every counter of the requested sections: ncu also reports other forms of them."""
    if not counted:
        return ()
    entries = [run.manifest.pass_named(name) for name in COUNTING_PASSES]
    requested = [asked_counters(entry.argv) for entry in entries if entry is not None]
    names = {name for counters in requested for name in counters.metrics}
    if any(counters.whole_groups for counters in requested):
        # a name without a suffix is a fact about the device or the launch
        names |= {name for stage in counted for kernel in stage.kernels for name in kernel.counters if "." in name}
    return tuple(sorted(names))

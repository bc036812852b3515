"""Reads what a run holds of its kernels: timelines, counters, the counters' self-test. Works on any machine."""

from dataclasses import dataclass, replace

from llm_perf_opt.analysis.kernels.counter_selftest import SelfTest
from llm_perf_opt.analysis.kernels.evidence import STAGES, KernelEvidence, disagreements, hfus_of, outcome, uses_of
from llm_perf_opt.analysis.kernels.selection import Launch, Selection
from llm_perf_opt.analysis.kernels.table import kernel_table
from llm_perf_opt.analysis.limits.efficiency import Efficiency
from llm_perf_opt.analysis.limits.hardware import devices_of, hardware_of_device
from llm_perf_opt.analysis.limits.roofs import RateLimits, limits_of
from llm_perf_opt.analysis.trace.stage_launches import kernels_per_instance, stage_launches
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.kernel_records import CounterProblem, CounterReport
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing
from llm_perf_opt.core.run_folder import RunFolder, read_record
from llm_perf_opt.core.stages import DOMAIN
from llm_perf_opt.counters.catalog import chip_of_device
from llm_perf_opt.counters.roles import CounterRoles, roles
from llm_perf_opt.profiling.timelines import Refused, Timeline, timelines
from llm_perf_opt.traces.events import WorkKind
from llm_perf_opt.traces.ncu_csv import read_ncu
from llm_perf_opt.traces.projection import project

_SELFTEST = "ncu_selftest"
_UNTIMED = Missing("no iteration was measured")
_TEST_AGAIN = "Repeat the run: whenever counters are read, work of known size is counted first"


def read_kernels(folder: RunFolder, timings: CleanTimings | None, efficiency: Maybe[Efficiency]) -> Maybe[KernelEvidence]:
    """Kernels by stage with their counters, or why the run has none."""
    recorded = _launches(folder)
    launches, why = recorded.of_stage, recorded.why
    if not launches:
        return Missing("; ".join(why) or "the run was asked for without a pass that records kernels")
    reports = {stage: believed_counters(folder, f"ncu_{stage}") for stage in launches}
    uses = [use for stage, members in launches.items() for use in uses_of(stage, members)]
    stages = kernel_table(uses, reports, _roles(reports, timings), limits=_limits(reports, timings, efficiency))
    steps = len({launch.step for launch in launches.get("decode", [])})
    counted = [
        what_was_counted(folder, f"ncu_{stage.stage}", stage.stage, reports[stage.stage], stage.counters) for stage in stages
    ]
    notes = [*why, *(note for one in counted for note in one.notes)]
    told = (warning for one in counted for warning in one.warnings)
    warnings = tuple(dict.fromkeys((*recorded.warnings, *told)))
    devices = {stage: len({launch.device for launch in members}) for stage, members in launches.items()}
    hfus = hfus_of(stages, steps, timings, efficiency, devices)
    sharing = devices_of(timings or _UNTIMED)
    return KernelEvidence(recorded.sources, steps, stages, hfus, read_selftest(folder), tuple(notes), devices, sharing, warnings)


@dataclass(frozen=True)
class _Launches:
    of_stage: dict[str, list[Launch]]
    """Of the first timeline that has any."""
    sources: dict[str, str]
    why: list[str]
    """What could not be used."""
    warnings: tuple[str, ...]


def _launches(folder: RunFolder) -> _Launches:
    found: dict[str, list[Launch]] = {}
    sources: dict[str, str] = {}
    why: list[str] = []
    warnings: list[str] = []
    counts: dict[str, dict[str, float]] = {}
    for timeline in timelines(folder):
        if not isinstance(timeline, Timeline):
            why += [timeline.why] if len(found) < len(STAGES) else []
            warnings += [f"{timeline.why[0].upper()}{timeline.why[1:]}."] if isinstance(timeline, Refused) else []
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


def _outside(timeline: Timeline, inside: int) -> list[str]:
    """Kernels of a timeline that no stage holds: they are in none of the tables."""
    kernels = int((timeline.trace.work.kind == WorkKind.KERNEL).sum())
    if kernels <= inside:
        return []
    words = f"{kernels - inside:,} of {kernels:,} kernels of {timeline.source} were launched outside prefill and the decode steps"
    return [f"{words}; they are in no table here."]


def read_selftest(folder: RunFolder) -> Maybe[SelfTest]:
    """The verdict on the counters, or why there is none."""
    entry = folder.manifest().pass_named(_SELFTEST)
    if entry is None:
        return Missing("no self-test was run")
    if not folder.selftest_file.exists():
        return Missing(f"the self-test is {entry.status}: {entry.why}" if entry.why else "the self-test left no verdict")
    try:
        return read_record(folder.selftest_file, SelfTest)
    except ParseError as error:
        return Missing(error.fact)


def believed_counters(folder: RunFolder, name: str) -> Maybe[CounterReport]:
    """What a pass counted, or why there is nothing to believe. A pass that was cut short still counted what it counted."""
    entry = folder.manifest().pass_named(name)
    if entry is None:
        return Missing("the run was asked for without Nsight Compute")
    selftest = read_selftest(folder)
    if isinstance(selftest, SelfTest) and selftest.doubt is not None:
        return selftest.doubt
    if not folder.counters_file(name).exists():
        return Missing(f"{name} is {entry.status}: {entry.why or 'it left no counters'}")
    if isinstance(selftest, Missing):
        return Missing(f"the counters are not used, for nothing says that they are right: {selftest.why}. {_TEST_AGAIN}")
    try:
        return _of_its_stage(read_ncu(folder.counters_file(name)), name)
    except ParseError as error:
        return Missing(error.fact)


def _of_its_stage(report: CounterReport, name: str) -> Maybe[CounterReport]:
    """Without launches that the report itself places outside the stage of this pass: prefill never stands for decode."""
    stage = next((stage for key, stage in STAGES.items() if name == f"ncu_{key}"), None)
    if stage is None or not any(kernel.ranges for kernel in report.kernels):
        return report
    inside = tuple(kernel for kernel in report.kernels if f"{DOMAIN}@{stage}" in kernel.ranges)
    if len(inside) == len(report.kernels):
        return report
    what = f"{len(report.kernels) - len(inside):,} of {len(report.kernels):,} launches in {name} were not counted in {stage}"
    if not inside:
        return Missing(f"{what}: the counters are of something else")
    return replace(report, kernels=inside, problems=(*report.problems, CounterProblem("other_ranges", what, fatal=False)))


def _roles(reports: dict[str, Maybe[CounterReport]], timings: CleanTimings | None) -> Maybe[CounterRoles]:
    """What the counters of the chip mean that they were read on."""
    for report in reports.values():
        if not isinstance(report, Missing):
            name = report.facts.get("device_name") or (timings.model.device_name if timings else "")
            chip = chip_of_device(name) if name else Missing("the counters do not say which GPU they are of")
            return chip if isinstance(chip, Missing) else roles(chip)
    return Missing("no counters were read")


def _limits(reports: dict[str, Maybe[CounterReport]], timings: CleanTimings | None, efficiency: Maybe[Efficiency]) -> RateLimits:
    """Of the device that the counters are of."""
    names = [report.facts.get("device_name", "") for report in reports.values() if not isinstance(report, Missing)]
    name = next((name for name in names if name), timings.model.device_name if timings else "")
    roofs = () if isinstance(efficiency, Missing) else efficiency.roofs
    return limits_of(hardware_of_device(name), next((roof for roof in roofs if roof.name == "datasheet"), None))


@dataclass(frozen=True)
class WhatWasCounted:
    """What is to be said of a pass of Nsight Compute."""

    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """Counters that were read and are not used for want of a verdict; less counted than planned."""


def what_was_counted(
    folder: RunFolder, name: str, stage: str, report: Maybe[CounterReport], joined: Maybe[float]
) -> WhatWasCounted:
    """What a pass was told to count in a stage, what it counted (`joined`: the share of the stage's time), what was left out."""
    untested = (f"{report.why[0].upper()}{report.why[1:]}.",) if isinstance(report, Missing) and _TEST_AGAIN in report.why else ()
    path = folder.selection_file(name)
    if not path.exists():
        return WhatWasCounted((), untested)
    try:
        chosen = read_record(path, Selection)
    except ParseError as error:
        return WhatWasCounted((error.fact,), untested)
    launches: Maybe[int] = report if isinstance(report, Missing) else len(report.kernels)
    found = outcome(chosen, stage, launches, joined)
    return WhatWasCounted((found.note, *chosen.notes), (*untested, *([found.warning] if found.warning else [])))

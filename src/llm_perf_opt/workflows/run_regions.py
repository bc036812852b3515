"""The NVTX regions of a run, from its best timeline, with the counters that were read."""

from dataclasses import replace
from typing import Any

import msgspec

from llm_perf_opt.analysis.kernels.evidence import PROGRAM, STAGES
from llm_perf_opt.analysis.regions.counters import CountedStage
from llm_perf_opt.analysis.regions.patterns import Selection
from llm_perf_opt.analysis.regions.records import RegionReport
from llm_perf_opt.analysis.regions.regions import RegionOptions, regions
from llm_perf_opt.config.schema import RegionsConfig
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.profiling.timelines import Timeline, timelines
from llm_perf_opt.profiling.vendor.ncu import asked_counters
from llm_perf_opt.traces.events import Trace
from llm_perf_opt.traces.projection import NONE, Projection, project, step_of_work
from llm_perf_opt.workflows.run_kernels import believed_counters

_COUNTING = (*(f"ncu_{stage}" for stage in STAGES), "ncu")
"""The passes whose counters are of the program itself."""


def read_regions(folder: RunFolder, config: dict[str, Any]) -> Maybe[RegionReport]:
    """Every region with what it launched, or why the run has no timeline."""
    why = []
    for timeline in timelines(folder):
        if isinstance(timeline, Timeline):
            return _report(folder, timeline.trace, _options(config))
        why.append(timeline.why)
    return Missing("; ".join(why) or "the run was asked for without a pass that records a timeline")


def _report(folder: RunFolder, trace: Trace, options: RegionOptions) -> RegionReport:
    projection = project(trace)
    counted, notes = _counted(folder, trace, projection)
    shown = _shown(folder, counted)
    return replace(regions(trace, replace(options, counters=shown), counted, projection), notes=tuple(notes))


def _options(config: dict[str, Any]) -> RegionOptions:
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


def _counted(folder: RunFolder, trace: Trace, projection: Projection) -> tuple[list[CountedStage], list[str]]:
    """What was counted in each stage, with the kernels of the trace that it stands for; and why a stage has none."""
    inside = {f"ncu_{name}": (name, step_of_work(trace, projection, stage) != NONE) for name, stage in STAGES.items()}
    inside["ncu"] = (PROGRAM, projection.call_of_work != NONE)
    found: list[CountedStage] = []
    notes: list[str] = []
    for name, (stage, work) in inside.items():
        if folder.manifest().pass_named(name) is None:
            continue
        report = believed_counters(folder, name)
        fatal = None if isinstance(report, Missing) else next((one for one in report.problems if one.fatal), None)
        if isinstance(report, Missing):
            notes.append(f"Counters of {stage}: {report}.")
        elif fatal is not None:
            notes.append(f"Counters of {stage}: n/a: they cannot be believed: {fatal.what}")
        else:
            found.append(CountedStage(stage, work, report.kernels, report.units))
    return found, notes


def _shown(folder: RunFolder, counted: list[CountedStage]) -> tuple[str, ...]:
    """The counters that were asked for, had or not; the tool's table holds every other form of them too. Of a section's, all."""
    if not counted:
        return ()
    entries = [folder.manifest().pass_named(name) for name in _COUNTING]
    asked = [asked_counters(entry.argv) for entry in entries if entry is not None]
    names = {name for one in asked for name in one.metrics}
    if any(one.whole_groups for one in asked):
        # without a suffix it is a fact of the device or the launch
        names |= {name for stage in counted for kernel in stage.kernels for name in kernel.counters if "." in name}
    return tuple(sorted(names))

"""Reads what a run holds of its kernels: timelines, counters, the counters' self-test. Works on any machine."""

from llm_perf_opt.analysis.counter_selftest import SelfTest
from llm_perf_opt.analysis.device_limits import devices_of
from llm_perf_opt.analysis.efficiency import Efficiency
from llm_perf_opt.analysis.kernel_evidence import STAGES, KernelEvidence, hfus_of, uses_of
from llm_perf_opt.analysis.kernel_selection import Launch, Selection
from llm_perf_opt.analysis.kernel_table import kernel_table
from llm_perf_opt.analysis.projection import project
from llm_perf_opt.analysis.stage_launches import stage_launches
from llm_perf_opt.counters.catalogue import chip_of_device
from llm_perf_opt.counters.roles import CounterRoles, roles
from llm_perf_opt.errors import ParseError
from llm_perf_opt.events import WorkKind
from llm_perf_opt.kernel_records import CounterReport
from llm_perf_opt.parsers.ncu_csv import read_ncu
from llm_perf_opt.records import CleanTimings, Maybe, Missing
from llm_perf_opt.run_folder import RunFolder, read_record
from llm_perf_opt.timelines import Timeline, timelines

_SELFTEST = "ncu_selftest"
_UNTIMED = Missing("no iteration was measured")


def read_kernels(folder: RunFolder, timings: CleanTimings | None, efficiency: Maybe[Efficiency]) -> Maybe[KernelEvidence]:
    """Kernels by stage with their counters, or why the run has none."""
    launches, sources, why = _launches(folder)
    if not launches:
        return Missing("; ".join(why) or "the run was asked for without a pass that records kernels")
    reports = {stage: believed_counters(folder, f"ncu_{stage}") for stage in launches}
    uses = [use for stage, members in launches.items() for use in uses_of(stage, members)]
    stages = kernel_table(uses, reports, _roles(reports, timings))
    steps = len({launch.step for launch in launches.get("decode", [])})
    notes = [*why, *(note for stage in launches for note in selection_notes(folder, f"ncu_{stage}", stage))]
    devices = {stage: len({launch.device for launch in members}) for stage, members in launches.items()}
    hfus = hfus_of(stages, steps, timings, efficiency, devices)
    sharing = devices_of(timings or _UNTIMED)
    return KernelEvidence(sources, steps, stages, hfus, read_selftest(folder), tuple(notes), devices, sharing)


def _launches(folder: RunFolder) -> tuple[dict[str, list[Launch]], dict[str, str], list[str]]:
    """Per stage the launches of the first timeline that has any; where they are from; what could not be used."""
    found: dict[str, list[Launch]] = {}
    sources: dict[str, str] = {}
    why: list[str] = []
    for timeline in timelines(folder):
        if not isinstance(timeline, Timeline):
            why.append(timeline.why)
            continue
        projection = project(timeline.trace)
        before = len(found)
        inside = {name: stage_launches(timeline.trace, projection, stage) for name, stage in STAGES.items()}
        for name, launches in inside.items():
            if name not in found and launches:
                found[name], sources[name] = launches, timeline.source
        if len(found) > before:
            why += _outside(timeline, sum(len(launches) for launches in inside.values()))
        if len(found) == len(STAGES):
            break
        if not len(timeline.trace.work):
            why.append(f"{timeline.source} recorded no work of a GPU: the run is on the CPU")
    return {name: found[name] for name in STAGES if name in found}, sources, why


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
        return Missing(f"the self-test is {entry.status}: {entry.why or 'it left no verdict'}")
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
    try:
        return read_ncu(folder.counters_file(name))
    except ParseError as error:
        return Missing(error.fact)


def _roles(reports: dict[str, Maybe[CounterReport]], timings: CleanTimings | None) -> Maybe[CounterRoles]:
    """What the counters of the chip mean that they were read on."""
    for report in reports.values():
        if not isinstance(report, Missing):
            name = report.facts.get("device_name") or (timings.model.device_name if timings else "")
            chip = chip_of_device(name) if name else Missing("the counters do not say which GPU they are of")
            return chip if isinstance(chip, Missing) else roles(chip)
    return Missing("no counters were read")


def selection_notes(folder: RunFolder, name: str, stage: str) -> list[str]:
    """What a pass of Nsight Compute was told to count in a stage, and what was left out."""
    path = folder.selection_file(name)
    if not path.exists():
        return []
    try:
        chosen = read_record(path, Selection)
    except ParseError as error:
        return [error.fact]
    launches = f"{chosen.launch_count} launches" + (f" of step {chosen.step}" if chosen.step else "")
    words = (
        f"Counters of {stage}: {len(chosen.kernels)} functions, chosen from {chosen.source}; {launches}, "
        f"which stand for {chosen.coverage:.0%} of its kernel time."
    )
    return [words, *chosen.notes]

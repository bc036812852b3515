"""What is said of a user's own program: how it ran, its kernels with their counters, its NVTX regions."""

import shlex
from dataclasses import dataclass, replace

from llm_perf_opt.analysis.kernels.counter_selftest import SelfTest
from llm_perf_opt.analysis.kernels.evidence import PROGRAM, uses_of
from llm_perf_opt.analysis.kernels.selection import Launch
from llm_perf_opt.analysis.kernels.table import StageKernels, kernel_table
from llm_perf_opt.analysis.limits.hardware import hardware_of_device
from llm_perf_opt.analysis.limits.roofs import limits_of
from llm_perf_opt.analysis.regions.records import RegionReport
from llm_perf_opt.analysis.trace.stage_launches import all_launches
from llm_perf_opt.core.kernel_records import CounterReport
from llm_perf_opt.core.records import Manifest, Maybe, Missing
from llm_perf_opt.core.run_folder import RunFolder, write_record, write_whole
from llm_perf_opt.core.terminal import one_line
from llm_perf_opt.core.units import byte_count
from llm_perf_opt.core.warnings import RunWarning
from llm_perf_opt.profiling.timelines import Timeline
from llm_perf_opt.report.kernels import kernels_page, top_kernels_section
from llm_perf_opt.report.regions import regions_page
from llm_perf_opt.report.text import escape, reason, table
from llm_perf_opt.traces.projection import project
from llm_perf_opt.workflows.analyze_kernels import analyze_regions, roles_of, what_was_counted
from llm_perf_opt.workflows.run_reader import LogEnd, RunReader

LAST_LINES = 10
"""So many lines of what the program printed are shown."""
_LONGEST_LINE = 200
_NOT_STARTED = Missing("the program was not started")


@dataclass(frozen=True)
class ProgramAnalysis:
    """Everything that can be said of the program."""

    manifest: Manifest
    kernels: Maybe[tuple[StageKernels, ...]]
    regions: Maybe[RegionReport]
    selftest: Maybe[SelfTest]
    notes: tuple[str, ...] = ()
    """What was counted and what was left out."""
    warnings: tuple[RunWarning, ...] = ()
    output: Maybe[LogEnd] = _NOT_STARTED
    """What the program printed, standard output and error together."""


def analyze_program(run: RunReader) -> ProgramAnalysis:
    """From what the passes left."""
    report = run.counters("ncu")
    kernels = _kernels(run, report)
    joined = kernels if isinstance(kernels, Missing) else next(stage.counters for stage in kernels)
    counted = what_was_counted(run, "ncu", PROGRAM, report, joined)
    return ProgramAnalysis(
        run.manifest,
        kernels,
        analyze_regions(run, run.settings),
        run.selftest,
        counted.notes,
        counted.warnings,
        _output(run),
    )


def _output(run: RunReader) -> Maybe[LogEnd]:
    """Of the first pass that ran the program: alone, its log holds nothing else."""
    for entry in run.manifest.passes:
        found = run.log_end(entry.name, LAST_LINES)
        if not isinstance(found, Missing):
            return replace(found, lines=tuple(one_line(line)[:_LONGEST_LINE] for line in found.lines))
    return _NOT_STARTED


def write_program_report(folder: RunFolder, found: ProgramAnalysis) -> None:
    """report.md, kernels.md, regions.md and regions.json."""
    write_whole(folder.kernels_file, (kernels_page(found.kernels, selftest=found.selftest) + _notes(found)).encode())
    if not isinstance(found.regions, Missing):
        write_whole(folder.regions_file, regions_page(found.regions).encode())
        write_record(folder.regions_json_file, found.regions)
    write_whole(folder.report_file, program_page(found).encode())


def report_program(run: RunReader) -> ProgramAnalysis:
    """Write the pages, now or anew."""
    found = analyze_program(run)
    write_program_report(run.folder, found)
    return found


def program_page(found: ProgramAnalysis) -> str:
    """The report."""
    rows = []
    for entry in found.manifest.passes:
        took = f"{entry.seconds:.2f} s" if entry.seconds is not None else f"n/a: {entry.status}"
        rows.append([entry.name, entry.status, escape(entry.tool_version), took, escape(f"{entry.why} {entry.remedy}".strip())])
    regions = found.regions
    words = f"n/a: {escape(regions.why)}" if isinstance(regions, Missing) else "See regions.md."
    return "\n".join(
        [
            f"# {escape(shlex.join(found.manifest.command))}\n",
            *[f"**Warning:** {escape(warning.text)}\n" for warning in found.warnings],
            table(["pass", "status", "tool", "took", "note"], rows, "lllrl"),
            "The time of `program` is the program's own, start and end of its process included. Below a tool it takes longer.\n",
            _output_section(found.output),
            top_kernels_section(found.kernels) + _notes(found),
            f"## NVTX regions\n\n{words}\n",
        ]
    )


def _output_section(output: Maybe[LogEnd]) -> str:
    if isinstance(output, Missing):
        return f"## Output\n\n{reason(output)}\n"
    words = f"What it printed is in {output.file} ({byte_count(output.bytes)})"
    if not output.lines:
        return f"## Output\n\n{words}.\n"
    text = "\n".join(output.lines).replace("```", "` ` `")
    return f"## Output\n\n{words}; its end:\n\n```text\n{text}\n```\n"


def _notes(found: ProgramAnalysis) -> str:
    return "".join(f"\n- {escape(note)}" for note in found.notes) + "\n"


def _kernels(run: RunReader, report: Maybe[CounterReport]) -> Maybe[tuple[StageKernels, ...]]:
    reasons = []
    for timeline in run.timelines:
        if isinstance(timeline, Timeline):
            launches = all_launches(timeline.trace, project(timeline.trace))
            if launches:
                return _joined(report, launches)
            reasons.append(f"{timeline.source} recorded no kernel")
        else:
            reasons.append(timeline.why)
    return Missing("; ".join(reasons) or "no pass recorded a timeline")


def _joined(report: Maybe[CounterReport], launches: list[Launch]) -> tuple[StageKernels, ...]:
    device = "" if isinstance(report, Missing) else report.facts.get("device_name", "")
    limits = limits_of(hardware_of_device(device))
    known = report if isinstance(report, Missing) else roles_of(report)
    return kernel_table(uses_of(PROGRAM, launches), {PROGRAM: report}, known, limits=limits)

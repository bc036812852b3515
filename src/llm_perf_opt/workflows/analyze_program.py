"""The analysis of a program that `llm-perf exec` ran: its passes, its kernels with their counters, its NVTX regions."""

import re
from dataclasses import dataclass, field, replace
from typing import Any

from llm_perf_opt.analysis.kernels.counter_selftest import SelfTest
from llm_perf_opt.analysis.kernels.evidence import PROGRAM, uses_of
from llm_perf_opt.analysis.kernels.selection import Launch
from llm_perf_opt.analysis.kernels.table import StageKernels, kernel_table
from llm_perf_opt.analysis.limits.hardware import hardware_of_device
from llm_perf_opt.analysis.limits.peaks import limits_of
from llm_perf_opt.analysis.regions.records import RegionReport
from llm_perf_opt.analysis.trace.operators import operator_rows
from llm_perf_opt.analysis.trace.stage_launches import all_launches
from llm_perf_opt.core.host_records import ProgramProfile
from llm_perf_opt.core.machine_records import CounterReport
from llm_perf_opt.core.records import NO_FORMULA, Manifest, Maybe, Missing, OperatorRow
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.core.secrets import shown_command
from llm_perf_opt.core.terminal import one_line
from llm_perf_opt.core.units import byte_count
from llm_perf_opt.core.warnings import RunWarning
from llm_perf_opt.profiling.timelines import Timeline
from llm_perf_opt.report.csv import operators_csv
from llm_perf_opt.report.document import (
    Block,
    Code,
    Column,
    Document,
    Paragraph,
    Section,
    Table,
    bullets,
    cell,
    numbers,
    when_known,
)
from llm_perf_opt.report.html import render_html
from llm_perf_opt.report.kernel_tables import all_kernels, kernel_blocks
from llm_perf_opt.report.markdown import render_markdown
from llm_perf_opt.report.regions import regions_document
from llm_perf_opt.report.run_tables import environment_table, operators_table
from llm_perf_opt.report.text import seconds
from llm_perf_opt.traces.projection import project
from llm_perf_opt.workflows.analyze_kernels import analyze_regions, counting_notes, roles_of
from llm_perf_opt.workflows.analyze_run import environment_of
from llm_perf_opt.workflows.run_reader import LogEnd, RunReader
from llm_perf_opt.workflows.run_warnings import partly_collected

LAST_LINES = 10
"""How many lines of the program's output are shown."""
_LONGEST_LINE = 200
_NOT_STARTED = Missing("the program was not started")
_NOT_PROFILED = Missing("the program was not run under torch.profiler")
_NO_ENV = Missing("env.json was not written")
_NO_FLOPS = Missing("FLOPs were not recorded; --torch-preset full records them")
_NO_MEMORY = Missing("memory was not recorded; --torch-preset default records it")


_OF_PROFILER = re.compile(r"(?:VERBOSE|INFO|WARNING|STAGE|ERROR|USDT):\d{4}-\d\d-\d\d [\d:]+ \d+:\d+ \w+\.\w+:\d+\] ")
"""A message of torch.profiler's library, Kineto: in the log, but not part of the program's output."""
_MOST_MESSAGES = 100
"""Such lines that may be among the last ones."""


@dataclass(frozen=True)
class ProgramAnalysis:
    """The analysis of a program."""

    manifest: Manifest
    kernels: Maybe[tuple[StageKernels, ...]]
    regions: Maybe[RegionReport]
    selftest: Maybe[SelfTest]
    notes: tuple[str, ...] = ()
    """What was counted, and what was left out."""
    warnings: tuple[RunWarning, ...] = ()
    output: Maybe[LogEnd] = _NOT_STARTED
    """The end of standard output and standard error."""
    operators: Maybe[tuple[OperatorRow, ...]] = _NOT_PROFILED
    """The operators under torch.profiler, longest first."""
    env: dict[str, Any] = field(default_factory=dict)
    """The machine and the software; empty if unknown."""


def analyze_program(run: RunReader) -> ProgramAnalysis:
    """Analyze what the passes left in the run folder."""
    report = run.counters("ncu")
    kernels = _kernels(run, report)
    joined = kernels if isinstance(kernels, Missing) else next(stage.counters for stage in kernels)
    counted = counting_notes(run, "ncu", PROGRAM, report, joined)
    env, odd_env = environment_of(run)
    return ProgramAnalysis(
        run.manifest,
        kernels,
        analyze_regions(run, run.settings),
        run.selftest,
        counted.notes,
        (*odd_env, *partly_collected(run.manifest, run.settings), *counted.warnings),
        _output(run),
        _operators(run),
        env,
    )


def _operators(run: RunReader) -> Maybe[tuple[OperatorRow, ...]]:
    """Return the operators of the trace of torch.profiler, with the FLOPs and the memory that it recorded next to it."""
    profile = run.program_profile
    if isinstance(profile, Missing):
        return profile
    recorded = run.trace("torch")
    if isinstance(recorded, Missing):
        return recorded
    rows = operator_rows(recorded.trace, on_gpu=profile.cuda)
    return tuple(_with_totals(row, profile) for row in rows) or Missing("the program ran no operator of torch")


def _with_totals(row: OperatorRow, profile: ProgramProfile) -> OperatorRow:
    if profile.operators_why:
        missing = Missing(profile.operators_why)
        return replace(row, cpu_memory_bytes=missing, device_memory_bytes=missing, flops=missing)
    found = profile.operators.get(row.name)
    memory, flops = profile.settings.get("profile_memory"), profile.settings.get("with_flops")
    sizes: tuple[Maybe[int], Maybe[int]] = (_NO_MEMORY, _NO_MEMORY)
    if found is not None and memory:
        sizes = found.cpu_memory_bytes, found.device_memory_bytes if profile.cuda else row.device_memory_bytes
    count: Maybe[int] = (found.flops if found else 0) or NO_FORMULA if flops else _NO_FLOPS
    return replace(row, cpu_memory_bytes=sizes[0], device_memory_bytes=sizes[1], flops=count)


def _output(run: RunReader) -> Maybe[LogEnd]:
    """Return the output of the program from the log of the first pass that has one."""
    for entry in run.manifest.passes:
        found = run.log_end(entry.name, LAST_LINES + _MOST_MESSAGES)
        if not isinstance(found, Missing):
            own = [line for line in found.lines if not _OF_PROFILER.match(line)][-LAST_LINES:]
            return replace(found, lines=tuple(one_line(line)[:_LONGEST_LINE] for line in own))
    return _NOT_STARTED


def write_program_report(folder: RunFolder, found: ProgramAnalysis) -> None:
    """Write the report, kernels.md, operators.md, ops.csv, regions.md and regions.json."""
    kernels = all_kernels(found.kernels, selftest=found.selftest, notes=found.notes)
    folder.write(folder.kernels_file, render_markdown(kernels).encode())
    if not isinstance(found.operators, Missing):
        every = Document("Operators", "", "", [Section("operators", "", [operators_table(found.operators, None)])])
        folder.write(folder.operators_file, render_markdown(every).encode())
        folder.write(folder.ops_csv_file, operators_csv(found.operators).encode())
    if not isinstance(found.regions, Missing):
        folder.write(folder.regions_file, render_markdown(regions_document(found.regions)).encode())
        folder.write_record(folder.regions_json_file, found.regions)
    document = program_document(found)
    folder.write(folder.report_file, render_markdown(document).encode())
    folder.write(folder.page_file, render_html(document).encode())


def report_program(run: RunReader) -> ProgramAnalysis:
    """Analyze a program and write its reports."""
    found = analyze_program(run)
    write_program_report(run.folder, found)
    return found


def program_document(found: ProgramAnalysis) -> Document:
    """Return the report of a program: passes, output, kernels, regions."""
    notes: list[Block] = [bullets(found.notes)] if found.notes else []
    sections = [
        Section("warnings", "", [Paragraph(f"Warning: {warning.text}") for warning in found.warnings]),
        Section("passes", "Passes", [_passes(found.manifest)]),
        Section("output", "Output", when_known("Output:", found.output, _output_blocks)),
        Section("operator-list", "Operators", when_known("Operators:", found.operators, lambda rows: [operators_table(rows)])),
        Section("kernel-list", "Kernels and counters", [*when_known("Kernels:", found.kernels, kernel_blocks), *notes]),
        Section("regions", "NVTX regions", when_known("Regions:", found.regions, lambda _: [Paragraph("See regions.md.")])),
        Section("environment", "Environment", when_known("Environment:", found.env or _NO_ENV, _machine)),
    ]
    return Document(shown_command(found.manifest.command), "", "", sections)


def _machine(env: dict[str, Any]) -> list[Block]:
    return [environment_table(env, Missing("a program has no measured iterations"))]


def _passes(manifest: Manifest) -> Table:
    columns = [Column("pass"), Column("status"), Column("tool"), *numbers("took"), Column("note")]
    table = Table("passes", "", columns)
    for entry in manifest.passes:
        took: Maybe[float] = Missing(f"the pass {entry.outcome}") if entry.seconds is None else entry.seconds
        note = f"{entry.why} {entry.remedy}".strip()
        table.add(entry.name, entry.status, entry.tool_version, cell(took, seconds), note)
    if any(entry.name == "program" for entry in manifest.passes):
        table.foot = "The time of the program pass is unprofiled and includes the start and end of the process."
    else:
        table.foot = "These times are under a profiler; the pass program measures the unprofiled time."
    return table


def _output_blocks(output: LogEnd) -> list[Block]:
    words = f"The output is in {output.file} ({byte_count(output.bytes)})"
    if not output.lines:
        return [Paragraph(f"{words}.")]
    return [Paragraph(f"{words}; the last lines:"), Code("\n".join(output.lines))]


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

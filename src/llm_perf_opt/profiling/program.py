"""Any program under the same care: alone, then below Nsight Systems, then the kernels that carry its time below Nsight Compute.

The program is run once per pass, so it must do the same each time. It is given its arguments as they are, never through a shell.
"""

import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import yaml

from llm_perf_opt import __version__
from llm_perf_opt.analysis.kernels.selection import Launch, Selection, expected_passes, select
from llm_perf_opt.analysis.trace.stage_launches import ANY_DOMAIN, all_launches, domains_of, range_launches
from llm_perf_opt.config.schema import RegionsConfig
from llm_perf_opt.core.errors import CaptureError, ConfigError, Interrupted, LlmPerfError, ParseError, ResourceError, interrupted
from llm_perf_opt.core.records import SCHEMA, Manifest, Maybe, Missing, PassRecord, RunStatus
from llm_perf_opt.core.run_folder import RunFolder, write_record, write_whole
from llm_perf_opt.counters.manifest import ResolvedMetrics, resolve
from llm_perf_opt.profiling.nsight import counting_limit, find_or_refuse, readable_counters
from llm_perf_opt.profiling.nsight_passes import NcuAsked, NsysAsked, ncu_pass, nsys_pass
from llm_perf_opt.profiling.passes import LABELS, Listener, PassPlan, closed, left_something, respelled, run_pass, skip_pass
from llm_perf_opt.profiling.requested_metrics import (
    ANY_CHIP,
    check_patterns,
    chip_of,
    names_of,
    nsys_traces,
    on_gpu,
    sections_of,
    told_drops,
)
from llm_perf_opt.profiling.selftest import Tested, run_selftest
from llm_perf_opt.profiling.timelines import Timeline, timelines
from llm_perf_opt.profiling.vendor.gates import WHOLE_PROGRAM, check_gate, on_range
from llm_perf_opt.profiling.vendor.launch import program_environment
from llm_perf_opt.profiling.vendor.ncu import NcuRequest, build_ncu_cmd
from llm_perf_opt.profiling.vendor.nsys import NsysRequest, build_nsys_cmd
from llm_perf_opt.profiling.vendor.probe import find_tool, probe_nsys, tool_version
from llm_perf_opt.traces.health import Expected
from llm_perf_opt.traces.projection import project

PASSES = ("program", "nsys", "ncu")
SPELLINGS = {
    "profiling.pass_timeout_s": "--timeout-s",
    "profiling.max_trace_gb": "--max-trace-gb",
    "profiling.ncu.budget_s": "--budget-s",
    "hydra.run.dir=DIR": "--out DIR",
}
"""Settings of `llm-perf run` → the options of `llm-perf exec`."""

ALL_REGIONS = RegionsConfig((), (), (), (), aggregate=False)


@dataclass(frozen=True)
class ExecRequest:
    """What to run, and how closely to look."""

    argv: tuple[str, ...]
    passes: tuple[str, ...] = PASSES
    range: str = ""
    """An NVTX range of the program, as nsys spells it: NAME@DOMAIN. Empty: the whole program."""
    sets: tuple[str, ...] = ("roofline",)
    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    regions: RegionsConfig = ALL_REGIONS
    top: int = 10
    coverage: float = 0.8
    budget_s: float = 180.0
    timeout_s: float = 3600.0
    max_trace_gb: float = 2.0
    device_index: int = 0
    as_available: bool = False
    """Nobody named the passes: one whose tool is not here, or that has nothing to count, is left out and no error."""


class NothingToCountError(CaptureError):
    """No kernel was recorded for Nsight Compute to count."""


def check_asked(asked: ExecRequest) -> None:
    """Refuse what cannot work before anything is started."""
    if not asked.argv:
        raise ConfigError("There is no program to run.", "Write it behind two dashes: llm-perf exec -- python my_script.py")
    if not asked.passes:
        raise ConfigError("No pass is asked for.", f"Known: {', '.join(PASSES)}.")
    for name in asked.passes:
        if name not in PASSES:
            raise ConfigError(f"There is no pass '{name}'.", f"Known: {', '.join(PASSES)}.")
    if asked.range:
        check_gate("nsys", asked.range, ours=False)
    check_patterns(asked.regions)
    there = find_tool("ncu") if asked.sections else None
    _metrics(asked, None, sections_of(there) if there else None)
    if shutil.which(asked.argv[0]) is None:
        raise ConfigError(
            f"There is no program {asked.argv[0]!r} that can be run.", "Check its name, its path, and that it may be executed."
        )


def capture_program(asked: ExecRequest, folder: RunFolder, command: Sequence[str], listener: Listener) -> LlmPerfError | None:
    """Fill the folder; returns what went wrong first. A pass that fails leaves the others standing."""
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    passes = [name for name in PASSES if name in asked.passes]  # each needs what those before it left
    entries = tuple(PassRecord(name) for name in passes)
    begun = Manifest(SCHEMA, __version__, "partial", created, tuple(command), entries, why="It has not ended.", kind="exec")
    folder.write_manifest(begun)
    values = {"profiling": {"regions": asdict(asked.regions)}}  # how the pages are made, now and whenever they are made anew
    write_whole(folder.config_file, yaml.safe_dump(values, sort_keys=False, default_flow_style=None).encode())
    first: LlmPerfError | None = None
    steps = {"program": _run_program, "nsys": _run_nsys, "ncu": _run_ncu}
    for name in passes:
        try:
            listener.pass_started(name, LABELS[name])
            steps[name](asked, folder, listener)
        except Interrupted as error:
            first = error
            break
        except KeyboardInterrupt as error:  # between two processes, or while a child was being ended
            first = interrupted(error, "What was captured so far is kept.")
            break
        except LlmPerfError as error:
            if asked.as_available and _left_out(folder, name, error):
                continue
            first = first or error
            if name == "program":  # it fails by itself: below a tool it would fail as well
                break
    return _close(folder, first)


def _left_out(folder: RunFolder, name: str, error: LlmPerfError) -> bool:
    """Whether a pass was not begun for want of what this machine or this program does not have."""
    entry = folder.manifest().pass_named(name)
    return entry is not None and entry.status == "skipped" and isinstance(error, (ResourceError, NothingToCountError))


def _close(folder: RunFolder, error: LlmPerfError | None) -> LlmPerfError | None:
    manifest = folder.manifest()
    entries = closed(manifest.passes)
    kept = left_something(folder, entries)
    if isinstance(error, Interrupted) and not kept:
        error = Interrupted(error.fact, "Nothing had been captured yet.")
    status: RunStatus = "complete" if error is None else "partial" if kept else "failed"
    why, remedy = (error.fact, error.remedy) if error else ("", "")
    folder.write_manifest(replace(manifest, status=status, passes=entries, why=why, remedy=remedy))
    return error


def _plan(asked: ExecRequest, name: str, argv: Sequence[str], version: str = "", note: str = "") -> PassPlan:
    return PassPlan(name, argv, asked.timeout_s, version, note, program_environment(), spellings=SPELLINGS)


def _run_program(asked: ExecRequest, folder: RunFolder, listener: Listener) -> None:
    run_pass(folder, _plan(asked, "program", asked.argv), listener)


def _run_nsys(asked: ExecRequest, folder: RunFolder, listener: Listener) -> None:
    try:
        nsys = find_or_refuse("nsys", LABELS["nsys"], "leave it out with --passes program", asked=not asked.as_available)
        probe = probe_nsys(nsys)
        if isinstance(probe, Missing):
            raise ResourceError(f"{probe.why}.", "Install Nsight Systems anew, or name another in the variable NSYS.")
        traces = nsys_traces(_metrics(asked, None), probe, gpu=on_gpu())
        argv = build_nsys_cmd(
            nsys,
            folder.tool_report("nsys"),
            asked.argv,
            NsysRequest(
                probe=probe,
                gate=on_range(asked.range) if asked.range else WHOLE_PROGRAM,
                trace=traces.modules,
                gpu_metrics=traces.gpu_metrics,
            ),
        )
    except (ResourceError, ConfigError) as absent:
        skip_pass(folder, "nsys", absent, listener)
        raise
    plan = _plan(asked, "nsys", argv, f"nsys {probe.version}", traces.note)
    nsys_pass(folder, plan, listener, NsysAsked(nsys, Expected(), asked.max_trace_gb))


def _run_ncu(asked: ExecRequest, folder: RunFolder, listener: Listener) -> None:
    try:
        ncu = find_or_refuse("ncu", LABELS["ncu"], "leave it out with --passes program,nsys", asked=not asked.as_available)
        readable_counters(on_gpu(), "Leave it out: --passes program,nsys.")
        metrics = _metrics(asked, ncu)
        chosen = _choose(asked, folder, metrics)
        if isinstance(chosen, Missing):
            raise NothingToCountError(f"No launch was chosen: {chosen.why}.", "The nsys pass must record kernels first.")
        version = f"ncu {tool_version(ncu) or ''}".strip()
        tested = Tested(ncu, version, metrics.chip, asked.device_index, asked.timeout_s, asked.max_trace_gb)
        run_selftest(folder, listener, tested)
    except (ResourceError, ConfigError, CaptureError, ParseError) as absent:
        skip_pass(folder, "ncu", absent, listener)
        raise
    notes = (*(respelled(note, SPELLINGS) for note in chosen.notes), *told_drops(metrics))
    chosen = replace(chosen, notes=notes)
    write_record(folder.selection_file("ncu"), chosen)
    words = (
        f"{len(chosen.kernels)} kernels, {chosen.launch_count} launches × {chosen.passes} passes, about {chosen.seconds:.0f} s; "
        f"{chosen.coverage:.0%} of the kernel time"
    )
    listener.pass_message("ncu", {"event": "phase", "text": words})
    argv = build_ncu_cmd(
        ncu,
        folder.tool_report("ncu"),
        asked.argv,
        NcuRequest(
            ranges=_ncu_ranges(asked, folder),
            metrics=metrics.names,
            sections=metrics.sections,
            kernels=[kernel.function for kernel in chosen.kernels],
            launch_skip=chosen.launch_skip,
            launch_count=chosen.launch_count,
            ours=False,
        ),
    )
    within_s, limit = counting_limit(folder, asked.budget_s, asked.timeout_s)
    plan = replace(_plan(asked, "ncu", argv, version), timeout_s=within_s, limit=limit)
    ncu_pass(folder, plan, listener, NcuAsked(ncu, asked.max_trace_gb, chosen.launch_count))


def _ncu_ranges(asked: ExecRequest, folder: RunFolder) -> list[str]:
    """NAME@DOMAIN as nsys has it → DOMAIN@NAME/ as ncu has it, which knows no "any domain": those of the timeline are named."""
    if not asked.range:
        return []
    name, domain = _name_and_domain(asked.range)
    domains = {domain}
    if domain == ANY_DOMAIN:
        traces = [timeline.trace for timeline in timelines(folder) if isinstance(timeline, Timeline)]
        domains = domains_of(traces[0], name) if traces else {""}
    return [f"{_for_ncu(one)}@{_for_ncu(name)}/" if one else f"{_for_ncu(name)}/" for one in sorted(domains)]


def _name_and_domain(expression: str) -> tuple[str, str]:
    """The range's name and domain; a backslash stands before an @ of the name."""
    name, *domain = re.split(r"(?<!\\)@", expression)
    return name.replace("\\@", "@"), domain[0] if domain else ""


def _for_ncu(name: str) -> str:
    """What ncu would take for syntax, as part of a name."""
    return re.sub(r"([\\@,\[\]/*+])", r"\\\1", name)


def _metrics(asked: ExecRequest, ncu: Path | None, sections: Sequence[str] | None = None) -> ResolvedMetrics:
    """What is collected; with an ncu, of the chip that is here and as far as that tool knows it."""
    chip = chip_of(asked.device_index) if on_gpu() else ANY_CHIP
    if isinstance(chip, Missing):
        if ncu is not None:
            raise ResourceError(
                f"Which counters this GPU has is not known: {chip.why}.", "`llm-perf metrics list` names the chips."
            )
        chip = ANY_CHIP
    known, sections = (names_of(ncu, chip), sections_of(ncu)) if ncu is not None else (None, sections)
    return resolve(
        asked.sets,
        add=asked.add,
        remove=asked.remove,
        sections=asked.sections,
        chip=chip,
        known=known,
        known_sections=sections,
    )


def _choose(asked: ExecRequest, folder: RunFolder, metrics: ResolvedMetrics) -> Maybe[Selection]:
    passes = expected_passes(metrics.names, metrics.sections)
    reasons = []
    for timeline in timelines(folder):
        if isinstance(timeline, Timeline):
            return select(
                asked.range or "the program",
                _launches(asked, timeline),
                source=timeline.source,
                top=asked.top,
                coverage=asked.coverage,
                passes=passes,
                budget_s=asked.budget_s,
            )
        reasons.append(timeline.why)
    return Missing("; ".join(reasons) or "there is no timeline to choose from")


def _launches(asked: ExecRequest, timeline: Timeline) -> list[Launch]:
    projection = project(timeline.trace)
    if not asked.range:
        return all_launches(timeline.trace, projection)
    name, domain = _name_and_domain(asked.range)
    return range_launches(timeline.trace, projection, name, domain)

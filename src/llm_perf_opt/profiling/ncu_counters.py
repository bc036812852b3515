"""The Nsight Compute passes: a self-test of the counters, then counters of the longest kernels of each stage or program.

Like nsys, ncu exits with code 0 even if it counted nothing, so the table of each pass is checked. The self-test counts matrix
products and a copy of known size first.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llm_perf_opt.analysis.kernels.counter_selftest import judge, reported_work
from llm_perf_opt.analysis.kernels.selection import Launch, Selection, Wanted, expected_passes, select
from llm_perf_opt.analysis.trace.stage_launches import (
    ANY_DOMAIN,
    all_launches,
    domains_of,
    range_launches,
    stage_launches,
    substage_launches,
)
from llm_perf_opt.config.passes import known_passes
from llm_perf_opt.core.errors import CaptureError, ConfigError, Interrupted, LlmPerfError, ResourceError
from llm_perf_opt.core.machine_records import CounterReport
from llm_perf_opt.core.processes import module_argv
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.core.stages import Stage, ncu_range
from llm_perf_opt.core.units import percentage
from llm_perf_opt.counters.catalog import roles
from llm_perf_opt.counters.manifest import ResolvedMetrics
from llm_perf_opt.profiling.nsight_pass import NCU_LABEL, NCU_PROGRAM, NCU_SELFTEST, NCU_STAGES
from llm_perf_opt.profiling.passes import (
    Capture,
    Listener,
    NothingToCountError,
    PassOutcome,
    PassPlan,
    UnderTool,
    respelled,
    run_pass,
)
from llm_perf_opt.profiling.requested_metrics import counted_metrics, dropped_notes, with_sections
from llm_perf_opt.profiling.timelines import Timeline, timelines
from llm_perf_opt.profiling.vendor.compatibility import counter_permission, permission_error
from llm_perf_opt.profiling.vendor.gates import CUDA_PROFILER_API, WHOLE_PROGRAM
from llm_perf_opt.profiling.vendor.ncu import NcuRequest, build_ncu_cmd
from llm_perf_opt.profiling.vendor.own_options import own_options
from llm_perf_opt.profiling.vendor.probe import probe_ncu, tool_version
from llm_perf_opt.profiling.vendor.tool_pass import import_ncu_csv
from llm_perf_opt.runners.measure import counter_selftest
from llm_perf_opt.traces.ncu_csv import read_ncu
from llm_perf_opt.traces.projection import project

_SLOW_START, _LEAST_START_S = 5, 60.0
"""A program starts more slowly under Nsight Compute than under Nsight Systems: 2 × on the H200."""
_OVERRUN = 3
"""By what factor the replays may exceed their estimate before they are stopped."""


@dataclass(frozen=True)
class _Counting:
    """What the Nsight Compute passes share."""

    ncu: Path
    version: str
    metrics: ResolvedMetrics
    set_sections: int = 0
    """Sections of `profiling.ncu.set`."""


def launch(capture: Capture) -> None:
    """Run the self-test, then count the kernels of each stage or of the program. An error that stops all is raised once."""
    counted = [name for name in capture.names if name in (*NCU_STAGES, NCU_PROGRAM)]
    try:
        counting = _counting(capture)
    except (ResourceError, ConfigError) as error:
        _skip_all(capture, [name for name in capture.names if name in (NCU_SELFTEST, *counted)], error)
        raise
    try:
        chosen = _choices(capture, counting, counted)
        if capture.program and isinstance(nothing := chosen[NCU_PROGRAM].selection, Missing):
            remedy = "A pass that records a timeline, nsys or torch, must record kernels first."
            raise NothingToCountError(f"No launch was selected: {nothing.why.rstrip('.')}.", remedy)
        run_selftest(capture, counting)
    except LlmPerfError as error:
        if not isinstance(error, Interrupted):
            why = error if capture.program else CaptureError(f"The counters were not read: {error.fact}", error.remedy)
            _skip_all(capture, counted, why)
        raise
    failed: LlmPerfError | None = None
    for name in counted:
        try:
            _count(capture, counting, name, chosen[name])
        except Interrupted:
            raise
        except LlmPerfError as error:  # the other stage may still succeed
            failed = failed or error
    if failed is not None:
        raise failed


def _skip_all(capture: Capture, names: Sequence[str], why: LlmPerfError) -> None:
    for name in names:
        capture.started(name)
        capture.skip(name, why)


def _counting(capture: Capture) -> _Counting:
    ncu = capture.tool("ncu", NCU_LABEL)
    if not capture.gpu:
        remedy = capture.without("ncu")
        raise ResourceError("Nsight Compute needs an NVIDIA GPU, and this run has none.", f"{remedy[0].upper()}{remedy[1:]}.")
    permission = counter_permission()
    if permission.status == "denied":
        raise permission_error(permission.why)
    settings = capture.profiling.ncu
    metrics = counted_metrics(with_sections(capture.profiling.metrics, settings), capture.device_index, ncu)
    probe = probe_ncu(ncu) if settings.set else Missing("no set is requested")
    sections = 0 if isinstance(probe, Missing) else probe.set_sections.get(settings.set or "", 0)
    return _Counting(ncu, f"ncu {tool_version(ncu) or 'of unknown version'}", metrics, sections)


# --- selection --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Choice:
    """The launches of a pass, or why there are none, and the time that they may take."""

    selection: Maybe[Selection]
    budget_s: float


def _choices(capture: Capture, counting: _Counting, names: Sequence[str]) -> dict[str, _Choice]:
    """Select the launches of each pass within the budget: half of it for prefill, the rest for decode."""
    found: dict[str, _Choice] = {}
    left_s = capture.profiling.ncu.budget_s
    for place, name in enumerate(names):
        budget_s = left_s / (len(names) - place)
        chosen = _choose(capture, counting, name, budget_s)
        if isinstance(chosen, Selection):
            left_s = max(0.0, left_s - chosen.seconds)
            notes = [respelled(note, capture.plan(name, ()).spellings) for note in chosen.notes]
            chosen = replace(chosen, notes=(*counting.metrics.origins, *notes, *dropped_notes(counting.metrics)))
            budget_s = max(budget_s, chosen.seconds)  # launches that the user gave by number may take longer
        found[name] = _Choice(chosen, budget_s)
    return found


def _choose(capture: Capture, counting: _Counting, name: str, budget_s: float) -> Maybe[Selection]:
    settings = capture.profiling.ncu
    passes = expected_passes(counting.metrics.names, len(counting.metrics.sections) + counting.set_sections)
    wanted = Wanted(settings.top, settings.coverage, settings.kernel_regex, settings.launch_skip, settings.launch_count)
    reasons = []
    for timeline in timelines(capture.folder):
        if not isinstance(timeline, Timeline):
            reasons.append(timeline.why)
            continue
        found = select(
            _what(capture, name),
            _launches(capture, name, timeline),
            source=timeline.source,
            wanted=wanted,
            passes=passes,
            budget_s=budget_s,
        )
        if isinstance(found, Selection):
            return found
        reasons.append(f"{timeline.source}: {found.why}")
    return Missing("; ".join(reasons) or "no pass recorded a timeline")


def _what(capture: Capture, name: str) -> str:
    if name in NCU_STAGES:
        inner = capture.profiling.ncu.substage
        return f"{NCU_STAGES[name]}/{inner}" if inner else str(NCU_STAGES[name])
    return (capture.program and capture.program.range) or "the program"


def _launches(capture: Capture, name: str, timeline: Timeline) -> list[Launch]:
    projection = project(timeline.trace)
    if name in NCU_STAGES and capture.profiling.ncu.substage:
        return substage_launches(timeline.trace, projection, NCU_STAGES[name], capture.profiling.ncu.substage)
    if name in NCU_STAGES:
        return stage_launches(timeline.trace, projection, NCU_STAGES[name])
    if capture.program and capture.program.range:
        return range_launches(timeline.trace, projection, *_name_and_domain(capture.program.range))
    return all_launches(timeline.trace, projection)


def _ranges(capture: Capture, name: str) -> list[str]:
    """Return the range in ncu syntax, DOMAIN@NAME/. ncu has no "any domain", so the domains of the timeline are named."""
    if name in NCU_STAGES:
        return [ncu_range(NCU_STAGES[name], capture.profiling.ncu.substage)]
    if not (capture.program and capture.program.range):
        return []
    name, domain = _name_and_domain(capture.program.range)
    domains = {domain}
    if domain == ANY_DOMAIN:
        traces = [timeline.trace for timeline in timelines(capture.folder) if isinstance(timeline, Timeline)]
        domains = domains_of(traces[0], name) if traces else {""}
    return [f"{_for_ncu(one)}@{_for_ncu(name)}/" if one else f"{_for_ncu(name)}/" for one in sorted(domains)]


def _name_and_domain(expression: str) -> tuple[str, str]:
    """Return the range's name and domain; an @ in the name is escaped with a backslash."""
    name, *domain = re.split(r"(?<!\\)@", expression)
    return name.replace("\\@", "@"), domain[0] if domain else ""


def _for_ncu(name: str) -> str:
    """Escape the characters that are syntax for ncu."""
    return re.sub(r"([\\@,\[\]/*+])", r"\\\1", name)


# --- counting ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CountersCheck:
    """How an ncu report is checked."""

    ncu: Path
    max_trace_gb: float
    launches: int = 0
    """Requested launches; 0: all."""


def _count(capture: Capture, counting: _Counting, name: str, choice: _Choice) -> None:
    """Count the kernels of one stage, or of the program."""
    capture.started(name)
    chosen = choice.selection
    if isinstance(chosen, Missing):
        remedy = "See the logs of the passes that record a timeline."
        why = CaptureError(f"No launch of {_what(capture, name)} was selected: {chosen.why.rstrip('.')}.", remedy)
        capture.skip(name, why)
        raise why
    capture.folder.write_record(capture.folder.selection_file(name), chosen)
    text = (
        f"{len(chosen.kernels)} kernels, {chosen.launch_count} launches × {chosen.passes} passes, "
        f"about {chosen.seconds:.0f} s of {choice.budget_s:.0f}; "
        f"{percentage(chosen.coverage)} of the kernel time of {_what(capture, name)}"
    )
    capture.listener.pass_message(name, {"event": "phase", "text": text})
    steps = chosen.steps_needed if NCU_STAGES.get(name) is Stage.DECODE_STEP else 0
    argv = build_ncu_cmd(
        counting.ncu, capture.folder.tool_report(name), capture.work(name, steps), _request(capture, counting, name, chosen)
    )
    timeout_s, limit = counting_limit(capture.folder, choice.budget_s, capture.profiling.pass_timeout_s)
    plan = replace(capture.plan(name, argv, counting.version), timeout_s=timeout_s, limit=limit)
    criteria = CountersCheck(counting.ncu, capture.profiling.max_trace_gb, chosen.launch_count)
    read_counters(capture.folder, plan, capture.listener, criteria)


def _request(capture: Capture, counting: _Counting, name: str, chosen: Selection) -> NcuRequest:
    settings = capture.profiling.ncu
    by_api = capture.program is not None and capture.profiling.nsys.capture == "cudaProfilerApi"
    return NcuRequest(
        ranges=_ranges(capture, name),
        metrics=counting.metrics.names,
        sections=counting.metrics.sections,
        section_set=settings.set,
        kernels=[kernel.function for kernel in chosen.kernels],
        launch_skip=chosen.launch_skip,
        launch_count=chosen.launch_count,
        gate=CUDA_PROFILER_API if by_api else WHOLE_PROGRAM,
        ours=capture.program is None,
        substages=[settings.substage] if settings.substage else [],
        clock_control=settings.clock_control,
        cache_control=settings.cache_control,
        args=own_options("ncu", settings.args),
    )


def counting_limit(folder: RunFolder, budget_s: float, timeout_s: float) -> tuple[float, str]:
    """Return the time that counting may take, and the setting that it comes from.

    Starting the program is assumed to take several times as long as under the tool that recorded the timeline.
    """
    recording = [known.name for known in known_passes() if known.trace]
    started = [entry.seconds or 0.0 for entry in folder.manifest().passes if entry.name in recording]
    within_s = _SLOW_START * max(started, default=0.0) + _LEAST_START_S + _OVERRUN * budget_s
    return (within_s, "profiling.ncu.budget_s") if within_s < timeout_s else (timeout_s, PassPlan.limit)


def read_counters(folder: RunFolder, plan: PassPlan, listener: Listener, criteria: CountersCheck) -> None:
    """Count, and write the counters as a table; raise if they are unusable. What a stopped pass counted is kept."""
    tool = UnderTool("ncu", criteria.max_trace_gb)

    def check(ended: LlmPerfError | None) -> PassOutcome:
        error = tool.error(ended)
        if tool.result is None or isinstance(tool.result.report, Missing):
            return PassOutcome(error)
        log, table = folder.log_file(plan.name), folder.counters_file(plan.name)
        import_ncu_csv(criteria.ncu, tool.result.report, "raw", table, log=log)
        found = folder.parsed(table, read_ncu)
        worst = next((problem for problem in found.problems if problem.fatal), None)
        if error is None and worst is not None:
            error = CaptureError(f"The counters cannot be used: {worst.what}", worst.remedy)
        return PassOutcome(error, " ".join(missing_notes(found, criteria.launches)))

    run_pass(folder, plan, listener, run=tool.run, check=check)


def missing_notes(found: CounterReport, launches: int) -> Iterator[str]:
    """Yield what is missing in a usable table."""
    yield from (problem.what for problem in found.problems if not problem.fatal)
    if len(found.kernels) < launches:
        yield (
            f"Of {launches} requested launches, {len(found.kernels)} were counted: the program did not launch the same kernels "
            "as when its timeline was recorded."
        )


# --- self-test --------------------------------------------------------------------------------------------------------


class _SelfTestListener:
    """Forwards messages and keeps the one that reports the work."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.pass_started = listener.pass_started
        self.pass_ended = listener.pass_ended
        self.ran: dict[str, Any] = {}

    def pass_message(self, name: str, message: dict[str, Any]) -> None:
        if message.get("event") == counter_selftest.EVENT:
            self.ran = {key: value for key, value in message.items() if key != "event"}
        self._listener.pass_message(name, message)


def run_selftest(capture: Capture, counting: _Counting) -> None:
    """Count work of known size, write the result to the run folder, and raise a CaptureError if the counts are wrong."""
    folder, names, ncu = capture.folder, roles(counting.metrics.chip), counting.ncu
    work = module_argv(counter_selftest.__name__, "--device-index", str(capture.device_index))
    metrics = [*names.tensor_flops, names.dram_read_bytes, names.dram_write_bytes, names.time_ns]
    request = NcuRequest(ranges=[counter_selftest.SELFTEST_RANGE], metrics=metrics, ours=False)
    argv = build_ncu_cmd(ncu, folder.tool_report(NCU_SELFTEST), work, request)
    listener = _SelfTestListener(capture.listener)
    capture.started(NCU_SELFTEST)
    plan = PassPlan(NCU_SELFTEST, argv, capture.profiling.pass_timeout_s, counting.version)
    read_counters(folder, plan, listener, CountersCheck(ncu, capture.profiling.max_trace_gb))
    found = judge(folder.parsed(folder.counters_file(NCU_SELFTEST), read_ncu), reported_work(listener.ran), names)
    if isinstance(found, Missing):
        _mark_failed(folder, found.why)
        raise CaptureError(f"The counter self-test has no result: {found.why}.", f"See {folder.log_file(NCU_SELFTEST)}.")
    folder.write_record(folder.selftest_file, found)
    if not found.passed:
        _mark_failed(folder, found.why)
        raise CaptureError(
            f"The counter self-test failed: {found.why}.",
            "kernels.md shows the counts. Make sure that nothing else uses the GPU, or try another version of Nsight Compute.",
        )


def _mark_failed(folder: RunFolder, why: str) -> None:
    entry = folder.manifest().pass_named(NCU_SELFTEST)
    if entry is not None:
        folder.update_pass(replace(entry, status="failed", why=why))

"""The Nsight Systems pass: a timeline of the measured iteration, or of the user's program.

nsys exits with code 0 even if it recorded nothing, so the report itself is checked: it must exist, open and be complete.
Otherwise the pass fails with the reason, and its report is not used.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path

from llm_perf_opt.analysis.trace.stages import stage_columns
from llm_perf_opt.core.errors import CaptureError, LlmPerfError, ParseError, ResourceError
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.core.stages import Stage
from llm_perf_opt.counters.manifest import resolve
from llm_perf_opt.profiling.nsight_pass import NSYS_LABEL, NSYS_STAGES, NSYS_SUBSTAGE
from llm_perf_opt.profiling.passes import Capture, Listener, PassOutcome, PassPlan, UnderTool, restart_note, run_pass
from llm_perf_opt.profiling.requested_metrics import ANY_CHIP, nsys_traces
from llm_perf_opt.profiling.timelines import CLOCK_SLACK_NS, marked_ranges
from llm_perf_opt.profiling.vendor.compatibility import check_ranges_visible
from llm_perf_opt.profiling.vendor.gates import CUDA_PROFILER_API, WHOLE_PROGRAM, Gate, on_range, on_stage, on_substage
from llm_perf_opt.profiling.vendor.nsys import NsysRequest, build_nsys_cmd
from llm_perf_opt.profiling.vendor.own_options import own_options
from llm_perf_opt.profiling.vendor.probe import NsysProbe, probe_nsys
from llm_perf_opt.profiling.vendor.tool_pass import STARTS, export_nsys, report_of
from llm_perf_opt.traces.health import Expected, examined
from llm_perf_opt.traces.trace_cache import cached_trace

_NAME, _DECODE = NSYS_STAGES
_GATED_BY_RANGE = "The NVTX range started the capture: on the CPU nothing calls cudaProfilerStart."


@dataclass(frozen=True)
class TimelineCheck:
    """How an nsys report is checked."""

    nsys: Path
    expected: Expected
    max_trace_gb: float
    starts: int = 1
    """Maximum number of starts if nsys loses its agent."""


def launch(capture: Capture) -> None:
    """Record the timeline of the iteration; if that fails on a CUDA call of prefill, the timeline of decode."""
    capture.started(_NAME)
    nsys, probe = _tool(capture)
    plan = _plan(capture, nsys, probe, _NAME)
    try:
        _record(capture, plan, nsys)
    except CaptureError as error:
        if not _decode_alone_may_work(capture):
            raise
        capture.started(_DECODE)
        try:
            _record(capture, _plan(capture, nsys, probe, _DECODE), nsys)
        except LlmPerfError as again:
            raise error from again


def launch_substage(capture: Capture) -> None:
    """Record the first run of one sub-stage. Stages, kernels and counters of the report come from other passes."""
    capture.started(NSYS_SUBSTAGE)
    nsys, probe = _tool(capture)
    plan = _plan(capture, nsys, probe, NSYS_SUBSTAGE)
    expected = Expected(gpu=capture.gpu, command=str(capture.folder.config_file))
    record_timeline(capture.folder, plan, capture.listener, TimelineCheck(nsys, expected, capture.profiling.max_trace_gb, STARTS))


def _tool(capture: Capture) -> tuple[Path, NsysProbe]:
    """Return nsys and what it supports."""
    nsys = capture.tool("nsys", NSYS_LABEL)
    probe = probe_nsys(nsys)
    if isinstance(probe, Missing):
        raise ResourceError(f"{probe.why}.", "Reinstall Nsight Systems, or set NSYS to another nsys binary.")
    if capture.config:
        check_ranges_visible(probe.version)
    return nsys, probe


def _decode_alone_may_work(capture: Capture) -> bool:
    """Return whether to retry with decode: an nsys older than the CUDA runtime can fail on a call that only prefill makes."""
    if capture.config is None or not report_of("nsys", capture.folder.tool_report(_NAME)).exists():
        return False
    return capture.profiling.nsys.capture == "nvtx" and capture.config.runtime.num_new_tokens > 1 and capture.gpu


def _plan(capture: Capture, nsys: Path, probe: NsysProbe, name: str) -> PassPlan:
    profiling, gpu = capture.profiling, capture.gpu
    asked = resolve(profiling.metrics.sets or (), chip=ANY_CHIP, defined=profiling.metrics.defined)
    traces = nsys_traces(asked, probe, gpu=gpu, own=profiling.nsys.trace)
    by_api = profiling.nsys.capture == "cudaProfilerApi"
    notes = [*asked.origins, traces.note, _GATED_BY_RANGE if by_api and capture.config and not gpu else ""]
    request = NsysRequest(
        probe=probe,
        gate=_gate(capture, name, by_api),
        trace=traces.modules,
        gpu_metrics=traces.gpu_metrics,
        sample=profiling.nsys.sample,
        args=own_options("nsys", profiling.nsys.args),
    )
    argv = build_nsys_cmd(nsys, capture.folder.tool_report(name), capture.work(name, profiling.nsys.decode_steps), request)
    return capture.plan(name, argv, f"nsys {probe.version}", " ".join(filter(None, notes)))


def _gate(capture: Capture, name: str, by_api: bool) -> Gate:
    if capture.program:
        whole = CUDA_PROFILER_API if by_api else WHOLE_PROGRAM
        return on_range(capture.program.range) if capture.program.range else whole
    if name == NSYS_SUBSTAGE:
        return on_substage(capture.profiling.nsys.substage or "")
    whole_iteration = Stage.PREFILL in NSYS_STAGES[name]
    return CUDA_PROFILER_API if by_api and capture.gpu else on_stage(Stage.PROFILE if whole_iteration else Stage.DECODE)


def _record(capture: Capture, plan: PassPlan, nsys: Path) -> None:
    expected, starts = Expected(), 1
    if capture.config:
        runtime = capture.config.runtime
        ranges = marked_ranges(NSYS_STAGES[plan.name], runtime.type, runtime.engine, runtime.num_new_tokens)
        expected, starts = Expected(gpu=capture.gpu, ranges=ranges, command=str(capture.folder.config_file)), STARTS
    check = TimelineCheck(nsys, expected, capture.profiling.max_trace_gb, starts)
    record_timeline(capture.folder, plan, capture.listener, check)


def record_timeline(folder: RunFolder, plan: PassPlan, listener: Listener, criteria: TimelineCheck) -> None:
    """Record a timeline and export it; raise if it is incomplete."""
    tool = UnderTool("nsys", criteria.max_trace_gb, criteria.starts)
    expected = replace(criteria.expected, started_after_utc_ns=time.time_ns() - CLOCK_SLACK_NS)

    def check(ended: LlmPerfError | None) -> PassOutcome:
        error = tool.error(ended)
        if tool.result is None or isinstance(tool.result.report, Missing):
            return PassOutcome(error)
        log, sqlite = folder.log_file(plan.name), folder.timeline_file(plan.name)
        listener.pass_message(plan.name, {"event": "phase", "text": "exporting and checking the report"})
        export_nsys(criteria.nsys, tool.result.report, sqlite, log=log)
        return PassOutcome(error or _incomplete(folder, plan.name, expected), restart_note(tool.result))

    run_pass(folder, plan, listener, run=tool.run, check=check)


def _incomplete(folder: RunFolder, name: str, expected: Expected) -> LlmPerfError | None:
    """Return why the report cannot be used, or None. The parsed tables are cached."""
    try:
        opened = cached_trace(folder.timeline_file(name), folder.tables(name), root=folder.path, columns=stage_columns)
        trace = examined(opened.trace, expected)
    except ParseError as error:
        return CaptureError(f"The SQLite export cannot be read: {error.fact}", "Record again with another Nsight Systems.")
    worst = next((problem for problem in trace.problems if problem.fatal), None)
    if worst is None:
        return None
    return CaptureError(f"The nsys report is incomplete and is not used: {worst.what}", worst.remedy)

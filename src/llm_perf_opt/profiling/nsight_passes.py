"""One pass below an Nsight tool, from its command to figures that may be believed: for our own runner and for any program."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from llm_perf_opt.analysis.trace.stages import stage_columns
from llm_perf_opt.core.errors import CaptureError, LlmPerfError, ParseError
from llm_perf_opt.core.kernel_records import CounterReport
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.profiling.passes import Listener, PassOutcome, PassPlan, Run, run_pass
from llm_perf_opt.profiling.timelines import CLOCK_SLACK_NS
from llm_perf_opt.profiling.vendor.child import UnexplainedEndError
from llm_perf_opt.profiling.vendor.child_output import OnMessage
from llm_perf_opt.profiling.vendor.gates import Tool
from llm_perf_opt.profiling.vendor.launch import Callbacks, Finished
from llm_perf_opt.profiling.vendor.logs import AGENT_LOST, FOLLOWS_A_FAILURE, log_error
from llm_perf_opt.profiling.vendor.reports import export_nsys, import_ncu_csv
from llm_perf_opt.profiling.vendor.tool_pass import ToolLimits, ToolRun, run_tool
from llm_perf_opt.traces.health import Expected, examined
from llm_perf_opt.traces.ncu_csv import read_ncu
from llm_perf_opt.traces.trace_cache import cached_trace


@dataclass(frozen=True)
class NsysAsked:
    """How a report of nsys is judged."""

    nsys: Path
    expected: Expected
    max_trace_gb: float
    starts: int = 1
    """How often nsys may be started where it loses its agent."""


@dataclass(frozen=True)
class NcuAsked:
    """How a report of ncu is judged."""

    ncu: Path
    max_trace_gb: float
    launches: int = 0
    """That were asked for; 0: as many as there are."""


class _Kept:
    """Runs a tool and keeps how it went for whoever judges the pass."""

    def __init__(self, tool: Tool, max_trace_gb: float, starts: int = 1) -> None:
        self._tool: Tool = tool
        self._max_trace_gb = max_trace_gb
        self._starts = starts
        self.went: ToolRun | None = None

    @property
    def run(self) -> Run:
        def run(plan: PassPlan, folder: RunFolder, on_message: OnMessage) -> Finished:
            self.went = run_tool(
                self._tool,
                plan.argv,
                folder.tool_report(plan.name),
                log=folder.log_file(plan.name),
                environment=plan.environment,
                limits=ToolLimits(timeout_s=plan.timeout_s, max_trace_gb=self._max_trace_gb, starts=self._starts),
                callbacks=Callbacks(on_message=on_message, on_tick=plan.on_tick),
            )
            return self.went.finished

        return run

    def error(self, ended: LlmPerfError | None) -> LlmPerfError | None:
        """What the program said, then what the tool's log says, then whether there is a report at all."""
        if self.went is None:
            return ended
        complaint = log_error(self.went.problems)
        if complaint is not None and (ended is None or isinstance(ended, UnexplainedEndError)):
            first = ended if ended is not None and _may_follow(self.went) else None
            facts = (first.fact if first else "", complaint.fact, started_again(self.went))
            remedies = (first.remedy if first else "", complaint.remedy)
            return type(complaint)(" ".join(filter(None, facts)), " ".join(filter(None, remedies)))
        if ended is None and isinstance(self.went.report, Missing):
            return CaptureError(f"{self.went.report.why}, and ended without an error.", "See the pass's log.txt.")
        return ended


def nsys_pass(folder: RunFolder, plan: PassPlan, listener: Listener, asked: NsysAsked) -> None:
    """Record a timeline, export it, and refuse it where its numbers would be wrong."""
    kept = _Kept("nsys", asked.max_trace_gb, asked.starts)
    expected = replace(asked.expected, started_after_utc_ns=time.time_ns() - CLOCK_SLACK_NS)

    def check(ended: LlmPerfError | None) -> PassOutcome:
        error = kept.error(ended)
        if kept.went is None or isinstance(kept.went.report, Missing):
            return PassOutcome(error)
        log, sqlite = folder.log_file(plan.name), folder.timeline_file(plan.name)
        listener.pass_message(plan.name, {"event": "phase", "text": "exporting and checking the report"})
        export_nsys(asked.nsys, kept.went.report, sqlite, log=log)
        return PassOutcome(error or _incomplete(folder, plan.name, expected), started_again(kept.went))

    run_pass(folder, plan, listener, run=kept.run, check=check)


def started_again(went: ToolRun) -> str:
    """What is said of a recording that did not come at once, or not at all."""
    if went.starts == 1:
        return ""
    if any(problem.id == AGENT_LOST for problem in went.problems):
        return f"It was started {went.starts} times and lost it each time."
    return f"nsys lost the connection to its agent at first and was started {went.starts} times."


def _may_follow(went: ToolRun) -> bool:
    """Whether what the tool complains of may be no more than what the program's own failure led to: then that is told first."""
    worst = next((problem for problem in went.problems if problem.fatal), None)
    return worst is not None and worst.id in FOLLOWS_A_FAILURE


def _incomplete(folder: RunFolder, name: str, expected: Expected) -> LlmPerfError | None:
    """Why the report cannot be used. Its tables are kept, so that nothing parses it again."""
    try:
        opened = cached_trace(folder.timeline_file(name), folder.tables(name), columns=stage_columns)
        trace = examined(opened.trace, expected)
    except ParseError as error:
        return CaptureError(f"What nsys exported cannot be read: {error.fact}", "Record again with another Nsight Systems.")
    worst = next((problem for problem in trace.problems if problem.fatal), None)
    if worst is None:
        return None
    return CaptureError(f"The report of nsys is incomplete and is not used: {worst.what}", worst.remedy)


def ncu_pass(folder: RunFolder, plan: PassPlan, listener: Listener, asked: NcuAsked) -> None:
    """Count, write the counters out as a table, and refuse it where they were lost. What a cut-short pass counted is kept."""
    kept = _Kept("ncu", asked.max_trace_gb)

    def check(ended: LlmPerfError | None) -> PassOutcome:
        error = kept.error(ended)
        if kept.went is None or isinstance(kept.went.report, Missing):
            return PassOutcome(error)
        log, table = folder.log_file(plan.name), folder.counters_file(plan.name)
        import_ncu_csv(asked.ncu, kept.went.report, "raw", table, log=log)
        found = folder.parsed(table, read_ncu)
        worst = next((problem for problem in found.problems if problem.fatal), None)
        if error is None and worst is not None:
            error = CaptureError(f"The counters cannot be used: {worst.what}", worst.remedy)
        return PassOutcome(error, " ".join(went_without(found, asked.launches)))

    run_pass(folder, plan, listener, run=kept.run, check=check)


def went_without(found: CounterReport, launches: int) -> Iterator[str]:
    """What a table that can be used lacks of what was asked for."""
    yield from (problem.what for problem in found.problems if not problem.fatal)
    if len(found.kernels) < launches:
        yield (
            f"Of {launches} launches asked for, {len(found.kernels)} were counted: the program did not launch the same kernels "
            "as when its timeline was recorded."
        )

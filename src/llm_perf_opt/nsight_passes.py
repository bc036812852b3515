"""One pass below an Nsight tool, from its command to figures that may be believed: for our own runner and for any program."""

from dataclasses import dataclass
from pathlib import Path

from llm_perf_opt.analysis.trace_health import Expected, examined
from llm_perf_opt.errors import CaptureError, LlmPerfError
from llm_perf_opt.listener import Listener
from llm_perf_opt.parsers.ncu_csv import read_ncu
from llm_perf_opt.parsers.nsys_sqlite import read_nsys
from llm_perf_opt.passes import PassPlan, Run, run_pass
from llm_perf_opt.profiling.vendor.child import UnexplainedEndError
from llm_perf_opt.profiling.vendor.child_output import OnMessage
from llm_perf_opt.profiling.vendor.gates import Tool
from llm_perf_opt.profiling.vendor.launch import Finished
from llm_perf_opt.profiling.vendor.logs import log_error
from llm_perf_opt.profiling.vendor.reports import export_nsys, import_ncu_csv
from llm_perf_opt.profiling.vendor.tool_pass import ToolRun, run_tool
from llm_perf_opt.records import Missing
from llm_perf_opt.run_folder import RunFolder


@dataclass(frozen=True)
class NsysAsked:
    """How a report of nsys is judged."""

    nsys: Path
    expected: Expected
    max_trace_gb: float


@dataclass(frozen=True)
class NcuAsked:
    """How a report of ncu is judged."""

    ncu: Path
    max_trace_gb: float


class _Kept:
    """Runs a tool and keeps how it went for whoever judges the pass."""

    def __init__(self, tool: Tool, max_trace_gb: float) -> None:
        self._tool: Tool = tool
        self._max_trace_gb = max_trace_gb
        self.went: ToolRun | None = None

    @property
    def run(self) -> Run:
        def run(plan: PassPlan, folder: RunFolder, on_message: OnMessage) -> Finished:
            self.went = run_tool(
                self._tool,
                plan.argv,
                folder.tool_report(plan.name),
                log=folder.log_file(plan.name),
                timeout_s=plan.timeout_s,
                max_trace_gb=self._max_trace_gb,
                on_message=on_message,
                environment=plan.environment,
            )
            return self.went.finished

        return run

    def error(self, ended: LlmPerfError | None) -> LlmPerfError | None:
        """What the program said, then what the tool's log says, then whether there is a report at all."""
        if self.went is None:
            return ended
        complaint = log_error(self.went.problems)
        if complaint is not None and (ended is None or isinstance(ended, UnexplainedEndError)):
            return complaint
        if ended is None and isinstance(self.went.report, Missing):
            return CaptureError(f"{self.went.report.why}, and ended without an error.", "See the pass's log.txt.")
        return ended


def nsys_pass(folder: RunFolder, plan: PassPlan, listener: Listener, asked: NsysAsked) -> None:
    """Record a timeline, export it, and refuse it where its numbers would be wrong."""
    kept = _Kept("nsys", asked.max_trace_gb)

    def check(ended: LlmPerfError | None) -> LlmPerfError | None:
        error = kept.error(ended)
        if kept.went is None or isinstance(kept.went.report, Missing):
            return error
        log, sqlite = folder.log_file(plan.name), folder.timeline_file(plan.name)
        listener.pass_message(plan.name, {"event": "phase", "text": "exporting and checking the report"})
        export_nsys(asked.nsys, kept.went.report, sqlite, log=log)
        return error or _incomplete(sqlite, asked.expected)

    run_pass(folder, plan, listener, run=kept.run, check=check)


def _incomplete(sqlite: Path, expected: Expected) -> LlmPerfError | None:
    trace = examined(read_nsys(sqlite), expected)
    worst = next((problem for problem in trace.problems if problem.fatal), None)
    if worst is None:
        return None
    return CaptureError(f"The report of nsys is incomplete and is not used: {worst.what}", worst.remedy)


def ncu_pass(folder: RunFolder, plan: PassPlan, listener: Listener, asked: NcuAsked) -> None:
    """Count, write the counters out as a table, and refuse it where they were lost. What a cut-short pass counted is kept."""
    kept = _Kept("ncu", asked.max_trace_gb)

    def check(ended: LlmPerfError | None) -> LlmPerfError | None:
        error = kept.error(ended)
        if kept.went is None or isinstance(kept.went.report, Missing):
            return error
        log, table = folder.log_file(plan.name), folder.counters_file(plan.name)
        import_ncu_csv(asked.ncu, kept.went.report, "raw", table, log=log)
        worst = next((problem for problem in read_ncu(table).problems if problem.fatal), None)
        if error is None and worst is not None:
            return CaptureError(f"The counters cannot be used: {worst.what}", worst.remedy)
        return error

    run_pass(folder, plan, listener, run=kept.run, check=check)

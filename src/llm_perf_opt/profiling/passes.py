"""Run a pass: record its command, run it in a separate process, and write its outcome to run.json."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

from llm_perf_opt.config.passes import Pass, label_of, pass_named
from llm_perf_opt.config.schema import ProfilingConfig, RunConfig
from llm_perf_opt.core.errors import CaptureError, LlmPerfError, ParseError, ResourceError
from llm_perf_opt.core.records import Missing, PassRecord
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.core.secrets import NOTE, hidden_argv
from llm_perf_opt.profiling.provenance import packages
from llm_perf_opt.profiling.requested_metrics import on_gpu
from llm_perf_opt.profiling.vendor.child import OnMessage, OnTick, no_tick
from llm_perf_opt.profiling.vendor.gates import Tool
from llm_perf_opt.profiling.vendor.launch import (
    Callbacks,
    Finished,
    UnexplainedEndError,
    build_work_argv,
    child_environment,
    error_in,
    program_environment,
    run_child,
    verdict,
)
from llm_perf_opt.profiling.vendor.logs import AGENT_LOST, FOLLOWS_A_FAILURE, log_error
from llm_perf_opt.profiling.vendor.probe import locate
from llm_perf_opt.profiling.vendor.tool_pass import ENDINGS, ToolLimits, ToolRun, report_of, run_tool

TICK: dict[str, Any] = {"event": "tick"}
"""A message sent once a second while a pass runs."""


class Listener(Protocol):
    """Receives the progress of a capture."""

    def pass_started(self, name: str, label: str) -> None:
        """Called when a pass starts."""

    def pass_message(self, name: str, message: dict[str, Any]) -> None:
        """Called with each message of the measured process, and with TICK."""

    def pass_ended(self, entry: PassRecord) -> None:
        """Called when a pass has ended."""


@dataclass(frozen=True)
class PassPlan:
    """A pass to run."""

    name: str
    argv: Sequence[str]
    timeout_s: float
    tool_version: str = ""
    note: str = ""
    """What of the request cannot be recorded; kept in run.json even if the pass succeeds."""
    environment: Mapping[str, str] | None = None
    """Environment of the child; None: that of the measured process."""
    limit: str = "profiling.pass_timeout_s"
    """The setting that `timeout_s` comes from."""
    longer: str = ""
    """What to do if the time was too short; default: raise the setting."""
    on_tick: OnTick = no_tick
    """Called once a second while the pass runs."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """Setting of `llm-perf run` → its name in the command that the user typed, for remedies."""
    phase: str = ""
    """What the command does as soon as it has started, for progress; empty: it says that itself."""


class NothingToCountError(CaptureError):
    """There is no recorded kernel to count."""


@dataclass(frozen=True)
class Program:
    """A user's program that is profiled instead of a model."""

    argv: tuple[str, ...]
    range: str = ""
    """An NVTX range of the program in nsys syntax, NAME@DOMAIN. Empty: the whole program."""
    as_available: bool = False
    """The user named no passes: one whose tool is missing, or that has nothing to count, is left out without an error."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """Settings of `llm-perf run` → the options of `llm-perf exec`."""


@dataclass(frozen=True)
class Capture:
    """One capture: its folder, its listener and what is profiled. Passes are launched with it."""

    folder: RunFolder
    listener: Listener
    names: tuple[str, ...]
    """The passes to run."""
    profiling: ProfilingConfig
    config: RunConfig | None = None
    """Configuration of the run; None if a program is profiled."""
    program: Program | None = None
    device: str = "auto"
    device_index: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the measured process; a program's environment is not changed."""
    code: tuple[str, ...] = ()
    """The settings that can run code and were typed, as KEY=VALUE: the measured process gets them as well."""

    @property
    def environment(self) -> dict[str, str] | None:
        """The environment of the child; None: that of the measured process."""
        if self.program:
            return program_environment()
        return {**child_environment(), **self.variables} if self.variables else None

    @property
    def gpu(self) -> bool:
        """Whether there is an NVIDIA GPU to run on."""
        return on_gpu(self.device)

    def settings(self, name: str) -> Any:
        """Return the section of a pass in `profiling.passes`; its defaults if a program is profiled."""
        found = pass_named(name)
        if found is None:
            raise ValueError(f"{name} is not registered")
        return found.settings_in(self.config) if self.config else found.settings(enable=True)

    def work(self, name: str, decode_steps: int | None = None) -> list[str]:
        """Return the command that a profiler wraps: the measured process with one marked iteration, or the program."""
        if self.program:
            return list(self.program.argv)
        return self.measured("plain", name, decode_steps)

    def measured(self, settings: str, name: str, decode_steps: int | None = None) -> list[str]:
        """Return the command of the measured process, which runs the model as the pass `settings` asks."""
        return [*build_work_argv(self.folder.config_file, settings, self.folder.raw(name), decode_steps), *self.code]

    def plan(self, name: str, argv: Sequence[str], version: str = "", note: str = "") -> PassPlan:
        """Return the plan of a pass with this command."""
        spellings = self.program.spellings if self.program else {}
        timeout_s, phase = self.profiling.pass_timeout_s, "running the program" if self.program else ""
        return PassPlan(name, argv, timeout_s, version, note, self.environment, spellings=spellings, phase=phase)

    def started(self, name: str) -> None:
        """Announce a pass."""
        self.listener.pass_started(name, label_of(name))

    def skip(self, name: str, why: LlmPerfError) -> None:
        """Record that a pass was not run."""
        entry = PassRecord(name, "skipped", why=why.fact, remedy=why.remedy)
        self.folder.update_pass(entry)
        self.listener.pass_ended(entry)

    def without(self, name: str) -> str:
        """Return how to leave out a pass, as the end of a sentence."""
        if not self.program:
            options = {"nsys": "choose profiling=minimal", "ncu": "choose profiling=nsys or minimal"}
            return options.get(name, f"set profiling.passes.{name}.enable=false")
        earlier = takewhile(lambda other: other != name, self.names)
        return f"leave it out with --passes {','.join(earlier) or 'program'}"

    def tool(self, name: str, label: str) -> Path:
        """Return the path of nsys, ncu or another tool, or raise a ResourceError."""
        located = locate(name)
        if located.path is not None:
            return located.path
        left_out = self.program is not None and self.program.as_available
        reason = located.warning or f"there is no {name} on the PATH or in the usual folders"
        raise ResourceError(
            f"{label} was {'left out:' if left_out else 'requested, but'} {reason}.",
            f"Install it, set {name.upper()} to the binary, or {self.without(name)}; see `llm-perf doctor`.",
        )


Run = Callable[[PassPlan, RunFolder, OnMessage], Finished]
"""Runs the command of a pass to its end."""


@dataclass(frozen=True)
class PassOutcome:
    """How a pass ended."""

    error: LlmPerfError | None = None
    note: str = ""
    """What a successful pass could not record."""


Check = Callable[[LlmPerfError | None], PassOutcome]
"""Takes the child's error, if any, and checks the files of the pass."""


def begin_pass(folder: RunFolder, name: str, argv: Sequence[str]) -> None:
    """Create the folder of the pass and write its command there, without credentials."""
    shown = hidden_argv(argv)
    lines = [shlex.join(shown), *([NOTE] if shown != list(argv) else []), ""]
    folder.write(folder.command_file(name), "\n".join(lines).encode(errors="surrogateescape"))


def plain_run(on_start: Callable[[int], None] = lambda _: None) -> Run:
    """Return a `Run` that starts the child without a profiler."""

    def run(plan: PassPlan, folder: RunFolder, on_message: OnMessage) -> Finished:
        return run_child(
            plan.argv,
            log=folder.log_file(plan.name),
            timeout_s=plan.timeout_s,
            environment=plan.environment,
            callbacks=Callbacks(on_message=on_message, on_start=on_start, on_tick=plan.on_tick),
        )

    return run


def run_pass(
    folder: RunFolder, plan: PassPlan, listener: Listener, *, run: Run | None = None, check: Check = PassOutcome
) -> None:
    """Run an announced pass to its end and record its outcome; raise its error."""
    begin_pass(folder, plan.name, plan.argv)
    entry = PassRecord(plan.name, "started", tuple(plan.argv), tool_version=plan.tool_version)
    folder.update_pass(entry)
    errors: list[LlmPerfError] = []

    def on_message(message: dict[str, Any]) -> None:
        error = error_in(message)
        if error is not None:
            errors.append(error)
        listener.pass_message(plan.name, message)

    plan = replace(plan, on_tick=lambda: listener.pass_message(plan.name, TICK))
    finished: Finished | None = None
    if plan.phase:
        listener.pass_message(plan.name, {"event": "phase", "text": plan.phase})
    try:
        finished = (run or plain_run())(plan, folder, on_message)
        outcome = check(_child_error(plan, finished, errors, folder))
    except LlmPerfError as raised:
        outcome = PassOutcome(raised)
    error = respelled_error(outcome.error, plan.spellings) if outcome.error else None
    entry = replace(
        entry,
        status="complete" if error is None else "failed",
        exit_code=finished.exit_code if finished else None,
        seconds=round(finished.seconds, 3) if finished else None,
        why=error.fact if error else " ".join(filter(None, (plan.note, outcome.note))),
        remedy=error.remedy if error else "",
    )
    folder.update_pass(entry)
    listener.pass_ended(entry)
    if error is not None:
        raise error


def run_alone(capture: Capture, name: str, argv: Sequence[str], version: str = "", *, run: Run | None = None) -> None:
    """Run a pass that is one command, and read back the files that it must leave in `raw/`."""
    capture.started(name)
    found = pass_named(name)

    def check(ended: LlmPerfError | None) -> PassOutcome:
        return PassOutcome(ended or (_result_error(capture.folder, found) if found else None))

    run_pass(capture.folder, capture.plan(name, argv, version), capture.listener, run=run, check=check)


def run_measured(capture: Capture, name: str, *, run: Run | None = None) -> None:
    """Run one of the measured process's own passes (clean, torch)."""
    run_alone(capture, name, capture.measured(name, name), framework(), run=run)


def framework() -> str:
    """Return the version of torch as recorded with a pass."""
    return f"torch {packages().get('torch', 'not installed')}"


def _result_error(folder: RunFolder, ended: Pass) -> CaptureError | None:
    """Return what is wrong with the files of a pass that ended without an error, or None."""
    try:
        for file, read in ended.leaves.items():
            if not ended.measured(folder.parsed(folder.raw(ended.name) / file, read)):
                raise ParseError(f"{file} has no measured iteration.")
    except ParseError as error:
        return CaptureError(
            f"The pass {ended.name} ({ended.label}) ended, but left no usable result: {error.fact}",
            f"See {folder.log_file(ended.name)}; docs/runtimes.md defines what a runner must return.",
        )
    return None


def respelled(text: str, spellings: Mapping[str, str]) -> str:
    """Return the text with each setting replaced by its other name."""
    for setting, name in spellings.items():
        text = text.replace(setting, name)
    return text


def respelled_error(error: LlmPerfError, spellings: Mapping[str, str]) -> LlmPerfError:
    """Return the error with each setting replaced by its other name."""
    return type(error)(respelled(error.fact, spellings), respelled(error.remedy, spellings)) if spellings else error


def closed(passes: Sequence[PassRecord]) -> tuple[PassRecord, ...]:
    """Return the passes of a run that has ended: pending ones are skipped, started ones failed."""
    found = []
    for entry in passes:
        if entry.status == "pending":
            entry = replace(entry, status="skipped", why="The run ended before this pass.")
        elif entry.status == "started":
            entry = replace(entry, status="failed", why="The run ended during this pass.")
        found.append(entry)
    return tuple(found)


def left_something(folder: RunFolder, passes: Sequence[PassRecord]) -> bool:
    """Return whether a pass succeeded, or a failed one left a report."""
    return any(
        (entry.status == "complete" and _stands_alone(entry.name))
        or any(report_of(tool, folder.tool_report(entry.name)).exists() for tool in ENDINGS)
        for entry in passes
    )


def _stands_alone(name: str) -> bool:
    """Return whether a pass has a result without the pass that it runs next to; telemetry has none."""
    found = pass_named(name)
    return found is None or found.launch is not None or bool(found.stages)


def _child_error(plan: PassPlan, finished: Finished, errors: list[LlmPerfError], folder: RunFolder) -> LlmPerfError | None:
    if finished.stopped is not None:
        return finished.stopped
    return verdict(
        f"The pass {plan.name} ({label_of(plan.name)})",
        finished,
        errors,
        folder.log_file(plan.name),
        limit=f"{plan.limit} allows",
        longer=plan.longer or f"Raise {plan.limit}, or measure less.",
        smaller="try a smaller model, batch or prompt.",
    )


class UnderTool:
    """Runs a pass under an Nsight tool and keeps the result."""

    def __init__(self, tool: Tool, max_trace_gb: float, starts: int = 1) -> None:
        self._tool: Tool = tool
        self._max_trace_gb = max_trace_gb
        self._starts = starts
        self.result: ToolRun | None = None

    def run(self, plan: PassPlan, folder: RunFolder, on_message: OnMessage) -> Finished:
        """Run the pass; see `Run`."""
        self.result = run_tool(
            self._tool,
            plan.argv,
            folder.tool_report(plan.name),
            log=folder.log_file(plan.name),
            environment=plan.environment,
            limits=ToolLimits(timeout_s=plan.timeout_s, max_trace_gb=self._max_trace_gb, starts=self._starts),
            callbacks=Callbacks(on_message=on_message, on_tick=plan.on_tick),
        )
        return self.result.finished

    def error(self, ended: LlmPerfError | None) -> LlmPerfError | None:
        """Return the error of the pass: the program's, then the one in the tool's log, then a missing report."""
        if self.result is None:
            return ended
        complaint = log_error(self.result.problems)
        if complaint is not None and (ended is None or isinstance(ended, UnexplainedEndError)):
            first = ended if ended is not None and _may_be_caused_by_program(self.result) else None
            facts = (first.fact if first else "", complaint.fact, restart_note(self.result))
            remedies = (first.remedy if first else "", complaint.remedy)
            return type(complaint)(" ".join(filter(None, facts)), " ".join(filter(None, remedies)))
        if ended is None and isinstance(self.result.report, Missing):
            return CaptureError(f"{self.result.report.why}, but ended without an error.", "See the pass's log.txt.")
        return ended


def restart_note(result: ToolRun) -> str:
    """Return a sentence on the restarts of nsys, or an empty string."""
    if result.starts == 1:
        return ""
    if any(problem.id == AGENT_LOST for problem in result.problems):
        return f"It was started {result.starts} times and lost the connection each time."
    return f"nsys lost the connection to its agent and was started {result.starts} times."


def _may_be_caused_by_program(result: ToolRun) -> bool:
    """Return whether the tool's error may be caused by a failure of the program, which is then reported first."""
    worst = next((problem for problem in result.problems if problem.fatal), None)
    return worst is not None and worst.id in FOLLOWS_A_FAILURE

"""What every pass is made of: its command is recorded, it runs in a process of its own, and run.json says what became of it."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

from llm_perf_opt.config.passes import Pass, known_passes, label_of, pass_named
from llm_perf_opt.config.schema import ProfilingConfig, RunConfig
from llm_perf_opt.core.errors import CaptureError, LlmPerfError, ParseError, ResourceError
from llm_perf_opt.core.records import Missing, PassRecord
from llm_perf_opt.core.run_folder import RunFolder, write_whole
from llm_perf_opt.profiling.provenance import packages
from llm_perf_opt.profiling.requested_metrics import on_gpu
from llm_perf_opt.profiling.vendor.child import OnMessage, OnTick, no_tick
from llm_perf_opt.profiling.vendor.gates import Tool
from llm_perf_opt.profiling.vendor.launch import (
    Callbacks,
    Finished,
    UnexplainedEndError,
    build_work_argv,
    error_in,
    program_environment,
    run_child,
    verdict,
)
from llm_perf_opt.profiling.vendor.logs import AGENT_LOST, FOLLOWS_A_FAILURE, log_error
from llm_perf_opt.profiling.vendor.probe import locate
from llm_perf_opt.profiling.vendor.tool_pass import ENDINGS, ToolLimits, ToolRun, report_of, run_tool

TICK: dict[str, Any] = {"event": "tick"}
"""The message that says only that time passes, once a second."""


class Listener(Protocol):
    """Whoever wants to know how a capture goes."""

    def pass_started(self, name: str, label: str) -> None:
        """A pass begins."""

    def pass_message(self, name: str, message: dict[str, Any]) -> None:
        """The measured process says where it stands, or nothing (TICK)."""

    def pass_ended(self, entry: PassRecord) -> None:
        """A pass is over."""


@dataclass(frozen=True)
class PassPlan:
    """A pass about to be run."""

    name: str
    argv: Sequence[str]
    timeout_s: float
    tool_version: str = ""
    note: str = ""
    """What of the request it goes without; recorded where it ends well, too."""
    environment: Mapping[str, str] | None = None
    """Of the child; None: that of our own measured process."""
    limit: str = "profiling.pass_timeout_s"
    """The setting that `timeout_s` comes from …"""
    longer: str = ""
    """… and what to do where the time was too short; by default, to raise it."""
    on_tick: OnTick = no_tick
    """Called once a second while it runs."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """A setting of `llm-perf run` → what it is called where this pass was asked for: remedies must be typeable."""


class NothingToCountError(CaptureError):
    """No kernel was recorded for counters to be read of."""


@dataclass(frozen=True)
class Program:
    """A user's own program, where that is profiled and not a model."""

    argv: tuple[str, ...]
    range: str = ""
    """An NVTX range of the program, as nsys spells it: NAME@DOMAIN. Empty: the whole program."""
    as_available: bool = False
    """Nobody named the passes: one whose tool is not here, or that has nothing to count, is left out and no error."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """Settings of `llm-perf run` → the options of `llm-perf exec`."""


@dataclass(frozen=True)
class Capture:
    """One capture: its folder, its listener, and what is profiled. Passes are launched with it."""

    folder: RunFolder
    listener: Listener
    names: tuple[str, ...]
    """The passes it is made of."""
    profiling: ProfilingConfig
    config: RunConfig | None = None
    """Of a run; None where a program is profiled."""
    program: Program | None = None
    device: str = "auto"
    device_index: int = 0

    @property
    def gpu(self) -> bool:
        """Whether there is an NVIDIA GPU to run on."""
        return on_gpu(self.device)

    def settings(self, name: str) -> Any:
        """Return the section of a pass in `profiling.passes`; its defaults where a program is profiled."""
        found = pass_named(name)
        if found is None:
            raise ValueError(f"{name} is not registered")
        return found.settings_in(self.config) if self.config else found.settings(enable=True)

    def work(self, name: str, decode_steps: int | None = None) -> list[str]:
        """Return the command that a profiler wraps: the measured process with one marked iteration, or the program."""
        if self.program:
            return list(self.program.argv)
        return build_work_argv(self.folder.config_file, "plain", self.folder.raw(name), decode_steps)

    def plan(self, name: str, argv: Sequence[str], version: str = "", note: str = "") -> PassPlan:
        """Return the plan of a pass with this command."""
        environment = program_environment() if self.program else None
        spellings = self.program.spellings if self.program else {}
        return PassPlan(name, argv, self.profiling.pass_timeout_s, version, note, environment, spellings=spellings)

    def started(self, name: str) -> None:
        """Announce a pass."""
        self.listener.pass_started(name, label_of(name))

    def skip(self, name: str, why: LlmPerfError) -> None:
        """Record that a pass was not run."""
        entry = PassRecord(name, "skipped", why=why.fact, remedy=why.remedy)
        self.folder.update_pass(entry)
        self.listener.pass_ended(entry)

    def without(self, name: str) -> str:
        """Return how to do without a pass, as the end of a sentence."""
        if not self.program:
            options = {"nsys": "choose profiling=minimal", "ncu": "choose profiling=nsys or minimal"}
            return options.get(name, f"set profiling.passes.{name}.enable=false")
        others = takewhile(lambda one: one.name != name, (one for one in known_passes() if one.programs))
        return f"leave it out with --passes {','.join(one.name for one in others)}"

    def tool(self, name: str, label: str) -> Path:
        """Return where nsys, ncu or another tool is; raise a ResourceError where it is nowhere."""
        located = locate(name)
        if located.path is not None:
            return located.path
        left_out = self.program is not None and self.program.as_available
        nowhere = located.warning or f"there is no {name} on the PATH or in the usual folders"
        raise ResourceError(
            f"{label} was {'left out:' if left_out else 'asked for, but'} {nowhere}.",
            f"Install it, name the binary in the variable {name.upper()}, or {self.without(name)}; see `llm-perf doctor`.",
        )


Run = Callable[[PassPlan, RunFolder, OnMessage], Finished]
"""Runs a pass's command to its end."""


@dataclass(frozen=True)
class PassOutcome:
    """What is to be said of a pass that has ended."""

    error: LlmPerfError | None = None
    note: str = ""
    """Of one that ended well: what it goes without."""


Check = Callable[[LlmPerfError | None], PassOutcome]
"""Given what a child's end means, looks at what it left."""


def begin_pass(folder: RunFolder, name: str, argv: Sequence[str]) -> None:
    """Make the pass's folder and write its command there."""
    write_whole(folder.command_file(name), (shlex.join(argv) + "\n").encode(errors="surrogateescape"))


def plain_run(on_start: Callable[[int], None] = lambda _: None) -> Run:
    """Return what runs a child by itself."""

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
    """Run it to its end and record what became of it; raise what went wrong. The caller has announced it."""
    begin_pass(folder, plan.name, plan.argv)
    entry = PassRecord(plan.name, "started", tuple(plan.argv), tool_version=plan.tool_version)
    folder.update_pass(entry)
    said: list[LlmPerfError] = []

    def hear(message: dict[str, Any]) -> None:
        error = error_in(message)
        if error is not None:
            said.append(error)
        listener.pass_message(plan.name, message)

    plan = replace(plan, on_tick=lambda: listener.pass_message(plan.name, TICK))
    finished: Finished | None = None
    try:
        finished = (run or plain_run())(plan, folder, hear)
        outcome = check(_verdict(plan, finished, said, folder))
    except LlmPerfError as raised:
        outcome = PassOutcome(raised)
    error = _respelled(outcome.error, plan.spellings) if outcome.error else None
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
    """Run a pass that is one command, and read back what it must leave in `raw/`."""
    capture.started(name)
    found = pass_named(name)

    def check(ended: LlmPerfError | None) -> PassOutcome:
        return PassOutcome(ended or (_result_flaw(capture.folder, found) if found else None))

    run_pass(capture.folder, capture.plan(name, argv, version), capture.listener, run=run, check=check)


def run_measured(capture: Capture, name: str, *, run: Run | None = None) -> None:
    """Run one of the measured process's own passes (clean, torch)."""
    argv = build_work_argv(capture.folder.config_file, name, capture.folder.raw(name))
    run_alone(capture, name, argv, framework(), run=run)


def framework() -> str:
    """Return the version of torch, as a pass records it."""
    return f"torch {packages().get('torch', 'not installed')}"


def _result_flaw(folder: RunFolder, one: Pass) -> CaptureError | None:
    """Return what is wrong with the result of a pass that ended with exit code 0, if anything is."""
    try:
        for file, read in one.leaves.items():
            if not one.measured(folder.parsed(folder.raw(one.name) / file, read)):
                raise ParseError(f"{file} has no measured iteration.")
    except ParseError as error:
        return CaptureError(
            f"The pass {one.name} ({one.label}) ended, but left no result that can be used: {error.fact}",
            f"See {folder.log_file(one.name)}; a runner of your own must follow the contract in docs/runtimes.md.",
        )
    return None


def respelled(text: str, spellings: Mapping[str, str]) -> str:
    """Return a text that names settings with the names they have elsewhere."""
    for setting, name in spellings.items():
        text = text.replace(setting, name)
    return text


def _respelled(error: LlmPerfError, spellings: Mapping[str, str]) -> LlmPerfError:
    return type(error)(respelled(error.fact, spellings), respelled(error.remedy, spellings)) if spellings else error


def closed(passes: Sequence[PassRecord]) -> tuple[PassRecord, ...]:
    """Return the passes of a run that has ended: none is left waiting or under way."""
    found = []
    for entry in passes:
        if entry.status == "pending":
            entry = replace(entry, status="skipped", why="The run ended before this pass.")
        elif entry.status == "started":
            entry = replace(entry, status="failed", why="The run ended during this pass.")
        found.append(entry)
    return tuple(found)


def left_something(folder: RunFolder, passes: Sequence[PassRecord]) -> bool:
    """Return whether a pass ended well, or a tool left a report of one that did not."""
    return any(
        (entry.status == "complete" and _stands_alone(entry.name))
        or any(report_of(tool, folder.tool_report(entry.name)).exists() for tool in ENDINGS)
        for entry in passes
    )


def _stands_alone(name: str) -> bool:
    """Whether a pass says something without the one it runs next to: telemetry does not."""
    found = pass_named(name)
    return found is None or found.launch is not None or bool(found.stages)


def _verdict(plan: PassPlan, finished: Finished, said: list[LlmPerfError], folder: RunFolder) -> LlmPerfError | None:
    if finished.stopped is not None:
        return finished.stopped
    return verdict(
        f"The pass {plan.name} ({label_of(plan.name)})",
        finished,
        said,
        folder.log_file(plan.name),
        limit=f"{plan.limit} allows",
        longer=plan.longer or f"Raise {plan.limit}, or measure less.",
        smaller="try a smaller model, batch or prompt.",
    )


class UnderTool:
    """Runs a pass under an Nsight tool, and keeps how it went for whoever judges it."""

    def __init__(self, tool: Tool, max_trace_gb: float, starts: int = 1) -> None:
        self._tool: Tool = tool
        self._max_trace_gb = max_trace_gb
        self._starts = starts
        self.went: ToolRun | None = None

    def run(self, plan: PassPlan, folder: RunFolder, on_message: OnMessage) -> Finished:
        """Run it to its end; see `Run`."""
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

    def error(self, ended: LlmPerfError | None) -> LlmPerfError | None:
        """Return what the program said, then what the tool's log says, then whether there is a report at all."""
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


def started_again(went: ToolRun) -> str:
    """Return what is said of a recording that did not come at once, or not at all."""
    if went.starts == 1:
        return ""
    if any(problem.id == AGENT_LOST for problem in went.problems):
        return f"It was started {went.starts} times and lost it each time."
    return f"nsys lost the connection to its agent at first and was started {went.starts} times."


def _may_follow(went: ToolRun) -> bool:
    """Whether the tool's complaint may follow from the program's own failure, which is then reported first."""
    worst = next((problem for problem in went.problems if problem.fatal), None)
    return worst is not None and worst.id in FOLLOWS_A_FAILURE

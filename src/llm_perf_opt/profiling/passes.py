"""One pass of a run: its command is written down, it runs in a process of its own, and run.json says what became of it."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from llm_perf_opt.core.errors import LlmPerfError
from llm_perf_opt.core.records import PassRecord
from llm_perf_opt.core.run_folder import RunFolder, write_whole
from llm_perf_opt.profiling.vendor.child import told_error, verdict
from llm_perf_opt.profiling.vendor.child_output import OnMessage, OnTick, no_tick
from llm_perf_opt.profiling.vendor.launch import Callbacks, Finished, run_child
from llm_perf_opt.profiling.vendor.tool_pass import ENDINGS, report_of

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


LABELS = {
    "clean": "unprofiled reference",
    "nvml": "telemetry",
    "torch": "torch.profiler",
    "nsys": "Nsight Systems",
    "nsys_decode": "Nsight Systems, decode alone",
    "ncu_selftest": "Nsight Compute: are its counters right?",
    "ncu_prefill": "Nsight Compute, prefill",
    "ncu_decode": "Nsight Compute, a decode step",
    "program": "the program alone",
    "ncu": "Nsight Compute",
}


@dataclass(frozen=True)
class PassPlan:
    """A pass about to be run."""

    name: str
    argv: Sequence[str]
    timeout_s: float
    tool_version: str = ""
    note: str = ""
    """What of the request it goes without; told where it ends well, too."""
    environment: Mapping[str, str] | None = None
    """Of the child; None: that of our own measured process."""
    limit: str = "profiling.pass_timeout_s"
    """The setting that `timeout_s` comes from."""
    on_tick: OnTick = no_tick
    """Called once a second while it runs."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """A setting of `llm-perf run` → what it is called where this pass was asked for: remedies must be typeable."""


Run = Callable[[PassPlan, RunFolder, OnMessage], Finished]
"""Runs a pass's command to its end."""


@dataclass(frozen=True)
class PassOutcome:
    """What is to be said of a pass that has ended."""

    error: LlmPerfError | None = None
    note: str = ""
    """Of one that ended well: what it goes without."""


Check = Callable[[LlmPerfError | None], PassOutcome]
"""Told what a child's end means, looks at what it left."""


def begin_pass(folder: RunFolder, name: str, argv: Sequence[str]) -> None:
    """Make the pass's folder and write its command down."""
    write_whole(folder.command_file(name), (shlex.join(argv) + "\n").encode(errors="surrogateescape"))


def plain_run(on_start: Callable[[int], None] = lambda _: None) -> Run:
    """A child by itself."""

    def run(plan: PassPlan, folder: RunFolder, on_message: OnMessage) -> Finished:
        log = folder.log_file(plan.name)
        return run_child(
            plan.argv,
            log=log,
            timeout_s=plan.timeout_s,
            environment=plan.environment,
            callbacks=Callbacks(on_message=on_message, on_start=on_start, on_tick=plan.on_tick),
        )

    return run


def run_pass(
    folder: RunFolder, plan: PassPlan, listener: Listener, *, run: Run | None = None, check: Check = PassOutcome
) -> None:
    """Run it to its end and write down what became of it; raises what went wrong. The caller has announced it."""
    begin_pass(folder, plan.name, plan.argv)
    entry = PassRecord(plan.name, "started", tuple(plan.argv), tool_version=plan.tool_version)
    folder.update_pass(entry)
    said: list[LlmPerfError] = []

    def hear(message: dict[str, Any]) -> None:
        error = told_error(message)
        if error is not None:
            said.append(error)
        listener.pass_message(plan.name, message)

    plan = replace(plan, on_tick=lambda: listener.pass_message(plan.name, TICK))
    finished: Finished | None = None
    try:
        finished = (run or plain_run())(plan, folder, hear)
        judged = check(_verdict(plan, finished, said, folder))
    except LlmPerfError as raised:
        judged = PassOutcome(raised)
    error = _respelled(judged.error, plan.spellings) if judged.error else None
    entry = replace(
        entry,
        status="complete" if error is None else "failed",
        exit_code=finished.exit_code if finished else None,
        seconds=round(finished.seconds, 3) if finished else None,
        why=error.fact if error else " ".join(filter(None, (plan.note, judged.note))),
        remedy=error.remedy if error else "",
    )
    folder.update_pass(entry)
    listener.pass_ended(entry)
    if error is not None:
        raise error


def respelled(text: str, spellings: Mapping[str, str]) -> str:
    """A text that names settings, with the names they have elsewhere."""
    for setting, name in spellings.items():
        text = text.replace(setting, name)
    return text


def _respelled(error: LlmPerfError, spellings: Mapping[str, str]) -> LlmPerfError:
    return type(error)(respelled(error.fact, spellings), respelled(error.remedy, spellings)) if spellings else error


def skip_pass(folder: RunFolder, name: str, why: LlmPerfError, listener: Listener) -> None:
    """Write down that a pass was not run."""
    entry = PassRecord(name, "skipped", why=why.fact, remedy=why.remedy)
    folder.update_pass(entry)
    listener.pass_ended(entry)


def closed(passes: Sequence[PassRecord]) -> tuple[PassRecord, ...]:
    """The passes of a run that has ended: none is left waiting or under way."""
    found = []
    for entry in passes:
        if entry.status == "pending":
            entry = replace(entry, status="skipped", why="The run ended before this pass.")
        elif entry.status == "started":
            entry = replace(entry, status="failed", why="The run ended during this pass.")
        found.append(entry)
    return tuple(found)


def left_something(folder: RunFolder, passes: Sequence[PassRecord]) -> bool:
    """Whether a pass ended well, or a tool left a report of one that did not."""
    return any(
        (entry.status == "complete" and entry.name != "nvml")
        or any(report_of(tool, folder.tool_report(entry.name)).exists() for tool in ENDINGS)
        for entry in passes
    )


def _verdict(plan: PassPlan, finished: Finished, said: list[LlmPerfError], folder: RunFolder) -> LlmPerfError | None:
    if finished.stopped is not None:
        return finished.stopped
    return verdict(
        f"The pass {plan.name} ({LABELS[plan.name]})",
        finished,
        said,
        folder.log_file(plan.name),
        limit=f"{plan.limit} allows",
        longer=f"Raise {plan.limit}, or measure less.",
        smaller="try a smaller model, batch or prompt.",
    )

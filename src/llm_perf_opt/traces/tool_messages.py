"""What a profiler says about its own recording: which of its messages mean that events are missing."""

from collections.abc import Iterable

from llm_perf_opt.traces.events import TraceProblem

_MOST_MESSAGES = 20
_LONGEST_MESSAGE = 500

# Lower case. What Nsight Systems prints, and writes into its report, when its importer meets something it does not know.
_GAVE_UP = (
    "errors occurred while processing the raw events",
    "unknown runtime api function index",
    "unknown driver api function index",
    "importer error status",
    "importation failed",
    "wrong event order has been detected",
)
_LOST = ("dropped", "overflow", "lost events", "events were lost", "incomplete trace", "data loss")
_PERHAPS_LOST = ("might have been collected", "may have been lost", "might have not been started")


def message_problems(messages: Iterable[tuple[str, str]]) -> tuple[TraceProblem, ...]:
    """Problems from (severity, text) pairs; `info` and what says nothing about the recording is left out, repetitions too."""
    found: dict[str, TraceProblem] = {}
    for severity, text in messages:
        problem = _problem(severity.lower(), " ".join(text.split())[:_LONGEST_MESSAGE])
        if problem is not None:
            found.setdefault(problem.what, problem)
    ordered = sorted(found.values(), key=lambda problem: not problem.fatal)
    if len(ordered) > _MOST_MESSAGES:
        rest = len(ordered) - _MOST_MESSAGES
        more = TraceProblem("tool_warning", f"{rest} more messages of the profiler are not listed", _any_fatal(ordered[-rest:]))
        ordered = [*ordered[:_MOST_MESSAGES], more]
    return tuple(ordered)


def log_problems(log: str) -> tuple[TraceProblem, ...]:
    """Problems in what was printed while recording. The program's own output is in there, so only unmistakable lines count."""
    signs = (*_GAVE_UP, *_PERHAPS_LOST)
    return message_problems(("log", line) for line in log.splitlines() if any(sign in line.lower() for sign in signs))


def _problem(severity: str, text: str) -> TraceProblem | None:
    said = text.lower()
    if any(sign in said for sign in _GAVE_UP):
        return TraceProblem(
            "importer_gave_up",
            f"the profiler's importer stopped half-way: {text}",
            fatal=True,
            remedy="Use a version of Nsight Systems that is as new as the CUDA runtime of the profiled program.",
        )
    if any(sign in said for sign in _LOST):
        return TraceProblem("events_lost", f"the profiler lost events: {text}", True, "Record a shorter stretch, or less of it.")
    if any(sign in said for sign in _PERHAPS_LOST):
        return TraceProblem("events_perhaps_lost", f"the profiler is not sure it saw all events: {text}", fatal=False)
    if "error" in severity or "fatal" in severity:
        return TraceProblem("tool_error", f"the profiler reports an error: {text}", fatal=False)
    if "warn" in severity:
        return TraceProblem("tool_warning", f"the profiler warns: {text}", fatal=False)
    return None


def _any_fatal(problems: Iterable[TraceProblem]) -> bool:
    return any(problem.fatal for problem in problems)

"""Which times of a run are unavailable: stages that cannot be separated, steps that were not timed."""

from llm_perf_opt.core.records import CleanTimings, Missing


def stages_unavailable(timings: CleanTimings) -> Missing | None:
    """Return why prefill and decode cannot be separated; None if they can."""
    runtime = timings.runtime
    return Missing(runtime.inseparable) if runtime is not None and runtime.inseparable else None


def steps_unavailable(timings: CleanTimings) -> Missing | None:
    """Return why single decode steps have no times; None if they do. Covers stages that cannot be separated."""
    runtime = timings.runtime
    if runtime is not None and not runtime.inseparable:
        if runtime.unstepped:
            return Missing(runtime.unstepped)
        if any(0 in iteration.steps_ns for iteration in timings.iterations):
            return Missing("the engine returned several tokens at once, so the gaps between them are unknown")
    return stages_unavailable(timings)

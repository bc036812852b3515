"""What a record of unprofiled times cannot tell apart: stages that ran together, tokens that came at once."""

from llm_perf_opt.core.records import CleanTimings, Missing


def inseparable(timings: CleanTimings) -> Missing | None:
    """Why prefill and decode cannot be told apart, where they cannot."""
    runtime = timings.runtime
    return Missing(runtime.inseparable) if runtime is not None and runtime.inseparable else None


def unstepped(timings: CleanTimings) -> Missing | None:
    """Why single steps of decode have no times, where they have none; also where the stages cannot be told apart."""
    runtime = timings.runtime
    if runtime is not None and not runtime.inseparable:
        if runtime.unstepped:
            return Missing(runtime.unstepped)
        if any(0 in iteration.steps_ns for iteration in timings.iterations):
            return Missing("the engine handed over several tokens at once: the gaps between those cannot be told")
    return inseparable(timings)

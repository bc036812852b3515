"""What ran the model, in the words of a report. Plain PyTorch goes without saying."""

from llm_perf_opt.config.schema import PYTORCH
from llm_perf_opt.core.records import CleanTimings


def ran_by(timings: CleanTimings) -> str:
    """`, run by NAME VERSION`; not escaped."""
    runtime = timings.runtime
    return "" if runtime is None or runtime.type == PYTORCH else f", run by {runtime.type} {runtime.version}"


def runtime_rows(timings: CleanTimings) -> list[tuple[str, str]]:
    """The runtime, how its stages were told apart, and everything it was given; not escaped."""
    runtime = timings.runtime
    if runtime is None or runtime.type == PYTORCH:
        return []
    apart = f"not told apart: {runtime.inseparable}" if runtime.inseparable else runtime.method
    given = {"Engine arguments": runtime.engine, "Engine's variables": runtime.variables}
    return [
        ("Runtime", f"{runtime.type} {runtime.version}"),
        ("Prefill and decode", apart),
        *[(name, ", ".join(f"{key}={value}" for key, value in held.items())) for name, held in given.items() if held],
    ]

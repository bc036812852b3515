"""Rules on whether the figures can be believed: throttling, neighbors, unrest, a profiler that changes what it watches."""

from collections.abc import Set

from llm_perf_opt.analysis.evidence import Evidence
from llm_perf_opt.analysis.findings.finding import Grounds, ToTry, finding
from llm_perf_opt.analysis.findings.launching import INFLATED
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.trace.stage_instances import DECODE
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.warnings import NOISE, WarningId

_NO_SAVING = Missing("it is about trust in the figures, not about speed")


def throttled(evidence: Evidence) -> Finding | None:
    """The device ran slower than it could."""
    said = _warnings(evidence, {WarningId.THROTTLED})
    return _finding(
        "throttled",
        "The GPU was throttled while it was measured: times are longer than the device can do, and vary with its temperature.",
        said,
        "Cool the machine, raise the power limit, or measure with locked clocks; then run again.",
    )


def noisy_machine(evidence: Evidence) -> Finding | None:
    """Others used the machine, or the times did not settle."""
    said = _warnings(evidence, NOISE)
    timings = evidence.facts.timings
    if not isinstance(timings, Missing):
        if not timings.stable:
            said.append(f"The spread target was not reached: {timings.stopped}.")
        if not timings.settled:
            said.append(f"The times had not settled after {len(timings.warmup)} warm-up iterations.")
    return _finding(
        "noisy_machine",
        "The machine was not quiet: small differences between runs are not real, and savings below its spread cannot be shown.",
        said,
        "End what else runs on the machine, raise runtime.max_repeats and runtime.time_limit_s, and run again.",
    )


def profiler_inflation(evidence: Evidence) -> Finding | None:
    """The profiler slowed the stages so much that its gaps mean little."""
    said = []
    for overhead in evidence.facts.overheads:
        if overhead.name == evidence.facts.trace_pass:
            for stage, factor in (("prefill", overhead.prefill), (DECODE, overhead.decode)):
                if not isinstance(factor, Missing) and factor > INFLATED:
                    said.append(f"{stage} took {factor:.1f} times as long below the {overhead.name} pass")
    return _finding(
        "profiler_inflation",
        "The profiler slowed the program many times over: kernels' times stand, the shares of the causes of idleness hardly do.",
        said,
        "Profile less at a time (profiling.torch.preset=minimal, fewer decode steps), and compare with the other timeline.",
    )


def passes_disagree(evidence: Evidence) -> Finding | None:
    """The budget's parts do not fit together."""
    said = [f"{stage.name}: {problem.what}" for stage in evidence.stages for problem in stage.budget.problems]
    return _finding(
        "passes_disagree",
        "Trace and unprofiled pass do not fit together, so the budget has a row below zero.",
        said,
        "Run both passes again on a quiet machine; check that the limits are those of this device.",
    )


def _warnings(evidence: Evidence, ids: Set[WarningId]) -> list[str]:
    telemetry = evidence.facts.telemetry
    return [] if isinstance(telemetry, Missing) else [one.text for one in telemetry.warnings if one.id in ids]


def _finding(id: str, claim: str, said: list[str], change: str) -> Finding | None:
    if not said:
        return None
    grounds = Grounds(tuple(text.rstrip(".") for text in said), "high", "it was seen")
    return finding(id, ("", 1), (claim,), grounds, _NO_SAVING, ToTry(change=change))

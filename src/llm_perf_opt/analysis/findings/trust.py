"""Rules on whether the figures can be trusted: throttling, other users of the machine, unstable times, profiler overhead."""

from collections.abc import Set

from llm_perf_opt.analysis.contention import contention
from llm_perf_opt.analysis.evidence import Evidence
from llm_perf_opt.analysis.findings.finding import INFLATED, Grounds, ToTry, finding
from llm_perf_opt.analysis.stability import settling_warning
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.trace.stage_instances import DECODE
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.warnings import NOISE, WarningId

_NO_SAVING = Missing("this finding is about trust in the figures, not about speed")


def throttled(evidence: Evidence) -> Finding | None:
    """The GPU was throttled while it was measured."""
    return _finding(
        "throttled",
        "The GPU was throttled",
        "The GPU was throttled during the measurement: times are longer than the device needs, and vary with its temperature.",
        _warnings(evidence, {WarningId.THROTTLED}),
        "Cool the machine, raise the power limit, or measure with locked clocks; then run again.",
    )


def noisy_machine(evidence: Evidence) -> Finding | None:
    """Other programs used the machine, or the times did not settle."""
    reasons = _warnings(evidence, NOISE)
    timings = evidence.facts.timings
    seen = "The times vary"
    if not isinstance(timings, Missing):
        contended = contention(timings)
        reasons += [contended.text] if contended else []
        seen = "The machine was not quiet" if reasons else seen
        if not timings.stable:
            reasons.append(f"The spread target was not reached: {timings.stopped}.")
        unsettled = settling_warning(timings)
        reasons += [unsettled.text] if unsettled else []
    return _finding(
        "noisy_machine",
        seen,
        f"{seen}: small differences between runs are noise, and savings smaller than the spread cannot be shown.",
        reasons,
        "Stop other programs on the machine, raise runtime.max_repeats and runtime.time_limit_s, and run again.",
    )


def profiler_inflation(evidence: Evidence) -> Finding | None:
    """The profiler slowed a stage so much that the gaps in its trace mean little."""
    reasons = []
    for overhead in evidence.facts.overheads:
        if overhead.name == evidence.facts.trace_pass:
            for stage, factor in (("prefill", overhead.prefill), (DECODE, overhead.decode)):
                if not isinstance(factor, Missing) and factor > INFLATED:
                    reasons.append(f"{stage} took {factor:.1f} times as long in the {overhead.name} pass")
    return _finding(
        "profiler_inflation",
        "The profiler distorts the trace",
        f"The profiler made a stage more than {INFLATED:.0f} times slower: "
        + (
            "the shares of framework and Python are not reliable."
            if evidence.on_cpu
            else "kernel times are valid, but the shares of the causes of idle time are not reliable."
        ),
        reasons,
        "Profile less at a time (profiling.torch.preset=minimal, fewer decode steps), and compare with the other timeline."
        if evidence.facts.trace_pass in ("", "torch")
        else "Compare with the timeline of the torch pass (profiling.torch.enable=true).",
    )


def passes_disagree(evidence: Evidence) -> Finding | None:
    """The trace and the unprofiled pass are inconsistent."""
    reasons = [f"{stage.name}: {problem.what}" for stage in evidence.every for problem in stage.budget.problems]
    return _finding(
        "passes_disagree",
        "The passes disagree",
        "The trace and the unprofiled pass are inconsistent, so the budget of a stage is unreliable.",
        reasons,
        "Run both passes again on a quiet machine, and check that the peaks are those of this device.",
    )


def _warnings(evidence: Evidence, ids: Set[WarningId]) -> list[str]:
    telemetry = evidence.facts.telemetry
    return [] if isinstance(telemetry, Missing) else [warning.text for warning in telemetry.warnings if warning.id in ids]


def _finding(id: str, title: str, claim: str, reasons: list[str], change: str) -> Finding | None:
    if not reasons:
        return None
    grounds = Grounds(tuple(text.rstrip(".") for text in reasons), "high", "it was observed")
    return finding(id, ("", 1), (claim,), grounds, _NO_SAVING, ToTry(change=change, title=title))

"""Kernels of two runs side by side, as text."""

from collections.abc import Sequence

from llm_perf_opt.analysis.comparison.compare import Comparison
from llm_perf_opt.analysis.comparison.kernels import Both, KernelMatch, KernelPair, LoneKernel, unlike
from llm_perf_opt.analysis.kernels.names import short_name, short_names
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.report.text import escape, milliseconds, reason, signed, table

TOP = 15
KERNELS_TITLE = "Kernels on both sides, matched by name or by role; decode per token"
NAME_WIDTH = 72
"""Characters of a kernel's name in a table."""
SAME_STEPS = "profiling.torch.decode_steps and profiling.nsys.decode_steps, the same on both sides, cure it."


def budget_words(found: Comparison) -> str:
    """Of how many tokens the budgets of decode are; empty where that is not known."""
    return _traced_words(found.traced.budget, found.traced.request)


def kernel_words(found: Comparison) -> str:
    """The same of kernels and counters."""
    return _traced_words(found.traced.kernels, found.traced.request)


def _traced_words(steps: Both, request: Both) -> str:
    if unlike(steps):
        return f"Decode is not compared: {unlike(steps)}. {SAME_STEPS}"
    if 0 in steps:
        return ""
    words = f"Decode is per token: of the {steps[0]} tokens in the trace of each side, their mean"
    if max(request) <= steps[0]:
        return f"{words}."
    many = str(request[0]) if request[0] == request[1] else f"{request[0]} and {request[1]}"
    return f"{words}. A request has {many} such steps, the later ones at longer contexts: the rows need not add up to TPOT."


def kernels_section(match: Maybe[KernelMatch], traced: str) -> str:
    """Return the section of kernels that run on both sides or on one alone."""
    if isinstance(match, Missing):
        return f"## Kernels\n\n{reason(match)}\n"
    body = [
        [
            escape(pair.stage),
            escape(pair.role),
            escape(pair_words(pair)),
            milliseconds(pair.base_ns),
            milliseconds(pair.new_ns),
            signed(pair.new_ns - pair.base_ns),
            f"{calls_words(pair.base_calls)} / {calls_words(pair.new_calls)}",
        ]
        for pair in match.pairs[:TOP]
    ]
    header = ["stage", "role", "kernel", "base", "new", "difference", "calls"]
    note = f"{KERNELS_TITLE}; the {len(body)} of {len(match.pairs)} pairs that changed most.\n\n"
    note += f"{escape(traced)}\n\n" if traced else ""
    text = "## Kernels\n\n" + note + table(header, body, "lllrrrr")
    return text + _alone("Appeared", match.appeared) + _alone("Vanished", match.vanished)


def _alone(title: str, kernels: Sequence[LoneKernel]) -> str:
    if not kernels:
        return f"\n{title}: none.\n"
    rows = [
        [escape(one.stage), escape(one.role), escape(_short(one.name)), milliseconds(one.time_ns), calls_words(one.calls)]
        for one in kernels[:TOP]
    ]
    return f"\n{title}, {len(kernels)}:\n\n" + table(["stage", "role", "kernel", "time", "calls"], rows, "lllrr")


def pair_words(pair: KernelPair) -> str:
    """The kernel of a pair, or both where they are not the same, as a table can hold it."""
    if pair.how == "same name":
        return _short(pair.base_name)
    return " → ".join(short_names(pair.base_name, pair.new_name, NAME_WIDTH))


def calls_words(calls: float) -> str:
    """Launches; per token they need not be whole."""
    if calls == round(calls):
        return f"{round(calls):,}"
    return f"{calls:,.1f}" if calls >= 1000 else f"{calls:.4g}"


def _short(name: str) -> str:
    """A kernel's name as a table can hold it."""
    return short_name(name, NAME_WIDTH)

"""The sentences of a comparison: verdicts, causes, what could not be compared, how to read it."""

import math
from collections.abc import Sequence

from llm_perf_opt.analysis.comparison.compare import Comparison, Row
from llm_perf_opt.analysis.comparison.effects import Effect
from llm_perf_opt.analysis.comparison.figures import ONE_SIDED, POWER_SPREAD, FigureChange
from llm_perf_opt.analysis.comparison.gates import GateResult, needed_to_decide
from llm_perf_opt.analysis.comparison.kernels import Both, unequal_steps
from llm_perf_opt.analysis.comparison.statistics import (
    BOUND_LEVEL,
    DEFAULT_JUDGEMENT,
    LEVEL,
    RECOMMENDED_RUNS,
    are_several,
    is_measured,
)
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.stages import Stage
from llm_perf_opt.report.text import known, memory_size, missing, percent, signed_percent, signed_percents, then, with_unit, words

HEADLINE = ("e2e", "ttft", "tpot")
LEVEL_WORDS = percent(LEVEL, 0)
SAME_STEPS = "Set profiling.torch.decode_steps and profiling.nsys.decode_steps to the same values on both sides."


def verdict_sentences(found: Comparison) -> list[str]:
    """Return the verdicts on the whole request, on prefill and on decode."""
    if found.unjudged:
        return [f"No verdict: {found.unjudged.removesuffix('.')}."]
    rows = [found.row(key) for key in HEADLINE]
    return [f"{row.label}: {words(row.effect, verdict_words)}." for row in rows]


def cause_sentences(found: Comparison) -> list[str]:
    """Return, for each stage that changed, the rows of its budget that changed most; an empty list without budgets."""
    budget = known(found.budget, None)
    if budget is None:
        return []
    sentences = []
    for stage in dict.fromkeys(row.key.partition("/")[0] for row in budget):
        verdict = _stage_verdict(found, stage)
        if verdict not in ("faster", "slower"):
            continue
        moved = sorted(((row, _moved(row)) for row in budget if row.key.startswith(f"{stage}/")), key=lambda pair: -abs(pair[1]))
        least = _WORTH_NAMING * sum(abs(by) for _, by in moved)
        named = [_cause(row) for row, by in moved[:_MOST_CAUSES] if by and abs(by) >= least]
        if named:
            steps = found.traced.budget[0] if stage == Stage.DECODE else 0
            tokens = f" of {steps} tokens" if steps else ""
            sentences.append(f"Why {stage} is {verdict}, from the budgets of one trace{tokens} per side: {'; '.join(named)}.")
    decode = _stage_verdict(found, Stage.DECODE)
    if unequal_steps(found.traced.budget) and decode in ("faster", "slower"):
        sentences.append(f"Why decode is {decode} is unknown: {unequal_steps(found.traced.budget)}. {SAME_STEPS}")
    return sentences


def _stage_verdict(found: Comparison, stage: str) -> str:
    effects = [then(row.effect, lambda effect: str(effect.verdict)) for row in found.stages if row.key == stage]
    return known(effects[0], "") if effects else ""


_ALTERNATE = f"make {RECOMMENDED_RUNS} runs per side and alternate the sides"
_MOST_CAUSES = 3
_WORTH_NAMING = 0.05
"""A row with a smaller share of all changes in a budget is not named."""


def _moved(row: FigureChange) -> float:
    """Return the change of a row; a row that is missing on one side took no time there."""
    base, new = (0.0 if value == ONE_SIDED else value for value in (row.base, row.new))
    return known(then(base, lambda before: then(new, lambda after: after - before)), 0.0)


def _cause(row: FigureChange) -> str:
    base, new = (known(then(value, lambda time: with_unit(time, row.unit)), "none") for value in (row.base, row.new))
    return f"{row.label.partition('/')[2]}: {base} → {new}"


def verdict_words(effect: Effect) -> str:
    """Return the verdict with its interval, and the reason if there is none."""
    if isinstance(effect.interval, Missing):
        return f"not distinguishable ({signed_percent(effect.change)}; {effect.interval.why})"
    about = f"{signed_percent(effect.change)}, {LEVEL_WORDS}: {interval_words(effect)}"
    if effect.verdict != "not distinguishable":
        return f"new is {effect.verdict} ({about})"
    if effect.rival is not None:
        return f"not distinguishable ({about}; the machine's speed changed: {effect.rival.words}; {_ALTERNATE})"
    if effect.uncertainty.moved and effect.interval.has_zero:
        by = math.expm1(effect.uncertainty.moved)
        return f"not distinguishable ({about}; the machine's speed changed by {percent(by)} during a run; {_ALTERNATE})"
    if effect.uncertainty.restless:
        scatter = f"repeats vary by {percent(effect.uncertainty.scatter)}, too much for so few runs per side"
        return f"not distinguishable ({about}; {scatter})"
    if not effect.interval.has_zero:
        return f"not distinguishable ({about}; smaller than the smallest change that gets a verdict)"
    large = abs(effect.change) >= DEFAULT_JUDGEMENT.smallest
    needed = known(needed_to_decide(effect, abs(effect.change), 0.0), "") if large else ""
    return f"not distinguishable ({about}{needed and f'; if the change is real, to show it: {needed}'})"


def interval_words(effect: Effect) -> str:
    """Return the ends of the interval, or `unknown`: the verdicts and the cautions give the reason."""
    ends = then(effect.interval, lambda found: signed_percents(found.low, found.high))
    return "exact" if effect.exact else known(ends, "unknown")


def gate_line(result: GateResult) -> str:
    """Return the outcome of a gate on one line, with what is needed to decide it."""
    needed = needed_words(result)
    return f"{result.outcome}: {result.gate.asked}: {result.why}{needed and f'. {needed}'}"


def needed_words(result: GateResult) -> str:
    """Return what is needed to decide a gate; empty if it is decided."""
    if result.outcome != "cannot tell":
        return ""
    return f"{result.needed.why}." if isinstance(result.needed, Missing) else f"To decide: {result.needed}."


def stage_words(rows: Sequence[Row]) -> str:
    """Return what the rows of the stages mean."""
    paired = next((steps for row in rows if (steps := known(then(row.effect, lambda effect: effect.paired_steps), 0))), 0)
    if not paired:
        return "decode: all steps of a request. decode_step: the median of its single steps."
    return (
        "decode: all steps of a request. decode_step: a single step. Each step's median over the repeats is taken first, then "
        f"the median over all steps. Its change is paired: each of {paired} steps is compared with the same step of the other "
        "side."
    )


def looked_into_words(found: Comparison) -> list[str]:
    """Return which runs the operators, kernels, budget and counters come from; an empty list for one run per side."""
    if len(found.base_runs) == len(found.new_runs) == 1:
        return []
    base, new = found.looked_into
    return [
        "Operators, kernels, budget and counters come from one run per side: the run with the most of this data; if several tie, "
        f"the one whose end-to-end time is nearest the median of the side. Base: {base}. New: {new}."
    ]


USAGE_WORDS = (
    "Memory and energy are read once per run. The allocator and the driver report the same bytes in every run, so the change is "
    "exact unless runs of one side differ. Energy is the duration of the requests multiplied by the card's power. Its interval "
    f"is that of the duration. A difference in power of {percent(POWER_SPREAD, 0)} is added if the runs do not measure it or the "
    "sides ran on different cards."
)


def figure_words(value: float, unit: str) -> str:
    """Return a figure with its unit."""
    return memory_size(value) if unit == "bytes" else with_unit(value, unit)


def left_out(found: Comparison) -> list[str]:
    """Return what could not be compared, with the reason."""
    lost = missing([
        *((row.label, row.effect) for row in (*found.metrics, *found.stages)),
        ("operators", found.operators), ("kernels", found.kernels), ("budget", found.budget), ("counters", found.counters),
    ])  # fmt: skip
    decode = (("budget", found.budget, found.traced.budget), ("kernels", found.kernels, found.traced.kernels))
    unequal = [(name, unequal_steps(steps)) for name, value, steps in decode if known(value, None) is not None]
    lost += [(f"decode in the {name}", why) for name, why in unequal if why]
    lost += missing((row.label, row.change) for row in (*found.memory, *found.energy))
    return [f"{name}: {why}" for name, why in lost]


def traced_words(steps: Both, request: Both) -> str:
    """Return how many tokens the decode figures of the traces cover; empty if that is unknown."""
    if unequal_steps(steps):
        return f"Decode is not compared: {unequal_steps(steps)}. {SAME_STEPS}"
    if 0 in steps:
        return ""
    mean = f"Decode is per token: the mean of the {steps[0]} tokens in the trace of each side"
    if max(request) <= steps[0]:
        return f"{mean}."
    many = str(request[0]) if request[0] == request[1] else f"{request[0]} and {request[1]}"
    return f"{mean}. A request has {many} decode steps, later ones with longer contexts, so the rows need not sum to TPOT."


def method_words(found: Comparison) -> str:
    """Return how the verdicts were reached."""
    return (
        f"A change compares the medians of unprofiled repeats, with a {LEVEL_WORDS} bootstrap interval that is widened if "
        f"neighboring repeats are correlated. {_between_words(found)} If the sides ran one after the other, and a drift or a "
        "jump in the machine's speed during the runs explains the difference better than a change of the program, the interval "
        "is widened to include zero. A change is called faster or slower if its interval excludes zero and it is at least "
        f"{percent(found.judgement.smallest)}; {percent(1 - LEVEL, 0)} of comparisons without a real change still get one of "
        f"these verdicts. A gate passes if, with {percent(BOUND_LEVEL, 0)} confidence, the metric is no worse than its "
        "tolerance allows; it is a regression if the whole interval is beyond the tolerance."
    )


def _between_words(found: Comparison) -> str:
    judgement = found.judgement
    runs = len(found.base_runs), len(found.new_runs)
    if are_several(runs):
        return (
            "With three or more runs per side, the change is judged from the timeline of all repeats, in the order the runs were "
            "made: processes that differ, drifts, correlated noise and switches between two speeds are each considered, weighted "
            "by how well they explain the repeats. It may therefore differ from the ratio of the medians shown."
        )
    if is_measured(runs, judgement):
        words = "The spread between processes is measured from the runs of both sides (Student's t over their medians)."
    elif judgement.process_spread is None:
        return "The spread between processes is unknown, so there is no interval and no verdict."
    else:
        words = (
            f"The spread between processes is assumed to be {percent(judgement.process_spread)}, or more if the machine's "
            "speed changed by more during a run, or if runs of one side differ by more (with Student's t for so few)."
        )
    scatter = percent(judgement.restless, 0)
    return f"{words} If repeats vary by more than {scatter}, a change must exceed the range of the repeats."

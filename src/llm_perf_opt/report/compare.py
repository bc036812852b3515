"""What a comparison comes to, in sentences."""

import math
from collections.abc import Sequence

from llm_perf_opt.analysis.comparison.compare import Comparison, Row
from llm_perf_opt.analysis.comparison.effects import Effect
from llm_perf_opt.analysis.comparison.figures import ONE_SIDED, POWER_SPREAD, FigureChange
from llm_perf_opt.analysis.comparison.gates import GateResult
from llm_perf_opt.analysis.comparison.kernels import Both, unequal_steps
from llm_perf_opt.analysis.comparison.statistics import BOUND_LEVEL, LEVEL, RECOMMENDED_RUNS, are_several, is_measured
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.stages import Stage
from llm_perf_opt.report.text import gibibytes, known, missing, then, with_unit, words

HEADLINE = ("e2e", "ttft", "tpot")
LEVEL_WORDS = f"{LEVEL * 100:g} %"
SAME_STEPS = "profiling.torch.decode_steps and profiling.nsys.decode_steps, the same on both sides, cure it."


def signed_percent(share: float) -> str:
    """Return a change with its sign."""
    return f"{round(share * 100, 2) + 0.0:+.2f} %"  # never −0.00


def verdict_sentences(found: Comparison) -> list[str]:
    """Return the verdicts on the request as a whole and on its two halves."""
    if found.unjudged:
        return [f"No verdict: {found.unjudged.removesuffix('.')}."]
    rows = [found.row(key) for key in HEADLINE]
    return [f"{row.label}: {words(row.effect, _verdict_words)}." for row in rows]


def cause_sentences(found: Comparison) -> list[str]:
    """Return, for each stage that changed, the rows of its budget that changed most; nothing without budgets."""
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
            part = f", of the {steps} tokens in it" if steps else ""
            sentences.append(f"Why {stage} is {verdict}, by the budgets of one trace a side{part}: {'; '.join(named)}.")
    decode = _stage_verdict(found, Stage.DECODE)
    if unequal_steps(found.traced.budget) and decode in ("faster", "slower"):
        sentences.append(f"Why decode is {decode} is not known: {unequal_steps(found.traced.budget)}. {SAME_STEPS}")
    return sentences


def _stage_verdict(found: Comparison, stage: str) -> str:
    effects = [then(row.effect, lambda effect: str(effect.verdict)) for row in found.stages if row.key == stage]
    return known(effects[0], "") if effects else ""


_IN_TURN = f"make {RECOMMENDED_RUNS} runs a side, in turn"
_MOST_CAUSES = 3
_WORTH_NAMING = 0.05
"""A smaller share of all changes in a budget explains nothing."""


def _moved(row: FigureChange) -> float:
    """Return the change of a row; one that is missing on a side took no time there."""
    base, new = (0.0 if value == ONE_SIDED else value for value in (row.base, row.new))
    return known(then(base, lambda before: then(new, lambda after: after - before)), 0.0)


def _cause(row: FigureChange) -> str:
    base, new = (known(then(value, lambda time: with_unit(time, row.unit)), "none") for value in (row.base, row.new))
    return f"{row.label.partition('/')[2]}: {base} → {new}"


def _verdict_words(effect: Effect) -> str:
    if isinstance(effect.interval, Missing):
        return f"not distinguishable ({signed_percent(effect.change)}; {effect.interval.why})"
    about = f"{signed_percent(effect.change)}, {LEVEL_WORDS}: {interval_words(effect)}"
    if effect.verdict != "not distinguishable":
        return f"new is {effect.verdict} ({about})"
    if effect.rival is not None:
        return f"not distinguishable ({about}; the machine changed its speed: {effect.rival.words}; {_IN_TURN})"
    if effect.uncertainty.moved and effect.interval.has_zero:
        by = math.expm1(effect.uncertainty.moved)
        return f"not distinguishable ({about}; the machine changed its speed by {by:.1%} during a run; {_IN_TURN})"
    if effect.uncertainty.restless:
        return f"not distinguishable ({about}; repeats scatter by {effect.uncertainty.scatter:.1%}, much for so few runs a side)"
    if not effect.interval.has_zero:
        return f"not distinguishable ({about}; smaller than the smallest change worth a verdict)"
    return f"not distinguishable ({about})"


def interval_words(effect: Effect) -> str:
    """Return the ends, or that they are unknown: the sentences before and the cautions say why."""
    ends = then(effect.interval, lambda found: f"{found.low * 100:+.2f} to {found.high * 100:+.2f} %")
    return "exact" if effect.exact else known(ends, "unknown")


def gate_line(result: GateResult) -> str:
    """Return a gate's outcome in a line, with what it would take to decide it."""
    needed = needed_words(result)
    return f"{result.outcome}: {result.gate.asked}: {result.why}{needed and f'. {needed}'}"


def needed_words(result: GateResult) -> str:
    """Return what it would take to decide a gate; nothing where it is decided."""
    if result.outcome != "cannot tell":
        return ""
    return f"{result.needed.why}." if isinstance(result.needed, Missing) else f"To tell: {result.needed}."


def stage_words(rows: Sequence[Row]) -> str:
    """Return what the rows of the stages mean."""
    paired = next((steps for row in rows if (steps := known(then(row.effect, lambda effect: effect.paired_steps), 0))), 0)
    if not paired:
        return "decode is all steps of a request, decode_step the median of its single steps."
    return (
        "decode is all steps of a request, decode_step one of them: the median over the steps of each step's median over the "
        f"repeats. It is paired: its change is that of {paired} steps, each against the same step of the other side."
    )


def looked_into_words(found: Comparison) -> list[str]:
    """Return which of several runs per side operators, kernels, budget and counters are from."""
    if len(found.base_runs) == len(found.new_runs) == 1:
        return []
    base, new = found.looked_into
    return [
        "Operators, kernels, budget and counters are those of one run a side: of the runs that hold most of them, the one whose "
        f"end-to-end time is nearest the side's median. Base: {base}. New: {new}."
    ]


USAGE_WORDS = (
    "Memory and energy are read once a run. What the allocator and the driver hand out repeats to the byte, so its change is "
    "exact unless runs of one side differ. Energy is the time of the requests times the power of the card: it has the interval "
    f"of that time, and where the runs do not measure it or the sides ran on different cards, {POWER_SPREAD:.0%} of deviation "
    "between their powers on top."
)


def figure_words(value: float, unit: str) -> str:
    """Return a figure with its unit."""
    return gibibytes(round(value)) if unit == "bytes" else with_unit(value, unit)


def left_out(found: Comparison) -> list[str]:
    """Return what could not be compared, and why."""
    lost = missing([
        *((row.label, row.effect) for row in (*found.metrics, *found.stages)),
        ("operators", found.operators), ("kernels", found.kernels), ("budget", found.budget), ("counters", found.counters),
    ])  # fmt: skip
    decode = (("budget", found.budget, found.traced.budget), ("kernels", found.kernels, found.traced.kernels))
    there = [(name, unequal_steps(steps)) for name, value, steps in decode if known(value, None) is not None]
    lost += [(f"decode in the {name}", why) for name, why in there if why]
    lost += missing((row.label, row.change) for row in (*found.memory, *found.energy))
    return [f"{name}: {why}" for name, why in lost]


def traced_words(steps: Both, request: Both) -> str:
    """Return of how many tokens the decode figures of a trace are; nothing where that is not known."""
    if unequal_steps(steps):
        return f"Decode is not compared: {unequal_steps(steps)}. {SAME_STEPS}"
    if 0 in steps:
        return ""
    mean = f"Decode is per token: of the {steps[0]} tokens in the trace of each side, their mean"
    if max(request) <= steps[0]:
        return f"{mean}."
    many = str(request[0]) if request[0] == request[1] else f"{request[0]} and {request[1]}"
    return f"{mean}. A request has {many} such steps, the later ones at longer contexts: the rows need not add up to TPOT."


def method_words(found: Comparison) -> str:
    """Return how the verdicts were reached."""
    return (
        f"A change is that of the medians of unprofiled repeats, with a {LEVEL_WORDS} bootstrap interval, widened where "
        f"neighboring repeats resemble each other. {_between_words(found)} If the sides were made one after the other, and a "
        "drift or a switch of the machine's speed inside the runs explains their difference better than a change of the program, "
        "the interval is widened to include zero. A change is called faster or slower when its "
        f"interval excludes zero and it is at least {found.judgement.smallest:.1%}; of changes that are none, the level lets "
        f"{1 - LEVEL:.0%} be called one. "
        f"A gate passes where the worsening is, with {BOUND_LEVEL:.0%} confidence, within its tolerance, and is a regression "
        "where the whole interval lies beyond it."
    )


def _between_words(found: Comparison) -> str:
    judgement = found.judgement
    runs = len(found.base_runs), len(found.new_runs)
    if is_measured(runs, judgement):
        words = "The spread between processes is measured over the runs of both sides (Student's t over their medians)."
    elif judgement.process_spread is None:
        return "The spread between processes is unknown, so there is no interval and no verdict."
    else:
        words = (
            f"The spread between processes is assumed to be {judgement.process_spread:.1%}, or more where the machine "
            "changed its speed by more during a run, or runs of one side differ by more (with Student's t for so few)."
        )
    if are_several(runs):
        return words
    return f"{words} Where repeats scatter by more than {judgement.restless:.0%}, a change must exceed the range they visit."

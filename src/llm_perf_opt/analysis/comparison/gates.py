"""Gates: a tolerance checked against an effect. The outcome is pass, regression, or cannot tell, with what would be needed."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from llm_perf_opt.analysis.comparison.effects import Effect, Interval
from llm_perf_opt.analysis.comparison.statistics import BOUND_LEVEL, LEAST_REPEATS, LEVEL, RECOMMENDED_RUNS, process_error
from llm_perf_opt.analysis.stats import student_quantile
from llm_perf_opt.core.errors import ConfigError, nearest
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.units import percentage

Outcome = Literal["pass", "regression", "cannot tell"]

MOST_RUNS = 30
"""The most runs per side that are suggested."""
MOST_REPEATS = 10_000
"""The most repeats per run that are suggested."""
NO_REMEDY = Missing("More repeats do not help")
"""The metric itself is missing."""
_TO_MEASURE = f"{RECOMMENDED_RUNS} runs per side, which measure how much processes differ"
_TO_REPEAT = (
    f"at least {LEAST_REPEATS} repeats in each run (runtime.min_repeats={LEAST_REPEATS}, runtime.max_repeats at least as high)"
)
_VERDICT_SHARE = (1 + LEVEL) / 2
"""One-sided confidence of each end of the interval behind a verdict."""
_ROUNDED_AWAY = 0.00005
"""Smaller shares would be shown as 0.00 %."""
_GATE = re.compile(r"(?P<metric>[^=\s]+)=(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>%?)")


@dataclass(frozen=True)
class Gate:
    """The tolerance of one metric."""

    asked: str
    """The metric as typed."""
    metric: str
    """The row of the comparison."""
    tolerance: float
    """The largest worsening that passes, as a share."""


@dataclass(frozen=True)
class GateResult:
    """The outcome of a gate."""

    gate: Gate
    outcome: Outcome
    why: str
    needed: Maybe[str]
    """What would allow a decision, if there is none."""


def parse_gates(texts: Iterable[str], aliases: dict[str, str]) -> tuple[Gate, ...]:
    """Return gates from `METRIC=TOLERANCE`, with `3%` or `0.03`. `aliases` maps each accepted name to its row."""
    gates: dict[str, Gate] = {}
    for text in texts:
        found = _GATE.fullmatch(text.strip())
        if not found:
            raise ConfigError(f"--gate {text!r} is not METRIC=TOLERANCE.", "Write --gate tpot=3% or --gate decode.tpot=0.03.")
        name, number = found["metric"], float(found["number"])
        if name not in aliases:
            known = ", ".join(sorted(aliases))
            raise ConfigError(f"--gate {text}: no metric is called {name!r}.{nearest(name, aliases)}", f"Known: {known}.")
        tolerance = number / 100 if found["unit"] else number
        if not found["unit"] and number >= 1:
            raise ConfigError(
                f"--gate {text} would tolerate a result that is {number * 100:g} % worse.",
                f"Write {name}={found['number']}% for percent.",
            )
        row = aliases[name]
        if row in gates:
            raise ConfigError(f"--gate {text}: {row} already has a gate ({gates[row].asked}).", "Give one gate per metric.")
        gates[row] = Gate(name, row, tolerance)
    return tuple(gates.values())


def check_gate(
    gate: Gate, effect: Maybe[Effect], higher_is_better: bool, remedy: Maybe[str] = NO_REMEDY, unit: str = ""
) -> GateResult:
    """Check a gate against an effect. `remedy`: what a missing metric needs. `unit`: of the metric.

    It passes if the one-sided bound at `BOUND_LEVEL` is within the tolerance. It is a regression if the whole interval at `LEVEL`
    lies beyond the tolerance. Otherwise there is no decision. `Judgement.smallest` does not apply, because a gate has its own
    tolerance.
    """
    if isinstance(effect, Missing):
        return GateResult(gate, "cannot tell", effect.why, remedy)
    worse = _worsening(effect.change, higher_is_better)
    limit = f"{_fine_percent(gate.tolerance)} tolerated"
    if isinstance(effect.interval, Missing):
        return GateResult(gate, "cannot tell", f"{_likely(worse)}, {limit}: {effect.interval.why}", _for_an_interval(effect))
    least, most = _worsening_bounds(effect.interval, higher_is_better)
    if most <= gate.tolerance:
        bound = f"worse by at most {_percent(most)}" if most > -_ROUNDED_AWAY else f"better by at least {_percent(most)}"
        why = _exact_words(effect, worse, unit) if effect.exact else bound
        return GateResult(gate, "pass", f"{why}, {limit}", Missing("it passes"))
    if least > gate.tolerance:
        bound = f"worse by {_fine_percent(worse)}, at least by {_fine_percent(least)}"
        small = "; the change is too small for a verdict (--smallest), but a gate has its own tolerance"
        why = _exact_words(effect, worse, unit) if effect.exact else bound
        words = f"{why}, {limit}{small if effect.verdict == 'not distinguishable' else ''}"
        return GateResult(gate, "regression", words, Missing("it is decided"))
    perhaps = f"perhaps by {_percent(most)}" if worse > 0 else f"perhaps worse by {_percent(most)}"
    why = f"{_likely(worse)}, {perhaps}, {limit}: too uncertain to decide{_because(effect)}"
    return GateResult(gate, "cannot tell", why, needed_to_decide(effect, worse, gate.tolerance))


def _because(effect: Effect) -> str:
    """Return why an interval is wide, unless the spread between the runs is the reason."""
    about = effect.uncertainty
    reasons = [about.apart_why] if about.apart else []
    if effect.rival is not None:
        reasons.append(f"the machine's speed changed: {effect.rival.words}")
    elif about.moved:
        reasons.append(f"the machine's speed changed by {percentage(math.expm1(about.moved), 1)} during a run")
    if about.restless:
        reasons.append(f"repeats within a run vary by {percentage(about.scatter, 1)}")
    if not reasons and not about.measured and not isinstance(about.between, Missing) and about.between:
        reasons.append(f"runs are assumed to differ by {percentage(about.between, 1)}, because there are too few to measure it")
    return f" ({'; '.join(reasons)})" if reasons else ""


def _likely(worse: float) -> str:
    """Return the best estimate in words."""
    if abs(worse) < _ROUNDED_AWAY:
        return "the same"
    return f"worse by {_percent(worse)}" if worse > 0 else f"better by {_percent(worse)}"


def _exact_words(effect: Effect, worse: float, unit: str) -> str:
    """Return a change without uncertainty in words; for bytes with their number, because a single byte is a change."""
    count = round(abs(effect.new - effect.base))
    direction = "worse" if worse > 0 else "better"
    if not worse:
        return "the same"
    if unit != "bytes":
        return f"{direction} by {_fine_percent(worse)}"
    counted = f"{count:,} byte{'' if count == 1 else 's'}"
    return f"{direction} by {counted}" if abs(worse) < _ROUNDED_AWAY else f"{direction} by {_percent(worse)} ({counted})"


def _percent(share: float) -> str:
    """Return the percentage without its sign, which words express."""
    return percentage(abs(share), 2)


def _fine_percent(share: float) -> str:
    """Return the same, with one significant digit if two decimals would show 0.00 %."""
    return _percent(share) if abs(share) >= _ROUNDED_AWAY or not share else f"{abs(share) * 100:.1g} %"


def needed_to_decide(effect: Effect, worse: float, tolerance: float) -> Maybe[str]:
    """Return the repeats or runs that would make the interval narrow enough, if the change stays as estimated."""
    about = effect.uncertainty
    between = about.between
    if isinstance(between, Missing):
        return _for_an_interval(effect)
    if about.apart:
        return Missing("More runs do not show how much the cards differ: run both sides on the same card, alternating")
    if effect.rival is not None or about.moved:
        return f"{max(RECOMMENDED_RUNS, *effect.runs)} alternating runs per side"
    room = abs(math.log1p(tolerance) - math.log1p(worse))
    share = BOUND_LEVEL if worse <= tolerance else _VERDICT_SHARE
    repeats = _repeats_needed(effect, between, share, room)
    runs = _runs_needed(effect, between, share, room)
    found = [text for text in (repeats, runs) if text]
    if found:
        return ", or ".join(found)
    near = f"the change is too close to the tolerance for runs that differ by {percentage(between, 2)}"
    source = "estimated from too few runs" if about.seen == between else "assumed"
    assumed = "" if about.measured else f" ({source}; {RECOMMENDED_RUNS} runs per side would measure it)"
    return Missing(f"{MOST_RUNS} runs per side would not decide it: {near}{assumed}")


def _for_an_interval(effect: Effect) -> str:
    """Return what an interval needs: repeats, runs, or both."""
    few = min(*effect.base_repeats, *effect.new_repeats) < LEAST_REPEATS
    unknown = isinstance(effect.uncertainty.between, Missing)
    return ", and ".join(text for text, needed in ((_TO_REPEAT, few), (_TO_MEASURE, unknown)) if needed)


def _inside_deviation(effect: Effect) -> float:
    """Return the standard error of the change from the repeats inside the runs."""
    return effect.uncertainty.inside / student_quantile(_VERDICT_SHARE, None)


def _repeats_needed(effect: Effect, between: float, share: float, room: float) -> str:
    """Return the repeats per run that would suffice. They reduce only the uncertainty inside the runs."""
    about = effect.uncertainty
    left = room**2 - process_error(about, between, share, effect.runs) ** 2
    if about.measured or about.restless or left <= 0 or about.inside == 0:
        return ""
    inside = _inside_deviation(effect) * student_quantile(share, None)
    now = min(*effect.base_repeats, *effect.new_repeats)
    needed = math.ceil(now * max(1.0, inside**2 / left))
    return f"about {needed} repeats in each run (runtime.min_repeats={needed})" if now < needed <= MOST_REPEATS else ""


def _runs_needed(effect: Effect, between: float, share: float, room: float) -> str:
    """Return the runs per side that would suffice, from the spread between processes and the uncertainty inside them."""
    about = effect.uncertainty
    base, new = effect.runs
    if about.error:
        needed = (
            math.ceil(2 / (1 / base + 1 / new) * (student_quantile(share, None) * about.error / room) ** 2)
            if room
            else MOST_RUNS + 1
        )
        return f"{max(needed, min(base, new) + 1)} runs per side" if needed <= MOST_RUNS else ""
    single = _inside_deviation(effect) / math.sqrt(1 / base + 1 / new)
    deviation = between if about.measured else math.hypot(between, single)
    for runs in range(RECOMMENDED_RUNS if about.restless else 2, MOST_RUNS + 1):
        if student_quantile(share, 2 * runs - 2) * deviation * math.sqrt(2 / runs) <= room:
            return f"{max(runs, min(base, new) + 1)} runs per side"
    return ""


def _worsening(change: float, higher_is_better: bool) -> float:
    """Return by which share the metric got worse; negative if it got better."""
    return 1 / (1 + change) - 1 if higher_is_better else change


def _worsening_bounds(interval: Interval, higher_is_better: bool) -> tuple[float, float]:
    """Return the least worsening, at `LEVEL`, and the most, one-sided at `BOUND_LEVEL`."""
    ends = (interval.high, interval.bound_low) if higher_is_better else (interval.low, interval.bound_high)
    return _worsening(ends[0], higher_is_better), _worsening(ends[1], higher_is_better)


def exit_code(results: Sequence[GateResult]) -> int:
    """Return 0 if every gate passes, 1 if one is a regression, 2 if none is but one is undecided."""
    outcomes = {result.outcome for result in results}
    return 1 if "regression" in outcomes else 2 if "cannot tell" in outcomes else 0

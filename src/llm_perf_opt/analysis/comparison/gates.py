"""A tolerance held against an effect: passes, regression, or cannot tell and what would be needed to tell."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from llm_perf_opt.analysis.comparison.effects import Effect, Interval
from llm_perf_opt.analysis.comparison.statistics import BOUND_LEVEL, LEAST_REPEATS, LEVEL, RECOMMENDED_RUNS, outside
from llm_perf_opt.analysis.stats import student_quantile
from llm_perf_opt.core.errors import ConfigError, nearest
from llm_perf_opt.core.records import Maybe, Missing

Outcome = Literal["pass", "regression", "cannot tell"]

MOST_RUNS = 30
"""More runs a side than this are not asked for."""
MOST_REPEATS = 10_000
NO_CURE = Missing("More repeats do not cure this")
"""The figure itself is missing."""
_TO_MEASURE = f"{RECOMMENDED_RUNS} runs on each side, which measure how much processes differ"
_TO_REPEAT = f"at least {LEAST_REPEATS} repeats in each run (runtime.min_repeats={LEAST_REPEATS}, runtime.max_repeats no lower)"
_VERDICT_SHARE = (1 + LEVEL) / 2
"""How sure each end of the interval of a verdict is, taken alone."""
_ROUNDED_AWAY = 0.00005
"""A share that two digits of a percentage show as none."""
_GATE = re.compile(r"(?P<metric>[^=\s]+)=(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>%?)")


@dataclass(frozen=True)
class Gate:
    """What a user tolerates of one metric."""

    asked: str
    """The metric as it was typed."""
    metric: str
    """The row of the comparison."""
    tolerance: float
    """The largest worsening that passes, as a share."""


@dataclass(frozen=True)
class GateResult:
    """What became of a gate."""

    gate: Gate
    outcome: Outcome
    why: str
    needed: Maybe[str]
    """What would let it be told, where it cannot be."""


def parse_gates(texts: Iterable[str], aliases: dict[str, str]) -> tuple[Gate, ...]:
    """`METRIC=TOLERANCE`, with `3%` or `0.03`; `aliases` maps each accepted name to its row."""
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
                f"--gate {text} would tolerate {number * 100:g} % of worsening.", f"Write {name}={found['number']}% for percent."
            )
        row = aliases[name]
        if row in gates:
            raise ConfigError(f"--gate {text}: {row} has a gate already ({gates[row].asked}).", "Give one gate per metric.")
        gates[row] = Gate(name, row, tolerance)
    return tuple(gates.values())


def hold(gate: Gate, effect: Maybe[Effect], higher_is_better: bool, cure: Maybe[str] = NO_CURE, unit: str = "") -> GateResult:
    """Hold a gate against what was found; `cure`: what would make the figure, where there is none. `unit`: of the figure.

    It passes when the worsening is surely (one-sided, at `BOUND_LEVEL`) within the tolerance. It is a regression when the whole
    interval, at `LEVEL`, lies beyond the tolerance. Everything else cannot be told. `Judgement.smallest` has no say: the
    tolerance is what the gate was asked for.
    """
    if isinstance(effect, Missing):
        return GateResult(gate, "cannot tell", effect.why, cure)
    worse = _worsening(effect.change, higher_is_better)
    limit = f"{_fine_percent(gate.tolerance)} tolerated"
    if isinstance(effect.interval, Missing):
        return GateResult(gate, "cannot tell", f"{_likely(worse)}, {limit}: {effect.interval.why}", _for_an_interval(effect))
    least, most = _worsening_bounds(effect.interval, higher_is_better)
    if most <= gate.tolerance:
        surely = f"worse by at most {_percent(most)}" if most > -_ROUNDED_AWAY else f"better by at least {_percent(most)}"
        why = _exactly(effect, worse, unit) if effect.exact else surely
        return GateResult(gate, "pass", f"{why}, {limit}", Missing("it passes"))
    if least > gate.tolerance:
        surely = f"worse by {_fine_percent(worse)}, at least by {_fine_percent(least)}"
        small = "; too small a change for a verdict (--smallest), but the gate has a tolerance of its own"
        why = _exactly(effect, worse, unit) if effect.exact else surely
        said = f"{why}, {limit}{small if effect.verdict == 'not distinguishable' else ''}"
        return GateResult(gate, "regression", said, Missing("it is told"))
    perhaps = f"perhaps by {_percent(most)}" if worse > 0 else f"perhaps worse by {_percent(most)}"
    why = f"{_likely(worse)}, {perhaps}, {limit}: too uncertain to tell{_because(effect)}"
    return GateResult(gate, "cannot tell", why, needed_to_tell(effect, worse, gate.tolerance))


def _because(effect: Effect) -> str:
    """What makes an interval wide, where that is not plainly the spread between the runs."""
    about = effect.uncertainty
    reasons = [about.apart_why] if about.apart else []
    if effect.rival is not None:
        reasons.append(f"the machine changed its speed: {effect.rival.words}")
    elif about.moved:
        reasons.append(f"the machine changed its speed by {math.expm1(about.moved):.1%} during a run")
    if about.restless:
        reasons.append(f"repeats inside one run scatter by {about.scatter:.1%}")
    if not reasons and not about.measured and not isinstance(about.between, Missing) and about.between:
        reasons.append(f"runs are taken to differ by {about.between:.1%}, which so few do not measure")
    return f" ({'; '.join(reasons)})" if reasons else ""


def _likely(worse: float) -> str:
    """The best estimate, in words."""
    if abs(worse) < _ROUNDED_AWAY:
        return "the same"
    return f"worse by {_percent(worse)}" if worse > 0 else f"better by {_percent(worse)}"


def _exactly(effect: Effect, worse: float, unit: str) -> str:
    """A change without uncertainty, in words: of bytes their number, since one of them is a change as well."""
    count = round(abs(effect.new - effect.base))
    direction = "worse" if worse > 0 else "better"
    if not worse:
        return "the same"
    if unit != "bytes":
        return f"{direction} by {_fine_percent(worse)}"
    counted = f"{count:,} byte{'' if count == 1 else 's'}"
    return f"{direction} by {counted}" if abs(worse) < _ROUNDED_AWAY else f"{direction} by {_percent(worse)} ({counted})"


def _percent(share: float) -> str:
    """Without its sign, which words say."""
    return f"{abs(share):.2%}"


def _fine_percent(share: float) -> str:
    """The same; what two digits would show as none, with the one digit that it has."""
    return _percent(share) if abs(share) >= _ROUNDED_AWAY or not share else f"{abs(share) * 100:.1g}%"


def needed_to_tell(effect: Effect, worse: float, tolerance: float) -> Maybe[str]:
    """Repeats or runs that would make the interval narrow enough, should the change turn out as it looks now."""
    about = effect.uncertainty
    between = about.between
    if isinstance(between, Missing):
        return _for_an_interval(effect)
    if about.apart:
        return Missing("No number of runs shows how much the cards differ: run both sides on the same card, in turn")
    if effect.rival is not None or about.moved:
        return f"{max(RECOMMENDED_RUNS, *effect.runs)} runs on each side, made in turn"
    room = abs(math.log1p(tolerance) - math.log1p(worse))
    share = BOUND_LEVEL if worse <= tolerance else _VERDICT_SHARE
    repeats = _repeats_needed(effect, between, share, room)
    runs = _runs_needed(effect, between, share, room)
    found = [text for text in (repeats, runs) if text]
    if found:
        return ", or ".join(found)
    near = f"the change is too near the tolerance for runs that differ by {between:.2%}"
    so_far = "too few of them show" if about.seen == between else "is assumed"
    assumed = "" if about.measured else f", as {so_far}; {RECOMMENDED_RUNS} on each side would measure it"
    return Missing(f"{MOST_RUNS} runs on each side would not tell: {near}{assumed}")


def _for_an_interval(effect: Effect) -> str:
    """What is needed before there is an interval at all: repeats, runs, or both."""
    few = min(*effect.base_repeats, *effect.new_repeats) < LEAST_REPEATS
    unknown = isinstance(effect.uncertainty.between, Missing)
    return ", and ".join(text for text, lacking in ((_TO_REPEAT, few), (_TO_MEASURE, unknown)) if lacking)


def _inside_deviation(effect: Effect) -> float:
    """The standard error of the change that the repeats inside the runs leave open."""
    return effect.uncertainty.inside / student_quantile(_VERDICT_SHARE, None)


def _repeats_needed(effect: Effect, between: float, share: float, room: float) -> str:
    """More repeats in each run cure only what is inside the runs."""
    about = effect.uncertainty
    left = room**2 - outside(about, between, share, effect.runs) ** 2
    if about.measured or about.restless or left <= 0 or about.inside == 0:
        return ""
    inside = _inside_deviation(effect) * student_quantile(share, None)
    now = min(*effect.base_repeats, *effect.new_repeats)
    needed = math.ceil(now * max(1.0, inside**2 / left))
    return f"about {needed} repeats in each run (runtime.min_repeats={needed})" if now < needed <= MOST_REPEATS else ""


def _runs_needed(effect: Effect, between: float, share: float, room: float) -> str:
    """More runs a side: their medians scatter by what is between processes and by what their repeats leave open."""
    about = effect.uncertainty
    base, new = effect.runs
    single = _inside_deviation(effect) / math.sqrt(1 / base + 1 / new)
    deviation = between if about.measured else math.hypot(between, single)
    for runs in range(RECOMMENDED_RUNS if about.restless else 2, MOST_RUNS + 1):
        if student_quantile(share, 2 * runs - 2) * deviation * math.sqrt(2 / runs) <= room:
            return f"{max(runs, min(base, new) + 1)} runs on each side"
    return ""


def _worsening(change: float, higher_is_better: bool) -> float:
    """A change in the direction that hurts, as a share."""
    return 1 / (1 + change) - 1 if higher_is_better else change


def _worsening_bounds(interval: Interval, higher_is_better: bool) -> tuple[float, float]:
    """The least that it surely is, at `LEVEL`, and the most, one-sided at `BOUND_LEVEL`."""
    ends = (interval.high, interval.bound_low) if higher_is_better else (interval.low, interval.bound_high)
    return _worsening(ends[0], higher_is_better), _worsening(ends[1], higher_is_better)


def exit_code(results: Sequence[GateResult]) -> int:
    """0: every gate passes; 1: one is a regression; 2: none is, but one cannot be told."""
    outcomes = {result.outcome for result in results}
    return 1 if "regression" in outcomes else 2 if "cannot tell" in outcomes else 0

"""Whether a difference between two sides is real. A side is one run or several runs of the same configuration, a process each.

Everything happens on logarithms, so a change is a ratio and two halves of the noise weigh the same. One interval is made, at
`LEVEL`, and the verdict is read off it: a change is called one when the interval excludes zero. Two sources of error are kept
apart, because more repeats cure only the first:

- **inside a run**: a percentile bootstrap of the median over its repeats, widened where neighboring repeats resemble each other
  (rank autocorrelation): then n repeats tell less than n. Not BCa: its acceleration comes from a jackknife, which is inconsistent
  for the median, and the simulations in the tests hold the percentile interval to its level.
- **between processes**: memory layout, clocks, neighbors. Two runs of one process each differ by it for no reason of the change.
  From `MEASURED_FROM` degrees of freedom it is measured: Student's t over the runs' medians, pooled over both sides. With fewer
  it is assumed, where it may be (`Judgement.process_spread`): that, or more where the level of a run moved by more while it was
  measured (`stability`): two levels so far apart deviate by that over √2. What runs of one side show all the same is taken with
  Student's t as well, and the wider of the two holds: two runs against one show a spread whose one degree of freedom tells next
  to nothing, and would call one pair of the same in four a change if it were taken as known.

A busy machine has states, and a run sits in one of them: single runs of one thing on a CPU were seen a factor of two apart with
repeats that scatter by 2.5 % each, so nothing inside a run tells. Where no spread may be assumed there is no interval, and so no
verdict, below three runs on each side; two runs a side in two states look like a change too often, and so does a single run
against any number. Where one may be, and the repeats of a run scatter by more than `Judgement.restless`, processes are taken to
differ by the whole range that the repeats visited.

A machine that changes its speed makes two runs differ as a change of the program does. Where sides made one after the other
differ, `rivals` asks whether a drift or a level shift inside the runs explains that better. If so, the interval is widened to
include zero.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from llm_perf_opt.analysis.comparison.effects import Effect, Interval, Judgement, Order, Rival, Uncertainty, Verdict, rival
from llm_perf_opt.analysis.stability import Floats, inflation_of, quarter_spread, stability
from llm_perf_opt.analysis.stats import student_quantile
from llm_perf_opt.core.records import Maybe, Missing

BEYOND_CHANCE = 0.002
"""p-value from which a movement inside a run widens the interval. Stricter than that of a warning: a chance find costs power."""
DRAWS = 1000


class SampledSide:
    """A side: its profile (a value per step, or just one), bootstrap draws of it, each run's level; logarithms but `level`."""

    def __init__(self, runs: Sequence[Floats], inflation: float, generator: np.random.Generator, rates: bool) -> None:
        profiles = [np.median(run, axis=0) for run in runs]
        draws = [
            profile + inflation * (_resampled_medians(run, generator) - profile)
            for run, profile in zip(runs, profiles, strict=True)
        ]
        self.profile = mean(profiles)
        self.draws = mean(draws)
        self.run_levels: Floats = np.asarray([np.median(profile) for profile in profiles])
        # As a run's own report has it: of an even count the middle two times are averaged as they are, not as logarithms, nor
        # as the rates that they make.
        sign = -1 if rates else 1
        shown = [sign * np.log(np.median(np.median(np.exp(sign * run), axis=0))) for run in runs]
        self.level = float(np.exp(mean(shown)))
        self.repeats = [np.median(run, axis=1) for run in runs]
        self.scatters = [quarter_spread(values) for values in self.repeats]
        self.visited = max(float(np.ptp(values)) for values in self.repeats)
        self.stability = tuple(stability(values) for values in self.repeats)
        self.moved = max(abs(math.log1p(run.size)) if run.p_value <= BEYOND_CHANCE else 0.0 for run in self.stability)


def mean(values: Sequence[Floats]) -> Floats:
    """Of several runs; of equal ones exactly what they are, which a sum divided by their number need not be."""
    found: Floats = values[0] + np.mean([value - values[0] for value in values], axis=0)
    return found


def pooled_scatter(scatters: Sequence[float]) -> float:
    """Return the scatter of the most restless run, pooled with the runs that scatter at least half as much.

    One run's scatter is known only roughly: of two runs of 30 repeats with a true 2.4 %, one shows over 3 % in 15 % of pairs.
    """
    alike = [one for one in scatters if one >= max(scatters) / 2]
    return math.sqrt(sum(one * one for one in alike) / len(alike))


def _resampled_medians(run: Floats, generator: np.random.Generator) -> Floats:
    """Medians over resampled repeats, draws × steps; whole repeats are drawn, so the steps of one stay together."""
    repeats, steps = run.shape
    medians = np.empty((DRAWS, steps))
    at_once = max(1, 4_000_000 // (repeats * steps))
    for first in range(0, DRAWS, at_once):
        count = min(at_once, DRAWS - first)
        chosen = generator.integers(0, repeats, (count, repeats))
        medians[first : first + count] = np.median(run[chosen], axis=1)
    return medians


LEVEL = 0.98
"""Of the interval shown, from which the verdict is read: a change that is none is called one in at most 1 % each way."""
BOUND_LEVEL = 0.95
"""Of the one-sided bounds that a gate passes by."""
LEAST_REPEATS = 6
"""Fewer values carry no interval of a median, whatever their distribution."""
SEVERAL = 4
"""Degrees of freedom from which nothing need be assumed of the machine: three runs a side, and none with fewer."""
RECOMMENDED_RUNS = SEVERAL // 2 + 1
"""A side: they measure how much processes differ, wherever that is, and well enough to find small changes."""
ACCELERATOR_SPREAD = 0.01
"""Standard deviation between processes that is assumed of an accelerator, which one process has to itself."""
QUIET_CPU_SPREAD = 0.2
"""The same of a CPU that nothing else was seen to use: eight runs of one thing on a quiet virtual machine differed by 16 %."""
MOST_STEPS = 64
"""Decode steps used for pairing; more of them, evenly thinned, tell the same and cost memory."""
UNKNOWN_SPREAD = Missing("too few runs to know how much processes differ")
_OUTER = (1 - LEVEL) / 2
_SEED = 20240229


DEFAULT_JUDGEMENT = Judgement()


def effect(
    base: Sequence[Sequence[float]],
    new: Sequence[Sequence[float]],
    higher_is_better: bool = False,
    judgement: Judgement = DEFAULT_JUDGEMENT,
) -> Maybe[Effect]:
    """Compare a metric: per side a series per run, one value per repeat. `higher_is_better`: it is a rate, tokens over a time."""
    why = _unfit(base, new)
    if why:
        return Missing(why)
    sides = [[np.log(np.asarray(run, np.float64))[:, None] for run in side] for side in (base, new)]
    return _where_it_carries(_effect(sides[0], sides[1], 0, higher_is_better, judgement))


def usage_effect(
    base: Sequence[float],
    new: Sequence[float],
    judgement: Judgement,
    repeats: tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]] | None = None,
) -> Maybe[Effect]:
    """Compare what is used up, of which a run has one reading: less is better. A value per run.

    `repeats`: per side and run the times of the repeats that a reading was summed over. The reading has their uncertainty then:
    it is shared out among them by their times.
    """
    why = _unfit([[value] for value in base], [[value] for value in new])
    if why:
        return Missing(why)
    if repeats is None:
        sides = [[np.log([[value]]) for value in side] for side in (base, new)]
        found: Maybe[Effect] = _to_the_digit(base, new, _effect(sides[0], sides[1], 0, False, judgement), judgement.smallest)
    else:
        why = _unfit(*repeats)
        if why:
            return Missing(why)
        shares = [
            [list(value * np.exp(np.log(times) - np.median(np.log(times)))) for value, times in zip(side, timed, strict=True)]
            for side, timed in zip((base, new), repeats, strict=True)
        ]
        found = effect(shares[0], shares[1], judgement=judgement)
    if isinstance(found, Missing):
        return found
    words: dict[Verdict, Verdict] = {"faster": "less", "slower": "more"}
    return replace(found, base=_level(base), new=_level(new), verdict=words.get(found.verdict, found.verdict))


def _to_the_digit(base: Sequence[float], new: Sequence[float], found: Effect, smallest: float) -> Effect:
    """The effect; of readings that neither differ within a side nor may, their own ratio, which logarithms only come near."""
    certain = found.uncertainty.between == 0 and found.uncertainty.apart == 0
    if not certain or len(set(base)) > 1 or len(set(new)) > 1:
        return found
    change = (new[0] - base[0]) / base[0]
    interval = Interval(change, change, change, change)
    return replace(found, change=change, interval=interval, verdict=_verdict(change, interval, False, smallest))


def _level(readings: Sequence[float]) -> float:
    """The geometric mean; of equal readings that very reading."""
    return readings[0] * math.exp(float(np.mean([math.log(value / readings[0]) for value in readings])))


def paired_effect(
    base: Sequence[Sequence[Sequence[float]]],
    new: Sequence[Sequence[Sequence[float]]],
    judgement: Judgement = DEFAULT_JUDGEMENT,
) -> Maybe[Effect]:
    """Compare decode steps one with one: per side a run, per run a repeat, per repeat a time for each step.

    Each step's median over the repeats is held against the same step's of the other side, so the growth with the context cancels.
    Sides of different length are compared over the steps both have.
    """
    steps = min((len(row) for side in (base, new) for run in side for row in run), default=0)
    if steps == 0:
        return Missing("there is no decode step on one side")
    kept = np.unique(np.linspace(0, steps - 1, min(steps, MOST_STEPS)).round().astype(int))
    arrays = [
        [np.asarray([row[:steps] for row in run], np.float64).reshape(len(run), steps) for run in side] for side in (base, new)
    ]
    flat = [[[float(value) for value in run.ravel()] for run in side] for side in arrays]
    why = _unfit(flat[0], flat[1])
    if why:
        return Missing(why)
    logs = [[np.log(run[:, kept]) for run in side] for side in arrays]
    return _where_it_carries(_effect(logs[0], logs[1], steps, False, judgement))


def _where_it_carries(found: Effect) -> Effect:
    """The effect, without an interval and a verdict where a run has too few repeats for them: its medians can be shown still."""
    for name, counts in (("base", found.base_repeats), ("new", found.new_repeats)):
        if min(counts) < LEAST_REPEATS:
            why = f"a run of the {name} side has {min(counts)} repeats; an interval needs {LEAST_REPEATS} (runtime.min_repeats)"
            return replace(found, interval=Missing(why), verdict="not distinguishable")
    return found


def _unfit(base: Sequence[Sequence[float]], new: Sequence[Sequence[float]]) -> str:
    for name, side in (("base", base), ("new", new)):
        if not side:
            return f"the {name} side has no run"
        if not all(side):
            return f"a run of the {name} side has no value"
        if not all(math.isfinite(value) and value > 0 for run in side for value in run):
            return f"the {name} side has a value that is not above zero"
    return ""


def _effect(
    base: Sequence[Floats], new: Sequence[Floats], paired_steps: int, higher_is_better: bool, judgement: Judgement
) -> Effect:
    """`base` and `new`: per run the logarithms, repeats × steps (one column where nothing is paired)."""
    generator = np.random.default_rng(_SEED)
    inflation = inflation_of([np.median(run, axis=1) for run in (*base, *new)])
    sides = SampledSide(base, inflation, generator, higher_is_better), SampledSide(new, inflation, generator, higher_is_better)
    point = float(np.median(sides[1].profile - sides[0].profile))
    drawn = np.median(sides[1].draws - sides[0].draws, axis=1)
    uncertainty = _uncertainty(sides, point, drawn, inflation, judgement)
    interval = _interval(point, drawn, uncertainty, (len(base), len(new)))
    explained = _rival(sides, interval, judgement.order)
    if explained is not None and not isinstance(interval, Missing):
        interval = interval.or_none(point)
    change = math.expm1(point)
    return Effect(
        base=sides[0].level,
        new=sides[1].level,
        change=change,
        interval=interval,
        verdict=_verdict(change, interval, higher_is_better, judgement.smallest),
        base_repeats=tuple(len(run) for run in base),
        new_repeats=tuple(len(run) for run in new),
        paired_steps=paired_steps,
        uncertainty=uncertainty,
        base_stability=sides[0].stability,
        new_stability=sides[1].stability,
        rival=explained,
    )


def _uncertainty(
    sides: tuple[SampledSide, SampledSide], point: float, drawn: Floats, inflation: float, judgement: Judgement
) -> Uncertainty:
    runs = len(sides[0].run_levels), len(sides[1].run_levels)
    seen = _seen(sides, sum(runs) - 2)
    scatter = pooled_scatter([one for side in sides for one in side.scatters])
    return Uncertainty(
        inside=max(*_halves(point, drawn, _OUTER), 0.0),
        between=_between(sides, seen, judgement),
        measured=is_measured(runs, judgement),
        freedom=sum(runs) - 2,
        seen=seen,
        scatter=scatter,
        visited=max(side.visited for side in sides),
        restless=not are_several(runs) and scatter > judgement.restless,
        inflation=inflation,
        moved=_moved(sides, seen, judgement),
        apart=judgement.apart,
        apart_why=judgement.apart_why,
    )


def are_several(runs: tuple[int, int]) -> bool:
    """Whether so many runs on each side are enough where the machine may have states: a side of fewer may sit in one."""
    return min(runs) >= RECOMMENDED_RUNS


def is_measured(runs: tuple[int, int], judgement: Judgement) -> bool:
    """Whether so many runs on each side measure the spread between processes."""
    needed = SEVERAL if judgement.process_spread is None else judgement.measured_from
    return are_several(runs) if needed >= SEVERAL else sum(runs) - 2 >= needed


def runs_to_measure(judgement: Judgement) -> int:
    """The fewest runs a side that measure it."""
    return next(runs for runs in range(1, RECOMMENDED_RUNS + 1) if is_measured((runs, runs), judgement))


def _seen(sides: tuple[SampledSide, SampledSide], freedom: int) -> float:
    """Deviation between the runs of a side, pooled over both."""
    squares = sum(float(((side.run_levels - mean(list(side.run_levels))) ** 2).sum()) for side in sides)
    return math.sqrt(squares / freedom) if freedom else 0.0


def _between(sides: tuple[SampledSide, SampledSide], seen: float, judgement: Judgement) -> Maybe[float]:
    """Deviation from process to process: measured over the runs, or assumed, or neither."""
    if is_measured((len(sides[0].run_levels), len(sides[1].run_levels)), judgement):
        return seen
    if judgement.process_spread is None:
        return UNKNOWN_SPREAD
    return max(judgement.process_spread, seen, _moved(sides, seen, judgement) / math.sqrt(2))


def _moved(sides: tuple[SampledSide, SampledSide], seen: float, judgement: Judgement) -> float:
    """How far the level of a run moved; 0 where that is less than is assumed or seen, or the runs measure the spread."""
    found = max(side.moved for side in sides)
    if judgement.process_spread is None or is_measured((len(sides[0].run_levels), len(sides[1].run_levels)), judgement):
        return 0.0
    return found if found / math.sqrt(2) > max(judgement.process_spread, seen) else 0.0


def _rival(sides: tuple[SampledSide, SampledSide], interval: Maybe[Interval], order: Order) -> Rival | None:
    """Return what the machine did, if sides made one after the other differ and that explains it."""
    repeats = [side.repeats for side in sides]
    in_turn = order == "in turn" and max(map(len, repeats)) > 1
    few = min(len(run) for side in repeats for run in side) < LEAST_REPEATS
    if isinstance(interval, Missing) or interval.has_zero or in_turn or few:
        return None
    base, new = (np.concatenate(side) for side in repeats)
    return rival(new, base, ("new", "base")) if order == "new first" else rival(base, new)


def _interval(point: float, drawn: Floats, about: Uncertainty, counts: tuple[int, int]) -> Maybe[Interval]:
    if isinstance(about.between, Missing):
        return about.between
    ends = [
        (point - below, point + above)
        for tail in (_OUTER, 1 - BOUND_LEVEL)
        for below, above in [_widened(_halves(point, drawn, tail), outside(about, about.between, 1 - tail, counts), about)]
    ]
    (low, high), (bound_low, bound_high) = ends
    return Interval(math.expm1(low), math.expm1(high), math.expm1(bound_low), math.expm1(bound_high))


def _halves(point: float, drawn: Floats, tail: float) -> tuple[float, float]:
    """How far the draws reach below and above the estimate when `tail` of them is left out on each side."""
    return point - float(np.quantile(drawn, tail)), float(np.quantile(drawn, 1 - tail)) - point


def outside(about: Uncertainty, between: float, share: float, counts: tuple[int, int]) -> float:
    """How far the change of that many runs a side may be off because processes differ, sure by `share` on one side.

    An assumed spread counts as known; what the runs show counts by their degrees of freedom, however few those are.
    """
    shown = student_quantile(share, about.freedom) * about.seen if about.freedom else 0.0
    reach = shown if about.measured else max(shown, student_quantile(share, None) * between)
    spread = math.hypot(reach * math.sqrt(1 / counts[0] + 1 / counts[1]), student_quantile(share, None) * about.apart)
    return max(spread, about.visited) if about.restless else spread


def _widened(halves: tuple[float, float], between: float, about: Uncertainty) -> tuple[float, float]:
    """The two halves of an interval with what lies between processes in it.

    A measured spread is that of the runs' medians, which holds the noise inside them already: the wider of the two is taken. An
    assumed one knows nothing of it: the two add as squares.
    """
    if about.measured:
        return max(halves[0], between), max(halves[1], between)
    return math.hypot(max(halves[0], 0.0), between), math.hypot(max(halves[1], 0.0), between)


def _verdict(change: float, interval: Maybe[Interval], higher_is_better: bool, smallest: float) -> Verdict:
    if isinstance(interval, Missing) or interval.has_zero or abs(change) < smallest:
        return "not distinguishable"
    return "faster" if (change > 0) == higher_is_better else "slower"

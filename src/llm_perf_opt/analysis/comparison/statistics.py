"""Whether a difference between two sides is real. A side is one or more runs of the same configuration, each its own process.

Everything uses logarithms, so a change is a ratio, and faster and slower are treated alike. The verdict is read off one interval
at `LEVEL`: a change is real if the interval excludes zero. Two sources of error are kept separate, because more repeats reduce
only the first:

- **inside a run**: a percentile bootstrap of the median over its repeats, widened if neighboring repeats are correlated (rank
  autocorrelation), because n correlated repeats carry less information than n. BCa is not used: its acceleration comes from a
  jackknife, which is inconsistent for the median. Simulations in the tests show that the percentile interval keeps its level.
- **between processes**: memory layout, clocks, other processes. Two equal runs differ by it. With three runs on each side it is
  measured, together with what the machine did meanwhile, from the timeline of all repeats (`timeline`). With two, Student's t
  over the runs' medians measures it, pooled over both sides (`MEASURED_FROM`). With fewer it is assumed, if allowed
  (`Judgement.process_spread`), or taken from the movement of a run's level if that is larger (`stability`): two levels that far
  apart deviate by that over √2. What the runs of one side show is also used, with Student's t, and the wider of the two applies.
  Two runs against one have one degree of freedom: taken as known, their spread would call one pair of equal sides in four
  different.

A busy machine has states, and a run stays in one of them. On a CPU, equal runs differed by a factor of two although the repeats
of each scattered by only 2.5 %, so the repeats of a run do not reveal it. If no spread may be assumed, there is no interval and
no verdict with fewer than three runs on each side: two runs per side in two states look like a change too often, and so does a
single run against any number. With three, the interval of the runs' levels by Student's t must exclude zero as well. If a spread
may be assumed and the repeats of a run scatter by more than `Judgement.restless`, processes are assumed to differ by the whole
range of the repeats.

A machine that changes its speed makes two runs differ as a change of the program does. If sides that were made one after the
other differ, `rival` checks whether a drift or a level shift inside the runs explains that better. If so, the interval is widened
to include zero.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from llm_perf_opt.analysis.comparison.effects import Effect, Interval, Judgement, Order, Rival, Uncertainty, Verdict, rival
from llm_perf_opt.analysis.comparison.timeline import MOST_RUNS, posterior, timeline_of
from llm_perf_opt.analysis.stability import Floats, inflation_of, median, medians, quantile, quarter_spread, stability
from llm_perf_opt.analysis.stats import student_quantile
from llm_perf_opt.core.records import Maybe, Missing

BEYOND_CHANCE = 0.002
"""P-value below which a movement inside a run widens the interval. Stricter than for a warning: false positives cost power."""
DRAWS = 1000


class SampledSide:
    """A side: its profile (one value per step, or just one) and each run's level, as logarithms."""

    def __init__(self, runs: Sequence[Floats], inflation: float, generator: np.random.Generator, rates: bool) -> None:
        profiles = [medians(run.T) for run in runs]
        self._runs, self._profiles, self._inflation, self._generator = runs, profiles, inflation, generator
        self.profile = mean(profiles)
        self.run_levels: Floats = np.asarray([median(profile) for profile in profiles])
        # As in the run's own report: with an even count, the median averages the middle two times, not logarithms or rates.
        sign = -1 if rates else 1
        shown = [sign * np.log(median(medians(np.exp(sign * run.T)))) for run in runs]
        self.level = float(np.exp(mean(shown)))
        self.repeats = [medians(run) for run in runs]
        self.scatters = [quarter_spread(values) for values in self.repeats]
        self.visited = max(float(np.ptp(values)) for values in self.repeats)
        self.stability = tuple(stability(values) for values in self.repeats)
        self.moved = max(abs(math.log1p(run.size)) if run.p_value <= BEYOND_CHANCE else 0.0 for run in self.stability)

    def draws(self) -> Floats:
        """Return bootstrap draws of the profile."""
        return mean([
            profile + self._inflation * (_resampled_medians(run, self._generator) - profile)
            for run, profile in zip(self._runs, self._profiles, strict=True)
        ])  # fmt: skip


def mean(values: Sequence[Floats]) -> Floats:
    """Return the mean over runs; for equal runs exactly their value, without rounding errors."""
    found: Floats = values[0] + np.mean([value - values[0] for value in values], axis=0)
    return found


def pooled_scatter(scatters: Sequence[float]) -> float:
    """Return the largest scatter, pooled with those of runs that scatter at least half as much.

    The scatter of a single run is imprecise: of two runs of 30 repeats with a true 2.4 %, one shows over 3 % in 15 % of pairs.
    """
    similar = [scatter for scatter in scatters if scatter >= max(scatters) / 2]
    return math.sqrt(sum(scatter * scatter for scatter in similar) / len(similar))


def _resampled_medians(run: Floats, generator: np.random.Generator) -> Floats:
    """Return medians over resampled repeats, draws × steps. Whole repeats are drawn, so their steps stay together."""
    repeats, steps = run.shape
    found = np.empty((DRAWS, steps))
    at_once = max(1, 4_000_000 // (repeats * steps))
    for first in range(0, DRAWS, at_once):
        count = min(at_once, DRAWS - first)
        chosen = generator.integers(0, repeats, (count, repeats))
        found[first : first + count] = medians(run.T[:, chosen]).T
    return found


LEVEL = 0.98
"""Level of the interval and so of the verdict: equal sides are called different in at most 1 % of cases in each direction."""
BOUND_LEVEL = 0.95
"""Level of the one-sided bounds that a gate is checked against."""
LEAST_REPEATS = 6
"""Fewer values do not support an interval of the median, whatever their distribution."""
SEVERAL = 4
"""Degrees of freedom from which nothing is assumed about the machine: three runs on each side."""
RECOMMENDED_RUNS = SEVERAL // 2 + 1
"""Runs per side that measure how much processes differ on any machine, well enough to detect small changes."""
ACCELERATOR_SPREAD = 0.01
"""Standard deviation between processes that is assumed for an accelerator used by one process."""
QUIET_CPU_SPREAD = 0.2
"""The same for a CPU without other load: eight equal runs on a quiet virtual machine differed by 16 %."""
MOST_STEPS = 64
"""The most decode steps used for pairing, evenly spaced; more add memory but no information."""
UNKNOWN_SPREAD = Missing("too few runs to measure how much processes differ")
_OUTER = (1 - LEVEL) / 2
_SEED = 20240229
_USED: dict[Verdict, Verdict] = {"faster": "less", "slower": "more"}
DEFAULT_JUDGEMENT = Judgement()


def effect(
    base: Sequence[Sequence[float]],
    new: Sequence[Sequence[float]],
    higher_is_better: bool = False,
    judgement: Judgement = DEFAULT_JUDGEMENT,
) -> Maybe[Effect]:
    """Compare a metric: for each side and run, one value per repeat. `higher_is_better`: it is a rate."""
    if (unusable := _unusable(base, new)) is not None:
        return unusable
    sides = [[np.log(np.asarray(run, np.float64))[:, None] for run in side] for side in (base, new)]
    return _with_enough_repeats(_effect(sides[0], sides[1], 0, higher_is_better, judgement))


def usage_effect(
    base: Sequence[float],
    new: Sequence[float],
    judgement: Judgement,
    repeats: tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]] | None = None,
) -> Maybe[Effect]:
    """Compare memory or energy, with one reading per run; less is better.

    `repeats`: for each side and run, the times of the repeats that the reading is a sum over. The reading is then divided among
    them in proportion to their times, so that it has their uncertainty.
    """
    unusable = _unusable([[value] for value in base], [[value] for value in new])
    if unusable is not None:
        return unusable
    if repeats is None:
        sides = [[np.log([[value]]) for value in side] for side in (base, new)]
        found: Maybe[Effect] = _exact(base, new, _effect(sides[0], sides[1], 0, False, judgement), judgement.smallest)
    else:
        unusable = _unusable(*repeats)
        if unusable is not None:
            return unusable
        shares = [
            [list(value * np.exp(np.log(times) - median(np.log(times)))) for value, times in zip(side, timed, strict=True)]
            for side, timed in zip((base, new), repeats, strict=True)
        ]
        found = effect(shares[0], shares[1], judgement=judgement)
    if isinstance(found, Missing):
        return found
    verdict = _USED.get(found.verdict, found.verdict)
    return replace(found, base=_level(base), new=_level(new), verdict=verdict)


def _exact(base: Sequence[float], new: Sequence[float], found: Effect, smallest: float) -> Effect:
    """Return the effect; if the readings of each side are equal and certain, with their exact ratio."""
    certain = found.uncertainty.between == 0 and found.uncertainty.apart == 0
    if not certain or len(set(base)) > 1 or len(set(new)) > 1:
        return found
    change = (new[0] - base[0]) / base[0]
    interval = Interval(change, change, change, change)
    return replace(found, change=change, interval=interval, verdict=_verdict(change, interval, False, smallest))


def _level(readings: Sequence[float]) -> float:
    """Return the geometric mean; for equal readings exactly that reading."""
    return readings[0] * math.exp(float(np.mean(np.log(np.asarray(readings) / readings[0]))))


def paired_effect(
    base: Sequence[Sequence[Sequence[float]]],
    new: Sequence[Sequence[Sequence[float]]],
    judgement: Judgement = DEFAULT_JUDGEMENT,
) -> Maybe[Effect]:
    """Compare decode steps pairwise: for each side, run and repeat, one time per step.

    Each step's median over the repeats is compared with the same step of the other side, so the growth with the context cancels.
    Sides of different lengths are compared over their common steps.
    """
    steps = min((len(row) for side in (base, new) for run in side for row in run), default=0)
    if steps == 0:
        return Missing("one side has no decode step")
    kept = np.unique(np.linspace(0, steps - 1, min(steps, MOST_STEPS)).round().astype(int))
    arrays = [
        [np.asarray([row[:steps] for row in run], np.float64).reshape(len(run), steps) for run in side] for side in (base, new)
    ]
    flat = [[[float(value) for value in run.ravel()] for run in side] for side in arrays]
    unusable = _unusable(flat[0], flat[1])
    if unusable is not None:
        return unusable
    logs = [[np.log(run[:, kept]) for run in side] for side in arrays]
    return _with_enough_repeats(_effect(logs[0], logs[1], steps, False, judgement))


def _with_enough_repeats(found: Effect) -> Effect:
    """Return the effect, without interval and verdict if a run has too few repeats for them."""
    for name, counts in (("base", found.base_repeats), ("new", found.new_repeats)):
        if min(counts) < LEAST_REPEATS:
            why = f"a run of the {name} side has {min(counts)} repeats; an interval needs {LEAST_REPEATS} (runtime.min_repeats)"
            return replace(found, interval=Missing(why), verdict="not distinguishable")
    return found


def _unusable(base: Sequence[Sequence[float]], new: Sequence[Sequence[float]]) -> Missing | None:
    """Return why the values cannot be compared; None if they can."""
    for name, side in (("base", base), ("new", new)):
        if not side:
            return Missing(f"the {name} side has no run")
        if not all(side):
            return Missing(f"a run of the {name} side has no value")
        if not all(math.isfinite(value) and value > 0 for run in side for value in run):
            return Missing(f"the {name} side has a value that is not above zero")
    return None


def _effect(
    base: Sequence[Floats], new: Sequence[Floats], paired_steps: int, higher_is_better: bool, judgement: Judgement
) -> Effect:
    """Compare two sides. `base`, `new`: the logarithms of each run, repeats × steps (one column if steps are not paired)."""
    generator = np.random.default_rng(_SEED)
    inflation = inflation_of([medians(run) for run in (*base, *new)])
    sides = SampledSide(base, inflation, generator, higher_is_better), SampledSide(new, inflation, generator, higher_is_better)
    point = median(sides[1].profile - sides[0].profile)
    runs = len(base), len(new)
    interval: Maybe[Interval]
    if judgement.timed and are_several(runs) and sum(runs) <= MOST_RUNS and min(map(len, (*base, *new))) >= LEAST_REPEATS:
        uncertainty = _uncertainty(sides, _inside(sides, inflation), inflation, judgement)
        of_levels = _interval(point, np.asarray([point]), uncertainty, runs)
        point, interval = _from_timeline(base, new, point, judgement)
        if judgement.process_spread is None and not isinstance(of_levels, Missing):
            interval = interval.joined(of_levels)
        width = math.log1p(interval.high) - math.log1p(interval.low)
        uncertainty = replace(uncertainty, error=width / 2 / student_quantile(1 - _OUTER, None))
    else:
        drawn = np.sort(medians(sides[1].draws() - sides[0].draws()))
        uncertainty = _uncertainty(sides, max(*_halves(point, drawn, _OUTER), 0.0), inflation, judgement)
        interval = _interval(point, drawn, uncertainty, runs)
    cause = _rival(sides, interval, judgement.order)
    if cause is not None and not isinstance(interval, Missing):
        interval = interval.including_zero(point)
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
        rival=cause,
    )


def _from_timeline(base: Sequence[Floats], new: Sequence[Floats], point: float, judgement: Judgement) -> tuple[float, Interval]:
    """Return the change, as a logarithm, and its interval. `point`: the change if nothing varies."""
    found = posterior(timeline_of(base, new, judgement.sides(len(base), len(new))))
    if found is None:
        return point, Interval(*[math.expm1(point)] * 4)
    found = replace(found, errors=np.hypot(found.errors, judgement.apart))
    *ends, change = found.quantiles(_OUTER, 1 - _OUTER, 1 - BOUND_LEVEL, BOUND_LEVEL, 0.5)
    return change, Interval(*(math.expm1(end) for end in ends))


def _inside(sides: tuple[SampledSide, SampledSide], inflation: float) -> float:
    """Return the half-width that the scatter of the repeats would leave if nothing else varied."""
    runs = [(side, scatter, len(run)) for side in sides for scatter, run in zip(side.scatters, side.repeats, strict=True)]
    variance = sum((scatter * inflation / len(side.repeats)) ** 2 / repeats for side, scatter, repeats in runs)
    return student_quantile(1 - _OUTER, None) * math.sqrt(variance)


def _uncertainty(sides: tuple[SampledSide, SampledSide], inside: float, inflation: float, judgement: Judgement) -> Uncertainty:
    runs = len(sides[0].run_levels), len(sides[1].run_levels)
    seen = _seen(sides, sum(runs) - 2)
    scatter = pooled_scatter([scatter for side in sides for scatter in side.scatters])
    return Uncertainty(
        inside=inside,
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
    """Return whether there are enough runs on each side for a machine with states; fewer runs may all be in one state."""
    return min(runs) >= RECOMMENDED_RUNS


def is_measured(runs: tuple[int, int], judgement: Judgement) -> bool:
    """Return whether this many runs on each side measure the spread between processes."""
    needed = SEVERAL if judgement.process_spread is None else judgement.measured_from
    return are_several(runs) if needed >= SEVERAL else sum(runs) - 2 >= needed


def runs_to_measure(judgement: Judgement) -> int:
    """Return the fewest runs per side that measure the spread between processes."""
    return next(runs for runs in range(1, RECOMMENDED_RUNS + 1) if is_measured((runs, runs), judgement))


def _seen(sides: tuple[SampledSide, SampledSide], freedom: int) -> float:
    """Return the deviation between the runs of a side, pooled over both sides."""
    squares = sum(float(((side.run_levels - mean(list(side.run_levels))) ** 2).sum()) for side in sides)
    return math.sqrt(squares / freedom) if freedom else 0.0


def _between(sides: tuple[SampledSide, SampledSide], seen: float, judgement: Judgement) -> Maybe[float]:
    """Return the deviation between processes: measured, assumed, or Missing."""
    if is_measured((len(sides[0].run_levels), len(sides[1].run_levels)), judgement):
        return seen
    if judgement.process_spread is None:
        return UNKNOWN_SPREAD
    return max(judgement.process_spread, seen, _moved(sides, seen, judgement) / math.sqrt(2))


def _moved(sides: tuple[SampledSide, SampledSide], seen: float, judgement: Judgement) -> float:
    """Return how far the level of a run moved; 0 if the assumed or observed spread is larger, or the spread is measured."""
    found = max(side.moved for side in sides)
    if judgement.process_spread is None or is_measured((len(sides[0].run_levels), len(sides[1].run_levels)), judgement):
        return 0.0
    return found if found / math.sqrt(2) > max(judgement.process_spread, seen) else 0.0


def _rival(sides: tuple[SampledSide, SampledSide], interval: Maybe[Interval], order: Order) -> Rival | None:
    """Return the change of the machine's speed that explains a difference of sides made one after the other."""
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
        for below, above in [_widened(_halves(point, drawn, tail), process_error(about, about.between, 1 - tail, counts), about)]
    ]
    (low, high), (bound_low, bound_high) = ends
    return Interval(math.expm1(low), math.expm1(high), math.expm1(bound_low), math.expm1(bound_high))


def _halves(point: float, drawn: Floats, tail: float) -> tuple[float, float]:
    """Return how far the sorted draws extend below and above the estimate, without a share of `tail` at each end."""
    return point - quantile(drawn, tail), quantile(drawn, 1 - tail) - point


def process_error(about: Uncertainty, between: float, share: float, counts: tuple[int, int]) -> float:
    """Return the error of a change because processes differ, for this many runs per side, at the one-sided level `share`.

    An assumed spread counts as known; an observed spread counts with its degrees of freedom, however few.
    """
    observed = student_quantile(share, about.freedom) * about.seen if about.freedom else 0.0
    per_run = observed if about.measured else max(observed, student_quantile(share, None) * between)
    spread = math.hypot(per_run * math.sqrt(1 / counts[0] + 1 / counts[1]), student_quantile(share, None) * about.apart)
    return max(spread, about.visited) if about.restless else spread


def _widened(halves: tuple[float, float], between: float, about: Uncertainty) -> tuple[float, float]:
    """Return the two halves of an interval, widened by the error between processes.

    A measured spread is that of the runs' medians and so includes the noise inside the runs: the wider of the two is used. An
    assumed spread does not include it: the two are added in quadrature.
    """
    if about.measured:
        return max(halves[0], between), max(halves[1], between)
    return math.hypot(max(halves[0], 0.0), between), math.hypot(max(halves[1], 0.0), between)


def _verdict(change: float, interval: Maybe[Interval], higher_is_better: bool, smallest: float) -> Verdict:
    if isinstance(interval, Missing) or interval.has_zero or abs(change) < smallest:
        return "not distinguishable"
    return "faster" if (change > 0) == higher_is_better else "slower"

"""Whether a difference between two sides is real. A side is one run or several runs of the same configuration, a process each.

Everything happens on logarithms, so a change is a ratio and two halves of the noise weigh the same. Two sources of error are kept
apart, because more repeats cure only the first:

- **inside a run**: a percentile bootstrap of the median over its repeats, widened where neighbouring repeats resemble each other
  (rank autocorrelation): then n repeats tell less than n. Not BCa: its acceleration comes from a jackknife, which is inconsistent
  for the median, and the simulations in the tests hold the percentile interval to its level.
- **between processes**: memory layout, clocks, neighbours. Two runs of one process each differ by it for no reason of the change.
  With two runs or more a side it is measured (Student's t over the runs' medians). With fewer it cannot be and is assumed:
  `Judgement.process_spread`, or more where the runs themselves say so: a share of the scatter of their repeats, or their drift.
  Where the repeats of a run scatter by more than `Judgement.restless`, others use the machine, and runs of the same thing were
  seen a factor of five apart: processes are then taken to differ by four times that scatter; only a large change stands out.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from llm_perf_opt.analysis.stats import CONFIDENCE
from llm_perf_opt.records import Maybe, Missing

Floats = npt.NDArray[np.float64]
Verdict = Literal["faster", "slower", "not distinguishable"]

LEAST_REPEATS = 6
"""Fewer values carry no 95 % interval of a median, whatever their distribution."""
LEAST_FREEDOM = 2
"""Degrees of freedom from which the spread between processes is measured: two runs a side, or three against one."""
DRAWS = 1000
MOST_STEPS = 64
"""Decode steps used for pairing; more of them, evenly thinned, tell the same and cost memory."""
_MOST_CORRELATION = 0.9
_MEDIAN_VARIANCE = math.pi / 2
"""Variance of a median over that of a mean, for normal noise."""
_SCATTER_SHARE = 0.4
"""Of the deviation between repeats, taken for that between processes: at 2.5 % it is the default assumption of 1 %."""
_RESTLESS_TIMES = 4.0
"""The same on a restless machine: of 240 pairs of runs of one thing on a busy one, 3 then got a verdict."""
_SURE_OF_DRIFT = 2.5
"""Halves of a run that lie further apart than this many standard errors have drifted; nearer ones have not been seen to."""
_SEED = 20240229


@dataclass(frozen=True)
class Judgement:
    """What a change must show before it is called one."""

    smallest: float = 0.01
    """A change smaller than this share is not called faster or slower, however sure it is."""
    process_spread: float = 0.01
    """Standard deviation between processes that do the same, assumed where too few runs are given to measure it."""
    restless: float = 0.03
    """Standard deviation of a run's repeats (from its quartiles) beyond which others are taken to use the machine."""


DEFAULT_JUDGEMENT = Judgement()


@dataclass(frozen=True)
class Uncertainty:
    """Where the width of an interval comes from; half-widths and deviations of the logarithm, about shares."""

    inside: float
    """Half the 95 % interval from the repeats inside the runs alone."""
    between: float
    """Standard deviation from one process to the next."""
    measured: bool
    """Whether `between` was measured over several runs, not assumed."""
    freedom: int
    """Degrees of freedom it was measured with."""
    scatter: float
    """Standard deviation of the repeats inside a run, from their quartiles; the most restless run's."""
    restless: bool
    """Whether that is so much that a single process on a side tells only of large changes."""
    inflation: float
    """How much wider the repeats' likeness to their neighbours made the interval; 1: not at all."""


@dataclass(frozen=True)
class Effect:
    """What changed from one side to the other, and whether that is real."""

    base: float
    """Median; over several runs the geometric mean of their medians."""
    new: float
    change: float
    """new / base − 1; paired by step: the median over the steps of that ratio."""
    low: float
    """Lower end of the 95 % interval of the change."""
    high: float
    bound_low: float
    """The change is at least this, one-sided at 95 %."""
    bound_high: float
    """The change is at most this, one-sided at 95 %."""
    verdict: Verdict
    base_repeats: tuple[int, ...]
    """Repeats of each run."""
    new_repeats: tuple[int, ...]
    paired_steps: int
    """Decode steps compared one with one; 0: not paired."""
    uncertainty: Uncertainty

    @property
    def runs(self) -> tuple[int, int]:
        """Runs on each side."""
        return len(self.base_repeats), len(self.new_repeats)


def effect(
    base: Sequence[Sequence[float]],
    new: Sequence[Sequence[float]],
    higher_is_better: bool = False,
    judgement: Judgement = DEFAULT_JUDGEMENT,
) -> Maybe[Effect]:
    """Compare a metric: per side a series per run, one value per repeat."""
    why = _unfit(base, new)
    if why:
        return Missing(why)
    sides = [[np.log(np.asarray(run, np.float64))[:, None] for run in side] for side in (base, new)]
    return _effect(sides[0], sides[1], 0, higher_is_better, judgement)


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
    why = _unfit(flat[0], flat[1], steps)
    if why:
        return Missing(why)
    logs = [[np.log(run[:, kept]) for run in side] for side in arrays]
    return _effect(logs[0], logs[1], steps, False, judgement)


def _unfit(base: Sequence[Sequence[float]], new: Sequence[Sequence[float]], per_repeat: int = 1) -> str:
    for name, side in (("base", base), ("new", new)):
        if not side:
            return f"the {name} side has no run"
        fewest = min(len(run) for run in side) // per_repeat
        if fewest < LEAST_REPEATS:
            return f"a run of the {name} side has {fewest} repeats; an interval needs {LEAST_REPEATS} (runtime.min_repeats)"
        if not all(math.isfinite(value) and value > 0 for run in side for value in run):
            return f"the {name} side has a value that is not above zero"
    return ""


def _effect(
    base: Sequence[Floats], new: Sequence[Floats], paired_steps: int, higher_is_better: bool, judgement: Judgement
) -> Effect:
    """`base` and `new`: per run the logarithms, repeats × steps (one column where nothing is paired)."""
    generator = np.random.default_rng(_SEED)
    inflation = _inflation([np.median(run, axis=1) for run in (*base, *new)])
    sides = [_Side(runs, inflation, generator) for runs in (base, new)]
    point = float(np.median(sides[1].profile - sides[0].profile))
    drawn = np.median(sides[1].draws - sides[0].draws, axis=1)
    scatter = max(side.scatter for side in sides)
    between, measured, freedom = _between(sides[0], sides[1], judgement)
    restless = not measured and scatter > judgement.restless
    if restless:
        between = max(between, _RESTLESS_TIMES * scatter)
    counts = len(base), len(new)
    outer = (1 - CONFIDENCE) / 2
    inside = [point - float(np.quantile(drawn, outer)), float(np.quantile(drawn, 1 - outer)) - point]
    low, high = _widened(point, drawn, outer, between, measured, freedom, counts)
    bound_low, bound_high = _widened(point, drawn, 1 - CONFIDENCE, between, measured, freedom, counts)
    change = math.expm1(point)
    return Effect(
        base=sides[0].level,
        new=sides[1].level,
        change=change,
        low=math.expm1(low),
        high=math.expm1(high),
        bound_low=math.expm1(bound_low),
        bound_high=math.expm1(bound_high),
        verdict=_verdict(change, low, high, higher_is_better, judgement.smallest),
        base_repeats=tuple(len(run) for run in base),
        new_repeats=tuple(len(run) for run in new),
        paired_steps=paired_steps,
        uncertainty=Uncertainty(max(*inside, 0.0), between, measured, freedom, scatter, restless, inflation),
    )


class _Side:
    """One side: its profile (a value per step, or just one), bootstrap draws of it, and each run's level."""

    def __init__(self, runs: Sequence[Floats], inflation: float, generator: np.random.Generator) -> None:
        profiles = [np.median(run, axis=0) for run in runs]
        draws = [
            profile + inflation * (_resampled_medians(run, generator) - profile)
            for run, profile in zip(runs, profiles, strict=True)
        ]
        self.profile: Floats = np.mean(profiles, axis=0)
        self.draws: Floats = np.mean(draws, axis=0)
        self.run_levels: Floats = np.asarray([np.median(profile) for profile in profiles])
        self.level = float(np.exp(np.mean(self.run_levels)))
        repeats = [np.median(run, axis=1) for run in runs]
        self.scatter = max(_quarter_spread(values) for values in repeats)
        self.likely_spread = max(_SCATTER_SHARE * self.scatter, *(_drift(values, inflation) for values in repeats))


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


def _inflation(series: Sequence[Floats]) -> float:
    """√((1+ρ)/(1−ρ)) for the lag-one correlation of the ranks, at least 1.

    ρ is the runs' mean, since one machine made them all and a short series tells little of its own, corrected for its bias.
    """
    found = float(np.mean([_rank_correlation(values) for values in series]))
    corrected = min(_MOST_CORRELATION, max(0.0, found + (1 + 3 * found) / min(len(values) for values in series)))
    return math.sqrt((1 + corrected) / (1 - corrected))


def _rank_correlation(values: Floats) -> float:
    """Of each value with the one before it; equal values alone tell nothing."""
    if np.ptp(values) == 0:
        return 0.0
    ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable") - (len(values) - 1) / 2
    return float((ranks[1:] * ranks[:-1]).sum() / (ranks * ranks).sum())


def _drift(series: Floats, inflation: float) -> float:
    """How far the halves of a run lie apart, as a deviation, where their own noise does not explain it."""
    half = len(series) // 2
    first, second = series[:half], series[-half:]
    middles = float(np.median(first)), float(np.median(second))
    deviation = _quarter_spread(np.concatenate([first - middles[0], second - middles[1]]))
    noise = inflation * deviation * math.sqrt(_MEDIAN_VARIANCE * 2 / half)
    apart = abs(middles[1] - middles[0])
    return apart / math.sqrt(2) if apart > _SURE_OF_DRIFT * noise else 0.0


def _quarter_spread(values: Floats) -> float:
    """The interquartile range as a standard deviation."""
    low, high = np.quantile(values, [0.25, 0.75])
    return float(high - low) / 1.349


def _between(base: _Side, new: _Side, judgement: Judgement) -> tuple[float, bool, int]:
    """Deviation from process to process, whether it is measured, and with how many degrees of freedom."""
    freedom = len(base.run_levels) + len(new.run_levels) - 2
    squares = sum(float(((side.run_levels - side.run_levels.mean()) ** 2).sum()) for side in (base, new))
    seen = math.sqrt(squares / freedom) if freedom else 0.0
    if freedom >= LEAST_FREEDOM:
        return seen, True, freedom
    return max(judgement.process_spread, base.likely_spread, new.likely_spread, seen), False, freedom


def _widened(
    point: float, drawn: Floats, tail: float, between: float, measured: bool, freedom: int, counts: tuple[int, int]
) -> tuple[float, float]:
    """The interval that leaves `tail` on each side, with the spread between processes in it.

    A measured spread is that of the runs' medians, which holds the noise inside them already: the wider of the two is taken. An
    assumed one knows nothing of it: the two add as squares.
    """
    inside = point - float(np.quantile(drawn, tail)), float(np.quantile(drawn, 1 - tail)) - point
    times = student_quantile(1 - tail, freedom) if measured else student_quantile(1 - tail, None)
    outside = times * between * math.sqrt(1 / counts[0] + 1 / counts[1])
    if measured:
        low, high = (max(half, outside) for half in inside)
    else:
        low, high = (math.hypot(max(half, 0.0), outside) for half in inside)
    return point - low, point + high


def _verdict(change: float, low: float, high: float, higher_is_better: bool, smallest: float) -> Verdict:
    if low <= 0 <= high or abs(change) < smallest:
        return "not distinguishable"
    return "faster" if (change > 0) == higher_is_better else "slower"


@functools.lru_cache(maxsize=256)
def student_quantile(share: float, freedom: int | None) -> float:
    """Quantile (0.5 < share < 1) of Student's t with whole degrees of freedom; none: of the normal distribution."""
    low, high = 0.0, 1e5
    for _ in range(100):
        middle = (low + high) / 2
        inside = math.erf(middle / math.sqrt(2)) if freedom is None else _inside_student(middle, freedom)
        if (1 + inside) / 2 < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _inside_student(t: float, freedom: int) -> float:
    """P(|T| < t): the finite sums that hold for whole degrees of freedom."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2 == 1
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(1 if odd else 0, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total

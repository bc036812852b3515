"""How a quantity changed from one side to the other: the change, its interval, what the interval rests on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from llm_perf_opt.analysis.stability import Floats, Movement, Stability, inflation_of, quarter_spread
from llm_perf_opt.core.records import Maybe, Missing

Side = Literal["base", "new"]

_SURE_OF_SHIFT = math.log(18)
"""A shift where the runs meet explains their difference if it makes the repeats 18 times likelier than a change of the program.

Chosen by simulation with 2.4 % of noise: at odds of 8, 12 and 20, one switch inside the runs got a verdict in 3.6, 4.1 and 5.0 %
of pairs, and a slowdown of 5 % in log-normal noise was found in 77.7, 80.4 and 81.4 %.
"""
_SURE_OF_FAR_SHIFT = 2 * _SURE_OF_SHIFT
"""The same at the beginning of the earlier run and at the end of the later one, where the machine must have switched twice."""
_SURE_OF_DRIFT = math.log(5)
"""The same for a drift, whose place is not searched for. At odds of 5 and 12 a random walk got a verdict in 3.9 and 4.8 %."""
_PARTS = 5
"""A fifth of a run's repeats, and at least `_FEWEST`, are those next to the place where the runs meet."""
_FEWEST = 3
_FREEDOM = 8
"""Few enough that one outlier adds little evidence, many enough that normal noise is treated as normal."""
_WITHIN = 3.0
"""Deviations beyond both levels. A repeat further out is an outlier and counts as if it were this far out."""
_LEAST_SCALE = 1e-3
"""The least noise assumed, as a share of the difference: without noise any other repeat would be unlimited evidence."""


@dataclass(frozen=True)
class Rival:
    """What the machine did that explains a difference."""

    movement: Movement
    side: Literal["base", "new", "both"]
    """Which run of the two shows it."""
    first: int
    """The first repeat that ran at the other side's level, counted from 1; 0 for a drift."""
    last: int
    evidence: float
    """Log-likelihood ratio to a change between the runs."""

    @property
    def words(self) -> str:
        """What was seen."""
        if self.movement is Movement.DRIFT:
            return "a drift inside the runs explains the difference better than a change between them"
        many = f"repeat {self.first}" if self.first == self.last else f"repeats {self.first} to {self.last}"
        return f"{many} of {self.side} ran at the level of {'base' if self.side == 'new' else 'new'}"


def rival(earlier: Floats, later: Floats, sides: tuple[Side, Side] = ("base", "new")) -> Rival | None:
    """Return what the machine did, if that explains the difference of two runs better than a change between them.

    The runs are logarithms of times, one per repeat. `sides` names the sides that the earlier and the later run belong to.
    """
    earlier, later = _without_outliers(earlier, later)
    levels = float(earlier.mean()), float(later.mean())
    apart = abs(levels[1] - levels[0])
    if apart == 0:
        return None
    scale = max(float(np.concatenate([earlier - levels[0], later - levels[1]]).std()), _LEAST_SCALE * apart)
    return _shift(earlier, later, levels, scale, sides) or _drift(earlier, later)


def _without_outliers(earlier: Floats, later: Floats) -> tuple[Floats, Floats]:
    """Return the repeats with outliers pulled in to `_WITHIN`. One outlier would otherwise hide any shift or drift."""
    levels = float(np.median(earlier)), float(np.median(later))
    reach = _WITHIN * quarter_spread(np.concatenate([earlier - levels[0], later - levels[1]]))
    low, high = min(levels) - reach, max(levels) + reach
    return np.clip(earlier, low, high), np.clip(later, low, high)


def _shift(earlier: Floats, later: Floats, levels: tuple[float, float], scale: float, sides: tuple[Side, Side]) -> Rival | None:
    """Return a level shift: repeats at the other run's level where the runs meet, or else at the far ends."""
    runs = earlier, later
    for at_end, sure in (((0, True), (1, False)), _SURE_OF_SHIFT), (((0, False), (1, True)), _SURE_OF_FAR_SHIFT):
        for which, tail in at_end:
            own, other = levels[which], levels[1 - which]
            gains = _unlikeliness((runs[which] - own) / scale) - _unlikeliness((runs[which] - other) / scale)
            sums = np.cumsum(gains[::-1] if tail else gains)[:-1]
            count = int(np.argmax(sums)) + 1
            first, last = (len(gains) - count, len(gains)) if tail else (0, count)
            rest = [earlier - levels[0], later - levels[1]]
            rest[which][first:last] += own - other
            evidence = float(sums[count - 1]) / inflation_of(rest) ** 2
            if evidence >= sure:
                return Rival(Movement.SHIFT, sides[which], first + 1, last, evidence)
    return None


def _unlikeliness(deviations: Floats) -> Floats:
    """Minus the logarithm of Student's density, up to a constant."""
    found: Floats = (_FREEDOM + 1) / 2 * np.log1p(deviations**2 / _FREEDOM)
    return found


def _drift(earlier: Floats, later: Floats) -> Rival | None:
    """Return a drift: runs that meet at both beginnings, or at the end of the earlier and the beginning of the later."""
    evidence = max(of(earlier, later, meeting) for of in (_of_lines, _of_ends) for meeting in (0, 1))
    return Rival(Movement.DRIFT, "both", 0, 0, evidence) if evidence >= _SURE_OF_DRIFT else None


def _of_lines(earlier: Floats, later: Floats, meeting: int) -> float:
    """Evidence of lines that meet at the beginning (0) or the end (1) of the earlier run, against a level for each run."""
    both = np.concatenate([earlier, later])
    lines = np.zeros((len(both), 3))
    lines[:, 0] = 1
    lines[: len(earlier), 1] = np.linspace(0, 1, len(earlier)) - meeting
    lines[len(earlier) :, 2] = np.linspace(0, 1, len(later))
    rest = both - lines @ np.linalg.lstsq(lines, both, rcond=None)[0]
    from_levels = _squares([earlier - earlier.mean(), later - later.mean()])
    from_lines = max(float(rest @ rest), _LEAST_SCALE**2 * from_levels)
    if not from_lines < from_levels:
        return 0.0
    return len(both) / 2 * math.log(from_levels / from_lines) / _likeness([rest[: len(earlier)], rest[len(earlier) :]])


def _of_ends(earlier: Floats, later: Floats, meeting: int) -> float:
    """Evidence that the runs do not differ where they meet, whatever shape their drift has."""
    count = max(_FEWEST, min(len(earlier), len(later)) // _PARTS)
    apart = float(later.mean() - earlier.mean())
    near = float(later[:count].mean() - (earlier[-count:] if meeting else earlier[:count]).mean())
    rest = [run - np.polyval(np.polyfit(np.arange(len(run)), run, 1), np.arange(len(run))) for run in (earlier, later)]
    variance = max(_squares(rest) / (len(earlier) + len(later)), (_LEAST_SCALE * apart) ** 2)
    return apart * (apart - 2 * near) / (4 * variance / count) / _likeness(rest)


def _squares(rest: Sequence[Floats]) -> float:
    return sum(float(run @ run) for run in rest)


def _likeness(rest: Sequence[Floats]) -> float:
    """Return by which factor correlated neighbors inflate the evidence, measured on residuals of lines."""
    return inflation_of(rest, fitted=2) ** 2


Verdict = Literal["faster", "slower", "less", "more", "not distinguishable", "not judged"]
"""Of times and rates the first two; of what is used up, energy and memory, the next two. Not judged: a run cannot be believed."""
Order = Literal["base first", "new first", "in turn"]
MEASURED_FROM = 2
"""Degrees of freedom from which the spread between processes is measured: two runs a side, or three against one."""


@dataclass(frozen=True)
class Judgement:
    """What a change must show before it is called one."""

    smallest: float = 0.01
    """A change smaller than this share is not called faster or slower, however sure it is."""
    process_spread: float | None = None
    """Standard deviation between processes that do the same, assumed where too few runs measure it; none: not to be assumed."""
    measured_from: int = MEASURED_FROM
    """Degrees of freedom from which the spread is measured, where one may be assumed below them."""
    restless: float = 0.03
    """Standard deviation of a run's repeats (from its quartiles) beyond which others are taken to use the machine."""
    apart: float = 0.0
    """Standard deviation of the change that no number of runs shows, since what makes it lies between the sides, not in them."""
    apart_why: str = ""
    """What makes it."""
    order: Order = "in turn"
    """In which the runs were made. With one run a side, "in turn" means that their times are equal: base is taken as first."""


@dataclass(frozen=True)
class Uncertainty:
    """Where the width of an interval comes from; half-widths and deviations of the logarithm, about shares."""

    inside: float
    """Half the interval from the repeats inside the runs alone."""
    between: Maybe[float]
    """Standard deviation from one process to the next."""
    measured: bool
    """Whether `between` was measured over several runs, not assumed."""
    freedom: int
    """Degrees of freedom it was measured with."""
    seen: float
    """Deviation between runs of one side, whether or not they are enough to measure it; 0 where no side has two."""
    scatter: float
    """Standard deviation of the repeats inside a run, from their quartiles; of the most restless run and those like it."""
    visited: float
    """From the least to the most of the repeats of a run; the widest run's."""
    restless: bool
    """Whether they scatter so much, in so few runs, that a change must exceed the range they visited."""
    inflation: float
    """How much wider the repeats' likeness to their neighbors made the interval; 1: not at all."""
    moved: float = 0.0
    """How far the level of a run moved while it was measured, if that is what `between` is taken from; else 0."""
    apart: float = 0.0
    """Deviation of the change that runs do not show: `Judgement.apart`."""
    apart_why: str = ""


@dataclass(frozen=True)
class Interval:
    """Between which ends the change lies."""

    low: float
    """Lower end at `LEVEL`."""
    high: float
    bound_low: float
    """The change is at least this, one-sided at `BOUND_LEVEL`."""
    bound_high: float
    """The change is at most this, likewise."""

    @property
    def has_zero(self) -> bool:
        """Whether no change at all is among what may be."""
        return self.low <= 0 <= self.high

    def or_none(self, point: float) -> "Interval":
        """Return the interval, widened to hold no change too. `point` is the logarithm of the change that it lies around."""
        low, high, bound_low, bound_high = (
            math.expm1(math.log1p(end) - point) for end in (self.low, self.high, self.bound_low, self.bound_high)
        )
        return Interval(
            min(self.low, low), max(self.high, high), min(self.bound_low, bound_low), max(self.bound_high, bound_high)
        )


@dataclass(frozen=True)
class Effect:
    """What changed from one side to the other, and whether that is real."""

    base: float
    """Median; over several runs the geometric mean of their medians."""
    new: float
    change: float
    """new / base − 1, of medians of logarithms; paired by step: the median over the steps of that ratio."""
    interval: Maybe[Interval]
    verdict: Verdict
    base_repeats: tuple[int, ...]
    """Repeats of each run."""
    new_repeats: tuple[int, ...]
    paired_steps: int
    """Decode steps compared one with one; 0: not paired."""
    uncertainty: Uncertainty
    base_stability: tuple[Stability, ...] = ()
    """Whether each run kept its level."""
    new_stability: tuple[Stability, ...] = ()
    rival: Rival | None = None
    """What the machine did, if that explains the difference better than a change of the program."""

    @property
    def runs(self) -> tuple[int, int]:
        """Runs on each side."""
        return len(self.base_repeats), len(self.new_repeats)

    @property
    def exact(self) -> bool:
        """Whether nothing is uncertain: the figure repeats to the last digit."""
        return not isinstance(self.interval, Missing) and self.interval.low == self.interval.high

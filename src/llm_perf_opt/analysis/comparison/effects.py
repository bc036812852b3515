"""How a quantity changed from one side to the other: the change, its interval, what the interval rests on."""

import math
from dataclasses import dataclass
from typing import Literal

from llm_perf_opt.analysis.comparison.rivals import Rival
from llm_perf_opt.analysis.stability import Stability
from llm_perf_opt.core.records import Maybe, Missing

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

"""The change of a quantity between two sides: its interval, its uncertainty, and whether the machine explains it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from llm_perf_opt.analysis.stability import Floats, Movement, Stability, inflation_of, median, quarter_spread
from llm_perf_opt.core.records import Maybe, Missing

Side = Literal["base", "new"]

_SURE_OF_SHIFT = math.log(18)
"""A level shift near the boundary between the runs explains their difference if it makes the repeats 18 times as likely as a
change of the program does.

Chosen by simulation with 2.4 % noise: at odds of 8, 12 and 20, one switch inside the runs got a verdict in 3.6, 4.1 and 5.0 % of
pairs, and a slowdown of 5 % in log-normal noise was detected in 77.7, 80.4 and 81.4 %.
"""
_SURE_OF_FAR_SHIFT = 2 * _SURE_OF_SHIFT
"""The same for a shift at the start of the earlier run or the end of the later one: the machine must have switched twice."""
_SURE_OF_DRIFT = math.log(5)
"""The same for a drift, which has no place to search for. At odds of 5 and 12, a random walk got a verdict in 3.9 and 4.8 %."""
_PARTS = 5
"""A fifth of a run's repeats, and at least `_FEWEST`, count as next to the boundary between the runs."""
_FEWEST = 3
_FREEDOM = 8
"""Degrees of freedom: few enough that an outlier adds little evidence, enough to treat normal noise as normal."""
_WITHIN = 3.0
"""Outliers are moved to this many deviations beyond the two levels."""
_LEAST_SCALE = 1e-3
"""The least assumed noise, as a share of the difference; without noise, a single repeat would be unlimited evidence."""


@dataclass(frozen=True)
class Rival:
    """A change of the machine's speed that explains a difference."""

    movement: Movement
    side: Literal["base", "new", "both"]
    """The run that shows it."""
    first: int
    """The first repeat that ran at the other side's level, counted from 1; 0 for a drift."""
    last: int
    evidence: float
    """Log-likelihood ratio relative to a change between the runs."""

    @property
    def words(self) -> str:
        """What was observed, as a clause."""
        if self.movement is Movement.DRIFT:
            return "a drift inside the runs explains the difference better than a change between them"
        many = f"repeat {self.first}" if self.first == self.last else f"repeats {self.first} to {self.last}"
        return f"{many} of {self.side} ran at the level of {'base' if self.side == 'new' else 'new'}"


def rival(earlier: Floats, later: Floats, sides: tuple[Side, Side] = ("base", "new")) -> Rival | None:
    """Return the change of the machine's speed that explains the difference of two runs better than a change between them.

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
    """Return the repeats with outliers limited to `_WITHIN`. One outlier would otherwise hide any shift or drift."""
    levels = median(earlier), median(later)
    reach = _WITHIN * quarter_spread(np.concatenate([earlier - levels[0], later - levels[1]]))
    low, high = min(levels) - reach, max(levels) + reach
    return np.clip(earlier, low, high), np.clip(later, low, high)


def _shift(earlier: Floats, later: Floats, levels: tuple[float, float], scale: float, sides: tuple[Side, Side]) -> Rival | None:
    """Return a level shift: repeats at the other run's level at the boundary between the runs, or else at the far ends."""
    runs = earlier, later
    for at_end, sure in (((0, True), (1, False)), _SURE_OF_SHIFT), (((0, False), (1, True)), _SURE_OF_FAR_SHIFT):
        for which, tail in at_end:
            own, other = levels[which], levels[1 - which]
            gains = _negative_log_density((runs[which] - own) / scale) - _negative_log_density((runs[which] - other) / scale)
            sums = np.cumsum(gains[::-1] if tail else gains)[:-1]
            count = int(np.argmax(sums)) + 1
            first, last = (len(gains) - count, len(gains)) if tail else (0, count)
            rest = [earlier - levels[0], later - levels[1]]
            rest[which][first:last] += own - other
            evidence = float(sums[count - 1]) / inflation_of(rest) ** 2
            if evidence >= sure:
                return Rival(Movement.SHIFT, sides[which], first + 1, last, evidence)
    return None


def _negative_log_density(deviations: Floats) -> Floats:
    """Return the negative logarithm of Student's density, up to a constant."""
    found: Floats = (_FREEDOM + 1) / 2 * np.log1p(deviations**2 / _FREEDOM)
    return found


def _drift(earlier: Floats, later: Floats) -> Rival | None:
    """Return a drift: the runs agree where both start, or at the end of the earlier and the start of the later."""
    evidence = max(measure(earlier, later, meeting) for measure in (_line_evidence, _boundary_evidence) for meeting in (0, 1))
    return Rival(Movement.DRIFT, "both", 0, 0, evidence) if evidence >= _SURE_OF_DRIFT else None


def _line_evidence(earlier: Floats, later: Floats, meeting: int) -> float:
    """Return the evidence for lines that meet at the start (0) or the end (1) of the earlier run, against constant levels."""
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
    return len(both) / 2 * math.log(from_levels / from_lines) / _inflation([rest[: len(earlier)], rest[len(earlier) :]])


def _boundary_evidence(earlier: Floats, later: Floats, meeting: int) -> float:
    """Return the evidence that the runs do not differ at their boundary, whatever the shape of their drift."""
    count = max(_FEWEST, min(len(earlier), len(later)) // _PARTS)
    apart = float(later.mean() - earlier.mean())
    near = float(later[:count].mean() - (earlier[-count:] if meeting else earlier[:count]).mean())
    rest = [run - np.polyval(np.polyfit(np.arange(len(run)), run, 1), np.arange(len(run))) for run in (earlier, later)]
    variance = max(_squares(rest) / (len(earlier) + len(later)), (_LEAST_SCALE * apart) ** 2)
    return apart * (apart - 2 * near) / (4 * variance / count) / _inflation(rest)


def _squares(rest: Sequence[Floats]) -> float:
    return sum(float(run @ run) for run in rest)


def _inflation(rest: Sequence[Floats]) -> float:
    """Return the factor by which correlated neighbors inflate the evidence, from residuals of lines."""
    return inflation_of(rest, fitted=2) ** 2


Verdict = Literal["faster", "slower", "less", "more", "not distinguishable", "not judged"]
"""Times and rates are faster or slower; memory and energy are less or more. Not judged: a run is not valid."""
Order = Literal["base first", "new first", "in turn"]
MEASURED_FROM = 2
"""Degrees of freedom from which the spread between processes is measured: two runs per side, or three against one."""


@dataclass(frozen=True)
class Judgement:
    """The conditions for calling a change real."""

    smallest: float = 0.01
    """A smaller change is not called faster or slower, however certain it is."""
    process_spread: float | None = None
    """Assumed standard deviation between equal processes, if there are too few runs to measure it; None: nothing is assumed."""
    measured_from: int = MEASURED_FROM
    """Degrees of freedom from which the spread is measured instead of assumed."""
    restless: float = 0.03
    """If a run's repeats deviate by more than this (from their quartiles), other processes are assumed to use the machine."""
    apart: float = 0.0
    """Standard deviation of the change that runs cannot show, because its cause lies between the sides."""
    apart_why: str = ""
    """Its cause."""
    order: Order = "in turn"
    """Order of the runs. With one run per side, "in turn" means equal times: base is taken as first."""
    sequence: tuple[int, ...] = ()
    """The side of each run, 0 for base and 1 for new, in the order they were made; empty: as `order` says, base first."""

    timed: bool = True
    """Whether the repeats of a run follow the machine over time; requests under load follow their place in the queue."""

    def sides(self, base: int, new: int) -> tuple[int, ...]:
        """Return the side of each of so many runs in the order they were made."""
        if self.sequence:
            return self.sequence
        if self.order != "in turn":
            return (0,) * base + (1,) * new if self.order == "base first" else (1,) * new + (0,) * base
        return in_turn([""] * base, [""] * new)


def in_turn(base: Sequence[str], new: Sequence[str]) -> tuple[int, ...]:
    """Return the side of each run, 0 for base and 1 for new, by the time it was made; those of one time alternate."""
    made = [(time, place / len(side), which) for which, side in enumerate((base, new)) for place, time in enumerate(side)]
    return tuple(which for *_, which in sorted(made))


@dataclass(frozen=True)
class Uncertainty:
    """The sources of an interval's width: half-widths and deviations of logarithms, approximately shares."""

    inside: float
    """Half-width from the repeats inside the runs alone."""
    between: Maybe[float]
    """Standard deviation between processes."""
    measured: bool
    """Whether `between` was measured rather than assumed."""
    freedom: int
    """Degrees of freedom of the measurement."""
    seen: float
    """Deviation between runs of one side, even if they are too few to measure it; 0 if no side has two."""
    scatter: float
    """Standard deviation of the repeats inside a run, from their quartiles: the largest, pooled with similar ones."""
    visited: float
    """Range of the repeats of a run: the widest."""
    restless: bool
    """Whether repeats scatter so much, in too few runs, that a change must exceed their range."""
    inflation: float
    """Factor by which the correlation of neighboring repeats widens the interval; 1: not at all."""
    moved: float = 0.0
    """How far the level of a run moved, if `between` is derived from it; else 0."""
    apart: float = 0.0
    """Deviation of the change that runs cannot show: `Judgement.apart`."""
    apart_why: str = ""
    error: float = 0.0
    """Standard error of the change from the timeline of several runs per side; 0 without."""


@dataclass(frozen=True)
class Interval:
    """The interval of a change."""

    low: float
    """Lower end at `LEVEL`."""
    high: float
    bound_low: float
    """The change is at least this, one-sided at `BOUND_LEVEL`."""
    bound_high: float
    """The change is at most this, one-sided at `BOUND_LEVEL`."""

    @property
    def has_zero(self) -> bool:
        """Whether the interval includes no change."""
        return self.low <= 0 <= self.high

    def including_zero(self, point: float) -> "Interval":
        """Return the interval widened to include no change. `point` is the logarithm of the estimated change."""
        return self.joined(
            Interval(*(math.expm1(math.log1p(end) - point) for end in (self.low, self.high, self.bound_low, self.bound_high)))
        )

    def joined(self, other: "Interval") -> "Interval":
        """Return the interval that covers both."""
        return Interval(
            min(self.low, other.low),
            max(self.high, other.high),
            min(self.bound_low, other.bound_low),
            max(self.bound_high, other.bound_high),
        )


@dataclass(frozen=True)
class Effect:
    """The change between two sides, and whether it is real."""

    base: float
    """Median; for several runs the geometric mean of their medians."""
    new: float
    change: float
    """new / base − 1 of the medians of logarithms; for paired steps, the median over the steps. With several runs per side, the
    median of what the timeline of all repeats leaves possible (`timeline`)."""
    interval: Maybe[Interval]
    verdict: Verdict
    base_repeats: tuple[int, ...]
    """Repeats of each run."""
    new_repeats: tuple[int, ...]
    paired_steps: int
    """Decode steps that were paired; 0: not paired."""
    uncertainty: Uncertainty
    base_stability: tuple[Stability, ...] = ()
    """Whether each run stayed at one level."""
    new_stability: tuple[Stability, ...] = ()
    rival: Rival | None = None
    """A change of the machine's speed that explains the difference better than a change of the program."""

    @property
    def runs(self) -> tuple[int, int]:
        """Number of runs on each side."""
        return len(self.base_repeats), len(self.new_repeats)

    @property
    def exact(self) -> bool:
        """Whether there is no uncertainty: the figure repeats to the last digit."""
        return not isinstance(self.interval, Missing) and self.interval.low == self.interval.high

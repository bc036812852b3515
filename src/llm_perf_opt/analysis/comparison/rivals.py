"""Whether what the machine did during two runs explains their difference as well as a change of the program does.

Two runs lie on one timeline, and a change of the program can move the level at one place of it only: between them. If the level
moved at another place, inside a run, the machine did it. So where two runs differ, their repeats are asked which is likelier:

- **a level shift**: the last repeats of the earlier run, or the first of the later one, lie at the other run's level, not at
  their own. For each number of repeats the logarithm of the likelihood ratio is summed, with Student's t of `_FREEDOM` degrees
  as noise, which a few outliers do not impress. If the program changed, such a sum reaches x with a chance of at most e⁻ˣ,
  however many numbers are tried (Ville's inequality). At the far ends of the runs more is asked for: there the machine must have
  switched twice.
- **a drift**: both runs begin at one level and slide off it, or one begins where the other ended. Either lines that meet there
  fit better than a level for each run, or, whatever shape the drift has, the repeats where the runs meet do not differ.

Because it is known which difference is to be explained, two or three repeats tell, where a test of one run alone needs many.
A switch that fell exactly between the runs leaves nothing in either and cannot be told from a change.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from llm_perf_opt.analysis.stability import Floats, Movement, inflation_of, quarter_spread

Side = Literal["base", "new"]

_SURE_OF_SHIFT = 2.9
"""Logarithm of the likelihood ratio from which a shift where the runs meet is held to explain their difference."""
_SURE_OF_FAR_SHIFT = 5.0
"""The same at the beginning of the earlier run and at the end of the later one."""
_SURE_OF_LINES = 2.0
"""The same of a drift along a line, which has no place that is looked for."""
_SURE_OF_ENDS = 1.25
"""The same of a drift of any shape, by the repeats where the runs meet."""
_PARTS = 5
"""Of a run: so many repeats are taken where the runs meet, at least `_FEWEST`."""
_FEWEST = 3
_FREEDOM = 8
_WITHIN = 3.0
"""Deviations beyond both levels. A repeat further out is an outlier and counts as if it were this far out."""
_LEAST_SCALE = 1e-3
"""Of the difference: where repeats are all but equal, any other one would count without limit."""


@dataclass(frozen=True)
class Rival:
    """What the machine did that explains a difference."""

    movement: Movement
    side: Literal["base", "new", "both"]
    """Which run of the two shows it."""
    first: int
    """Of a shift the first of the repeats that ran at the other side's level, counted from 1; else 0."""
    last: int
    evidence: float
    """Logarithm of how much likelier it makes the repeats than a change between the runs does."""

    @property
    def words(self) -> str:
        """What was seen."""
        if self.movement is Movement.DRIFT:
            return "a drift inside the runs explains the difference better than a change between them"
        many = f"repeat {self.first}" if self.first == self.last else f"repeats {self.first} to {self.last}"
        return f"{many} of {self.side} ran at the level of {'base' if self.side == 'new' else 'new'}"


def rival(earlier: Floats, later: Floats, sides: tuple[Side, Side] = ("base", "new")) -> Rival | None:
    """What the machine did that explains the difference of two runs better than a change between them; none: nothing does.

    Logarithms, one per repeat. `sides`: which side the earlier run belongs to, and which the later.
    """
    earlier, later = _without_outliers(earlier, later)
    levels = float(earlier.mean()), float(later.mean())
    apart = abs(levels[1] - levels[0])
    if apart == 0:
        return None
    scale = max(float(np.concatenate([earlier - levels[0], later - levels[1]]).std()), _LEAST_SCALE * apart)
    return _shift(earlier, later, levels, scale, sides) or _drift(earlier, later)


def _without_outliers(earlier: Floats, later: Floats) -> tuple[Floats, Floats]:
    """The repeats, those far beyond both levels moved to `_WITHIN`. One outlier would hide every shift and every drift."""
    levels = float(np.median(earlier)), float(np.median(later))
    reach = _WITHIN * quarter_spread(np.concatenate([earlier - levels[0], later - levels[1]]))
    low, high = min(levels) - reach, max(levels) + reach
    return np.clip(earlier, low, high), np.clip(later, low, high)


def _shift(earlier: Floats, later: Floats, levels: tuple[float, float], scale: float, sides: tuple[Side, Side]) -> Rival | None:
    """Repeats at an end of a run that lie at the other's level: where the runs meet, else at the far ends."""
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
    """Runs that meet: at both beginnings, or at the end of the earlier and the beginning of the later."""
    evidence = max(_of_lines(earlier, later, meeting) for meeting in (0, 1))
    if evidence < _SURE_OF_LINES:
        evidence = max(_of_ends(earlier, later, meeting) for meeting in (0, 1))
        if evidence < _SURE_OF_ENDS:
            return None
    return Rival(Movement.DRIFT, "both", 0, 0, evidence)


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
    """Evidence that the difference is not there where the runs meet, whatever shape their drift has."""
    count = max(_FEWEST, min(len(earlier), len(later)) // _PARTS)
    apart = float(later.mean() - earlier.mean())
    near = float(later[:count].mean() - (earlier[-count:] if meeting else earlier[:count]).mean())
    rest = [run - np.polyval(np.polyfit(np.arange(len(run)), run, 1), np.arange(len(run))) for run in (earlier, later)]
    variance = max(_squares(rest) / (len(earlier) + len(later)), (_LEAST_SCALE * apart) ** 2)
    return apart * (apart - 2 * near) / (4 * variance / count) / _likeness(rest)


def _squares(rest: Sequence[Floats]) -> float:
    return sum(float(run @ run) for run in rest)


def _likeness(rest: Sequence[Floats]) -> float:
    """By how much likeness of neighbors makes evidence appear larger, from what lines leave."""
    return inflation_of(rest, fitted=2) ** 2

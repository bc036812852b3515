"""Whether what the machine did during two runs explains their difference as well as a change of the program does.

Two runs lie on one timeline, and a change of the program can move the level at one place of it only: between them. If it moved
at another place, inside a run, the machine did it. So where two runs differ, their repeats are asked which is likelier:

- **a level shift**: the last (or first) repeats of a run lie at the other run's level, not at their own. For each number of
  repeats the logarithm of the likelihood ratio is summed, with Student's t of `_FREEDOM` degrees as noise, which a few outliers
  do not impress. If the program changed, such a sum exceeds x with a chance of at most e⁻ˣ, wherever it is looked at
  (Ville's inequality).
- **a drift**: both runs begin at one level and slide off it, or one ends where the other begins; a line each, against a level each.

Knowing which difference is to be explained, this sees far less than a test of one run alone must see: two or three repeats.
A switch that fell exactly between the runs leaves nothing in either and cannot be told from a change.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from llm_perf_opt.analysis.stability import Floats, Movement, inflation_of

_SURE_OF_SHIFT = 3.0
"""Logarithm of the likelihood ratio from which a shift is held to explain a difference."""
_SURE_OF_DRIFT = 3.0
"""The same of a drift, which has no place to be looked for."""
_FREEDOM = 8
_WITHIN = 3.0
"""Repeats further beyond both levels than this many deviations are taken as this far, where lines are fitted."""
_LEAST_SCALE = 1e-3
"""Of the difference: repeats that are all but equal would make any other one count without limit."""


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
        other = "base" if self.side == "new" else "new"
        many = f"repeat {self.first}" if self.first == self.last else f"repeats {self.first} to {self.last}"
        return f"{many} of {self.side} ran at the level of {other}"


def rival(base: Floats, new: Floats) -> Rival | None:
    """The likeliest movement of the machine that explains the difference of two runs better than a change; none: a change does.

    `base` and `new` are logarithms, one per repeat.
    """
    levels = float(np.median(base)), float(np.median(new))
    apart = abs(levels[1] - levels[0])
    if apart == 0:
        return None
    scale = max(float(np.concatenate([base - levels[0], new - levels[1]]).std()), _LEAST_SCALE * apart)
    found = [_shift(base, new, levels, scale), _drift(base, new, levels, scale)]
    sure = [one for one in found if one is not None]
    return max(sure, key=lambda one: one.evidence, default=None)


def _shift(base: Floats, new: Floats, levels: tuple[float, float], scale: float) -> Rival | None:
    """Repeats at the beginning or the end of a run that lie at the other's level."""
    best = 0.0, 0, 0, 0
    for side, values in enumerate((base, new)):
        own, other = levels[side], levels[1 - side]
        gains = _unlikeliness((values - own) / scale) - _unlikeliness((values - other) / scale)
        heads, tails = np.cumsum(gains)[:-1], np.cumsum(gains[::-1])[:-1]
        head, tail = int(np.argmax(heads)), int(np.argmax(tails))
        best = max(best, (float(heads[head]), side, 0, head + 1), (float(tails[tail]), side, len(values) - tail - 1, len(values)))
    evidence, side, first, last = best
    rest = [base - levels[0], new - levels[1]]
    rest[side][first:last] += levels[side] - levels[1 - side]
    evidence /= inflation_of(rest) ** 2
    if evidence < _SURE_OF_SHIFT:
        return None
    return Rival(Movement.SHIFT, "base" if side == 0 else "new", first + 1, last, evidence)


def _unlikeliness(deviations: Floats) -> Floats:
    """Minus the logarithm of Student's density, up to a constant."""
    found: Floats = (_FREEDOM + 1) / 2 * np.log1p(deviations**2 / _FREEDOM)
    return found


def _drift(base: Floats, new: Floats, levels: tuple[float, float], scale: float) -> Rival | None:
    """A line for each run, which meet: at both beginnings, or at the end of one and the beginning of the other."""
    low, high = min(levels) - _WITHIN * scale, max(levels) + _WITHIN * scale
    base, new = np.clip(base, low, high), np.clip(new, low, high)
    both = np.concatenate([base, new])
    from_levels = float(((base - base.mean()) ** 2).sum() + ((new - new.mean()) ** 2).sum())
    times = np.linspace(0, 1, len(base)), np.linspace(0, 1, len(new))
    best = 0.0
    for meeting in ((0, 0), (1, 0), (0, 1)):
        lines = np.zeros((len(both), 3))
        lines[:, 0] = 1
        lines[: len(base), 1] = times[0] - meeting[0]
        lines[len(base) :, 2] = times[1] - meeting[1]
        rest = both - lines @ np.linalg.lstsq(lines, both, rcond=None)[0]
        from_lines = float(rest @ rest)
        likeness = inflation_of([rest[: len(base)], rest[len(base) :]], fitted=2) ** 2
        if from_lines < from_levels:
            best = max(best, len(both) / 2 * math.log(from_levels / max(from_lines, 1e-12 * from_levels)) / likeness)
    return Rival(Movement.DRIFT, "both", 0, 0, best) if best >= _SURE_OF_DRIFT else None

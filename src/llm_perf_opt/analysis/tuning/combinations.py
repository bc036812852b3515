"""Changes that are tried together: findings that are independent of each other, and pairs of changes that did not help alone."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from llm_perf_opt.analysis.tuning.candidates import Change, Prediction

MOST_PAIRS = 30
"""Pairs that are tried, the most promising ones. Spaces of levers are small: this is most of the pairs of eight."""


def independent(first: Change, second: Change) -> bool:
    """Return whether the findings of two changes say that neither affects the other.

    Their savings are in different stages, or in different components of the same stage. A change of precision or of the requests
    is judged by other rules, so it is tried alone.
    """
    one, other = first.finding, second.finding
    if one is None or other is None or not compatible(first, second):
        return False
    if any(change.lossy or change.other_work for change in (first, second)):
        return False
    if one.stage != other.stage:
        return True
    return bool(one.concerns) and bool(other.concerns) and not {*one.concerns} & {*other.concerns}


def compatible(first: Change, second: Change) -> bool:
    """Return whether two changes do not set a setting to different values."""
    values = dict(text.partition("=")[::2] for text in first.overrides)
    return all(values.get(key, value) == value for key, _, value in (text.partition("=") for text in second.overrides))


def joined(parts: Sequence[Change]) -> Change:
    """Return changes as one."""
    overrides = tuple(dict.fromkeys(text for part in parts for text in part.overrides))
    return Change(overrides, " + ".join(part.source for part in parts), parts=tuple(parts))


def independent_changes(changes: Sequence[Change]) -> Change | None:
    """Return the first change with all that are independent of it and of each other; None if none is."""
    chosen = list(changes[:1])
    for change in changes[1:]:
        if all(independent(change, other) for other in chosen):
            chosen.append(change)
    return replace(joined(chosen), together=True) if len(chosen) > 1 else None


def pairs(alone: Mapping[frozenset[str], tuple[Change, float]]) -> list[Change]:
    """Return pairs of changes that were valid but not better alone, the most promising first. `alone`: with their gain."""
    found: Iterable[tuple[tuple[Change, float], ...]] = combinations(alone.values(), 2)
    possible = [(one, other) for one, other in found if _pairable(one[0], other[0])]
    possible.sort(key=lambda pair: -(pair[0][1] + pair[1][1]))
    return [joined([one[0], other[0]]) for one, other in possible]


def _pairable(first: Change, second: Change) -> bool:
    alone = any(change.lossy or change.other_work for change in (first, second))
    return not alone and compatible(first, second) and not (first.key <= second.key or second.key <= first.key)


def joint_prediction(parts: Sequence[Prediction | None], level_ns: float) -> Prediction | None:
    """Return the prediction of independent changes: their savings add up. None if one is unknown."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    expected, low, high = (
        max(round(level_ns - sum(level_ns - value for value in values)), 1)
        for values in zip(*((part.expected_ns, part.low_ns, part.high_ns) for part in known), strict=True)
    )
    return Prediction(expected, min(low, expected), max(high, expected), min(part.trials for part in known))

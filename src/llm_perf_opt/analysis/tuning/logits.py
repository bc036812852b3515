"""Whether two configurations differ by rounding only, decided by logits that were recorded with the same tokens fed.

The base is also recorded in fp32. Its distance from fp32 is its rounding error. A change that does not alter the precision may
round differently, but not worse, and it may choose another token only where the base cannot tell the two apart.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llm_perf_opt.core.logit_records import Logits
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.units import significant

Tokens = Sequence[Sequence[int]]
"""The new tokens of each sequence."""
MOST_RMS_GROWTH, MOST_MAX_GROWTH = 1.25, 2.0
"""How much larger than before the error against fp32 may be, as root mean square over all tokens and at most at each token. The
root mean square is over thousands of values and hardly varies; the largest is a single one."""
MOST_MOVED = 2.0
"""After a change of precision: how far a further change may move the logits, in root mean squares of the base's rounding error.
Two independent roundings are 1.4 apart."""


@dataclass(frozen=True)
class LogitError:
    """The distance of logits from those in fp32, over all recorded values."""

    rms: float
    max: float


@dataclass(frozen=True)
class LogitCheck:
    """The logits of a run compared with those of the base, with the same tokens fed."""

    compared: int
    """New tokens, over the recorded sequences."""
    values: int
    """Recorded logits."""
    equal: int
    """Tokens that are those of the configuration before."""
    equal_to_base: int
    max_difference: float
    """Of a logit from that of the base."""
    rms_difference: float
    error: LogitError | None = None
    """Against fp32; None without a recording in fp32."""
    error_before: LogitError | None = None
    """That of the configuration before, which is the base unless a change of precision was kept."""
    rounding: float | None = None
    """The largest error of the base at the token with the largest margin: a smaller margin is a tie. None if all are equal."""
    largest_margin: float | None = None
    """The margin between two tokens of which the runs chose different ones, where it is largest for the rounding error there."""
    fp32_why: str = ""
    """Why there is no recording in fp32."""
    dtype: str = ""
    flaw: str = ""
    """Why the difference is more than rounding; empty if it is not."""

    @property
    def ties(self) -> int:
        """Tokens that differ."""
        return self.compared - self.equal

    @property
    def within_rounding(self) -> bool:
        """Whether the runs differ by rounding only."""
        return not self.flaw


def check_logits(base: Maybe[Logits], before: Maybe[Logits], tried: Maybe[Logits]) -> Maybe[LogitCheck]:
    """Compare recorded logits. `before`: those of the configuration that the change must agree with; the base, or a change of
    precision that was kept. All three were fed the tokens of the base."""
    if isinstance(base, Missing):
        return Missing(f"the base has no logits: {base.why}")
    if isinstance(before, Missing):
        return Missing(f"the configuration before has no logits: {before.why}")
    if isinstance(tried, Missing):
        return Missing(f"the trial has no logits: {tried.why}")
    for name, logits in (("configuration before", before), ("trial", tried)):
        if not _alike(base, logits):
            return Missing(f"the logits of the {name} were recorded with other tokens than those of the base")
    if why := _unlike_fed(base):
        return Missing(why)
    equal = tried.chosen == before.chosen
    difference = _distance(tried.values, base.values)
    found = LogitCheck(
        compared=equal.size,
        values=difference.size,
        equal=int(equal.sum()),
        equal_to_base=int((tried.chosen == base.chosen).sum()),
        max_difference=float(difference.max()),
        rms_difference=float(np.sqrt(np.square(difference).mean())),
        dtype=base.facts.dtype,
    )
    if isinstance(base.fp32, Missing):
        return replace(found, fp32_why=base.fp32.why, flaw=f"there are no logits in fp32 to compare with: {base.fp32.why}")
    found = replace(found, error=_error(tried, base.fp32), error_before=_error(before, base.fp32))
    order = base.fp32 if before is base else before.values
    places, limits = np.argwhere(~equal), _error_at_tokens(base, base.fp32)
    margins = [(_margin(base, order, place, before.chosen, tried.chosen), float(limits[tuple(place)])) for place in places]
    known = [(margin, limit) for margin, limit in margins if margin is not None]
    if known:
        margin, limit = max(known, key=lambda pair: pair[0] / pair[1] if pair[1] else math.inf)
        found = replace(found, largest_margin=margin, rounding=limit)
    flaw = _flaw(found, unknown=len(margins) - len(known)) or _grown(
        tried, np.maximum(limits, _error_at_tokens(before, base.fp32)), base.fp32
    )
    moved = "" if before is base else _moved(tried, before, _error(base, base.fp32).rms)
    return replace(found, flaw=flaw or moved)


def _error_at_tokens(logits: Logits, fp32: Any) -> Any:
    """Return the largest error of each token, at least the usual one: at some tokens all errors happen to be small."""
    largest = _distance(logits.values, fp32).max(axis=-1)
    return np.maximum(largest, np.median(largest))


def _grown(tried: Logits, then: Any, fp32: Any) -> str:
    """Return at which token the error grew too much; empty if at none. A value that is not a number does not pass.

    `then`: the largest error of each token before.
    """
    now = _distance(tried.values, fp32).max(axis=-1)
    places = np.argwhere(~(now <= MOST_MAX_GROWTH * then))
    if not len(places):
        return ""
    row, position = places[0]
    return (
        f"at token {position} of sequence {row}, the largest error against fp32 is {significant(now[row, position], 3)}, "
        f"more than {significant(MOST_MAX_GROWTH, 3)} × the {significant(then[row, position], 3)} before"
    )


def _moved(tried: Logits, before: Logits, rounding: float) -> str:
    """Return why a change after one of precision is more than rounding: it moves the logits too far."""
    moved = float(np.sqrt(np.square(_distance(tried.values, before.values)).mean()))
    if moved <= MOST_MOVED * rounding:
        return ""
    return (
        f"the logits moved by {significant(moved, 3)} (root mean square), more than {significant(MOST_MOVED, 3)} × the rounding "
        f"error of the base, {significant(rounding, 3)}"
    )


def _unlike_fed(base: Logits) -> str:
    """Return why the recording of the base does not stand for its measurement: other tokens that are not ties within rounding."""
    places = np.argwhere(base.chosen != base.fed)
    if not len(places):
        return ""
    why = "the base chose other tokens when its logits were recorded than when it was measured"
    if isinstance(base.fp32, Missing):
        return f"{why}, and whether these are ties is unknown: {base.fp32.why}"
    limits = _error_at_tokens(base, base.fp32)
    margins = [(_margin(base, base.fp32, place, base.fed, base.chosen), limits[tuple(place)]) for place in places]
    return "" if all(margin is not None and margin <= limit for margin, limit in margins) else why


def _alike(base: Logits, other: Logits) -> bool:
    pairs = ((base.fed, other.fed), (base.top, other.top), (base.common, other.common))
    return all(np.array_equal(one, two) for one, two in pairs)


def _distance(one: Any, other: Any) -> Any:
    """Return the absolute differences; 0 for ids that a model excludes with minus infinity in both."""
    with np.errstate(invalid="ignore"):
        return np.where(one == other, 0.0, np.abs(one.astype(np.float64) - other))


def _error(logits: Logits, fp32: Any) -> LogitError:
    distance = _distance(logits.values, fp32)
    return LogitError(float(np.sqrt(np.square(distance).mean())), float(distance.max()))


def _margin(base: Logits, order: Any, place: Any, before: Any, after: Any) -> float | None:
    """Return by how much the token before is ahead of the one after; None if one of them was not recorded."""
    row, position = place
    ids = np.concatenate([base.top[row, position], base.common])
    found = [np.flatnonzero(ids == chosen[row, position]) for chosen in (before, after)]
    if not found[0].size or not found[1].size:
        return None
    values = order[row, position]
    return float(values[found[0][0]]) - float(values[found[1][0]])


def _flaw(found: LogitCheck, unknown: int) -> str:
    """Return why the difference is more than rounding. A value that is not a number does not pass."""
    error, before, rounding, margin = found.error, found.error_before, found.rounding, found.largest_margin
    if error is None or before is None:
        return "there are no logits in fp32 to compare with"
    if unknown:
        return f"tokens differ that are not among the most likely ones of the base ({unknown:,})"
    if margin is not None and rounding is not None and not margin <= rounding:
        return (
            f"a token differs whose margin is {significant(margin, 3)}, "
            f"more than the rounding error of the base there, {significant(rounding, 3)}"
        )
    if not error.rms <= MOST_RMS_GROWTH * before.rms:
        return (
            f"the root mean square error against fp32 is {significant(error.rms, 3)}, more than "
            f"{significant(MOST_RMS_GROWTH, 3)} × the {significant(before.rms, 3)} before"
        )
    return ""


def unlike_measured(base: Logits, tried: Logits, tokens: Tokens, before: Tokens) -> str:
    """Return why the recording does not stand for the tokens that were measured; empty if it does.

    Up to the first difference from the base, the measured request and the recorded one are the same, so their tokens must be.
    A sequence that was not recorded must have the tokens of the configuration before.
    """
    for row, measured in enumerate(tokens):
        if row >= len(base.fed):
            if list(measured) != list(before[row]):
                return f"the tokens of sequence {row} differ, and its logits were not recorded"
            continue
        same = np.array(measured) == base.fed[row]
        end = len(same) if same.all() else int(np.argmin(same)) + 1
        if list(measured[:end]) != tried.chosen[row, :end].tolist():
            return f"sequence {row} chose other tokens when its logits were recorded than when it was measured"
    return ""


def check_words(found: LogitCheck) -> str:
    """Return a difference within rounding as a clause."""
    ties = "1 is a tie" if found.ties == 1 else f"{found.ties:,} are ties"
    many = f"{found.equal:,} of {found.compared:,} tokens are equal, {ties} within the rounding of {found.dtype}"
    return f"{many} ({error_words(found)})" if found.error is not None else many


def error_words(found: LogitCheck) -> str:
    """Return the error against fp32 as a clause."""
    if found.error is None or found.error_before is None:
        return f"error against fp32 n/a: {found.fp32_why}"
    return f"error against fp32 {significant(found.error.rms, 3)}, before {significant(found.error_before.rms, 3)}"


def difference_words(found: LogitCheck) -> str:
    """Return the difference from the base as a clause."""
    return (
        f"logits differ by up to {significant(found.max_difference, 3)} (rms {significant(found.rms_difference, 3)}); with the "
        f"same tokens fed, {found.equal_to_base:,} of {found.compared:,} tokens are equal"
    )


def beyond(found: Maybe[LogitCheck], most: float | None) -> str:
    """Return why a change exceeds `--max-logit-diff`; empty if it does not."""
    if most is None:
        return ""
    if isinstance(found, Missing):
        return f"--max-logit-diff cannot be checked: {found.why}"
    if not found.max_difference <= most:
        return f"logits differ by up to {significant(found.max_difference, 3)}, more than --max-logit-diff {significant(most, 3)}"
    return ""

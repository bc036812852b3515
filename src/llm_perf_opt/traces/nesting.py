"""Find which interval of a thread encloses another interval or a moment: parents, innermost, outermost. Vectorized.

In the order of their starts (longer first), the parent of an interval is the nearest one before it that ends late enough: not
before the interval itself ends or, if intervals may overlap, after it begins. Each interval first points at its predecessor, then
jumps over those that end too early, all intervals at once. Jumps double each other, so a million intervals take some dozens of
rounds. Everything that is skipped had ended, so the innermost interval at a moment is found the same way. In the worst case each
round resolves one interval, so after a fixed number of rounds the rest is resolved one by one.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.traces.events import Int64

NONE = -1
"""In a column of row numbers: no row."""
MOST_DEPTH = 4000
"""Intervals around an interval: four times the recursion limit of Python. It bounds the work of code that visits all of them."""
_MOST_ROUNDS = 64
_FEW_LANES = 1000
"""With more, lanes are not visited one by one."""


@dataclass(frozen=True)
class Nesting:
    """Intervals on lanes (one lane per thread) and how they nest."""

    parent: Int64
    """The row of the innermost interval around each one, or NONE."""
    _order: Int64
    _lanes: Int64
    _first: Int64
    """The start of each lane in `_order`, and the end of the last one."""
    _start_ns: Int64
    _end_ns: Int64
    _jump: Int64

    def innermost(self, moment_ns: Int64, lane: Int64) -> Int64:
        """Return the row of the innermost interval at each moment on its lane, or NONE. An interval excludes its end."""
        place = np.full(len(moment_ns), NONE, np.int64)
        by_lane = np.argsort(lane, kind="stable")
        bounds = np.searchsorted(lane[by_lane], self._lanes)
        ends = np.searchsorted(lane[by_lane], self._lanes, side="right")
        for index in range(len(self._lanes)):
            moments = by_lane[bounds[index] : ends[index]]
            low, high = self._first[index], self._first[index + 1]
            before = np.searchsorted(self._start_ns[low:high], moment_ns[moments], side="right") - 1
            place[moments] = np.where(before < 0, NONE, before + low)
        return self._rows(_climb(place, moment_ns, self._end_ns, self._jump))

    def outermost(self, rows: Int64) -> Int64:
        """Return the outermost interval around each row (the row itself if it has no parent); NONE stays NONE."""
        top = np.where(self.parent == NONE, np.arange(len(self.parent)), self.parent)
        while len(top) and (top[top] != top).any():
            top = top[top]
        found = np.full(len(rows), NONE, np.int64)
        found[rows != NONE] = top[rows[rows != NONE]]
        return found

    def _rows(self, place: Int64) -> Int64:
        found = np.full(len(place), NONE, np.int64)
        found[place != NONE] = self._order[place[place != NONE]]
        return found


def nest(start_ns: Int64, end_ns: Int64, lane: Int64, *, overlapping: bool = False) -> Nesting:
    """Return how intervals nest on their lanes. Of two equal ones, the earlier row is the outer.

    With `overlapping`, the parent is the last interval that is open when another begins, even if it ends before that one.
    """
    order, start, end, of = _outer_first(start_ns, end_ns, lane)
    until = start + 1 if overlapping else end
    first = np.flatnonzero(np.append(True, of[1:] != of[:-1])) if len(of) else np.empty(0, np.int64)
    lanes = of[first]
    jump = np.arange(len(order), dtype=np.int64) - 1
    jump[first] = NONE
    if len(first) <= _FEW_LANES:
        jump[1:][_latest(end, first)[:-1] < until[1:]] = NONE  # all before it ended too early: usual in a flat sequence
    pending = np.flatnonzero(end[:-1] < until[1:]) + 1  # the first round of the loop, for all rows
    pending = pending[jump[pending] != NONE]
    jump[pending] = jump[pending - 1]
    rounds = 0
    while len(pending):
        rounds += 1
        if rounds > _MOST_ROUNDS:
            jump = _one_by_one(end, until, of)
            break
        target = jump[pending]
        pending = pending[target != NONE]
        target = target[target != NONE]
        too_short = end[target] < until[pending]
        pending, target = pending[too_short], target[too_short]
        jump[pending] = jump[target]
    parent = np.full(len(order), NONE, np.int64)
    parent[order[jump != NONE]] = order[jump[jump != NONE]]
    return Nesting(parent, order, lanes, np.append(first, len(order)), start, end, jump)


def _latest(end: Int64, first: Int64) -> Int64:
    """Return the latest end so far on each lane."""
    latest = np.empty_like(end)
    for low, high in pairwise([*first.tolist(), len(end)]):
        np.maximum.accumulate(end[low:high], out=latest[low:high])
    return latest


def depths(parent: Int64) -> Int64:
    """Return the number of rows around each row. Each round doubles the distance."""
    depth: Int64 = (parent != NONE).astype(np.int64)
    pointer = parent.copy()
    while True:
        climbing = np.flatnonzero(pointer != NONE)
        if not len(climbing):
            return depth
        depth[climbing], pointer[climbing] = depth[climbing] + depth[pointer[climbing]], pointer[pointer[climbing]]


def depth_error(what: str) -> ParseError:
    """Return the error for intervals that nest deeper than MOST_DEPTH."""
    return ParseError(
        f"The trace cannot be analyzed: {what} are nested more than {MOST_DEPTH:,} levels deep, which no program does.",
        "Record it again, or give the original if it was converted.",
    )


def _one_by_one(end: Int64, until: Int64, lane: Int64) -> Int64:
    """Return, per interval, the nearest one before it on its lane that ends late enough, or NONE. Uses a stack."""
    found: list[int] = []
    open_: list[int] = []
    ends = end.tolist()
    last = None
    for row, (needed, of) in enumerate(zip(until.tolist(), lane.tolist(), strict=True)):
        if of != last:
            open_.clear()
            last = of
        while open_ and ends[open_[-1]] < needed:
            open_.pop()
        found.append(open_[-1] if open_ else NONE)
        open_.append(row)
    return np.array(found, np.int64)


def lanes_of(*tables: tuple[Int64, Int64]) -> list[Int64]:
    """Return one number per pair of two columns, such as process and thread; equal pairs of all tables get the same number."""
    process = numbered(np.concatenate([table[0] for table in tables]))
    thread = numbered(np.concatenate([table[1] for table in tables]))
    lane = process * (int(thread.max(initial=0)) + 1) + thread
    return list(np.split(lane, np.cumsum([len(table[0]) for table in tables])[:-1]))


def numbered(values: Int64) -> Int64:
    """Return the rank of each value among the distinct ones. Runs of equal values, usual in such columns, are sorted as one."""
    if not len(values):
        return np.zeros(0, np.int64)
    first = np.concatenate([[0], np.flatnonzero(values[1:] != values[:-1]) + 1])
    rank = np.unique(values[first], return_inverse=True)[1].reshape(-1)  # some versions of numpy keep the shape of the input
    ranks: Int64 = np.repeat(rank, np.diff(first, append=len(values)))
    return ranks


def _outer_first(start_ns: Int64, end_ns: Int64, lane: Int64) -> tuple[Int64, Int64, Int64, Int64]:
    """Return the rows sorted by lane, start and decreasing end, and the columns in that order.

    Parsers already sort each lane this way, so that is checked first.
    """
    if len(lane) and (lane == lane[0]).all():
        order, columns = np.arange(len(lane)), (start_ns, end_ns, lane)
    else:
        order = np.argsort(lane, kind="stable")
        columns = (start_ns[order], end_ns[order], lane[order])
    start, end, of = columns
    later = (start[1:] > start[:-1]) | ((start[1:] == start[:-1]) & (end[1:] <= end[:-1]))
    if (later | (of[1:] != of[:-1])).all():
        return order, *columns
    order = np.lexsort((-end_ns, start_ns, lane))
    return order, start_ns[order], end_ns[order], lane[order]


def _climb(place: Int64, moment_ns: Int64, end_ns: Int64, jump: Int64) -> Int64:
    pending = np.flatnonzero(place != NONE)
    rounds = 0
    while len(pending):
        rounds += 1
        if rounds > _MOST_ROUNDS:
            place[pending] = _lifted(place[pending], moment_ns[pending], end_ns, jump)
            break
        pending = pending[end_ns[place[pending]] <= moment_ns[pending]]
        place[pending] = jump[place[pending]]
        pending = pending[place[pending] != NONE]
    return place


def _lifted(place: Int64, moment_ns: Int64, end_ns: Int64, jump: Int64) -> Int64:
    """Return the same with jumps of 1, 2, 4 … intervals, longest first. A jump is made if all that it skips had ended."""
    nowhere = len(jump)
    to = np.append(np.where(jump == NONE, nowhere, jump), nowhere).astype(np.int32)
    latest = np.append(end_ns, np.iinfo(np.int64).max)[to]
    jumps = [(to, latest)]
    """Per length: the target of each jump, and the latest end of all intervals up to and including the target."""
    while (to != nowhere).any():
        to, latest = to[to], np.maximum(latest, latest[to])
        jumps.append((to, latest))
    ended = end_ns[place] <= moment_ns
    for to, latest in reversed(jumps):
        place = np.where(ended & (latest[place] <= moment_ns), to[place], place)
    place = np.where(ended, jumps[0][0][place], place)
    return np.where(place == nowhere, NONE, place).astype(np.int64)

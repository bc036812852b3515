"""Which stretch of a thread's time encloses another, or a moment: innermost, outermost, parents. Vectorised.

Sorted by start (the longer first), the parent of a stretch is the nearest one before it that ends late enough: no earlier than
it does, or, where stretches may overlap without one being inside the other, after it begins. Every stretch points at its
predecessor at first and jumps over those that end too soon, all at once; siblings double the jumps of each other, so a million
stretches settle in some dozens of rounds. All that is jumped over had ended, so the innermost at a moment is found the same way.
Stretches can be laid out so that each round settles one: what some dozens of rounds leave is settled one by one.
"""

from dataclasses import dataclass

import numpy as np

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.traces.events import Int64

NONE = -1
"""In a column of row numbers: there is none."""
MOST_DEPTH = 4000
"""Stretches around a stretch, four times as many as calls at which Python stops a program. Who climbs from each to all around it
stops here."""
_MOST_ROUNDS = 64


@dataclass(frozen=True)
class Nesting:
    """Stretches on lanes (one lane per thread) and how they nest."""

    parent: Int64
    """Row of the innermost stretch around each one, or NONE."""
    _order: Int64
    _lanes: Int64
    _first: Int64
    """Where each lane begins in `_order`, and where the last one ends."""
    _start_ns: Int64
    _end_ns: Int64
    _jump: Int64

    def innermost(self, moment_ns: Int64, lane: Int64) -> Int64:
        """Row of the innermost stretch open at each moment on its lane, or NONE; it is open at its start, not at its end."""
        place = np.full(len(moment_ns), NONE, np.int64)
        by_lane = np.argsort(lane, kind="stable")
        bounds = np.searchsorted(lane[by_lane], self._lanes)
        ends = np.searchsorted(lane[by_lane], self._lanes, side="right")
        for index in range(len(self._lanes)):
            asked = by_lane[bounds[index] : ends[index]]
            low, high = self._first[index], self._first[index + 1]
            before = np.searchsorted(self._start_ns[low:high], moment_ns[asked], side="right") - 1
            place[asked] = np.where(before < 0, NONE, before + low)
        return self._rows(_climb(place, moment_ns, self._end_ns, self._jump))

    def outermost(self, rows: Int64) -> Int64:
        """The stretch without a parent above each of the rows (itself, where it has none); NONE stays NONE."""
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
    """How stretches nest on their lanes; of two equal ones the earlier row is the outer.

    `overlapping`: the parent is the latest begun that is still open when a stretch begins, whether or not it encloses its end.
    """
    order, start, end, of = _outer_first(start_ns, end_ns, lane)
    until = start + 1 if overlapping else end
    first = np.flatnonzero(np.append(True, of[1:] != of[:-1])) if len(of) else np.empty(0, np.int64)
    lanes = of[first]
    jump = np.arange(len(order), dtype=np.int64) - 1
    jump[first] = NONE
    pending = np.flatnonzero(end[:-1] < until[1:]) + 1  # the first round of the loop, for all rows at once
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
        short = end[target] < until[pending]
        pending, target = pending[short], target[short]
        jump[pending] = jump[target]
    parent = np.full(len(order), NONE, np.int64)
    parent[order[jump != NONE]] = order[jump[jump != NONE]]
    return Nesting(parent, order, lanes, np.append(first, len(order)), start, end, jump)


def depths(parent: Int64) -> Int64:
    """Per row: how many rows it lies in. Each round doubles the distance looked across."""
    depth: Int64 = (parent != NONE).astype(np.int64)
    pointer = parent.copy()
    while True:
        climbing = np.flatnonzero(pointer != NONE)
        if not len(climbing):
            return depth
        depth[climbing], pointer[climbing] = depth[climbing] + depth[pointer[climbing]], pointer[pointer[climbing]]


def depth_error(what: str) -> ParseError:
    """For stretches that lie deeper in each other than MOST_DEPTH."""
    return ParseError(
        f"The trace cannot be analyzed: {what} lie in each other more than {MOST_DEPTH:,} deep, which no program does.",
        "Record it again; if it was converted, from the original.",
    )


def _one_by_one(end: Int64, until: Int64, lane: Int64) -> Int64:
    """For each stretch the nearest one before it, on its lane, that ends late enough, or NONE. Those that end sooner than a later
    one are not looked at again."""
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
    """Per table of two columns, such as process and thread: one number per pair, the same in every table."""
    process = numbered(np.concatenate([table[0] for table in tables]))
    thread = numbered(np.concatenate([table[1] for table in tables]))
    lane = process * (int(thread.max(initial=0)) + 1) + thread
    return list(np.split(lane, np.cumsum([len(table[0]) for table in tables])[:-1]))


def numbered(values: Int64) -> Int64:
    """The rank of each value among the distinct ones. Runs of one value, the rule in such columns, are sorted as one."""
    if not len(values):
        return np.zeros(0, np.int64)
    first = np.concatenate([[0], np.flatnonzero(values[1:] != values[:-1]) + 1])
    rank = np.unique(values[first], return_inverse=True)[1].reshape(-1)  # some versions of numpy keep the input's shape
    ranks: Int64 = np.repeat(rank, np.diff(first, append=len(values)))
    return ranks


def _outer_first(start_ns: Int64, end_ns: Int64, lane: Int64) -> tuple[Int64, Int64, Int64, Int64]:
    """Rows by lane, start and, of those that start together, the longest first; and the columns in that order.

    Parsers leave them so, on each lane: that is checked first.
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
    """The same by jumps of 1, 2, 4 … at once, the longest first: one is made where all that it leaves behind had ended."""
    nowhere = len(jump)
    to = np.append(np.where(jump == NONE, nowhere, jump), nowhere).astype(np.int32)
    latest = np.append(end_ns, np.iinfo(np.int64).max)[to]
    jumps = [(to, latest)]
    """Of each length: where they lead, and the latest end of all between, there included."""
    while (to != nowhere).any():
        to, latest = to[to], np.maximum(latest, latest[to])
        jumps.append((to, latest))
    ended = end_ns[place] <= moment_ns
    for to, latest in reversed(jumps):
        place = np.where(ended & (latest[place] <= moment_ns), to[place], place)
    place = np.where(ended, jumps[0][0][place], place)
    return np.where(place == nowhere, NONE, place).astype(np.int64)

"""Unions of half-open intervals of integer time, and other operations on columns.

Everything is sorted, nothing is compared pairwise: a million intervals cost a few sorts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.traces.events import Int32, Int64, Trace, different
from llm_perf_opt.traces.projection import NONE

Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Blocks:
    """The union of intervals per group: disjoint blocks, sorted by group and time; adjacent blocks are merged."""

    group: Int64
    start_ns: Int64
    end_ns: Int64
    opens: Int64
    """Row of the interval that starts the block; the tie-break decides between several."""
    closes: Int64
    """Row of the interval that ends the block; of several, the one that started first."""

    def __len__(self) -> int:
        return len(self.start_ns)


def union_blocks(start_ns: Int64, end_ns: Int64, group: Int64 | None = None, tie_break: Int64 | None = None) -> Blocks:
    """Return the union of the intervals in each group.

    An empty interval outside all others is a block of length 0, which separates the time around it. An interval that ends
    before it starts is ignored.
    """
    groups = np.zeros(len(start_ns), np.int64) if group is None else group
    rows = np.flatnonzero(end_ns >= start_ns)
    order = rows[_order(start_ns[rows], groups[rows], None if tie_break is None else tie_break[rows])]
    if not len(order):
        empty = np.empty(0, np.int64)
        return Blocks(empty, empty, empty, empty, empty)
    start, end, of = start_ns[order], end_ns[order], groups[order]
    reach, reached_by = _running_latest(end, of)
    first = np.empty(len(order), bool)
    first[0] = True
    first[1:] = (of[1:] != of[:-1]) | (start[1:] > reach[:-1])
    opening = np.flatnonzero(first)
    closing = np.append(opening[1:], len(order)) - 1
    return Blocks(of[opening], start[opening], reach[closing], order[opening], order[reached_by[closing]])


def union_ns(start_ns: Int64, end_ns: Int64) -> int:
    """Return how much time the intervals cover together."""
    blocks = union_blocks(start_ns, end_ns)
    return int((blocks.end_ns - blocks.start_ns).sum())


def covered_before(blocks: Blocks, moments: Int64) -> Int64:
    """Return how much time before each moment the blocks of one group cover; for a window, subtract two moments."""
    if not len(blocks):
        return np.zeros(len(moments), np.int64)
    whole = np.concatenate([np.zeros(1, np.int64), np.cumsum(blocks.end_ns - blocks.start_ns)])
    last = np.searchsorted(blocks.start_ns, moments, side="right") - 1
    known = np.maximum(last, 0)
    inside = np.clip(moments, blocks.start_ns[known], blocks.end_ns[known]) - blocks.start_ns[known]
    return np.where(last < 0, 0, whole[known] + inside)


def last_begun(blocks: Blocks, moments: Int64, group: Int64) -> Int64:
    """Return the last block of the moment's group that begins at or before each moment, or -1; for all groups at once."""
    groups, starts = different(blocks.group), np.sort(blocks.start_ns)

    def key(of: Int64, ns: Int64) -> Int64:
        place: Int64 = np.searchsorted(groups, of) * (len(starts) + 1) + np.searchsorted(starts, ns, side="right")
        return place

    last = np.searchsorted(key(blocks.group, blocks.start_ns), key(group, moments), side="right") - 1
    if not len(blocks):
        return last
    return np.where(blocks.group[last] == group, last, -1)  # before the first block: -1, or the last of another group


def covered_of_group(blocks: Blocks, moments: Int64, group: Int64) -> tuple[Int64, Bool]:
    """Return how much time before each moment the blocks of its group cover, and whether one of them covers the moment."""
    last = last_begun(blocks, moments, group)
    known = last >= 0
    if not known.any():
        return np.zeros(len(moments), np.int64), known
    length = blocks.end_ns - blocks.start_ns
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(length)])
    first = np.searchsorted(blocks.group, group)
    inside = np.minimum(moments - blocks.start_ns[last], length[last])
    covered = np.where(known, before[last] - before[np.minimum(first, len(blocks))] + inside, 0)
    return covered, known & (moments < blocks.end_ns[last])


def _order(start_ns: Int64, group: Int64, tie_break: Int64 | None) -> Int64:
    """Return the order by group, start and tie-break. Only the few ties are sorted a second time."""
    order = np.argsort(start_ns, kind="stable")
    if len(group) and (group != group[0]).any():
        order = order[np.argsort(group[order], kind="stable")]
    if tie_break is None or len(order) < 2:
        return order
    same = (start_ns[order[1:]] == start_ns[order[:-1]]) & (group[order[1:]] == group[order[:-1]])
    if same.any():
        tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
        rows = order[tied]
        order[tied] = rows[np.lexsort((tie_break[rows], start_ns[rows], group[rows]))]
    return order


def _running_latest(end_ns: Int64, group: Int64) -> tuple[Int64, Int64]:
    """Return, per row of a list sorted by group, the latest end so far in its group and the first row with it."""
    low = end_ns.min()
    place = np.cumsum(np.append(0, group[1:] != group[:-1]))
    height, width = end_ns - low, int(end_ns.max()) - int(low) + 1
    if int(place[-1] + 1) * width >= 2**62:  # the keys would overflow: use ranks of the ends instead
        height = np.unique(end_ns, return_inverse=True)[1].reshape(-1).astype(np.int64)
        width = len(end_ns)
    level = height + place * width  # every end of a group is above all ends of the groups before it
    reached = np.maximum.accumulate(level)
    raises = np.append(True, level[1:] > reached[:-1])
    leader = np.maximum.accumulate(np.where(raises, np.arange(len(level)), 0))
    return end_ns[leader], leader


# --- rows and groups --------------------------------------------------------------------------------------------------


def distinct(rows: Int64, size: int) -> Int64:
    """Return the distinct rows of a table of `size`, in order and without -1. Uses a mask instead of sorting or hashing."""
    seen = np.zeros(size, np.bool_)
    seen[rows[rows != NONE]] = True
    return np.flatnonzero(seen)


def renumbered(rows: Int64, kept: Int64, size: int) -> Int64:
    """Return each row's index in `kept`, or -1."""
    place = np.full(size + 1, NONE, np.int64)  # the last entry is for -1
    place[kept] = np.arange(len(kept))
    return np.asarray(place[rows])


def exact_sum(values: Int64) -> int:
    """Return the exact sum. Raise a ParseError if it exceeds 64 bits, which sums over overlapping intervals can."""
    found = int((values >> 32).sum()) * 2**32 + int((values & 0xFFFFFFFF).sum())
    if not -(2**63) <= found < 2**63:
        raise ParseError("The trace cannot be analyzed: the sum of its times exceeds 64 bits.", "Record it again.")
    return found


def group_spans(group: Int64, start_ns: Int64, end_ns: Int64, groups: int) -> tuple[Int64, Int64]:
    """Return the earliest start and the latest end of each group."""
    first = np.full(groups, np.iinfo(np.int64).max)
    last = np.full(groups, np.iinfo(np.int64).min)
    np.minimum.at(first, group, start_ns)
    np.maximum.at(last, group, end_ns)
    return first, last


def matching(trace: Trace, name: Int32, matches: Callable[[str], object]) -> Bool:
    """Return per row whether its name matches; each distinct name is tested once."""
    by_name = np.zeros(len(trace.names) + 1, np.bool_)  # the last entry is for NO_NAME
    for index in distinct(name.astype(np.int64), len(trace.names)):
        by_name[index] = bool(matches(trace.name_of(int(index))))
    return np.asarray(by_name[name])


def sums(group: Int64, values: Int64, groups: int) -> Int64:
    """Return exact integer sums per group; numpy's weighted bincount adds in floating point."""
    total = np.zeros(groups, np.int64)
    np.add.at(total, group, values)
    return total

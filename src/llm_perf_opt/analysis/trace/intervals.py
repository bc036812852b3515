"""Half-open stretches of integer time, many at once: what their union covers, and which of them opens and closes each block.

Everything is sorted, never searched pairwise: a million stretches cost a few sorts.
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
    """The union of stretches, group by group: disjoint blocks in the order of group and time; blocks that touch are one."""

    group: Int64
    start_ns: Int64
    end_ns: Int64
    opens: Int64
    """Row of the stretch that starts the block; of several, the one the tie-break puts first."""
    closes: Int64
    """Row of the stretch that ends the block; of several, the one that started first."""

    def __len__(self) -> int:
        return len(self.start_ns)


def union_blocks(start_ns: Int64, end_ns: Int64, group: Int64 | None = None, tie_break: Int64 | None = None) -> Blocks:
    """The union of stretches within each group. One without length is a block of its own where no other covers it: it covers
    nothing, but parts the time around it. One that ends before it starts is left out."""
    groups = np.zeros(len(start_ns), np.int64) if group is None else group
    rows = np.flatnonzero(end_ns >= start_ns)
    order = rows[_order(start_ns[rows], groups[rows], None if tie_break is None else tie_break[rows])]
    if not len(order):
        nothing = np.empty(0, np.int64)
        return Blocks(nothing, nothing, nothing, nothing, nothing)
    start, end, of = start_ns[order], end_ns[order], groups[order]
    reach, reached_by = _running_latest(end, of)
    first = np.empty(len(order), bool)
    first[0] = True
    first[1:] = (of[1:] != of[:-1]) | (start[1:] > reach[:-1])
    opening = np.flatnonzero(first)
    closing = np.append(opening[1:], len(order)) - 1
    return Blocks(of[opening], start[opening], reach[closing], order[opening], order[reached_by[closing]])


def union_ns(start_ns: Int64, end_ns: Int64) -> int:
    """How much time the stretches cover together."""
    blocks = union_blocks(start_ns, end_ns)
    return int((blocks.end_ns - blocks.start_ns).sum())


def covered_before(blocks: Blocks, moments: Int64) -> Int64:
    """How much of the time before each moment the blocks of one group cover; a window's share is a difference of two."""
    if not len(blocks):
        return np.zeros(len(moments), np.int64)
    whole = np.concatenate([np.zeros(1, np.int64), np.cumsum(blocks.end_ns - blocks.start_ns)])
    last = np.searchsorted(blocks.start_ns, moments, side="right") - 1
    known = np.maximum(last, 0)
    inside = np.clip(moments, blocks.start_ns[known], blocks.end_ns[known]) - blocks.start_ns[known]
    return np.where(last < 0, 0, whole[known] + inside)


def last_begun(blocks: Blocks, moments: Int64, group: Int64) -> Int64:
    """For each moment the last block of its group that begins no later, or -1. Of all groups at once, however many there are."""
    groups, starts = different(blocks.group), np.sort(blocks.start_ns)

    def key(of: Int64, ns: Int64) -> Int64:
        place: Int64 = np.searchsorted(groups, of) * (len(starts) + 1) + np.searchsorted(starts, ns, side="right")
        return place

    last = np.searchsorted(key(blocks.group, blocks.start_ns), key(group, moments), side="right") - 1
    if not len(blocks):
        return last
    return np.where(blocks.group[last] == group, last, -1)  # before the first it is -1, or the last of another group


def covered_of_group(blocks: Blocks, moments: Int64, group: Int64) -> tuple[Int64, Bool]:
    """How much of the time before each moment the blocks of its group cover, and whether one of them is open then."""
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
    """By group, then start, then the tie-break. Ties are few: only they are sorted a second time."""
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
    """Per row of a list sorted by group: the latest end so far in its group, and the first row that has it."""
    low = end_ns.min()
    place = np.cumsum(np.append(0, group[1:] != group[:-1]))
    height, width = end_ns - low, int(end_ns.max()) - int(low) + 1
    if int(place[-1] + 1) * width >= 2**62:  # too wide a clock for so many groups: ranks order the ends as well
        height = np.unique(end_ns, return_inverse=True)[1].reshape(-1).astype(np.int64)
        width = len(end_ns)
    level = height + place * width  # every end of a group lies above all ends of the groups before it
    reached = np.maximum.accumulate(level)
    raises = np.append(True, level[1:] > reached[:-1])
    leader = np.maximum.accumulate(np.where(raises, np.arange(len(level)), 0))
    return end_ns[leader], leader


# --- rows and groups --------------------------------------------------------------------------------------------------


def distinct(rows: Int64, size: int) -> Int64:
    """The different rows of a table of `size` that occur, in order; -1 is left out. Marks them off: no sort, no hashing."""
    seen = np.zeros(size, np.bool_)
    seen[rows[rows != NONE]] = True
    return np.flatnonzero(seen)


def renumbered(rows: Int64, kept: Int64, size: int) -> Int64:
    """Each row's place in `kept`, or -1."""
    place = np.full(size + 1, NONE, np.int64)  # the last entry answers -1
    place[kept] = np.arange(len(kept))
    return np.asarray(place[rows])


def exact_sum(values: Int64) -> int:
    """The exact sum; a ParseError where it is beyond 64 bits, as sums over stretches that overlap can be."""
    found = int((values >> 32).sum()) * 2**32 + int((values & 0xFFFFFFFF).sum())
    if not -(2**63) <= found < 2**63:
        raise ParseError("The trace cannot be analyzed: its times add up to more than 64 bits hold.", "Record it again.")
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

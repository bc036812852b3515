"""Intervals of one rank: which operator of a thread runs at each moment, and how much of it lies in given windows."""

from dataclasses import dataclass

import numpy as np

from llm_perf_opt.analysis.ranks.rank_trace import Intervals
from llm_perf_opt.analysis.trace.intervals import Blocks, union_blocks
from llm_perf_opt.traces.events import Columns, Int64, different
from llm_perf_opt.traces.nesting import NONE, depths, nest


@dataclass(frozen=True)
class Pieces(Columns):
    """Intervals in which one operator is the innermost, sorted by start."""

    start_ns: "Int64"
    end_ns: "Int64"
    row: "Int64"
    """Row of the operator, or -1 for none."""


def innermost_pieces(start_ns: Int64, end_ns: Int64) -> Pieces:
    """Return which interval of one thread is the innermost at each moment, from the first start to the last end."""
    rows = np.flatnonzero(end_ns > start_ns)
    if not len(rows):
        return Pieces.none()
    start, end = start_ns[rows], end_ns[rows]
    parent = nest(start, end, np.zeros(len(rows), np.int64)).parent
    depth = depths(parent)
    times = np.concatenate([end, start])
    begins = np.repeat(np.array([0, 1]), len(rows))
    state = np.concatenate([parent, np.arange(len(rows))])
    order = np.lexsort((np.concatenate([-depth, depth]), begins, times))  # of ends at one time, the inner come first
    times, state = times[order], state[order]
    last = np.append(times[1:] > times[:-1], False)  # the state after the last boundary of each moment
    starts, states = times[last], state[last]
    ends = np.append(starts[1:], times[-1])
    return Pieces(starts, ends, np.where(states == NONE, NONE, rows[states]))


def overlaps(pieces: Intervals | Pieces, windows: Intervals) -> tuple[Int64, Int64, Int64]:
    """Return piece, window and length of every overlap. Windows are disjoint and sorted."""
    first = np.searchsorted(windows.end_ns, pieces.start_ns, side="right")
    last = np.searchsorted(windows.start_ns, pieces.end_ns, side="left")
    count = np.maximum(last - first, 0)
    piece = np.repeat(np.arange(len(pieces)), count)
    window = np.arange(len(piece)) - np.repeat(np.cumsum(count) - count, count) + first[piece]
    low = np.maximum(pieces.start_ns[piece], windows.start_ns[window])
    length = np.minimum(pieces.end_ns[piece], windows.end_ns[window]) - low
    kept = length > 0
    return piece[kept], window[kept], length[kept]


def shared_ns(first: Intervals, second: Intervals) -> int:
    """Return how much time two lists of disjoint intervals share."""
    return int(overlaps(first, second)[2].sum())


def without(first: Blocks, second: Blocks) -> Intervals:
    """Return the time in the first blocks that is not in the second ones."""
    times = different(np.concatenate([first.start_ns, first.end_ns, second.start_ns, second.end_ns]))
    if len(times) < 2:
        return Intervals.none()
    inside = _covers(first, times[:-1]) & ~_covers(second, times[:-1])
    joined = union_blocks(times[:-1][inside], times[1:][inside])
    return Intervals(joined.start_ns, joined.end_ns)


def _covers(blocks: Blocks, moments: Int64) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    if not len(blocks):
        return np.zeros(len(moments), np.bool_)
    last = np.searchsorted(blocks.start_ns, moments, side="right") - 1
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = (last >= 0) & (moments < blocks.end_ns[np.maximum(last, 0)])
    return found

"""Small work on columns of row numbers, where -1 stands for none."""

import numpy as np

from llm_perf_opt.analysis.trace.projection import NONE
from llm_perf_opt.events import Int64


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


def sums(group: Int64, values: Int64, groups: int) -> Int64:
    """Exact integer sums per group; numpy's weighted bincount adds in floating point."""
    total = np.zeros(groups, np.int64)
    np.add.at(total, group, values)
    return total

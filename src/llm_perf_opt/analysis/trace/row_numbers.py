"""Small work on columns of row numbers, where -1 stands for none."""

import numpy as np

from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.traces.events import Int64
from llm_perf_opt.traces.projection import NONE


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


def sums(group: Int64, values: Int64, groups: int) -> Int64:
    """Exact integer sums per group; numpy's weighted bincount adds in floating point."""
    total = np.zeros(groups, np.int64)
    np.add.at(total, group, values)
    return total

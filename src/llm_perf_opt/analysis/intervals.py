"""Time covered by intervals that may overlap."""

import numpy as np

from llm_perf_opt.events import Int64


def union_ns(start: Int64, end: Int64) -> int:
    """Nanoseconds covered by at least one of the intervals, which are in the order of their start."""
    if not len(start):
        return 0
    reached = np.maximum.accumulate(end)
    gaps = start[1:] - reached[:-1]
    return int(reached[-1] - start[0] - gaps[gaps > 0].sum())

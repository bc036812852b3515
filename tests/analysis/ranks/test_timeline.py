"""Intervals of one rank, compared with sets of moments."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.analysis.ranks.rank_trace import Intervals
from llm_perf_opt.analysis.ranks.timeline import innermost_pieces, overlaps, shared_ns, without
from llm_perf_opt.analysis.trace.intervals import union_blocks

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))), max_size=12)


def columns(intervals: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.array(intervals, np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def moments(intervals: list[tuple[int, int]]) -> set[int]:
    return {moment for start, end in intervals for moment in range(start, end)}


@given(spans, spans)
def test_without_and_shared(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    blocks = union_blocks(*columns(first)), union_blocks(*columns(second))
    left = without(*blocks)
    assert moments(list(zip(left.start_ns.tolist(), left.end_ns.tolist(), strict=True))) == moments(first) - moments(second)
    both = [Intervals(part.start_ns, part.end_ns) for part in blocks]
    assert shared_ns(*both) == len(moments(first) & moments(second))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), min_size=1, max_size=24))
def test_the_innermost_of_nested_intervals(moves: list[tuple[bool, int]]) -> None:
    """Intervals that open and close like brackets, with time between."""
    nested: list[tuple[int, int]] = []
    open_: list[int] = []
    now = 0
    for opens, after in [*moves, *[(False, 1)] * len(moves)]:
        now += after
        if opens:
            open_.append(now)
        elif open_:
            nested.append((open_.pop(), now))
    nested.sort(key=lambda pair: (pair[0], -pair[1]))
    pieces = innermost_pieces(*columns(nested))
    found = {
        moment: row
        for start, end, row in zip(pieces.start_ns.tolist(), pieces.end_ns.tolist(), pieces.row.tolist(), strict=True)
        for moment in range(start, end)
    }
    for moment in moments(nested):
        around = [(end - start, nested[row]) for row, (start, end) in enumerate(nested) if start <= moment < end]
        assert nested[found[moment]] == min(around)[1]


def test_overlaps_with_windows() -> None:
    windows = Intervals(*columns([(0, 10), (20, 20), (20, 30)]))
    pieces = Intervals(*columns([(5, 25), (10, 20), (29, 40)]))
    piece, window, ns = overlaps(pieces, windows)
    assert list(zip(piece.tolist(), window.tolist(), ns.tolist(), strict=True)) == [(0, 0, 5), (0, 2, 5), (2, 2, 1)]

"""Nesting of intervals, compared with checking every pair."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.traces.nesting import NONE, lanes_of, nest

STRETCHES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20), st.integers(0, 1)), max_size=20)


def slow_parent(rows: list[tuple[int, int, int]], row: int) -> int:
    """Return the last and shortest interval around this one; of equal ones, the last row before this one."""
    start, length, lane = rows[row]
    around = [
        (begun, -(begun + long), other)
        for other, (begun, long, of) in enumerate(rows)
        if of == lane and other != row and (begun, -(begun + long), other) < (start, -(start + length), row)
        if begun + long >= start + length
    ]
    return max(around)[2] if around else NONE


@given(STRETCHES)
def test_parents(rows: list[tuple[int, int, int]]) -> None:
    start, length, lane = (np.array([row[place] for row in rows], np.int64) for place in range(3))
    found = nest(start, start + length, lane)
    assert found.parent.tolist() == [slow_parent(rows, row) for row in range(len(rows))]


@given(STRETCHES, st.lists(st.tuples(st.integers(-2, 65), st.integers(0, 2)), max_size=20))
def test_the_innermost_at_a_moment(rows: list[tuple[int, int, int]], asked: list[tuple[int, int]]) -> None:
    start, length, lane = (np.array([row[place] for row in rows], np.int64) for place in range(3))
    moment, on = (np.array([one[place] for one in asked], np.int64) for place in range(2))
    found = nest(start, start + length, lane).innermost(moment, on)
    for (time, of), row in zip(asked, found.tolist(), strict=True):
        is_open = [
            (begun, -(begun + long), other)
            for other, (begun, long, at) in enumerate(rows)
            if at == of and begun <= time < begun + long
        ]
        assert row == (max(is_open)[2] if is_open else NONE)


@given(STRETCHES)
def test_the_outermost_has_no_parent_and_is_reached_by_climbing(rows: list[tuple[int, int, int]]) -> None:
    start, length, lane = (np.array([row[place] for row in rows], np.int64) for place in range(3))
    found = nest(start, start + length, lane)
    every = np.append(np.arange(len(rows)), NONE)
    for row, top in zip(every.tolist(), found.outermost(every).tolist(), strict=True):
        while row != NONE and found.parent[row] != NONE:
            row = int(found.parent[row])
        assert top == row


def test_a_thousand_siblings_settle() -> None:
    start = np.arange(0, 3000, 3, dtype=np.int64)
    starts, ends = np.append(0, start), np.append(4000, start + 2)
    found = nest(starts, ends, np.zeros(len(starts), np.int64))
    assert found.parent.tolist() == [NONE, *[0] * len(start)]


def test_lanes_tell_threads_of_two_processes_apart_and_agree_across_tables() -> None:
    process, thread = np.array([1, 1, 2], np.int64), np.array([5, 6, 5], np.int64)
    first, second = lanes_of((process, thread), (process[::-1], thread[::-1]))
    assert len(set(first.tolist())) == 3
    assert first.tolist() == second[::-1].tolist()

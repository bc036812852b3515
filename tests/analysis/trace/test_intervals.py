"""Unions of intervals, compared with counting every nanosecond."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.analysis.trace.intervals import covered_before, exact_sum, union_blocks, union_ns
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.traces.events import Int64

STRETCHES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12), st.integers(0, 2)), max_size=25)
"""(start, length, group)"""


def columns(rows: Sequence[tuple[int, int, int]], shift: int = 0) -> tuple[Int64, Int64, Int64]:
    start = np.array([row[0] + shift for row in rows], np.int64)
    return start, start + np.array([row[1] for row in rows], np.int64), np.array([row[2] for row in rows], np.int64)


def nanoseconds(rows: Sequence[tuple[int, int, int]], group: int) -> set[int]:
    return {moment for start, length, of in rows if of == group for moment in range(start, start + length)}


@given(STRETCHES)
def test_blocks_cover_each_groups_nanoseconds_and_no_others(rows: list[tuple[int, int, int]]) -> None:
    blocks = union_blocks(*columns(rows))
    for group in range(3):
        mine = blocks.group == group
        covered = [
            moment for low, high in zip(blocks.start_ns[mine], blocks.end_ns[mine], strict=True) for moment in range(low, high)
        ]
        assert len(covered) == len(set(covered)), "blocks are disjoint"
        assert set(covered) == nanoseconds(rows, group)
        assert (blocks.start_ns[mine][1:] > blocks.end_ns[mine][:-1]).all(), "blocks that touch are one"


@given(STRETCHES, st.sampled_from([-(10**18), 0, 4 * 10**18]))
def test_openers_and_closers_are_rows_of_the_block_for_any_clock(rows: list[tuple[int, int, int]], shift: int) -> None:
    start, end, group = columns(rows, shift)
    blocks = union_blocks(start, end, group)
    assert (start[blocks.opens] == blocks.start_ns).all()
    assert (end[blocks.closes] == blocks.end_ns).all()
    assert (group[blocks.opens] == blocks.group).all()
    assert (group[blocks.closes] == blocks.group).all()


@given(STRETCHES.flatmap(lambda rows: st.tuples(st.just(rows), st.permutations(rows))))
def test_the_order_of_rows_changes_nothing(orders: tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]) -> None:
    rows, shuffled = orders
    first, second = union_blocks(*columns(rows)), union_blocks(*columns(shuffled))
    assert first.start_ns.tolist() == second.start_ns.tolist()
    assert first.end_ns.tolist() == second.end_ns.tolist()


@given(STRETCHES, st.lists(st.integers(-5, 80), min_size=1))
def test_what_is_covered_before_a_moment(rows: list[tuple[int, int, int]], moments: list[int]) -> None:
    rows = [(start, length, 0) for start, length, _ in rows]
    known = nanoseconds(rows, 0)
    found = covered_before(union_blocks(*columns(rows)), np.array(moments, np.int64))
    assert found.tolist() == [sum(moment < limit for moment in known) for limit in moments]


def test_a_clock_too_wide_for_combined_keys() -> None:
    start = np.array([0, 4 * 10**18, 10, 4 * 10**18], np.int64)
    blocks = union_blocks(start, start + np.array([100, 5, 4 * 10**18, 7], np.int64), np.array([0, 0, 1, 1], np.int64))
    assert list(
        zip(blocks.group.tolist(), blocks.start_ns.tolist(), (blocks.end_ns - blocks.start_ns).tolist(), strict=True)
    ) == [
        (0, 0, 100),
        (0, 4 * 10**18, 5),
        (1, 10, 4 * 10**18),
    ]


def test_empty_intervals_separate_the_time_and_cover_nothing() -> None:
    start, end = np.array([0, 5, 9, 20], np.int64), np.array([2, 5, 12, 15], np.int64)
    blocks = union_blocks(start, end)
    assert list(zip(blocks.start_ns.tolist(), blocks.end_ns.tolist(), strict=True)) == [(0, 2), (5, 5), (9, 12)]
    assert union_ns(start, end) == 5, "the one that ends before it starts is left out"


def test_of_stretches_that_start_together_the_tie_break_names_the_opener() -> None:
    start, end = np.array([4, 4, 4], np.int64), np.array([5, 9, 6], np.int64)
    assert union_blocks(start, end, tie_break=np.array([3, 2, 1], np.int64)).opens.tolist() == [2]


@pytest.mark.parametrize(
    "values", [[2**62, 2**62 - 1], [-(2**62), -(2**62)], [2**62, 2**62, -(2**62), 5], [2**32, -1, -(2**33)], []]
)
def test_a_sum_is_exact_up_to_64_bits(values: list[int]) -> None:
    assert exact_sum(np.array(values, np.int64)) == sum(values)


@pytest.mark.parametrize("values", [[2**62, 2**62], [-(2**62)] * 3, [2**62] * 4])
def test_a_sum_beyond_64_bits_is_an_error(values: list[int]) -> None:
    with pytest.raises(ParseError, match="exceeds 64 bits"):
        exact_sum(np.array(values, np.int64))

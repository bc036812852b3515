"""Clocks and waits of collectives whose truth is known, made without traces."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from llm_perf_opt.analysis.ranks.clocks import matched_on_one_clock
from llm_perf_opt.analysis.ranks.matching import GroupMatch
from llm_perf_opt.analysis.ranks.rank_trace import Occurrences, RankFile, RankGroup, RankTrace
from llm_perf_opt.analysis.ranks.ranks_analysis import analyze_ranks
from llm_perf_opt.report.ranks_document import ranks_document
from llm_perf_opt.report.terminal import render_text

PERIOD_NS = 1_000_000
OFFSET_NS = 5_000_000
Times = Sequence[tuple[int, int]]


def rank(
    number: int, times: Times, *, kind: str = "all_reduce", host: str = "", of: int = 2, groups: Sequence[str] = ("0",)
) -> RankTrace:
    """A rank with these collectives, of each group in turn."""
    start, end = np.array(times, np.int64).reshape(-1, 2).T
    count = len(times)
    table = Occurrences(
        start_ns=start,
        end_ns=end,
        kind=np.zeros(count, np.int32),
        group=(np.arange(count) % len(groups)).astype(np.int32),
        size_bytes=np.full(count, 1024),
        sequence=np.full(count, -1),
        step=np.full(count, -1, np.int32),
        stream=np.arange(count) % len(groups),
    )
    members = tuple(RankGroup(name, tuple(range(of)), of) for name in groups)
    span = int(end.max() - start.min())
    return RankTrace(number, of, host, "x", True, span, span, span, span, names=(kind,), groups=members, collectives=table)


def rounds(count: int, *, after: int = 0, ends: int = 100_000, ahead: int = 0) -> list[tuple[int, int]]:
    first = range(PERIOD_NS, (count + 1) * PERIOD_NS, PERIOD_NS)
    return [(begin + after + ahead, begin + ends + ahead) for begin in first]


def offsets(ranks: Sequence[RankTrace]) -> list[int | None]:
    return [clock.offset_ns for clock in matched_on_one_clock(ranks)[0].hosts]


def matches(ranks: Sequence[RankTrace]) -> list[GroupMatch]:
    return matched_on_one_clock(ranks)[1]


@pytest.mark.parametrize("noise_ns", [0, 5_000])
def test_equal_sequences_of_equal_collectives_are_matched_in_order(noise_ns: int) -> None:
    """With a constant period, every shift fits as well; only the order tells."""
    random = np.random.default_rng(1)
    ranks = []
    for number in range(2):
        ahead = OFFSET_NS * number
        times = [(start, end + int(random.integers(0, noise_ns + 1))) for start, end in rounds(200, ahead=ahead)]
        ranks.append(rank(number, times, host=f"n{number}"))
    assert offsets(ranks) == [0, pytest.approx(OFFSET_NS, abs=noise_ns)]
    assert matches(ranks)[0].method == "order"


def test_windows_of_periodic_collectives_that_differ_in_length_are_ambiguous() -> None:
    ranks = [rank(0, rounds(60), host="a"), rank(1, rounds(57, ahead=OFFSET_NS), host="b")]
    assert offsets(ranks) == [0, None]


def test_one_common_collective_shows_no_offset() -> None:
    ranks = [rank(0, rounds(1), host="a"), rank(1, rounds(1, ends=140_000), host="b")]
    assert offsets(ranks) == [0, None]


def test_collectives_that_do_not_synchronize_show_neither_clocks_nor_waits() -> None:
    """The root of a broadcast leaves it before the others enter."""
    root = rounds(20, ends=10_000)
    others = rounds(20, after=100_000, ends=110_000)
    apart = [rank(0, root, kind="broadcast", host="a"), rank(1, others, kind="broadcast", host="b")]
    assert offsets(apart) == [0, None]
    together = [rank(0, root, kind="broadcast", host="a"), rank(1, others, kind="broadcast", host="a")]
    found = analyze_ranks([RankFile(number, "x", trace) for number, trace in enumerate(together)], "job")
    assert len(found.collectives) == 20
    for line in found.collectives:
        assert line.start_skew_ns == 100_000
        assert (line.last_rank, line.late_ns, line.wait_ns, line.transfer_ns) == (1, None, None, None)
    assert [line.wait_ns for line in found.ranks] == [None, None]
    assert found.collective_kinds[0].bus_bytes_per_s is None


def test_a_trace_without_collectives_leaves_the_other_clocks_alone() -> None:
    empty = RankTrace(0, 3, "a", "", False, 0, 0, 0, 0, why="the trace is incomplete")
    ranks = [empty, rank(1, rounds(20), host="b", of=3), rank(2, rounds(20, ahead=OFFSET_NS), host="c", of=3)]
    clocks, found = matched_on_one_clock(ranks)
    assert clocks.offsets(3) == [None, 0, OFFSET_NS]
    assert found[0].rows.shape == (20, 3)


def test_two_machines_with_one_name_are_told_apart_by_their_clocks() -> None:
    ranks = [rank(0, rounds(20), host="localhost"), rank(1, rounds(20, ahead=30 * PERIOD_NS), host="localhost")]
    clocks, found = matched_on_one_clock(ranks)
    assert clocks.apart
    assert clocks.offsets(2) == [0, 30 * PERIOD_NS]
    assert not found[0].impossible.any()


def test_ranks_that_overlap_two_groups_are_not_called_behind() -> None:
    """Each rank is in two collectives at once, entered in a different order."""
    own: list[list[tuple[int, int]]] = [[], []]
    for begin in range(PERIOD_NS, 7 * PERIOD_NS, PERIOD_NS):
        own[0] += [(begin, begin + 100_000), (begin + 60_000, begin + 200_000)]
        own[1] += [(begin + 20_000, begin + 200_000), (begin + 50_000, begin + 100_000)]
    ranks = [rank(0, own[0], host="a", groups=("tp", "dp")), rank(1, own[1], host="a", groups=("dp", "tp"))]
    found = analyze_ranks([RankFile(number, "x", trace) for number, trace in enumerate(ranks)], "job")
    late = {(line.group, line.last_rank, line.start_skew_ns) for line in found.collectives}
    assert late == {("tp", 1, 50_000), ("dp", 0, 40_000)}
    assert {line.cause for line in found.collectives} == {""}


def test_windows_of_equal_length_that_begin_apart_are_aligned_by_their_ends() -> None:
    """Both hosts recorded 60 equal collectives, but the second began three later."""
    random = np.random.default_rng(3)
    begins = np.cumsum(PERIOD_NS + random.integers(0, 400_000, 63)).tolist()
    times = [(begin, begin + 100_000) for begin in begins]
    later = [(start + OFFSET_NS, end + OFFSET_NS) for start, end in times[3:]]
    ranks = [rank(0, times[:60], host="a"), rank(1, later, host="b")]
    assert offsets(ranks) == [0, OFFSET_NS]
    (match,) = matches(ranks)
    assert (match.rows != -1).all(axis=1).sum() == 57


def test_the_last_rank_is_unknown_if_one_of_another_host_is_as_late() -> None:
    """The clock of the second host shows an offset with a residual of 20 µs."""
    first = rounds(30)
    noisy = [(start, end + 20_000 * (1 - index % 3)) for index, (start, end) in enumerate(first)]
    late = {1: 60_000, 2: 55_000, 3: 57_000}
    ranks = [
        rank(0, first, host="a", of=4),
        rank(1, [(start + late[1], end) for start, end in first], host="a", of=4),
        rank(2, [(start + late[2], end) for start, end in noisy], host="b", of=4),
        rank(3, [(start + late[3], end) for start, end in noisy], host="b", of=4),
    ]
    found = analyze_ranks([RankFile(number, "x", trace) for number, trace in enumerate(ranks)], "job")
    assert found.hosts[1].residual_ns == 20_000
    assert {line.start_skew_ns for line in found.collectives} == {60_000}
    assert {line.last_rank for line in found.collectives} == {None}


def test_collectives_whose_group_is_not_stated_are_not_matched_if_there_are_several() -> None:
    unclear = RankGroup("", (), 0, unclear=True)
    ranks = [replace(rank(number, rounds(5), host="a"), groups=(unclear,)) for number in range(2)]
    found = analyze_ranks([RankFile(number, "x", trace) for number, trace in enumerate(ranks)], "job")
    assert not found.collectives
    assert [problem.id for problem in found.problems] == ["unclear_groups"]
    assert [(line.wait_ns, line.undivided_ns) for line in found.ranks] == [(None, line.exposed_comm_ns) for line in found.ranks]


def test_given_ranks_are_taken_to_be_all_if_no_trace_states_their_number() -> None:
    ranks = [
        replace(rank(number, rounds(5, after=10_000 * number), host="a"), world_size=0, groups=(RankGroup(""),))
        for number in range(3)
    ]
    found = analyze_ranks([RankFile(number, "x", trace) for number, trace in enumerate(ranks)], "job")
    assert {(line.start_skew_ns, line.last_rank, line.wait_ns) for line in found.collectives} == {(20_000, 2, 30_000)}
    assert [problem.id for problem in found.problems] == ["size_not_stated"]


def test_only_the_delay_since_the_previous_collective_is_new() -> None:
    """Rank 1 leaves every collective 10 µs later and enters the next as much later, but the third 40 µs later."""
    first = rounds(5)
    second = [(start + (40_000 if index == 2 else 10_000), end + 10_000) for index, (start, end) in enumerate(first)]
    ranks = [rank(0, first, host="a"), rank(1, second, host="a")]
    found = analyze_ranks([RankFile(number, "x", trace) for number, trace in enumerate(ranks)], "job")
    assert [line.late_ns for line in found.collectives] == [10_000, 10_000, 40_000, 10_000, 10_000]
    assert [line.newly_late_ns for line in found.collectives] == [10_000, 0, 30_000, 0, 0]
    assert [line.newly_late_ns for line in found.ranks] == [0, 40_000]


def test_a_trace_that_begins_later_is_behind_at_its_first_collective() -> None:
    """The profiler of rank 1 started 30 µs later; then it took 10 µs longer."""
    times = rounds(4)
    second = [(start + (40_000 if index == 0 else 0), end) for index, (start, end) in enumerate(times)]
    ranks = [
        replace(rank(0, times, host="a"), first_ns=PERIOD_NS - 500_000),
        replace(rank(1, second, host="a"), first_ns=PERIOD_NS - 470_000),
    ]
    found = analyze_ranks([RankFile(number, "x", trace) for number, trace in enumerate(ranks)], "job")
    assert (found.collectives[0].late_ns, found.collectives[0].newly_late_ns) == (40_000, 10_000)
    assert found.collectives[0].cause == "(already behind)"


def test_collectives_of_two_groups_that_overlap_count_a_delay_once() -> None:
    """Rank 1 enters the first 50 µs late, and the second, which it enters before it leaves the first, 80 µs late.

    The first ends last: without the delays it, and the job, would end 50 µs earlier.
    """
    own = [[(100_000, 300_000), (120_000, 250_000)], [(150_000, 300_000), (200_000, 250_000)]]
    ranks = [replace(rank(number, own[number], host="a", groups=("tp", "dp")), first_ns=0) for number in range(2)]
    found = analyze_ranks([RankFile(number, "x", trace) for number, trace in enumerate(ranks)], "job")
    assert [(line.late_ns, line.newly_late_ns) for line in found.collectives] == [(50_000, 50_000), (80_000, 0)]
    assert [line.newly_late_ns for line in found.ranks] == [0, 50_000]


def test_the_transfer_is_known_where_it_is_well_above_the_residual() -> None:
    """The ranks of two hosts enter together. The residual is 10 µs; one collective takes 2 ms, the others 50 µs."""
    times = [(3 * start, 3 * start + (2_000_000 if index == 4 else 50_000)) for index, (start, _) in enumerate(rounds(30))]
    noisy = [(start, end + 10_000 * (1 - index % 3)) for index, (start, end) in enumerate(times)]
    ranks = [rank(0, times, host="a"), rank(1, noisy, host="b")]
    found = analyze_ranks([RankFile(number, "x", trace) for number, trace in enumerate(ranks)], "job")
    assert found.hosts[1].residual_ns == 10_000
    assert {(line.start_skew_ns, line.last_rank, line.wait_ns) for line in found.collectives} == {(None, None, None)}
    assert [line.index for line in found.collectives if line.transfer_ns is not None] == [4]
    assert found.collectives[4].transfer_ns == pytest.approx(2_000_000, abs=10_000)
    (kind,) = found.collective_kinds
    assert (kind.transfers, kind.waits) == (1, 0)
    assert kind.bus_bytes_per_s == pytest.approx(1024 / 2e-3, rel=0.01)


def test_ranks_that_enter_closer_together_than_clocks_tell_are_level() -> None:
    ranks = [rank(number, rounds(5, after=4_000 * number), host="a") for number in range(2)]
    found = analyze_ranks([RankFile(number, "x", trace) for number, trace in enumerate(ranks)], "job")
    assert {(line.start_skew_ns, line.last_rank, line.wait_ns) for line in found.collectives} == {(4_000, None, 4_000)}
    assert [(line.last, line.newly_late_ns) for line in found.ranks] == [(0, 0), (0, 0)]


@pytest.mark.parametrize(
    ("host", "ahead", "size", "peak", "share"),
    [
        ("a", 0, 1 << 20, True, True),
        ("a", 0, 1 << 30, True, False),
        ("", 0, 1 << 20, False, False),
        ("a", 30 * PERIOD_NS, 1 << 20, False, False),
    ],
)
def test_the_peak_of_the_link_needs_one_known_host(host: str, ahead: int, size: int, peak: bool, share: bool) -> None:
    """Above the peak, the share is n/a; with clocks apart, ranks with one host name may be on several."""
    ranks = []
    for number in range(2):
        trace = rank(number, rounds(20, after=10_000 * number, ahead=ahead * number), host=host)
        table = replace(trace.collectives, size_bytes=np.full(20, size))
        ranks.append(replace(trace, device="NVIDIA H100 80GB HBM3", collectives=table))
    found = analyze_ranks([RankFile(number, "x", trace) for number, trace in enumerate(ranks)], "job")
    (kind,) = found.collective_kinds
    assert (kind.link_bytes_per_s is not None) == peak
    assert kind.bus_bytes_per_s is not None
    table_shown = next(table for table in ranks_document(found).tables if table.id == "collective-kinds")
    assert table_shown.rows[0][8].text.startswith("n/a") != share


def test_the_page_of_many_kinds_fits_and_counts_the_collectives_of_the_rank() -> None:
    """Rank 1 is last in all collectives of its group; the other group has as many."""
    ranks = []
    for number in range(4):
        trace = rank(number, rounds(10, after=50_000 if number == 1 else 0), host="a", of=4)
        group = RankGroup(str(number // 2), (number - number % 2, number - number % 2 + 1), 2)
        ranks.append(replace(trace, device="NVIDIA H100 80GB HBM3", groups=(group,), first_ns=0))
    found = analyze_ranks([RankFile(number, "x", trace) for number, trace in enumerate(ranks)], "job")
    text = render_text(ranks_document(found))
    assert max(map(len, text.splitlines())) <= 110
    assert "last to enter 10 of its 10 collectives" in text

"""The delay that is charged is what the job would save without it: simulated jobs are run with and without their delays."""

import random
from dataclasses import replace

import numpy as np
import pytest

from llm_perf_opt.analysis.ranks.excess import _of_one_kind
from llm_perf_opt.analysis.ranks.rank_trace import RankFile
from llm_perf_opt.analysis.ranks.ranks_analysis import analyze_ranks
from rank_jobs import LAYOUTS, Job, job, plans, rank_files, simulate

NAMED = 0.01
"""The least share of its time by which a rank must be behind to be named."""
JOBS = 25


def charged(made: Job, *, launches: bool = True) -> dict[int, int]:
    found = analyze_ranks(rank_files(made.made, launches=launches), "job")
    return {line.rank: line.newly_late_ns or 0 for line in found.ranks}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_delay_is_what_removing_it_saves(name: str) -> None:
    """Of 25 jobs, at most one delay is off by more than 10 % (and 1 % of the span), and no rank without a delay is named."""
    off = []
    for seed in range(JOBS):
        made = job(name, seed)
        for rank, ns in charged(made).items():
            truth = made.truth_ns.get(rank, 0)
            if rank not in made.truth_ns:
                assert ns < NAMED * made.span_ns, (seed, rank)
            elif abs(ns - truth) > max(0.1 * truth, 0.01 * made.span_ns):
                off.append((seed, rank, truth, ns))
    assert len(off) <= 1, off
    assert all(0.75 * truth < ns < 1.25 * truth for _, _, truth, ns in off)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_job_without_delays_names_no_rank(name: str) -> None:
    made = job(name, 1)
    made.span_ns = simulate(made.made)
    assert max(charged(made).values()) < NAMED * made.span_ns


@pytest.mark.parametrize("name", ["tp", "dp", "ep", "tp×dp"])
def test_the_delay_is_known_without_launches(name: str) -> None:
    """The order of the work is then that of its times."""
    for seed in range(5):
        made = job(name, seed)
        for rank, ns in charged(made, launches=False).items():
            truth = made.truth_ns.get(rank, 0)
            assert abs(ns - truth) <= max(0.1 * truth, NAMED * made.span_ns), (seed, rank)


def test_the_parts_of_a_delay_are_where_it_arose() -> None:
    """Tensor parallelism: each part is at a collective that the late rank was the last to enter, and they add up."""
    made = job("tp", 3)
    ((rank, truth),) = made.truth_ns.items()
    found = analyze_ranks(rank_files(made.made), "job")
    parts = [line.newly_late_ns or 0 for line in found.collectives if line.last_rank == rank]
    assert sum(parts) == pytest.approx(truth, rel=0.02)
    assert sum(part > 0.5 * made.delays[0].ns for part in parts) == len(made.delays)
    assert sum(step.straggler == rank and (step.newly_late_ns or 0) > 0 for step in found.steps) == len(made.delays)


@pytest.mark.parametrize("scale_ns", [100_000, 3_000_000, 3_600_000_000_000])
@pytest.mark.parametrize("name", LAYOUTS)
def test_clocks_without_hosts_are_estimated(name: str, scale_ns: int) -> None:
    """Clocks are apart by up to an hour; nothing is missing, and the delay is that of one clock."""
    made = job(name, 3)
    draw = random.Random(scale_ns)
    ahead = [0, *(draw.randrange(-scale_ns, scale_ns) for _ in made.made[1:])]
    found = analyze_ranks(rank_files(made.made, ahead), "job")
    assert [line.offset_ns for line in found.ranks] == ahead
    assert {problem.id for problem in found.problems} <= {"unknown_hosts", "point_to_point"}
    assert not any(line.missing for line in found.collectives)
    assert [line.newly_late_ns or 0 for line in found.ranks] == list(charged(made).values())


def without_transfers(file: RankFile) -> RankFile:
    """The rank without its sends and receives."""
    trace = file.trace
    kept = [place for place, name in enumerate(trace.names) if name not in ("send", "recv")]
    rows = np.flatnonzero(np.isin(trace.collectives.kind, kept))
    return replace(file, trace=replace(trace, collectives=trace.collectives.rows(rows), ordered_from=None))


def test_clocks_that_nothing_shows_are_told_and_nothing_is_called_missing() -> None:
    """A pipeline of groups of two; without the transfers between stages, nothing connects their clocks."""
    made = job("tp×pp", 3)
    files = rank_files(made.made, [at * 7_000_000_000 for at in range(8)])
    found = analyze_ranks([without_transfers(file) for file in files], "job")
    assert not any(line.missing for line in found.collectives)
    assert {problem.id for problem in found.problems} == {"unknown_hosts", "no_common_collective"}
    assert sum(line.offset_ns is not None for line in found.ranks) == 2


def test_collectives_that_are_missing_are_still_told_if_clocks_differ() -> None:
    made = job("tp×dp", 3)
    files = rank_files(made.made, [at * 7_000_000 for at in range(8)])
    trace = files[5].trace
    kept = np.delete(np.arange(len(trace.collectives)), 9)
    files[5] = replace(files[5], trace=replace(trace, collectives=trace.collectives.rows(kept), ordered_from=None))
    found = analyze_ranks(files, "job")
    assert [line.missing for line in found.collectives if line.missing] == [[5]]
    assert "missing_collectives" in {problem.id for problem in found.problems}


def test_only_what_is_beyond_the_scatter_is_excess() -> None:
    random_ = np.random.default_rng(1)
    values = (1_000_000 + 20_000 * random_.standard_normal((40, 4))).astype(np.int64)
    assert not _of_one_kind(values).any()
    values[7, 2] += 500_000
    found = _of_one_kind(values)
    assert found[7, 2] == pytest.approx(500_000, abs=80_000)
    assert (found > 0).sum() == 1
    values[:, 1] += 60_000
    assert _of_one_kind(values)[:, 1] == pytest.approx(60_000, abs=25_000)


def test_the_simulation_repeats() -> None:
    made = job("fsdp", 2)
    again = plans(made.layout)
    assert simulate(again, made.delays) == made.span_ns

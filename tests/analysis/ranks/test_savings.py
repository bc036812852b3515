"""The delay that is charged is what the job would save without it: simulated jobs are run with and without their delays."""

import random
from dataclasses import replace

import numpy as np
import pytest

from llm_perf_opt.analysis.ranks.excess import _beyond_scatter
from llm_perf_opt.analysis.ranks.rank_trace import RankFile
from llm_perf_opt.analysis.ranks.ranks_analysis import analyze_ranks
from llm_perf_opt.report.ranks_document import ranks_document
from llm_perf_opt.report.terminal import render_text
from rank_jobs import BASE_NS, LAYOUTS, Delay, Job, Layout, job, plans, rank_files, simulate, with_delays

NAMED = 0.01
"""The least share of its time by which a rank must be behind to be named."""
SLACK = 0.003
"""The share of its time by which a delay may be wrong whatever its size."""
FEW, MANY = range(3000, 3006), range(3000, 3100)
"""Seeds. The analysis was made with others."""


def charged(made: Job, *, launches: bool = True) -> dict[int, int]:
    found = analyze_ranks(rank_files(made.made, launches=launches), "job")
    return {line.rank: line.newly_late_ns or 0 for line in found.ranks}


def wrong(made: Job) -> list[tuple[int, int, int]]:
    """Ranks whose delay is not what removing it (and no other) saves, with what is charged; no rank without a delay is named."""
    found = []
    for rank, ns in charged(made).items():
        truth = made.truth_ns.get(rank, 0)
        if rank not in made.truth_ns:
            assert ns < NAMED * made.span_ns, (made.layout.seed, rank)
        elif abs(ns - truth) > max(0.1 * truth, SLACK * made.span_ns):
            found.append((rank, truth, ns))
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_delay_is_what_removing_it_saves(name: str) -> None:
    assert {seed: off for seed in FEW if (off := wrong(job(name, seed)))} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_few_delays_of_many_jobs_are_wrong(name: str) -> None:
    off = {seed: off for seed in MANY if (off := wrong(job(name, seed)))}
    assert len(off) <= 0.02 * len(MANY), off


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("tp×dp", 1002),  # work needs collectives of two groups; only one of them is earlier without the delay
        ("tp×pp", 1024),  # two ranks; half of the repetitions are late
        ("tp×pp", 1046),  # what a transfer needs is hidden, because its stream is later
        ("tp×pp", 1025),  # a receive waits for its stream; work has ended before it by chance
        ("dp", 1024),  # two of four ranks are late in the same work
        ("tp", 2007),  # the work at the end is done once
        ("pp", 2043),  # a late host; no other rank has its program
    ],
)
def test_causes_of_wrong_delays(name: str, seed: int) -> None:
    assert not wrong(job(name, seed))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_job_without_delays_names_no_rank(name: str) -> None:
    made = job(name, 1)
    made.span_ns = simulate(made.made)
    assert not any(line.late_start_ns for line in analyze_ranks(rank_files(made.made), "job").ranks)
    assert max(charged(made).values()) < NAMED * made.span_ns


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_a_late_start_costs_is_told_next_to_the_delay(name: str) -> None:
    """A host that is late before its first kernel: where no earlier collective shows it, its recording begins later."""
    made = with_delays(Layout(name, LAYOUTS[name][1], steps=4, layers=3, seed=7), [Delay(1, 0, 1_000_000, on_host=True)])
    found = analyze_ranks(rank_files(made.made), "job")
    for line in found.ranks:
        told = (line.newly_late_ns or 0) + line.late_start_ns
        assert told == pytest.approx(made.truth_ns.get(line.rank, 0), rel=0.1, abs=SLACK * made.span_ns)
    begun = [file.trace.first_ns or 0 for file in rank_files(made.made)]
    assert (found.ranks[1].late_start_ns > 0) == (begun[1] - begun[0] > 500_000)
    assert ("≥" in render_text(ranks_document(found))) == any(line.late_start_ns or line.delay_why for line in found.ranks)


@pytest.mark.parametrize(("name", "alone"), [("pp", [0, 3]), ("tp×pp", []), ("tp", []), ("dp", [])])
def test_a_stage_that_only_its_own_steps_show_has_at_least_its_delay(name: str, alone: list[int]) -> None:
    """A first or last stage that is slow in every step; of too few steps, nothing can be told."""
    for steps in (5, 3):
        layout = Layout(name, LAYOUTS[name][1], steps=steps, layers=3, seed=7)
        per_step = sum(call.kind == "kernel" for call in plans(layout)[0].calls) // steps
        made = with_delays(layout, [Delay(0, step * per_step + 1, 1_000_000, on_host=False) for step in range(steps)])
        found = analyze_ranks(rank_files(made.made), "job")
        assert [line.rank for line in found.ranks if line.delay_why] == alone
        assert [line.rank for line in found.ranks if line.newly_late_ns is None] == (alone if steps < 4 else [])
        if not alone:
            assert charged(made)[0] == pytest.approx(made.truth_ns[0], rel=0.1)
        assert ("≥" in render_text(ranks_document(found))) == bool(alone and steps > 4)


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


STRETCHED = 50


def drifting(file: RankFile, ppm: float, ahead: int, host: str) -> RankFile:
    """A rank of a job that takes 50 times as long, with a clock that runs faster by `ppm`."""
    trace = file.trace

    def on_clock(times: np.ndarray) -> np.ndarray:
        return np.rint((times - BASE_NS) * STRETCHED * (1 + ppm * 1e-6)).astype(np.int64) + BASE_NS + ahead

    met, done = trace.collectives, trace.work
    collectives = replace(met, start_ns=on_clock(met.start_ns), end_ns=on_clock(met.end_ns))
    work = replace(done, start_ns=on_clock(done.start_ns), end_ns=on_clock(done.end_ns))
    first = int(on_clock(np.array([trace.first_ns]))[0])
    return replace(file, trace=replace(trace, host=host, first_ns=first, collectives=collectives, work=work))


@pytest.mark.parametrize(("name", "named"), [(name, place % 2 == 0) for place, name in enumerate(LAYOUTS)])
def test_clocks_that_drift_are_put_on_one_speed(name: str, named: bool) -> None:
    """Up to 60 ppm; nothing is missing, and the delays are those of one clock."""
    made, draw = job(name, 3002), random.Random(name)
    ppm = [0.0, *(draw.choice([-1, 1]) * draw.uniform(20, 60) for _ in made.made[1:])]
    ahead = [0, *(draw.randrange(-(10**9), 10**9) for _ in made.made[1:])]
    files = [
        drifting(file, faster, by, f"node{file.rank}" if named else "")
        for file, faster, by in zip(rank_files(made.made), ppm, ahead, strict=True)
    ]
    found = analyze_ranks(files, "job")
    assert not any(line.missing for line in found.collectives)
    assert "clocks_drift" in {problem.id for problem in found.problems}
    shown = {rank: host.drift_ppm for host in found.hosts for rank in host.ranks}
    first = next(rank for rank in shown if not shown[rank])
    told = {rank: drift for rank, drift in shown.items() if drift}
    assert told == {rank: pytest.approx(ppm[rank] - ppm[first], abs=8) for rank in told}  # small drifts do not stand out
    for line in found.ranks:
        truth = STRETCHED * made.truth_ns.get(line.rank, 0)
        assert abs((line.newly_late_ns or 0) - truth) <= max(0.1 * truth, SLACK * STRETCHED * made.span_ns), line.rank


def test_only_what_is_beyond_the_scatter_is_excess() -> None:
    random_ = np.random.default_rng(1)
    values, alike = (1_000_000 + 20_000 * random_.standard_normal((40, 4))).astype(np.int64), np.zeros(40, np.int64)
    assert not _beyond_scatter(values, alike).any()
    values[7, 2] += 500_000
    found = _beyond_scatter(values, alike)
    assert found[7, 2] == pytest.approx(500_000, abs=80_000)
    assert (found > 0).sum() == 1
    values[:, 1] += 60_000
    assert _beyond_scatter(values, alike)[:, 1] == pytest.approx(60_000, abs=25_000)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_rank_that_is_late_in_half_of_the_repetitions_is_charged_in_these(ranks: int) -> None:
    random_ = np.random.default_rng(2)
    values = (1_000_000 + 5_000 * random_.standard_normal((8, ranks))).astype(np.int64)
    values[::2, 1] += 400_000
    found = _beyond_scatter(values, np.zeros(8, np.int64))
    assert found[::2, 1] == pytest.approx(400_000, abs=20_000)
    assert found.sum() == pytest.approx(4 * 400_000, rel=0.02)


def test_the_simulation_repeats() -> None:
    made = job("fsdp", 2)
    again = plans(made.layout)
    assert simulate(again, made.delays) == made.span_ns

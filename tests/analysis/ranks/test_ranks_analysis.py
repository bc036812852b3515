"""Several ranks: exact where the truth is known, and the figures of recorded jobs."""

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.analysis.ranks.document import CollectiveLine, RanksAnalysis
from llm_perf_opt.analysis.ranks.rank_trace import RankFile
from llm_perf_opt.analysis.ranks.ranks_analysis import analyze_ranks
from llm_perf_opt.analysis.trace.document import ProblemLine
from llm_perf_opt.report.ranks_document import ranks_document
from llm_perf_opt.workflows.analyze_ranks import analyze_rank_files
from llm_perf_opt.workflows.rank_reader import read_rank
from rank_traces import Job, Truth, microseconds, write_job

FIXTURES = Path(__file__).parents[2] / "fixtures" / "ranks"


def analyzed(files: list[Path]) -> RanksAnalysis:
    return analyze_rank_files(files, "job", use_cache=False).document


def recorded(pattern: str) -> RanksAnalysis:
    return analyzed(sorted(FIXTURES.glob(pattern)))


def skew(row: dict[str, dict[int, int]]) -> int:
    return max(row["start"].values()) - min(row["start"].values())


def last(row: dict[str, dict[int, int]]) -> int | None:
    (before, _), (latest, who) = sorted((start, rank) for rank, start in row["start"].items())[-2:]
    return who if latest - before >= 5_000 else None


def assert_true(found: RanksAnalysis, truth: Truth) -> None:
    """Every figure of every rank and collective is the true one."""
    assert [line.busy_ns for line in found.ranks] == truth.busy_ns
    assert [line.idle_ns for line in found.ranks] == truth.idle_ns
    assert [line.exposed_comm_ns for line in found.ranks] == truth.exposed_ns
    assert [line.offset_ns for line in found.ranks] == truth.offset_ns
    assert [line.index for line in found.collectives] == list(range(len(truth.collectives)))
    for line, row in zip(found.collectives, truth.collectives, strict=True):
        assert_one(line, row)
    for rank in found.ranks:
        parts = (rank.compute_ns, rank.wait_ns, rank.transfer_ns, rank.undivided_ns, rank.idle_ns)
        assert sum(part or 0 for part in parts) == rank.span_ns


def assert_one(line: CollectiveLine, row: dict[str, Any]) -> None:
    """Waiting and transfer are known only if every rank has the collective."""
    assert (line.kind, line.ranks, line.missing) == (row["kind"], row["ranks"], row["missing"])
    assert line.bytes == row["bytes"]
    if row["missing"]:
        assert (line.transfer_ns, line.start_skew_ns, line.last_rank, line.wait_ns) == (None, None, None, None)
        assert line.why
        return
    latest = max(row["start"].values())
    assert (line.start_skew_ns, line.last_rank) == (skew(row), last(row))
    assert line.transfer_ns == row["end"] - latest
    assert line.wait_ns == sum(latest - start for start in row["start"].values())


@pytest.mark.parametrize(
    "job",
    [
        Job(ranks=2, collectives=12, seed=1),
        Job(ranks=3, collectives=12, hosts=2, seed=2),
        Job(ranks=2, collectives=12, on_device=False, seed=3),
        Job(ranks=4, collectives=8, group=2, seed=4),
        Job(ranks=2, collectives=8, gloo=True, seed=5),
    ],
)
def test_a_job_with_known_truth_is_exact(tmp_path: Path, job: Job) -> None:
    truth = write_job(tmp_path, job)
    found = analyzed(truth.files)
    assert_true(found, truth)
    assert found.problems == []


@pytest.mark.slow
@given(
    ranks=st.sampled_from([2, 3, 4, 8]),
    collectives=st.integers(3, 40),
    hosts=st.sampled_from([1, 2]),
    on_device=st.booleans(),
    paired=st.booleans(),
    lacking=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 39)), max_size=6),
    seed=st.integers(0, 10_000),
)
def test_jobs_with_known_truth_are_exact(
    tmp_path_factory: pytest.TempPathFactory,
    ranks: int,
    collectives: int,
    hosts: int,
    on_device: bool,
    paired: bool,
    lacking: list[tuple[int, int]],
    seed: int,
) -> None:
    """On one host, collectives may also be missing in traces."""
    group = 2 if paired and ranks % 2 == 0 and on_device and hosts == 1 else 0
    drop: dict[int, list[int]] = {}
    for rank, number in lacking if hosts == 1 and collectives > 8 else []:
        drop.setdefault(rank % ranks, []).append(number % collectives)
    truth = write_job(tmp_path_factory.mktemp("job"), Job(ranks, collectives, seed, hosts, on_device, group=group, drop=drop))
    found = analyzed(truth.files)
    assert_true(found, truth)
    assert {problem.id for problem in found.problems} <= {"missing_collectives"}


@pytest.mark.parametrize(("hosts", "numbered"), [(1, False), (2, False), (2, True)])
def test_missing_collectives_are_named_and_the_others_exact(tmp_path: Path, hosts: int, numbered: bool) -> None:
    drop = {1: [0, 1, 17], 3: [29], 2: [8]}
    truth = write_job(tmp_path, Job(drop=drop, hosts=hosts, numbered=numbered, seed=3))
    found = analyzed(truth.files)
    assert_true(found, truth)
    assert [problem.id for problem in found.problems] == ["missing_collectives"]
    assert sum(len(line.missing) for line in found.collectives) == 5


@pytest.mark.parametrize(
    ("job", "missing"),
    [
        (Job(ranks=4, collectives=11, seed=0, group=2, drop={0: [9], 1: [10]}), [[0], [1]]),
        (Job(ranks=2, collectives=24, seed=417_322, drop={0: [8], 1: [9]}), [[0], [1]]),
        (Job(ranks=2, collectives=12, seed=639_061, on_device=False, drop={0: [6], 1: [7]}), [[0], [1]]),
        (Job(ranks=3, collectives=15, seed=918_079, drop={0: [0, 1], 1: [1, 2], 2: [0, 2]}), [[0, 2], [0, 1], [1, 2]]),
    ],
)
def test_different_collectives_of_one_kind_may_be_missing_on_different_ranks(
    tmp_path: Path, job: Job, missing: list[list[int]]
) -> None:
    """Their sequences are equal. The times show that the k-th collectives do not all belong together."""
    truth = write_job(tmp_path, job)
    assert [row["missing"] for row in truth.collectives if row["missing"]] == missing
    found = analyzed(truth.files)
    assert_true(found, truth)
    assert [problem.id for problem in found.problems] == ["missing_collectives"]


def moved(file: Path, start_ns: int, to_ns: int, length_ns: int | None = None) -> None:
    """Move the event that begins at a time; `length_ns` replaces its length."""
    before, length = f'"ts": {microseconds(start_ns)}, "dur": ', microseconds(length_ns) if length_ns else r"\1"
    text, count = re.subn(re.escape(before) + r"([\d.]+)", rf'"ts": {microseconds(to_ns)}, "dur": {length}', file.read_text())
    assert count == 1
    file.write_text(text)


@pytest.mark.parametrize("numbered", [False, True])
def test_one_time_that_does_not_fit_is_told_and_splits_nothing(tmp_path: Path, numbered: bool) -> None:
    """A collective of one rank is displaced by little more than its length, far from those before and after it."""
    truth = write_job(tmp_path, Job(ranks=2, collectives=20, operators=30, numbered=numbered, seed=2))
    row = truth.collectives[9]
    moved(truth.files[1], row["start"][1], row["end"] + 8_000)
    found = analyzed(truth.files)
    assert [problem.id for problem in found.problems] == ["impossible_order"]
    assert [line.missing for line in found.collectives] == [[]] * 20


def test_missing_collectives_are_matched_although_one_time_elsewhere_does_not_fit(tmp_path: Path) -> None:
    truth = write_job(tmp_path, Job(ranks=2, collectives=40, operators=30, seed=1, drop={0: [8], 1: [9]}))
    assert [row["missing"] for row in truth.collectives if row["missing"]] == [[0], [1]]
    row = truth.collectives[25]
    moved(truth.files[1], row["start"][1], row["end"] + 8_000)
    found = analyzed(truth.files)
    assert [problem.id for problem in found.problems] == ["missing_collectives", "impossible_order"]
    assert [line.missing for line in found.collectives] == [row["missing"] for row in truth.collectives]


def test_a_start_within_the_error_of_the_clocks_splits_nothing_next_to_missing_collectives(tmp_path: Path) -> None:
    job = Job(ranks=3, collectives=15, seed=918_079, drop={0: [0, 1], 1: [1, 2], 2: [0, 2]})
    truth = write_job(tmp_path, job)
    row = truth.collectives[3]
    moved(truth.files[1], row["start"][1], row["end"] + 3_000, length_ns=100)
    found = analyzed(truth.files)
    assert [problem.id for problem in found.problems] == ["missing_collectives"]
    assert [line.missing for line in found.collectives] == [row["missing"] for row in truth.collectives]


def test_collectives_that_follow_each_other_closely_are_not_matched_if_each_is_missing_on_one_rank(tmp_path: Path) -> None:
    """They differ in kind or size, and the second begins within the error of the clocks after the first."""
    job = Job(ranks=2, collectives=20, operators=30, seed=417_322, on_device=False, drop={0: [8], 1: [9]})
    truth = write_job(tmp_path, job)
    first, second = truth.collectives[8:10]
    assert (first["kind"], first["bytes"]) != (second["kind"], second["bytes"])
    moved(truth.files[0], second["start"][0], first["end"] + 2_000)
    found = analyzed(truth.files)
    assert [problem.id for problem in found.problems] == ["missing_collectives"]
    assert [line.missing for line in found.collectives] == [row["missing"] for row in truth.collectives]


def test_windows_of_hosts_that_begin_apart_are_aligned(tmp_path: Path) -> None:
    """Same kind and size throughout is impossible to align by names; the ends tell."""
    truth = write_job(tmp_path, Job(ranks=4, hosts=2, drop={2: [0, 1, 2], 3: [0, 1, 2]}, collectives=60, seed=5))
    found = analyzed(truth.files)
    assert [line.offset_ns for line in found.ranks] == truth.offset_ns
    assert [line.missing for line in found.collectives[:4]] == [[2, 3], [2, 3], [2, 3], []]
    assert_true(found, truth)


def test_ranks_that_disagree_on_the_size_are_named(tmp_path: Path) -> None:
    truth = write_job(tmp_path, Job(double={2: [11]}, seed=1))
    found = analyzed(truth.files)
    assert [line.index for line in found.collectives if line.mismatched] == [11]
    assert found.collectives[11].ranks == [0, 1, 2, 3]
    assert [problem.id for problem in found.problems] == ["mismatched_collectives"]
    assert [line.index for line in found.collectives if line.why] == [11]
    assert (found.collectives[11].transfer_ns, found.collectives[11].start_skew_ns) == (None, None)


def test_skew_below_the_residual_of_the_clocks_is_not_known(tmp_path: Path) -> None:
    truth = write_job(tmp_path, Job(ranks=2, hosts=2, collectives=200, end_noise_ns=8_000, seed=2))
    found = analyzed(truth.files)
    (_, second) = found.hosts
    assert second.pairs == 200
    assert second.residual_ns is not None
    assert 4_000 < second.residual_ns < 8_000
    assert second.offset_ns == pytest.approx(truth.offset_ns[1], abs=1_500)
    unknown = [line for line in found.collectives if line.start_skew_ns is None]
    assert 0 < len(unknown) < 200
    assert all(line.last_rank is None for line in unknown)
    true = {index: skew(row) for index, row in enumerate(truth.collectives)}
    assert all(true[line.index] < second.residual_ns + 1_500 for line in unknown)
    assert all(line.wait_ns is None for line in unknown)
    known = [line for line in found.collectives if line.start_skew_ns is not None]
    assert all(line.start_skew_ns == pytest.approx(true[line.index], abs=1_500) for line in known)


@pytest.mark.parametrize("on_device", [True, False])
def test_the_rank_and_the_operator_that_are_late_are_named(tmp_path: Path, on_device: bool) -> None:
    truth = write_job(tmp_path, Job(ranks=4, on_device=on_device, late={2: 500_000}, collectives=30))
    found = analyzed(truth.files)
    worst = max(found.ranks, key=lambda line: line.late_ns or 0)
    assert worst.rank == 2
    assert worst.late_ns == pytest.approx(10 * 500_000, rel=0.1)
    cause = found.causes[0]
    assert (cause.rank, cause.cause) == (2, "aten::mm")
    assert cause.collectives >= 10
    assert cause.cause_ns <= cause.late_ns
    assert cause.cause_ns == pytest.approx(10 * 500_000, rel=0.1)
    late = [step for step in found.steps if step.straggler == 2]
    assert len(late) == 6
    assert {step.cause for step in late} == {"aten::mm"}


@pytest.mark.parametrize("late_ns", [20_000, 60_000, 500_000])
@pytest.mark.parametrize("ranks", [2, 3])
def test_delays_of_a_job_whose_collectives_overlap_computation(tmp_path: Path, ranks: int, late_ns: int) -> None:
    """Nothing levels the ranks: rank 1 loses time in four operators and is late in all collectives after them."""
    truth = write_job(tmp_path, Job(ranks=ranks, collectives=12, blocking=False, late={1: late_ns}, seed=1))
    found = analyzed(truth.files)
    assert found.problems == []
    delays = [line.newly_late_ns or 0 for line in found.ranks]
    assert delays[1] == pytest.approx(4 * late_ns, rel=0.02)
    assert sum(delays) == delays[1]
    assert (found.ranks[1].late_ns or 0) > delays[1]
    made = {(line.cause, line.collectives) for line in found.causes if line.cause != "(already behind)"}
    assert made == {("aten::mm", 4)}


def test_work_that_was_launched_before_the_recording_is_not_compared_by_launch(tmp_path: Path) -> None:
    """The first kernels of rank 0 have no launches: delays are unknown in their rounds, and the same in the others."""
    truth = write_job(tmp_path, Job(ranks=2, collectives=12, blocking=False, late={1: 60_000}, seed=1))
    whole = analyzed(truth.files)
    trace = json.loads(truth.files[0].read_text())
    kernels = sorted((event["ts"], event["args"]["correlation"]) for event in trace["traceEvents"] if event["cat"] == "kernel")
    lost = {correlation for _, correlation in kernels[:4]}
    trace["traceEvents"] = [
        event for event in trace["traceEvents"] if event["cat"] != "cuda_runtime" or event["args"]["correlation"] not in lost
    ]
    truth.files[0].write_text(json.dumps(trace))
    found = analyzed(truth.files)
    delays, before = ([line.newly_late_ns for line in document.collectives] for document in (found, whole))
    assert delays[3:] == before[3:]
    assert all(delay in (None, expected) for delay, expected in zip(delays, before, strict=True))
    assert ("aten::mm", 4) in {(line.cause, line.collectives) for line in found.causes}


def test_delays_of_overlapping_collectives_on_the_host_are_known_without_launches(tmp_path: Path) -> None:
    """All ranks do the same work, so its order shows what each collective waited for: all four delays count."""
    truth = write_job(tmp_path, Job(ranks=2, collectives=12, blocking=False, on_device=False, late={1: 60_000}))
    found = analyzed(truth.files)
    assert [line.newly_late_ns for line in found.ranks] == [0, 4 * 60_000]
    assert (1, "aten::mm", 4) in [(line.rank, line.cause, line.collectives) for line in found.causes]


def test_a_trace_of_several_devices_has_no_figures(tmp_path: Path) -> None:
    truth = write_job(tmp_path, Job(ranks=2, collectives=4))
    content = truth.files[1].read_text()
    truth.files[1].write_text(content.replace('"device": 1, "stream": 7', '"device": 5, "stream": 7'))
    found = analyzed(truth.files)
    assert [line.busy_ns for line in found.ranks] == [truth.busy_ns[0], None]
    assert found.ranks[1].why == "the trace has kernels of 2 devices: record one trace per rank"
    assert [(line.missing, line.transfer_ns) for line in found.collectives] == [([1], None)] * 4
    table = next(table for table in ranks_document(found).tables if table.id == "ranks")
    assert found.ranks[1].why in table.reasons


@pytest.mark.parametrize(("kernel", "kinds"), [("SendRecv", []), ("AllGather", ["all_gather"])])
def test_a_label_that_tells_no_kind_is_passed_over(tmp_path: Path, kernel: str, kinds: list[str]) -> None:
    """NCCL labels a batch of sends and receives as coalesced."""
    truth = write_job(tmp_path, Job(ranks=2, collectives=1))
    for file in truth.files:
        content = re.sub(r'"Collective name": "\w+"', '"Collective name": "coalesced"', file.read_text())
        file.write_text(re.sub(r"ncclDevKernel_[A-Za-z]+_Sum", f"ncclDevKernel_{kernel}_Sum", content))
    found = analyzed(truth.files)
    assert [line.kind for line in found.collectives] == kinds
    assert [problem.id for problem in found.problems] == ([] if kinds else ["point_to_point"])


def test_a_problem_of_many_ranks_is_one_line(tmp_path: Path) -> None:
    truth = write_job(tmp_path, Job(ranks=4, collectives=2))
    files = [rank_file(number, file) for number, file in enumerate(truth.files)]
    found = analyze_ranks(files, "job")
    assert [(problem.id, problem.what) for problem in found.problems] == [("lost", "ranks 0–3: 7 events are lost (rank 0)")]


def rank_file(number: int, file: Path) -> RankFile:
    read = read_rank(file, use_cache=False, with_analysis=False)
    problem = ProblemLine("lost", f"{7 + number} events are lost", False, "")
    return RankFile(number, file.name, read.trace, (problem,))


def test_a_clock_that_nothing_connects_is_unknown(tmp_path: Path) -> None:
    truth = write_job(tmp_path, Job(ranks=4, hosts=2, group=2, collectives=10))
    found = analyzed(truth.files)
    assert [line.offset_ns for line in found.ranks] == [0, 0, None, None]
    assert "no_common_collective" in [problem.id for problem in found.problems]
    assert sorted(line.ranks for line in found.collectives) == [[0, 1]] * 10 + [[2, 3]] * 10
    assert all(line.transfer_ns is not None for line in found.collectives)  # each group is on one host
    assert all(line.wait_ns is not None for line in found.ranks)


def test_hosts_that_are_not_stated_are_noticed_by_their_clocks(tmp_path: Path) -> None:
    truth = write_job(tmp_path, Job(ranks=4, hosts=2, collectives=20))
    for file in truth.files:
        file.write_text(file.read_text().replace('"host_name":', '"unknown":'))
    found = analyzed(truth.files)
    assert_true(found, truth)
    assert len(found.hosts) == 4
    assert [problem.id for problem in found.problems] == ["unknown_hosts"]


def test_ranks_without_collectives_have_budgets_only(tmp_path: Path) -> None:
    truth = write_job(tmp_path, Job(ranks=2, collectives=3, drop={0: [0, 1, 2], 1: [0, 1, 2]}))
    found = analyzed(truth.files)
    assert [line.busy_ns for line in found.ranks] == truth.busy_ns
    assert [line.exposed_comm_ns for line in found.ranks] == [0, 0]
    assert not found.collectives
    assert not found.steps
    assert not found.causes
    assert [problem.id for problem in found.problems] == ["no_collectives"]


def test_waiting_for_ranks_that_are_not_given_is_not_known(tmp_path: Path) -> None:
    truth = write_job(tmp_path, Job(ranks=4, group=2, collectives=5))
    found = analyzed([truth.files[0], truth.files[2]])
    assert [(line.wait_ns, line.transfer_ns, line.last, line.late_ns) for line in found.ranks] == [(None,) * 4] * 2
    assert [line.undivided_ns for line in found.ranks] == [truth.exposed_ns[0], truth.exposed_ns[2]]
    assert all(line.transfer_ns is None and line.why for line in found.collectives)
    assert [line.exposed_comm_ns for line in found.ranks] == [truth.exposed_ns[0], truth.exposed_ns[2]]
    assert all(line.bus_bytes_per_s is None for line in found.collective_kinds)
    assert "ranks_not_given" in [problem.id for problem in found.problems]


def test_the_bandwidth_of_a_ring(tmp_path: Path) -> None:
    truth = write_job(tmp_path, Job(ranks=4, collectives=20))
    found = analyzed(truth.files)
    factor = {"all_reduce": 1.5, "all_gather": 0.75, "reduce_scatter": 0.75}
    for line in found.collective_kinds:
        rows = [row for row in truth.collectives if (row["kind"], row["bytes"]) == (line.kind, line.bytes)]
        transfer = median(row["end"] - max(row["start"].values()) for row in rows)
        assert line.bus_bytes_per_s == pytest.approx(factor[line.kind] * rows[0]["bytes"] / transfer * 1e9)
        assert line.link_bytes_per_s is None
        assert line.link_why
    assert sum(line.count for line in found.collective_kinds) == 20


# --- recorded jobs ------------------------------------------------------------------------------------------------------


def test_a_planted_straggler_is_found_in_a_recorded_job() -> None:
    """Rank 1 slept 3 ms before a collective of each of 15 decode steps."""
    found = recorded("gloo_tp2_straggler_*")
    assert found.problems == []
    assert len(found.collectives) == 161
    worst = max(found.ranks, key=lambda line: line.newly_late_ns or 0)
    assert worst.rank == 1
    assert worst.newly_late_ns == pytest.approx(15 * 3_000_000, rel=0.15)
    assert [line.exposed_comm_ns for line in found.ranks] == [288_408_475, 243_752_944]
    slept = next(line for line in found.causes if line.cause == "(no operator)")
    assert (slept.rank, slept.collectives) == (1, 15)
    assert slept.cause_ns == pytest.approx(15 * 3_000_000, rel=0.1)
    assert {step.straggler for step in found.steps} == {1}
    delays = [step.newly_late_ns for step in found.steps if step.cause == "(no operator)"]
    assert delays == [pytest.approx(3_000_000, rel=0.2)] * 15
    kinds = {(line.kind, line.bytes): line.count for line in found.collective_kinds}
    assert kinds == {
        ("all_reduce", 2048): 135,
        ("all_reduce", 65536): 9,
        ("all_gather", 8192): 15,
        ("all_gather", 262144): 1,
        ("barrier", None): 1,
    }


@pytest.mark.slow
def test_four_recorded_ranks_match_completely() -> None:
    found = recorded("gloo_tp4_*")
    assert found.problems == []
    assert len(found.collectives) == 81
    assert all(line.ranks == [0, 1, 2, 3] for line in found.collectives)
    assert sum(line.last or 0 for line in found.ranks) <= 81
    for rank in found.ranks:
        parts = (rank.wait_ns, rank.transfer_ns, rank.undivided_ns)
        assert sum(part or 0 for part in parts) == rank.exposed_comm_ns
        assert (rank.wait_ns or 0) > 100_000_000
    assert len(found.steps) == 8


@pytest.mark.slow
def test_sampled_traces_of_two_ranks() -> None:
    """Half of the collectives of each trace are not in the other: they are matched by time."""
    found = recorded("two_ranks_*")
    assert {problem.id for problem in found.problems} == {"ranks_not_given", "unknown_hosts", "missing_collectives"}
    assert [line.busy_ns for line in found.ranks] == [547_656_000, 580_050_000]
    assert [line.exposed_comm_ns for line in found.ranks] == [336_983_000, 303_523_000]
    # HolisticTraceAnalysis 0.5.0, all profiler steps: get_temporal_breakdown, get_comm_comp_overlap
    assert [line.idle_ns for line in found.ranks] == [675_191_000, 651_136_000]
    overlapped = [100 * (1 - (line.exposed_comm_ns or 0) / (line.comm_ns or 1)) for line in found.ranks]
    assert overlapped == pytest.approx([14.95, 19.93], abs=0.005)
    assert all((line.start_skew_ns, line.last_rank, line.transfer_ns) == (None, None, None) for line in found.collectives)
    assert [line.undivided_ns for line in found.ranks] == [line.exposed_comm_ns for line in found.ranks]

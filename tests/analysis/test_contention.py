"""Threads that compete for processors are noticed."""

from dataclasses import replace

import pytest

from builders import clean_timings, rank_facts
from llm_perf_opt.analysis.contention import contention
from llm_perf_opt.core.host_records import HostLoad
from llm_perf_opt.core.missing import Missing
from llm_perf_opt.core.warnings import NOISE, WarningId

SECOND = 10**9
QUIET = HostLoad(
    wall_ns=10 * SECOND,
    processors=2,
    cpus="0-1",
    threads=9,
    main_delay_ns=SECOND // 10,
    other_delay_ns=SECOND // 10,
    involuntary_switches=30,
    voluntary_switches=100,
    runnable_before=1,
    others_before=0.03,
    others_before_s=3.0,
    wait_policy="default",
)


@pytest.mark.parametrize("host", [None, QUIET, replace(QUIET, main_delay_ns=Missing("not counted"))])
def test_a_quiet_or_unknown_machine_gives_no_warning(host: HostLoad | None) -> None:
    assert contention(clean_timings(host=host)) is None


def test_delays_are_a_warning_with_numbers() -> None:
    busy = replace(QUIET, main_delay_ns=3 * SECOND, other_delay_ns=4 * SECOND, involuntary_switches=5000, others_before=3.98)
    found = contention(clean_timings(host=busy))
    assert found is not None
    assert found.id is WarningId.CONTENDED_PROCESSORS
    assert found.id in NOISE
    for number in ("30 %", "35 %", "500 times per", "2 threads on 2 processors", "3.98"):
        assert number in found.text
    assert "wait_policy=passive" in found.text
    passive = contention(clean_timings(host=replace(busy, wait_policy="passive")))
    assert passive is not None
    assert "wait_policy" not in passive.text


@pytest.mark.parametrize(
    ("main", "others", "threads", "noticed"),
    [
        (0.001, 62 * 0.001, 63, False),
        (0.04, 0.0, 1, False),
        (0.06, 0.0, 64, True),
        (0.0, 0.3, 4, True),
        (Missing("not counted"), 0.3, 4, False),
    ],
)
def test_what_counts_is_the_main_thread_or_the_mean_thread(
    main: float | Missing, others: float, threads: int, noticed: bool
) -> None:
    delay = main if isinstance(main, Missing) else round(main * QUIET.wall_ns)
    host = replace(QUIET, main_delay_ns=delay, other_delay_ns=round(others * QUIET.wall_ns))
    assert (contention(replace(clean_timings(host=host), threads=threads)) is not None) is noticed


@pytest.mark.parametrize(("switches", "said"), [(10, "1 time per"), (30, "3 times per"), (0, "0 times per")])
def test_one_is_singular(switches: int, said: str) -> None:
    host = replace(QUIET, main_delay_ns=SECOND, involuntary_switches=switches, processors=1)
    found = contention(replace(clean_timings(host=host), threads=1))
    assert found is not None
    assert said in found.text
    assert "1 thread on 1 processor;" in found.text


def of_ranks(host: HostLoad, threads: int, *delays: int | Missing, size: int = 2) -> str:
    ranks = tuple(rank_facts(number, "cpu", main_delay_ns=delay, size=size) for number, delay in enumerate(delays))
    found = contention(replace(clean_timings(host=host), threads=threads, ranks=ranks))
    return found.text if found else ""


def test_a_process_with_one_compute_thread_has_no_mean_and_no_advice_of_fewer_threads() -> None:
    host = replace(QUIET, main_delay_ns=round(4.5 * SECOND), other_delay_ns=5 * SECOND)
    found = contention(replace(clean_timings(host=host), threads=1))
    assert found is not None
    assert "45 %" in found.text
    for absent in ("on average", "95 %", "hardware.threads", "wait_policy"):
        assert absent not in found.text


def test_delays_of_other_threads_never_make_a_mean_above_the_whole_time() -> None:
    host = replace(QUIET, main_delay_ns=3 * SECOND, other_delay_ns=30 * SECOND)
    assert isinstance(host.delay_share(2), Missing)
    found = contention(replace(clean_timings(host=host), threads=2))
    assert found is not None
    assert "on average" not in found.text
    assert host.delay_share(4) == 33 / 40


def test_ranks_are_counted_and_have_no_mean() -> None:
    host = replace(QUIET, wall_ns=840 * SECOND // 100, main_delay_ns=376 * SECOND // 100, other_delay_ns=413 * SECOND // 100)
    text = of_ranks(host, 1, 376 * SECOND // 100, 400 * SECOND // 100)
    assert "45 % to 48 %" in text
    assert "1 thread in each of 2 ranks on 2 processors" in text
    for absent in ("on average", "fewer", "wait_policy"):
        assert absent not in text
    assert "hardware.threads" in of_ranks(host, 2, 4 * SECOND, 4 * SECOND)
    assert "on average" not in of_ranks(host, 2, 4 * SECOND, 4 * SECOND)
    assert "runtime.tensor_parallel" in of_ranks(replace(host, processors=1), 1, 4 * SECOND, 4 * SECOND)


def test_the_rank_that_waited_most_counts() -> None:
    assert of_ranks(QUIET, 1, 0, 0) == ""
    assert "0 % to 30 %" in of_ranks(QUIET, 1, 0, 3 * SECOND)
    assert "0 % to 100 %" in of_ranks(QUIET, 1, 0, 11 * SECOND)


def test_an_interrupted_run_knows_one_rank_and_their_number() -> None:
    text = of_ranks(QUIET, 1, 4 * SECOND, size=4)
    assert "rank 0 for 40 %" in text
    assert "1 thread in each of 4 ranks" in text

"""Threads that compete for processors are noticed."""

from dataclasses import replace

import pytest

from builders import clean_timings
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

"""Each cause of idle time by example, and properties of every trace."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.analysis.trace.idle import SYNCHRONIZING, IdleCause, host_side, occupation
from llm_perf_opt.analysis.trace.intervals import union_blocks, union_ns
from llm_perf_opt.traces.events import Int64, Trace, WorkKind
from llm_perf_opt.traces.projection import launching_calls
from trace_builders import Builder

COPY = WorkKind.MEMCPY


def causes(built: Builder, instance: list[int] | None = None) -> list[tuple[int, int, str]]:
    """(start, end, cause) of every gap."""
    trace = built.trace()
    gaps = gaps_of(trace, np.array(instance, np.int64) if instance else None)
    return [
        (int(low), int(high), IdleCause(cause).label)
        for low, high, cause in zip(gaps.start_ns, gaps.end_ns, gaps.cause, strict=True)
    ]


def gaps_of(trace: Trace, instance: Int64 | None = None) -> Any:
    host = host_side(trace, launching_calls(trace))
    every = np.arange(len(trace.work))
    of = np.full(len(every), -1, np.int64) if instance is None else instance
    return occupation(trace, host, of, every).gaps


def test_launch_bound_the_call_came_after_the_device_had_gone_idle() -> None:
    #  device  ##########..........#####       host  ...............[call]
    built = Builder()
    built.launch(0, 10, 20)
    built.launch(25, 30, 35)
    assert causes(built) == [(20, 30, "launch-bound")]


def test_launch_bound_the_call_returned_after_the_device_had_gone_idle() -> None:
    built = Builder()
    built.launch(0, 10, 20)
    built.call(15, 28, correlation=9)
    built.kernel(30, 35, correlation=9)
    assert causes(built) == [(20, 30, "launch-bound")]


def test_device_latency_the_call_had_returned_before() -> None:
    built = Builder()
    built.launch(0, 10, 20)
    built.launch(5, 30, 35)
    assert causes(built) == [(20, 30, "device latency")]


def test_device_latency_between_kernels_of_one_graph_launch_even_while_the_call_lasts() -> None:
    built = Builder()
    built.call(0, 100, "cudaGraphLaunch", correlation=3)
    built.kernel(10, 20, correlation=3, graph_node=1)
    built.kernel(22, 30, correlation=3, graph_node=2)
    assert causes(built) == [(20, 22, "device latency")]


@pytest.mark.parametrize(
    "name", ["cudaStreamSynchronize", "cudaDeviceSynchronize_v3020", "cuEventSynchronize", "hipStreamSynchronize"]
)
def test_sync_the_host_was_blocked_when_the_device_went_idle(name: str) -> None:
    built = Builder()
    built.launch(0, 10, 20)
    built.call(5, 22, name)
    built.launch(38, 40, 45)
    assert causes(built) == [(20, 40, "sync")]


def test_a_sync_that_finds_the_device_idle_and_returns_at_once_is_not_the_cause() -> None:
    built = Builder()
    built.launch(0, 10, 20)
    built.call(25, 26, "cudaStreamSynchronize")
    built.launch(38, 40, 45)
    assert causes(built) == [(20, 40, "launch-bound")]


def test_a_sync_on_another_thread_is_not_a_cause() -> None:
    built = Builder()
    built.launch(0, 10, 20)
    built.call(5, 39, "cudaStreamSynchronize", thread=99)
    built.launch(38, 40, 45)
    assert causes(built) == [(20, 40, "launch-bound")]


def test_sync_a_copy_to_pageable_memory_blocks_its_caller() -> None:
    built = Builder()
    built.launch(0, 10, 20)
    built.call(5, 31, "cudaMemcpyAsync", correlation=8)
    built.kernel(20, 30, "Memcpy DtoH (Device -> Pageable)", correlation=8, kind=COPY)
    built.launch(38, 40, 45)
    assert causes(built) == [(30, 40, "sync")]


def test_host_work_between_steps() -> None:
    built = Builder()
    built.launch(0, 10, 20)
    built.launch(38, 40, 45)
    assert causes(built, [1, 2]) == [(20, 40, "host work between steps")]


def test_between_steps_a_sync_counts_only_where_it_fills_the_gap() -> None:
    for until, expected in ((22, "host work between steps"), (30, "sync")):
        built = Builder()
        built.launch(0, 10, 20)
        built.call(5, until, "cudaStreamSynchronize")
        built.launch(38, 40, 45)
        assert causes(built, [1, 2]) == [(20, 40, expected)]


def test_between_steps_a_slow_launch_is_a_slow_launch() -> None:
    built = Builder()
    built.launch(0, 10, 20)
    built.call(25, 39, "cudaGraphLaunch", correlation=3)
    built.kernel(40, 45, correlation=3)
    assert causes(built, [1, 2]) == [(20, 40, "launch-bound")]


def test_copy_wait_the_copy_was_asked_for_in_time() -> None:
    built = Builder()
    built.launch(0, 10, 20)
    built.call(5, 6, "cudaMemcpyAsync", correlation=8)
    built.kernel(30, 40, "Memcpy HtoD", correlation=8, kind=COPY)
    built.launch(7, 44, 50)
    assert causes(built) == [(20, 30, "copy wait"), (40, 44, "copy wait")], "setting up the copy, and hearing that it is done"


def test_copy_wait_while_the_call_stages_pageable_memory() -> None:
    built = Builder()
    built.launch(0, 10, 20)
    built.call(22, 45, "cudaMemcpyAsync", correlation=8)
    built.kernel(40, 44, "Memcpy HtoD (Pageable -> Device)", correlation=8, kind=COPY)
    assert causes(built) == [(20, 40, "copy wait")]


def test_after_a_copy_a_launch_that_comes_too_late_is_still_a_late_launch() -> None:
    built = Builder()
    built.launch(0, 10, 20, "Memcpy HtoD", kind=COPY)
    built.call(19, 28, correlation=9)
    built.kernel(30, 35, correlation=9)
    assert causes(built) == [(20, 30, "launch-bound")]


def test_a_copy_asked_for_too_late_is_like_a_kernel_launched_too_late() -> None:
    built = Builder()
    built.launch(0, 10, 20)
    built.call(38, 39, "cudaMemcpyAsync", correlation=8)
    built.kernel(40, 44, "Memcpy HtoD", correlation=8, kind=COPY)
    assert causes(built) == [(20, 40, "launch-bound")]


def test_unknown_without_a_launch_call() -> None:
    built = Builder()
    built.launch(0, 10, 20)
    built.kernel(30, 35)
    assert causes(built) == [(20, 30, "unknown")]
    alone = Builder()
    alone.kernel(0, 5)
    alone.kernel(9, 12)
    assert causes(alone) == [(5, 9, "unknown")], "not one call in the trace"


def test_other_work_fills_a_stages_gap() -> None:
    built = Builder()
    built.launch(0, 10, 20)
    built.launch(1, 22, 38, stream=8)
    built.launch(2, 40, 45)
    trace = built.trace()
    host = host_side(trace, launching_calls(trace))
    mine = np.array([0, 2])
    found = occupation(trace, host, np.zeros(3, np.int64), mine, around=union_blocks(trace.work.start_ns, trace.work.end_ns))
    assert found.busy_ns == 15
    assert [IdleCause(cause) for cause in found.gaps.cause] == [IdleCause.OTHER_WORK]


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("cudaMemcpy", True),
        ("cudaMemcpyAsync", False),
        ("cudaMemcpy2DAsync", False),
        ("cudaMemcpyToSymbol", True),
        ("cuMemcpyDtoH", True),
        ("cuMemcpyDtoHAsync", False),
        ("cudaFree", True),
        ("cudaFreeAsync", False),
        ("cudaStreamWaitEvent", False),
        ("cudaEventQuery", False),
        ("cudaLaunchKernel", False),
    ],
)
def test_which_calls_wait_for_the_device(name: str, waits: bool) -> None:
    assert (SYNCHRONIZING.fullmatch(name) is not None) is waits


# --- properties of every trace ----------------------------------------------------------------------------------------

CALL = st.tuples(
    st.integers(0, 200),
    st.integers(0, 30),
    st.sampled_from(["cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize", "cudaGraphLaunch"]),
    st.integers(70, 71),
)
WORK = st.tuples(
    st.integers(0, 250),
    st.integers(0, 20),
    st.sampled_from(list(WorkKind)),
    st.integers(0, 6),
    st.integers(7, 8),
    st.integers(-1, 2),
)
"""(start, length, kind, correlation, stream, instance)"""


def built_from(calls: list[Any], work: list[Any], shift: int = 0) -> tuple[Trace, Int64]:
    built = Builder()
    for number, (start, length, name, thread) in enumerate(calls, 1):
        built.call(start + shift, start + shift + length, name, correlation=number, thread=thread)
    ordered = sorted(work, key=lambda row: (row[0], row[0] + row[1]))
    for start, length, kind, correlation, stream, _ in ordered:
        built.kernel(start + shift, start + shift + length, kind=kind, correlation=correlation, stream=stream)
    return built.trace(), np.array([row[5] for row in ordered], np.int64)


@given(st.lists(CALL, max_size=8), st.lists(WORK, max_size=20))
def test_every_gap_has_one_cause_and_they_sum_to_the_idle_time(calls: list[Any], work: list[Any]) -> None:
    trace, instance = built_from(calls, work)
    gaps = gaps_of(trace, instance)
    span = int(trace.work.end_ns.max() - trace.work.start_ns.min()) if len(trace.work) else 0
    assert sum(gaps.by_cause().values()) == span - union_ns(trace.work.start_ns, trace.work.end_ns)
    assert (gaps.end_ns > gaps.start_ns).all()
    assert (trace.work.start_ns[gaps.after] == gaps.end_ns).all()
    assert (trace.work.end_ns[gaps.before] == gaps.start_ns).all()


@given(st.lists(CALL, max_size=8), st.lists(WORK, max_size=20), st.sampled_from([-(10**15), 3 * 10**18]))
def test_the_clocks_zero_means_nothing(calls: list[Any], work: list[Any], shift: int) -> None:
    here, instance = built_from(calls, work)
    there, _ = built_from(calls, work, shift)
    assert gaps_of(here, instance).by_cause() == gaps_of(there, instance).by_cause()


@given(st.data(), st.lists(CALL, max_size=8), st.lists(WORK, max_size=15, unique_by=lambda row: (row[0], row[0] + row[1])))
def test_the_order_of_rows_means_nothing(data: st.DataObject, calls: list[Any], work: list[Any]) -> None:
    trace, instance = built_from(calls, work)
    order = np.array(data.draw(st.permutations(range(len(work)))), np.int64)
    shuffled = replace(trace, work=trace.work.rows(order))
    first, second = gaps_of(trace, instance), gaps_of(shuffled, instance[order])
    assert first.start_ns.tolist() == second.start_ns.tolist()
    launched_at_once = len({row[0] for row in work}) < len(work)
    if not launched_at_once:  # of two that start together either may be named as the one that ended the gap
        assert first.cause.tolist() == second.cause.tolist()


@given(st.lists(CALL, max_size=8), st.lists(WORK, min_size=1, max_size=15), st.integers(0, 14))
def test_a_kernel_cut_in_two_leaves_the_causes_as_they_are(calls: list[Any], work: list[Any], which: int) -> None:
    start, length, kind, correlation, stream, instance = work[which % len(work)]
    if length < 2 or kind is not WorkKind.KERNEL:
        return
    halves = [
        (start, length // 2, kind, correlation, stream, instance),
        (start + length // 2, length - length // 2, kind, correlation, stream, instance),
    ]
    rest = [row for place, row in enumerate(work) if place != which % len(work)]
    if any(row[0] in (start, start + length // 2) or row[0] + row[1] == start + length for row in rest):
        return  # which of several rows stands at an edge is another question
    whole, parts = built_from(calls, work), built_from(calls, rest + halves)
    assert gaps_of(*whole).by_cause() == gaps_of(*parts).by_cause()


def test_graph_capture_the_launching_thread_captured_for_half_of_the_gap() -> None:
    built = Builder()
    built.launch(0, 10, 20)
    built.call(30, 31, "cudaStreamBeginCapture", correlation=50)
    built.call(40, 41, correlation=51)
    built.call(80, 81, "cudaStreamEndCapture", correlation=52)
    built.launch(100, 110, 120)
    assert causes(built) == [(20, 110, "graph capture")]
    built.launch(300, 310, 320)
    assert causes(built)[1] == (120, 310, "launch-bound")

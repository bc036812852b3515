"""Problems that make a trace incomplete, and problems that do not."""

from dataclasses import replace

import numpy as np
import pytest

from llm_perf_opt.traces.events import LATEST_NS, MOST_NS, Columns, RangeKind, Trace, TraceProblem
from llm_perf_opt.traces.health import (
    MOST_CHARACTERS,
    MOST_DEVICES,
    MOST_NAMES,
    MOST_PROCESSES,
    MOST_THREADS,
    Expected,
    examined,
    trace_problems,
)
from llm_perf_opt.traces.nsys_rows import message_problems
from trace_builders import Builder


def healthy(steps: int = 3) -> Builder:
    made = Builder()
    made.range(0, 1000 * steps + 100, "decode")
    for step in range(steps):
        at = 1000 * step + 50
        made.range(at, at + 900, "decode_step")
        for kernel in range(4):
            made.launch(at + 100 * kernel + 10, at + 100 * kernel + 40, at + 100 * kernel + 90)
    made.call(1000 * steps + 60, 1000 * steps + 90, "cudaDeviceSynchronize", correlation=999)
    return made


def ids(trace: Trace, expected: Expected | None = None) -> dict[str, bool]:
    return {problem.id: problem.fatal for problem in trace_problems(trace, expected)}


def test_a_healthy_trace_has_no_problem() -> None:
    assert ids(healthy().trace(), Expected(gpu=True, ranges=("decode", "decode_step"))) == {}


def test_launches_and_not_one_kernel() -> None:
    made = healthy()
    made.work = []
    assert ids(made.trace()) == {"no_kernels": True}


def test_no_gpu_work_is_wrong_only_where_a_gpu_was_expected() -> None:
    made = Builder()
    made.range(0, 10, "decode")
    assert ids(made.trace()) == {}
    assert ids(made.trace(), Expected(gpu=True)) == {"no_kernels": True}


@pytest.mark.parametrize(("lost", "fatal"), [(1, False), (2, False), (3, True)])
def test_launches_without_kernels_are_fatal_above_one_in_a_hundred(lost: int, fatal: bool) -> None:
    made = healthy(steps=50)  # 200 launches
    del made.work[-lost:]
    found = trace_problems(made.trace())
    assert [(problem.id, problem.fatal) for problem in found] == [("launches_without_kernels", fatal)]
    assert f"{lost} of 200 kernel launches" in found[0].what
    assert found[0].remedy


def test_a_runtime_call_and_the_driver_call_inside_it_are_one_launch() -> None:
    made = healthy()
    for start, _, _, process, thread, correlation in list(made.calls)[:-1]:
        made.call(start, start + 1, "cuLaunchKernel", correlation, process, thread)
    assert ids(made.trace()) == {}


def test_launches_recorded_into_a_graph_need_no_kernel_but_those_after_it_do() -> None:
    made = healthy(steps=1)
    made.call(500, 501, "cudaStreamBeginCapture_v10000", correlation=500)
    for at in range(510, 560, 10):
        made.call(at, at + 1, "cudaLaunchKernel_v7000", correlation=at)
    made.call(570, 571, "cudaStreamEndCapture_v10000", correlation=570)
    assert ids(made.trace()) == {"graph_capture": False}
    made.call(580, 581, "cudaLaunchKernel_v7000", correlation=580)
    assert ids(made.trace()) == {"launches_without_kernels": True, "graph_capture": False}


def test_graph_launches_are_counted_apart_and_host_functions_not_at_all() -> None:
    made = healthy()
    made.call(600, 610, "cudaLaunchHostFunc_v10000", correlation=600)
    made.call(700, 710, "cudaGraphLaunch_v10000", correlation=700)
    assert ids(made.trace()) == {"graph_launches_without_kernels": True}
    for node in range(3):
        made.kernel(800 + node, 801 + node, correlation=700, graph_node=node + 1)
    assert ids(made.trace()) == {}


def test_a_label_that_nothing_was_launched_in_costs_no_trace() -> None:
    made = healthy(steps=3)
    made.range(3010, 3040, "decode_step")
    made.range(-500, -100, "prefill")  # by the host alone
    found = {problem.id: problem for problem in trace_problems(made.trace())}
    assert not found["ranges_without_kernels"].fatal
    assert "1 of 1 prefill, 1 of 4 decode_step" in found["ranges_without_kernels"].what
    assert "nsys" not in found["ranges_without_kernels"].remedy


def test_stages_that_launch_nothing_mean_that_recording_stopped() -> None:
    made = healthy(steps=3)
    made.work = [row for row in made.work if row[0] < 1000]
    made.calls = [row for row in made.calls if row[0] < 1000]
    found = {problem.id: problem for problem in trace_problems(made.trace())}
    assert found["ranges_without_kernels"].fatal
    assert "2 of 3 decode_step" in found["ranges_without_kernels"].what
    assert not found["calls_stop_early"].fatal


def test_kernels_launched_by_another_thread_are_no_lost_kernels() -> None:
    made = healthy()
    made.calls = [(*row[:4], 71, row[5]) for row in made.calls]
    assert ids(made.trace()) == {"launched_elsewhere": False}


def test_kernels_launched_by_another_process_are_no_lost_kernels() -> None:
    made = healthy()
    made.ranges = [(*row[:5], 8, 80) for row in made.ranges]
    assert ids(made.trace()) == {"launched_elsewhere": False}


def test_missing_ranges_are_named() -> None:
    found = trace_problems(healthy().trace(), Expected(ranges=("decode", "prefill")))
    assert [(problem.id, problem.fatal) for problem in found] == [("missing_ranges", True)]
    assert found[0].what.endswith(": prefill")


def test_work_that_ends_before_it_starts_is_fatal() -> None:
    made = healthy()
    made.launch(2950, 2990, 2980)
    assert ids(made.trace()) == {"negative_duration": True}


def test_orphans_skew_and_crossing_ranges_are_named_but_not_fatal() -> None:
    made = healthy()
    made.kernel(5000, 5010, correlation=12345)
    made.call(2950, 2951, correlation=7000)
    made.kernel(2900, 2960, correlation=7000)
    made.range(2990, 9999, "other")
    found = ids(made.trace())
    assert found == {"work_without_calls": False, "clock_skew": False, "overlapping_ranges": False}


def test_start_end_ranges_may_cross() -> None:
    made = healthy()
    made.range(20, 99999, "request", kind=RangeKind.START_END)
    assert ids(made.trace()) == {}


@pytest.mark.parametrize(
    ("expected", "wrong"),
    [
        (Expected(command="runner.py"), False),
        (Expected(command="other.py"), True),
        (Expected(started_after_utc_ns=900, started_before_utc_ns=1100), False),
        (Expected(started_after_utc_ns=1001), True),
        (Expected(started_before_utc_ns=999), True),
    ],
)
def test_a_trace_of_another_run_is_refused(expected: Expected, wrong: bool) -> None:
    trace = healthy().trace(facts={"command": "python runner.py", "started_utc_ns": "1000"})
    assert ids(trace, expected) == ({"another_run": True} if wrong else {})


def test_a_trace_that_does_not_say_whose_it_is_is_not_accused() -> None:
    assert ids(healthy().trace(), Expected(command="x", started_after_utc_ns=1)) == {}


def test_examined_keeps_what_the_parser_said() -> None:
    said = TraceProblem("open_ranges", "1 range", fatal=False)
    trace = examined(replace(healthy().trace(), problems=(said,)), Expected(ranges=("prefill",)))
    assert [problem.id for problem in trace.problems] == ["open_ranges", "missing_ranges"]
    assert not trace.complete
    assert examined(trace, Expected(ranges=("prefill",))).problems == trace.problems


def test_what_the_tool_says_of_itself() -> None:
    found = message_problems(
        [
            ("Info", "Process was launched"),
            ("Warning", "Not all CUDA events might have been collected."),
            ("Error", "Errors occurred while processing the raw events."),
            ("Error", "Errors occurred while processing the raw events."),
            ("Error", "GPU metrics are not available"),
            ("Warning", "12 buffers were dropped"),
            ("Warning", "CPU sampling is off"),
        ]
    )
    assert {problem.id: problem.fatal for problem in found} == {
        "importer_gave_up": True,
        "events_lost": True,
        "events_perhaps_lost": False,
        "tool_error": False,
        "tool_warning": False,
    }
    assert len(found) == 5


def test_of_very_many_messages_the_fatal_ones_stay() -> None:
    found = message_problems([*[("Warning", f"warning {number}") for number in range(100)], ("Warning", "events were lost")])
    assert len(found) == 21
    assert found[0].id == "events_lost"
    assert "81 more" in found[-1].what


def test_capturing_that_began_before_the_recording() -> None:
    made = healthy()
    made.call(1, 2, "cudaStreamEndCapture", correlation=900)
    trace = made.trace()
    assert np.count_nonzero(trace.calls.correlation == 900) == 1
    assert ids(trace) == {}


def test_what_the_parser_said_is_not_said_again_unless_it_is_worse() -> None:
    made = healthy(steps=50)
    del made.work[-3:]
    mild = TraceProblem("launches_without_kernels", "3 of 200 launches have no kernel", fatal=False)
    assert [problem.fatal for problem in examined(replace(made.trace(), problems=(mild,))).problems] == [False, True]
    fatal = replace(mild, fatal=True)
    assert examined(replace(made.trace(), problems=(fatal,))).problems == (fatal,)


def test_launches_of_a_recorded_graph_alone_are_no_lost_kernels() -> None:
    made = Builder()
    made.call(0, 5, "cudaStreamBeginCapture", correlation=1)
    made.call(10, 15, "cudaLaunchKernel", correlation=2)
    made.call(20, 25, "cudaStreamEndCapture", correlation=3)
    assert ids(made.trace()) == {"graph_capture": False}


def test_a_trace_of_one_rank_of_several_says_so() -> None:
    def found(**facts: str) -> list[str]:
        built = Builder()
        built.launch(0, 10, 20)
        return [f"{problem.id}: {problem.what}" for problem in trace_problems(built.trace(facts=facts))]

    (text,) = found(distributed_world_size="4", distributed_rank="1")
    assert text.startswith("one_rank: ")
    assert "rank 1 of 4" in text
    assert found(distributed_world_size="1", distributed_rank="0") == []
    assert found(distributed_world_size="many") == found() == []


# --- more than any program has --------------------------------------------------------------------------------------------


def with_rows(trace: Trace, table: str, rows: int, **columns: object) -> Trace:
    """The trace with one table of many equal rows, except for these columns."""
    found: Columns = getattr(trace, table)
    return replace(trace, **{table: replace(found.rows(np.zeros(rows, np.int64)), **columns)})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("table", "column", "most"),
    [
        ("work", "device", MOST_DEVICES),
        ("work", "process", MOST_PROCESSES),
        ("calls", "process", MOST_PROCESSES),
        ("ranges", "process", MOST_PROCESSES),
        ("calls", "thread", MOST_THREADS),
        ("ranges", "thread", MOST_THREADS),
    ],
)
def test_more_devices_processes_or_threads_than_any_machine_has(table: str, column: str, most: int) -> None:
    for count in (most, most + 1):
        trace = healthy().trace()
        kind = getattr(getattr(trace, table), column).dtype
        many = with_rows(trace, table, count, **{column: np.arange(count).astype(kind)})
        assert ("beyond_reason" in ids(many)) == (count > most)
    assert ids(many) == {"beyond_reason": True}, "nothing else is looked for in it"


def test_more_kernel_names_than_any_program_has() -> None:
    for names in (tuple(map(str, range(MOST_NAMES))), ("x" * MOST_CHARACTERS,)):
        for more in (False, True):
            used = (*names, "y") if more else names
            trace = healthy().trace()
            others = len(trace.names)
            trace = replace(trace, names=(*trace.names, *used))
            many = with_rows(trace, "work", len(used), name=np.arange(others, others + len(used), dtype=np.int32))
            assert ids(many).get("beyond_reason") == (True if more else None)


@pytest.mark.parametrize("table", ["work", "calls", "ranges", "operators"])
def test_times_whose_sum_no_column_can_hold(table: str) -> None:
    """Each time is possible; their sum is more than a table may have."""
    built = healthy()
    built.operator(0, 10, "aten::mm")
    for rows, refused in ((1, False), (MOST_NS // LATEST_NS, True), (8, True)):
        long = np.full(rows, LATEST_NS, np.int64)
        found = ids(with_rows(built.trace(), table, rows, start_ns=long - LATEST_NS, end_ns=long))
        assert found.get("beyond_reason") == (True if refused else None)

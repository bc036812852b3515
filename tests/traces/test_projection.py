"""Assigning device work to calls, ranges, stages and steps."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_perf_opt.core.stages import Stage
from llm_perf_opt.traces.events import RangeKind, Trace
from llm_perf_opt.traces.projection import NONE, project, stage_of_range, step_of_work, through
from trace_builders import PROCESS, Builder


def request() -> Builder:
    """profile ⊃ prefill, decode ⊃ two steps; a kernel in each, one before, one launched between the steps."""
    made = Builder()
    made.range(100, 1000, "profile")
    made.range(110, 300, "prefill")
    made.range(310, 990, "decode")
    made.range(320, 500, "decode_step")
    made.range(520, 980, "decode_step")
    made.range(530, 600, "attention", domain=None)
    for at in (50, 120, 330, 510, 540, 700):
        made.launch(at, at + 2000, at + 2005, f"k{at}")
    return made


def test_work_goes_to_the_range_of_its_launch_not_to_what_overlaps_it_on_the_device() -> None:
    trace = request().trace()
    projection = project(trace)
    paths = [
        "" if row == NONE else "/".join(projection.path_names(int(projection.path[row]))) for row in projection.range_of_work
    ]
    assert paths == [
        "",
        "LLM@profile/LLM@prefill",
        "LLM@profile/LLM@decode/LLM@decode_step",
        "LLM@profile/LLM@decode",
        "LLM@profile/LLM@decode/LLM@decode_step/attention",
        "LLM@profile/LLM@decode/LLM@decode_step",
    ]
    assert projection.depth.tolist() == [0, 1, 1, 2, 2, 3]
    assert projection.parent.tolist() == [-1, 0, 0, 2, 2, 4]


def test_stages_and_steps() -> None:
    trace = request().trace()
    projection = project(trace)
    every = tuple(Stage)
    of_work = through(projection.range_of_work, stage_of_range(trace, projection, every))
    names = ["" if place == NONE else every[place].value for place in of_work]
    assert names == ["", "prefill", "decode_step", "decode", "decode_step", "decode_step"]
    two = (Stage.PREFILL, Stage.DECODE)
    assert step_of_work(trace, projection).tolist() == [-1, -1, 3, -1, 4, 4]
    assert stage_of_range(trace, projection, two).tolist() == [-1, 0, 1, 1, 1, 1]


def test_a_stage_name_in_somebody_elses_domain_is_no_stage() -> None:
    made = Builder()
    made.range(0, 100, "decode", domain="game")
    made.range(200, 300, "decode", domain=None)
    made.launch(10, 20, 30)
    made.launch(210, 220, 230)
    trace = made.trace()
    assert stage_of_range(trace, project(trace), (Stage.DECODE,)).tolist() == [-1, 0]


def test_all_kernels_of_a_graph_belong_to_its_launch() -> None:
    made = Builder()
    made.range(0, 100, "decode_step")
    made.call(10, 20, "cudaGraphLaunch", correlation=5)
    for node in range(4):
        made.kernel(1000 + 10 * node, 1005 + 10 * node, correlation=5, graph_node=node + 1)
    trace = made.trace()
    projection = project(trace)
    assert projection.call_of_work.tolist() == [0, 0, 0, 0]
    assert projection.range_of_work.tolist() == [0, 0, 0, 0]


def test_correlation_joins_only_within_a_process_and_zero_joins_nothing() -> None:
    made = Builder()
    made.call(0, 1, correlation=3, process=1)
    made.call(5, 6, correlation=0, process=2)
    made.kernel(10, 20, correlation=3, process=2)
    made.kernel(30, 40, correlation=0, process=2)
    made.kernel(50, 60, correlation=3, process=1)
    assert project(made.trace()).call_of_work.tolist() == [-1, -1, 0]


def test_of_two_calls_with_one_correlation_the_outer_counts() -> None:
    made = Builder()
    made.call(0, 10, "cudaLaunchKernel", correlation=3)
    made.call(2, 8, "cuLaunchKernel", correlation=3)
    made.kernel(20, 30, correlation=3)
    assert project(made.trace()).call_of_work.tolist() == [0]


def test_huge_correlations_do_not_wrap_around() -> None:
    made = Builder()
    for process in (1, 2**60, -5):
        made.call(0, 1, correlation=2**62 + process % 7, process=process)
        made.kernel(10, 20, correlation=2**62 + process % 7, process=process)
    trace = made.trace()
    projection = project(trace)
    assert trace.calls.process[projection.call_of_work].tolist() == trace.work.process.tolist()


def test_nothing_at_all() -> None:
    projection = project(Builder().trace())
    assert len(projection.call_of_work) == len(projection.parent) == len(projection.path_label) == 0


def test_start_end_ranges_stand_apart() -> None:
    made = Builder()
    made.range(0, 100, "request", kind=RangeKind.START_END)
    made.range(10, 90, "decode")
    made.launch(20, 30, 40)
    projection = project(made.trace())
    assert projection.parent.tolist() == [-1, -1]
    assert projection.range_of_work.tolist() == [1]


# --- against the obvious way --------------------------------------------------------------------------------------------


def obvious_innermost(trace: Trace, process: int, thread: int, at: int, before: int | None = None) -> int:
    """Return the last push/pop range of the thread that is open; with `before`, only among the rows before that one."""
    ranges = trace.ranges
    best = NONE
    for row in range(len(ranges) if before is None else before):
        same = ranges.process[row] == process and ranges.thread[row] == thread and ranges.kind[row] == RangeKind.PUSH_POP
        if same and ranges.start_ns[row] <= at < ranges.end_ns[row]:
            best = row
    return best


def obvious_call(trace: Trace, row: int) -> int:
    for call in range(len(trace.calls)):
        if (
            trace.work.correlation[row] != 0
            and trace.calls.correlation[call] == trace.work.correlation[row]
            and trace.calls.process[call] == trace.work.process[row]
        ):
            return call
    return NONE


TIMES = st.integers(0, 40)
THREADS = st.integers(1, 2)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Random ranges: nested, adjacent, overlapping, empty, on several threads of several processes."""
    made = Builder()
    for _ in range(draw(st.integers(0, 14))):
        start, length = draw(TIMES), draw(st.integers(0, 20))
        kind = draw(st.sampled_from([RangeKind.PUSH_POP] * 5 + [RangeKind.START_END]))
        name = draw(st.sampled_from(["profile", "prefill", "decode", "decode_step", "other"]))
        domain = draw(st.sampled_from(["LLM", "LLM", None, "nccl"]))
        made.range(start, start + length, name, domain, kind, process=draw(THREADS), thread=draw(THREADS))
    for _ in range(draw(st.integers(0, 12))):
        start = draw(TIMES)
        made.call(start, start + 1, correlation=draw(st.integers(0, 9)), process=draw(THREADS), thread=draw(THREADS))
    for _ in range(draw(st.integers(0, 12))):
        start = draw(TIMES)
        made.kernel(start, start + 3, correlation=draw(st.integers(0, 9)), process=draw(THREADS))
    return made.trace()


@settings(max_examples=50, deadline=None)
@given(traces())
def test_it_agrees_with_the_obvious_way(trace: Trace) -> None:
    projection = project(trace)
    ranges, calls = trace.ranges, trace.calls
    assert projection.call_of_work.tolist() == [obvious_call(trace, row) for row in range(len(trace.work))]
    innermost = [
        obvious_innermost(trace, int(calls.process[row]), int(calls.thread[row]), int(calls.start_ns[row]))
        for row in range(len(calls))
    ]
    assert projection.range_of_call.tolist() == innermost
    parents = [
        obvious_innermost(trace, int(ranges.process[row]), int(ranges.thread[row]), int(ranges.start_ns[row]), row)
        if ranges.kind[row] == RangeKind.PUSH_POP
        else NONE
        for row in range(len(ranges))
    ]
    assert projection.parent.tolist() == parents
    for row in range(len(ranges)):
        chain = [row]
        while parents[chain[-1]] != NONE:
            chain.append(parents[chain[-1]])
        assert projection.depth[row] == len(chain) - 1
        labels = [
            trace.name_of(ranges.name[i])
            if ranges.domain[i] == NONE
            else f"{trace.name_of(ranges.domain[i])}@{trace.name_of(ranges.name[i])}"
            for i in reversed(chain)
        ]
        assert projection.path_names(int(projection.path[row])) == tuple(labels)
    every = tuple(Stage)
    expected = [obvious_stage(trace, parents, row) for row in range(len(ranges))]
    assert stage_of_range(trace, projection, every).tolist() == expected


def obvious_stage(trace: Trace, parents: list[int], row: int) -> int:
    while row != NONE:
        label = trace.name_of(trace.ranges.name[row])
        if trace.name_of(trace.ranges.domain[row]) in ("", "LLM") and label in {stage.value for stage in Stage}:
            return [stage.value for stage in Stage].index(label)
        row = parents[row]
    return NONE


def test_equal_ranges_nest_in_their_order() -> None:
    made = Builder()
    made.range(0, 10, "outer")
    made.range(0, 10, "inner")
    made.launch(5, 6, 7, process=PROCESS)
    projection = project(made.trace())
    assert projection.parent.tolist() == [-1, 0]
    assert projection.range_of_work.tolist() == [1]


def test_a_long_row_of_siblings_and_a_deep_nest_end_soon() -> None:
    made = Builder()
    made.names = ["a", "LLM"]
    made.ranges = [(10 * i, 10 * i + 5, 0, 1, 0, 1, 1) for i in range(20_000)]
    made.ranges += [(i, 10**6 - i, 0, 1, 0, 1, 2) for i in range(2_000)]
    projection = project(made.trace())
    assert np.bincount(projection.depth)[0] == 20_001
    assert projection.depth.max() == 1_999

"""Whatever a trace holds (overlapping ranges, foreign labels, work that ends before it starts), the figures add up."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llm_perf_opt.analysis.trace.accounting import Account, DeviceTime, StageTime, account
from llm_perf_opt.analysis.trace.attribution import attribute, modules_by_time, operators_by_time
from llm_perf_opt.analysis.trace.graph_modules import AttributedTrace, borrow_modules
from llm_perf_opt.analysis.trace.stage_launches import kernels_by_time
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.traces.events import EARLIEST_NS, LATEST_NS, MOST_NS, NO_NAME, Operators, RangeKind, Trace, WorkKind
from llm_perf_opt.traces.health import trace_problems
from trace_builders import Builder

MOMENT = st.integers(-50, 400)
LENGTH = st.integers(-3, 120)
PLACE = st.integers(0, 2)
LABELS = ["profile", "prefill", "decode", "decode_step", "step[DECODE bs=1]", "step[EXTEND bs=1 toks=2]", "ProfilerStep#1",
          "execute_context_1(2)_generation_1(1)", "nn.Module: Linear_0", "part:mlp", "anything"]  # fmt: skip
CALLS = ["cudaLaunchKernel", "cudaGraphLaunch", "cudaStreamSynchronize", "cudaMemcpyAsync", "cudaFree"]
KERNELS = ["nvjet_a", "flash_fwd", "ArgMaxOps", "elementwise", "?"]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    built = Builder()
    for start, length, name, process, thread, correlation in draw(
        st.lists(st.tuples(MOMENT, LENGTH, st.sampled_from(CALLS), PLACE, PLACE, st.integers(0, 6)), max_size=10)
    ):
        built.call(start, start + length, name, correlation, process, thread)
    work = st.tuples(MOMENT, LENGTH, st.sampled_from(list(WorkKind)), st.sampled_from(KERNELS), PLACE, PLACE, st.integers(0, 6))
    for start, length, kind, name, process, device, correlation in draw(st.lists(work, max_size=20)):
        built.kernel(start, start + length, name, correlation, process, device, stream=device, kind=kind)
    ranges = st.tuples(
        MOMENT, LENGTH, st.sampled_from(LABELS), st.sampled_from(["LLM", None, "x"]), st.sampled_from(RangeKind), PLACE, PLACE
    )
    for start, length, name, domain, kind_of, process, thread in draw(st.lists(ranges, max_size=10)):
        built.range(start, start + length, name, domain, kind_of, process, thread)
    trace = built.trace()
    rows = draw(st.lists(st.tuples(MOMENT, LENGTH, PLACE, PLACE), max_size=10)) if trace.names else []
    start, length, process, thread = (np.array([row[place] for row in rows], np.int64) for place in range(4))
    name = np.zeros(len(rows), np.int32)
    return replace(trace, operators=Operators(start, start + length, name, process, thread, name + NO_NAME))


def assert_added_up(found: Account) -> None:
    every: list[DeviceTime | StageTime] = [found.total, *found.devices, *found.stages]
    for one in every:
        assert one.busy_ns + one.idle_ns == one.span_ns
        assert sum(one.idle.values()) == one.idle_ns
        assert min(one.busy_ns, one.idle_ns) >= 0


@given(traces())
def test_figures_add_up(trace: Trace) -> None:
    stages = find_stages(trace)
    found = account(trace, stages)
    assert_added_up(found)
    if found.steps is not None:
        assert (found.steps.busy_ns + found.steps.idle_ns == found.steps.end_ns - found.steps.start_ns).all()
    attribution = attribute(trace, stages)
    for level in (attribution.operator, attribution.top_operator, attribution.module, attribution.stage, attribution.step):
        assert len(level) == len(trace.work)
    operators_by_time(trace, attribution)
    modules_by_time(trace, attribution)
    kernels = int((trace.work.kind == WorkKind.KERNEL).sum())
    assert sum(row.calls for row in kernels_by_time(trace)) == kernels
    attributed = AttributedTrace(trace, stages, attribution)
    assert len(borrow_modules(attributed, attributed).module) == len(trace.work)


MOST_LENGTHS = [*range(4), 2**32 + 1, 2**53 + 1, 2**60, 2**61]


@st.composite
def traces_near_the_limits(draw: st.DrawFn) -> Trace:
    """Work at the first and last times that readers accept, and of lengths up to the longest that they accept."""
    moment = st.builds(int.__add__, st.sampled_from([EARLIEST_NS, -200, 0, 2**53, LATEST_NS - 200]), st.integers(0, 199))
    built = Builder()
    for start, length, name, device in draw(
        st.lists(st.tuples(moment, st.sampled_from(MOST_LENGTHS), st.sampled_from(KERNELS), PLACE), min_size=1, max_size=8)
    ):
        built.launch(start, start, min(start + length, LATEST_NS), name, device=device, stream=device)
    for start, length, name in draw(
        st.lists(st.tuples(moment, st.sampled_from(MOST_LENGTHS), st.sampled_from(LABELS)), max_size=4)
    ):
        built.range(start, min(start + length, LATEST_NS), name)
    return built.trace()


@given(traces_near_the_limits())
@example(Builder().trace())
def test_times_near_the_limits_are_exact_or_refused(trace: Trace) -> None:
    work = list(zip(trace.work.start_ns.tolist(), trace.work.end_ns.tolist(), strict=True))
    total = sum(end - start for start, end in work)
    refused = any(problem.id == "beyond_reason" for problem in trace_problems(trace))
    labelled = int((trace.ranges.end_ns - trace.ranges.start_ns).astype(object).sum())
    assert refused == (max(total, labelled) >= MOST_NS) or max(total, labelled) == pytest.approx(MOST_NS, rel=1e-15)
    if refused:
        return
    stages = find_stages(trace)
    found = account(trace, stages)
    assert_added_up(found)
    covered, reached = 0, EARLIEST_NS
    for start, end in sorted(work):
        covered += max(end - max(start, reached), 0)
        reached = max(end, reached)
    assert found.total.busy_ns == covered
    assert found.total.span_ns == (max(end for _, end in work) - min(start for start, _ in work) if work else 0)
    assert found.total.kernels.sum_ns == total
    rows = kernels_by_time(trace)
    assert sum(row.total_ns for row in rows) == total
    assert all(0 <= row.share <= 1 for row in rows)

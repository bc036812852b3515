"""The budget of a stage on a CPU: exact sums, the profiler's cost, waiting, roofline time."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.analysis.budget import BudgetKey, StageBudget
from llm_perf_opt.analysis.cpu_budget import CpuBudgetFacts, cpu_stage_budget
from llm_perf_opt.analysis.trace.host_time import HostTime
from llm_perf_opt.analysis.trace.operator_classes import HostRow, row_of
from llm_perf_opt.core.host_records import CostRange, ProfilerCost
from llm_perf_opt.core.records import Maybe, Missing

NONE = Missing("not here")
EACH = CostRange(100.0, 90.0, 120.0)
COST = ProfilerCost(EACH, EACH, CostRange(500.0, 400.0, 700.0), CostRange(0.0, 0.0, 0.0), 50.0, 7)
FREE = CostRange(0.0, 0.0, 0.0)


def host_time(rows: Mapping[HostRow, int], events: Mapping[HostRow, int] | None = None, labels: int = 0) -> HostTime:
    every = dict.fromkeys(HostRow, 0)
    return HostTime("decode", "token", 10, sum(rows.values()), {**every, **rows}, {**every, **(events or {})}, labels, 0, every)


def budget(
    time: HostTime,
    wall_ns: int | None,
    cost: Maybe[ProfilerCost] = COST,
    roofline: Maybe[Mapping[HostRow, int]] = NONE,
    waiting: Maybe[int] = NONE,
    profiled_waiting: Maybe[int] = NONE,
) -> StageBudget:
    facts = CpuBudgetFacts(time, wall_ns, "the unprofiled pass", cost, roofline, waiting, profiled_waiting)
    return cpu_stage_budget(facts).budget


def test_the_cost_of_each_event_leaves_the_row_that_contains_it() -> None:
    time = host_time(
        {HostRow.MATMUL: 5_000, HostRow.FRAMEWORK: 3_000, HostRow.PYTHON: 6_000},
        {HostRow.FRAMEWORK: 10, HostRow.PYTHON: 20},
        labels=2,
    )
    found = budget(time, 5_000 + 2_000 + 3_000)
    assert (found.ns(BudgetKey.MATMUL), found.ns(BudgetKey.FRAMEWORK), found.ns(BudgetKey.PYTHON)) == (5_000, 2_000, 3_000)
    assert not found.problems
    python = next(row for row in found.rows if row.key is BudgetKey.PYTHON)
    assert (python.low_ns, python.high_ns) != (None, None)
    assert (python.low_ns or 0) < 3_000 < (python.high_ns or 0), "the cost is known within bounds"


def test_without_a_measured_cost_the_inflation_is_divided_among_the_events() -> None:
    time = host_time({HostRow.MATMUL: 5_000, HostRow.PYTHON: 6_000}, {HostRow.PYTHON: 30})
    found = budget(time, 8_000, cost=NONE)
    assert (found.ns(BudgetKey.MATMUL), found.ns(BudgetKey.PYTHON)) == (5_000, 3_000)


def test_times_that_do_not_reconcile_are_a_problem_and_no_row_is_negative() -> None:
    time = host_time({HostRow.MATMUL: 10_000})
    slower = budget(time, 100_000)
    assert [problem.id for problem in slower.problems] == ["unreconciled"]
    assert slower.ns(BudgetKey.NOT_IN_TRACE) == 100_000 - slower.ns(BudgetKey.MATMUL) > 80_000
    faster = budget(time, 1_000)
    assert [problem.id for problem in faster.problems] == ["unreconciled"]
    assert faster.ns(BudgetKey.MATMUL) == 1_000


def test_a_profiled_pass_that_mostly_waited_explains_nothing() -> None:
    found = budget(host_time({HostRow.MATMUL: 1_000}), 9_000, waiting=3_000, profiled_waiting=5_000)
    assert [problem.id for problem in found.problems] == ["unreconciled"]
    assert (found.ns(BudgetKey.WAITING), found.ns(BudgetKey.NOT_IN_TRACE)) == (3_000, 6_000)


def test_waiting_is_a_row_of_its_own() -> None:
    time = host_time({HostRow.MATMUL: 8_000, HostRow.PYTHON: 4_000})
    found = budget(time, 15_000, waiting=5_000, profiled_waiting=2_000)
    assert found.ns(BudgetKey.WAITING) == 5_000
    assert sum(row.ns for row in found.rows) == 15_000


@pytest.mark.parametrize(("waiting", "profiled_waiting"), [(5_000, 2_000), (5_000, NONE), (NONE, 2_000), (0, 0), (NONE, NONE)])
@pytest.mark.parametrize("wall_ns", [15_000, 150_000])
def test_times_without_waiting_are_marked(wall_ns: int, waiting: Maybe[int], profiled_waiting: Maybe[int]) -> None:
    found = budget(host_time({HostRow.MATMUL: 8_000, HostRow.PYTHON: 4_000}), wall_ns, NONE, NONE, waiting, profiled_waiting)
    (text,) = [text for text in (*found.notes, *(one.what for one in found.problems)) if "unprofiled pass" in text]
    trace, clean = text.split("; ")
    assert ("waiting" in trace) == (profiled_waiting == 2_000)
    assert ("without waiting, the unprofiled pass" in clean) == (waiting == 5_000)


def test_the_roofline_time_leaves_the_rows_that_do_the_work() -> None:
    time = host_time({HostRow.MATMUL: 8_000, HostRow.ATTENTION: 1_000, HostRow.PYTHON: 1_000})
    found = budget(time, 10_000, roofline={HostRow.MATMUL: 3_000, HostRow.ATTENTION: 200})
    assert found.ns(BudgetKey.ROOFLINE) == 3_200
    assert (found.ns(BudgetKey.MATMUL), found.ns(BudgetKey.ATTENTION)) == (5_000, 800)
    impossible = budget(time, 10_000, roofline={HostRow.MATMUL: 90_000})
    assert [problem.id for problem in impossible.problems] == ["operators_under_roofline"]
    assert impossible.ns(BudgetKey.PYTHON) == 1_000, "Python does no work of the model"


def test_without_an_unprofiled_pass_the_times_are_those_of_the_trace() -> None:
    found = budget(host_time({HostRow.MATMUL: 8_000, HostRow.PYTHON: 4_000}), None)
    assert found.wall_ns == 12_000
    assert all(row.low_ns is None for row in found.rows)
    assert any("under the profiler" in note for note in found.notes)


TIMES = st.dictionaries(st.sampled_from(HostRow), st.integers(0, 10**12), min_size=1)
MAYBE_TIME = st.one_of(st.just(NONE), st.integers(-(10**6), 10**12))


@given(
    rows=TIMES,
    events=st.dictionaries(st.sampled_from(HostRow), st.integers(0, 10**6)),
    labels=st.integers(0, 10**5),
    wall=st.one_of(st.none(), st.integers(1, 10**13)),
    cost=st.sampled_from([NONE, COST, replace(COST, operator_ns=FREE, inner_ns=FREE)]),
    roofline=st.one_of(st.just(NONE), TIMES),
    waiting=MAYBE_TIME,
    profiled_waiting=MAYBE_TIME,
)
def test_rows_sum_to_the_wall_time_and_none_is_negative(
    rows: dict[HostRow, int],
    events: dict[HostRow, int],
    labels: int,
    wall: int | None,
    cost: Maybe[ProfilerCost],
    roofline: Maybe[dict[HostRow, int]],
    waiting: Maybe[int],
    profiled_waiting: Maybe[int],
) -> None:
    found = budget(host_time(rows, events, labels), wall, cost, roofline, waiting, profiled_waiting)
    assert sum(row.ns for row in found.rows) == found.wall_ns
    assert min((row.ns for row in found.rows), default=0) >= 0
    for row in found.rows:
        assert (row.low_ns is None) == (row.high_ns is None)
        if row.low_ns is not None and row.high_ns is not None:
            assert 0 <= row.low_ns <= row.ns <= row.high_ns


@pytest.mark.parametrize(
    ("name", "leaf", "around_others"),
    [
        ("aten::addmm", HostRow.MATMUL, HostRow.MATMUL),
        ("aten::linear", HostRow.MATMUL, HostRow.FRAMEWORK),
        ("mkldnn::_linear_pointwise", HostRow.MATMUL, HostRow.MATMUL),
        ("aten::_weight_int8pack_mm", HostRow.MATMUL, HostRow.MATMUL),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", HostRow.ATTENTION, HostRow.ATTENTION),
        ("aten::scaled_dot_product_attention", HostRow.ATTENTION, HostRow.FRAMEWORK),
        ("aten::silu", HostRow.ELEMENTWISE, HostRow.FRAMEWORK),
        ("aten::cat", HostRow.MEMORY, HostRow.MEMORY),
        ("aten::view", HostRow.FRAMEWORK, HostRow.FRAMEWORK),
        ("## Call CompiledFxGraph fabc ##", HostRow.COMPILED, HostRow.COMPILED),
        ("Torch-Compiled Region: 0/0", HostRow.FRAMEWORK, HostRow.FRAMEWORK),
    ],
)
def test_operators_are_classified_by_name(name: str, leaf: HostRow, around_others: HostRow) -> None:
    assert (row_of(name, False), row_of(name, True)) == (leaf, around_others)

"""A budget sums to the wall time, to the nanosecond, and says what does not fit."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.analysis.budget import BudgetFacts, BudgetKey, stage_budget
from llm_perf_opt.analysis.stats import apportion
from llm_perf_opt.analysis.trace.idle import IdleCause
from llm_perf_opt.core.records import Missing

FACTS = BudgetFacts(
    stage="decode",
    units=4,
    wall_ns=1000,
    wall_source="the unprofiled pass",
    unprofiled=True,
    trace_wall_ns=4000,
    span_ns=3900,
    busy_ns=300,
    compute_ns=280,
    idle={IdleCause.LAUNCH_BOUND: 2000, IdleCause.SYNC: 600, IdleCause.HOST_BETWEEN_STEPS: 700, IdleCause.COPY_WAIT: 300},
    roofline_ns=100,
    counted_ns=150,
    counted_share=1.0,
)
BIG = st.integers(0, 10**13)


def test_every_row_by_hand() -> None:
    """Idle is 700 unprofiled; the trace idled for 3,600 inside its window and 100 outside it: 2000, 600, 800 and 300 of 3,700."""
    budget = stage_budget(FACTS)
    assert {row.key: row.ns for row in budget.rows} == {
        BudgetKey.ROOFLINE: 100,
        BudgetKey.EXTRA_WORK: 50,
        BudgetKey.ABOVE_ROOFLINE: 130,
        BudgetKey.EXPOSED: 20 + 57,  # 300/3700 of 700 is 56.76
        BudgetKey.LAUNCH: 378,  # 378.38
        BudgetKey.SYNC: 114,  # 113.51
        BudgetKey.HOST: 151,  # 151.35
    }
    assert sum(row.ns for row in budget.rows) == 1000
    assert not budget.problems


@given(
    wall=BIG,
    busy=BIG,
    compute=BIG,
    floor=st.none() | BIG,
    counted=st.none() | BIG,
    idle=st.lists(BIG, min_size=len(IdleCause), max_size=len(IdleCause)),
    span=BIG,
    label=BIG,
)
def test_rows_sum_to_the_wall_time_whatever_comes(
    wall: int, busy: int, compute: int, floor: int | None, counted: int | None, idle: list[int], span: int, label: int
) -> None:
    compute = min(busy, compute)
    budget = stage_budget(
        replace(
            FACTS,
            wall_ns=wall,
            busy_ns=busy,
            compute_ns=compute,
            roofline_ns=Missing("none") if floor is None else floor,
            counted_ns=Missing("none") if counted is None else counted,
            idle=dict(zip(IdleCause, idle, strict=True)),
            span_ns=span,
            trace_wall_ns=label,
        )
    )
    assert sum(row.ns for row in budget.rows) == wall
    below_zero = {row.key for row in budget.rows if row.ns < 0}
    named = {problem.id for problem in budget.problems}
    assert (BudgetKey.DISAGREEMENT in below_zero) == ("busy_over_wall" in named) == (busy > wall)
    assert (BudgetKey.ABOVE_ROOFLINE in below_zero) == ("kernels_under_floor" in named)


def test_busy_beyond_the_wall_time_is_named_not_clipped() -> None:
    budget = stage_budget(replace(FACTS, wall_ns=250))
    assert budget.ns(BudgetKey.DISAGREEMENT) == -50
    assert [problem.id for problem in budget.problems] == ["busy_over_wall"]
    assert sum(row.ns for row in budget.rows) == 250


def test_without_a_cost_model_all_kernels_are_in_one_row_with_a_note() -> None:
    budget = stage_budget(replace(FACTS, roofline_ns=Missing("an unknown architecture")))
    assert budget.ns(BudgetKey.ABOVE_ROOFLINE) == 280
    assert any("an unknown architecture" in note for note in budget.notes)


def test_without_counters_extra_work_is_included_with_a_note() -> None:
    budget = stage_budget(replace(FACTS, counted_ns=Missing("no ncu here")))
    assert budget.ns(BudgetKey.ABOVE_ROOFLINE) == 180
    assert any("no ncu here" in note for note in budget.notes)


def test_counters_that_find_no_extra_work_are_worth_a_row() -> None:
    found = stage_budget(replace(FACTS, counted_ns=FACTS.roofline_ns))
    assert [row.ns for row in found.rows if row.key is BudgetKey.EXTRA_WORK] == [0]


def test_a_trace_that_never_idled_leaves_the_rest_to_the_host() -> None:
    budget = stage_budget(replace(FACTS, idle={}, trace_wall_ns=300, span_ns=300))
    assert budget.ns(BudgetKey.HOST) == 700


@given(total=BIG, weights=st.lists(BIG, min_size=1, max_size=9).filter(any))
def test_shares_are_whole_exact_and_within_one_of_their_proportion(total: int, weights: list[int]) -> None:
    shares = apportion(total, weights)
    assert sum(shares) == total
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share * sum(weights) - total * weight) < sum(weights)


def test_no_weights_no_shares() -> None:
    with pytest.raises(ValueError, match="no weight"):
        apportion(5, [0, 0])


def test_what_the_traced_pass_changed_in_an_engine_is_no_host_time() -> None:
    """1,000 of the trace do not count: all of the host's 800, then 200 of the 600 of sync. 2000, 400 and 300 are left."""
    changed = stage_budget(replace(FACTS, changed_ns=1000))
    assert (changed.ns(BudgetKey.HOST), changed.ns(BudgetKey.SYNC)) == (0, 104)  # 400/2700 of 700 is 103.70
    assert sum(row.ns for row in changed.rows) == 1000
    assert len(changed.notes) == len(stage_budget(FACTS).notes) + 1
    unknown = stage_budget(replace(FACTS, changed_ns=10**6, idle={}))
    assert (unknown.ns(BudgetKey.HOST), unknown.ns(BudgetKey.UNEXPLAINED)) == (0, 700), "no cause is left, and none is made up"
    profiled = replace(FACTS, unprofiled=False)
    assert stage_budget(replace(profiled, changed_ns=1000)).rows == stage_budget(profiled).rows, "a time with the changes"


def test_changes_beyond_the_host_time_come_off_the_launch_gaps_and_then_off_what_is_unexplained() -> None:
    """3,350 are all of host (800), sync (600) and launch gaps (2,000 less 50); 50 and the 300 of copies are left."""
    changed = stage_budget(replace(FACTS, changed_ns=3350))
    assert {key: changed.ns(key) for key in (BudgetKey.HOST, BudgetKey.SYNC, BudgetKey.LAUNCH)} == {
        BudgetKey.HOST: 0,
        BudgetKey.SYNC: 0,
        BudgetKey.LAUNCH: 50,
    }
    assert changed.ns(BudgetKey.EXPOSED) == 20 + 300
    assert changed.ns(BudgetKey.UNEXPLAINED) == 350, "no row is longer than in the trace"
    assert sum(row.ns for row in changed.rows) == 1000


def test_the_note_states_what_was_taken_off() -> None:
    idle = {IdleCause.LAUNCH_BOUND: 2000, IdleCause.UNKNOWN: 500}
    facts = replace(FACTS, idle=idle, changed_ns=5000)  # 2,000 + 500 + 100 outside the span
    note = next(note for note in stage_budget(facts).notes if "changed the engine" in note)
    assert "2.600 µs do not count" in note
    assert "adds 5.000 µs" in note


def test_what_changes_shorten_is_a_row_of_its_own_and_only_the_rest_is_divided() -> None:
    """Of the 700 of idle time 300 are not in the trace. 2000, 600, 800 and 300 of 3,700 divide 400."""
    changed = stage_budget(replace(FACTS, changed_ns=-300))
    assert changed.ns(BudgetKey.UNCHANGED) == 300, "an unprofiled difference is not scaled by the profiler's weights"
    idle = (BudgetKey.LAUNCH, BudgetKey.SYNC, BudgetKey.HOST, BudgetKey.EXPOSED)
    assert [changed.ns(key) for key in idle] == [216, 65, 87, 20 + 32]
    assert sum(row.ns for row in changed.rows) == 1000
    assert any("300 ns" in note and "users run it" in note for note in changed.notes)
    assert "400 ns" in changed.notes[-1], "only the rest is divided in the proportions of the trace"


def test_changes_that_shorten_a_stage_by_more_than_its_idle_time_leave_nothing_to_divide() -> None:
    changed = stage_budget(replace(FACTS, changed_ns=-1000))
    assert (changed.ns(BudgetKey.UNCHANGED), changed.ns(BudgetKey.LAUNCH), changed.ns(BudgetKey.HOST)) == (700, 0, 0)
    assert sum(row.ns for row in changed.rows) == 1000
    assert not any("proportions" in note for note in changed.notes)
    assert any("1.000 µs" in note for note in changed.notes)


def test_idle_time_beyond_that_of_the_trace_is_noted() -> None:
    """The 350 that the trace does not explain have a note, and only the other 350 are divided."""
    notes = stage_budget(replace(FACTS, changed_ns=3350)).notes
    assert sum("350 ns" in note for note in notes) == 2
    assert "no known cause" in notes[-2]
    assert "The other 350 ns" in notes[-1]
    nothing = stage_budget(replace(FACTS, changed_ns=10**6, idle={})).notes
    assert not any("proportions" in note for note in nothing)


def test_changes_without_a_spread_may_be_noise() -> None:
    for changed in (300, -300):
        known, unknown = (stage_budget(replace(FACTS, changed_ns=changed, changed_spread=spread)) for spread in (True, False))
        assert known.rows == unknown.rows
        assert [any("noise" in note for note in budget.notes) for budget in (known, unknown)] == [False, True]


@given(wall=BIG, busy=BIG, changed=st.integers(-(10**13), 10**13), idle=st.lists(BIG, min_size=8, max_size=8), label=BIG)
def test_rows_sum_to_the_wall_time_whatever_the_changes_cost(
    wall: int, busy: int, changed: int, idle: list[int], label: int
) -> None:
    causes = dict(zip(IdleCause, idle, strict=True))
    facts = replace(FACTS, wall_ns=wall, busy_ns=busy, changed_ns=changed, idle=causes, trace_wall_ns=label)
    assert sum(row.ns for row in stage_budget(facts).rows) == wall

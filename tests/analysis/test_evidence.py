"""Evidence of a run: unprofiled time and roofline time of as many steps, kernels of the trace."""

from pathlib import Path

import pytest

from builders import MS, clean_timings, in_a_row
from llm_perf_opt.analysis.budget import BudgetKey
from llm_perf_opt.analysis.evidence import Evidence, RunFacts, gather
from llm_perf_opt.analysis.findings.host import launch_bound_decode
from llm_perf_opt.analysis.findings.registry import find
from llm_perf_opt.analysis.trace.accounting import account
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.traces.events import WorkKind
from llm_perf_opt.traces.torch_json.trace import read_torch_trace
from trace_builders import Builder

TRACE = Path(__file__).parents[1] / "fixtures" / "h200" / "torch_trace.json.gz"


def given(facts: RunFacts) -> Evidence:
    trace = read_torch_trace(TRACE)
    stages = find_stages(trace)
    return gather(trace, stages, account(trace, stages), facts)


def test_the_wall_time_is_that_of_as_many_unprofiled_steps() -> None:
    """The trace contains eight steps; the unprofiled pass has ten of 4.37 ms, as measured on that card."""
    timings = clean_timings(in_a_row(10, 5 * MS, [4_370_000] * 10))
    found = given(RunFacts(timings=timings))
    decode = found.stage("decode")
    assert decode is not None
    assert decode.units == 8
    assert decode.budget.wall_ns == 8 * 4_370_000
    assert sum(row.ns for row in decode.budget.rows) == 8 * 4_370_000
    first = find(found)[0]
    assert first.id == "launch_bound_decode"
    savings = (first.saving_low_ns or 0, first.saving_ns or 0, first.saving_high_ns or 0)
    assert 3_500_000 < savings[0] < savings[1] < savings[2] < 4_000_000
    assert first.units == 10
    assert decode.request_units == 10
    assert "over the first 8 of 10 steps" in first.claim


def test_the_wall_time_is_known_within_the_interval_of_the_same_steps() -> None:
    repeats = [one for step in range(4, 14) for one in in_a_row(1, 5 * MS, [step * MS] * 10)]
    decode = given(RunFacts(timings=clean_timings(repeats))).stage("decode")
    assert decode is not None
    assert decode.least_wall_ns == 8 * 5 * MS
    assert decode.wall_ends_ns == (8 * 5 * MS, 8 * 12 * MS), "the second and the ninth of ten"


@pytest.mark.parametrize(
    ("later_ms", "said"),
    [(5, ""), (30, "; the first 8 of 10 decode steps take 5.000 ms each, all 10 steps 10.00 ms on average")],
)
def test_the_source_of_the_wall_time_says_if_other_steps_take_another_time(later_ms: int, said: str) -> None:
    timings = clean_timings(in_a_row(10, 5 * MS, [5 * MS] * 8 + [later_ms * MS] * 2))
    decode = given(RunFacts(timings=timings)).stage("decode")
    assert decode is not None
    assert decode.budget.wall_source == f"the unprofiled pass, median of 10 repeats{said}"


def test_a_pass_shorter_than_the_trace_cannot_lend_its_time() -> None:
    decode = given(RunFacts(timings=clean_timings(in_a_row(10, 5 * MS, [MS] * 3)))).stage("decode")
    assert decode is not None
    assert not decode.unprofiled
    assert "3 decode steps, not 8" in decode.budget.wall_source


@pytest.mark.parametrize("key", ["runtime.cache", "runtime", "nothing.at.all"])
def test_settings_that_are_not_there_are_none(key: str) -> None:
    assert RunFacts().setting(key) is None


@pytest.mark.parametrize(
    ("copy", "inner"), [("Memcpy DtoD (Device -> Device)", True), ("Memcpy HtoD (Pageable -> Device)", False)]
)
def test_copies_within_the_device_do_not_stay_in_a_graph(copy: str, inner: bool) -> None:
    """A step of one kernel of 100 ns, a copy of 50 ns that the device waits 250 ns for, and another kernel 600 ns later."""
    made = Builder()
    made.range(0, 1100, "decode")
    made.range(0, 1100, "decode_step")
    made.launch(10, 100, 200, "nvjet_sm90")
    made.launch(300, 450, 500, copy, kind=WorkKind.MEMCPY, grid=0, block=0)
    made.launch(900, 1000, 1100, "nvjet_sm90")
    trace = made.trace()
    stages = find_stages(trace)
    found = gather(trace, stages, account(trace, stages), RunFacts())
    decode = found.stage("decode")
    assert decode is not None
    exposed = decode.budget.ns(BudgetKey.EXPOSED)
    assert exposed == 50 + 250, "the copy, and waiting for it"
    assert decode.inner_copy_ns == (exposed if inner else 0)
    predicted = launch_bound_decode(found)
    assert predicted is not None
    assert predicted.after_low_ns == 2 * 100 + (50 if inner else exposed), "it is fused, or it stays with its waiting"

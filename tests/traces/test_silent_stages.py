"""Stages without work: lost by the recording, or never there."""

from pathlib import Path

import numpy as np
import pytest

from llm_perf_opt.analysis.evidence import RunFacts, gather
from llm_perf_opt.analysis.trace.accounting import account
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.traces.events import Trace
from llm_perf_opt.traces.health import Expected, examined, trace_problems
from llm_perf_opt.traces.nsys_sqlite import read_nsys
from llm_perf_opt.traces.torch_json.trace import read_torch_trace
from nsys_databases import DECODE, FIXTURES, altered
from trace_builders import Builder

OURS = Expected(gpu=True, ranges=("prefill", "decode_step"))


def real_without(to: Path, first: float, last: float) -> Trace:
    """Return the recording of eight steps without the calls that begin between two of them (2.5: half-way into the third)."""
    spans = sorted((int(start), int(end)) for start, end in _step_spans())
    start, end = (_at(spans, place) for place in (first, last))
    lost = f"SELECT correlationId FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE start BETWEEN {start} AND {end}"
    tables = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMSET", "CUPTI_ACTIVITY_KIND_RUNTIME")
    return read_nsys(altered(to, [f"DELETE FROM {table} WHERE correlationId IN ({lost})" for table in tables]))


def _step_spans() -> list[tuple[int, int]]:
    trace = read_nsys(DECODE)
    rows = np.flatnonzero(trace.ranges.name == trace.names.index("decode_step"))
    return list(zip(trace.ranges.start_ns[rows].tolist(), trace.ranges.end_ns[rows].tolist(), strict=True))


def _at(spans: list[tuple[int, int]], place: float) -> int:
    if place >= len(spans):
        return 2**60
    start, end = spans[int(place)]
    return start + int((place - int(place)) * (end - start))


def fatal(trace: Trace, expected: Expected | None = None) -> list[str]:
    return [problem.id for problem in trace_problems(trace, expected) if problem.fatal]


@pytest.mark.parametrize(
    ("first", "last", "found"),
    [
        (2, 6, "ranges_without_kernels"),  # in the middle
        (6.5, 8, "ranges_without_kernels"),  # from within a step to the end
        (6.99, 8, "ranges_without_kernels"),
        (7, 8, "ranges_without_kernels"),  # the last one, whole
        (7.1, 8, "ended_inside_a_step"),  # the last one, most of it
    ],
)
def test_a_real_recording_that_lost_steps_carries_no_numbers(tmp_path: Path, first: float, last: float, found: str) -> None:
    trace = real_without(tmp_path / "cut.sqlite", first, last)
    assert found in fatal(trace)
    assert not examined(trace).complete


def test_the_real_recordings_are_complete() -> None:
    for trace in (read_nsys(DECODE), read_torch_trace(FIXTURES / "torch_trace.json.gz")):
        assert fatal(trace) == []
        assert fatal(trace, Expected(gpu=True, ranges=("decode_step",))) == []


def steps(count: int, without: tuple[int, ...] = (), prefill: bool = True) -> Builder:
    """A prefill and this many steps of four kernels, some of them without kernels."""
    made = Builder()
    made.range(-1000, -100, "prefill")
    if prefill:
        made.launch(-900, -800, -700)
    made.range(0, 1000 * count, "decode")
    for step in range(count):
        made.range(1000 * step, 1000 * step + 900, "decode_step")
        for kernel in range(0 if step in without else 4):
            at = 1000 * step + 100 * kernel
            made.launch(at + 10, at + 40, at + 90)
    return made


def test_our_own_runner_launches_in_every_stage() -> None:
    quick = steps(4)
    quick.range(4000, 4010, "decode_step")  # too short to be told from a label without work, were it not ours
    for made in (steps(4, prefill=False), quick):
        assert fatal(made.trace()) == []
        assert fatal(made.trace(), OURS) == ["ranges_without_kernels"]
    assert fatal(steps(4, prefill=False).trace(), Expected(gpu=True, ranges=("decode_step",))) == []


@pytest.mark.parametrize(("length", "lost"), [(100, False), (400, False), (500, True), (5000, True)])
def test_a_silent_step_as_long_as_those_with_work_was_lost(length: int, lost: bool) -> None:
    made = steps(4)
    made.range(4000, 4000 + length, "decode_step")
    made.launch(20_000, 20_010, 20_020)  # recording went on
    assert fatal(made.trace()) == (["ranges_without_kernels"] if lost else [])


@pytest.mark.parametrize(("silent", "lost"), [((0,), False), ((0, 1), True), ((1,), True)])
def test_calls_may_come_one_step_later_than_labels(silent: tuple[int, ...], lost: bool) -> None:
    """As in a trace that was started while the program was running."""
    made = steps(6, without=silent)
    made.ranges = [row for row in made.ranges if row[0] >= 0]
    made.work = [row for row in made.work if row[0] >= 0]
    made.calls = [row for row in made.calls if row[0] >= 0]
    assert fatal(made.trace()) == (["ranges_without_kernels"] if lost else [])


def test_a_last_step_with_few_kernels_is_no_loss_where_calls_follow() -> None:
    made = steps(4)
    made.range(4000, 4900, "decode_step")
    made.launch(4010, 4020, 4030)
    assert fatal(made.trace()) == ["ended_inside_a_step"]
    made.call(4880, 4890, "cudaDeviceSynchronize", correlation=999)
    assert fatal(made.trace()) == []


@pytest.mark.parametrize(
    ("silent", "until", "lost"), [((7,), 7890, False), ((7,), 7300, True), ((3,), 3890, True), ((6, 7), 7890, True)]
)
def test_a_last_step_that_only_waits_was_launched_a_step_ahead(silent: tuple[int, ...], until: int, lost: bool) -> None:
    """As in engines that schedule while the device works: calls reach the end of a step that launches nothing."""
    made = steps(8, without=silent)
    made.call(1000 * silent[-1] + 10, until, "cudaEventSynchronize", correlation=999)
    for expected in (None, OURS):
        assert fatal(made.trace(), expected) == (["ranges_without_kernels"] if lost else [])
    told = [problem.what for problem in trace_problems(made.trace()) if problem.id == "launched_ahead"]
    assert told == (
        [] if lost and silent != (6, 7) else ["1 of 8 decode_step, the last, only waits: its work was launched one step ahead"]
    )


def test_a_unit_without_work_is_in_no_figure_per_unit() -> None:
    """Neither among the tokens nor in the time that is divided by them."""

    def decode(made: Builder) -> tuple[int, int]:
        trace = made.trace()
        stages = find_stages(trace)
        found = gather(trace, stages, account(trace, stages), RunFacts()).stage("decode")
        assert found is not None
        assert sum(row.ns for row in found.budget.rows) == found.budget.wall_ns
        return found.units, found.budget.wall_ns

    made = steps(4)
    whole = decode(made)
    made.ranges = [row for row in made.ranges if row[:2] != (0, 4000)]
    made.range(0, 4400, "decode")
    made.range(4000, 4400, "decode_step")
    assert whole == (4, 4000)
    assert decode(made) == (4, 4000)

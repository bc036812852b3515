"""Device time: traces of known truth, real traces, and properties of all traces."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.analysis.trace.accounting import Account, DeviceTime, StageTime, account
from llm_perf_opt.analysis.trace.idle import IdleCause
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.traces.events import Ranges, Trace, WorkKind
from llm_perf_opt.traces.nsys_sqlite import read_nsys
from llm_perf_opt.traces.torch_json.trace import read_torch_trace
from synthetic_traces import Recipe, write_trace
from trace_builders import Builder

FIXTURES = Path(__file__).parents[2] / "fixtures" / "h200"


def accounted(trace: Trace, device: int | None = None) -> Account:
    return account(trace, find_stages(trace), device)


def stage(found: Account, name: str) -> Any:
    return next(one for one in found.stages if one.name == name)


# --- known truth ------------------------------------------------------------------------------------------------------

RECIPES = [
    Recipe(),
    Recipe(graph=True, seed=1),
    Recipe(streams=3, seed=2),
    Recipe(copies=True, seed=3),
    Recipe(steps=40, kernels_per_step=35, graph=True, streams=2, copies=True, seed=4),
    Recipe(devices=2, streams=2, seed=5),
    Recipe(devices=3, graph=True, copies=True, seed=6),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_trace_of_known_truth(recipe: Recipe, tmp_path: Path) -> None:
    truth = write_trace(tmp_path / "trace.json", recipe)
    found = accounted(read_torch_trace(tmp_path / "trace.json"))
    total = found.total
    assert (total.span_ns, total.busy_ns, total.idle_ns) == (truth.span_ns, truth.busy_ns, truth.idle_ns)
    assert (total.kernels.count, total.kernels.sum_ns) == (truth.kernels, truth.kernel_ns)
    assert (total.copies.count, total.copies.sum_ns) == (truth.copies, truth.copy_ns)
    assert (total.memsets.count, total.memsets.sum_ns) == (truth.memsets, truth.memset_ns)
    assert sum(total.idle.values()) == total.idle_ns
    assert [(int(low), int(high)) for low, high in zip(found.gaps.start_ns, found.gaps.end_ns, strict=True)] == [
        (low, high) for low, high, _ in truth.gaps()
    ]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_stages_and_steps_of_a_trace_of_known_truth(recipe: Recipe, tmp_path: Path) -> None:
    truth = write_trace(tmp_path / "trace.json", recipe)
    found = accounted(read_torch_trace(tmp_path / "trace.json"))
    steps = [one for one in truth.stages if one.name == "decode_step"]
    transfers = 2 if recipe.copies else 0  # the truth counts the calls of a copy and a memset as launches too
    for known in truth.stages[:2]:
        mine = stage(found, known.name)
        assert (mine.count, mine.wall_ns) == (1, known.wall_ns)
        assert (mine.span_ns, mine.busy_ns, mine.idle_ns) == (known.span_ns, known.busy_ns, known.idle_ns)
        assert (mine.kernels, mine.kernel_ns) == (known.kernels, known.kernel_ns)
        assert mine.launches == known.launches - transfers * (len(steps) if known.name == "decode" else 1)
    every = stage(found, "decode_step")
    assert (every.count, every.wall_ns) == (len(steps), sum(one.wall_ns for one in steps))
    assert (every.busy_ns, every.idle_ns) == (sum(one.busy_ns for one in steps), sum(one.idle_ns for one in steps))
    assert found.steps is not None
    assert found.steps.wall_ns.tolist() == [one.wall_ns for one in steps]
    assert found.steps.kernels.tolist() == [one.kernels for one in steps]
    assert found.steps.kernel_ns.tolist() == [one.kernel_ns for one in steps]
    assert found.steps.launches.tolist() == [one.launches - transfers for one in steps]
    first = min(start for start, _ in steps[0].work)
    assert found.steps.start_ns[0] == first
    assert int((found.steps.end_ns - found.steps.start_ns).sum()) == max(end for _, end in steps[-1].work) - first, (
        "no time is lost"
    )


def test_launch_gaps_of_a_known_truth_are_called_so(tmp_path: Path) -> None:
    truth = write_trace(tmp_path / "trace.json", Recipe(seed=5))
    found = accounted(read_torch_trace(tmp_path / "trace.json"))
    late = [is_late for _, _, is_late in truth.gaps()]
    host = [cause in (IdleCause.LAUNCH_BOUND, IdleCause.HOST_BETWEEN_STEPS) for cause in found.gaps.cause]
    assert all(named for named, is_late in zip(host, late, strict=True) if is_late)


# --- real traces ------------------------------------------------------------------------------------------------------


def test_a_real_torch_trace() -> None:
    found = accounted(read_torch_trace(FIXTURES / "torch_trace.json.gz"))
    assert (found.total.kernels.count, found.total.kernels.sum_ns) == (1711, 5_521_227)
    assert (found.total.busy_ns, found.total.idle_ns, found.total.span_ns) == (5_538_539, 78_277_784, 83_816_323)
    assert found.devices == (replace(found.total, device=0),)
    assert [(one.name, one.count, one.kernels, one.launches) for one in found.stages] == [
        ("profile", 1, 1711, 1711),
        ("prefill", 1, 183, 183),
        ("decode", 1, 1528, 1528),
        ("decode_step", 8, 1528, 1528),
    ]
    assert [one.wall_ns for one in found.stages[:3]] == [84_700_812, 11_767_040, 72_700_493]
    launch = found.total.idle[IdleCause.LAUNCH_BOUND]
    assert launch > 0.9 * found.total.idle_ns, "an eager decode waits for its launches"
    assert found.total.idle[IdleCause.SYNC] == 0, "it synchronizes before and after, not within"
    assert found.steps is not None
    assert found.steps.kernels.tolist() == [191] * 8


def test_the_same_trace_without_its_labels_has_the_same_stages() -> None:
    labeled = read_torch_trace(FIXTURES / "torch_trace.json.gz")
    bare = replace(labeled, ranges=Ranges.none())
    known, found = accounted(labeled), accounted(bare)
    assert find_stages(bare).method == "kernel sequence"
    for name in ("prefill", "decode", "decode_step"):
        mine, theirs = stage(found, name), stage(known, name)
        assert replace(mine, wall_ns=0) == replace(theirs, wall_ns=0)


def test_a_real_nsys_report() -> None:
    found = accounted(read_nsys(FIXTURES / "nsys_decode.sqlite.gz"))
    assert found.total.kernels.count == 1528
    assert round(found.total.kernels.sum_ns / 1e6, 3) == 4.651
    assert found.total.busy_ns + found.total.idle_ns == found.total.span_ns
    assert sum(found.total.idle.values()) == found.total.idle_ns
    assert found.total.idle[IdleCause.LAUNCH_BOUND] > 0.9 * found.total.idle_ns
    assert found.steps is not None
    assert found.steps.kernels.tolist() == [191] * 8


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_overlap_and_exposed_copies() -> None:
    #  kernels  0....10      15..20          copies      8.......18       memset 25.26
    built = Builder()
    built.launch(0, 100, 110)
    built.launch(1, 115, 120)
    built.launch(2, 108, 118, "Memcpy HtoD", stream=9, kind=WorkKind.MEMCPY)
    built.launch(3, 125, 126, "Memset", kind=WorkKind.MEMSET)
    total = accounted(built.trace()).total
    assert (total.span_ns, total.busy_ns, total.idle_ns) == (26, 21, 5)
    assert total.kernels.sum_ns + total.copies.sum_ns + total.memsets.sum_ns == 10 + 5 + 10 + 1
    assert total.busy_ns - total.kernels.union_ns == 21 - 15, "from 110 to 115 and the memset"


def test_devices_are_reported_separately_and_together() -> None:
    built = Builder()
    built.launch(0, 10, 20, device=0)
    built.launch(1, 15, 30, device=1)
    built.launch(2, 40, 50, device=0)
    found = accounted(built.trace())
    assert (found.total.busy_ns, found.total.span_ns) == (30, 40), "at least one was busy"
    assert [(one.device, one.busy_ns, one.idle_ns) for one in found.devices] == [(0, 20, 20), (1, 15, 0)]
    alone = accounted(built.trace(), device=1)
    assert (alone.total.busy_ns, alone.total.span_ns) == (15, 15)


def test_a_stage_owns_what_it_launched_whenever_it_ran() -> None:
    built = Builder()
    built.range(0, 10, "prefill")
    built.range(10, 20, "decode")
    built.launch(5, 12, 40)  # runs while the host is in decode, and long after
    built.launch(15, 41, 45)
    found = accounted(built.trace())
    assert (stage(found, "prefill").busy_ns, stage(found, "prefill").wall_ns) == (28, 10)
    assert stage(found, "decode").busy_ns == 4


def test_instances_of_a_stage_are_added_and_the_time_between_them_is_not_theirs() -> None:
    built = Builder()
    for begin in (0, 1000):
        built.range(begin, begin + 100, "prefill")
        built.launch(begin + 10, begin + 20, begin + 30)
        built.launch(begin + 35, begin + 40, begin + 50)
    found = stage(accounted(built.trace()), "prefill")
    assert (found.count, found.span_ns, found.busy_ns, found.idle_ns) == (2, 60, 40, 20)


def test_the_step_that_ends_a_decode_does_not_reach_into_the_next_one() -> None:
    built = Builder()
    for begin in (0, 1000):
        built.range(begin, begin + 200, "decode")
        for step in (begin, begin + 100):
            built.range(step, step + 90, "decode_step")
            built.launch(step + 10, step + 20, step + 30)
    steps = accounted(built.trace()).steps
    assert steps is not None
    assert list(zip(steps.start_ns.tolist(), steps.end_ns.tolist(), strict=True)) == [
        (20, 120),
        (120, 130),
        (1020, 1120),
        (1120, 1130),
    ]
    assert steps.idle[IdleCause.HOST_BETWEEN_STEPS].tolist() == [90, 0, 90, 0]


def test_a_trace_without_device_work_has_no_time() -> None:
    built = Builder()
    built.range(0, 10, "prefill")
    found = accounted(built.trace())
    assert (found.total.span_ns, found.total.busy_ns, found.total.idle_ns) == (0, 0, 0)
    assert (stage(found, "prefill").count, stage(found, "prefill").wall_ns, stage(found, "prefill").kernels) == (1, 10, 0)
    assert found.devices == ()
    assert accounted(Builder().trace()).steps is None


# --- properties -------------------------------------------------------------------------------------------------------

STEP = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60), st.integers(7, 9), st.integers(0, 1)), max_size=5)
"""Launches of a step: (host time before, device time, stream, device)."""


@given(st.lists(STEP, min_size=1, max_size=6))
def test_busy_and_idle_make_the_span_everywhere(steps: list[list[tuple[int, int, int, int]]]) -> None:
    built = Builder()
    now, free = 0, dict.fromkeys([7, 8, 9], 0)
    for launches in steps:
        begin = now
        for pause, length, stream, device in launches:
            now += pause
            start = max(now + 3, free[stream])
            free[stream] = start + length
            built.launch(now, start, start + length, stream=stream, device=device)
        built.range(begin, now + 2, "decode_step")
        now += 5
    built.range(0, now, "decode")
    trace = built.trace()
    found = accounted(trace)
    every: list[DeviceTime | StageTime] = [found.total, *found.devices, *found.stages]
    for one in every:
        assert one.busy_ns + one.idle_ns == one.span_ns
        assert sum(one.idle.values()) == one.idle_ns
    assert found.steps is not None
    assert (found.steps.busy_ns + found.steps.idle_ns == found.steps.end_ns - found.steps.start_ns).all()
    assert (found.steps.busy_ns >= 0).all()
    if len(found.steps):
        whole = int(found.steps.end_ns[-1] - found.steps.start_ns[0])
        assert int((found.steps.busy_ns + found.steps.idle_ns).sum()) == whole
    assert int(found.steps.kernel_ns.sum()) == found.total.kernels.sum_ns
    assert np.array_equal(found.steps.launches, found.steps.kernels), "one launch call per kernel"

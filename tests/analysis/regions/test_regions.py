"""NVTX regions: sums, unions, filters, counters, and that the table adds up to the trace."""

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_fixtures import launch
from llm_perf_opt.analysis.regions.counters import CountedStage, how_combined
from llm_perf_opt.analysis.regions.records import KernelTime, Region, RegionGroup, RegionReport, Rest, Selection
from llm_perf_opt.analysis.regions.regions import MOST_REGIONS, RegionOptions, regions
from llm_perf_opt.analysis.trace.intervals import union_ns
from llm_perf_opt.core.machine_records import CountedKernel
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.stages import Stage
from llm_perf_opt.traces.events import RangeKind, Trace, TraceProblem, WorkKind
from llm_perf_opt.traces.projection import NONE, project, step_of_work
from trace_builders import Builder


def request() -> Builder:
    """profile ⊃ prefill (gemm 100), decode (copy 30) ⊃ 2 steps (gemm 10 ‖ norm 10, overlapping by 5); gemm 7 outside."""
    made = Builder()
    made.range(100, 1000, "profile")
    made.range(110, 300, "prefill")
    made.range(310, 990, "decode")
    made.launch(50, 60, 67, "gemm", grid=8)
    made.launch(120, 130, 230, "gemm", grid=64)
    made.launch(315, 400, 430, "[CUDA memcpy HtoD]", kind=WorkKind.MEMCPY, size=64)
    for step in range(2):
        at = 500 + 200 * step
        made.range(at, at + 150, "decode_step")
        made.launch(at + 1, at + 20, at + 30, "gemm", grid=8)
        made.launch(at + 3, at + 25, at + 35, "norm", stream=8)
    return made


def only(report: RegionReport) -> RegionGroup:
    assert len(report.groups) == 1
    return report.groups[0]


def by_path(group: RegionGroup) -> dict[str, Region]:
    return {"/".join(label.removeprefix("LLM@") for label in region.path): region for region in group.regions}


def test_the_figures_of_a_small_request() -> None:
    group = only(regions(request().trace()))
    found = by_path(group)
    assert list(found) == ["profile", "profile/prefill", "profile/decode", "profile/decode/decode_step"]
    profile, decode, step = found["profile"], found["profile/decode"], found["profile/decode/decode_step"]
    assert (profile.instances, profile.wall_ns, profile.kernels, profile.kernel_ns) == (1, 900, 5, 140)
    assert (profile.self_kernels, profile.self_kernel_ns, profile.launches) == (0, 0, 6)
    assert (profile.copies, profile.copy_ns) == (1, 30)
    assert profile.busy_ns == 100 + 30 + 2 * 15
    assert (decode.kernel_ns, decode.self_kernel_ns, decode.busy_ns, decode.launches) == (40, 0, 60, 5)
    assert (step.instances, step.wall_ns, step.kernels, step.kernel_ns, step.busy_ns) == (2, 300, 4, 40, 30)
    assert profile.top == (KernelTime("gemm", 3, 120), KernelTime("norm", 2, 20))
    assert group.outside == Rest(1, 7)
    assert (group.check.trace_kernel_ns, group.check.difference_ns, group.check.reconciles) == (147, 0, True)


def test_excluded_kernels_are_listed_and_the_total_still_reconciles() -> None:
    options = RegionOptions(kernels=Selection(include=("*",), exclude=("norm",)))
    group = only(regions(request().trace(), options))
    assert group.excluded == (KernelTime("norm", 2, 20),)
    assert by_path(group)["profile"].kernel_ns == 120
    assert by_path(group)["profile/decode/decode_step"].busy_ns == 20
    assert group.check.accounted_ns == group.check.trace_kernel_ns == 147


def test_what_is_not_included_is_excluded() -> None:
    group = only(regions(request().trace(), RegionOptions(kernels=Selection(include=("norm",)))))
    assert [entry.name for entry in group.excluded] == ["gemm"]
    assert group.check.difference_ns == 0


def test_work_of_a_region_left_out_counts_in_the_one_around_it() -> None:
    group = only(regions(request().trace(), RegionOptions(regions=Selection(exclude=("decode_step",)))))
    assert by_path(group)["profile/decode"].self_kernel_ns == 40
    assert group.left_out == Rest(0, 0)
    assert group.check.reconciles


def test_regions_by_path_and_with_none_around_them() -> None:
    group = only(regions(request().trace(), RegionOptions(regions=Selection(include=("*/decode_step", "LLM@prefill")))))
    assert list(by_path(group)) == ["profile/prefill", "profile/decode/decode_step"]
    assert group.left_out == Rest(0, 0)
    group = only(regions(request().trace(), RegionOptions(regions=Selection(include=("profile/prefill",)))))
    assert group.left_out == Rest(4, 40)
    assert group.check.difference_ns == 0


def two_of_everything() -> Trace:
    made = Builder()
    for process in (1, 2):
        made.range(0, 100, "decode", process=process, thread=process)
        for device in (0, 1):
            made.launch(10 + device, 20, 30 + process, "gemm", process=process, device=device, thread=process)
    return made.trace(facts={"pid.1": "11 python", "device.0": "GPU A"})


def test_processes_and_devices_apart_and_together() -> None:
    apart = regions(two_of_everything())
    assert [(group.process, group.device) for group in apart.groups] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert [group.regions[0].kernel_ns for group in apart.groups] == [11, 11, 12, 12]
    assert (apart.groups[0].process_name, apart.groups[0].device_name) == ("11 python", "GPU A")
    together = only(regions(two_of_everything(), RegionOptions(aggregate=True)))
    assert together.process is None
    assert together.regions[0].instances == 2
    assert together.regions[0].kernel_ns == 46
    assert together.regions[0].busy_ns == 24  # the union on each device, added


def test_a_cpu_run_has_wall_time_and_no_kernels() -> None:
    made = Builder()
    made.range(0, 100, "decode")
    group = only(regions(made.trace()))
    assert group.device is None
    assert group.regions[0].wall_ns == 100
    assert (group.check.trace_kernel_ns, group.check.reconciles) == (0, True)


def test_an_incomplete_trace_is_not_summed() -> None:
    lost = TraceProblem("events_lost", "many", fatal=True)
    report = regions(replace(request().trace(), problems=(lost,)))
    assert (report.complete, report.groups, report.problems) == (False, (), (lost,))


BYTES, PERCENT = "dram__bytes_read.sum", "sm__throughput.avg.pct_of_peak_sustained_elapsed"


def counted_in(trace: Trace, stage: Stage, *kernels: CountedKernel) -> CountedStage:
    return CountedStage(stage.value, step_of_work(trace, project(trace), stage) != NONE, kernels, {BYTES: "byte"})


def test_counters_are_joined_by_kernel_variant_with_their_coverage() -> None:
    trace = request().trace()
    counters = [
        counted_in(trace, Stage.PREFILL, launch("gemm", 64, 32, read=9000, sm=80)),
        counted_in(trace, Stage.DECODE_STEP, launch("gemm", 8, 32, read=1000, sm=40)),
    ]
    found = by_path(only(regions(trace, counters=counters)))
    total, throughput = found["profile"].counters
    assert (total.counter, total.value, total.how, total.covered_ns) == (BYTES, 11000.0, "sum", 120)
    assert (total.unit, total.by_name_ns) == ("byte", 0)
    assert throughput.value == pytest.approx((80 * 100 + 40 * 20) / 120)
    assert throughput.how == "mean by kernel time"
    assert found["profile/decode/decode_step"].counters[0].value == 2000.0


def test_counters_of_prefill_never_represent_decode() -> None:
    made = request()
    made.launch(130, 240, 250, "norm")  # in prefill, in the launch size that decode has too
    trace = made.trace()
    counters = [
        counted_in(trace, Stage.PREFILL, launch("norm", 1, 32, read=500)),
        counted_in(trace, Stage.DECODE_STEP, launch("gemm", 8, 32, read=1000)),
    ]
    found = by_path(only(regions(trace, counters=counters)))
    prefill, decode, whole = (found[path].counters[0] for path in ("profile/prefill", "profile/decode", "profile"))
    assert (prefill.value, prefill.covered_ns) == (500.0, 10)
    assert (decode.value, decode.covered_ns) == (2000.0, 20)
    assert (whole.value, whole.covered_ns) == (2500.0, 30)


def test_counters_of_launches_with_another_grid_are_marked() -> None:
    trace = request().trace()
    counters = [counted_in(trace, Stage.DECODE_STEP, launch("gemm", 4, 32, read=100))]
    value = by_path(only(regions(trace, counters=counters)))["profile/decode"].counters[0]
    assert (value.value, value.covered_ns, value.by_name_ns) == (200.0, 20, 20)


def test_a_counter_not_collected_is_missing_and_not_zero() -> None:
    options = RegionOptions(counters=("lts__t_bytes.sum",))
    value = by_path(only(regions(request().trace(), options)))["profile"].counters[0].value
    assert isinstance(value, Missing)


def test_a_counter_without_a_value_is_kept_with_a_reason() -> None:
    trace = request().trace()
    lost = launch("gemm", 8, 32, sm=40)
    lost.counters[BYTES] = Missing("the tool says n/a")
    options = RegionOptions(counters=(BYTES, "gone.sum", PERCENT))
    found = by_path(only(regions(trace, options, [counted_in(trace, Stage.DECODE_STEP, lost)])))["profile/decode"].counters
    assert [value.value for value in found] == [Missing("the tool says n/a"), Missing("the counter was not collected"), 40.0]
    assert [value.covered_ns for value in found] == [0, 0, 20]


def test_how_counters_are_combined() -> None:
    assert how_combined("dram__bytes.sum") == "sum"
    assert how_combined("dram__bytes.sum.per_second") == "mean by kernel time"
    assert how_combined("launch__registers_per_thread") == "mean by kernel time"
    assert how_combined("sm__cycles_active.max") == "largest"
    assert how_combined("sm__cycles_active.min") == "smallest"


def test_free_ranges_are_listed_next_to_the_table() -> None:
    made = request()
    made.range(115, 510, "request 1", kind=RangeKind.START_END)
    made.range(490, 1000, "request 1", kind=RangeKind.START_END)
    report = regions(made.trace())
    assert by_path(only(report))["profile"].kernel_ns == 140
    (free,) = report.free
    assert (free.label, free.instances, free.wall_ns) == ("LLM@request 1", 2, 905)
    assert (free.kernels, free.kernel_ns) == (3 + 4, 120 + 40)  # the first step's two kernels belong to both


def test_ranges_with_names_of_their_own_do_not_flood_the_table() -> None:
    made = Builder()
    made.range(0, 10**7, "decode")
    for number in range(MOST_REGIONS + 500):
        made.range(1000 * number + 10, 1000 * number + 900, f"op, seq = {number}")
        made.launch(1000 * number + 20, 10**8 + number, 10**8 + number + 1)
    report = regions(made.trace())
    group = only(report)
    assert len(group.regions) == MOST_REGIONS
    assert report.folded == 501
    assert group.check.difference_ns == 0
    assert group.regions[0].kernels == MOST_REGIONS + 500


def test_a_very_deep_nest_is_cut() -> None:
    made = Builder()
    made.names = ["a"]
    made.ranges = [(i, 10**6 - i, 0, NONE, 0, 7, 70) for i in range(500)]
    made.launch(1000, 2000, 2010)
    report = regions(made.trace())
    group = only(report)
    assert len(group.regions) == 64
    assert report.folded == 436
    assert group.regions[0].kernel_ns == group.regions[-1].self_kernel_ns == 10


def test_the_record_goes_through_json() -> None:
    report = regions(request().trace(), RegionOptions(counters=("x.sum",)))
    assert msgspec.json.decode(msgspec.json.encode(report), type=RegionReport) == report


# --- brute force --------------------------------------------------------------------------------------------------------


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    made = Builder()

    def nest(low: int, high: int, process: int, level: int) -> None:
        at = low
        while at + 4 < high and draw(st.booleans()):
            end = draw(st.integers(at + 2, high - 1))
            made.range(at, end, draw(st.sampled_from("abc")), process=process)
            if level < 3:
                nest(at + 1, end, process, level + 1)
            at = end + 1

    for process in (1, 2):
        nest(0, 60, process, 0)
    for _ in range(draw(st.integers(0, 15))):
        start = draw(st.integers(0, 100))
        made.launch(
            draw(st.integers(0, 60)),
            start,
            start + draw(st.integers(0, 30)),
            draw(st.sampled_from(["gemm", "norm", "copy"])),
            process=draw(st.sampled_from([1, 2])),
            device=draw(st.sampled_from([0, 1])),
            kind=draw(st.sampled_from([WorkKind.KERNEL, WorkKind.KERNEL, WorkKind.MEMCPY])),
        )
    return made.trace()


SELECTIONS = st.sampled_from([Selection(), Selection(exclude=("norm",)), Selection(include=("gemm",))])
REGION_SELECTIONS = st.sampled_from([Selection(), Selection(exclude=("b",)), Selection(include=("a", "*/c"))])


def chain(parents: list[int], row: int) -> Iterator[int]:
    while row != NONE:
        yield row
        row = parents[row]


@settings(max_examples=50, deadline=None)
@given(traces(), SELECTIONS, REGION_SELECTIONS, st.booleans())
def test_every_table_adds_up_to_the_nanosecond(trace: Trace, kernels: Selection, chosen: Selection, aggregate: bool) -> None:
    report = regions(trace, RegionOptions(aggregate, kernels, chosen))
    for group in report.groups:
        assert group.check.difference_ns == 0
        assert group.check.reconciles
    durations = trace.work.end_ns - trace.work.start_ns
    whole = int(durations[trace.work.kind == WorkKind.KERNEL].sum())
    assert sum(group.check.trace_kernel_ns for group in report.groups) == whole


@settings(max_examples=50, deadline=None)
@given(traces())
def test_each_region_agrees_with_the_obvious_way(trace: Trace) -> None:
    projection = project(trace)
    parents = projection.parent.tolist()
    work = trace.work
    for group in regions(trace).groups:
        for region in group.regions:
            rows = [
                row
                for row in range(len(work))
                if work.process[row] == group.process
                and work.device[row] == group.device
                and any(
                    projection.path_names(int(projection.path[above])) == region.path
                    for above in chain(parents, int(projection.range_of_work[row]))
                )
            ]
            kernels = [row for row in rows if work.kind[row] == WorkKind.KERNEL]
            assert region.kernels == len(kernels)
            assert region.kernel_ns == sum(int(work.end_ns[row] - work.start_ns[row]) for row in kernels)
            assert region.copies == len(rows) - len(kernels)
            assert region.launches == len({int(projection.call_of_work[row]) for row in rows})
            covered = {at for row in rows for at in range(int(work.start_ns[row]), int(work.end_ns[row]))}
            assert region.busy_ns == len(covered)
            assert sum(entry.total_ns for entry in region.top) == region.kernel_ns


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20))))
def test_a_union_is_the_set_of_covered_nanoseconds(pairs: list[tuple[int, int]]) -> None:
    pairs.sort()
    start = np.array([first for first, _ in pairs], np.int64)
    end = np.array([first + length for first, length in pairs], np.int64)
    assert union_ns(start, end) == len({at for first, length in pairs for at in range(first, first + length)})

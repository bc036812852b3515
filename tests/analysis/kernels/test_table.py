"""Counters joined to a trace: on a recorded model and on hand-made launches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_fixtures import counted, launch, report_of, traced_uses
from llm_perf_opt.analysis.kernels.table import NOT_SAMPLED, StageKernels, kernel_table
from llm_perf_opt.analysis.limits.peaks import NO_LIMITS, RateLimits
from llm_perf_opt.core.machine_records import CounterProblem, CounterReport, KernelUse
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.counters.catalog import roles

HOPPER = roles("gh100")


def one_stage(uses: list[KernelUse], report: Maybe[CounterReport]) -> StageKernels:
    (stage,) = kernel_table(uses, {"decode": report}, HOPPER)
    return stage


def use(name: str, grid: int, calls: int, total_ns: int, block: int = 128) -> KernelUse:
    return KernelUse("decode", name, grid, block, calls, total_ns)


# --- the recorded model -----------------------------------------------------------------------------------------------


def test_counters_join_the_whole_of_a_recorded_model() -> None:
    prefill, decode = kernel_table(traced_uses(), counted(), HOPPER)
    assert (prefill.stage, prefill.calls, decode.stage, decode.calls) == ("prefill", 183, "decode", 8 * 191)
    assert (prefill.total_ns + decode.total_ns) / 1e6 == pytest.approx(5.521, abs=0.001)
    assert prefill.counters == decode.counters == 1.0
    assert (prefill.by_name, prefill.unused, decode.unused) == (0.0, 0, 0)
    assert 0 < decode.by_name < 0.03
    assert sum(row.share for row in decode.rows) == pytest.approx(1)
    # hidden 1536, 12 heads of 128 over 2, 8960 wide, 4 layers, 512 tokens: the products alone, tiles pad them a little
    needed = 2 * 512 * 4 * (1536 * (1536 + 2 * 256) + 1536 * 1536 + 3 * 1536 * 8960)
    assert not isinstance(prefill.tensor_flops, Missing)
    assert 1.0 < prefill.tensor_flops / needed < 1.06
    head = decode.rows[0]
    assert head.name == "nvjet_sm90_tst_384x8_64x4_2x1_v_bz_TNT"
    assert isinstance(head.bytes_per_s, float)
    assert 4.2e12 < head.bytes_per_s < 4.8e12  # reads the whole output matrix: near the card's bandwidth, never above it
    assert not head.time_differs


# --- hand-made launches -----------------------------------------------------------------------------------------------


def test_work_is_weighted_by_the_calls_of_each_launch_size() -> None:
    uses = [use("f", 10, calls=3, total_ns=3_000), use("f", 20, calls=1, total_ns=5_000)]
    samples = [launch("f", 10, tensor=100, vector=10, read=8, write=2, time=900, sm=10)]
    samples += [launch("f", 20, tensor=500, vector=0, read=40, write=0, time=5_100, sm=50)] * 3
    stage = one_stage(uses, report_of(*samples))
    (row,) = stage.rows
    assert not isinstance(row.per_call, Missing)
    assert row.per_call.tensor_flops == (3 * 100 + 500) / 4
    assert row.per_call.flops == (3 * 110 + 500) / 4
    assert row.per_call.dram_bytes == (3 * 10 + 40) / 4
    assert row.per_call.sm_pct == (3 * 10 + 5 * 50) / 8  # by time
    assert row.mean_ns == 2_000
    assert row.flops_per_s == pytest.approx(830 / 8_000e-9)
    assert row.bytes_per_s == pytest.approx(70 / 8_000e-9)
    assert row.flops_per_byte == pytest.approx(830 / 70)
    assert row.time_ratio == pytest.approx((3 * 900 + 5_100) / 8_000)
    assert [(variant.grid, variant.sampled, variant.by_name) for variant in row.variants] == [(20, 3, False), (10, 1, False)]
    assert (stage.flops, stage.tensor_flops, stage.dram_bytes, stage.counters) == (830, 800, 70, 1.0)


def test_counters_of_another_grid_are_marked_by_name() -> None:
    uses = [use("f", 10, 2, 600), use("f", 11, 1, 400)]
    stage = one_stage(uses, report_of(launch("f", 10, tensor=100)))
    assert stage.by_name == pytest.approx(0.4)
    assert stage.counters == 1.0
    assert stage.flops == 300
    assert stage.rows[0].by_name


def test_another_block_is_another_kernel() -> None:
    stage = one_stage([use("f", 10, 1, 100, block=256)], report_of(launch("f", 10, block=128, tensor=5)))
    assert stage.counters == 0
    assert stage.rows[0].per_call == NOT_SAMPLED
    assert isinstance(stage.flops, Missing)


def test_a_size_that_the_trace_does_not_know_fits_any_by_name() -> None:
    stage = one_stage([KernelUse("decode", "f", 0, 0, 2, 100)], report_of(launch("f", 10, tensor=4), launch("f", 20, tensor=6)))
    assert stage.flops == 10
    assert stage.by_name == 1


def test_a_time_under_the_tool_that_is_far_off_is_flagged() -> None:
    for own, differs in ((1_240, False), (1_260, True), (760, False), (740, True)):
        (row,) = one_stage([use("f", 1, 1, 1_000)], report_of(launch("f", 1, time=own))).rows
        assert row.time_differs is differs


@pytest.mark.parametrize(("own", "counted"), [(2_900, True), (3_100, False), (350, True), (320, False)])
def test_launches_that_did_other_work_are_not_counted(own: int, counted: bool) -> None:
    stage = one_stage([use("f", 1, 2, 2_000)], report_of(launch("f", 1, time=own, tensor=5)))
    (row,) = stage.rows
    assert isinstance(row.per_call, Missing) is not counted
    assert stage.flops == 10 if counted else isinstance(stage.flops, Missing)


def test_a_name_without_arguments_joins_only_where_it_can_be_one_kernel() -> None:
    uses = [use("void a::f<1>(int)", 10, 1, 100), use("void a::f<2>(int)", 20, 1, 100), use("void a::f<3>(int)", 20, 1, 100)]
    stage = one_stage(uses, report_of(launch("f", 10, tensor=7), launch("f", 20, tensor=9), launch("gone", 1, tensor=1)))
    assert stage.flops == 7
    assert stage.unused == 2
    assert stage.counters == pytest.approx(1 / 3)


def test_a_lost_counter_leaves_no_sum() -> None:
    lost = launch("g", 1, vector=1)
    lost.counters["sm__ops_path_tensor_src_bf16_dst_fp32.sum"] = Missing("n/a")
    stage = one_stage([use("f", 1, 1, 50), use("g", 1, 1, 50)], report_of(launch("f", 1, tensor=5, vector=2), lost))
    assert stage.tensor_flops == Missing("n/a")
    assert [row.per_call.vector_flops for row in stage.rows if not isinstance(row.per_call, Missing)] == [2, 1]


def test_counters_that_were_not_asked_for_are_named() -> None:
    stage = one_stage([use("f", 1, 1, 50)], report_of(launch("f", 1, tensor=5)))
    assert "sm__ops_path_tensor_src_fp8.sum" in stage.not_collected
    assert "sm__ops_path_tensor_src_bf16_dst_fp32.sum" not in stage.not_collected


def test_a_copy_that_moves_constants_computes_nothing() -> None:
    """Counted on an H200: CatArrayBatchedCopy issues HFMA2 and not one other FLOP."""
    stage = one_stage([use("copy", 1, 2, 1_000)], report_of(launch("copy", 1, tensor=0, vector=0, half=50, read=100, write=100)))
    (row,) = stage.rows
    assert not isinstance(row.per_call, Missing)
    assert (row.per_call.flops, row.flops_per_s, row.flops_per_byte, stage.flops) == (0, 0, 0, 0)
    assert (row.per_call.half_flops, stage.half_flops) == (200, 400)


def test_no_rate_and_no_share_is_above_what_the_device_can() -> None:
    sampled = launch("f", 1, tensor=1_000, read=500, write=0, sm=100.2)
    report = {"decode": report_of(sampled)}
    for limits, known in ((RateLimits(1e9, 5e8), True), (RateLimits(0.9e9, 4.9e8), False), (NO_LIMITS, True)):
        (stage,) = kernel_table([use("f", 1, 1, 1_000)], report, HOPPER, limits=limits)
        (row,) = stage.rows
        assert isinstance(row.flops_per_s, float) is known
        assert isinstance(row.bytes_per_s, float) is known
        assert not isinstance(row.per_call, Missing)
        assert isinstance(row.per_call.sm_pct, Missing)


def test_without_counters_every_figure_has_a_reason() -> None:
    spoiled = CounterReport((launch("f", 1, tensor=5),), {}, (CounterProblem("counters_missing", "All lost.", True),))
    for report, roles_of_chip, why in (
        (Missing("ncu is not here"), HOPPER, "ncu is not here"),
        (spoiled, HOPPER, "All lost."),
        (report_of(launch("f", 1)), Missing("an unknown chip"), "an unknown chip"),
    ):
        (stage,) = kernel_table([use("f", 1, 2, 50)], {"decode": report}, roles_of_chip)
        for value in (stage.counters, stage.flops, stage.rows[0].per_call, stage.rows[0].flops_per_s, stage.rows[0].time_ratio):
            assert isinstance(value, Missing)
            assert why in value.why
    (stage,) = kernel_table([use("f", 1, 2, 50)], {}, HOPPER)
    assert stage.counters == Missing("no counters were read in this stage")
    assert kernel_table([], {}, HOPPER) == ()
    assert kernel_table([use("f", 1, 0, 0)], {}, HOPPER) == ()


sizes = st.tuples(st.sampled_from("fgh"), st.integers(1, 3), st.integers(1, 50), st.integers(1, 10_000))
sampled = st.tuples(st.sampled_from("fghx"), st.integers(1, 3), st.integers(0, 1_000))


@given(st.lists(sizes, min_size=1, max_size=12), st.lists(sampled, max_size=12))
def test_time_is_kept_and_work_stays_within_what_was_sampled(
    drawn: list[tuple[str, int, int, int]], samples: list[tuple[str, int, int]]
) -> None:
    uses = [use(name, grid, calls, total) for name, grid, calls, total in drawn]
    stage = one_stage(uses, report_of(*[launch(name, grid, tensor=flops) for name, grid, flops in samples]))
    assert stage.total_ns == sum(row.total_ns for row in stage.rows) == sum(use.total_ns for use in uses)
    assert stage.calls == sum(row.calls for row in stage.rows)
    assert isinstance(stage.counters, float)
    assert 0 <= stage.by_name <= stage.counters <= 1
    for row in stage.rows:
        own = [flops for name, _, flops in samples if name == row.name]
        if isinstance(row.per_call, Missing):
            assert not own
        else:
            assert isinstance(row.per_call.tensor_flops, float)
            assert min(own) - 1e-6 <= row.per_call.tensor_flops <= max(own) + 1e-6

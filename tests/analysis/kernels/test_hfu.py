"""HFU from counted work."""

import pytest

from builders import MS, clean_timings, in_a_row
from kernel_fixtures import counted, launch, report_of, traced_uses
from llm_perf_opt.analysis.kernels.evidence import compare_with_model, hfu, hfus_of, stage_hfu
from llm_perf_opt.analysis.kernels.table import StageKernels, kernel_table
from llm_perf_opt.analysis.limits.efficiency import Efficiency
from llm_perf_opt.analysis.limits.peaks import Peaks
from llm_perf_opt.core.errors import ImplausibleError
from llm_perf_opt.core.machine_records import CountedKernel, KernelUse
from llm_perf_opt.core.records import Missing
from llm_perf_opt.counters.catalog import roles

HOPPER = roles("gh100")
USES = [KernelUse("decode", "f", 1, 128, 4, 300), KernelUse("decode", "g", 1, 128, 1, 100)]


def stage_of(*kernels: CountedKernel) -> StageKernels:
    return kernel_table(USES, {"decode": report_of(*kernels)}, HOPPER)[0]


def everything(**counters: float) -> dict[str, float]:
    return {**dict.fromkeys((*HOPPER.tensor_flops, *HOPPER.vector_flops, *HOPPER.half_flops), 0.0), **counters}


def whole(name: str, flops: float, grid: int = 1) -> CountedKernel:
    kernel = launch(name, grid)
    kernel.counters.update(everything(**{"sm__ops_path_tensor_src_bf16_dst_fp32.sum": flops}))
    return kernel


def test_executed_over_time_and_peak() -> None:
    found = hfu(stage_of(whole("f", 10.0), whole("g", 60.0)), "datasheet", 2.0, 100.0)
    assert not isinstance(found, Missing)
    assert (found.share, found.executed_flops, found.coverage, found.sign) == (0.5, 100.0, 1.0, "")


def test_what_was_not_counted_makes_it_a_lower_bound() -> None:
    found = hfu(stage_of(whole("f", 10.0)), "datasheet", 2.0, 100.0)
    assert not isinstance(found, Missing)
    assert (found.share, found.coverage, found.sign) == (0.2, 0.75, "≥")
    kinds = hfu(stage_of(launch("f", 1, tensor=10), launch("g", 1, tensor=60)), "datasheet", 2.0, 100.0)
    assert not isinstance(kinds, Missing)
    assert kinds.sign == "≥"


def test_packed_half_precision_is_left_out_and_makes_it_a_lower_bound() -> None:
    moving = whole("g", 60.0)
    moving.counters["smsp__sass_thread_inst_executed_op_hfma_pred_on.sum"] = 10.0
    stage = stage_of(whole("f", 10.0), moving)
    found = stage_hfu(stage, (Peaks("datasheet", "", 100.0, 1.0),), 2.0, 50.0)
    sheet = dict(found.against)["datasheet"]
    assert not isinstance(sheet, Missing)
    assert (sheet.share, sheet.executed_flops, sheet.sign) == (0.5, 100.0, "≥")
    assert found.half_flops == stage.half_flops == 40.0


def test_another_grid_makes_it_an_estimate() -> None:
    found = hfu(stage_of(whole("f", 10.0), whole("g", 60.0, grid=7)), "datasheet", 2.0, 100.0)
    assert not isinstance(found, Missing)
    assert found.sign == "≈"


@pytest.mark.parametrize(
    ("roof", "peak", "passes"), [("datasheet", 49.9, False), ("measured", 49.9, True), ("measured", 48.0, False)]
)
def test_more_than_the_hardware_can_is_an_error(roof: str, peak: float, passes: bool) -> None:
    stage = stage_of(whole("f", 10.0), whole("g", 60.0))
    if passes:
        assert not isinstance(hfu(stage, roof, 2.0, peak), Missing)
    else:
        with pytest.raises(ImplausibleError, match="HFU of decode"):
            hfu(stage, roof, 2.0, peak)


def test_missing_inputs_keep_their_reason() -> None:
    counted_stage = stage_of(whole("f", 10.0))
    assert hfu(counted_stage, "datasheet", Missing("no time"), 1.0) == Missing("no time")
    assert hfu(counted_stage, "datasheet", 1.0, Missing("no peak")) == Missing("no peak")
    assert isinstance(hfu(stage_of(), "datasheet", 1.0, 1.0), Missing)
    assert isinstance(hfu(counted_stage, "datasheet", 0.0, 1.0), Missing)
    assert compare_with_model(counted_stage, Missing("no cost model")) == Missing("no cost model")
    assert isinstance(compare_with_model(counted_stage, 0.0), Missing)


def test_of_a_recorded_model() -> None:
    prefill, decode = kernel_table(traced_uses(), counted(), HOPPER)
    roofs = (Peaks("datasheet", "", 989e12, 4.8e12), Peaks("measured", "", Missing("not measured"), Missing("not measured")))
    found = stage_hfu(prefill, roofs, 4.73e-3, 1.92e11)
    sheet = dict(found.against)["datasheet"]
    assert not isinstance(sheet, Missing)
    assert sheet.share == pytest.approx(0.0431, abs=0.0002)
    assert sheet.sign == "≥"  # fp8 and half-precision counters were not collected
    assert dict(found.against)["measured"] == Missing("not measured")
    assert not isinstance(found.model, Missing)
    assert found.model.ratio == pytest.approx(201.24e9 / 1.92e11, rel=1e-3)
    step = hfu(decode, "datasheet", 8 * 4.37e-3, 989e12)
    assert not isinstance(step, Missing)
    assert step.sign == "≳", "some launches by another grid, and some kinds of FLOPs not collected"


@pytest.mark.parametrize(("devices", "known"), [(1, True), (2, False)])
def test_work_of_several_devices_is_not_compared_with_the_peak_of_one(devices: int, known: bool) -> None:
    timings = clean_timings(in_a_row(10, 50 * MS, [10 * MS] * 10))
    stage = stage_of(whole("f", 10.0), whole("g", 60.0))
    limits = Efficiency("qwen2", "bf16", (Peaks("datasheet", "a card", 1e12, 1e12),), (), ())
    (found,) = hfus_of([stage], 4, timings, limits, {"decode": devices})
    ((_, value),) = found.against
    assert isinstance(value, Missing) is not known
    assert known or (isinstance(value, Missing) and "2 devices" in value.why)

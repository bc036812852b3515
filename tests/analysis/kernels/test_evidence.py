"""HFU from counted work, differences between passes, and the plan of a counting pass compared with its result."""

import pytest

from builders import MS, clean_timings, in_a_row
from kernel_fixtures import counted, launch, report_of, traced_uses
from llm_perf_opt.analysis.kernels.evidence import compare_with_model, disagreements, hfu, hfus_of, outcome, stage_hfu
from llm_perf_opt.analysis.kernels.selection import SelectedKernel, Selection
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
    ("peaks", "peak", "passes"), [("datasheet", 49.9, False), ("measured", 49.9, True), ("measured", 48.0, False)]
)
def test_more_than_the_hardware_can_is_an_error(peaks: str, peak: float, passes: bool) -> None:
    stage = stage_of(whole("f", 10.0), whole("g", 60.0))
    if passes:
        assert not isinstance(hfu(stage, peaks, 2.0, peak), Missing)
    else:
        with pytest.raises(ImplausibleError, match="HFU of decode"):
            hfu(stage, peaks, 2.0, peak)


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
    peak_sets = (Peaks("datasheet", "", 989e12, 4.8e12), Peaks("measured", "", Missing("not measured"), Missing("not measured")))
    found = stage_hfu(prefill, peak_sets, 4.73e-3, 1.92e11)
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


@pytest.mark.parametrize(
    ("nsys", "torch", "told"),
    [(1172.0, 1172.0, False), (1172.0, 1170.0, False), (100.0, 91.0, False), (100.0, 89.0, True), (89.0, 100.0, True)],
)
def test_only_notable_differences_are_warnings(nsys: float, torch: float, told: bool) -> None:
    found = disagreements({"nsys": {"decode": nsys}, "torch": {"decode": torch}})
    assert len(found) == told
    assert all(f"nsys has {nsys:,.1f} kernels per decode step, torch {torch:,.1f}" in one.text for one in found)


def test_a_stage_missing_in_one_pass_is_not_compared() -> None:
    assert disagreements({"nsys": {"decode": 8.0}, "torch": {"prefill": 1.0}}) == ()
    assert disagreements({"nsys": {"decode": 8.0}}) == disagreements({}) == ()


def plan(stage: str = "decode_step") -> Selection:
    kernels = (SelectedKernel("f", 100, 10, 0.9),)
    return Selection(stage, "nsys", 2, kernels, 0.9, launch_skip=0, launch_count=100, steps_needed=3, passes=9, seconds=1.0)


def test_the_plan_is_shown_with_what_was_counted() -> None:
    found = outcome(plan(), "decode", 100, 0.88)
    assert "100 launches of step 2, which represent 90.0 % of its kernel time" in found.note
    assert found.note.endswith("Counted: 100 launches, joined to 88.0 % of the stage's kernel time.")
    assert found.warning is None


@pytest.mark.parametrize(
    ("launches", "joined", "cause"), [(90, 0.9, "early end"), (100, 0.8, "different kernels or grids"), (0, 0.0, "early end")]
)
def test_less_than_planned_is_a_warning_with_the_cause(launches: int, joined: float, cause: str) -> None:
    warning = outcome(plan(), "decode", launches, joined).warning
    assert warning is not None
    assert f"{launches} of 100 launches were counted" in warning.text
    assert "planned 90.0 %" in warning.text
    assert cause in warning.text


def test_a_plan_for_one_range_has_no_target_for_the_program() -> None:
    assert outcome(plan("train@LLM"), "program", 100, 0.2).warning is None
    assert outcome(plan("the program"), "program", 100, 0.2).warning
    assert outcome(plan("train@LLM"), "program", 10, 0.2).warning


def test_unused_counters_have_a_reason() -> None:
    found = outcome(plan(), "decode", Missing("no verdict"), Missing("no verdict"))
    assert found.note.endswith("Counted: n/a: no verdict.")
    assert found.warning is None

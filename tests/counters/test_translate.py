"""Old names are translated to existing counters, with factors and notes."""

import pytest

from llm_perf_opt.counters.catalog import chips, has
from llm_perf_opt.counters.manifest import Part, close_names, old_names, translate

CHIPS = tuple(chips())
SASS = "smsp__sass_thread_inst_executed_op_{}_pred_on.sum"


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("old", old_names())
def test_a_translation_exists_or_there_is_none(chip: str, old: str) -> None:
    found = translate(chip, old)
    assert not has(chip, old)
    if found is None:
        assert "nvlink" in old
        assert chip in ("ad102", "gb202")
    else:
        assert found.parts
        assert all(has(chip, part.name) for part in found.parts)


def test_single_precision_flops() -> None:
    found = translate("gh100", "flop_count_sp")
    assert found is not None
    assert found.parts == (Part(SASS.format("fadd")), Part(SASS.format("fmul")), Part(SASS.format("ffma"), 2))


def test_half_precision_flops_hold_the_tensor_cores_but_no_other_precision() -> None:
    found = translate("gh100", "flop_count_hp")
    assert found is not None
    assert {part.name: part.factor for part in found.parts} == {
        SASS.format("hadd"): 2,
        SASS.format("hmul"): 2,
        SASS.format("hfma"): 4,
        "sm__ops_path_tensor_src_bf16_dst_fp32.sum": 1,
        "sm__ops_path_tensor_src_fp16.sum": 1,
    }


def test_the_inverse_sense_is_pointed_out() -> None:
    found = translate("ga100", "smsp__sass_average_branch_divergence.pct")
    assert found is not None
    assert found.parts == (Part("smsp__sass_average_branch_targets_threads_uniform.pct"),)
    assert "is inverted" in found.note


@pytest.mark.parametrize(
    ("chip", "name", "new"),
    [
        ("gb202", "dram__bytes_read.sum", "dram__bytes_op_read.sum"),
        ("gb202", "dram__bytes_write.sum.per_second", "dram__bytes_op_write.sum.per_second"),
        ("gh100", "dram__bytes_op_read.sum", "dram__bytes_read.sum"),
        ("gh100", "dram__cycles_active_op_write.avg", "dram__cycles_active_write.avg"),
    ],
)
def test_a_name_of_another_chip(chip: str, name: str, new: str) -> None:
    found = translate(chip, name)
    assert found is not None
    assert found.parts == (Part(new),)


@pytest.mark.parametrize(
    "name", ["dram__bytes_read.sum", "sm__nothing.sum", "", "dram__bytes_op_read.pct", "dram__bytes_op_read"]
)
def test_what_needs_or_has_no_translation(name: str) -> None:
    assert translate("gh100", name) is None


def test_an_old_name_mistyped_is_told_from_a_chips_own() -> None:
    assert "flop_count_hp" in close_names("gh100", "flop_count_hq")
    assert close_names("gh100", "sm__thruput.max.pct_of_peak_sustained_active")[0].startswith("sm__throughput.max")
    assert close_names("gh100", "zzzzqqqq") == ()
    assert "nvlink_total_data_received" not in close_names("ad102", "nvlink_total_data_receive"), "it has no translation there"

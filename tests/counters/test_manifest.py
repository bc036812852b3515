"""Resolving sets: merge order, sources, dropped counters, additions and removals."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command import HANG_S
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.processes import ask
from llm_perf_opt.counters.catalog import base_names, chips, has, launch_names, names_listed, split_name
from llm_perf_opt.counters.manifest import ResolvedMetrics, resolve
from llm_perf_opt.counters.set_file import TRACE_MODULES, shipped_sets

CHIPS = tuple(chips())
BASE = resolve((), chip="gh100")
SETS = st.lists(st.sampled_from(list(shipped_sets())), max_size=6)
EXTRA = ("lts__t_bytes.sum", "lts__t_sectors.sum", "sm__cycles_elapsed.max", "flop_count_sp", "launch__grid_size")
SHARED = tuple(f"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{way}.sum" for way in ("ld", "st"))


def sources(found: ResolvedMetrics) -> dict[str, tuple[str, ...]]:
    return {metric.name: metric.sources for metric in found.metrics}


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", shipped_sets())
def test_every_set_resolves_on_every_chip(name: str, chip: str) -> None:
    found = resolve([name], chip=chip)
    assert found.sets == (("base", name) if name != "base" else ("base",))
    assert all(has(chip, metric) for metric in found.names)
    assert found.names[: len(BASE.names)] == BASE.names
    if found.dropped:
        assert name == "nvlink"
        assert chip in ("ad102", "gb202")


def test_base_is_the_same_on_every_chip() -> None:
    assert {resolve([], chip=chip).names for chip in CHIPS} == {BASE.names}
    assert BASE.names[0] == "gpu__time_duration.sum"
    assert BASE.trace_modules == ("cuda", "nvtx", "osrt")


def test_what_a_chip_lacks_is_said() -> None:
    found = resolve(["nvlink"], chip="ad102")
    assert found.names == BASE.names
    assert found.sections == ()
    assert [one.name for one in found.dropped if one.name.startswith("nvl")] == [
        "nvlrx__bytes.sum",
        "nvltx__bytes.sum",
        "nvlrx__bytes_data_user.sum",
        "nvltx__bytes_data_user.sum",
    ]
    assert all(one.sources == ("nvlink",) and "ad102" in one.why for one in found.dropped)
    assert resolve(["nvlink"], chip="gh100").sections == ("Nvlink",)


def test_roles_resolve_per_chip() -> None:
    assert "dram__bytes_read.sum" in resolve(["memory"], chip="gh100").names
    assert "dram__bytes_op_read.sum" in resolve(["memory"], chip="gb202").names


def test_chapters_ask_for_what_their_old_names_mean() -> None:
    ch07 = resolve(["ch07"], chip="gh100")
    assert {*SHARED, "smsp__sass_average_branch_targets_threads_uniform.pct"} <= set(ch07.names)
    notes = {metric.name: metric.note for metric in ch07.metrics}
    assert "is inverted" in notes["smsp__sass_average_branch_targets_threads_uniform.pct"]
    assert "shared_load_sectors" in notes[SHARED[0]]
    assert resolve(["ch10"], chip="gh100").names == resolve(["ch11"], chip="gh100").names == resolve(["ch19"], chip="gh100").names
    assert resolve(["ch08"], chip="gh100").names.count("gpu__time_duration.sum") == 1
    ch09 = resolve(["ch09"], chip="gh100")
    assert {"smsp__sass_thread_inst_executed_op_ffma_pred_on.sum", "sm__ops_path_tensor_src_bf16_dst_fp32.sum"} <= set(ch09.names)
    assert "lts__t_sectors.avg.pct_of_peak_sustained_elapsed" in resolve(["ch18"], chip="gh100").names
    sampled = [name for name in shipped_sets() if resolve([name], chip="gh100").gpu_metrics]
    assert sampled == ["nvlink", "ch05", "ch12", "ch13", "ch18"]
    assert resolve(["ch12"], chip="gh100").trace_modules == ("cuda", "nvtx", "osrt", "cublas", "cudnn")


def test_sources_name_everyone_who_asked_in_merge_order() -> None:
    found = sources(resolve(["ch10", "ch04"], add=["sm__throughput.avg.pct_of_peak_sustained_elapsed"], chip="gh100"))
    assert found["sm__throughput.avg.pct_of_peak_sustained_elapsed"] == ("base", "ch10", "ch04", "added")
    assert found[SHARED[0]] == ("ch10",)


def test_the_order_is_base_then_sets_then_additions_then_removals() -> None:
    found = resolve(["divergence", "shared_memory"], add=["lts__t_bytes.sum", SHARED[0]], remove=[SHARED[0]], chip="gh100")
    of = [metric.sources[0] for metric in found.metrics]
    assert of == sorted(of, key=["base", "divergence", "shared_memory", "added"].index)
    assert SHARED[0] not in found.names
    assert found.names[-1] == "lts__t_bytes.sum"


def test_the_richest_torch_preset_wins() -> None:
    assert resolve([], chip="gh100").torch_preset == "minimal"
    assert resolve(["ch01", "ch02"], chip="gh100").torch_preset == "full"


def test_an_old_name_may_be_added_and_removed() -> None:
    added = resolve([], add=["shared_load_sectors"], chip="gh100")
    assert added.names == (*BASE.names, SHARED[0])
    assert "shared_load_sectors" in added.metrics[-1].note
    assert resolve(["ch10"], remove=["shared_load_sectors", "shared_store_sectors"], chip="gh100").names == BASE.names


@pytest.mark.parametrize(
    ("add", "near"),
    [
        ("sm__thruput.avg.pct_of_peak_sustained_elapsed", "sm__throughput.avg.pct_of_peak_sustained_elapsed"),
        ("sm__throughput", "sm__throughput.avg.pct_of_peak_sustained_elapsed"),
        ("lts__t_bytes.summ", "lts__t_bytes.sum"),
        ("nonsense", "metrics check"),
    ],
)
def test_an_unknown_addition_is_refused_with_what_is_near(add: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(["roofline"], add=["lts__t_bytes.sum", add], chip="gh100")
    assert repr(add) in caught.value.fact
    assert "'lts__t_bytes.sum'" not in caught.value.fact
    assert near in caught.value.remedy


def test_every_unknown_addition_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"'one'.*'two'"):
        resolve([], add=["one", "two"], chip="gh100")


def test_removing_what_nobody_asked_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be removed") as caught:
        resolve(["memory"], remove=["lts__t_byte.sum"], chip="gh100")
    assert "lts__t_bytes.sum" in caught.value.remedy
    with pytest.raises(ConfigError, match="shared_load_sectors"):
        resolve([], remove=["shared_load_sectors"], chip="gh100")


def test_an_unknown_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'roofline'"):
        resolve(["rooflin"], chip="gh100")


def test_what_the_installed_tool_lacks_is_dropped_from_sets_and_refused_as_addition() -> None:
    known = base_names("gh100") - {"lts__t_bytes", "sm__ops_path_tensor_src_fp8"}
    found = resolve(["roofline"], chip="gh100", known=known)
    assert {one.name for one in found.dropped} == {"lts__t_bytes.sum", "sm__ops_path_tensor_src_fp8.sum"}
    assert all("newer ncu" in one.why for one in found.dropped)
    with pytest.raises(ConfigError, match="installed ncu"):
        resolve([], add=["lts__t_bytes.sum"], chip="gh100", known=known)


@settings(deadline=None)
@given(SETS, st.sampled_from(CHIPS))
def test_repeating_a_set_changes_nothing(sets: Sequence[str], chip: str) -> None:
    assert resolve([*sets, *sets, "base"], chip=chip) == resolve(sets, chip=chip)


@settings(deadline=None)
@given(SETS, st.sampled_from(CHIPS), st.data())
def test_order_decides_the_place_and_nothing_else(sets: list[str], chip: str, data: st.DataObject) -> None:
    one, other = resolve(sets, chip=chip), resolve(data.draw(st.permutations(sets)), chip=chip)
    assert set(one.names) == set(other.names)
    assert {name: set(of) for name, of in sources(one).items()} == {name: set(of) for name, of in sources(other).items()}
    assert (one.gpu_metrics, one.torch_preset) == (other.gpu_metrics, other.torch_preset)
    assert set(one.trace_modules) == set(other.trace_modules)


@settings(deadline=None)
@given(SETS, st.lists(st.sampled_from(EXTRA)), st.sampled_from(CHIPS))
def test_no_counter_appears_twice_and_each_has_a_source(sets: list[str], add: list[str], chip: str) -> None:
    found = resolve(sets, add=add, chip=chip)
    assert len(set(found.names)) == len(found.names)
    assert all(metric.sources and len(set(metric.sources)) == len(metric.sources) for metric in found.metrics)


@settings(deadline=None)
@given(SETS, st.lists(st.sampled_from(EXTRA), unique=True), st.sampled_from(CHIPS), st.data())
def test_removal_takes_out_exactly_what_is_named(sets: list[str], add: list[str], chip: str, data: st.DataObject) -> None:
    whole = resolve(sets, add=add, chip=chip)
    gone = data.draw(st.lists(st.sampled_from(whole.names), unique=True))
    left = resolve(sets, add=add, remove=gone, chip=chip)
    assert left.names == tuple(name for name in whole.names if name not in gone)


@settings(deadline=None)
@given(SETS, st.sampled_from(CHIPS))
def test_adding_then_removing_what_is_new_changes_nothing(sets: list[str], chip: str) -> None:
    new = "sm__cycles_elapsed.max"
    assert resolve(sets, add=[new], remove=[new], chip=chip) == resolve(sets, chip=chip)


# --- against NVIDIA's own tools ----------------------------------------------------------------------------------------


def test_every_set_resolves_on_gh100_against_the_real_ncu(real_ncu: Path) -> None:
    """No set requests a name that the shipped list has and an older ncu does not."""
    known = names_listed(ask([str(real_ncu), "--query-metrics", "--chips", "gh100"], timeout_s=HANG_S) or "")
    for name in shipped_sets():
        found = resolve([name], chip="gh100", known=known)
        assert found.dropped == (), name
        assert found == resolve([name], chip="gh100")
        bases = {split_name("gh100", metric)[0] for metric in found.names} - launch_names()
        assert bases <= known


def test_sections_by_name_follow_those_of_the_sets() -> None:
    found = resolve(["nvlink"], sections=["SpeedOfLight", "Nvlink"], chip="gh100", known_sections=("SpeedOfLight", "Nvlink"))
    assert found.sections == ("Nvlink", "SpeedOfLight")


@pytest.mark.parametrize(
    ("name", "words"), [("SpeedOfLigt", "SpeedOfLight"), ("--set", "not the name of"), ("", "not the name of")]
)
def test_sections_that_are_none_are_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve([], sections=[name], chip="gh100", known_sections=("SpeedOfLight",))
    assert words in f"{refused.value.fact} {refused.value.remedy}"


def test_the_real_ncu_has_every_section(real_ncu: Path) -> None:
    text = ask([str(real_ncu), "--list-sections"], timeout_s=HANG_S) or ""
    there = set(re.findall(r"^(\w+)\s", text, re.MULTILINE))
    asked = {section for name in shipped_sets() for section in resolve([name], chip="gh100").sections}
    assert asked
    assert asked <= there


def test_the_real_nsys_has_every_trace_module(real_nsys: Path) -> None:
    text = ask([str(real_nsys), "profile", "--help"], timeout_s=HANG_S) or ""
    offered = re.search(r"-t, --trace=(.*?)Select the API", text, re.DOTALL)
    assert offered
    there = set(re.findall(r"'([\w-]+)'", offered[1])) - {"none"}
    assert "nvlink" not in there
    asked = {module for name in shipped_sets() for module in resolve([name], chip="gh100").trace_modules}
    assert asked <= there
    assert there <= set(TRACE_MODULES)


def test_a_chapter_may_be_written_without_its_zero() -> None:
    assert resolve(["ch9"], chip="gh100") == resolve(["ch09"], chip="gh100")
    with pytest.raises(ConfigError, match="No metric set"):
        resolve(["ch0"], chip="gh100")


def test_a_users_set_is_resolved_per_chip() -> None:
    mine = {"mine": {"ncu": ["role:dram_read_bytes", "nvlrx__bytes.sum", "flop_count_dp"], "sections": ["Occupancy"]}}
    hopper, ada = (resolve(["mine"], chip=chip, defined=mine) for chip in ("gh100", "ad102"))
    assert {"dram__bytes_read.sum", "nvlrx__bytes.sum"} <= set(hopper.names)
    assert [gone.name for gone in ada.dropped] == ["nvlrx__bytes.sum"], "only other chips have it: left out with the reason"
    assert (hopper.sections, hopper.dropped) == (("Occupancy",), ())
    assert hopper.origins == ("The metric set mine is that of profiling.metrics.defined.mine.",)


def test_a_counter_of_a_users_set_that_no_chip_has_is_an_error_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"lts__t_bites\.sum") as raised:
        resolve(["mine"], chip="gh100", defined={"mine": {"ncu": ["lts__t_bites.sum"]}})
    assert "lts__t_bytes.sum" in raised.value.remedy

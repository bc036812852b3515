"""The lists of counter names, their suffixes, and suggestions for unknown names."""

import gzip
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command import HANG_S
from llm_perf_opt.core.errors import ConfigError, ParseError
from llm_perf_opt.core.processes import ask
from llm_perf_opt.core.records import Missing
from llm_perf_opt.counters import catalog
from llm_perf_opt.counters.catalog import (
    Kind,
    base_names,
    chip_of_device,
    chips,
    has,
    kind_of,
    launch_names,
    names_listed,
    near,
    problem,
    split_name,
)
from work import lines_run

CHIPS = tuple(chips())
EVERYWHERE = (
    "gpu__time_duration.sum",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "lts__t_bytes.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "smsp__sass_average_branch_targets_threads_uniform.pct",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "launch__registers_per_thread",
)


@pytest.mark.parametrize("chip", CHIPS)
def test_a_list_holds_thousands_of_clean_names(chip: str) -> None:
    assert len(base_names(chip)) > 3000
    assert not [name for name in base_names(chip) if not re.fullmatch(r"(\w+\.)*[a-z0-9]+__\w+", name)]


def test_every_list_says_which_tool_made_it() -> None:
    for file in (Path(catalog.__file__).parent / "names").iterdir():
        assert gzip.decompress(file.read_bytes()).decode().startswith(f"# {catalog.LISTED_BY}: "), file.name


@pytest.mark.parametrize("chip", CHIPS)
def test_names_that_exist_on_every_chip(chip: str) -> None:
    assert [name for name in EVERYWHERE if not has(chip, name)] == []


def test_names_that_differ_per_chip() -> None:
    assert has("gh100", "dram__bytes_read.sum")
    assert not has("gb202", "dram__bytes_read.sum")
    assert has("gb202", "dram__bytes_op_read.sum")
    assert has("gh100", "sm__ops_path_tensor_src_fp8.sum")
    assert not has("ga100", "sm__ops_path_tensor_src_fp8.sum")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("flop_count_hp", "no counter of this name"),
        ("gpu__time_elapsed.avg", "no counter of this name"),
        ("dram__bytes_read", "a counter needs a suffix"),
        ("dram__bytes_read.pct", "a counter does not take"),
        ("dram__bytes_read.sum.pct", "a counter does not take"),
        ("sm__throughput", "a throughput needs a suffix"),
        ("sm__throughput.avg", "a throughput does not take"),
        ("sm__throughput.avg.per_second", "a throughput does not take"),
        ("lts__t_sector_hit_rate.sum", "a ratio does not take"),
        ("launch__registers_per_thread.sum", "takes no suffix"),
        ("regex:sm__.*", "cannot be checked"),
        ("group:memory__chart", "cannot be checked"),
        ("breakdown:dram__bytes.sum", "only a throughput"),
        ("", "no counter of this name"),
        (".sum", "no counter of this name"),
        ("sm__throughput.avg.pct_of_peak_sustained_elapsed\n", "a throughput does not take"),
    ],
)
def test_what_is_wrong_is_said(name: str, said: str) -> None:
    assert said in problem("gh100", name)
    assert not has("gh100", name)


@pytest.mark.parametrize(
    "name",
    [
        "dram__bytes_read.sum.per_second",
        "dram__bytes_read.max.peak_sustained_elapsed.per_second",
        "sm__inst_executed.avg.per_cycle_active",
        "lts__t_sector_hit_rate.max_rate",
        "sm__maximum_warps_per_active_cycle_pct",
        "breakdown:sm__throughput.avg.pct_of_peak_sustained_elapsed",
        "TriageCompute.sm__throughput.avg.pct_of_peak_sustained_elapsed",
    ],
)
def test_what_is_right_has_no_problem(name: str) -> None:
    assert problem("gh100", name) == ""


def test_a_name_the_installed_tool_lacks_is_a_problem_of_that_tool() -> None:
    known = base_names("gh100") - {"lts__t_bytes"}
    assert "installed ncu" in problem("gh100", "lts__t_bytes.sum", known)
    assert problem("gh100", "lts__t_sectors.sum", known) == ""
    assert problem("gh100", "launch__registers_per_thread", known) == ""  # no tool lists facts of a launch


@settings(deadline=None)
@given(st.sampled_from(CHIPS), st.data())
def test_every_suffix_of_its_kind_is_accepted_and_no_other(chip: str, data: st.DataObject) -> None:
    base = data.draw(st.sampled_from(sorted(base_names(chip))))
    suffix = data.draw(st.sampled_from(sorted({one for kind in Kind for one in kind.suffixes})))
    assert has(chip, f"{base}.{suffix}") == (suffix in kind_of(base).suffixes)
    assert split_name(chip, f"{base}.{suffix}") == (base, suffix)


@settings(deadline=None)
@given(st.sampled_from(CHIPS), st.text(max_size=80))
def test_any_text_is_answered(chip: str, text: str) -> None:
    assert has(chip, text) or problem(chip, text)
    assert all(has(chip, one) for one in near(chip, text))


@settings(deadline=None)
@given(st.sampled_from(CHIPS), st.data())
def test_a_slip_of_one_letter_is_found(chip: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([one for one in EVERYWHERE if not one.startswith("launch")]))
    base, suffix = split_name(chip, name)
    at = data.draw(st.integers(min_value=4, max_value=len(base) - 1))
    typed = f"{base[:at]}{base[at + 1 :]}.{suffix}"
    if not has(chip, typed):
        assert name in near(chip, typed, n=5)


def test_near_keeps_the_suffix_where_it_fits() -> None:
    assert near("gh100", "sm__thruput.max.pct_of_peak_sustained_active")[0] == "sm__throughput.max.pct_of_peak_sustained_active"
    assert near("gh100", "dram__bytes_op_read.sum.per_second")[0] == "dram__bytes_read.sum.per_second"
    assert near("gh100", "sm__throughput") == ("sm__throughput.avg.pct_of_peak_sustained_elapsed",)
    assert near("gh100", "zzzzqqqq") == ()


@pytest.mark.slow
def test_near_is_much_faster_than_difflib_over_the_list() -> None:
    import difflib

    name = "smsp__sass_thread_inst_executed_op_hfmaa_pred_on"
    near("gh100", name)
    theirs = lines_run(lambda: difflib.get_close_matches(name, base_names("gh100")))
    assert lines_run(lambda: near("gh100", f"{name}.sum")) < theirs / 2


@pytest.mark.parametrize(
    ("device", "chip"),
    [
        ("NVIDIA H100 80GB HBM3", "gh100"),
        ("NVIDIA H100 PCIe", "gh100"),
        ("NVIDIA H200", "gh100"),
        ("NVIDIA GH200 480GB", "gh100"),
        ("NVIDIA A100-SXM4-80GB", "ga100"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "ga100"),
        ("NVIDIA L4", "ad102"),
        ("NVIDIA L40S", "ad102"),
        ("NVIDIA GeForce RTX 4090", "ad102"),
        ("NVIDIA RTX 6000 Ada Generation", "ad102"),
        ("NVIDIA B200", "gb100"),
        ("NVIDIA GB200", "gb100"),
        ("NVIDIA GeForce RTX 5090", "gb202"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "gb202"),
    ],
)
def test_the_chip_of_a_device(device: str, chip: str) -> None:
    assert chip_of_device(device) == chip


@pytest.mark.parametrize(
    "device", ["NVIDIA A10G", "Tesla T4", "NVIDIA B300 SXM6 AC", "NVIDIA GB10", "NVIDIA RTX A6000", "AMD MI300X", ""]
)
def test_a_device_without_a_list_says_why(device: str) -> None:
    found = chip_of_device(device)
    assert isinstance(found, Missing)
    assert found.why


def test_an_unknown_chip_is_refused() -> None:
    with pytest.raises(ConfigError, match="gh999"):
        problem("gh999", "sm__throughput")


def test_what_ncu_says_instead_of_a_list_is_a_parse_error() -> None:
    for text in ("", "==ERROR== Unknown chip gb100\n", "\x00" * 1000):
        with pytest.raises(ParseError):
            names_listed(text)


# --- against NVIDIA's own tool -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def listed(real_ncu: Path) -> dict[str, str]:
    """Compare with the installed ncu for each chip that it knows; an older ncu does not know Blackwell."""
    answers = {chip: ask([str(real_ncu), "--query-metrics", "--chips", chip], timeout_s=HANG_S) for chip in CHIPS}
    found = {chip: text for chip, text in answers.items() if text}
    assert {"ga100", "ad102", "gh100"} <= found.keys()
    return found


def test_the_tool_agrees_on_what_every_name_stands_for(listed: dict[str, str]) -> None:
    for text in listed.values():
        rows = re.findall(r"^(\S+__\S+)\s+(Counter|Ratio|Throughput)\b", text, re.MULTILINE)
        assert len(rows) > 2000
        assert [(name, kind) for name, kind in rows if kind_of(name).value != kind.lower()] == []


def test_the_tool_knows_most_of_the_shipped_names(listed: dict[str, str]) -> None:
    for chip, text in listed.items():
        known = names_listed(text)
        assert len(known & base_names(chip)) > 0.9 * len(known), chip


def test_the_tool_agrees_on_suffixes(real_ncu: Path) -> None:
    samples = ("dram__bytes_read", "lts__t_sector_hit_rate", "sm__throughput")
    argv = [str(real_ncu), "--query-metrics-mode", "suffix", "--chips", "gh100", "--metrics", ",".join(samples)]
    text = ask(argv, timeout_s=HANG_S) or ""
    for base in samples:
        said = set(re.findall(rf"^{base}\.(\S+)", text, re.MULTILINE))
        assert said == set(kind_of(base).suffixes), base


def test_facts_of_a_launch_are_no_counters() -> None:
    assert len(launch_names()) > 200
    assert all(not (launch_names() & base_names(chip)) for chip in CHIPS)

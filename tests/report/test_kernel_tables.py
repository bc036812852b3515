"""kernels.md and the kernels of a report."""

import re

import pytest

from kernel_fixtures import H200, counted, launch, report_of, traced_uses
from llm_perf_opt.analysis.kernels.counter_selftest import KnownCopy, KnownGemm, KnownWork, judge
from llm_perf_opt.analysis.kernels.evidence import stage_hfu
from llm_perf_opt.analysis.kernels.table import StageKernels, kernel_table
from llm_perf_opt.analysis.limits.peaks import Peaks, RateLimits
from llm_perf_opt.core.machine_records import CounterProblem, CounterReport, KernelUse
from llm_perf_opt.core.records import Missing
from llm_perf_opt.counters.catalog import roles
from llm_perf_opt.report import kernel_tables
from llm_perf_opt.report.document import Table
from llm_perf_opt.report.kernel_tables import kernel_blocks, kernels_table
from llm_perf_opt.report.markdown import escape
from llm_perf_opt.traces.ncu_csv import read_ncu
from rendered import kernels_page, markdown_of

HOPPER = roles("gh100")
ROOFS = (Peaks("datasheet", "", 989e12, 4.8e12), Peaks("measured", "", Missing("not measured"), Missing("not measured")))


@pytest.fixture(scope="module")
def stages() -> tuple[StageKernels, ...]:
    return kernel_table(traced_uses(), counted(), HOPPER)


def tables(page: str) -> list[list[str]]:
    return [line.strip("|").split(" | ") for line in page.splitlines() if line.startswith("| ")]


def test_the_page_shows_every_kernel_with_its_counters(stages: tuple[StageKernels, ...]) -> None:
    work = KnownWork((KnownGemm("gemm", 4096, 4096, 4096),), KnownCopy("copy", 1 << 30))
    selftest = judge(read_ncu(H200 / "ncu_gemm_copy_gemv_raw.csv"), work, HOPPER)
    hfus = [
        stage_hfu(stages[0], ROOFS, 4.73e-3, 1.92e11),
        stage_hfu(stages[1], ROOFS, Missing("no clean pass"), Missing("no model")),
    ]
    page = kernels_page(stages, hfus, selftest)
    rows = [row for row in tables(page) if row[0].strip().isdigit()]
    assert len(rows) == sum(len(stage.rows) for stage in stages)
    assert "Counter self-test passed" in page
    assert "137,438,953,472 FLOP | 137,438,953,472 FLOP" in page
    assert "counters for 100.0 % of it." in page
    assert "by name, from launches with another grid" in page
    assert "| prefill | ≥ 4.31 % |" in page
    assert "× 1.05" in page
    assert re.search(r"n/a \(\w\): no clean pass", page)
    head = next(row for row in rows if "384x8" in row[1] and row[2] == "8")
    assert head[6:8] == ["34.94 TFLOP/s", "4,449 GB/s"]
    assert re.search(r"† For \d+ of \d+ kernels", page)
    assert escape("sm__ops_path_tensor_src_fp8.sum") in page
    assert len({len(row) for row in rows}) == 1


def test_names_are_data(stages: tuple[StageKernels, ...]) -> None:
    nasty = KernelUse("decode", "<script>alert(1)</script>|`x`\n# big", 1, 32, 1, 10)
    page = kernels_page(kernel_table([nasty], {}, HOPPER))
    assert "<script>" not in page.replace("\\<script", "")
    assert "\n# big" not in page
    assert {len(row) for row in tables(page) if row[0].strip().isdigit()} == {6}, "without those of the counters"
    assert all("<" not in line.replace("\\<", "") for line in kernels_page(stages).splitlines())


def test_without_counters_the_page_says_why() -> None:
    page = kernels_page(kernel_table(traced_uses(), {"decode": Missing("ncu is not on this machine")}, HOPPER))
    assert "counters n/a: ncu is not on this machine." in page
    assert re.search(r"FLOP/s; .*: n/a: ncu is not on this machine", page)
    assert "| n/a" not in page, "columns without a value are left out"
    assert "**Counter self-test:** n/a: no counters were read" in page
    assert "HFU" not in page


def test_without_a_trace() -> None:
    assert kernels_page(Missing("no pass saw kernels")) == "# Kernels\n\n**Kernels:** n/a: no pass saw kernels\n"


def test_a_report_holds_the_longest_and_the_rest(stages: tuple[StageKernels, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_tables, "MOST_ROWS", 3)
    table = kernels_table(stages)
    assert [row[1].text for row in table.rows if "others" in row[1].text] == [f"{len(stage.rows) - 3} others" for stage in stages]
    assert "kernels.md" in table.foot
    blocks = kernel_blocks(stages, [stage_hfu(stages[0], ROOFS, 4.73e-3, 1.92e11)])
    assert [block.id for block in blocks if isinstance(block, Table)] == ["kernels", "counters", "hfu"]


def test_a_failed_self_test_is_loud() -> None:
    failed = judge(report_of(launch("x", 1)), KnownWork((KnownGemm("gemm", 128, 128, 128),), KnownCopy("copy", 100)), HOPPER)
    assert not isinstance(failed, Missing)
    page = kernels_page(kernel_table(traced_uses(), {"decode": failed.doubt or Missing("")}, HOPPER), (), failed)
    assert "self-test FAILED, so no counter is used" in page
    assert "the counter self-test failed" in page


def test_both_pages_mark_what_ran_under_other_conditions_and_what_may_be_no_work() -> None:
    uses = [KernelUse("decode", "add", 1, 128, 1, 4_110), KernelUse("decode", "gemm", 1, 128, 1, 9_000)]
    sampled = [
        launch("add", 1, read=10_000_000, write=5_000_000, time=7_680, tensor=0, vector=0, half=250_000, sm=12.2),
        launch("gemm", 1, read=1_000, write=0, time=9_100, tensor=10**9, vector=0, half=0, sm=50),
    ]
    stages = kernel_table(uses, {"decode": report_of(*sampled)}, HOPPER)
    for page in (kernels_page(stages), markdown_of(kernel_blocks(stages))):
        add, gemm = ("".join(line for line in page.splitlines() if f" | {name} |" in line) for name in ("add", "gemm"))
        assert "| 3,650 GB/s † |" in add, "bytes under the tool over the trace's time"
        assert "| 12.2 † |" in add
        assert "| 0 FLOP/s ‡ |" in add, "packed half instructions are in no rate"
        assert "†" not in gemm
        assert "‡" not in gemm
        assert "† For 1 of 2 kernels (31.4 % of the time), the duration under Nsight Compute differs" in page
        assert "‡ 1 of 2 kernels also issued packed half-precision instructions, at most 1.000 MFLOP in all." in page


def test_both_pages_say_which_counters_were_lost_in_a_stage() -> None:
    lost = CounterProblem("counters_missing", "Without a value in every kernel: lts__t_bytes.sum.", False)
    report = CounterReport((launch("f", 1, tensor=1),), {}, (lost,))
    stages = kernel_table([KernelUse("decode", "f", 1, 128, 1, 10)], {"decode": report}, HOPPER)
    for page in (kernels_page(stages), markdown_of(kernel_blocks(stages))):
        assert escape(lost.what) in page


def test_a_rate_above_the_devices_peak_is_no_number() -> None:
    limits = RateLimits(1e12, 1e9)
    sampled = launch("f", 1, tensor=2_000_000, read=1_500, write=0, time=1_000)
    stages = kernel_table([KernelUse("decode", "f", 1, 128, 1, 1_000)], {"decode": report_of(sampled)}, HOPPER, limits=limits)
    for page in (kernels_page(stages), markdown_of(kernel_blocks(stages))):
        assert "exceed the device's highest peak, 1 TFLOP/s" in page
        assert "exceed the device's 1 GB/s" in page
        assert "| 1.500 kB |" in page
        assert "1.500 GB/s" not in page

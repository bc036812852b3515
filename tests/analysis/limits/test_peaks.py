"""Measured peaks as denominators, and the highest rates of a device."""

from dataclasses import replace

from llm_perf_opt.analysis.limits.hardware import hardware_named
from llm_perf_opt.analysis.limits.peaks import (
    NO_LIMITS,
    Peaks,
    bandwidth,
    in_fp32,
    limits_of,
    measured_hardware,
    peak_flops,
    possible_percentage,
)
from llm_perf_opt.analysis.stats import summarize
from llm_perf_opt.core.machine_records import CeilingRow, Ceilings
from llm_perf_opt.core.records import Missing

ROWS = (
    CeilingRow("gemm_bf16", "GEMM bf16", "FLOP/s", summarize([790e12, 796e12, 798e12]), "8192×8192×8192"),
    CeilingRow("gemm_fp8", "GEMM fp8", "FLOP/s", Missing("compute capability 8.0 has none"), ""),
    CeilingRow("read", "read bandwidth", "B/s", summarize([4.34e12, 4.348e12, 4.35e12]), "sum"),
)
CEILINGS = Ceilings("cuda", "NVIDIA H200", "GPU-1", "580", "2.11", 16, "2026-01-01T00:00:00+00:00", 9.0, 7.0, (), ROWS)


def test_a_measured_peak_is_the_median() -> None:
    assert peak_flops(CEILINGS, "bf16") == 796e12
    assert bandwidth(CEILINGS) == 4.348e12


def test_a_missing_peak_keeps_its_reason() -> None:
    assert peak_flops(CEILINGS, "fp8") == Missing("no measured peak of fp8 matrix products: compute capability 8.0 has none")


def test_what_was_never_measured_is_named() -> None:
    assert peak_flops(CEILINGS, "int8") == Missing("the measured peaks of NVIDIA H200 do not include int8 matrix products")


def test_measured_hardware_says_what_is_of_the_datasheet() -> None:
    sheet = hardware_named("h200")
    found = measured_hardware(sheet, CEILINGS)
    assert (found.bandwidth_bytes_per_s, found.peaks["bf16"].flops_per_s) == (4.348e12, 796e12)
    assert "bandwidth" not in found.source
    unread = measured_hardware(sheet, replace(CEILINGS, rows=ROWS[:1]))
    assert unread.bandwidth_bytes_per_s == sheet.bandwidth_bytes_per_s
    assert "bandwidth and memory size of the NVIDIA H200" in unread.source


def test_a_format_slower_than_fp32_on_a_cpu_has_the_peak_of_fp32() -> None:
    def product(dtype: str, peak: float) -> CeilingRow:
        return CeilingRow(f"gemm_{dtype}", dtype, "FLOP/s", summarize([peak] * 3), "")

    measured = replace(CEILINGS, rows=(product("fp32", 100e9), product("bf16", 20e9), product("fp16", 150e9)))
    on_cpu = replace(measured, device_kind="cpu")
    assert (peak_flops(on_cpu, "bf16"), peak_flops(on_cpu, "fp16"), peak_flops(on_cpu, "fp32")) == (100e9, 150e9, 100e9)
    assert peak_flops(measured, "bf16") == 20e9
    assert (in_fp32(on_cpu, "bf16"), in_fp32(on_cpu, "fp16"), in_fp32(measured, "bf16")) == (True, False, False)
    assert isinstance(peak_flops(on_cpu, "fp8"), Missing)


def test_each_cache_level_has_its_bandwidth() -> None:
    row = CeilingRow("read_l3", "read bandwidth, L3", "B/s", summarize([60e9] * 3), "sum")
    assert bandwidth(replace(CEILINGS, rows=(*ROWS, row)), 3) == 60e9
    assert isinstance(bandwidth(CEILINGS, 3), Missing)


UNKNOWN = Missing("no such device")


def test_the_datasheet_takes_precedence_over_configured_peaks() -> None:
    found = limits_of(hardware_named("h200"), Peaks("datasheet", "", 1.0, 2.0))
    assert (found.flops_per_s, found.bytes_per_s) == (1979e12, 4800e9), "fp8, for a kernel may compute in any format"
    given = limits_of(UNKNOWN, Peaks("datasheet", "", 1.0, 2.0))
    assert (given.flops_per_s, given.bytes_per_s) == (1.0, 2.0)
    assert limits_of(UNKNOWN) == NO_LIMITS


def test_a_share_is_at_most_the_whole() -> None:
    assert possible_percentage(100.0) == 100.0
    assert possible_percentage(UNKNOWN) == UNKNOWN
    assert isinstance(possible_percentage(100.1), Missing)

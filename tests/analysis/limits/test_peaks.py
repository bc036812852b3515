"""Measured peaks as denominators, and the highest rates of a device."""

from llm_perf_opt.analysis.limits.hardware import hardware_named
from llm_perf_opt.analysis.limits.peaks import NO_LIMITS, Peaks, bandwidth, limits_of, peak_flops, possible_percentage
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

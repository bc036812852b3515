"""The highest rates of a device."""

from llm_perf_opt.analysis.limits.hardware import hardware_named
from llm_perf_opt.analysis.limits.peaks import NO_LIMITS, Peaks, limits_of, possible_percentage
from llm_perf_opt.core.records import Missing

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

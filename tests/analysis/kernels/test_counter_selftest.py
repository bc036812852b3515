"""The counter self-test, with real and with wrong counts of known work."""

from dataclasses import asdict, replace

import pytest

from kernel_fixtures import H200, launch, report_of
from llm_perf_opt.analysis.kernels.counter_selftest import KnownCopy, KnownGemm, KnownWork, SelfTest, judge, reported_work
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.machine_records import CountedKernel, CounterProblem, CounterReport
from llm_perf_opt.core.records import Missing
from llm_perf_opt.counters.catalog import roles
from llm_perf_opt.traces.ncu_csv import read_ncu

HOPPER = roles("gh100")
WORK = KnownWork((KnownGemm("gemm", 4096, 4096, 4096),), KnownCopy("copy", 1 << 30))


def within(name: str, kernel: CountedKernel) -> CountedKernel:
    return replace(kernel, ranges=("LLM@selftest", f"LLM@{name}"))


def verdict(flops: float = 2.0 * 4096**3, read: float = 1 << 30, write: float = 1 << 30, extra: float | None = None) -> SelfTest:
    kernels = [within("gemm", launch("g", 1, tensor=flops)), within("copy", launch("c", 1, read=read, write=write))]
    if extra is not None:
        kernels.append(within("gemm", launch("reduce", 1, tensor=extra)))
    found = judge(report_of(*kernels), WORK, HOPPER)
    assert not isinstance(found, Missing)
    return found


def test_the_recorded_count_is_right() -> None:
    found = judge(read_ncu(H200 / "ncu_gemm_copy_gemv_raw.csv"), WORK, HOPPER)
    assert not isinstance(found, Missing)
    assert found.passed
    assert found.doubt is None
    assert [row.counted for row in found.rows] == [137_438_953_472, 1_073_785_344, 1_049_286_912]


def test_a_product_split_over_kernels_is_summed() -> None:
    assert verdict(flops=2.0 * 4096**3 - 512, extra=512).passed


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"flops": 4096.0**3}, "68,719,476,736 FLOP counted, 137,438,953,472 executed"),
        ({"flops": 4.0 * 4096**3}, "GEMM 4096×4096×4096"),
        ({"flops": 2.0 * 4096**3 - 1}, "GEMM"),
        ({"flops": 2.02 * 4096**3}, "no matrix product was counted exactly"),
        ({"read": 0.94 * 2**30}, "DRAM read"),
        ({"write": 1.06 * 2**30}, "DRAM written"),
        ({"flops": 0.0}, "GEMM"),
    ],
)
def test_a_wrong_count_is_not_believed(wrong: dict[str, float], why: str) -> None:
    found = verdict(**wrong)
    assert not found.passed
    assert why in found.why
    assert isinstance(found.doubt, Missing)
    assert why in found.doubt.why


def test_padding_is_allowed_next_to_an_exact_product() -> None:
    work = replace(WORK, gemms=(*WORK.gemms, KnownGemm("other", 128, 256, 512)))
    kernels = [
        within("gemm", launch("g", 1, tensor=2 * 4096**3)),
        within("other", launch("p", 1, tensor=2 * 144 * 256 * 512)),
        within("copy", launch("c", 1, read=1 << 30, write=1 << 30)),
    ]
    found = judge(report_of(*kernels), work, HOPPER)
    assert not isinstance(found, Missing)
    assert found.passed


def test_nothing_counted_fails_with_a_reason() -> None:
    empty = judge(report_of(), WORK, HOPPER)
    assert not isinstance(empty, Missing)
    assert not empty.passed
    assert "no kernel was counted in its range" in empty.why
    refused = judge(CounterReport((), {}, (CounterProblem("no_permission", "ERR_NVGPUCTRPERM", True),)), WORK, HOPPER)
    assert not isinstance(refused, Missing)
    assert refused.why == "ERR_NVGPUCTRPERM"
    blind = judge(report_of(within("gemm", launch("g", 1, time=5)), within("copy", launch("c", 1, time=5))), WORK, HOPPER)
    assert not isinstance(blind, Missing)
    assert "was not collected" in blind.why


def test_a_chip_without_known_counters_has_no_verdict() -> None:
    assert judge(report_of(), WORK, Missing("unknown chip")) == Missing("unknown chip")
    assert isinstance(judge(report_of(), WORK, replace(HOPPER, tensor_flops={})), Missing)


def test_the_reported_work_is_validated() -> None:
    from llm_perf_opt.runners.measure.counter_selftest import WORK as RUN

    assert reported_work({"event": "selftest", **asdict(RUN)}) == RUN
    with pytest.raises(ParseError, match="did not report its work"):
        reported_work({"event": "selftest", "gemms": "none"})

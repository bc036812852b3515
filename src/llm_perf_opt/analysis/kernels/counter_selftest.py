"""Check hardware counters against work of known size.

A matrix product of M×K by K×N executes 2·M·N·K FLOPs. A kernel whose tile size does not divide the matrix executes more, and
the library chooses the kernel. Therefore the test runs several products: none may count less or far more, and one must be exact.
A copy much larger than the cache reads and writes its size in DRAM; the tolerance covers what remains in the cache.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from llm_perf_opt.analysis.kernels.join import counter_sum
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.machine_records import CounterReport
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.counters.catalog import CounterRoles

COPY_TOLERANCE = 0.05
PADDING = 0.25
"""How much more a kernel may execute if its tile size does not divide the matrix; a wrong factor would be 2 or more."""


@dataclass(frozen=True)
class KnownGemm:
    """A bf16 matrix product and its NVTX range."""

    range: str
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """FLOPs of the product."""
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True)
class KnownCopy:
    """A kernel that reads and writes this many bytes, and its NVTX range."""

    range: str
    size_bytes: int


@dataclass(frozen=True)
class KnownWork:
    """The work of a self-test."""

    gemms: tuple[KnownGemm, ...]
    copy: KnownCopy


@dataclass(frozen=True)
class SelfTestRow:
    """One expected and one counted value."""

    what: str
    unit: str
    expected: float
    counted: Maybe[float]
    allowed: str
    passed: bool


@dataclass(frozen=True)
class SelfTest:
    """The result; `why` says what is wrong, or that nothing is."""

    passed: bool
    rows: tuple[SelfTestRow, ...]
    why: str

    @property
    def doubt(self) -> Missing | None:
        """Replaces every counter if the test failed, otherwise None."""
        return None if self.passed else Missing(f"the counter self-test failed: {self.why}")


def reported_work(fields: dict[str, Any]) -> KnownWork:
    """Return the work that the child process reported."""
    try:
        return msgspec.convert(fields, KnownWork)
    except msgspec.ValidationError as error:
        raise ParseError(f"The counter self-test did not report its work: {error}.") from error


def judge(report: CounterReport, ran: KnownWork, roles: Maybe[CounterRoles]) -> Maybe[SelfTest]:
    """Compare the counts with the work; Missing if the chip's counters are unknown."""
    if isinstance(roles, Missing):
        return roles
    if not roles.tensor_flops:
        return Missing(roles.note or f"no counter of executed FLOPs is known for {roles.chip}")
    fatal = next((problem for problem in report.problems if problem.fatal), None)
    if fatal:
        return SelfTest(False, (), fatal.what)
    gemms = [_gemm(report, gemm, roles) for gemm in ran.gemms]
    copies = [
        _copy(report, ran.copy, "DRAM read", roles.dram_read_bytes),
        _copy(report, ran.copy, "DRAM written", roles.dram_write_bytes),
    ]
    exact = any(row.counted == row.expected for row in gemms)
    wrong = [_sentence(row) for row in (*gemms, *copies) if not row.passed]
    if not exact and not wrong:
        wrong = ["no matrix product was counted exactly: " + "; ".join(_sentence(row) for row in gemms)]
    rows = (*gemms, *copies)
    return SelfTest(not wrong, rows, "; ".join(wrong) or "every count is correct")


def _gemm(report: CounterReport, gemm: KnownGemm, roles: CounterRoles) -> SelfTestRow:
    counted = _counted(report, gemm.range, roles.tensor_flops)
    passed = not isinstance(counted, Missing) and gemm.flops <= counted <= gemm.flops * (1 + PADDING)
    return SelfTestRow(
        f"GEMM {gemm.m}×{gemm.n}×{gemm.k}",
        "FLOP",
        gemm.flops,
        counted,
        f"exact, or up to {PADDING * 100:.0f} % more by padding",
        passed,
    )


def _copy(report: CounterReport, copy: KnownCopy, what: str, counter: str) -> SelfTestRow:
    counted = _counted(report, copy.range, {counter: 1})
    passed = not isinstance(counted, Missing) and abs(counted - copy.size_bytes) <= COPY_TOLERANCE * copy.size_bytes
    return SelfTestRow(f"copy, {what}", "byte", copy.size_bytes, counted, f"± {COPY_TOLERANCE * 100:.0f} %", passed)


def _counted(report: CounterReport, name: str, counters: dict[str, int]) -> Maybe[float]:
    """Return the sum over all kernels of a range, because a product may be split over several."""
    kernels = [kernel for kernel in report.kernels if name in (found.rpartition("@")[2] for found in kernel.ranges)]
    return counter_sum(kernels, counters) if kernels else Missing("no kernel was counted in its range")


def _sentence(row: SelfTestRow) -> str:
    if isinstance(row.counted, Missing):
        return f"{row.what}: {row.counted.why}"
    return f"{row.what}: {row.counted:,.0f} {row.unit} counted, {row.expected:,.0f} executed"

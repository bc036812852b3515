"""Are this machine's counters to be believed? Work of known size was counted; this says whether the counts are right.

A matrix product of M×K by K×N executes 2·M·N·K FLOPs. A kernel whose tile does not divide the matrix executes more, and which
kernel runs is the library's choice. So several products are run: none may count less or far more, one must be exact.
A copy that is much larger than the cache reads and writes its size in DRAM; what is still in the cache when it ends is allowed.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from llm_perf_opt.analysis.kernels.join import NOT_COLLECTED
from llm_perf_opt.core.errors import ParseError
from llm_perf_opt.core.machine_records import CountedKernel, CounterReport
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.counters.catalog import CounterRoles

COPY_TOLERANCE = 0.05
PADDING = 0.25
"""How much more than needed a kernel may execute because its tile does not divide the matrix; a wrong factor is 2 or more."""


@dataclass(frozen=True)
class KnownGemm:
    """A bf16 matrix product and the NVTX range it ran in."""

    range: str
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """What it needs."""
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True)
class KnownCopy:
    """A kernel that reads and writes this many bytes, and the NVTX range it ran in."""

    range: str
    size_bytes: int


@dataclass(frozen=True)
class KnownWork:
    """What a self-test ran."""

    gemms: tuple[KnownGemm, ...]
    copy: KnownCopy


@dataclass(frozen=True)
class SelfTestRow:
    """One figure: what it must be, and what was counted."""

    what: str
    unit: str
    expected: float
    counted: Maybe[float]
    allowed: str
    passed: bool


@dataclass(frozen=True)
class SelfTest:
    """The verdict; `why` says what is wrong, or that nothing is."""

    passed: bool
    rows: tuple[SelfTestRow, ...]
    why: str

    @property
    def doubt(self) -> Missing | None:
        """In place of every counter where the test failed."""
        return None if self.passed else Missing(f"the counter self-test failed: {self.why}")


def told_work(fields: dict[str, Any]) -> KnownWork:
    """What the child said it ran."""
    try:
        return msgspec.convert(fields, KnownWork)
    except msgspec.ValidationError as error:
        raise ParseError(f"The counter self-test did not say what it ran: {error}.") from error


def judge(report: CounterReport, ran: KnownWork, roles: Maybe[CounterRoles]) -> Maybe[SelfTest]:
    """Compare what was counted with what was run; Missing where this chip's counters are not known."""
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
    return SelfTest(not wrong, rows, "; ".join(wrong) or "every count is right")


def _gemm(report: CounterReport, gemm: KnownGemm, roles: CounterRoles) -> SelfTestRow:
    counted = _sum(_within(report, gemm.range), roles.tensor_flops)
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
    counted = _sum(_within(report, copy.range), {counter: 1})
    passed = not isinstance(counted, Missing) and abs(counted - copy.size_bytes) <= COPY_TOLERANCE * copy.size_bytes
    return SelfTestRow(f"copy, {what}", "byte", copy.size_bytes, counted, f"± {COPY_TOLERANCE * 100:.0f} %", passed)


def _within(report: CounterReport, name: str) -> list[CountedKernel]:
    return [kernel for kernel in report.kernels if name in (found.rpartition("@")[2] for found in kernel.ranges)]


def _sum(kernels: list[CountedKernel], counters: dict[str, int]) -> Maybe[float]:
    """Over all kernels of a range: a product may be split over several."""
    if not kernels:
        return Missing("no kernel was counted in its range")
    total, found = 0.0, False
    for kernel in kernels:
        for name, factor in counters.items():
            value = kernel.counters.get(name)
            if isinstance(value, Missing):
                return value
            if value is not None:
                total, found = total + value * factor, True
    return total if found else NOT_COLLECTED


def _sentence(row: SelfTestRow) -> str:
    if isinstance(row.counted, Missing):
        return f"{row.what}: {row.counted.why}"
    return f"{row.what}: {row.counted:,.0f} {row.unit} counted, {row.expected:,.0f} run"

"""Where the unprofiled time of a stage goes: rows that sum to it, to the nanosecond.

Kernels take as long below a profiler as without one; gaps do not. So the device's busy time is the trace's, the wall time is the
unprofiled pass's where there is one, and the difference of the two is the unprofiled idle time. It is shared out among the causes
in the proportions of the trace: the assumption is that a profiler stretches all causes of idleness alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from llm_perf_opt.analysis.trace.idle import IdleCause
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.units import duration


class BudgetKey(str, Enum):
    """A row of the budget, in the order they are read."""

    FLOOR = "floor"
    EXTRA_WORK = "extra_work"
    BELOW_ROOF = "below_roof"
    EXPOSED = "exposed_copies"
    LAUNCH = "launch_gaps"
    SYNC = "sync"
    HOST = "host"
    UNEXPLAINED = "unexplained"
    DISAGREEMENT = "disagreement"

    def __str__(self) -> str:
        return self.value

    @property
    def label(self) -> str:
        """As it stands in tables."""
        return _LABELS[self]


_LABELS = {
    BudgetKey.FLOOR: "roofline time: the least work at the best known peaks",
    BudgetKey.EXTRA_WORK: "extra bytes and FLOPs, at the same peaks",
    BudgetKey.BELOW_ROOF: "kernels above roofline",
    BudgetKey.EXPOSED: "exposed copies and communication",
    BudgetKey.LAUNCH: "launch gaps",
    BudgetKey.SYNC: "sync",
    BudgetKey.HOST: "host",
    BudgetKey.UNEXPLAINED: "idle without a known cause",
    BudgetKey.DISAGREEMENT: "busy beyond the unprofiled time",
}

_ROW_OF_CAUSE = {
    IdleCause.LAUNCH_BOUND: BudgetKey.LAUNCH,
    IdleCause.DEVICE_LATENCY: BudgetKey.LAUNCH,
    IdleCause.SYNC: BudgetKey.SYNC,
    IdleCause.HOST_BETWEEN_STEPS: BudgetKey.HOST,
    IdleCause.COPY_WAIT: BudgetKey.EXPOSED,
    IdleCause.OTHER_WORK: BudgetKey.UNEXPLAINED,
    IdleCause.UNKNOWN: BudgetKey.UNEXPLAINED,
}


@dataclass(frozen=True)
class BudgetRow:
    """One use of the time."""

    key: BudgetKey
    ns: int
    """Of all units of the trace together."""
    share: float
    """Of the wall time."""
    note: str = ""

    @property
    def label(self) -> str:
        """As it stands in tables."""
        return self.key.label


@dataclass(frozen=True)
class BudgetProblem:
    """Figures of two passes that do not fit together."""

    id: str
    what: str


@dataclass(frozen=True)
class StageBudget:
    """One stage: its rows sum to `wall_ns`."""

    stage: str
    units: int
    """Decode steps, prefills or steps that the trace holds."""
    wall_ns: int
    wall_source: str
    busy_ns: int
    rows: tuple[BudgetRow, ...]
    problems: tuple[BudgetProblem, ...] = ()
    notes: tuple[str, ...] = ()
    """What is folded into another row, and what is assumed."""

    def ns(self, key: BudgetKey) -> int:
        """One row's time, 0 where it has none."""
        return next((row.ns for row in self.rows if row.key is key), 0)

    @property
    def idle_ns(self) -> int:
        """Wall time in which the device did nothing."""
        return self.wall_ns - self.busy_ns


_SHOWN_AT_ZERO = (BudgetKey.FLOOR, BudgetKey.EXTRA_WORK, BudgetKey.BELOW_ROOF, BudgetKey.LAUNCH)
"""Where they are known at all: that nothing of the time goes there is worth a row."""


@dataclass(frozen=True)
class BudgetFacts:
    """What a budget is made from, of as many units as the trace holds."""

    stage: str
    units: int
    wall_ns: int
    """Unprofiled; the trace's own where there is no unprofiled pass."""
    wall_source: str
    unprofiled: bool
    trace_wall_ns: int
    """Of the stage's labels."""
    span_ns: int
    """Of its device windows."""
    busy_ns: int
    compute_ns: int
    """Union of its kernels, collectives left out."""
    idle: Mapping[IdleCause, int]
    floor_ns: Maybe[int] = field(default_factory=lambda: Missing("no cost model"))
    counted_ns: Maybe[int] = field(default_factory=lambda: Missing("no counters were read"))
    """The executed work of the counted kernels, each at its roof."""
    counted_share: float = 0.0
    """Of the kernel time that has counters."""


def stage_budget(facts: BudgetFacts) -> StageBudget:
    """Share the wall time out."""
    problems: list[BudgetProblem] = []
    notes: list[str] = []
    amounts = _kernel_rows(facts, problems, notes)
    amounts[BudgetKey.EXPOSED] = facts.busy_ns - facts.compute_ns
    idle_ns = facts.wall_ns - facts.busy_ns
    if idle_ns < 0:
        amounts[BudgetKey.DISAGREEMENT] = idle_ns
        problems.append(
            BudgetProblem(
                "busy_over_wall",
                f"the device was busy for {duration(facts.busy_ns)} of the trace, but the stage takes {duration(facts.wall_ns)} "
                "unprofiled: kernels ran slower under the profiler, or the two passes did different work",
            )
        )
    else:
        for key, ns in _idle_rows(facts, idle_ns).items():
            amounts[key] = amounts.get(key, 0) + ns
    if facts.unprofiled:
        notes.append(
            "Causes of idle time are in the proportions of the trace; their sum is the unprofiled time minus the kernel time."
        )
    else:
        notes.append("There is no unprofiled pass: gaps are those under the profiler, which are longer than without it.")
    rows = tuple(
        BudgetRow(key, amounts[key], amounts[key] / facts.wall_ns if facts.wall_ns else 0.0)
        for key in BudgetKey
        if key in amounts and (amounts[key] or key in _SHOWN_AT_ZERO)
    )
    return StageBudget(
        facts.stage, facts.units, facts.wall_ns, facts.wall_source, facts.busy_ns, rows, tuple(problems), tuple(notes)
    )


def _kernel_rows(facts: BudgetFacts, problems: list[BudgetProblem], notes: list[str]) -> dict[BudgetKey, int]:
    """Roofline time, extra work, and what kernels take beyond both."""
    if isinstance(facts.floor_ns, Missing):
        notes.append(f"All kernel time is in one row, because the roofline time is n/a: {facts.floor_ns.why}.")
        return {BudgetKey.BELOW_ROOF: facts.compute_ns}
    found = {BudgetKey.FLOOR: facts.floor_ns}
    extra = 0
    if isinstance(facts.counted_ns, Missing):
        notes.append(f"Extra bytes and FLOPs are included in 'kernels above roofline': {facts.counted_ns.why}.")
    else:
        extra = max(facts.counted_ns - facts.floor_ns, 0)
        found[BudgetKey.EXTRA_WORK] = extra
        if facts.counted_share < 0.9995:
            notes.append(
                f"Counters cover {facts.counted_share:.0%} of the kernel time: extra bytes and FLOPs are at least what is shown."
            )
    below = facts.compute_ns - facts.floor_ns - extra
    found[BudgetKey.BELOW_ROOF] = below
    if below < 0:
        problems.append(
            BudgetProblem(
                "kernels_under_floor",
                f"kernels took {duration(facts.compute_ns)}, less than the {duration(facts.floor_ns + extra)} that their work "
                "needs at the known peaks: the peaks, the cost model or the trace do not belong together",
            )
        )
    return found


def _idle_rows(facts: BudgetFacts, idle_ns: int) -> dict[BudgetKey, int]:
    """The idle time in the trace's proportions; what lies outside the device's window is the host's."""
    weights: dict[BudgetKey, int] = {}
    for cause, ns in facts.idle.items():
        key = _ROW_OF_CAUSE[cause]
        weights[key] = weights.get(key, 0) + ns
    weights[BudgetKey.HOST] = weights.get(BudgetKey.HOST, 0) + max(facts.trace_wall_ns - facts.span_ns, 0)
    if not any(weights.values()):
        weights = {BudgetKey.HOST: 1}  # the trace was never idle, so nothing says what the host did instead
    keys = list(weights)
    return dict(zip(keys, apportion(idle_ns, [weights[key] for key in keys]), strict=True))


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Whole shares of `total` in the proportion of the weights, by largest remainder: they sum to it exactly."""
    whole = sum(weights)
    if whole <= 0:
        raise ValueError("no weight is above zero")
    shares = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda place: (-(total * weights[place] % whole), place))
    for place in by_remainder[: total - sum(shares)]:
        shares[place] += 1
    return shares

"""Where the unprofiled time of a stage goes: rows that sum to it, to the nanosecond.

A profiler does not change kernel times, but it lengthens gaps. So busy time comes from the trace, and wall time from the
unprofiled pass if there is one. Their difference is the unprofiled idle time. It is divided among the causes in the proportions
of the trace, which assumes that a profiler stretches all causes equally.

A pass may change an engine so that its ranges enclose its work. What that adds is measured without the profiler and is taken off
the idle time of the trace first: it is no part of the unprofiled time, and nobody can save it. If the changes make a stage
shorter, the trace does not contain the time that they save: it gets a row of its own, and the rest is divided.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from llm_perf_opt.analysis.stats import apportion
from llm_perf_opt.analysis.trace.idle import IdleCause
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.units import duration, percentage


class BudgetKey(str, Enum):
    """A row of the budget, in the order of the report."""

    ROOFLINE = "floor"
    EXTRA_WORK = "extra_work"
    ABOVE_ROOFLINE = "below_roof"
    EXPOSED = "exposed_copies"
    LAUNCH = "launch_gaps"
    SYNC = "sync"
    HOST = "host"
    UNCHANGED = "unchanged_engine"
    UNEXPLAINED = "unexplained"
    DISAGREEMENT = "disagreement"
    MATMUL = "matmul"
    ATTENTION = "attention"
    NORM = "norm"
    ELEMENTWISE = "elementwise"
    COMPILED = "compiled"
    MEMORY = "memory"
    COMMUNICATION = "communication"
    FRAMEWORK = "framework"
    PYTHON = "python"
    WAITING = "waiting"
    NOT_IN_TRACE = "not_in_trace"

    def __str__(self) -> str:
        return self.value

    @property
    def label(self) -> str:
        """The label in tables."""
        return _LABELS[self]


_LABELS = {
    BudgetKey.ROOFLINE: "roofline time: the least work at the best known peaks",
    BudgetKey.EXTRA_WORK: "extra bytes and FLOPs, at the same peaks",
    BudgetKey.ABOVE_ROOFLINE: "kernels above roofline",
    BudgetKey.EXPOSED: "exposed copies and communication",
    BudgetKey.LAUNCH: "launch gaps",
    BudgetKey.SYNC: "sync",
    BudgetKey.HOST: "host",
    BudgetKey.UNCHANGED: "idle only in the engine as users run it",
    BudgetKey.UNEXPLAINED: "idle without a known cause",
    BudgetKey.DISAGREEMENT: "busy beyond the unprofiled time",
    BudgetKey.MATMUL: "matrix products above roofline",
    BudgetKey.ATTENTION: "attention above roofline",
    BudgetKey.NORM: "norms above roofline",
    BudgetKey.ELEMENTWISE: "elementwise operators",
    BudgetKey.COMPILED: "compiled kernels above roofline",
    BudgetKey.MEMORY: "memory operators: copies, concatenation, allocation",
    BudgetKey.COMMUNICATION: "communication between processes",
    BudgetKey.FRAMEWORK: "framework: dispatch, views, wrapper operators",
    BudgetKey.PYTHON: "Python and modules: no operator runs",
    BudgetKey.WAITING: "waiting: the thread did not run",
    BudgetKey.NOT_IN_TRACE: "not in the trace",
}

_ROW_OF_CAUSE = {
    IdleCause.LAUNCH_BOUND: BudgetKey.LAUNCH,
    IdleCause.DEVICE_LATENCY: BudgetKey.LAUNCH,
    IdleCause.SYNC: BudgetKey.SYNC,
    IdleCause.HOST_BETWEEN_STEPS: BudgetKey.HOST,
    IdleCause.COPY_WAIT: BudgetKey.EXPOSED,
    IdleCause.OTHER_WORK: BudgetKey.UNEXPLAINED,
    IdleCause.UNKNOWN: BudgetKey.UNEXPLAINED,
    IdleCause.GRAPH_CAPTURE: BudgetKey.HOST,
}


@dataclass(frozen=True)
class BudgetRow:
    """One row: what part of the wall time was used for."""

    key: BudgetKey
    ns: int
    """Summed over all units of the trace."""
    share: float
    """Share of the wall time."""
    low_ns: int | None = None
    """Lower end of the row's uncertainty; None if it has none."""
    high_ns: int | None = None
    whole: bool = False
    """Whether the row includes its roofline time, because that is unknown."""

    @property
    def label(self) -> str:
        """The label in tables."""
        return self.key.label.removesuffix(" above roofline") if self.whole else self.key.label


@dataclass(frozen=True)
class BudgetProblem:
    """Figures of two passes that contradict each other."""

    id: str
    what: str


@dataclass(frozen=True)
class StageBudget:
    """The budget of one stage; its rows sum to `wall_ns`."""

    stage: str
    units: int
    """Decode steps, prefills or steps in the trace."""
    wall_ns: int
    wall_source: str
    busy_ns: int
    rows: tuple[BudgetRow, ...]
    problems: tuple[BudgetProblem, ...] = ()
    notes: tuple[str, ...] = ()
    """What is included in another row, and what is assumed."""

    def ns(self, key: BudgetKey) -> int:
        """Return the time of a row; 0 if the budget does not have it."""
        return next((row.ns for row in self.rows if row.key is key), 0)

    @property
    def idle_ns(self) -> int:
        """Wall time during which the device was idle."""
        return self.wall_ns - self.busy_ns


_SHOWN_AT_ZERO = (BudgetKey.ROOFLINE, BudgetKey.EXTRA_WORK, BudgetKey.ABOVE_ROOFLINE, BudgetKey.LAUNCH)
"""Rows that are shown even if they are zero."""


@dataclass(frozen=True)
class BudgetFacts:
    """The inputs of a budget, for as many units as the trace contains."""

    stage: str
    units: int
    wall_ns: int
    """Unprofiled, or the trace's own if there is no unprofiled pass."""
    wall_source: str
    unprofiled: bool
    trace_wall_ns: int
    """Wall time of the stage's labels."""
    span_ns: int
    """Summed span of its device work."""
    busy_ns: int
    compute_ns: int
    """Union of its kernels, without collectives."""
    idle: Mapping[IdleCause, int]
    roofline_ns: Maybe[int] = field(default_factory=lambda: Missing("no cost model"))
    counted_ns: Maybe[int] = field(default_factory=lambda: Missing("no counters were read"))
    """Roofline time of the work that the counted kernels executed."""
    counted_share: float = 0.0
    """Share of the kernel time that counters cover."""
    changed_ns: int = 0
    """Time that the traced pass added by changing the engine, which is no part of the unprofiled time; negative if it took some
    away."""
    changed_spread: bool = True
    """Whether `changed_ns` is known to exceed its spread; false in runs that did not record the spread."""


def stage_budget(facts: BudgetFacts) -> StageBudget:
    """Divide the wall time among the rows."""
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
        for key, ns in _idle_rows(facts, idle_ns, notes).items():
            amounts[key] = amounts.get(key, 0) + ns
    if not facts.unprofiled:
        notes.append("There is no unprofiled pass, so the gaps are those under the profiler. Without it, they would be shorter.")
    rows = tuple(
        BudgetRow(key, amounts[key], amounts[key] / facts.wall_ns if facts.wall_ns else 0.0)
        for key in BudgetKey
        if key in amounts and (amounts[key] or key in _SHOWN_AT_ZERO)
    )
    return StageBudget(
        facts.stage, facts.units, facts.wall_ns, facts.wall_source, facts.busy_ns, rows, tuple(problems), tuple(notes)
    )


def _kernel_rows(facts: BudgetFacts, problems: list[BudgetProblem], notes: list[str]) -> dict[BudgetKey, int]:
    """Return the roofline time, the extra work, and the kernel time beyond both."""
    if isinstance(facts.roofline_ns, Missing):
        notes.append(f"All kernel time is in one row, because the roofline time is n/a: {facts.roofline_ns.why}.")
        return {BudgetKey.ABOVE_ROOFLINE: facts.compute_ns}
    found = {BudgetKey.ROOFLINE: facts.roofline_ns}
    extra = 0
    if isinstance(facts.counted_ns, Missing):
        notes.append(f"Extra bytes and FLOPs are included in 'kernels above roofline': {facts.counted_ns.why}.")
    else:
        extra = max(facts.counted_ns - facts.roofline_ns, 0)
        found[BudgetKey.EXTRA_WORK] = extra
        if facts.counted_share < 0.9995:
            notes.append(
                f"Counters cover {percentage(facts.counted_share)} of the kernel time, so extra bytes and FLOPs are lower bounds."
            )
    below = facts.compute_ns - facts.roofline_ns - extra
    found[BudgetKey.ABOVE_ROOFLINE] = below
    if below < 0:
        problems.append(
            BudgetProblem(
                "kernels_under_floor",
                f"kernels took {duration(facts.compute_ns)}, less than the {duration(facts.roofline_ns + extra)} that their work "
                "needs at the known peaks: the peaks, the cost model and the trace do not match",
            )
        )
    return found


def _idle_weights(facts: BudgetFacts) -> dict[BudgetKey, int]:
    """Return the idle time of the trace by row. Time outside the span of device work is the host's."""
    weights: dict[BudgetKey, int] = {}
    for cause, ns in facts.idle.items():
        key = _ROW_OF_CAUSE[cause]
        weights[key] = weights.get(key, 0) + ns
    weights[BudgetKey.HOST] = weights.get(BudgetKey.HOST, 0) + max(facts.trace_wall_ns - facts.span_ns, 0)
    return weights


_ADDED_TO = (BudgetKey.HOST, BudgetKey.SYNC, BudgetKey.LAUNCH, BudgetKey.UNEXPLAINED)
"""Where changes of an engine add time, most likely first: host work between steps, the wait before it, late launches."""


def _idle_rows(facts: BudgetFacts, idle_ns: int, notes: list[str]) -> dict[BudgetKey, int]:
    """Divide the idle time in proportion to that of the trace, and note what is assumed.

    If the pass changed the engine, no row is longer than in the trace, which does not show what causes the rest.
    """
    weights = _idle_weights(facts)
    rows: dict[BudgetKey, int] = {}
    left = idle_ns
    if facts.unprofiled and facts.changed_ns:
        rows = _rows_of_changes(facts, weights, idle_ns, notes)
        left -= sum(rows.values())
    elif not any(weights.values()):  # the trace shows no idle time, and so no causes
        return {BudgetKey.HOST: idle_ns}
    if any(weights.values()):
        for key, ns in zip(weights, apportion(left, list(weights.values())), strict=True):
            rows[key] = rows.get(key, 0) + ns
    if facts.unprofiled and left == idle_ns:
        notes.append(
            "Idle time, the unprofiled time minus the kernel time, is divided among its causes in the proportions of the trace."
        )
    elif facts.unprofiled and left:
        notes.append(f"The other {duration(left)} of idle time are divided among their causes in the proportions of the trace.")
    return rows


def _rows_of_changes(facts: BudgetFacts, weights: dict[BudgetKey, int], idle_ns: int, notes: list[str]) -> dict[BudgetKey, int]:
    """Take what the changes of the traced pass add off the weights; return the idle time that the trace does not contain."""
    rows = {}
    if facts.changed_ns < 0:
        rows[BudgetKey.UNCHANGED] = min(-facts.changed_ns, idle_ns)
        notes.append(_not_in_trace(facts, rows[BudgetKey.UNCHANGED]))
    else:
        notes.append(_without_changes(facts, weights))
    rest = idle_ns - sum(rows.values()) - sum(weights.values())
    if rest > 0:
        rows[BudgetKey.UNEXPLAINED] = rest
        notes.append(f"{duration(rest)} of idle time have no known cause: they exceed the idle time in the trace that counts.")
    return rows


def _not_in_trace(facts: BudgetFacts, ns: int) -> str:
    by = "as much" if ns == -facts.changed_ns else f"{duration(-facts.changed_ns)}, more than its idle time,"
    return (
        f"{duration(ns)} of idle time are only in the engine as users run it: the traced pass changed the engine, which shortens "
        f"the stage by {by} without the profiler. No trace shows what causes them.{_spread_words(facts)}"
    )


def _without_changes(facts: BudgetFacts, weights: dict[BudgetKey, int]) -> str:
    """Take what the changes of the traced pass add off the weights, and return a note on it."""
    left = facts.changed_ns
    for key in _ADDED_TO:
        taken = min(weights.get(key, 0), left)
        if taken:
            weights[key] -= taken
            left -= taken
    adds = "as much" if not left else f"{duration(facts.changed_ns)}, more than the idle time of the trace,"
    return (
        f"Of the idle time in the trace, {duration(facts.changed_ns - left)} do not count: the traced pass changed the engine, "
        f"which adds {adds} without the profiler.{_spread_words(facts)}"
    )


def _spread_words(facts: BudgetFacts) -> str:
    """Return a sentence to append if the cost of the changes has no interval."""
    return "" if facts.changed_spread else " The spread of this difference was not recorded: part of it may be noise."

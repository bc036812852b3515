"""Where the unprofiled time of a stage goes on a CPU: rows that sum to it, to the nanosecond.

torch.profiler adds time for every operator and label that it records, between operators and inside those that call others. The
torch pass measures that cost per event. Here it is subtracted from each row of the trace, and what remains is scaled to the
unprofiled time. How far the two are apart, and how precisely the cost is known, gives each row an interval.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from llm_perf_opt.analysis.budget import BudgetKey, BudgetProblem, BudgetRow, StageBudget
from llm_perf_opt.analysis.limits.binding import BUSY_ENOUGH, FRAMEWORK, NEITHER, OPERATORS, WAITING, RooflineDistance
from llm_perf_opt.analysis.stats import apportion
from llm_perf_opt.analysis.trace.host_time import HostTime
from llm_perf_opt.analysis.trace.operator_classes import HostRow
from llm_perf_opt.core.host_records import ProfilerCost
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.units import duration, percentage

_KEYS = {row: BudgetKey(row.value) for row in HostRow}
_RECONCILED = 0.2
"""If the trace without the profiler's cost differs more than this from the unprofiled time, the two do not reconcile."""
_SHOWN_AT_ZERO = (BudgetKey.ROOFLINE, BudgetKey.MATMUL, BudgetKey.MEMORY, BudgetKey.FRAMEWORK, BudgetKey.PYTHON)


@dataclass(frozen=True)
class CpuBudgetFacts:
    """The inputs of a budget on a CPU, for as many units as the trace contains."""

    time: HostTime
    wall_ns: int | None
    """Unprofiled; None if there is no unprofiled pass."""
    wall_source: str
    cost: Maybe[ProfilerCost]
    roofline_ns: Maybe[Mapping[HostRow, int]]
    """Roofline time by the row whose operators do the work."""
    waiting_ns: Maybe[int]
    """Unprofiled time during which the thread did not run."""
    profiled_waiting_ns: Maybe[int]
    """The same under the profiler."""


@dataclass(frozen=True)
class CpuBudget:
    """A budget and the time of each class of operators in it, with its roofline time."""

    budget: StageBudget
    rows: Mapping[HostRow, int]


def cpu_stage_budget(facts: CpuBudgetFacts) -> CpuBudget:
    """Divide the wall time among the rows."""
    problems: list[BudgetProblem] = []
    notes: list[str] = []
    wall_ns = facts.time.wall_ns if facts.wall_ns is None else facts.wall_ns
    waiting_ns = _waiting(facts, wall_ns, notes)
    target_ns = wall_ns - waiting_ns
    times, ends = _divided(facts, target_ns, problems, notes)
    amounts = {_KEYS[row]: ns for row, ns in times.items()}
    spans = {_KEYS[row]: span for row, span in ends.items()}
    busy_ns = sum(ns for row, ns in times.items() if row is not HostRow.PYTHON)
    amounts[BudgetKey.WAITING] = waiting_ns
    if (rest := target_ns - sum(times.values())) > 0:
        amounts[BudgetKey.NOT_IN_TRACE] = rest
    _subtract_roofline(facts, amounts, spans, problems, notes)
    whole = isinstance(facts.roofline_ns, Missing)
    rows = []
    for key in BudgetKey:
        if key in amounts and (amounts[key] or key in _SHOWN_AT_ZERO):
            low, high = spans.get(key, (None, None))
            rows.append(BudgetRow(key, amounts[key], amounts[key] / wall_ns if wall_ns else 0.0, low, high, whole))
    time = facts.time
    budget = StageBudget(time.stage, time.units, wall_ns, facts.wall_source, busy_ns, tuple(rows), tuple(problems), tuple(notes))
    return CpuBudget(budget, times)


def _waiting(facts: CpuBudgetFacts, wall_ns: int, notes: list[str]) -> int:
    if facts.wall_ns is None:
        return 0
    if isinstance(facts.waiting_ns, Missing):
        notes.append(f"Waiting is included in the other rows: {facts.waiting_ns.why}.")
        return 0
    return min(max(facts.waiting_ns, 0), wall_ns)


Rows = dict[HostRow, int]
Spans = dict[HostRow, tuple[int, int]]


def _divided(facts: CpuBudgetFacts, target_ns: int, problems: list[BudgetProblem], notes: list[str]) -> tuple[Rows, Spans]:
    """Divide the time during which the thread ran; return the rows and the interval of each."""
    time = facts.time
    if time.overlapping:
        notes.append("Operators of the trace overlap without nesting; their times are scaled to the time that they cover.")
    if facts.wall_ns is None:
        notes.append(
            "There is no unprofiled time of this stage, so these are times under the profiler, which adds time for each of the "
            f"{sum(time.events.values()):,} operators: the rows framework and Python are too long."
        )
        return dict(time.rows), {}
    profiled_waiting = 0 if isinstance(facts.profiled_waiting_ns, Missing) else max(facts.profiled_waiting_ns, 0)
    profiled_ns = max(time.wall_ns - profiled_waiting, 0)
    cost, *bounds = _costs(facts, profiled_ns - target_ns, notes)
    corrected = _without_cost(time, cost)
    explained_ns = max(sum(corrected.values()) - profiled_waiting, 0)
    if not any(corrected.values()):
        return {HostRow.PYTHON: target_ns}, {}
    apart = target_ns / explained_ns - 1 if explained_ns > 0 else float("inf")
    unprofiled = "without waiting, the unprofiled pass" if target_ns < facts.wall_ns else "the unprofiled pass"
    if abs(apart) > _RECONCILED:
        parts = "the profiler's cost and waiting" if profiled_waiting else "the profiler's cost"
        problems.append(_unreconciled(f"the trace without {parts}", explained_ns, unprofiled, target_ns))
    else:
        trace = "Without waiting, the trace" if profiled_waiting else "The trace"
        notes.append(
            f"{trace} ({duration(profiled_ns)}) minus the profiler's cost ({cost.how}) gives {duration(explained_ns)}; "
            f"{unprofiled} took {duration(target_ns)}. The rows are scaled by {1 + apart:.3f}."
        )
    total_ns = target_ns if apart <= _RECONCILED else round(explained_ns * (1 + _RECONCILED))
    rows = _scaled(corrected, total_ns)
    others = [
        *(_scaled(_without_cost(time, bound), total_ns) for bound in bounds),
        _rest_in_overheads(corrected, total_ns),
    ]
    every = [rows, *others]
    return rows, {row: (min(each.get(row, 0) for each in every), max(each.get(row, 0) for each in every)) for row in rows}


@dataclass(frozen=True)
class _EventCosts:
    """Time per event of each kind."""

    operator_ns: float
    inner_ns: float
    label_ns: float
    stage_label_ns: float
    how: str = ""


def _costs(facts: CpuBudgetFacts, inflation_ns: int, notes: list[str]) -> tuple[_EventCosts, _EventCosts, _EventCosts]:
    """Return the profiler's costs and their bounds: as measured, otherwise the whole inflation divided among the events."""
    cost = facts.cost
    if not isinstance(cost, Missing):
        how = f"{duration(cost.operator_ns.ns, 3)} per operator, {duration(cost.inner_ns.ns, 3)} inside others"
        how += f", {duration(cost.label_ns.ns, 3)} per label" if facts.time.labels else ""
        return (
            _EventCosts(cost.operator_ns.ns, cost.inner_ns.ns, cost.label_ns.ns, cost.stage_label_ns.ns, how),
            _EventCosts(cost.operator_ns.low_ns, cost.inner_ns.low_ns, cost.label_ns.low_ns, cost.stage_label_ns.low_ns),
            _EventCosts(cost.operator_ns.high_ns, cost.inner_ns.high_ns, cost.label_ns.high_ns, cost.stage_label_ns.high_ns),
        )
    events = sum(facts.time.events.values()) + facts.time.labels + facts.time.stage_labels
    each = max(inflation_ns, 0) / events if events else 0.0
    notes.append(f"The profiler's cost was not measured ({cost.why}): its whole inflation is divided among {events:,} events.")
    whole = _EventCosts(each, each, each, each, f"{duration(each, 3)} per event")
    return whole, _EventCosts(0.0, 0.0, 0.0, 0.0), whole


def _without_cost(time: HostTime, cost: _EventCosts) -> Rows:
    """Return the rows without the profiler's cost; none becomes negative."""
    found = {}
    for row, ns in time.rows.items():
        events = time.events.get(row, 0)
        added = events * (cost.operator_ns if row is HostRow.PYTHON else cost.inner_ns)
        if row is HostRow.PYTHON:
            added += time.labels * cost.label_ns + time.stage_labels * cost.stage_label_ns
        found[row] = max(ns - round(added), 0)
    return found


def _scaled(rows: Rows, total_ns: int) -> Rows:
    weights = list(rows.values())
    return dict(zip(rows, apportion(total_ns, weights), strict=True)) if any(weights) else {HostRow.PYTHON: total_ns}


def _rest_in_overheads(rows: Rows, total_ns: int) -> Rows:
    """Return the rows if only framework and Python differ from the trace: compute takes as long as under the profiler."""
    overheads = (HostRow.FRAMEWORK, HostRow.PYTHON)
    left = total_ns - sum(ns for row, ns in rows.items() if row not in overheads)
    if left < 0:
        return _scaled({row: 0 if row in overheads else ns for row, ns in rows.items()}, total_ns)
    return {**rows, **_scaled({row: max(rows.get(row, 0), 1) for row in overheads}, left)}


def _unreconciled(trace: str, explained_ns: int, unprofiled: str, target_ns: int) -> BudgetProblem:
    return BudgetProblem(
        "unreconciled",
        f"{trace} takes {duration(explained_ns)}; {unprofiled} takes {duration(target_ns)} "
        f"({percentage(abs(target_ns - explained_ns) / max(target_ns, 1))} apart): the machine was not equally fast in both",
    )


_SPILLS = (HostRow.COMPILED, HostRow.ELEMENTWISE, HostRow.MATMUL, HostRow.ATTENTION, HostRow.NORM, HostRow.MEMORY)
"""Rows that a component's work may be in if its own row is too short: a compiler fuses them."""


def _subtract_roofline(
    facts: CpuBudgetFacts,
    amounts: dict[BudgetKey, int],
    spans: dict[BudgetKey, tuple[int, int]],
    problems: list[BudgetProblem],
    notes: list[str],
) -> None:
    """Move the roofline time of each row's work into the row of its own; no row becomes negative."""
    if isinstance(facts.roofline_ns, Missing):
        notes.append(f"Operators are shown with their whole time, because the roofline time is n/a: {facts.roofline_ns.why}.")
        return
    moved = 0
    for row, wanted in facts.roofline_ns.items():
        for key in dict.fromkeys((_KEYS[row], *(_KEYS[other] for other in _SPILLS))):
            part = min(wanted, amounts.get(key, 0))
            if part:
                amounts[key] -= part
                if key in spans:
                    low, high = spans[key]
                    spans[key] = (max(low - part, 0), max(high - part, 0))
                moved, wanted = moved + part, wanted - part
    amounts[BudgetKey.ROOFLINE] = moved
    whole = sum(facts.roofline_ns.values())
    if moved < whole:
        problems.append(
            BudgetProblem(
                "operators_under_roofline",
                f"operators took {duration(moved)}, less than the {duration(whole)} that their work needs at the known peaks: "
                "the peaks, the cost model and the trace do not match",
            )
        )


# --- what bounds a stage ----------------------------------------------------------------------------------------------

_OVERHEAD = (BudgetKey.FRAMEWORK, BudgetKey.PYTHON)
_NO_OPERATORS = (BudgetKey.ROOFLINE, BudgetKey.WAITING, BudgetKey.NOT_IN_TRACE, *_OVERHEAD)


def cpu_verdict(distance: RooflineDistance, shares: Mapping[str, float]) -> tuple[str, str]:
    """Return the verdict on a stage of a CPU run far from its roofline, given the shares of its budget."""
    causes = {
        FRAMEWORK: ("framework and Python take", sum(shares.get(key, 0.0) for key in _OVERHEAD)),
        OPERATORS: ("operators above roofline take", sum(share for key, share in shares.items() if key not in _NO_OPERATORS)),
        WAITING: ("waiting takes", shares.get(BudgetKey.WAITING, 0.0)),
    }
    parts = ", ".join(f"{words} {percentage(share)}" for words, share in causes.values() if share >= 0.005)
    largest = max(causes, key=lambda cause: causes[cause][1])
    return (largest if causes[largest][1] >= BUSY_ENOUGH else NEITHER), f"{distance.words}; {parts}"

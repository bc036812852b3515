"""Changes of figures with one reading per run: memory, energy, operators, budget and counters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llm_perf_opt.analysis.comparison.effects import Effect, Judgement
from llm_perf_opt.analysis.comparison.facts import distinct
from llm_perf_opt.analysis.comparison.statistics import is_measured, usage_effect
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.stats import percentile
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing, OperatorRow
from llm_perf_opt.core.units import percentage


@dataclass(frozen=True)
class ComparedFigure:
    """One figure of a budget or of counters; a key has the same meaning on both sides."""

    key: str
    """Name with its stage: `decode/idle`."""
    unit: str
    value: Maybe[float]


@dataclass(frozen=True)
class FigureChange:
    """A figure without an interval: one reading per run."""

    key: str
    label: str
    unit: str
    base: Maybe[float]
    new: Maybe[float]
    change: Maybe[float]


@dataclass(frozen=True)
class UsageChange(FigureChange):
    """Memory or energy: one reading per run, with an interval over runs. Less is better."""

    effect: Maybe[Effect]


@dataclass(frozen=True)
class OperatorChange:
    """An operator's self time on both sides; None on a side that does not have it."""

    name: str
    base_ns: int | None
    new_ns: int | None
    base_calls: int
    new_calls: int


ONE_SIDED = Missing("only the other side has it")

DEVICE_MEMORY = "memory.device"
ALL_PROCESSES = "of all processes on the card"
"""The driver's figure of a device's memory includes other processes."""
MEMORY = (
    ("memory.allocated", "Peak memory of tensors", "allocated_bytes", 0.0),
    ("memory.reserved", "Peak memory of the allocator", "reserved_bytes", 0.0),
    (DEVICE_MEMORY, f"Device memory at the end, {ALL_PROCESSES}", "device_used_bytes", 0.0),
    ("memory.process", "Peak memory of the process on the host", "process_rss_bytes", 0.02),
)
"""Key, label, field, and the standard deviation between processes that is assumed if there are too few runs to measure it.
Memory of the allocator and the driver repeats to the byte, as in three pairs of equal runs on different H200s. Resident memory
does not: in the same pairs it differed by up to 2.0 %, a deviation of 1.4 %."""
POWER_SPREAD = 0.1
"""Standard deviation of the power that cards of one kind, or one card at different times, draw for the same work. In three pairs
of equal runs on different H200s, one card drew 5.4, 5.5 and 14.7 % more than the other; the last is a deviation of 9.7 %."""


def memory_changes(base: Sequence[CleanTimings], new: Sequence[CleanTimings], judgement: Judgement) -> tuple[UsageChange, ...]:
    """Return the changes of memory: peaks, except for device memory. Several runs of a side give their geometric mean.

    Memory that repeats to the byte is compared to the byte, unless runs of one side differ.
    """
    rows = []
    for key, label, field, spread in MEMORY:
        sides = [[memory_of(run, field) for run in side] for side in (base, new)]
        applied = Judgement(judgement.smallest if spread else 0.0, spread)
        rows.append(_usage(key, label, "bytes", sides[0], sides[1], applied))
    return tuple(rows)


def memory_of(run: CleanTimings, field: str) -> Maybe[float]:
    """Return a reading. Memory that an engine reserves in advance does not show what the run needs."""
    value: Maybe[float] = getattr(run.memory, field)
    reserved = run.runtime.memory if run.runtime else None
    if field == "process_rss_bytes" or reserved is None or isinstance(reserved.share, Missing) or isinstance(value, Missing):
        return value
    return Missing("an engine reserves memory in advance, whatever the run needs")


def energy_changes(base: Sequence[RunAnalysis], new: Sequence[RunAnalysis], judgement: Judgement) -> tuple[UsageChange, ...]:
    """Return the changes of the energy of one request, from both sources of the driver.

    Energy is time multiplied by power. So it has the uncertainty of the time, inside and between runs, plus an assumed
    uncertainty of the power if the runs do not measure it.
    """
    applied = _with_power(judgement, base, new)
    timed = [[_request_times(run) for run in side] for side in (base, new)]
    rows = []
    for key, label, field in (
        ("energy.counter", "Energy of a request, from the counter", "from_counter_j"),
        ("energy.power", "Energy of a request, from the power readings", "from_power_j"),
    ):
        sides = [[energy_of(run, field) for run in side] for side in (base, new)]
        rows.append(_usage(key, label, "J", sides[0], sides[1], applied, (timed[0], timed[1])))
    return tuple(rows)


def _with_power(judgement: Judgement, base: Sequence[RunAnalysis], new: Sequence[RunAnalysis]) -> Judgement:
    """Return the judgement with the assumed spread of power: between cards if the sides' cards differ, else between runs."""
    if judgement.process_spread is None:
        return judgement
    cards = [set(distinct(side, "gpu.uuid")) for side in (base, new)]
    if not cards[0] or cards[0] != cards[1]:
        apart = POWER_SPREAD * math.sqrt(sum(1 / max(1, len(known)) for known in cards))
        where = "the sides ran on different cards" if all(cards) else "the sides may have run on different cards"
        why = f"{where}, and cards of one model are assumed to differ in power by {percentage(POWER_SPREAD)}"
        return replace(judgement, apart=apart, apart_why=why)
    if is_measured((len(base), len(new)), judgement):
        return judgement
    return replace(judgement, process_spread=math.hypot(judgement.process_spread, POWER_SPREAD))


def _request_times(run: RunAnalysis) -> Sequence[float]:
    return () if isinstance(run.timings, Missing) else [repeat.total_ns for repeat in run.timings.iterations]


def _usage(
    key: str,
    label: str,
    unit: str,
    base: Sequence[Maybe[float]],
    new: Sequence[Maybe[float]],
    judgement: Judgement,
    timed: tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]] | None = None,
) -> UsageChange:
    """Return the change of one figure. If it is missing in one run, it is missing for the side."""
    readings = [[value for value in side if not isinstance(value, Missing)] for side in (base, new)]
    missing_in = [next((value for value in side if isinstance(value, Missing)), None) for side in (base, new)]
    missing = missing_in[0] or missing_in[1]
    effect = missing or usage_effect(readings[0], readings[1], judgement, timed)
    if isinstance(effect, Missing):
        shown = [lost or percentile(side, 0.5) for lost, side in zip(missing_in, readings, strict=True)]
        return UsageChange(key, label, unit, shown[0], shown[1], effect, effect)
    return UsageChange(key, label, unit, effect.base, effect.new, effect.change, effect)


def energy_of(run: RunAnalysis, field: str) -> Maybe[float]:
    """Return the energy of one request."""
    if isinstance(run.telemetry, Missing) or isinstance(run.timings, Missing):
        return run.telemetry if isinstance(run.telemetry, Missing) else Missing("no iteration was measured")
    if not run.telemetry.energy:
        return Missing("energy was not sampled")
    whole: Maybe[float] = getattr(run.telemetry.energy[0], field)
    return whole if isinstance(whole, Missing) else whole / len(run.timings.iterations)


def _figure(key: str, label: str, unit: str, base: Maybe[float], new: Maybe[float]) -> FigureChange:
    if isinstance(base, Missing) or isinstance(new, Missing):
        change: Maybe[float] = base if isinstance(base, Missing) else new
    else:
        change = new / base - 1 if base else Missing("it was zero before")
    return FigureChange(key, label, unit, base, new, change)


def figure_changes(base: Sequence[ComparedFigure], new: Sequence[ComparedFigure]) -> tuple[FigureChange, ...]:
    """Return the changes of figures with the same key, in the order of the base. One-sided figures are marked."""
    sides = [{figure.key: figure for figure in side} for side in (base, new)]
    rows = []
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        one, other = sides[0].get(key), sides[1].get(key)
        unit = (one or other).unit  # type: ignore[union-attr]  # the key is of one of them
        values = [figure.value if figure else ONE_SIDED for figure in (one, other)]
        rows.append(_figure(key, key, unit, values[0], values[1]))
    return tuple(rows)


def stage_of(figure: ComparedFigure) -> str:
    """Return the stage: the part of the key before the slash."""
    return figure.key.partition("/")[0]


def reason_once(rows: Maybe[tuple[FigureChange, ...]]) -> Maybe[tuple[FigureChange, ...]]:
    """Return the rows, or a single reason if all of them are missing on both sides for the same reason."""
    if isinstance(rows, Missing) or not rows:
        return rows
    base, new = rows[0].base, rows[0].new
    if not isinstance(base, Missing) or not isinstance(new, Missing) or any((row.base, row.new) != (base, new) for row in rows):
        return rows
    return Missing(base.why if base == new else f"base: {base.why}; new: {new.why}")


def operator_changes(base: RunAnalysis, new: RunAnalysis) -> Maybe[tuple[OperatorChange, ...]]:
    """Return the changes of operators by self time on the device if both sides have it, else on the host; largest first."""
    if isinstance(base.torch, Missing) or isinstance(new.torch, Missing):
        name, why = ("base", base.torch) if isinstance(base.torch, Missing) else ("new", new.torch)
        return Missing(f"{name}: {why.why if isinstance(why, Missing) else ''}")
    if base.torch.decode_steps != new.torch.decode_steps:
        return Missing(
            f"torch.profiler recorded {base.torch.decode_steps} decode steps of base and {new.torch.decode_steps} of new"
        )
    sides = [{row.name: row for row in torch.operators} for torch in (base.torch, new.torch)]
    on_device = all(any(not isinstance(row.device_self_ns, Missing) for row in side.values()) for side in sides)
    rows = []
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        one, other = sides[0].get(name), sides[1].get(name)
        times = [_self_ns(row, on_device) if row else None for row in (one, other)]
        rows.append(OperatorChange(name, times[0], times[1], one.calls if one else 0, other.calls if other else 0))
    return tuple(sorted(rows, key=lambda row: (-abs((row.new_ns or 0) - (row.base_ns or 0)), row.name)))


FAR_FEWER = 4
"""From this ratio of operator calls on, one side is assumed to hide operators."""


def unseen_operators(base: RunAnalysis, new: RunAnalysis) -> str:
    """Return why a side may be missing operators that ran; empty if there is no reason."""
    why = "torch.profiler does not record operators inside a CUDA graph, so an operator that is not listed may still run"
    graphed = [name for name, run in (("base", base), ("new", new)) if _replays_graphs(run)]
    if graphed:
        return f"{' and '.join(graphed)}: decode is replayed from CUDA graphs. {why}. The table of kernels shows what ran."
    if isinstance(base.torch, Missing) or isinstance(new.torch, Missing):
        return ""
    calls = [sum(row.calls for row in torch.operators) for torch in (base.torch, new.torch)]
    if FAR_FEWER * min(calls) >= max(calls):
        return ""
    fewer = "base" if calls[0] < calls[1] else "new"
    return f"{fewer} has far fewer operator calls ({calls[0]:,} and {calls[1]:,}). Compiled code may contain them, and {why}."


def _replays_graphs(run: RunAnalysis) -> bool:
    runtime = run.config.get("runtime")
    on_gpu = not isinstance(run.timings, Missing) and run.timings.model.device.startswith("cuda")
    return on_gpu and isinstance(runtime, dict) and runtime.get("compile") in ("reduce-overhead", "max-autotune")


def _self_ns(row: OperatorRow, on_device: bool) -> int:
    if not on_device:
        return row.cpu_self_ns
    return 0 if isinstance(row.device_self_ns, Missing) else row.device_self_ns

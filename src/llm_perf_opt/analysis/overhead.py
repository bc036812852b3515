"""The overhead of each profiled pass: times of its stages divided by the unprofiled times of as many steps.

Also the events of torch.profiler's own work, which its tables list among the operators.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from llm_perf_opt.analysis.limits.efficiency import stage_samples, stage_seconds
from llm_perf_opt.analysis.stats import ends, percentile, summarize
from llm_perf_opt.core.engine_records import ChangedEngine, EngineSetting
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing, OperatorRow, TorchPass, WrappedPass
from llm_perf_opt.core.stages import PROFILER_OPERATORS, Stage
from llm_perf_opt.core.units import duration

PROFILER_EVENTS = frozenset({
    "Activity Buffer Request", "Buffer Flush", "Command Buffer Full", "Driver Compiler", "INVALID", "Lazy Function Loading",
    "Runtime Triggered Module Loading", "UVM Activity Init",
})  # fmt: skip
"""Names of CUPTI's overhead events (`cat: overhead` in a trace; CUpti_ActivityOverheadKind) that no user label has, and
the name of a call that CUPTI does not know.

Users may have labels called Resource or Instrumentation, so those two are found while the pass runs.
"""


@dataclass(frozen=True)
class AddedTime:
    """What the changes of a pass add to a time: the difference of two medians; negative if they shorten it."""

    ns: float
    ends_ns: Maybe[tuple[float, float]]
    """Least and most, by the 95 % intervals of both medians (below 6 repeats, by their least and greatest values)."""

    @property
    def has_spread(self) -> bool:
        """Whether the run recorded single repeats; older runs did not."""
        return not isinstance(self.ends_ns, Missing)

    @property
    def distinguishable(self) -> bool:
        """Whether the difference exceeds the spread; also true if the spread is not known, as in older runs."""
        return isinstance(self.ends_ns, Missing) or not self.ends_ns[0] <= 0 <= self.ends_ns[1]


@dataclass(frozen=True)
class ChangeCost:
    """What a profiled pass changed in an engine, and its times with these changes and without a profiler.

    The changes are measured together: what each of them costs alone is not known.
    """

    settings: tuple[EngineSetting, ...]
    prefill_ns: Maybe[float]
    step_ns: Maybe[float]
    """Mean time of a decode step; missing if the pass ran none."""
    clean_prefill_ns: Maybe[float]
    clean_step_ns: Maybe[float]
    """The same in the unprofiled pass, over as many steps."""
    added_prefill: Maybe[AddedTime]
    added_step: Maybe[AddedTime]
    repeats: int


@dataclass(frozen=True)
class PassOverhead:
    """Times of a profiled pass divided by the unprofiled times; 1 means no overhead."""

    name: str
    prefill: Maybe[float]
    decode: Maybe[float]
    steps: int
    own: tuple[OperatorRow, ...] = ()
    """What the profiler recorded about its own work."""
    changes: ChangeCost | None = None
    """What the pass changed in an engine; None if nothing."""

    @property
    def own_words(self) -> str:
        """Time and number of these events, in total and by name; empty if there are none."""
        if not self.own:
            return ""
        each = ", ".join(f"{row.name} {duration(row.cpu_total_ns)} ({row.calls:,})" for row in self.own)
        calls = sum(row.calls for row in self.own)
        whole = duration(sum(row.cpu_total_ns for row in self.own))
        return (
            f"In the {self.name} pass, the profiler's own work took {whole} in {calls:,} events, which belong to no operator: "
            f"{each}."
        )


def overheads(
    timings: CleanTimings | None, torch: Maybe[TorchPass], wrapped: Mapping[str, WrappedPass]
) -> tuple[PassOverhead, ...]:
    """Return the overhead of the torch pass and of every pass under an external tool."""
    found = []
    if not isinstance(torch, Missing):
        made = _overhead("torch", torch.stage_wall_ns, torch.decode_steps, timings)
        found.append(replace(made, own=torch.overhead, changes=_change_cost(torch.engine, timings)))
    for name, record in wrapped.items():
        made = _overhead(name, record.stage_wall_ns, len(record.steps_ns), timings)
        found.append(replace(made, changes=_change_cost(record.engine, timings)))
    return tuple(found)


def _change_cost(engine: ChangedEngine | None, timings: CleanTimings | None) -> ChangeCost | None:
    """Return the cost of a pass's changes to an engine; None if it made none."""
    if engine is None:
        return None
    prefill = _both(engine, timings, Stage.PREFILL, 1)
    step = _both(engine, timings, Stage.DECODE, engine.decode_steps)
    return ChangeCost(
        settings=engine.settings,
        prefill_ns=prefill[0],
        step_ns=step[0],
        clean_prefill_ns=prefill[1],
        clean_step_ns=step[1],
        added_prefill=prefill[2],
        added_step=step[2],
        repeats=engine.repeats,
    )


def _both(
    engine: ChangedEngine, timings: CleanTimings | None, stage: Stage, count: int
) -> tuple[Maybe[float], Maybe[float], Maybe[AddedTime]]:
    """Return the time of a prefill, or the mean of `count` decode steps: with the changes, without them, and the difference."""
    wall = engine.stage_wall_ns.get(stage.value)
    changed: Maybe[float] = wall / count if wall and count else Missing("the pass did not time it with its changes alone")
    found: Maybe[list[int]] = Missing("there is no unprofiled time to compare with")
    if timings is not None:
        found = stage_samples(timings, stage, count)
    clean = found if isinstance(found, Missing) else percentile(found, 0.5) / count
    if isinstance(changed, Missing) or isinstance(clean, Missing) or isinstance(found, Missing):
        return changed, clean, next(each for each in (changed, clean) if isinstance(each, Missing))
    samples = engine.samples_ns.get(stage.value)
    spread: Maybe[tuple[float, float]] = Missing("the run did not record the single repeats")
    if samples:
        (low, high), (clean_low, clean_high) = ends(summarize(samples)), ends(summarize(found))
        spread = (low - clean_high) / count, (high - clean_low) / count
    return changed, clean, AddedTime(changed - clean, spread)


def without_profiler_events(found: TorchPass) -> TorchPass:
    """Return the pass with the profiler's own events separated from the operators, also for runs recorded without that."""
    own = tuple(row for row in found.operators if _is_own(row.name))
    kept = tuple(row for row in found.operators if not _is_own(row.name))
    return replace(found, operators=kept, overhead=(*found.overhead, *own)) if own else found


def _is_own(name: str) -> bool:
    return name in PROFILER_EVENTS or name.startswith(PROFILER_OPERATORS)


def _overhead(name: str, walls: Mapping[str, int], steps: int, timings: CleanTimings | None) -> PassOverhead:
    return PassOverhead(name, _factor(walls, Stage.PREFILL, steps, timings), _factor(walls, Stage.DECODE, steps, timings), steps)


def _factor(walls: Mapping[str, int], stage: Stage, steps: int, timings: CleanTimings | None) -> Maybe[float]:
    if timings is None:
        return Missing("there is no unprofiled time to compare with")
    if stage.value not in walls:
        return Missing("the stage did not run in this pass")
    seconds = stage_seconds(timings, stage, steps)
    return seconds if isinstance(seconds, Missing) else walls[stage.value] / 1e9 / seconds

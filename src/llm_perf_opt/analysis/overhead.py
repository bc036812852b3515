"""What each pass cost the program it watched: its stages' times under the tool over the unprofiled ones of as many steps.

And what torch.profiler says of its own work: events that stand among the operators in its tables and are none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from llm_perf_opt.analysis.limits.efficiency import stage_seconds
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing, OperatorRow, TorchPass, WrappedPass
from llm_perf_opt.core.stages import Stage
from llm_perf_opt.core.units import duration

PROFILER_EVENTS = frozenset({
    "Activity Buffer Request", "Buffer Flush", "Command Buffer Full", "Driver Compiler", "Lazy Function Loading",
    "Runtime Triggered Module Loading", "UVM Activity Init",
})  # fmt: skip
"""Names of what CUPTI calls overhead (`cat: overhead` in a trace; CUpti_ActivityOverheadKind), as no label of a user's is called.

Users may have labels called Resource or Instrumentation, so profiling/torch_profiler.py finds those two while the pass runs.
"""


@dataclass(frozen=True)
class PassOverhead:
    """One pass against the unprofiled one; 1 is no overhead."""

    name: str
    prefill: Maybe[float]
    decode: Maybe[float]
    steps: int
    own: tuple[OperatorRow, ...] = ()
    """What the profiler recorded of its own work."""

    @property
    def own_words(self) -> str:
        """Time and number of that, in all and by name; empty where there is none."""
        if not self.own:
            return ""
        each = ", ".join(f"{row.name} {duration(row.cpu_total_ns)} ({row.calls:,})" for row in self.own)
        calls = sum(row.calls for row in self.own)
        whole = duration(sum(row.cpu_total_ns for row in self.own))
        return f"Of the {self.name} pass the profiler's own work took {whole} in {calls:,} events, in no operator: {each}."


def overheads(
    timings: CleanTimings | None, torch: Maybe[TorchPass], wrapped: Mapping[str, WrappedPass]
) -> tuple[PassOverhead, ...]:
    """Of the torch pass and of every pass below an outside tool."""
    found = []
    if not isinstance(torch, Missing):
        found.append(replace(_overhead("torch", torch.stage_wall_ns, torch.decode_steps, timings), own=torch.overhead))
    for name, seen in wrapped.items():
        found.append(_overhead(name, seen.stage_wall_ns, len(seen.steps_ns), timings))
    return tuple(found)


def without_profiler_events(found: TorchPass) -> TorchPass:
    """A pass with the profiler's own work apart from the operators, also of a run that was captured with it among them."""
    own = tuple(row for row in found.operators if row.name in PROFILER_EVENTS)
    kept = tuple(row for row in found.operators if row.name not in PROFILER_EVENTS)
    return replace(found, operators=kept, overhead=(*found.overhead, *own)) if own else found


def _overhead(name: str, walls: Mapping[str, int], steps: int, timings: CleanTimings | None) -> PassOverhead:
    return PassOverhead(name, _times(walls, Stage.PREFILL, steps, timings), _times(walls, Stage.DECODE, steps, timings), steps)


def _times(walls: Mapping[str, int], stage: Stage, steps: int, timings: CleanTimings | None) -> Maybe[float]:
    if timings is None:
        return Missing("there is no unprofiled time to compare with")
    if stage.value not in walls:
        return Missing("the stage did not run in this pass")
    seconds = stage_seconds(timings, stage, steps)
    return seconds if isinstance(seconds, Missing) else walls[stage.value] / 1e9 / seconds

"""What each pass cost the program it watched: its stages' times under the tool over the unprofiled ones of as many steps."""

from collections.abc import Mapping
from dataclasses import dataclass

from llm_perf_opt.analysis.limits.efficiency import stage_seconds
from llm_perf_opt.records import CleanTimings, Maybe, Missing, TorchPass, WrappedPass
from llm_perf_opt.stages import Stage


@dataclass(frozen=True)
class PassOverhead:
    """One pass against the unprofiled one; 1 is no overhead."""

    name: str
    prefill: Maybe[float]
    decode: Maybe[float]
    steps: int


def overheads(
    timings: CleanTimings | None, torch: Maybe[TorchPass], wrapped: Mapping[str, WrappedPass]
) -> tuple[PassOverhead, ...]:
    """Of the torch pass and of every pass below an outside tool."""
    found = []
    if not isinstance(torch, Missing):
        found.append(_overhead("torch", torch.stage_wall_ns, torch.decode_steps, timings))
    for name, seen in wrapped.items():
        found.append(_overhead(name, seen.stage_wall_ns, len(seen.steps_ns), timings))
    return tuple(found)


def _overhead(name: str, walls: Mapping[str, int], steps: int, timings: CleanTimings | None) -> PassOverhead:
    return PassOverhead(name, _times(walls, Stage.PREFILL, steps, timings), _times(walls, Stage.DECODE, steps, timings), steps)


def _times(walls: Mapping[str, int], stage: Stage, steps: int, timings: CleanTimings | None) -> Maybe[float]:
    if timings is None:
        return Missing("there is no unprofiled time to compare with")
    if stage.value not in walls:
        return Missing("the stage did not run in this pass")
    seconds = stage_seconds(timings, stage, steps)
    return seconds if isinstance(seconds, Missing) else walls[stage.value] / 1e9 / seconds

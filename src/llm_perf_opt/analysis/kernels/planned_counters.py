"""What Nsight Compute was told to count beside what it counted: a pass may end early or match other launches than were meant."""

from dataclasses import dataclass

from llm_perf_opt.analysis.kernels.evidence import PROGRAM, STAGES
from llm_perf_opt.analysis.kernels.selection import Selection
from llm_perf_opt.records import Maybe, Missing

A_LITTLE = 0.05
"""By which launches (of those planned) or kernel time (of the stage's) may fall short before it is a warning."""
WHOLE_PROGRAM = "the program"
"""The stage of a selection that is not of a range."""


@dataclass(frozen=True)
class Outcome:
    """The plan and what came of it."""

    note: str
    warning: str = ""
    """Empty where the two agree."""


def outcome(chosen: Selection, stage: str, launches: Maybe[int], joined: Maybe[float]) -> Outcome:
    """`launches` are in the counters' table; `joined` is the share of the stage's kernel time that they stand for."""
    step = f" of step {chosen.step}" if chosen.step else ""
    planned = (
        f"Counters of {stage}: planned were {len(chosen.kernels)} functions, chosen from {chosen.source}; "
        f"{chosen.launch_count:,} launches{step}, which carry {_percent(chosen.coverage)} of the kernel time it was chosen from."
    )
    if isinstance(launches, Missing) or isinstance(joined, Missing):
        lost = next(value for value in (launches, joined) if isinstance(value, Missing))
        return Outcome(f"{planned} Counted: {lost}.")
    counted = f"{launches:,} launches, joined to {_percent(joined)} of the stage's kernel time"
    return Outcome(f"{planned} Counted: {counted}.", _shortfall(chosen, stage, launches, joined))


def _shortfall(chosen: Selection, stage: str, launches: int, joined: float) -> str:
    few = launches < (1 - A_LITTLE) * chosen.launch_count
    # A plan for one range of a program says nothing of the share of the whole.
    comparable = chosen.stage in (stage, STAGES.get(stage), WHOLE_PROGRAM if stage == PROGRAM else stage)
    if not few and not (comparable and joined < chosen.coverage - A_LITTLE):
        return ""
    return (
        f"The counters of {stage} fall short of the plan: {launches:,} of {chosen.launch_count:,} launches were counted, and "
        f"they join {_percent(joined)} of the stage's kernel time where {_percent(chosen.coverage)} was planned. The log of the "
        "pass says whether it ended early; a program that launches other kernels each time cannot be sampled by place."
    )


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"

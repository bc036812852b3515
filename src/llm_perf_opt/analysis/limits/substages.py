"""Sub-stages of prefill, such as image encoders and the projector, against the roofline."""

from collections.abc import Callable
from dataclasses import dataclass

from llm_perf_opt.analysis.cost_model.cost import StageCost
from llm_perf_opt.analysis.limits.compared import RooflineComparison, compare_substage
from llm_perf_opt.analysis.limits.peaks import Peaks
from llm_perf_opt.analysis.stats import summarize
from llm_perf_opt.core.records import CleanTimings, Distribution, Maybe, Missing
from llm_perf_opt.core.stages import Stage

_NO_PATH = Missing("the run did not record which submodule it is")
_NO_WORK = Missing("it computes no matrix products")
_NO_TIME = Missing("it is shorter than the clock can measure")


@dataclass(frozen=True)
class SubstageEfficiency:
    """One sub-stage: its cost, its unprofiled time, and how they compare with the peaks."""

    name: str
    stage: str
    time_ns: Distribution
    """All its forwards in an iteration together."""
    forwards: int
    """In the first iteration."""
    cost: Maybe[StageCost]
    against: tuple[RooflineComparison, ...]
    """Empty without a cost."""


def prefill_substages(
    timings: CleanTimings, cost_of: Callable[[str], Maybe[StageCost]], peak_sets: tuple[Peaks, ...]
) -> tuple[SubstageEfficiency, ...]:
    """Return the sub-stages of prefill in the order in which they began; `cost_of` takes the path of a submodule."""
    stage = Stage.PREFILL.value
    first = [span for span in timings.iterations[0].substages if span.stage == stage]
    names = dict.fromkeys(span.name for span in sorted(first, key=lambda span: span.start_ns))
    found = []
    for name in names:
        totals = [
            sum(span.duration_ns for span in iteration.substages if span.name == name and span.stage == stage)
            for iteration in timings.iterations
        ]
        time = summarize(totals)
        path = timings.model.substages.get(name)
        cost = _NO_PATH if path is None else cost_of(path)
        if not isinstance(cost, Missing) and not (cost.flops and time.median):
            cost = _NO_TIME if cost.flops else _NO_WORK
        against = () if isinstance(cost, Missing) else _against(cost, time.median / 1e9, peak_sets)
        found.append(SubstageEfficiency(name, stage, time, sum(span.name == name for span in first), cost, against))
    return tuple(found)


def _against(cost: StageCost, seconds: float, peak_sets: tuple[Peaks, ...]) -> tuple[RooflineComparison, ...]:
    return tuple(compare_substage(cost, seconds, peaks) for peaks in peak_sets)

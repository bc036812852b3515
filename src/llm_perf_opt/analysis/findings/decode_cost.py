"""Decode on a GPU and what the cost model knows about it: what the rules on bytes and kernels share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llm_perf_opt.analysis.cost_model.architecture import Architecture, Mla
from llm_perf_opt.analysis.cost_model.cost import Formats, combined, step_cost
from llm_perf_opt.analysis.cost_model.work import Step, decode_steps
from llm_perf_opt.analysis.evidence import Evidence, StageEvidence
from llm_perf_opt.analysis.findings.finding import unit_time
from llm_perf_opt.analysis.limits.efficiency import request_cost
from llm_perf_opt.analysis.limits.peaks import Peaks, best_roofline_time
from llm_perf_opt.analysis.limits.roofline import RooflineTime
from llm_perf_opt.analysis.trace.stage_instances import DECODE
from llm_perf_opt.core.records import Missing, Workload


@dataclass(frozen=True)
class Decode:
    """Decode on a GPU, and what the cost model knows about it."""

    evidence: Evidence
    stage: StageEvidence
    work: Workload
    architecture: Architecture
    formats: Formats
    peak_sets: tuple[Peaks, ...]

    @property
    def steps(self) -> tuple[Step, ...]:
        """The traced steps."""
        return decode_steps(self.work.batch_size, self.work.padded_tokens, self.stage.units)

    @property
    def peaks(self) -> str:
        """Which peaks the roofline times use: measured or datasheet."""
        found = best_roofline_time(step_cost(self.architecture, self.steps[0], self.formats), self.peak_sets)
        return "unknown" if isinstance(found, Missing) else found[0].name

    def roofline(self, steps: Sequence[Step], formats: Formats) -> RooflineTime | None:
        """Return the roofline time of steps in these formats; None if it is unknown."""
        found = best_roofline_time(combined([step_cost(self.architecture, step, formats) for step in steps]), self.peak_sets)
        return None if isinstance(found, Missing) else found[1]


def decode_of(evidence: Evidence) -> Decode | None:
    """Return decode on a GPU; None if its cost or the peaks are unknown."""
    stage, timings, efficiency = evidence.stage(DECODE), evidence.facts.timings, evidence.facts.efficiency
    if stage is None or not stage.by_token or isinstance(timings, Missing) or isinstance(efficiency, Missing):
        return None
    request = request_cost(timings)
    if isinstance(request, Missing):
        return None
    formats = replace(request.formats, mla=Mla.ABSORB)
    return Decode(evidence, stage, timings.workload, request.architecture, formats, efficiency.peak_sets)


def rooflines(stage: StageEvidence, now: RooflineTime, then: RooflineTime, what: str) -> str:
    """Return two roofline times of a unit as text."""
    times = " and ".join(unit_time(stage, time.seconds * 1e9) for time in (now, then))
    return f"roofline time per {stage.unit} with {what}: {times}"

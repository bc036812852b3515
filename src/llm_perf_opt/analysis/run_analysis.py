"""Everything that can be said of a run, in one record: what reports are made from."""

from dataclasses import dataclass, field
from typing import Any

from llm_perf_opt.analysis.kernels.evidence import KernelEvidence
from llm_perf_opt.analysis.limits.efficiency import Efficiency
from llm_perf_opt.analysis.measured_inputs import InputNote
from llm_perf_opt.analysis.overhead import PassOverhead
from llm_perf_opt.analysis.stability import Stability
from llm_perf_opt.analysis.telemetry import TelemetrySummary
from llm_perf_opt.analysis.trace.document import TraceAnalysis
from llm_perf_opt.analysis.verification import Verification
from llm_perf_opt.core.errors import ImplausibleError, LlmPerfError, ParseError
from llm_perf_opt.core.records import CleanTimings, Drift, Manifest, Maybe, Metric, Missing, StageTiming, TorchPass
from llm_perf_opt.core.warnings import RunWarning

_NO_PROMPTS = Missing("it has no record of them")
_NOT_ANALYSED = Missing("the run's trace was not analyzed")


@dataclass(frozen=True)
class RunAnalysis:
    """Everything a report shows."""

    run: str
    manifest: Manifest
    config: dict[str, Any]
    env: dict[str, Any]
    timings: Maybe[CleanTimings]
    metrics: tuple[Metric, ...]
    stages: tuple[StageTiming, ...]
    drift: Maybe[Drift]
    efficiency: Maybe[Efficiency]
    torch: Maybe[TorchPass]
    telemetry: Maybe[TelemetrySummary]
    kernels: Maybe[KernelEvidence]
    overheads: tuple[PassOverhead, ...]
    warnings: tuple[RunWarning, ...]
    assumptions: tuple[str, ...]
    trace: Maybe[TraceAnalysis] = _NOT_ANALYSED
    """Where the time of the run's trace goes, with its findings."""
    verified: Verification | None = None
    """What became of the findings, where some were tried."""
    impossible: ImplausibleError | None = None
    """A figure that cannot be; the section it belongs to is left out."""
    damaged: ParseError | None = None
    """Why times that were measured cannot be read any more; what needs them is left out."""
    prompts_sha256: Maybe[str] = _NO_PROMPTS
    """Identifies the prompts as they were fed: equal for equal ids."""
    inputs: tuple[InputNote, ...] = ()
    """What was measured, so that nobody takes it for more."""
    stability: dict[str, Stability] = field(default_factory=dict)
    """Whether the repeats kept their level: of `e2e`, `prefill` and `decode`."""

    @property
    def fault(self) -> LlmPerfError | None:
        """What a verb that makes the reports ends with, after making them."""
        return self.damaged or self.impossible

    def metric(self, key: str) -> Metric | None:
        """The figure with this key."""
        return next((metric for metric in self.metrics if metric.key == key), None)

    def stage(self, name: str) -> StageTiming | None:
        """The stage with this name."""
        return next((stage for stage in self.stages if stage.name == name), None)

"""Everything that can be said of a run, in one record: what reports are made from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from llm_perf_opt.analysis.kernels.evidence import KernelEvidence
from llm_perf_opt.analysis.limits.efficiency import Efficiency
from llm_perf_opt.analysis.overhead import PassOverhead
from llm_perf_opt.analysis.stability import Stability
from llm_perf_opt.analysis.telemetry import TelemetrySummary
from llm_perf_opt.analysis.trace.document import TraceAnalysis
from llm_perf_opt.analysis.verification import Verification
from llm_perf_opt.core.errors import ImplausibleError, LlmPerfError, ParseError
from llm_perf_opt.core.records import (
    CleanTimings,
    Drift,
    Manifest,
    Maybe,
    Metric,
    Missing,
    StageTiming,
    TextUse,
    TorchPass,
    WeightFacts,
)
from llm_perf_opt.core.warnings import RunWarning


class InputKind(str, Enum):
    """What is said."""

    PROMPTS = "prompts"
    RANDOM_WEIGHTS = "random_weights"
    CAST_WEIGHTS = "cast_weights"
    CUT_PROMPTS = "cut_prompts"
    UNUSED_RECORDS = "unused_records"


@dataclass(frozen=True)
class InputNote:
    """One thing to know, as a fact and as a sentence."""

    kind: InputKind
    text: str


_CASTABLE = ("fp32", "bf16", "fp16", "f64")
"""Formats that a loader turns into another; packed weights stay as they are."""


def measured_inputs(timings: Maybe[CleanTimings], config: Mapping[str, Any]) -> tuple[InputNote, ...]:
    """From what the run recorded; of one made before that, from what it was asked for."""
    if isinstance(timings, Missing):
        return ()
    found = [InputNote(InputKind.PROMPTS, f"Prompts: {timings.workload.source}.")]
    texts = timings.workload.texts
    found += [] if texts is None else _texts(texts)
    weights = timings.model.weights
    asked = config.get("model")
    if weights is None and isinstance(asked, Mapping) and asked.get("source") == "random":
        weights = WeightFacts("random")
    found += [] if weights is None else _weights(weights, timings.model.dtype)
    return tuple(found)


def _texts(texts: TextUse) -> list[InputNote]:
    found = []
    if texts.cut:
        words = f"{texts.cut} of {texts.used} texts were cut to {texts.limit} tokens; the longest had {texts.longest:,}."
        found.append(InputNote(InputKind.CUT_PROMPTS, words))
    if texts.unused is None or texts.unused:
        many = "An uncounted number of" if texts.unused is None else f"{texts.unused:,}"
        words = f"{many} further records of the dataset were not used: the batch holds the first {texts.used}."
        found.append(InputNote(InputKind.UNUSED_RECORDS, words))
    return found


def _weights(weights: WeightFacts, dtype: str) -> list[InputNote]:
    if weights.source == "random":
        words = "The weights are random: the times are those of the architecture, and what it wrote means nothing."
        return [InputNote(InputKind.RANDOM_WEIGHTS, words)]
    cast = {name: size for name, size in weights.stored_bytes.items() if name in _CASTABLE and name != dtype}
    if not cast or dtype not in _CASTABLE:
        return []
    whole = sum(weights.stored_bytes.values())
    share = "The weights are" if sum(cast.values()) == whole else f"{sum(cast.values()) / whole:.0%} of the weights are"
    return [InputNote(InputKind.CAST_WEIGHTS, f"{share} stored in {' and '.join(cast)}, and were cast to {dtype}.")]


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

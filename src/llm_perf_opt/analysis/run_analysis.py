"""The analysis of a run as one record, from which reports are made; and notes on its prompts and weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from llm_perf_opt.analysis.kernels.evidence import KernelEvidence
from llm_perf_opt.analysis.limits.efficiency import Efficiency
from llm_perf_opt.analysis.overhead import PassOverhead
from llm_perf_opt.analysis.rank_run import RankRun
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
)
from llm_perf_opt.core.units import percentage
from llm_perf_opt.core.warnings import RunWarning
from llm_perf_opt.core.weight_records import QuantizedWeights, TokenAgreement, WeightFacts


class InputKind(str, Enum):
    """What a note is about."""

    PROMPTS = "prompts"
    RANDOM_WEIGHTS = "random_weights"
    REAL_WEIGHTS = "real_weights"
    CAST_WEIGHTS = "cast_weights"
    QUANTIZED_WEIGHTS = "quantized_weights"
    QUANTIZED_TOKENS = "quantized_tokens"
    EMPTY_RECORDS = "empty_records"
    LEFT_OUT_RECORDS = "left_out_records"
    CUT_PROMPTS = "cut_prompts"
    UNUSED_RECORDS = "unused_records"
    OWN_FILES = "own_files"
    OWN_SETTINGS = "own_settings"


@dataclass(frozen=True)
class InputNote:
    """One fact about the inputs, and the sentence that states it."""

    kind: InputKind
    text: str


_CASTABLE = ("fp32", "bf16", "fp16", "f64")
"""Formats that a loader can cast; packed weights are not cast."""


def with_weights(timings: CleanTimings, config: Mapping[str, Any]) -> CleanTimings:
    """Return the timings of an older run with the source of the weights, which only its configuration has."""
    model = config.get("model")
    source = model.get("source") if timings.model.weights is None and isinstance(model, Mapping) else None
    if source not in ("random", "pretrained"):
        return timings
    return replace(timings, model=replace(timings.model, weights=WeightFacts("random" if source == "random" else "stored")))


def measured_inputs(timings: Maybe[CleanTimings], config: Mapping[str, Any]) -> tuple[InputNote, ...]:
    """Return notes on the prompts, the weights and the user's own files, as recorded or, for older runs, as configured."""
    if isinstance(timings, Missing):
        return ()
    found = [InputNote(InputKind.PROMPTS, f"Prompts: {timings.workload.source}.")]
    texts = timings.workload.texts
    found += [] if texts is None else _text_notes(texts)
    weights = with_weights(timings, config).model.weights
    found += [] if weights is None else _weight_notes(weights, timings.model.dtype)
    found += [] if weights is None or weights.quantized is None else [_quantized_note(weights.quantized)]
    found += [] if timings.agreement is None else [_agreement_note(timings.agreement)]
    return (*found, *_project_notes(config))


def _project_notes(config: Mapping[str, Any]) -> list[InputNote]:
    """Return which files of the user were used, and what became of their settings."""
    project = config.get("project")
    files, notes = (project.get(name) if isinstance(project, Mapping) else None for name in ("files", "notes"))
    found = []
    if isinstance(files, Mapping) and files:
        words = ", ".join(f"{group} from {path}" for group, path in files.items())
        found.append(InputNote(InputKind.OWN_FILES, f"Settings of the project: {words}."))
    return found + [InputNote(InputKind.OWN_SETTINGS, str(note)) for note in notes or () if isinstance(notes, (list, tuple))]


def _text_notes(texts: TextUse) -> list[InputNote]:
    found = []
    if texts.cut:
        words = f"{texts.cut} of {texts.used} texts were cut to {texts.limit} tokens; the longest had {texts.longest:,}."
        found.append(InputNote(InputKind.CUT_PROMPTS, words))
    if texts.unused is None or texts.unused:
        many = "An unknown number of" if texts.unused is None else f"{texts.unused:,}"
        words = f"{many} further records of the dataset were not used: the batch contains the first {texts.used}."
        found.append(InputNote(InputKind.UNUSED_RECORDS, words))
    if texts.empty:
        found.append(InputNote(InputKind.EMPTY_RECORDS, f"{texts.empty:,} records without text were passed over."))
    if texts.left_out:
        words = f"{texts.left_out:,} records of the source were left out of the variant: unreadable, empty or duplicate."
        found.append(InputNote(InputKind.LEFT_OUT_RECORDS, words))
    return found


def _weight_notes(weights: WeightFacts, dtype: str) -> list[InputNote]:
    if weights.source == "random":
        words = "The weights are random: the times are valid for the architecture, but the generated text is meaningless."
        return [InputNote(InputKind.RANDOM_WEIGHTS, words)]
    where = f" They were read from {weights.folder}." if weights.folder else ""
    found = [InputNote(InputKind.REAL_WEIGHTS, f"The weights are real.{where}")]
    cast = {name: size for name, size in weights.stored_bytes.items() if name in _CASTABLE and name != dtype}
    if not cast or dtype not in _CASTABLE:
        return found
    whole = sum(weights.stored_bytes.values())
    share = "The weights are" if sum(cast.values()) == whole else f"{percentage(sum(cast.values()) / whole)} of the weights are"
    return [*found, InputNote(InputKind.CAST_WEIGHTS, f"{share} stored in {' and '.join(cast)} and were cast to {dtype}.")]


def _quantized_note(weights: QuantizedWeights) -> InputNote:
    shared = "one scale per output channel" if weights.group is None else f"a scale and a zero point per {weights.group} inputs"
    words = (
        f"The weights of {weights.layers} linear layers were quantized to {weights.format} after loading, with {shared}. "
        f"Kernels: {weights.kernel}"
    )
    if weights.quantized_inputs:
        words += "; quantized::linear_dynamic also rounds its inputs to int8"
    if weights.kernel_rows is not None:
        words += f"; instead of _weight_int8pack_mm, inputs of more than {weights.kernel_rows} rows use dequantized weights"
    if weights.kept_layers:
        words += f"; {weights.kept_layers} other linear layers were not quantized, because the format does not fit their shape"
    return InputNote(InputKind.QUANTIZED_WEIGHTS, f"{words}.")


def _agreement_note(tokens: TokenAgreement) -> InputNote:
    where = "" if tokens.first_difference is None else f", the first difference at token {tokens.first_difference + 1}"
    words = f"{tokens.equal:,} of {tokens.compared:,} tokens are equal to those of the model before it was quantized{where}"
    return InputNote(InputKind.QUANTIZED_TOKENS, f"{words}. A different token usually changes all tokens after it.")


_NO_PROMPTS = Missing("the run did not record them")
_NOT_ANALYZED = Missing("the run's trace was not analyzed")


@dataclass(frozen=True)
class RunAnalysis:
    """Everything that a report shows."""

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
    trace: Maybe[TraceAnalysis] = _NOT_ANALYZED
    """The analysis of the run's trace, with its findings."""
    verified: Verification | None = None
    """The outcome of findings that were tried, if any."""
    impossible: ImplausibleError | None = None
    """An implausible figure; its section is omitted."""
    damaged: ParseError | None = None
    """Why measured times cannot be read; what needs them is omitted."""
    prompts_sha256: Maybe[str] = _NO_PROMPTS
    """Hash of the prompts' token ids: equal for equal ids."""
    inputs: tuple[InputNote, ...] = ()
    """Notes on what was measured."""
    stability: dict[str, Stability] = field(default_factory=dict)
    """Whether the repeats stayed at one level, for `e2e`, `prefill` and `decode`."""
    ranks: RankRun | None = None
    """The ranks that shared the model; None if there was one."""

    @property
    def fault(self) -> LlmPerfError | None:
        """The error that a command raises after it has written the reports."""
        return self.damaged or self.impossible

    def metric(self, key: str) -> Metric | None:
        """Return the metric with this key, or None."""
        return next((metric for metric in self.metrics if metric.key == key), None)

    def stage(self, name: str) -> StageTiming | None:
        """Return the stage with this name, or None."""
        return next((stage for stage in self.stages if stage.name == name), None)

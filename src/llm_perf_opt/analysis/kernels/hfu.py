"""Hardware FLOPs utilization of a stage, from counters: executed FLOPs over unprofiled time and peak."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llm_perf_opt.analysis.kernels.join import NOT_COLLECTED
from llm_perf_opt.analysis.kernels.table import StageKernels
from llm_perf_opt.analysis.limits.efficiency import MEASURED_MARGIN
from llm_perf_opt.analysis.limits.roofs import Roof
from llm_perf_opt.core.errors import ImplausibleError
from llm_perf_opt.core.records import Maybe, Missing

WHOLE = 0.9995
"""Coverage from which on a stage's kernel time counts as counted wholly."""

Sign = Literal["", "≥", "≈", "≳"]


@dataclass(frozen=True)
class Hfu:
    """One stage against one limit."""

    stage: str
    roof: str
    share: float
    executed_flops: float
    seconds: float
    """Unprofiled, of as many steps as the trace holds."""
    peak_flops_per_s: float
    coverage: float
    """Share of the stage's kernel time whose FLOPs were counted."""
    sign: Sign
    """≥: some kernels or kinds of FLOPs are not in it, packed half precision among them; ≈: for some, launches with another grid
    stand in; ≳: both."""


@dataclass(frozen=True)
class AgainstModel:
    """FLOPs that tensor cores executed beside those the cost model asks for, in the same steps."""

    stage: str
    tensor_flops: float
    model_flops: float
    coverage: float

    @property
    def ratio(self) -> float:
        """Executed over needed."""
        return self.tensor_flops / self.model_flops


@dataclass(frozen=True)
class StageHfu:
    """A stage against every limit, and beside the cost model."""

    stage: str
    against: tuple[tuple[str, Maybe[Hfu]], ...]
    """Name of the limits → HFU."""
    model: Maybe[AgainstModel]
    half_flops: Maybe[float] = NOT_COLLECTED
    """In packed half precision, at most; in no figure here."""


def stage_hfu(stage: StageKernels, roofs: Sequence[Roof], seconds: Maybe[float], model_flops: Maybe[float]) -> StageHfu:
    """`seconds` (unprofiled) and `model_flops` are of as many steps as the trace holds that the calls were counted in."""
    against = tuple((roof.name, hfu(stage, roof.name, seconds, roof.peak_flops_per_s)) for roof in roofs)
    return StageHfu(stage.stage, against, against_model(stage, model_flops), stage.half_flops)


def hfu(stage: StageKernels, roof: str, seconds: Maybe[float], peak_flops_per_s: Maybe[float]) -> Maybe[Hfu]:
    """`seconds` is the unprofiled time of as many steps as the trace that the calls were counted in."""
    for value in (stage.counters, stage.flops, seconds, peak_flops_per_s):
        if isinstance(value, Missing):
            return value
    coverage, flops, time, peak = (_known(value) for value in (stage.counters, stage.flops, seconds, peak_flops_per_s))
    if time <= 0 or peak <= 0:
        return Missing("the stage's unprofiled time or the peak is not above zero")
    share = flops / (time * peak)
    if share > (1.0 if roof == "datasheet" else MEASURED_MARGIN):
        raise ImplausibleError(
            f"HFU of {stage.stage} against the {roof} limit is {share:.1%}: {flops:.4g} FLOPs in {time:.4g} s at {peak:.4g}/s.",
            "Check that the counters' chip is the one meant, that the trace and the unprofiled time hold the same number of "
            "steps, the dtype that ran, and the limit (hardware.peak_tflops, llm-perf ceilings --refresh).",
        )
    return Hfu(stage.stage, roof, share, flops, time, peak, coverage, _sign(stage, coverage))


def _sign(stage: StageKernels, coverage: float) -> Sign:
    half, counted = stage.half_flops, stage.flops
    known = not isinstance(half, Missing) and not isinstance(counted, Missing) and half <= (1 - WHOLE) * counted
    lacking = coverage < WHOLE or bool(stage.not_collected) or not known
    if stage.by_name:
        return "≳" if lacking else "≈"
    return "≥" if lacking else ""


def against_model(stage: StageKernels, model_flops: Maybe[float]) -> Maybe[AgainstModel]:
    """`model_flops` is the cost model's figure for as many steps as the trace holds."""
    for value in (stage.counters, stage.tensor_flops, model_flops):
        if isinstance(value, Missing):
            return value
    if not _known(model_flops):
        return Missing("the cost model asks for no FLOPs in this stage")
    return AgainstModel(stage.stage, _known(stage.tensor_flops), _known(model_flops), _known(stage.counters))


def _known(value: Maybe[float]) -> float:
    if isinstance(value, Missing):
        raise TypeError(value.why)
    return value

"""Everything a run's traces and counters say of its kernels, in one record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from llm_perf_opt.analysis.kernels.counter_selftest import SelfTest
from llm_perf_opt.analysis.kernels.join import NOT_COLLECTED
from llm_perf_opt.analysis.kernels.selection import Launch, Selection
from llm_perf_opt.analysis.kernels.table import StageKernels
from llm_perf_opt.analysis.limits.efficiency import MEASURED_MARGIN, Efficiency, request_cost, stage_seconds
from llm_perf_opt.analysis.limits.hardware import devices_of, other_devices
from llm_perf_opt.analysis.limits.peaks import Peaks
from llm_perf_opt.core.errors import ImplausibleError
from llm_perf_opt.core.machine_records import CounterProblem, CounterReport, KernelUse
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing
from llm_perf_opt.core.stages import DOMAIN, Stage
from llm_perf_opt.core.warnings import RunWarning, WarningId

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


def stage_hfu(stage: StageKernels, roofs: Sequence[Peaks], seconds: Maybe[float], model_flops: Maybe[float]) -> StageHfu:
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


NOTABLE = 0.1
"""Share of the larger count. Passes of one program agree to the kernel; a compiler or a library may choose a few differently."""
_UNIT = {"decode": "decode step"}


def disagreements(per_instance: Mapping[str, Mapping[str, float]]) -> tuple[RunWarning, ...]:
    """What is to be said of stages that hold another number of kernels in one pass than in another.

    `per_instance`: timeline → stage → kernels in a prefill, or in a decode step.
    """
    found = []
    (first, counts), *others = per_instance.items() if per_instance else (("", {}),)
    for other, theirs in others:
        for stage in (stage for stage in counts if stage in theirs):
            mine, yours = counts[stage], theirs[stage]
            if abs(mine - yours) > NOTABLE * max(mine, yours):
                words = (
                    f"{first} holds {mine:,.1f} kernels per {_UNIT.get(stage, stage)}, {other} {yours:,.1f}: the passes did not "
                    "launch the same, or one of them lost kernels. Each table of kernels says which pass it is of."
                )
                found.append(RunWarning(WarningId.PASSES_DISAGREE, words))
    return tuple(found)


A_LITTLE = 0.05
"""By which launches (of those planned) or kernel time (of the stage's) may fall short before it is a warning."""
WHOLE_PROGRAM = "the program"
"""The stage of a selection that is not of a range."""


@dataclass(frozen=True)
class Outcome:
    """The plan and what came of it."""

    note: str
    warning: RunWarning | None = None
    """Where the two differ."""


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


def _shortfall(chosen: Selection, stage: str, launches: int, joined: float) -> RunWarning | None:
    few = launches < (1 - A_LITTLE) * chosen.launch_count
    # A plan for one range of a program says nothing of the share of the whole.
    comparable = chosen.stage in (stage, STAGES.get(stage), WHOLE_PROGRAM if stage == PROGRAM else stage)
    if not few and not (comparable and joined < chosen.coverage - A_LITTLE):
        return None
    words = (
        f"The counters of {stage} fall short of the plan: {launches:,} of {chosen.launch_count:,} launches were counted, and "
        f"they join {_percent(joined)} of the stage's kernel time where {_percent(chosen.coverage)} was planned. The log of the "
        "pass says whether it ended early; a program that launches other kernels each time cannot be sampled by place."
    )
    return RunWarning(WarningId.COUNTERS_FALL_SHORT, words)


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


STAGES: dict[str, Stage] = {"prefill": Stage.PREFILL, "decode": Stage.DECODE_STEP}
"""A table's stage → the range whose kernels are in it."""
PROGRAM = "program"
"""The one stage of a program that has none."""


@dataclass(frozen=True)
class KernelEvidence:
    """Kernels by stage, with the counters read of them."""

    sources: Mapping[str, str]
    """Stage → the timeline its kernels are from."""
    decode_steps: int
    """In the timeline of decode."""
    stages: tuple[StageKernels, ...]
    hfus: tuple[StageHfu, ...]
    selftest: Maybe[SelfTest]
    notes: tuple[str, ...] = ()
    """What was chosen and left out, and what could not be read."""
    devices: Mapping[str, int] = field(default_factory=dict)
    """Stage → on how many devices its kernels ran."""
    sharing: int = 1
    """Devices that the limits are of."""
    warnings: tuple[RunWarning, ...] = ()
    """What a reader of any figure from counters must know first."""

    def on_others(self, stage: str) -> Missing | None:
        """Why a stage's work may not be held against the limits, where they are of more or fewer devices."""
        return other_devices(self.devices.get(stage, 1), self.sharing)


def counted_in_stage(report: CounterReport, name: str) -> Maybe[CounterReport]:
    """Without launches that the report itself places outside the stage of this pass: prefill never stands for decode."""
    stage = next((stage for key, stage in STAGES.items() if name == f"ncu_{key}"), None)
    if stage is None or not any(kernel.ranges for kernel in report.kernels):
        return report
    inside = tuple(kernel for kernel in report.kernels if f"{DOMAIN}@{stage}" in kernel.ranges)
    if len(inside) == len(report.kernels):
        return report
    what = f"{len(report.kernels) - len(inside):,} of {len(report.kernels):,} launches in {name} were not counted in {stage}"
    if not inside:
        return Missing(f"{what}: the counters are of something else")
    return replace(report, kernels=inside, problems=(*report.problems, CounterProblem("other_ranges", what, fatal=False)))


def uses_of(stage: str, launches: Sequence[Launch]) -> list[KernelUse]:
    """Launches of a stage, one row per kernel and launch size."""
    totals: dict[tuple[str, int, int], list[int]] = {}
    for launch in launches:
        total = totals.setdefault(launch.variant, [0, 0])
        total[0] += 1
        total[1] += launch.duration_ns
    return [KernelUse(stage, name, grid, block, calls, ns) for (name, grid, block), (calls, ns) in totals.items()]


def hfus_of(
    stages: Sequence[StageKernels],
    decode_steps: int,
    timings: CleanTimings | None,
    efficiency: Maybe[Efficiency],
    devices: Mapping[str, int],
) -> tuple[StageHfu, ...]:
    """HFU of every stage that has kernels, over the unprofiled time of as many steps as the timeline holds."""
    if timings is None or isinstance(efficiency, Missing):
        return ()
    cost = request_cost(timings)
    found = []
    for stage in stages:
        which = STAGES.get(stage.stage)
        if which is None:
            continue
        needed = cost if isinstance(cost, Missing) else cost.stage(which, decode_steps)
        flops: Maybe[float] = needed if isinstance(needed, Missing) else float(needed.flops)
        seconds = other_devices(devices.get(stage.stage, 1), devices_of(timings)) or stage_seconds(timings, which, decode_steps)
        found.append(stage_hfu(stage, efficiency.peak_sets, seconds, flops))
    return tuple(found)

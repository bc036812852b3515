"""What the traces and counters of a run show about its kernels, in one record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from llm_perf_opt.analysis.kernels.counter_selftest import SelfTest
from llm_perf_opt.analysis.kernels.join import NOT_COLLECTED
from llm_perf_opt.analysis.kernels.selection import Launch, Selection
from llm_perf_opt.analysis.kernels.table import StageKernels
from llm_perf_opt.analysis.limits.efficiency import Efficiency, request_cost, stage_seconds
from llm_perf_opt.analysis.limits.hardware import devices_of, other_devices
from llm_perf_opt.analysis.limits.peaks import MEASURED_MARGIN, Peaks
from llm_perf_opt.core.errors import ImplausibleError
from llm_perf_opt.core.machine_records import CounterProblem, CounterReport, KernelUse
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing
from llm_perf_opt.core.stages import DOMAIN, Stage
from llm_perf_opt.core.units import percentage
from llm_perf_opt.core.warnings import RunWarning, WarningId

WHOLE = 0.9995
"""From this coverage on, a stage's kernel time counts as fully covered by counters."""

Sign = Literal["", "≥", "≈", "≳"]


@dataclass(frozen=True)
class Hfu:
    """The hardware FLOPs utilization of one stage at one peak."""

    stage: str
    peaks: str
    """`datasheet` or `measured`."""
    share: float
    executed_flops: float
    seconds: float
    """Unprofiled time of as many steps as are in the trace."""
    peak_flops_per_s: float
    coverage: float
    """Share of the stage's kernel time whose FLOPs were counted."""
    sign: Sign
    """≥: some kernels or kinds of FLOPs are not included, such as packed half precision; ≈: counters of some kernels are from
    launches with a different grid; ≳: both."""


@dataclass(frozen=True)
class ExecutedFlops:
    """FLOPs that the tensor cores executed and that the cost model requires, in the same steps."""

    stage: str
    tensor_flops: float
    model_flops: float
    coverage: float

    @property
    def ratio(self) -> float:
        """Executed / required FLOPs."""
        return self.tensor_flops / self.model_flops


@dataclass(frozen=True)
class StageHfu:
    """The HFU of a stage at every peak, and its FLOPs compared with the cost model."""

    stage: str
    against: tuple[tuple[str, Maybe[Hfu]], ...]
    """Name of the peaks → HFU."""
    model: Maybe[ExecutedFlops]
    half_flops: Maybe[float] = NOT_COLLECTED
    """Upper bound of FLOPs in packed half precision; not included in any other figure."""


def stage_hfu(stage: StageKernels, peak_sets: Sequence[Peaks], seconds: Maybe[float], model_flops: Maybe[float]) -> StageHfu:
    """Return the HFU of a stage; `seconds` (unprofiled) and `model_flops` are of as many steps as are in the trace."""
    against = tuple((peaks.name, hfu(stage, peaks.name, seconds, peaks.peak_flops_per_s)) for peaks in peak_sets)
    return StageHfu(stage.stage, against, compare_with_model(stage, model_flops), stage.half_flops)


def hfu(stage: StageKernels, peaks: str, seconds: Maybe[float], peak_flops_per_s: Maybe[float]) -> Maybe[Hfu]:
    """Return the HFU at one peak; `seconds` is the unprofiled time of as many steps as are in the trace."""
    for value in (stage.counters, stage.flops, seconds, peak_flops_per_s):
        if isinstance(value, Missing):
            return value
    coverage, flops, time, peak = (_known(value) for value in (stage.counters, stage.flops, seconds, peak_flops_per_s))
    if time <= 0 or peak <= 0:
        return Missing("the stage's unprofiled time or the peak is not above zero")
    share = flops / (time * peak)
    if share > (1.0 if peaks == "datasheet" else MEASURED_MARGIN):
        raise ImplausibleError(
            f"HFU of {stage.stage} against the {peaks} peak is {percentage(share, 1)}: "
            f"{flops:.4g} FLOPs in {time:.4g} s at {peak:.4g}/s.",
            "Check the dtype and the peak (hardware.peak_tflops, llm-perf ceilings --refresh), that the counters are those of "
            "the right chip, and that the trace and the unprofiled time have the same number of steps.",
        )
    return Hfu(stage.stage, peaks, share, flops, time, peak, coverage, _sign(stage, coverage))


def _sign(stage: StageKernels, coverage: float) -> Sign:
    half, counted = stage.half_flops, stage.flops
    no_half = not isinstance(half, Missing) and not isinstance(counted, Missing) and half <= (1 - WHOLE) * counted
    incomplete = coverage < WHOLE or bool(stage.not_collected) or not no_half
    if stage.by_name:
        return "≳" if incomplete else "≈"
    return "≥" if incomplete else ""


def compare_with_model(stage: StageKernels, model_flops: Maybe[float]) -> Maybe[ExecutedFlops]:
    """Compare executed FLOPs with the cost model's `model_flops` of as many steps as are in the trace."""
    for value in (stage.counters, stage.tensor_flops, model_flops):
        if isinstance(value, Missing):
            return value
    if not _known(model_flops):
        return Missing("the cost model requires no FLOPs in this stage")
    return ExecutedFlops(stage.stage, _known(stage.tensor_flops), _known(model_flops), _known(stage.counters))


def _known(value: Maybe[float]) -> float:
    if isinstance(value, Missing):
        raise TypeError(value.why)
    return value


NOTABLE = 0.1
"""Share of the larger count. Passes of one program usually agree exactly; a compiler or a library may choose other kernels."""
_UNIT = {"decode": "decode step"}


def disagreements(per_instance: Mapping[str, Mapping[str, float]]) -> tuple[RunWarning, ...]:
    """Return a warning for each stage whose number of kernels differs between passes.

    `per_instance`: timeline → stage → kernels per prefill or per decode step.
    """
    found = []
    (first, counts), *others = per_instance.items() if per_instance else (("", {}),)
    for other, theirs in others:
        for stage in (stage for stage in counts if stage in theirs):
            mine, yours = counts[stage], theirs[stage]
            if abs(mine - yours) > NOTABLE * max(mine, yours):
                words = (
                    f"{first} has {mine:,.1f} kernels per {_UNIT.get(stage, stage)}, {other} {yours:,.1f}: the passes launched "
                    "different kernels, or one of them missed some. Each kernel table names its pass."
                )
                found.append(RunWarning(WarningId.PASSES_DISAGREE, words))
    return tuple(found)


A_LITTLE = 0.05
"""How far launches (of those planned) or kernel time (of the stage's) may fall short without a warning."""
WHOLE_PROGRAM = "the program"
"""The stage of a selection without a range."""


@dataclass(frozen=True)
class Outcome:
    """The plan for counters and its result."""

    note: str
    warning: RunWarning | None = None
    """If the two differ."""


def outcome(chosen: Selection, stage: str, launches: Maybe[int], joined: Maybe[float]) -> Outcome:
    """Compare the plan with the `launches` counted and the share of the stage's kernel time that is `joined` to them."""
    step = f" of step {chosen.step}" if chosen.step else ""
    whose = f"the kernel time of {chosen.stage}" if "/" in chosen.stage else "its kernel time"
    planned = (
        f"Counters of {stage}: planned {len(chosen.kernels)} functions, selected from {chosen.source}; "
        f"{chosen.launch_count:,} launches{step}, which represent {percentage(chosen.coverage, 1)} of {whose}."
    )
    if isinstance(launches, Missing) or isinstance(joined, Missing):
        missing = next(value for value in (launches, joined) if isinstance(value, Missing))
        return Outcome(f"{planned} Counted: {missing}.")
    counted = f"{launches:,} launches, joined to {percentage(joined, 1)} of the stage's kernel time"
    return Outcome(f"{planned} Counted: {counted}.", _shortfall(chosen, stage, launches, joined))


def _shortfall(chosen: Selection, stage: str, launches: int, joined: float) -> RunWarning | None:
    few = launches < (1 - A_LITTLE) * chosen.launch_count
    # A plan for one range of a program has no target for the share of the whole program.
    comparable = chosen.stage in (stage, STAGES.get(stage), WHOLE_PROGRAM if stage == PROGRAM else stage)
    if not few and not (comparable and joined < chosen.coverage - A_LITTLE):
        return None
    cause = (
        "Check the log of the pass for an early end."
        if few
        else "The passes launched different kernels or grids, and counters apply only to launches of the same kernel and grid."
    )
    words = (
        f"The counters of {stage} fall short of the plan: {launches:,} of {chosen.launch_count:,} launches were counted, and "
        f"they are joined to {percentage(joined, 1)} of the stage's kernel time instead of the planned "
        f"{percentage(chosen.coverage, 1)}. {cause} A program whose kernels differ between runs cannot be sampled by position."
    )
    return RunWarning(WarningId.COUNTERS_FALL_SHORT, words)


STAGES: dict[str, Stage] = {"prefill": Stage.PREFILL, "decode": Stage.DECODE_STEP}
"""Stage of a table → the range that contains its kernels."""
PROGRAM = "program"
"""The only stage of a program without stages."""


@dataclass(frozen=True)
class KernelEvidence:
    """Kernels by stage, with their counters."""

    sources: Mapping[str, str]
    """Stage → timeline of its kernels."""
    decode_steps: int
    """In the timeline of decode."""
    stages: tuple[StageKernels, ...]
    hfus: tuple[StageHfu, ...]
    selftest: Maybe[SelfTest]
    notes: tuple[str, ...] = ()
    """What was selected, what was left out, and what could not be read."""
    devices: Mapping[str, int] = field(default_factory=dict)
    """Stage → number of devices that ran its kernels."""
    sharing: int = 1
    """Number of devices that the peaks cover."""
    warnings: tuple[RunWarning, ...] = ()
    """Warnings that apply to every figure from counters."""

    def device_mismatch(self, stage: str) -> Missing | None:
        """Return why a stage's work cannot be compared with the peaks if they cover more or fewer devices, otherwise None."""
        return other_devices(self.devices.get(stage, 1), self.sharing)


def counted_in_stage(report: CounterReport, name: str) -> Maybe[CounterReport]:
    """Return the report without launches outside the stage of this pass, because prefill never represents decode."""
    stage = next((stage for key, stage in STAGES.items() if name == f"ncu_{key}"), None)
    if stage is None or not any(kernel.ranges for kernel in report.kernels):
        return report
    inside = tuple(kernel for kernel in report.kernels if f"{DOMAIN}@{stage}" in kernel.ranges)
    if len(inside) == len(report.kernels):
        return report
    what = f"{len(report.kernels) - len(inside):,} of {len(report.kernels):,} launches in {name} were not counted in {stage}"
    if not inside:
        return Missing(f"{what}: the counters belong to other work")
    return replace(report, kernels=inside, problems=(*report.problems, CounterProblem("other_ranges", what, fatal=False)))


def uses_of(stage: str, launches: Sequence[Launch]) -> list[KernelUse]:
    """Return the launches of a stage as one row per kernel and launch size."""
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
    """Return the HFU of every stage with kernels, over the unprofiled time of as many steps as are in the timeline."""
    if timings is None or isinstance(efficiency, Missing):
        return ()
    cost = request_cost(timings)
    found = []
    for stage in stages:
        which = STAGES.get(stage.stage)
        if which is None:
            continue
        stage_cost = cost if isinstance(cost, Missing) else cost.stage(which, decode_steps)
        flops: Maybe[float] = stage_cost if isinstance(stage_cost, Missing) else float(stage_cost.flops)
        seconds = other_devices(devices.get(stage.stage, 1), devices_of(timings)) or stage_seconds(timings, which, decode_steps)
        found.append(stage_hfu(stage, efficiency.peak_sets, seconds, flops))
    return tuple(found)

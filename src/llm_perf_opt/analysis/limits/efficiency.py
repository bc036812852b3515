"""How far each stage is from the hardware's limit: rates, utilization, floor, and what binds it."""

from dataclasses import dataclass, replace

from llm_perf_opt.analysis.cost_model.architecture import Architecture, Mla
from llm_perf_opt.analysis.cost_model.cost import Formats, StageCost, combined, compute_dtype, step_cost
from llm_perf_opt.analysis.cost_model.families import architecture_of
from llm_perf_opt.analysis.cost_model.work import Logits, Step, decode_steps
from llm_perf_opt.analysis.limits.binding import UNKNOWN, KernelShare, Nearest, sampled_share, verdict
from llm_perf_opt.analysis.limits.floor import Floor, FloorPart
from llm_perf_opt.analysis.limits.hardware import Hardware, devices_of, more_devices, shared_words
from llm_perf_opt.analysis.limits.roofs import Roof, best_floor, least_time, roofs_of
from llm_perf_opt.analysis.separable import steps_unavailable
from llm_perf_opt.analysis.stats import percentile, summarize
from llm_perf_opt.core.errors import ConfigError, ImplausibleError
from llm_perf_opt.core.machine_records import Ceilings
from llm_perf_opt.core.records import CleanTimings, Distribution, Maybe, Missing, TorchPass
from llm_perf_opt.core.stages import Stage

MEASURED_MARGIN = 1.03
"""A measured ceiling is a median with spread: a stage may pass it by a little without anything being wrong."""

_NOT_SAMPLED = Missing("the device was not sampled")


@dataclass(frozen=True)
class RooflineComparison:
    """A stage compared with one roof."""

    roof: Roof
    mfu: Maybe[float]
    mfu_full_attention: Maybe[float]
    mbu: Maybe[float]
    floor: Maybe[Floor]
    times_floor: Maybe[float]


@dataclass(frozen=True)
class PartEfficiency:
    """One part in the profiled steps, on the best limits known."""

    name: str
    time_ns: Maybe[int]
    """Of its kernels, or of the host where the run is on the CPU; under the profiler."""
    floor: FloorPart | None
    """None for work outside the cost model's parts."""
    mfu: Maybe[float]
    mbu: Maybe[float]
    times_floor: Maybe[float]


@dataclass(frozen=True)
class StageEfficiency:
    """One stage: what it did in its unprofiled time, and how that compares."""

    stage: str
    time_ns: Distribution
    """Unprofiled; of all steps together for decode."""
    cost: StageCost
    against: tuple[RooflineComparison, ...]
    parts: Maybe[tuple[PartEfficiency, ...]]
    busy: Maybe[float]
    """Share of the unprofiled time that its kernels take, their durations from the torch pass."""
    launches: Maybe[int]
    verdict: str
    """A word of VERDICTS."""
    because: str

    @property
    def binds(self) -> str:
        """The beginning of a sentence that `because` ends."""
        if self.verdict == UNKNOWN:
            return f"What binds {self.stage} is {self.verdict}"
        return f"{self.stage.capitalize()} is {self.verdict}"

    @property
    def seconds(self) -> float:
        """The median time."""
        return self.time_ns.median / 1e9

    @property
    def flops_per_s(self) -> float:
        """Achieved, attention causal."""
        return self.cost.flops / self.seconds

    @property
    def bytes_per_s(self) -> float:
        """Achieved, if no byte was moved twice."""
        return self.cost.bytes / self.seconds


@dataclass(frozen=True)
class Efficiency:
    """Every stage against every roof."""

    model_type: str
    dtype: str
    roofs: tuple[Roof, ...]
    stages: tuple[StageEfficiency, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class RequestCost:
    """What one request must compute and move."""

    architecture: Architecture
    formats: Formats
    prefill: StageCost
    steps: tuple[StageCost, ...]
    """Each decode step, its context one token longer than the last."""

    def stage(self, stage: Stage, steps: int) -> Maybe[StageCost]:
        """Prefill, or the first decode steps together."""
        if stage is Stage.PREFILL:
            return self.prefill
        return combined(self.steps[:steps]) if self.steps[:steps] else Missing("the request has no decode step")


def request_cost(timings: CleanTimings) -> Maybe[RequestCost]:
    """The cost of the request that was timed; an unknown architecture has none, nor stages that cannot be told apart."""
    runtime = timings.runtime
    if runtime is not None and (runtime.inseparable or runtime.uncosted):
        return Missing(runtime.inseparable or runtime.uncosted)
    try:
        architecture = architecture_of(timings.model.architecture, decoder_only=True)  # a runner says `uncosted` where more ran
    except ConfigError as error:
        return Missing(f"no cost model: {error.fact}")
    work = timings.workload
    formats = Formats(timings.model.dtype, timings.model.dtype)
    logits: Logits = "last" if timings.model.logits == "last token" else "all"
    prompt = Step(work.batch_size, work.padded_tokens, 0, logits)
    steps = decode_steps(work.batch_size, work.padded_tokens, work.decode_steps) if work.decode_steps else []
    return RequestCost(
        architecture,
        formats,
        step_cost(architecture, prompt, replace(formats, mla=Mla.EXPAND_ONCE)),
        tuple(step_cost(architecture, step, replace(formats, mla=Mla.ABSORB)) for step in steps),
    )


def stage_seconds(timings: CleanTimings, stage: Stage, steps: int) -> Maybe[float]:
    """The median unprofiled time of prefill, or of the first decode steps together."""
    values = stage_samples(timings, stage, steps)
    return values if isinstance(values, Missing) else percentile(values, 0.5) / 1e9


def stage_samples(timings: CleanTimings, stage: Stage, steps: int) -> Maybe[list[int]]:
    """The unprofiled time in ns of prefill, or of the first decode steps together, in each repeat."""
    if timings.runtime is not None and timings.runtime.inseparable:
        return Missing(timings.runtime.inseparable)
    if stage is not Stage.PREFILL and not 0 < steps <= timings.workload.decode_steps:
        return Missing(f"the unprofiled pass has {timings.workload.decode_steps} decode steps, not {steps}")
    part = stage is not Stage.PREFILL and steps < timings.workload.decode_steps
    untold = steps_unavailable(timings) if part else None
    return untold or [it.prefill_ns if stage is Stage.PREFILL else sum(it.steps_ns[:steps]) for it in timings.iterations]


def efficiency(
    timings: CleanTimings,
    torch: Maybe[TorchPass],
    datasheet: Maybe[Hardware],
    measured: Maybe[Ceilings],
    at_work: Maybe[float] = _NOT_SAMPLED,
) -> Maybe[Efficiency]:
    """Compare prefill and decode with the datasheet's and the measured limits; an unknown architecture has none of it.

    `at_work` is the share of the repeats' time that the sampler saw the device at work.
    """
    request = request_cost(timings)
    if isinstance(request, Missing):
        return request
    architecture, formats, work = request.architecture, request.formats, timings.workload
    numbers = compute_dtype(formats.weights)
    devices = devices_of(timings)
    if (elsewhere := _on_more_devices(torch, devices)) is not None:
        return elsewhere
    roofs = roofs_of(timings, devices, numbers, datasheet, measured)
    sampled = _sampled(request, timings, roofs, at_work)
    stages = [_stage(Stage.PREFILL, request.prefill, request.prefill, timings, torch, roofs, sampled)]
    if request.steps:
        profiled = len(request.steps) if isinstance(torch, Missing) else torch.decode_steps
        whole, seen = combined(request.steps), combined(request.steps[:profiled])
        stages.append(_stage(Stage.DECODE, whole, seen, timings, torch, roofs, sampled))
    notes = [f"Bytes and FLOPs of {architecture.model_type} from its configuration; weights and cache in {formats.weights}."]
    if devices > 1:
        notes.append(shared_words(devices))
    if architecture.has_latent_attention:
        notes.append(
            "Latent attention is counted as it can be run with the latent cache: "
            f"{Mla.EXPAND_ONCE} in prefill, {Mla.ABSORB} in decode. transformers runs {formats.mla}, which executes more."
        )
    if len(set(work.prompt_tokens)) > 1:
        notes.append("Padding is counted as work: the batch is as wide as its longest prompt.")
    return Efficiency(architecture.model_type, formats.weights, roofs, tuple(stages), tuple(notes))


def _on_more_devices(torch: Maybe[TorchPass], devices: int) -> Missing | None:
    """Kernels on more devices than the run knows of: what is known of its limits is not of them."""
    if isinstance(torch, Missing) or isinstance(torch.activity, Missing):
        return None
    return more_devices(max((entry.devices for entry in torch.activity), default=1), devices)


def _stage(
    stage: Stage,
    cost: StageCost,
    profiled_cost: StageCost,
    timings: CleanTimings,
    torch: Maybe[TorchPass],
    roofs: tuple[Roof, ...],
    sampled: dict[Stage, Maybe[KernelShare]],
) -> StageEfficiency:
    """`profiled_cost` is of as many steps as the torch pass took."""
    values = [it.prefill_ns if stage is Stage.PREFILL else it.decode_ns for it in timings.iterations]
    time = summarize(values)
    against = tuple(_against(stage, cost, time.median / 1e9, roof) for roof in roofs)
    busy, launches = _activity(stage, timings, torch)
    share = sampled[stage] if isinstance(busy, Missing) else KernelShare(busy, busy)
    if isinstance(share, Missing) and isinstance(busy, Missing):
        share = Missing(f"{busy.why}; {share.why}")
    word, because = verdict(_nearest(against), share, on_cpu=not timings.model.device.startswith("cuda"))
    return StageEfficiency(
        stage=stage.value,
        time_ns=time,
        cost=cost,
        against=against,
        parts=_parts(stage, profiled_cost, torch, roofs),
        busy=busy,
        launches=launches,
        verdict=word,
        because=because,
    )


def _against(stage: Stage, cost: StageCost, seconds: float, roof: Roof) -> RooflineComparison:
    def share(amount: float, limit: Maybe[float], what: str = "") -> Maybe[float]:
        if isinstance(limit, Missing):
            return limit
        found = amount / (seconds * limit)
        if what and found > (1.0 if roof.name == "datasheet" else MEASURED_MARGIN):
            raise ImplausibleError(
                f"{what} of {stage.value} against the {roof.name} peak is {found:.1%}: "
                f"{amount:.4g} in {seconds:.4g} s at {limit:.4g}/s.",
                "Check that the device (hardware.peak_tflops, hardware.bandwidth_gbs) and the dtype are right and, for a "
                "measured peak, that the machine was quiet (llm-perf ceilings --refresh, then rerun). "
                "`llm-perf report RUN --peak-tflops=… --bandwidth-gbs=…` regenerates the report with other peaks.",
            )
        return found

    least = least_time(cost, roof)
    return RooflineComparison(
        roof=roof,
        mfu=share(cost.flops, roof.peak_flops_per_s, "MFU"),
        mfu_full_attention=share(cost.flops_full_attention, roof.peak_flops_per_s),  # counts what no kernel need execute
        mbu=share(cost.bytes, roof.bandwidth_bytes_per_s, "MBU"),
        floor=least,
        times_floor=least if isinstance(least, Missing) else seconds / least.seconds,
    )


def _parts(stage: Stage, cost: StageCost, torch: Maybe[TorchPass], roofs: tuple[Roof, ...]) -> Maybe[tuple[PartEfficiency, ...]]:
    """Every part's own distance from the limit, in the profiled steps; what belongs to no part of the cost model is `other`."""
    found = best_floor(cost, roofs)
    if isinstance(found, Missing):
        return found
    best, least = found
    times = _part_times(stage, torch)
    rows = [_part(part, _time_of(part.name, times), best) for part in least.parts]
    if not isinstance(times, Missing):
        known = {part.name for part in least.parts}
        rest = sum(time for name, time in times.items() if name not in known)
        none = Missing("it is outside the cost model")
        rows.append(PartEfficiency("other", rest, None, none, none, none))
    return tuple(rows)


def _part_times(stage: Stage, torch: Maybe[TorchPass]) -> Maybe[dict[str, int]]:
    if isinstance(torch, Missing):
        return torch
    if isinstance(torch.parts, Missing):
        return torch.parts
    return {entry.part: entry.time_ns for entry in torch.parts if entry.stage == stage.value}


def _time_of(part: str, times: Maybe[dict[str, int]]) -> Maybe[int]:
    return times if isinstance(times, Missing) else times.get(part, Missing("no work was seen in this component"))


def _part(part: FloorPart, time_ns: Maybe[int], roof: Roof) -> PartEfficiency:
    if isinstance(time_ns, Missing):
        return PartEfficiency(part.name, time_ns, part, time_ns, time_ns, time_ns)
    seconds = max(time_ns, 1) / 1e9

    def share(amount: int, limit: Maybe[float]) -> Maybe[float]:
        if isinstance(limit, Missing):
            return limit
        found = amount / (seconds * limit)
        return (
            found if found <= MEASURED_MARGIN else Missing("above 100 %: its data is in a cache, or not all of its work was seen")
        )

    return PartEfficiency(
        name=part.name,
        time_ns=time_ns,
        floor=part,
        mfu=share(part.flops, roof.peak_flops_per_s),
        mbu=share(part.bytes, roof.bandwidth_bytes_per_s),
        times_floor=seconds / part.seconds if part.seconds else Missing("it has no roofline time"),
    )


def _activity(stage: Stage, timings: CleanTimings, torch: Maybe[TorchPass]) -> tuple[Maybe[float], Maybe[int]]:
    """Kernel time over the unprofiled time of as many steps, the mean over the devices seen; and the launches."""
    if isinstance(torch, Missing):
        return torch, torch
    if isinstance(torch.activity, Missing):
        return torch.activity, torch.activity
    found = next((entry for entry in torch.activity if entry.stage == stage.value), None)
    if found is None:
        why = Missing("the torch pass did not see this stage")
        return why, why
    seconds = stage_seconds(timings, stage, torch.decode_steps)
    share = seconds if isinstance(seconds, Missing) else found.kernel_ns / (seconds * 1e9 * found.devices)
    return share, found.launches


def _sampled(
    request: RequestCost, timings: CleanTimings, roofs: tuple[Roof, ...], at_work: Maybe[float]
) -> dict[Stage, Maybe[KernelShare]]:
    """What the sampler's readings leave possible for each stage; they do not tell one stage from the other themselves."""
    if isinstance(at_work, Missing):
        return {Stage.PREFILL: at_work, Stage.DECODE: at_work}
    first, last = timings.iterations[0], timings.iterations[-1]
    whole = last.started_ns + last.wall_ns - first.started_ns
    costs = {Stage.PREFILL: request.prefill, **({Stage.DECODE: combined(request.steps)} if request.steps else {})}
    taken = {
        Stage.PREFILL: sum(one.prefill_ns for one in timings.iterations),
        Stage.DECODE: sum(one.decode_ns for one in timings.iterations),
    }
    least = dict.fromkeys(taken, 0.0)
    for stage, cost in costs.items():
        found = best_floor(cost, roofs)
        if not isinstance(found, Missing):
            least[stage] = min(1.0, found[1].seconds * 1e9 * len(timings.iterations) / taken[stage])
    shares: dict[Stage, Maybe[KernelShare]] = {}
    for stage, other in ((Stage.PREFILL, Stage.DECODE), (Stage.DECODE, Stage.PREFILL)):
        own, others = (taken[one] / max(whole, sum(taken.values())) for one in (stage, other))
        shares[stage] = (
            sampled_share(at_work, own, others, least[stage], least[other])
            if own
            else Missing(f"the request has no {stage.value}")
        )
    return shares


def _nearest(against: tuple[RooflineComparison, ...]) -> Maybe[Nearest]:
    """On the best limits known."""
    for entry in reversed(against):
        if not isinstance(entry.floor, Missing) and not isinstance(entry.times_floor, Missing):
            return Nearest(round(entry.times_floor, 9), entry.floor, entry.roof.name)  # twice is twice, not a last digit more
    return Missing("no peak is known to compare with")

"""How close each stage comes to the hardware's peaks: rates, utilization, roofline time, and what bounds it."""

from dataclasses import dataclass, replace

from llm_perf_opt.analysis.cost_model.architecture import Architecture, Mla
from llm_perf_opt.analysis.cost_model.cost import Formats, StageCost, combined, compute_dtype, step_cost
from llm_perf_opt.analysis.cost_model.models import architecture_that_ran
from llm_perf_opt.analysis.cost_model.vision import ModuleWork
from llm_perf_opt.analysis.cost_model.vision_models import modules_cost, submodule_cost, vision_of
from llm_perf_opt.analysis.cost_model.work import Logits, Step, decode_steps
from llm_perf_opt.analysis.limits.binding import UNKNOWN, KernelShare, RooflineDistance, sampled_share, shown_verdict, verdict
from llm_perf_opt.analysis.limits.compared import TOO_HIGH, RooflineComparison, compare_stage
from llm_perf_opt.analysis.limits.hardware import Hardware, devices_of, more_devices, shared_words
from llm_perf_opt.analysis.limits.peaks import MEASURED_MARGIN, Peaks, best_roofline_time, peaks_of
from llm_perf_opt.analysis.limits.roofline import ComponentRoofline
from llm_perf_opt.analysis.limits.substages import SubstageEfficiency, prefill_substages
from llm_perf_opt.analysis.separable import steps_unavailable
from llm_perf_opt.analysis.stats import percentile, summarize
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.machine_records import Ceilings
from llm_perf_opt.core.records import CleanTimings, Distribution, Maybe, Missing, ModelFacts, TorchPass
from llm_perf_opt.core.stages import Stage
from llm_perf_opt.core.units import duration
from llm_perf_opt.core.vision_records import VisionInput

_NOT_SAMPLED = Missing("the device was not sampled")
_NO_WORK = Missing("no work of the torch pass was assigned to this component")
_NOT_MODELED = Missing("it is outside the cost model")
_SAME_STEPS = 0.1
"""The first decode steps are like all of them if their mean differs by at most this share."""


@dataclass(frozen=True)
class ComponentEfficiency:
    """One component in the profiled steps, at the best known peaks."""

    name: str
    time_ns: Maybe[int]
    """Time of its kernels, or of the host for a CPU run, under the profiler."""
    roofline: ComponentRoofline | None
    """None for work outside the cost model."""
    mfu: Maybe[float]
    mbu: Maybe[float]
    times_roofline: Maybe[float]


@dataclass(frozen=True)
class StageEfficiency:
    """One stage: its cost, its unprofiled time, and how they compare with the peaks."""

    stage: str
    time_ns: Distribution
    """Unprofiled time; for decode, of all steps together."""
    cost: StageCost
    against: tuple[RooflineComparison, ...]
    components: Maybe[tuple[ComponentEfficiency, ...]]
    busy: Maybe[float]
    """Kernel durations of the torch pass as a share of the unprofiled time."""
    launches: Maybe[int]
    verdict: str
    """One of VERDICTS."""
    because: str

    @property
    def binds(self) -> str:
        """The first half of a sentence; `because` is the second."""
        if self.verdict == UNKNOWN:
            return f"What bounds {self.stage} is {self.verdict}"
        return f"{self.stage.capitalize()} is {shown_verdict(self.verdict)}"

    @property
    def distance(self) -> Maybe[RooflineDistance]:
        """The distance from the roofline at the best known peaks."""
        return _distance(self.against)

    @property
    def seconds(self) -> float:
        """The median time in seconds."""
        return self.time_ns.median / 1e9

    @property
    def flops_per_s(self) -> float:
        """Achieved FLOP/s, with causal attention."""
        return self.cost.flops / self.seconds

    @property
    def bytes_per_s(self) -> float:
        """Achieved B/s, assuming that no byte moved twice."""
        return self.cost.bytes / self.seconds


@dataclass(frozen=True)
class Efficiency:
    """Every stage compared with every set of peaks."""

    model_type: str
    dtype: str
    peak_sets: tuple[Peaks, ...]
    stages: tuple[StageEfficiency, ...]
    notes: tuple[str, ...]
    substages: tuple[SubstageEfficiency, ...] = ()
    """Of prefill, in the order in which they began."""


@dataclass(frozen=True)
class RequestCost:
    """The cost of one request."""

    architecture: Architecture
    formats: Formats
    prefill: StageCost
    steps: tuple[StageCost, ...]
    """Each decode step, on a context one token longer than that of the previous one."""
    modules: tuple[ModuleWork, ...] = ()
    """Modules of the image encoders and the projector; their cost is part of `prefill`."""

    def stage(self, stage: Stage, steps: int) -> Maybe[StageCost]:
        """Return the cost of prefill, or of the first `steps` decode steps together."""
        if stage is Stage.PREFILL:
            return self.prefill
        return combined(self.steps[:steps]) if self.steps[:steps] else Missing("the request has no decode step")

    def submodule(self, path: str) -> Maybe[StageCost]:
        """Return the cost of a submodule in prefill."""
        return submodule_cost(path, self.modules, self.prefill, self.formats)


def request_cost(timings: CleanTimings) -> Maybe[RequestCost]:
    """Return the cost of the timed request; Missing for an unknown architecture or stages that cannot be separated."""
    runtime = timings.runtime
    if runtime is not None and (runtime.inseparable or runtime.uncosted):
        return Missing(runtime.inseparable or runtime.uncosted)
    work, formats = timings.workload, formats_of(timings.model)
    logits: Logits = "last" if timings.model.logits == "last token" else "all"
    prompt = Step(work.batch_size, work.padded_tokens, 0, logits)
    try:
        architecture = architecture_that_ran(timings.model, decoder_only=work.vision is None)
        vision = vision_of(timings.model.architecture) if work.vision else None
        modules = vision.work(work.vision) if vision and work.vision else ()
        prompt = vision.step(work.vision, prompt) if vision and work.vision else prompt
    except ConfigError as error:
        return Missing(f"no cost model: {error.fact}")
    steps = decode_steps(work.batch_size, work.padded_tokens, work.decode_steps) if work.decode_steps else []
    language = step_cost(architecture, prompt, replace(formats, mla=Mla.EXPAND_ONCE))
    return RequestCost(
        architecture,
        formats,
        combined([modules_cost(modules, formats), language]),
        tuple(step_cost(architecture, step, replace(formats, mla=Mla.ABSORB)) for step in steps),
        modules,
    )


def formats_of(model: ModelFacts) -> Formats:
    """Return the number formats of the model as it ran."""
    formats = Formats(model.dtype, model.dtype)
    quantized = model.weights.quantized if model.weights else None
    if quantized is None:
        return formats
    bits = tuple(sorted(quantized.component_bits.items()))
    return replace(formats, quantized=quantized.components, quantized_bits=quantized.bits_per_weight, component_bits=bits)


def stage_seconds(timings: CleanTimings, stage: Stage, steps: int) -> Maybe[float]:
    """Return the median unprofiled time of prefill, or of the first `steps` decode steps together."""
    values = stage_samples(timings, stage, steps)
    return values if isinstance(values, Missing) else percentile(values, 0.5) / 1e9


def stage_samples(timings: CleanTimings, stage: Stage, steps: int) -> Maybe[list[int]]:
    """Return the unprofiled time in ns of prefill, or of the first `steps` decode steps together, per repeat."""
    if timings.runtime is not None and timings.runtime.inseparable:
        return Missing(timings.runtime.inseparable)
    if stage is not Stage.PREFILL and not 0 < steps <= timings.workload.decode_steps:
        return Missing(f"the unprofiled pass has {timings.workload.decode_steps} decode steps, not {steps}")
    some_steps = stage is not Stage.PREFILL and steps < timings.workload.decode_steps
    unavailable = steps_unavailable(timings) if some_steps else None
    return unavailable or [it.prefill_ns if stage is Stage.PREFILL else sum(it.steps_ns[:steps]) for it in timings.iterations]


def other_steps(timings: CleanTimings, steps: int, first_ns: float) -> str:
    """Return the mean times of the first `steps` decode steps and of all, as words, if they clearly differ."""
    every = timings.workload.decode_steps
    samples = stage_samples(timings, Stage.DECODE, every)
    if isinstance(samples, Missing):
        return ""
    mean_ns = summarize(samples).median / every
    if abs(first_ns / steps - mean_ns) <= _SAME_STEPS * mean_ns:
        return ""
    return (
        f"; the first {steps} of {every} decode steps take {duration(first_ns / steps)} each, all {every} steps "
        f"{duration(mean_ns)} on average"
    )


def efficiency(
    timings: CleanTimings,
    torch: Maybe[TorchPass],
    datasheet: Maybe[Hardware],
    measured: Maybe[Ceilings],
    at_work: Maybe[float] = _NOT_SAMPLED,
) -> Maybe[Efficiency]:
    """Compare prefill and decode with the datasheet and the measured peaks; Missing if the request has no cost.

    `at_work` is the sampled GPU utilization during the repeats.
    """
    request = request_cost(timings)
    if isinstance(request, Missing):
        return request
    architecture, formats, work = request.architecture, request.formats, timings.workload
    devices = devices_of(timings)
    if (mismatch := _on_more_devices(torch, devices)) is not None:
        return mismatch
    reached = _reached_bytes_per_s(request, timings)
    peak_sets = peaks_of(timings, devices, compute_dtype(formats.weights), datasheet, measured, reached)
    sampled = _sampled(request, timings, peak_sets, at_work)
    stages = [_stage(Stage.PREFILL, request.prefill, request.prefill, timings, torch, peak_sets, sampled)]
    if request.steps:
        profiled = len(request.steps) if isinstance(torch, Missing) else torch.decode_steps
        cost, profiled_cost = combined(request.steps), combined(request.steps[:profiled])
        stages.append(_stage(Stage.DECODE, cost, profiled_cost, timings, torch, peak_sets, sampled))
    name = architecture.model_type if work.vision is None else architecture.part_of or architecture.model_type
    how = "counted from the operators of its model" if timings.model.counted else "computed from its configuration"
    notes = [f"Bytes and FLOPs of {name} are {how}, with weights and cache in {formats.weights}{_quantized_words(formats)}."]
    notes += architecture.caveats
    if devices > 1:
        notes.append(shared_words(devices))
    if architecture.has_latent_attention:
        notes.append(
            "Latent attention is counted as an implementation with a latent cache can run it: "
            f"{Mla.EXPAND_ONCE} in prefill, {Mla.ABSORB} in decode. transformers runs {formats.mla}, which executes more."
        )
    if work.vision is not None:
        notes.append(_image_words(work.vision))
    if len(set(work.prompt_tokens)) > 1:
        notes.append("Padding counts as work: every sequence has the length of the longest prompt.")
    substages = prefill_substages(timings, request.submodule, peak_sets)
    return Efficiency(name, formats.weights, peak_sets, tuple(stages), tuple(notes), substages)


def _reached_bytes_per_s(request: RequestCost, timings: CleanTimings) -> float:
    """Return the highest median rate of the minimum bytes, of prefill and of decode."""
    rates = [request.prefill.bytes / percentile([it.prefill_ns for it in timings.iterations], 0.5)]
    if request.steps:
        rates.append(combined(request.steps).bytes / percentile([it.decode_ns for it in timings.iterations], 0.5))
    return 1e9 * max(rates)


def _image_words(images: VisionInput) -> str:
    tensors = ", ".join(f"{name} {' × '.join(map(str, shape))}" for name, shape in images.pixel_shapes.items())
    return (
        f"Prefill includes the image encoders and the projector: {tensors} for {sum(images.image_tokens):,} of the prompt's "
        f"tokens ({images.images:,} {'image' if images.images == 1 else 'images'})."
    )


def _quantized_words(formats: Formats) -> str:
    if not formats.quantized:
        return ""
    parts = ", ".join(name.replace("_", " ") for name in formats.quantized)
    return f", except the quantized weights ({formats.quantized_bits:.3g} bits with their scales: {parts})"


def _on_more_devices(torch: Maybe[TorchPass], devices: int) -> Missing | None:
    """Return why the peaks do not apply if kernels ran on more devices than the run declares, otherwise None."""
    if isinstance(torch, Missing) or isinstance(torch.activity, Missing):
        return None
    return more_devices(max((entry.devices for entry in torch.activity), default=1), devices)


def _stage(
    stage: Stage,
    cost: StageCost,
    profiled_cost: StageCost,
    timings: CleanTimings,
    torch: Maybe[TorchPass],
    peak_sets: tuple[Peaks, ...],
    sampled: dict[Stage, Maybe[KernelShare]],
) -> StageEfficiency:
    """Return the comparison of one stage; `profiled_cost` is the cost of the steps in the torch pass."""
    values = [it.prefill_ns if stage is Stage.PREFILL else it.decode_ns for it in timings.iterations]
    time = summarize(values)
    against = tuple(compare_stage(stage.value, cost, time.median / 1e9, peaks) for peaks in peak_sets)
    busy, launches = _activity(stage, timings, torch)
    share = sampled[stage] if isinstance(busy, Missing) else KernelShare(busy, busy)
    if isinstance(share, Missing) and isinstance(busy, Missing):
        share = Missing(f"{busy.why}; {share.why}")
    word, because = verdict(_distance(against), share, on_cpu=not timings.model.device.startswith("cuda"))
    return StageEfficiency(
        stage=stage.value,
        time_ns=time,
        cost=cost,
        against=against,
        components=_components(stage, profiled_cost, torch, peak_sets),
        busy=busy,
        launches=launches,
        verdict=word,
        because=because,
    )


def _components(
    stage: Stage, cost: StageCost, torch: Maybe[TorchPass], peak_sets: tuple[Peaks, ...]
) -> Maybe[tuple[ComponentEfficiency, ...]]:
    """Return each component in the profiled steps; work outside the cost model is `other`."""
    found = best_roofline_time(cost, peak_sets)
    if isinstance(found, Missing):
        return found
    peaks, roofline = found
    parts = torch if isinstance(torch, Missing) else torch.parts
    if isinstance(parts, Missing):
        return tuple(_component(component, parts, peaks) for component in roofline.components)
    times = {entry.part: entry.time_ns for entry in parts if entry.stage == stage.value}
    rows = [_component(component, times.pop(component.name, _NO_WORK), peaks) for component in roofline.components]
    if times or any(not isinstance(row.time_ns, Missing) for row in rows):
        rows.append(ComponentEfficiency("other", sum(times.values()), None, _NOT_MODELED, _NOT_MODELED, _NOT_MODELED))
    return tuple(rows)


def _component(component: ComponentRoofline, time_ns: Maybe[int], peaks: Peaks) -> ComponentEfficiency:
    if isinstance(time_ns, Missing):
        return ComponentEfficiency(component.name, time_ns, component, time_ns, time_ns, time_ns)
    seconds = max(time_ns, 1) / 1e9

    def share(amount: int, peak: Maybe[float]) -> Maybe[float]:
        found = peak if isinstance(peak, Missing) else amount / (seconds * peak)
        return found if isinstance(found, Missing) or found <= MEASURED_MARGIN else TOO_HIGH

    return ComponentEfficiency(
        name=component.name,
        time_ns=time_ns,
        roofline=component,
        mfu=share(component.flops, peaks.peak_flops_per_s),
        mbu=share(component.bytes, peaks.bandwidth_bytes_per_s),
        times_roofline=seconds / component.seconds if component.seconds else Missing("it has no roofline time"),
    )


def _activity(stage: Stage, timings: CleanTimings, torch: Maybe[TorchPass]) -> tuple[Maybe[float], Maybe[int]]:
    """Return kernel time / unprofiled time of as many steps, averaged over the devices seen, and the launches."""
    if isinstance(torch, Missing):
        return torch, torch
    if isinstance(torch.activity, Missing):
        return torch.activity, torch.activity
    found = next((entry for entry in torch.activity if entry.stage == stage.value), None)
    if found is None:
        why = Missing("the torch pass has no data of this stage")
        return why, why
    seconds = stage_seconds(timings, stage, torch.decode_steps)
    share = seconds if isinstance(seconds, Missing) else found.kernel_ns / (seconds * 1e9 * found.devices)
    return share, found.launches


def _sampled(
    request: RequestCost, timings: CleanTimings, peak_sets: tuple[Peaks, ...], at_work: Maybe[float]
) -> dict[Stage, Maybe[KernelShare]]:
    """Return the bounds that sampled utilization sets for each stage; the samples themselves do not separate the stages."""
    if isinstance(at_work, Missing):
        return {Stage.PREFILL: at_work, Stage.DECODE: at_work}
    first, last = timings.iterations[0], timings.iterations[-1]
    whole = last.started_ns + last.wall_ns - first.started_ns
    costs = {Stage.PREFILL: request.prefill, **({Stage.DECODE: combined(request.steps)} if request.steps else {})}
    taken = {
        Stage.PREFILL: sum(it.prefill_ns for it in timings.iterations),
        Stage.DECODE: sum(it.decode_ns for it in timings.iterations),
    }
    least = dict.fromkeys(taken, 0.0)
    for stage, cost in costs.items():
        found = best_roofline_time(cost, peak_sets)
        if not isinstance(found, Missing):
            least[stage] = min(1.0, found[1].seconds * 1e9 * len(timings.iterations) / taken[stage])
    shares: dict[Stage, Maybe[KernelShare]] = {}
    for stage, other in ((Stage.PREFILL, Stage.DECODE), (Stage.DECODE, Stage.PREFILL)):
        own, others = (taken[name] / max(whole, sum(taken.values())) for name in (stage, other))
        shares[stage] = (
            sampled_share(at_work, own, others, least[stage], least[other])
            if own
            else Missing(f"the request has no {stage.value}")
        )
    return shares


def _distance(against: tuple[RooflineComparison, ...]) -> Maybe[RooflineDistance]:
    """Return the distance from the roofline at the best known peaks."""
    for entry in reversed(against):
        if not isinstance(entry.roofline, Missing) and not isinstance(entry.times_roofline, Missing):
            times = round(entry.times_roofline, 9)  # so that rounding errors do not cross a threshold
            return RooflineDistance(times, entry.roofline, entry.peaks.name, entry.peaks.level)
    return Missing("no peak is known to compare with")

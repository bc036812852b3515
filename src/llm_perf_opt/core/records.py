"""The records of a run: capture writes them, analysis reads them. Frozen; units are in the names."""

from dataclasses import dataclass, field
from typing import Any, Literal

from llm_perf_opt.core.engine_records import ChangedEngine
from llm_perf_opt.core.engine_records import RuntimeFacts as RuntimeFacts
from llm_perf_opt.core.host_records import HostLoad, ProfilerCost
from llm_perf_opt.core.missing import Maybe as Maybe
from llm_perf_opt.core.missing import Missing as Missing
from llm_perf_opt.core.rank_records import RankFacts
from llm_perf_opt.core.vision_records import VisionInput
from llm_perf_opt.core.weight_records import TokenAgreement, WeightFacts


@dataclass(frozen=True)
class TextUse:
    """How a batch uses the texts of a dataset."""

    used: int
    """Different texts; repeated if the batch has more sequences."""
    cut: int
    """How many of them were longer than the limit and are truncated."""
    longest: int
    """Tokens of the longest text before truncation."""
    limit: int
    unused: int | None
    """Records after the used ones; None if there are too many to count."""
    empty: int = 0
    """Records before the last used one that have no text."""
    left_out: int = 0
    """Records of the source that are not in the variant because they were unreadable, empty or duplicates."""


SCHEMA = 1
"""Version of the files in a run folder. Incremented when an older reader would misread newer files."""
SERVER = "server"
"""The server's name in `raw/` and run.json."""
LOAD_PREFIX = "load_"

_NOT_RECORDED = Missing("not recorded")


@dataclass(frozen=True)
class ModelFacts:
    """The model as it actually ran, not as requested."""

    name: str
    model_class: str
    model_type: str
    parameters: int
    weight_bytes: int
    dtype: str
    device: str
    device_name: str
    attention: str
    cache: str
    compile: str
    logits: str
    """`last token` or `whole prompt`: the positions for which prefill computed logits."""
    architecture: dict[str, Any]
    """The configuration of the model, plain values only."""
    last_level_cache_bytes: Maybe[int] = _NOT_RECORDED
    """Last-level cache of the device. A model that fits in it is not limited by memory bandwidth."""
    weights: WeightFacts | None = None
    """None in older runs, which did not record it."""
    substages: dict[str, str] = field(default_factory=dict)
    """The timed sub-stages: name → path of the submodule. Empty in older runs."""
    counted: dict[str, Any] | str | None = None
    """Operators, counted after the measurement, or why they were not; None for a model_type with formulas, and in older runs."""


@dataclass(frozen=True)
class Workload:
    """What one iteration computes, with the lengths that were actually used."""

    batch_size: int
    prompt_tokens: tuple[int, ...]
    """Per sequence, without padding."""
    padded_tokens: int
    """The width of the prompt tensor, which is the longest prompt."""
    new_tokens: int
    """Per sequence: the first from prefill, each other one from a decode step."""
    source: str
    """The source of the prompts, and the tokenizer."""
    texts: TextUse | None = None
    vision: VisionInput | None = None
    """None without texts or images, and in older runs, which did not record them."""

    @property
    def decode_steps(self) -> int:
        """Decode steps in one iteration."""
        return self.new_tokens - 1


@dataclass(frozen=True)
class SubstageSpan:
    """One forward of a bracketed submodule."""

    name: str
    stage: str
    step: int
    """Index of the decode step; -1 in prefill."""
    start_ns: int
    """Since the start of the iteration."""
    duration_ns: int


@dataclass(frozen=True)
class Iteration:
    """One request: prefill, then every decode step."""

    started_ns: int
    """On the monotonic clock of the machine, which the telemetry samples use too."""
    wall_ns: int
    """Host time from the start of the request until all tokens are ready and the device is synchronized."""
    prefill_ns: int
    steps_ns: tuple[int, ...]
    substages: tuple[SubstageSpan, ...] = ()
    prefill_cpu_ns: int | None = None
    """CPU time of the main thread in prefill; None on a GPU, with an engine, and in older runs."""
    steps_cpu_ns: tuple[int, ...] = ()
    """CPU time of the main thread in each decode step, between the marks of `steps_ns`; empty if `prefill_cpu_ns` is None."""

    @property
    def decode_ns(self) -> int:
        """The time of all decode steps."""
        return sum(self.steps_ns)

    @property
    def total_ns(self) -> int:
        """The time of prefill and decode, on the clock of the steps."""
        return self.prefill_ns + self.decode_ns


@dataclass(frozen=True)
class MemoryPeaks:
    """Peak memory during the measurement."""

    allocated_bytes: Maybe[int]
    """Allocated for tensors by the framework."""
    reserved_bytes: Maybe[int]
    """Reserved on the device by the framework."""
    device_used_bytes: Maybe[int]
    """Used on the device by all processes, as the driver reports it."""
    process_rss_bytes: Maybe[int]
    """Resident host memory of the measured process."""


@dataclass(frozen=True)
class CleanTimings:
    """The unprofiled pass, which every reported time comes from."""

    model: ModelFacts
    workload: Workload
    clock: Literal["cuda events", "host clock"]
    load_s: float
    warmup: tuple[Iteration, ...]
    iterations: tuple[Iteration, ...]
    stopped: str
    """Why no more iterations were run."""
    stable: bool
    """Whether the target for the spread was reached."""
    memory: MemoryPeaks
    tokens_sha256: str
    tokens_repeat: bool
    """Whether every iteration produced the same tokens."""
    threads: int
    framework: dict[str, str]
    """Versions of the framework and the runtime libraries in the measured process."""
    settled: bool
    """Whether the times were stable at the end of warm-up."""
    device_untouched_until_ns: int
    """Monotonic time before the measured process first used its device. Earlier samples show other users of the device."""
    runtime: RuntimeFacts | None = None
    """The runtime; None in older runs, which all used plain PyTorch."""
    host: HostLoad | None = None
    """None in older runs, which did not record it."""
    agreement: TokenAgreement | None = None
    """None if the weights were not quantized."""
    ranks: tuple[RankFacts, ...] = ()
    """The ranks that llm-perf started; empty if there is one process, or an engine has its own workers."""


NO_FLOPS = Missing("FLOPs were not recorded; profiling.torch.preset=full records them")
NO_FORMULA = Missing("torch.profiler has no FLOP formula for the operator")


@dataclass(frozen=True)
class OperatorRow:
    """An operator in the profiled iteration of the torch pass."""

    name: str
    calls: int
    cpu_total_ns: int
    cpu_self_ns: int
    device_total_ns: Maybe[int]
    device_self_ns: Maybe[int]
    cpu_memory_bytes: Maybe[int]
    device_memory_bytes: Maybe[int]
    flops: Maybe[int] = NO_FLOPS
    """FLOPs of all calls, by the formulas of torch.profiler."""


@dataclass(frozen=True)
class StageActivity:
    """Device work that the launches of one stage started. Kernel times are correct even under the profiler."""

    stage: str
    launches: int
    """Calls that started device work; a CUDA graph launch counts once."""
    kernels: int
    kernel_ns: int
    """Sum over kernels, copies and memsets."""
    devices: int = 1
    """Devices that the work ran on; the times are summed over them."""


@dataclass(frozen=True)
class PartTime:
    """The time of one component of the model in one stage of the profiled iteration."""

    stage: str
    part: str
    """A component of the cost model, or `other`."""
    pieces: int
    """Kernels on a GPU; intervals of host time on a CPU."""
    time_ns: int


@dataclass(frozen=True)
class TorchPass:
    """What torch.profiler recorded in one iteration. Its times are inflated and only show where time goes."""

    preset: str
    stage_wall_ns: dict[str, int]
    """Wall time of each stage under the profiler; decode_step is the median."""
    decode_steps: int
    """Steps of the profiled iteration, which may have fewer than the unprofiled ones."""
    activity: Maybe[tuple[StageActivity, ...]]
    """Device work by stage: prefill, and decode over the profiled steps."""
    parts: Maybe[tuple[PartTime, ...]]
    """Kernel time by stage and component; host time if the run is on the CPU."""
    operators: tuple[OperatorRow, ...]
    trace_file: str
    trace_bytes: int
    overhead: tuple[OperatorRow, ...] = ()
    """The work of the profiler itself."""
    cost: ProfilerCost | None = None
    """What the profiler adds per event. None on a GPU, whose kernel times it does not change, and if it was not measured."""
    stage_cpu_ns: dict[str, int] = field(default_factory=dict)
    """CPU time of the main thread in prefill and decode; empty if unknown."""
    engine: ChangedEngine | None = None
    """None if the engine ran as in the unprofiled pass, and in older runs."""


@dataclass(frozen=True)
class WrappedPass:
    """Times that the measured process recorded itself while it ran under nsys or ncu."""

    stage_wall_ns: dict[str, int]
    """decode_step is the median."""
    steps_ns: tuple[int, ...]
    engine: ChangedEngine | None = None
    """None if the engine ran as in the unprofiled pass, and in older runs."""


# --- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distribution:
    """The summary of a sample. Percentiles are missing if the sample is too small for them."""

    n: int
    median: float
    ci_low: Maybe[float]
    """Lower end of the distribution-free 95 % confidence interval of the median."""
    ci_high: Maybe[float]
    q1: float
    q3: float
    minimum: float
    maximum: float
    p90: Maybe[float]
    p99: Maybe[float]

    @property
    def iqr(self) -> float:
        """The interquartile range."""
        return self.q3 - self.q1

    @property
    def ci_relative(self) -> Maybe[float]:
        """Half the width of the confidence interval, divided by the median."""
        if isinstance(self.ci_low, Missing) or isinstance(self.ci_high, Missing):
            return self.ci_low if isinstance(self.ci_low, Missing) else Missing("no interval")
        if self.median == 0:
            return Missing("the median is zero")
        return (self.ci_high - self.ci_low) / 2 / self.median


@dataclass(frozen=True)
class Metric:
    """A named number with its definition."""

    key: str
    label: str
    unit: str
    definition: str
    value: Maybe[Distribution]


@dataclass(frozen=True)
class StageTiming:
    """A row of the stage table. All times are per iteration."""

    name: str
    parent: str
    per_iteration: int
    """How often the stage runs per iteration."""
    time_ns: Distribution
    share: float
    """Share of the iteration; the share of a stage includes its children."""
    profiled_ns: Maybe[int]
    inflation: Maybe[float]
    """Time under torch.profiler divided by the unprofiled time."""
    depth: int = 0
    """The number of enclosing stages and substages."""


@dataclass(frozen=True)
class Drift:
    """The change of the step time as the context grows."""

    ns_per_token: float
    ci_low: Maybe[float]
    """Lower end of the 95 % interval of the slope."""
    ci_high: Maybe[float]
    first_context: int
    last_context: int
    share: float
    """Change from the first to the last step, divided by the median step."""


# --- the run ----------------------------------------------------------------------------------------------------------

PassStatus = Literal["pending", "started", "complete", "failed", "skipped"]
RunStatus = Literal["complete", "partial", "failed"]


def load_name(number: int) -> str:
    """Return the name of a load in `raw/` and run.json."""
    return f"{LOAD_PREFIX}{number:02}"


@dataclass(frozen=True)
class PassRecord:
    """The state of one pass."""

    name: str
    status: PassStatus = "pending"
    argv: tuple[str, ...] = ()
    exit_code: int | None = None
    seconds: float | None = None
    tool_version: str = ""
    why: str = ""
    remedy: str = ""

    @property
    def outcome(self) -> str:
        """Its status as the verb of a sentence."""
        return {"failed": "failed", "skipped": "was skipped"}.get(self.status, f"is {self.status}")


@dataclass(frozen=True)
class Manifest:
    """run.json. It is kept up to date during the run, so that a killed run still shows what it contains."""

    schema: int
    tool_version: str
    status: RunStatus
    created: str
    command: tuple[str, ...]
    passes: tuple[PassRecord, ...] = field(default_factory=tuple)
    why: str = ""
    remedy: str = ""
    kind: Literal["run", "exec", "serving"] = "run"
    """Profiled a model or a user's program, or put load on a server; decides which pages are written."""

    @property
    def has_times(self) -> bool:
        """Whether the unprofiled pass is complete, also if another pass or the report is not."""
        clean = self.pass_named("clean")
        return clean is not None and clean.status == "complete"

    def pass_named(self, name: str) -> PassRecord | None:
        """Return the entry of a pass, or None if the run has no such pass."""
        return next((entry for entry in self.passes if entry.name == name), None)

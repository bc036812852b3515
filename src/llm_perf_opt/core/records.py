"""The data model: what capture leaves and analysis reads. Frozen, units in the names."""

from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, Union


@dataclass(frozen=True)
class RuntimeFacts:
    """The runtime as it really ran."""

    type: str
    version: str
    method: str
    """How prefill and decode were told apart, in words."""
    inseparable: str = ""
    """Why they could not be in this run; empty where they could. Nothing is then said of the one or the other."""
    unstepped: str = ""
    """Why single steps of decode have no times of their own; empty where they have. Decode as a whole has one all the same."""
    uncosted: str = ""
    """Why its FLOPs and bytes cannot be counted from the architecture; empty where they can."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Every argument the engine was given, the runner's own among them."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables the runner set for the engine."""
    notes: tuple[str, ...] = ()
    """What else a reader must know to read the figures right."""
    devices: int = 1
    """Devices that the model is spread over. Where its FLOPs and bytes are counted, all of them share each step's work."""


@dataclass(frozen=True)
class WeightFacts:
    """Where the weights came from."""

    source: Literal["random", "stored"]
    stored_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that the files hold in each format; empty for random weights, and where the files' heads do not tell."""


@dataclass(frozen=True)
class TextUse:
    """What of a dataset's texts a batch holds."""

    used: int
    """Different texts; where they are fewer than the batch has sequences, they are repeated."""
    cut: int
    """So many of them were longer than the limit, and are cut to it."""
    longest: int
    """Tokens of the longest, before it was cut."""
    limit: int
    unused: int | None
    """Records that come after them; None: there are more than are counted."""


SCHEMA = 1
"""Version of the files in a run folder; raised when a reader of the old ones would misread the new."""

T = TypeVar("T")


@dataclass(frozen=True)
class Missing:
    """A value that could not be had, and why. Never zero, never an empty string."""

    why: str

    def __str__(self) -> str:
        return f"n/a: {self.why}"


Maybe = Union[T, Missing]  # noqa: UP007 - an alias over a type variable
"""A value, or the reason there is none."""


# --- what was measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelFacts:
    """The model as it really ran, not as it was asked for."""

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
    """`last token` or `whole prompt`: which positions the prefill computed logits for."""
    architecture: dict[str, Any]
    """The model's configuration, plain values only."""
    last_level_cache_bytes: Maybe[int] = Missing("not recorded")
    """Of the device; a model that fits in it is not bound by memory bandwidth."""
    weights: WeightFacts | None = None
    """None in runs made before it was recorded."""


@dataclass(frozen=True)
class Workload:
    """What one iteration computes; the lengths are the ones really used."""

    batch_size: int
    prompt_tokens: tuple[int, ...]
    """Per sequence, padding not counted."""
    padded_tokens: int
    """Width of the prompt tensor: the longest prompt."""
    new_tokens: int
    """Per sequence: the first comes from prefill, the others from a decode step each."""
    source: str
    """Where the prompts came from, with the tokenizer."""
    texts: TextUse | None = None
    """None for made-up ids, and in runs made before it was recorded."""

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
    """Index of the decode step, or -1 in prefill."""
    start_ns: int
    """After the iteration's start."""
    duration_ns: int


@dataclass(frozen=True)
class Iteration:
    """One whole request: prefill, then every decode step."""

    started_ns: int
    """Monotonic clock of the machine, shared with the telemetry samples."""
    wall_ns: int
    """Host clock from the request's start to all tokens ready on the host side of a synchronize."""
    prefill_ns: int
    steps_ns: tuple[int, ...]
    substages: tuple[SubstageSpan, ...] = ()

    @property
    def decode_ns(self) -> int:
        """All decode steps of this iteration."""
        return sum(self.steps_ns)

    @property
    def total_ns(self) -> int:
        """Prefill and decode, on the clock that timed the steps."""
        return self.prefill_ns + self.decode_ns


@dataclass(frozen=True)
class MemoryPeaks:
    """The most memory held while measuring."""

    allocated_bytes: Maybe[int]
    """By the framework's allocator for tensors."""
    reserved_bytes: Maybe[int]
    """By the framework's allocator from the device."""
    device_used_bytes: Maybe[int]
    """On the device by everyone, from the driver."""
    process_rss_bytes: Maybe[int]
    """Resident memory of the measured process on the host."""


@dataclass(frozen=True)
class CleanTimings:
    """The unprofiled pass: the authority on time."""

    model: ModelFacts
    workload: Workload
    clock: Literal["cuda events", "host clock"]
    load_s: float
    warmup: tuple[Iteration, ...]
    iterations: tuple[Iteration, ...]
    stopped: str
    """Why repeating ended."""
    stable: bool
    """Whether the spread target was reached."""
    memory: MemoryPeaks
    tokens_sha256: str
    tokens_repeat: bool
    """Whether every iteration produced the same tokens."""
    threads: int
    framework: dict[str, str]
    """Versions of the framework and the runtime libraries inside the measured process."""
    settled: bool
    """Whether the times had settled when warm-up ended."""
    device_untouched_until_ns: int
    """Monotonic clock before the measured process first used its device: readings before it show who else is there."""
    runtime: RuntimeFacts | None = None
    """What ran the model; none in runs made before it was written down, which were all plain PyTorch."""


@dataclass(frozen=True)
class OperatorRow:
    """One operator over the profiled iteration of the torch pass."""

    name: str
    calls: int
    cpu_total_ns: int
    cpu_self_ns: int
    device_total_ns: Maybe[int]
    device_self_ns: Maybe[int]
    cpu_memory_bytes: Maybe[int]
    device_memory_bytes: Maybe[int]


@dataclass(frozen=True)
class StageActivity:
    """What the launches of one stage started on the device; kernel times are true even under a profiler."""

    stage: str
    launches: int
    """Calls that started device work; the replay of a CUDA graph is one."""
    kernels: int
    kernel_ns: int
    """Sum over kernels, copies and memsets."""
    devices: int = 1
    """Devices they ran on: the sum is over all of them."""


@dataclass(frozen=True)
class PartTime:
    """What one part of the model took in one stage of the profiled iteration."""

    stage: str
    part: str
    """A part of the cost model, or `other`."""
    pieces: int
    """Kernels on a device, stretches of host time on a CPU."""
    time_ns: int


@dataclass(frozen=True)
class TorchPass:
    """What torch.profiler saw in one iteration; its times are inflated and say only where time goes."""

    preset: str
    stage_wall_ns: dict[str, int]
    """Wall time of each stage while profiled; decode_step is the median."""
    decode_steps: int
    """Steps in the profiled iteration: it may be shorter than the unprofiled ones."""
    activity: Maybe[tuple[StageActivity, ...]]
    """Device work by stage: prefill, and decode over its profiled steps."""
    parts: Maybe[tuple[PartTime, ...]]
    """Kernel time by stage and part; host time where the run is on the CPU."""
    operators: tuple[OperatorRow, ...]
    trace_file: str
    trace_bytes: int
    overhead: tuple[OperatorRow, ...] = ()
    """The profiler's own work, no operators."""


@dataclass(frozen=True)
class WrappedPass:
    """What the measured process itself timed while an outside tool was around it."""

    stage_wall_ns: dict[str, int]
    """decode_step is the median."""
    steps_ns: tuple[int, ...]


# --- what is said about it --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distribution:
    """A sample's summary. Percentiles stand only where the sample carries them."""

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
        """Spread of the middle half."""
        return self.q3 - self.q1

    @property
    def ci_relative(self) -> Maybe[float]:
        """Half the interval's width over the median."""
        if isinstance(self.ci_low, Missing) or isinstance(self.ci_high, Missing):
            return self.ci_low if isinstance(self.ci_low, Missing) else Missing("no interval")
        if self.median == 0:
            return Missing("the median is zero")
        return (self.ci_high - self.ci_low) / 2 / self.median


@dataclass(frozen=True)
class Metric:
    """A named figure with its definition beside it."""

    key: str
    label: str
    unit: str
    definition: str
    value: Maybe[Distribution]


@dataclass(frozen=True)
class StageTiming:
    """One row of the per-stage table; all times are of one iteration."""

    name: str
    parent: str
    per_iteration: int
    """How often the stage runs in one iteration."""
    time_ns: Distribution
    share: float
    """Of the iteration; children lie inside their parents."""
    profiled_ns: Maybe[int]
    inflation: Maybe[float]
    """Time under torch.profiler over the unprofiled time."""
    depth: int = 0
    """How many stages and sub-stages it lies in."""


@dataclass(frozen=True)
class Drift:
    """How the step time moves as the context grows."""

    ns_per_token: float
    ci_low: Maybe[float]
    """Lower end of the 95 % interval of the slope."""
    ci_high: Maybe[float]
    first_context: int
    last_context: int
    share: float
    """Change from the first step to the last over the median step."""


# --- the run ----------------------------------------------------------------------------------------------------------

PassStatus = Literal["pending", "started", "complete", "failed", "skipped"]
RunStatus = Literal["complete", "partial", "failed"]


@dataclass(frozen=True)
class PassRecord:
    """What became of one pass."""

    name: str
    status: PassStatus = "pending"
    argv: tuple[str, ...] = ()
    exit_code: int | None = None
    seconds: float | None = None
    tool_version: str = ""
    why: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Manifest:
    """run.json: truthful at every moment, so a run that is killed still says what it holds."""

    schema: int
    tool_version: str
    status: RunStatus
    created: str
    command: tuple[str, ...]
    passes: tuple[PassRecord, ...] = field(default_factory=tuple)
    why: str = ""
    remedy: str = ""
    kind: Literal["run", "exec"] = "run"
    """Of a model, or of a user's own program: which pages are made of it."""

    def pass_named(self, name: str) -> PassRecord | None:
        """The entry of one pass, if the run has it."""
        return next((entry for entry in self.passes if entry.name == name), None)

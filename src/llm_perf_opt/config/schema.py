"""The typed configuration of a run. No I/O: `composition.py` fills it from YAML and overrides, `checks.py` checks it."""

from dataclasses import dataclass, field
from typing import Any, Literal

Dtype = Literal["auto", "bf16", "fp16", "fp32"]
_DTYPE_SPELLINGS = {
    "float32": "fp32",
    "float": "fp32",
    "f32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "f16": "fp16",
    "float8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "f8_e4m3": "fp8",
    "f8_e5m2": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}
CacheKind = Literal["dynamic", "static"]
CompileMode = Literal["none", "default", "reduce-overhead", "max-autotune"]
Quantization = Literal["none", "int8", "fp8", "int4"]
AttentionBackend = Literal["auto", "flash", "efficient", "cudnn", "math"]
WaitPolicy = Literal["auto", "active", "passive"]
TorchPreset = Literal["minimal", "default", "full", "max"]
NsysCapture = Literal["nvtx", "cudaProfilerApi"]
NsysSample = Literal["none", "process-tree", "system-wide"]
ClockControl = Literal["none", "base"]
CacheControl = Literal["none", "all"]


def canonical_dtype(name: str) -> str:
    """Return `bf16` for `bfloat16`, `torch.bfloat16` or `BF16`; an unknown name is returned in lower case."""
    word = name.strip().lower().removeprefix("torch.")
    return _DTYPE_SPELLINGS.get(word, word)


PYTORCH = "pytorch"

FromFiles = Literal["nothing", "word", "switches", "figures", "shape"]
FROM_FILES = "from_files"
"""In the metadata of a setting that can run code: what a file may set it to. Anything else is typed on the command line.

nothing: it stays unset · word: a name without a path · switches: options without a text ·
figures: numbers, switches and the words that its owner declares · shape: no path, repository or object in Python.
"""


def _marked(from_files: FromFiles) -> dict[str, FromFiles]:
    return {FROM_FILES: from_files}


@dataclass(frozen=True)
class ModelConfig:
    """The model."""

    name: str
    """Part of the run folder's path."""
    source: Literal["random", "pretrained"]
    """Whether weights are created from `architecture` or read from `path`."""
    path: str | None
    """A local Hugging Face folder."""
    dtype: Dtype
    """auto: bf16 if the device supports it natively, else fp32. Other spellings are accepted and normalized."""
    seed: int
    trust_remote_code: bool = field(metadata=_marked("nothing"))
    """Whether Python code from `path` may run."""
    substages: dict[str, str]
    """Name → path of a submodule whose forward is timed as its own stage."""
    architecture: dict[str, Any] = field(metadata=_marked("shape"))
    """Fields of a Hugging Face configuration, `model_type` among them."""


@dataclass(frozen=True)
class DatasetConfig:
    """Where prompts come from."""

    name: str
    kind: Literal["synthetic", "prompts", "recorded", "image_folder"]
    path: str | None
    """A file with texts, such as .jsonl, .json.gz or .txt; None: the packaged prompts.

    For recorded, the inputs.yaml of a run; for image_folder, the folder of the images.
    """
    text_field: str
    """The field of a .jsonl record that holds the text."""
    seed: int
    root: str | None = None
    """A folder made by `llm-perf dataset add`, or for image_folder one with images in source-data; `path` replaces it."""
    variant: str | None = None
    """A variant of `root`; None: its source-data."""
    images: int = 1
    """Images per prompt of a vision-language model; their tokens are added to runtime.prompt_tokens. 0: text only."""
    image_height: int | None = None
    """Pixels; None: the size that the model or its processor asks for. Requires image_width."""
    image_width: int | None = None
    image_tiles: int = 0
    """Tiles of each random image in addition to its whole view, for models that cut large images into tiles."""
    image_count: int | None = None
    """How many images of the folder are used, drawn with `seed`; None: as many as the batch holds."""
    annotations: str | None = None
    """A JSON file that lists the pages of an image_folder; None: the only one in the folder, if there is one."""
    prompt: str | None = None
    """The text after the images of an image_folder; None: random ids."""


@dataclass(frozen=True)
class RuntimeConfig:
    """How the model is run and repeated."""

    type: str = field(metadata=_marked("word"))
    """The name of a runtime; `llm-perf options` lists them."""
    batch_size: int
    prompt_tokens: int
    """Synthetic prompts have exactly this length; texts are cut to at most this."""
    num_new_tokens: int
    """Per sequence. Prefill produces the first, each decode step one more."""
    attn_implementation: str = field(metadata=_marked("word"))
    """auto, eager, sdpa, flash_attention_2, … as transformers names them."""
    cache: CacheKind
    compile: CompileMode
    """torch.compile of the decode step; prefill stays eager unless `compile_prefill`."""
    max_warmup: int
    """Maximum number of warm-up iterations."""
    min_repeats: int
    """Default: 10, or max_repeats if that is less."""
    max_repeats: int
    ci_target: float
    """Repeat until half the 95 % interval of the median is within this fraction of the median."""
    time_limit_s: float
    """Start no further repeat after repeating for this long."""
    engine: dict[str, Any] = field(default_factory=dict, metadata=_marked("figures"))
    """Engine arguments, passed through unchanged; empty for pytorch, which has no engine."""
    quantization: Quantization = "none"
    """The weights of linear layers: int8 and fp8 with one scale per output channel, int4 with one per 128 inputs."""
    tensor_parallel: int = 1
    """Ranks that share every step: processes of llm-perf for pytorch, workers of its own for an engine."""
    rank_timeout_s: float = 300.0
    """How long ranks wait for one of them, while loading, between requests and in a collective, before the pass is ended."""
    attention_backend: AttentionBackend = "auto"
    """The kernels of scaled_dot_product_attention. auto: torch chooses. efficient and cudnn need a GPU."""
    compile_prefill: bool = False
    """Compile prefill, too, in the mode of `compile`, for the length of these prompts."""
    coordinate_descent_tuning: bool = False
    """Let torch.compile tune the block sizes of its kernels and write products of one row itself. GPU only."""
    fuse_projections: bool = False
    """Multiply by the query, key and value matrices at once, and by those of a gated MLP."""
    row_kernel: bool = False
    """Multiply one row, as in a decode step of one sequence, with a kernel of llm-perf where it is faster. GPU only."""


@dataclass(frozen=True)
class HardwareConfig:
    """The device."""

    device: Literal["auto", "cpu", "cuda"]
    device_index: int
    peak_tflops: float | None
    """Dense peak of the run's dtype, for a device that the hardware table does not list. Requires bandwidth_gbs."""
    bandwidth_gbs: float | None
    """Memory bandwidth in GB/s. Requires peak_tflops."""
    threads: int | None = None
    """CPU threads of torch, in each rank; None: one per CPU of `cpus`, or torch decides. Ranks divide the CPUs."""
    cpus: str | None = None
    """The CPUs that the measured process may run on, such as 0-3,8; None: all that are allowed."""
    wait_policy: WaitPolicy = "auto"
    """How OpenMP threads wait for work: active spins, passive sleeps. auto: passive if other processes use the CPUs."""
    devices: int | None = None
    """GPUs of the run, from device_index on; None: one. Ranks are placed on them in turn."""


@dataclass(frozen=True)
class TorchConfig:
    """The torch.profiler pass."""

    enable: bool
    preset: TorchPreset
    """minimal: operators and kernels · default: adds shapes, modules, memory · full: adds FLOPs · max: adds Python stacks."""
    decode_steps: int | None
    """Maximum number of decode steps to profile: a few show as much as hundreds. None: all."""


@dataclass(frozen=True)
class NvmlConfig:
    """The telemetry sampler next to the unprofiled pass."""

    enable: bool
    interval_s: float
    prometheus: str | None = None
    """A file in the Prometheus text format, such as the output of the DCGM exporter, to read next to the samples."""


@dataclass(frozen=True)
class NsysConfig:
    """The Nsight Systems pass: a timeline of the measured iteration."""

    enable: bool
    capture: NsysCapture
    """What starts and stops the capture: the NVTX range of the measured iteration, or cudaProfilerStart and Stop."""
    decode_steps: int | None
    """Maximum number of decode steps to capture; None: all."""
    trace: tuple[str, ...] | None = None
    """What to trace, instead of what the metric sets request; `nsys profile --help` lists the values of --trace."""
    sample: NsysSample = "none"
    """The processes whose call stacks and context switches nsys samples on the CPU."""
    args: tuple[str, ...] = field(default=(), metadata=_marked("switches"))
    """More options of `nsys profile`, as a list or one text. Options that llm-perf sets itself are rejected."""
    substage: str | None = None
    """Record the first run of this sub-stage only, such as `sam`; None: the measured iteration."""


@dataclass(frozen=True)
class NcuConfig:
    """The Nsight Compute passes: hardware counters of the longest kernels of each stage."""

    enable: bool
    top: int
    """Count at least this many kernels per stage …"""
    coverage: float
    """… and as many as cover this share of the stage's kernel time."""
    budget_s: float
    """Maximum seconds for replaying kernels, over all stages; loading the model is excluded."""
    set: str | None = None
    """A section set of ncu, in addition to the metric sets; `ncu --list-sets` names them."""
    sections: tuple[str, ...] = ()
    """Sections of ncu, in addition to those of the metric sets."""
    kernel_regex: str | None = None
    """Count only kernels whose function name contains a match, in Python syntax."""
    launch_skip: int | None = None
    """Skip this many matching launches of each stage and count the next ones, instead of those that llm-perf selects."""
    launch_count: int | None = None
    """The number of launches to count after `launch_skip`; None: as many as `budget_s` allows."""
    clock_control: ClockControl = "none"
    """base: ncu locks the GPU to its base clock while it counts. none: the clocks of a real run."""
    cache_control: CacheControl = "none"
    """all: ncu flushes the caches before each replay. none: caches as in a real run."""
    args: tuple[str, ...] = field(default=(), metadata=_marked("switches"))
    """More options of ncu, as a list or one text. Options that llm-perf sets itself are rejected."""
    substage: str | None = None
    """Count the kernels of this sub-stage only, such as `projector`; None: of all of prefill and of a decode step."""


@dataclass(frozen=True)
class MetricsConfig:
    """What the Nsight tools collect: named sets, merged in their order, then additions, then removals."""

    sets: tuple[str, ...] | None
    """See `llm-perf metrics list`. None: roofline if Nsight Compute counts, otherwise none."""
    add: tuple[str, ...]
    remove: tuple[str, ...]
    sections: tuple[str, ...] = ()
    """Sections of Nsight Compute in addition to those of the sets: `ncu --list-sections` names them."""
    defined: dict[str, Any] = field(default_factory=dict)
    """The user's own sets by name, as written in conf/metrics/NAME.yaml."""


@dataclass(frozen=True)
class RegionsConfig:
    """The report of NVTX regions. Patterns are shell-style (`decode*`) or `regex:…`; exclusion wins."""

    include: tuple[str, ...]
    exclude: tuple[str, ...]
    kernels_include: tuple[str, ...]
    kernels_exclude: tuple[str, ...]
    aggregate: bool
    """One table over all processes and devices instead of one for each."""


@dataclass(frozen=True)
class ProfilingConfig:
    """The passes of a run."""

    ceilings: bool
    """Measure the device's peaks once; cached for later runs with the same device, driver and torch."""
    clean: bool
    """The unprofiled pass. Without it a run has no times of its own."""
    torch: TorchConfig
    nvml: NvmlConfig
    nsys: NsysConfig
    ncu: NcuConfig
    metrics: MetricsConfig
    regions: RegionsConfig
    pass_timeout_s: float
    """A pass that takes longer is ended, and the run is partial."""
    max_trace_gb: float
    """The most disk space, in GB of 10⁹ bytes, that nsys or ncu may take while it records; then its pass is stopped."""
    ceilings_s: float | None = None
    """Seconds to spend on measuring the peaks; None: 9 on a GPU, 3 on a CPU."""
    logits: bool = False
    """Record logits of the new tokens at the end of the unprofiled pass. `llm-perf tune` compares configurations by them."""
    logits_reference: str | None = None
    """The folder of a run that recorded logits: its tokens are fed. None: those of this run, and also in fp32."""
    passes: dict[str, Any] = field(default_factory=dict, metadata=_marked("figures"))
    """The settings of every other pass by name: `enable` and the fields of its dataclass."""


@dataclass(frozen=True)
class LauncherConfig:
    """Where the points of a sweep run. What one point measures does not depend on it."""

    type: Literal["local", "slurm", "ray"] = "local"
    """local: one after the other in this process · slurm: a job array · ray: tasks of a running Ray cluster."""
    partition: str | None = None
    """Slurm's partition; None: the default one."""
    time: str | None = None
    """Time limit of one point: minutes, HH:MM:SS or D-HH:MM:SS. None: the partition's limit."""
    gpus: int | None = None
    """GPUs of one point; None: those that its ranks or workers use if its hardware.device is cuda, otherwise none."""
    cpus: int | None = None
    """CPUs of one point; None: one."""
    memory: str | None = None
    """Memory of one point, such as 32G; None: the cluster's default."""
    exclusive: bool = False
    """Whether a point gets a node of its own. Slurm only."""
    parallel: int | None = None
    """Maximum number of points that run at the same time; None: as many as the cluster allows."""
    address: str | None = field(default=None, metadata=_marked("nothing"))
    """Address of the Ray cluster; None: the one that runs on this machine."""
    wait: bool = True
    """Whether the command waits for the jobs and writes the sweep page. Slurm only."""
    extra: dict[str, Any] = field(default_factory=dict, metadata=_marked("figures"))
    """More options: of sbatch (`account: NAME`), or of a Ray task (`resources: {NAME: 1}`)."""


@dataclass(frozen=True)
class ProjectConfig:
    """What the project of the user decided. Recorded, not set: overrides cannot change it."""

    files: dict[str, str] = field(default_factory=dict)
    """The user's own file of each group, and config.yaml, that was used."""
    notes: tuple[str, ...] = ()
    """Settings that were found under another name, or have no effect here."""
    contradictions: tuple[str, ...] = ()
    """How the folder of the weights differs from the architecture that the model's name stands for."""


@dataclass(frozen=True)
class RunConfig:
    """One run, fully resolved."""

    experiment: str
    model: ModelConfig
    dataset: DatasetConfig
    runtime: RuntimeConfig
    hardware: HardwareConfig
    profiling: ProfilingConfig
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    project: ProjectConfig = field(default_factory=ProjectConfig)

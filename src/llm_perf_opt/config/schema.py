"""The typed configuration of a run, and its checks. No I/O: `composition.py` fills it from YAML and overrides."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from llm_perf_opt.config.runtimes import traits_of
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.stages import STAGE_NAMES

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
TorchPreset = Literal["minimal", "default", "max"]
NsysCapture = Literal["nvtx", "cudaProfilerApi"]


def canonical_dtype(name: str) -> str:
    """Return `bf16` for `bfloat16`, `torch.bfloat16` or `BF16`; an unknown name is returned in lower case."""
    word = name.strip().lower().removeprefix("torch.")
    return _DTYPE_SPELLINGS.get(word, word)


PYTORCH = "pytorch"


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
    trust_remote_code: bool
    """Whether Python code from `path` may run."""
    substages: dict[str, str]
    """Name → path of a submodule whose forward is timed as its own stage."""
    architecture: dict[str, Any]
    """Fields of a Hugging Face configuration, `model_type` among them."""


@dataclass(frozen=True)
class DatasetConfig:
    """Where prompts come from."""

    name: str
    kind: Literal["synthetic", "prompts"]
    path: str | None
    """A .jsonl or .txt file; None: the prompts shipped with the package."""
    text_field: str
    """The field of a .jsonl record that holds the text."""
    seed: int
    root: str | None = None
    """A folder made by `llm-perf dataset add`; its texts are used unless `path` names a file."""
    variant: str | None = None
    """A variant of `root`; None: its source-data."""


@dataclass(frozen=True)
class RuntimeConfig:
    """How the model is run and repeated."""

    type: str
    """The name of a runtime; `llm-perf options` lists them."""
    batch_size: int
    prompt_tokens: int
    """Synthetic prompts have exactly this length; texts are cut to at most this."""
    num_new_tokens: int
    """Per sequence. Prefill produces the first, each decode step one more."""
    attn_implementation: str
    """auto, eager, sdpa, flash_attention_2, … as transformers names them."""
    cache: CacheKind
    compile: CompileMode
    """torch.compile of the decode step; prefill stays eager."""
    max_warmup: int
    """Maximum number of warm-up iterations."""
    min_repeats: int
    """Default: 10, or max_repeats if that is less."""
    max_repeats: int
    ci_target: float
    """Repeat until half the 95 % interval of the median is within this fraction of the median."""
    time_limit_s: float
    """Start no further repeat after repeating for this long."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Engine arguments, passed through unchanged; empty for pytorch, which has no engine."""


@dataclass(frozen=True)
class HardwareConfig:
    """The device."""

    device: Literal["auto", "cpu", "cuda"]
    device_index: int
    cpu_threads: int | None
    """CPU threads of torch; None: torch decides."""
    peak_tflops: float | None
    """Dense peak of the run's dtype, for a device that the hardware table does not list. Requires bandwidth_gbs."""
    bandwidth_gbs: float | None
    """Memory bandwidth in GB/s. Requires peak_tflops."""


@dataclass(frozen=True)
class TorchConfig:
    """The torch.profiler pass."""

    enable: bool
    preset: TorchPreset
    """minimal: operators and kernels · default: adds shapes, modules, memory · max: adds Python stacks."""
    decode_steps: int | None
    """Maximum number of decode steps to profile: a few show as much as hundreds. None: all."""


@dataclass(frozen=True)
class NvmlConfig:
    """The telemetry sampler next to the unprofiled pass."""

    enable: bool
    interval_s: float


@dataclass(frozen=True)
class NsysConfig:
    """The Nsight Systems pass: a timeline of the measured iteration."""

    enable: bool
    capture: NsysCapture
    """What starts and stops the capture: the NVTX range of the measured iteration, or cudaProfilerStart and Stop."""
    decode_steps: int | None
    """Maximum number of decode steps to capture; None: all."""


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


@dataclass(frozen=True)
class MetricsConfig:
    """What the Nsight tools collect: named sets, merged in their order, then additions, then removals."""

    sets: tuple[str, ...]
    """See `llm-perf metrics list`."""
    add: tuple[str, ...]
    remove: tuple[str, ...]
    sections: tuple[str, ...] = ()
    """Sections of Nsight Compute in addition to those of the sets: `ncu --list-sections` names them."""


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
    passes: dict[str, Any] = field(default_factory=dict)
    """The settings of every other pass by name: `enable` and the fields of its dataclass."""


@dataclass(frozen=True)
class RunConfig:
    """One run, fully resolved."""

    experiment: str
    model: ModelConfig
    dataset: DatasetConfig
    runtime: RuntimeConfig
    hardware: HardwareConfig
    profiling: ProfilingConfig


PROJECT_CONF = Path("conf")
"""Options of the project in the current directory; `llm-perf dataset add` writes there."""
FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""A safe folder name: no path, not hidden, nothing that a shell or a page would interpret."""
_RANGES: dict[str, tuple[float, float]] = {
    "model.seed": (0, 2**63 - 1),
    "dataset.seed": (0, 2**63 - 1),
    "runtime.batch_size": (1, 1_000_000),
    "runtime.prompt_tokens": (1, 100_000_000),
    "runtime.num_new_tokens": (1, 100_000_000),
    "runtime.max_warmup": (1, 10_000),
    "runtime.max_repeats": (1, 1_000_000),  # before min_repeats, whose default depends on it
    "runtime.min_repeats": (1, 1_000_000),
    "runtime.ci_target": (0.0001, 1.0),
    "runtime.time_limit_s": (0.001, 1_000_000),
    "hardware.device_index": (0, 1023),
    "hardware.cpu_threads": (1, 4096),
    "hardware.peak_tflops": (1e-6, 1e9),
    "hardware.bandwidth_gbs": (1e-6, 1e9),
    "profiling.torch.decode_steps": (1, 100_000_000),
    "profiling.nvml.interval_s": (0.005, 3600),
    "profiling.nsys.decode_steps": (1, 100_000_000),
    "profiling.ncu.top": (1, 10_000),
    "profiling.ncu.coverage": (0.01, 1.0),
    "profiling.ncu.budget_s": (0.1, 1_000_000),
    "profiling.pass_timeout_s": (1, 1_000_000),
    "profiling.max_trace_gb": (0.01, 100_000),
}


def check(config: RunConfig) -> RunConfig:
    """Return the configuration, or raise for values out of range, unsafe names and contradictions."""
    _check_ranges(config)
    for key, name in (("experiment", config.experiment), ("model.name", config.model.name)):
        if not FOLDER_NAME.fullmatch(name):
            raise ConfigError(
                f"{key}={name!r} cannot be used as a folder name.",
                f"Use letters, digits, '.', '_' and '-', starting with a letter or digit: {key}=NAME.",
            )
    _check_model(config.model)
    _check_effect(config)
    _check_runtime_effect(config)
    _check_runtime(config)
    return config


def _check_ranges(config: RunConfig) -> None:
    for key, (low, high) in _RANGES.items():
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        if value is not None and not low <= value <= high:
            raise ConfigError(
                f"{key}={value} is out of range: it must be between {_number(low)} and {_number(high)}.", _range_hint(key)
            )
    if config.runtime.min_repeats > config.runtime.max_repeats:
        raise ConfigError(
            f"runtime.min_repeats={config.runtime.min_repeats} is more than runtime.max_repeats={config.runtime.max_repeats}.",
            "Raise runtime.max_repeats or lower runtime.min_repeats.",
        )


def _number(value: float) -> str:
    """Return integers in full, with commas; others in their shortest form."""
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def _range_hint(key: str) -> str:
    if key == "runtime.num_new_tokens":
        return "Prefill produces the first token: 1 measures prefill only, 2 or more include decode steps."
    return ""


def _check_effect(config: RunConfig) -> None:
    """Reject settings that would have no effect."""
    model, dataset = config.model, config.dataset
    if model.source == "random" and model.path:
        raise ConfigError(
            f"model.path={model.path} has no effect on model={model.name}, which has random weights.",
            "Add model=hf to read a local folder. Nothing is downloaded.",
        )
    if model.source == "pretrained" and model.architecture:
        raise ConfigError(
            f"model.architecture.{next(iter(model.architecture))} has no effect on a model read from a folder.",
            "The folder's config.json defines the architecture.",
        )
    if dataset.kind == "synthetic" and dataset.path:
        raise ConfigError(f"dataset.path={dataset.path} has no effect on dataset=synthetic.", "Add dataset=sample_prompts.")
    _check_dataset(dataset)


def _check_dataset(dataset: DatasetConfig) -> None:
    if dataset.root and (dataset.kind == "synthetic" or dataset.path):
        other = f"dataset.path={dataset.path}" if dataset.path else "dataset.kind=synthetic"
        raise ConfigError(f"{other} and dataset.root={dataset.root} contradict each other.", "Give one of them.")
    if dataset.variant is not None and not dataset.root:
        raise ConfigError(
            f"dataset.variant={dataset.variant} has no effect on dataset={dataset.name}, which has no variants.",
            "Choose a dataset made by `llm-perf dataset add`; `llm-perf dataset list` shows them.",
        )
    if dataset.variant is not None and not FOLDER_NAME.fullmatch(dataset.variant):
        raise ConfigError(
            f"dataset.variant={dataset.variant!r} cannot name a variant.", "`llm-perf dataset list` lists the names."
        )


def _check_runtime_effect(config: RunConfig) -> None:
    """Reject settings that only another kind of runtime uses."""
    runtime = config.runtime
    traits = traits_of(runtime.type)
    if not traits.engine:
        if runtime.engine:
            raise ConfigError(
                f"runtime.engine.{next(iter(runtime.engine))} has no effect on runtime={runtime.type}, which has no engine.",
                "Choose another runtime, or remove the setting.",
            )
        return
    for name, neutral in (("attn_implementation", "auto"), ("cache", "dynamic"), ("compile", "none")):
        if getattr(runtime, name) != neutral:
            raise ConfigError(
                f"runtime.{name}={getattr(runtime, name)} has no effect on runtime.type={runtime.type}.",
                "An engine has its own arguments: runtime.engine.NAME=VALUE.",
            )
    if config.model.substages and traits.steppable is False:
        raise ConfigError(
            f"model.substages needs a runtime that llm-perf steps itself; {runtime.type} runs the model on its own.",
            "Use runtime=pytorch, or omit model.substages.",
        )


def _check_model(model: ModelConfig) -> None:
    if model.source == "pretrained" and not model.path:
        raise ConfigError("model.path is missing: model=hf reads a local folder.", "Pass model.path=DIR.")
    if model.source == "random" and "model_type" not in model.architecture:
        raise ConfigError(
            f"model {model.name!r} has no architecture.model_type.",
            "A model with random weights needs the fields of a Hugging Face configuration.",
        )
    for name in model.substages:
        if not FOLDER_NAME.fullmatch(name) or name in STAGE_NAMES:
            raise ConfigError(
                f"model.substages: {name!r} cannot name a sub-stage.",
                f"Use letters, digits, '.', '_' and '-'; the names {', '.join(STAGE_NAMES)} are reserved.",
            )


def _check_runtime(config: RunConfig) -> None:
    if (config.hardware.peak_tflops is None) != (config.hardware.bandwidth_gbs is None):
        raise ConfigError(
            "hardware.peak_tflops and hardware.bandwidth_gbs must be set together; one of them is missing.",
            "Set both from the datasheet: the dense peak of the run's dtype and the memory bandwidth.",
        )
    runtime, profiling = config.runtime, config.profiling
    others = any(isinstance(section, dict) and section.get("enable") for section in profiling.passes.values())
    if not (profiling.clean or profiling.torch.enable or profiling.nsys.enable or profiling.ncu.enable or others):
        raise ConfigError("profiling requests no pass.", "Set profiling.clean=true, or choose profiling=minimal.")
    if profiling.ncu.enable and not (profiling.nsys.enable or profiling.torch.enable):
        raise ConfigError(
            "profiling.ncu selects its kernels from a timeline, but no pass records one.",
            "Add profiling.nsys.enable=true or profiling.torch.enable=true.",
        )
    if runtime.compile in ("reduce-overhead", "max-autotune") and runtime.cache == "dynamic":
        raise ConfigError(
            f"runtime.compile={runtime.compile} uses CUDA graphs, which need tensors at fixed addresses; "
            "runtime.cache=dynamic reallocates them at every step.",
            "Add runtime.cache=static, or use runtime.compile=default.",
        )
    if runtime.compile != "none" and config.model.substages:
        raise ConfigError(
            "model.substages times the forward of submodules, which torch.compile fuses away.",
            "Use runtime.compile=none, or omit model.substages.",
        )

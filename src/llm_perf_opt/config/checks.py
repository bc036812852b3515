"""Checks of a run's configuration: ranges, unsafe names, settings without effect, contradictions."""

import dataclasses
import re
from collections.abc import Container
from typing import Any

from llm_perf_opt.config.launchers import check_launcher
from llm_perf_opt.config.parallel import check_parallel, with_engine_argument
from llm_perf_opt.config.runtimes import traits_of
from llm_perf_opt.config.schema import (
    DatasetConfig,
    HardwareConfig,
    ModelConfig,
    NcuConfig,
    NsysConfig,
    ProfilingConfig,
    RunConfig,
)
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.host import parse_cpu_list
from llm_perf_opt.core.secrets import credentials_in
from llm_perf_opt.core.stages import STAGE_NAMES
from llm_perf_opt.core.user_files import FOLDER_NAME

_RANGES: dict[str, tuple[float, float]] = {
    "model.seed": (0, 2**63 - 1),
    "dataset.seed": (0, 2**63 - 1),
    "dataset.images": (0, 64),
    "dataset.image_height": (16, 16_384),
    "dataset.image_width": (16, 16_384),
    "dataset.image_tiles": (0, 64),
    "dataset.image_count": (1, 1_000_000),
    "runtime.batch_size": (1, 1_000_000),
    "runtime.prompt_tokens": (1, 100_000_000),
    "runtime.num_new_tokens": (1, 100_000_000),
    "runtime.max_warmup": (1, 10_000),
    "runtime.max_repeats": (1, 1_000_000),  # before min_repeats, whose default depends on it
    "runtime.min_repeats": (1, 1_000_000),
    "runtime.ci_target": (0.0001, 1.0),
    "runtime.time_limit_s": (0.001, 1_000_000),
    "hardware.device_index": (0, 1023),
    "runtime.tensor_parallel": (1, 1024),
    "runtime.rank_timeout_s": (1, 1_000_000),
    "hardware.devices": (1, 1024),
    "hardware.threads": (1, 4096),
    "hardware.peak_tflops": (1e-6, 1e9),
    "hardware.bandwidth_gbs": (1e-6, 1e9),
    "launcher.gpus": (0, 1024),
    "launcher.cpus": (1, 4096),
    "launcher.parallel": (1, 1000),
    "profiling.torch.decode_steps": (1, 100_000_000),
    "profiling.nvml.interval_s": (0.005, 3600),
    "profiling.nsys.decode_steps": (1, 100_000_000),
    "profiling.ncu.top": (1, 10_000),
    "profiling.ncu.coverage": (0.01, 1.0),
    "profiling.ncu.budget_s": (0.1, 1_000_000),
    "profiling.ncu.launch_skip": (0, 1_000_000_000),
    "profiling.ncu.launch_count": (1, 1_000_000),
    "profiling.ceilings_s": (0.05, 600),
    "profiling.pass_timeout_s": (1, 1_000_000),
    "profiling.max_trace_gb": (0.01, 100_000),
}
_NEUTRAL = {
    "attn_implementation": "auto",
    "cache": "dynamic",
    "compile": "none",
    "quantization": "none",
    "attention_backend": "auto",
    "compile_prefill": False,
    "coordinate_descent_tuning": False,
    "fuse_projections": False,
    "row_kernel": False,
}
"""Settings that only a runtime without an engine uses, and their default."""
_ON_GPU = {
    "coordinate_descent_tuning": "it tunes Triton kernels, which run on a GPU",
    "row_kernel": "the kernel runs on a GPU",
}
"""Settings that have no effect on a CPU, and why."""


def check(config: RunConfig) -> RunConfig:
    """Return the configuration, or raise for values out of range, unsafe names and contradictions."""
    _check_ranges(config)
    _check_credentials(config)
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
    _check_cpus(config.hardware)
    check_launcher(config.launcher)
    check_parallel(config)
    return with_engine_argument(config)


def _check_credentials(config: RunConfig) -> None:
    settings = dataclasses.asdict(config)
    del settings["project"]  # names of files
    for key in credentials_in(settings):
        raise ConfigError(
            f"{key} looks like a credential, and config.yaml would keep it.",
            "Set it in the environment of the engine instead (such as HF_TOKEN), or in a file that only you can read.",
        )


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
    profiling = config.profiling
    for name, tool, option in (("nsys", profiling.nsys, "profiling=nsys"), ("ncu", profiling.ncu, "profiling=ncu")):
        if tool.substage is not None and not tool.enable:
            raise ConfigError(
                f"profiling.{name}.substage={tool.substage} has no effect: profiling.{name}.enable is false.",
                f"Leave it out, or add {option}.",
            )
    if profiling.nsys.substage is not None and profiling.nsys.capture != "nvtx":
        raise ConfigError(
            f"profiling.nsys.substage={profiling.nsys.substage} needs profiling.nsys.capture=nvtx.",
            "A sub-stage is an NVTX range; cudaProfilerStart and Stop enclose the whole iteration.",
        )
    if profiling.ceilings_s is not None and not profiling.ceilings:
        raise ConfigError(
            f"profiling.ceilings_s={_number(profiling.ceilings_s)} has no effect: profiling.ceilings is false.",
            "Leave it out, or add profiling.ceilings=true.",
        )
    if profiling.nvml.prometheus and not (profiling.nvml.enable and profiling.clean):
        raise ConfigError(
            f"profiling.nvml.prometheus={profiling.nvml.prometheus} has no effect: there is no telemetry in this run.",
            "Add profiling.nvml.enable=true and profiling.clean=true, or leave it out.",
        )
    if profiling.logits and not profiling.clean:
        raise ConfigError(
            "profiling.logits=true has no effect: profiling.clean is false.", "Leave it out, or add profiling.clean=true."
        )
    if profiling.logits_reference is not None and not profiling.logits:
        raise ConfigError(
            f"profiling.logits_reference={profiling.logits_reference} has no effect: profiling.logits is false.",
            "Leave it out, or add profiling.logits=true.",
        )
    _check_counting(profiling)
    _check_dataset(dataset)
    _check_images(dataset)


def _check_counting(profiling: ProfilingConfig) -> None:
    """Reject what only Nsight Compute collects in a run without it."""
    ncu, metrics = profiling.ncu, profiling.metrics
    counted = {
        "ncu.set": ncu.set,
        "ncu.sections": ncu.sections,
        "metrics.add": metrics.add,
        "metrics.remove": metrics.remove,
        "metrics.sections": metrics.sections,
    }
    for name, value in counted.items() if not ncu.enable else ():
        if value:
            shown = value if isinstance(value, str) else ",".join(value)
            raise ConfigError(
                f"profiling.{name}={shown} has no effect: Nsight Compute is off.",
                "Add profiling.ncu.enable=true and a pass that records a timeline, or choose profiling=ncu.",
            )
    check_kernel_regex(ncu)


_TOOLS: dict[str, tuple[str, type[Any], tuple[str, ...]]] = {
    "nsys": ("Nsight Systems", NsysConfig, ("trace", "sample", "args")),
    "ncu": (
        "Nsight Compute",
        NcuConfig,
        ("kernel_regex", "launch_skip", "launch_count", "clock_control", "cache_control", "args"),
    ),
}
"""Section of `profiling` → name of the tool, its record, and the settings that are unset by default."""


def unused_settings(profiling: Any, explicit: Container[str]) -> list[str]:
    """Return a note on each setting of a tool that is off; raise a ConfigError if it is one of the command line, `explicit`.

    A file may keep the settings of a tool that a run does not use.
    """
    notes = []
    for section, (tool, kind, names) in _TOOLS.items():
        values = profiling.get(section) if isinstance(profiling, dict) else None
        if not isinstance(values, dict) or values.get("enable"):
            continue
        for name, value in differing(kind, values, names).items():
            key = f"profiling.{section}.{name}"
            shown = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
            fact = f"{key}={shown} has no effect: {tool} is off."
            if key in explicit:
                raise ConfigError(fact, f"Leave it out, or add profiling.{section}.enable=true.")
            notes.append(fact)
    return notes


def differing(kind: type[Any], values: Any, names: Container[str]) -> dict[str, Any]:
    """Return those of the named values that are set and differ from the default of the record."""
    usual = {item.name: item.default for item in dataclasses.fields(kind) if item.name in names}
    found = {name: values.get(name) for name in usual}
    return {name: value for name, value in found.items() if value not in (None, "", [], (), usual[name])}


def check_kernel_regex(ncu: NcuConfig) -> None:
    """Raise a ConfigError for a pattern that is not a regular expression."""
    try:
        re.compile(ncu.kernel_regex or "")
    except re.error as error:
        raise ConfigError(
            f"profiling.ncu.kernel_regex={ncu.kernel_regex} is not a regular expression: {error}.",
            "Escape characters such as ( and * with a backslash to match them literally.",
        ) from None


def _check_dataset(dataset: DatasetConfig) -> None:
    if dataset.kind == "recorded" and not dataset.path:
        fact = "dataset.path is missing: dataset=recorded repeats the prompts of a run."
        raise ConfigError(fact, "Pass dataset.path=RUN/inputs.yaml.")
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


def _check_images(dataset: DatasetConfig) -> None:
    if (dataset.image_height is None) != (dataset.image_width is None):
        raise ConfigError("dataset.image_height and dataset.image_width must be set together.", "Give both, in pixels.")
    if dataset.kind == "image_folder":
        if not dataset.path and not dataset.root:
            fact = "dataset.path is missing: dataset=image_folder reads a folder."
            raise ConfigError(fact, "Pass dataset.path=DIR, or dataset.root=datasets/NAME.")
        if dataset.image_tiles:
            raise ConfigError("dataset.image_tiles has no effect on dataset=image_folder.", "The image processor cuts the tiles.")
        if not dataset.images:
            raise ConfigError("dataset.images=0 and dataset=image_folder contradict each other.", "Use dataset=sample_prompts.")
        return
    for name in ("image_count", "annotations", "prompt"):
        if getattr(dataset, name) is not None:
            raise ConfigError(f"dataset.{name} has no effect on dataset={dataset.name}.", "Add dataset=image_folder.")


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
    for name, neutral in _NEUTRAL.items():
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
    _check_compilation(config)
    if runtime.attention_backend != "auto" and runtime.attn_implementation not in ("auto", "sdpa"):
        raise ConfigError(
            f"runtime.attention_backend={runtime.attention_backend} has no effect on "
            f"runtime.attn_implementation={runtime.attn_implementation}.",
            "It chooses the kernels of runtime.attn_implementation=sdpa.",
        )
    if runtime.quantization == "int4" and config.hardware.device == "cuda" and config.model.dtype in ("fp16", "fp32"):
        raise ConfigError(
            f"runtime.quantization=int4 does not support model.dtype={config.model.dtype} on a GPU.", "Use model.dtype=bf16."
        )


def _check_compilation(config: RunConfig) -> None:
    """Reject what torch.compile does not support, and settings that need it."""
    runtime = config.runtime
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
    if runtime.row_kernel and runtime.compile not in ("reduce-overhead", "max-autotune"):
        raise ConfigError(
            f"runtime.row_kernel=true needs CUDA graphs, which runtime.compile={runtime.compile} does not use.",
            "Add runtime.compile=reduce-overhead runtime.cache=static, or leave it out.",
        )
    for name in ("compile_prefill", "coordinate_descent_tuning"):
        if getattr(runtime, name) and runtime.compile == "none":
            raise ConfigError(
                f"runtime.{name}=true has no effect: runtime.compile=none.", "Add runtime.compile=default, or leave it out."
            )
    for name, why in _ON_GPU.items():
        if getattr(runtime, name) and config.hardware.device == "cpu":
            raise ConfigError(f"runtime.{name}=true has no effect on a CPU: {why}.", "Leave it out.")


def _check_cpus(hardware: HardwareConfig) -> None:
    if hardware.cpus is None:
        return
    try:
        parse_cpu_list(hardware.cpus)
    except ValueError as error:
        raise ConfigError(f"hardware.cpus={hardware.cpus}: {error}.", "Write numbers and ranges: hardware.cpus=0-3,8.") from None

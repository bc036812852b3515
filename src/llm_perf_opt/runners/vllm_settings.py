"""How llm-perf opens a vLLM engine: with its own defaults and the user's arguments, and as little else as the run needs.

Checked against vLLM 0.24 and 0.32.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_perf_opt.config.schema import TorchPreset
from llm_perf_opt.core.engine_records import EngineMemory, EngineSetting
from llm_perf_opt.core.errors import ConfigError, ResourceError
from llm_perf_opt.core.host import allowed_cpus
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.runners import models
from llm_perf_opt.runners.base import RunnerRequest
from llm_perf_opt.runners.cpus import default_threads
from llm_perf_opt.runners.engines import (
    EXACTLY,
    GREEDY,
    RESERVED,
    Chosen,
    SourceArguments,
    fields_of,
    opening,
    stated,
    temporary_model_folder,
)

if TYPE_CHECKING:
    from vllm import LLMEngine

ARGUMENTS = SourceArguments(
    "vLLM",
    "vllm",
    "They are the fields of vllm.EngineArgs.",
    ("engine/arg_utils.py",),
    lambda tree: fields_of(tree, "EngineArgs".__eq__),
    {**RESERVED, "seed": "model.seed", "profiler_config": "profiling.torch.preset"},
)
WORDS = {
    "kv_cache_dtype": r"auto|fp8\w*|b?float16|u?int8\w*|turboquant\w*",
    "quantization": r"fp8\w*|u?int[48]\w*|awq\w*|gptq\w*|mxfp[48]\w*|nvfp4|bitsandbytes|compressed-tensors",
    "attention_backend": r"(?!CUSTOM)\w+",
    "scheduling_policy": "fcfs|priority",
    "load_format": "safetensors|dummy",
    "compilation_config.cudagraph_mode": "[A-Z_]+",
    "speculative_config.method": "ngram",
}
"""Arguments that a file may set to these texts: they select what vLLM contains. Plugins, classes and files have no pattern."""
WORKERS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Arguments that move work to processes without stage ranges."""

IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
THREADS = "VLLM_CPU_OMP_THREADS_BIND"
_ALWAYS = (
    EngineSetting(
        "VLLM_WORKER_MULTIPROC_METHOD",
        "spawn",
        "a process with threads cannot be forked safely, and profilers follow spawned ones",
    ),
    EngineSetting("VLLM_NO_USAGE_STATS", "1", "nothing is sent"),
)
_PROFILED = EngineSetting(
    IN_PROCESS, "0", "the engine core runs in the measured process, where llm-perf's ranges enclose its work"
)
_UNPAUSED = EngineSetting(IN_PROCESS, "0", "this version starts sequences before the whole batch is submitted")
_SYNCHRONOUS = {"async_scheduling": (False, "the range of a step encloses the launches of that step")}
_FORGOTTEN = EngineSetting("prefix cache", "emptied before every request", "every request has the same prompts, to be computed")
PER_REQUEST: Chosen = {
    "temperature": (0.0, GREEDY),
    "ignore_eos": (True, EXACTLY),
    "detokenize": (False, "tokens are not turned into text, which a server does for every token"),
    "output_kind": ("DELTA", "every step returns its new tokens, which are timestamped"),
}
"""Parameters of each request (vllm.SamplingParams)."""
LEAST_CPU_CACHE_BYTES = 64 * 2**20
BLOCK_TOKENS = 128
"""The largest block of the paged cache that vLLM chooses by default; a sequence's last block is rarely full."""


@dataclass(frozen=True)
class Opened:
    """An engine and what it was opened with."""

    engine: "LLMEngine"
    version: str
    arguments: dict[str, Any]
    variables: dict[str, str]
    settings: list[EngineSetting]
    """What differs from the engine's defaults in every pass."""
    changes: list[EngineSetting]
    """What differs because the pass is profiled."""
    can_pause: bool = False


def open_engine(request: RunnerRequest) -> Opened:
    """Return an engine with the model of the request, or raise vLLM's error as a ResourceError."""
    settings = _set([*_ALWAYS, *_bound_threads(request)])
    changes = _set([_PROFILED]) if request.profiled else []
    import vllm
    from vllm import EngineArgs, LLMEngine
    from vllm.usage.usage_lib import UsageContext

    known = {each.name for each in fields(EngineArgs)}
    ARGUMENTS.refuse(request.config.runtime.engine, known)
    can_pause = _can_pause()
    if len(request.prompts.ids) > 1 and not can_pause and not request.profiled:
        settings += _set([_UNPAUSED])
    arguments, chosen = _arguments(request, known)
    settings += chosen
    if request.trace_dir is not None:
        _prepare_profiler(request, arguments, known)
    with opening(f"vLLM {vllm.__version__}"):
        _check_device(request)
        config = EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS)
        changed = _changed(request, config)
        if changed:
            arguments |= {name: value for name, (value, _) in changed.items()}
            config = EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS)
        changes = [*changes, *stated(changed)]
        if request.device.type == "cpu" and os.environ.get(IN_PROCESS) == "0":
            _use_workers_threads(config)
        quiet = bool(arguments["disable_log_stats"])
        engine = LLMEngine.from_vllm_config(config, usage_context=UsageContext.LLM_CLASS, disable_log_stats=quiet)
    variables = {each.name: each.value for each in (*settings, *changes) if each.name.startswith("VLLM_")}
    settings += [_FORGOTTEN] if config.cache_config.enable_prefix_caching else []
    settings += stated(PER_REQUEST)
    return Opened(engine, str(vllm.__version__), arguments, variables, settings, changes, can_pause)


def _can_pause() -> bool:
    """Return whether this vLLM can hold requests back until a whole batch is submitted (`sleep(level=0)`)."""
    try:
        from vllm.v1.core.sched.interface import PauseState  # noqa: F401 - it came with that level
    except ImportError:
        return False
    return True


# --- environment variables --------------------------------------------------------------------------------------------


def _set(wanted: Sequence[EngineSetting]) -> list[EngineSetting]:
    """Set the environment variables that the user did not set, and return those."""
    chosen = [each for each in wanted if each.name not in os.environ]
    for each in chosen:
        os.environ[each.name] = each.value
    return chosen


def _bound_threads(request: RunnerRequest) -> list[EngineSetting]:
    """Return the CPUs for the threads of the worker, which would otherwise choose them itself."""
    hardware, given = request.config.hardware, request.config.runtime.engine
    count, allowed = default_threads(hardware.cpus, hardware.threads), allowed_cpus()
    if request.device.type != "cpu" or not count or isinstance(allowed, Missing) or not has_one_worker(given):
        return []
    cpus = ",".join(map(str, sorted(allowed)[:count]))
    return [EngineSetting(THREADS, cpus, "hardware.threads and hardware.cpus are set")]


def _use_workers_threads(config: Any) -> None:
    """Use as many threads in this process as the engine's worker would use in its own."""
    import torch

    try:
        from vllm.utils.ompmultiprocessing import OMPProcessManager

        bound = OMPProcessManager(config).cpu_lists
    except (ImportError, AttributeError, AssertionError, RuntimeError):  # another version, or CPUs that vLLM cannot divide
        return
    if bound:
        torch.set_num_threads(len(bound[0]))


def has_one_worker(given: Mapping[str, Any]) -> bool:
    """Return whether these engine arguments keep the model in one process."""
    return all(given.get(name, 1) == 1 for name in WORKERS)


# --- arguments --------------------------------------------------------------------------------------------------------


def _arguments(request: RunnerRequest, known: set[str]) -> tuple[dict[str, Any], list[EngineSetting]]:
    """Return the engine arguments, and those of them that are neither inputs of the run nor the user's."""
    config = request.config
    random = config.model.source == "random"
    inputs: dict[str, Any] = {
        "model": temporary_model_folder(request.architecture) if random else str(Path(config.model.path or "").expanduser()),
        "dtype": str(request.dtype).removeprefix("torch."),
        "seed": config.model.seed % 2**32,
        "trust_remote_code": config.model.trust_remote_code,
        "disable_log_stats": True,  # as in vllm.LLM
    }
    chosen: Chosen = {
        "load_format": ("dummy", "the weights are random") if random else ("safetensors", "other files may contain code"),
        "skip_tokenizer_init": (True, "prompts are token ids"),
        "max_model_len": (-1, "the engine's default, or what fits its cache if that is less"),
    }
    if request.device.type == "cpu":
        chosen["kv_cache_memory_bytes"] = (_cache_bytes(request), "the default takes most of the machine's memory")
    given = config.runtime.engine
    chosen = {name: entry for name, entry in chosen.items() if name in known and name not in given}
    arguments = {name: value for name, value in inputs.items() if name in known}
    return (
        {**arguments, **{name: value for name, (value, _) in chosen.items()}, **given},
        stated(chosen),
    )


def _changed(request: RunnerRequest, config: Any) -> Chosen:
    """Return what a profiled pass changes of the engine's own decisions."""
    is_async = config.scheduler_config.async_scheduling and "async_scheduling" not in request.config.runtime.engine
    return dict(_SYNCHRONOUS) if request.profiled and is_async else {}


def _cache_bytes(request: RunnerRequest) -> int:
    runtime, longest = request.config.runtime, max(request.prompts.lengths)
    tokens = (longest + runtime.num_new_tokens + BLOCK_TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS
    batch = len(request.prompts.ids) + 1  # one more sequence: vLLM reserves a block
    return max(
        models.memory_need(request.architecture, request.config.model, request.dtype, batch, tokens).cache_bytes,
        LEAST_CPU_CACHE_BYTES,
    )


def _check_device(request: RunnerRequest) -> None:
    """Raise if the run's device is not the first one of the type that vLLM was built for."""
    from vllm.platforms import current_platform

    if current_platform.device_type != request.device.type:
        raise ResourceError(
            f"The installed vLLM runs on {current_platform.device_type or 'no device of this machine'}, "
            f"but the run requests {request.device.type}.",
            "Install the vLLM built for the device, or choose hardware=cpu or hardware=single_gpu to match.",
        )
    if request.device.type == "cuda" and (request.device.index or 0) != 0:
        raise ConfigError(
            f"vLLM uses the first visible GPU, but hardware.device_index={request.device.index}.",
            f"Set CUDA_VISIBLE_DEVICES={request.device.index} and leave hardware.device_index at 0.",
        )


# --- memory -----------------------------------------------------------------------------------------------------------


_ONE_BYTE = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")
"""Formats of the cache with one byte per value and one scale per layer. Others store more scales."""


def reserved_memory(request: RunnerRequest, config: Any, weight_bytes: int) -> EngineMemory:
    """Return what the engine reserved, and what the request needs of it; `weight_bytes` is that of unquantized weights."""
    cache, quantization = config.cache_config, config.model_config.quantization
    needed = sum(length + request.config.runtime.num_new_tokens for length in request.prompts.lengths)
    fixed = cache.kv_cache_memory_bytes
    share: Maybe[float] = cache.gpu_memory_utilization
    if fixed is not None:
        share = Missing("the size of the cache is set (kv_cache_memory_bytes)")
    tokens = getattr(cache, "kv_cache_size_tokens", None) or (cache.num_gpu_blocks or 0) * (cache.block_size or 0)
    held: Maybe[int] = tokens or Missing("the engine does not report the size of its cache")
    per_token = _token_bytes(request, str(cache.cache_dtype))
    weights = Missing(f"the weights are quantized ({quantization}), and the engine does not report their size")
    return EngineMemory(
        share=share,
        cache_tokens=held,
        cache_bytes=fixed if fixed is not None else _times(per_token, held),
        needed_tokens=needed,
        needed_bytes=_times(per_token, needed),
        weights_bytes=weights if quantization else weight_bytes,
    )


def _token_bytes(request: RunnerRequest, stored: str) -> Maybe[int]:
    """Return the bytes of a token in a cache of this format."""
    own = models.memory_need(request.architecture, request.config.model, request.dtype, 1, 1).cache_bytes
    if stored in ("auto", str(request.dtype).removeprefix("torch.")):
        return own
    width = 1 if stored in _ONE_BYTE else {"float16": 2, "bfloat16": 2}.get(stored)
    return own // request.dtype.itemsize * width if width else Missing(f"the cache is stored in {stored}")


def _times(per_token: Maybe[int], tokens: Maybe[int]) -> Maybe[int]:
    if isinstance(tokens, Missing) or isinstance(per_token, Missing):
        return tokens if isinstance(tokens, Missing) else per_token
    return per_token * tokens


# --- vLLM's own profiler ----------------------------------------------------------------------------------------------


def _prepare_profiler(request: RunnerRequest, arguments: dict[str, Any], known: set[str]) -> None:
    """Configure the profiler: an argument, or environment variables of versions before 2026."""
    from llm_perf_opt.runners.measure.torch_profiler import PRESETS

    assert request.trace_dir is not None  # noqa: S101 - the caller checks it
    wanted, folder = PRESETS[request.config.profiling.torch.preset], str(request.trace_dir.resolve())
    if "profiler_config" in known:
        arguments["profiler_config"] = profiler_config(request.config.profiling.torch.preset, folder)
        return
    flags = {"RECORD_SHAPES": "record_shapes", "WITH_PROFILE_MEMORY": "profile_memory", "WITH_STACK": "with_stack"}
    os.environ["VLLM_TORCH_PROFILER_DIR"] = folder
    os.environ.update({f"VLLM_TORCH_PROFILER_{name}": str(int(bool(wanted.get(key)))) for name, key in flags.items()})


def profiler_config(preset: TorchPreset, folder: str) -> dict[str, Any]:
    """Return the argument `profiler_config` of a preset of the torch pass."""
    from llm_perf_opt.runners.measure.torch_profiler import PRESETS

    wanted = PRESETS[preset]
    return {
        "profiler": "torch",
        "torch_profiler_dir": folder,
        "torch_profiler_record_shapes": bool(wanted.get("record_shapes")),
        "torch_profiler_with_memory": bool(wanted.get("profile_memory")),
        "torch_profiler_with_stack": bool(wanted.get("with_stack")),
    }

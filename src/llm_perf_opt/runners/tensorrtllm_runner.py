"""The TensorRT-LLM runtime, through its LLM API: each sequence is a stream whose tokens are timestamped on delivery.

Written from the engine's documentation and tested against a stand-in; it has not run on the real engine.
"""

import ast
import atexit
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_perf_opt.config.runtimes import Runtime, StageLabels, by_requests
from llm_perf_opt.core.engine_records import EngineSetting
from llm_perf_opt.core.errors import ConfigError, ResourceError
from llm_perf_opt.core.records import Missing, RuntimeFacts
from llm_perf_opt.core.stages import Stage
from llm_perf_opt.runners.base import Generated, RunnerRequest
from llm_perf_opt.runners.engines import (
    EXACTLY,
    GREEDY,
    OFFLOADED,
    OVERRIDDEN,
    PARAMETERS_NOTE,
    PREFIX_CACHE_NOTE,
    PREFIX_CACHED,
    QUANTIZED,
    RESERVED,
    SPECULATIVE,
    UNPADDED,
    Chosen,
    EngineWords,
    SourceArguments,
    changed_work,
    engine_model_facts,
    fields_of,
    not_tensor_parallel,
    opening,
    other_cache_dtype,
    stated,
    temporary_model_folder,
)
from llm_perf_opt.runners.measure.annotations import StageMarker

if TYPE_CHECKING:
    from tensorrt_llm import LLM

    from llm_perf_opt.workspace.data.prompts import Prompts

_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
CHANGING = {
    "model_kwargs": OVERRIDDEN,
    "sparse_attention_config": "skips work of attention that the cost model counts",
    "enable_attention_dp": "runs all of attention on every device, but the cost model divides it among them",
    "kv_connector_config": OFFLOADED,
}
"""Arguments that change what the engine computes or moves → how."""
CHANGING_CACHE = {
    "max_attention_window": "limits the attention window, which the cost model does not count",
    "host_cache_size": OFFLOADED,
    "use_uvm": OFFLOADED,
}
"""The same for keys of `kv_cache_config`."""
METHOD = (
    "tokens are timestamped when the stream of their sequence delivers them: prefill lasts until every sequence has its "
    "first token, a decode step until every sequence has its next; the engine's own steps are not visible"
)
NOTES = (
    "Tokens are timestamped on the host, after the engine's queues: the time of a step includes those.",
    "This runner was written from TensorRT-LLM's documentation and has not been run on the real engine by its authors.",
)


def _argument_names(tree: ast.Module) -> Iterator[str]:
    """Yield the fields of every class …LlmArgs, their aliases, and the keywords that LLM itself pops.

    The backend decides which class is used: a name of any of them is accepted here, and the engine checks it.
    """
    yield from fields_of(tree, lambda name: name.endswith("LlmArgs"))
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        takes = isinstance(call.func, ast.Attribute) and call.func.attr in ("pop", "get")
        if takes and call.args and _is_text(call.args[0]):
            yield ast.literal_eval(call.args[0])
        for keyword in call.keywords:
            if keyword.arg in ("alias", "validation_alias"):
                yield from (ast.literal_eval(part) for part in ast.walk(keyword.value) if _is_text(part))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


_ARGUMENTS = SourceArguments(
    "TensorRT-LLM",
    "tensorrt_llm",
    "They are the arguments of tensorrt_llm.LLM.",
    ("llmapi/llm_args.py", "llmapi/llm.py"),
    _argument_names,
    RESERVED,
    mappings=("kv_cache_config",),
)
RUNTIME = Runtime(
    "tensorrtllm",
    "llm_perf_opt.runners.tensorrtllm_runner:open_tensorrtllm",
    steppable=False,
    needs="tensorrt_llm",
    install="pip install 'llm-perf-opt[tensorrtllm]'",
    packages=("tensorrt-llm",),
    arguments=_ARGUMENTS,
    words={"kv_cache_config.dtype": "auto|fp8|nvfp4|float16|bfloat16", "backend": "pytorch", "load_format": "dummy|auto"},
    tensor_parallel="tensor_parallel_size",
    labels=(StageLabels("tensorrt_llm", by_requests(r"\[Executor\] _forward_step(?: \d+)?: (\d+) ctx reqs,.*?(\d+) gen reqs")),),
)


class TensorRtLlmRunner:
    """A TensorRT-LLM engine; see `EngineRunner`."""

    def __init__(self, llm: "LLM", request: RunnerRequest, arguments: dict[str, Any], version: str) -> None:
        self._llm = llm
        end = getattr(request.architecture.get_text_config(decoder=True), "eos_token_id", None)
        self._end_id = end if isinstance(end, int) else 0
        words = EngineWords("TensorRT-LLM's own choice", "paged", "TensorRT-LLM's own", "last token")
        self.facts = engine_model_facts(request.config.model, request.architecture, request.device, request.dtype, words)
        self.runtime = RuntimeFacts(
            type="tensorrtllm",
            version=version,
            method=METHOD,
            uncosted=_uncosted(request),
            engine=arguments,
            notes=(PARAMETERS_NOTE, *NOTES, *([PREFIX_CACHE_NOTE] if arguments["kv_cache_config"]["enable_block_reuse"] else [])),
            devices=_workers(request),
            settings=tuple(_settings(arguments, request.config.runtime.engine)),
            elsewhere=True,
        )
        self.profiler = Missing("TensorRT-LLM runs the model in its own processes, which llm-perf's profiler does not see")

    def generate(self, prompts: "Prompts", new_tokens: int, marker: StageMarker) -> Generated:
        """Run all sequences at once, greedy, each to exactly `new_tokens`; only the whole request is marked."""
        import asyncio

        from tensorrt_llm import SamplingParams

        sampling = SamplingParams(
            max_tokens=new_tokens,
            end_id=self._end_id,  # required without a tokenizer, and ignored because of ignore_eos
            pad_id=self._end_id,
            **{name: value for name, (value, _) in _PER_REQUEST.items()},
        )
        arrivals: list[list[int]] = [[] for _ in prompts.ids]
        tokens: list[list[int]] = [[] for _ in prompts.ids]

        async def follow(number: int, ids: list[int]) -> None:
            async for output in self._llm.generate_async(ids, sampling, streaming=True):
                now = time.monotonic_ns()
                whole = list(output.outputs[0].token_ids)
                arrivals[number] += [now] * (len(whole) - len(tokens[number]))
                tokens[number] = whole

        async def follow_all(inputs: list[list[int]]) -> None:
            await asyncio.gather(*(follow(number, ids) for number, ids in enumerate(inputs)))

        inputs = [list(ids) for ids in prompts.ids]
        started = time.monotonic_ns()
        with marker(Stage.PROFILE.value):
            asyncio.run(follow_all(inputs))
        return Generated(started, tuple(map(tuple, arrivals)), tuple(tuple(map(int, row)) for row in tokens))


def open_tensorrtllm(request: RunnerRequest) -> TensorRtLlmRunner:
    """Return a TensorRT-LLM runner of the request's model, or raise the engine's error as a ResourceError."""
    _check_device(request)
    arguments = _arguments(request)
    import tensorrt_llm
    from tensorrt_llm import LLM
    from tensorrt_llm.llmapi import KvCacheConfig

    version = str(getattr(tensorrt_llm, "__version__", "of unknown version"))
    with opening(f"TensorRT-LLM {version}"):
        llm = LLM(**{**arguments, "kv_cache_config": KvCacheConfig(**arguments["kv_cache_config"])})
    atexit.register(llm.shutdown)
    return TensorRtLlmRunner(llm, request, arguments, version)


def _arguments(request: RunnerRequest) -> dict[str, Any]:
    """Return llm-perf's default arguments, overridden by the user's; `kv_cache_config` is merged key by key."""
    given = dict(request.config.runtime.engine)
    _ARGUMENTS.refuse(given, None)
    cache = given.pop("kv_cache_config", {})
    config, prompts = request.config, request.prompts
    longest = max(prompts.lengths) + config.runtime.num_new_tokens
    random = config.model.source == "random"
    return {
        "model": temporary_model_folder(request.architecture) if random else str(Path(config.model.path or "").expanduser()),
        "dtype": str(request.dtype).removeprefix("torch."),
        "trust_remote_code": config.model.trust_remote_code,
        "skip_tokenizer_init": True,
        "max_batch_size": len(prompts.ids),
        "max_seq_len": longest,
        "max_num_tokens": max(sum(prompts.lengths), longest),
        **({"load_format": "dummy"} if random else {}),
        **given,
        "kv_cache_config": {"enable_block_reuse": False, **cache},
    }


_WHY = {
    "skip_tokenizer_init": "prompts are token ids",
    "load_format": "the weights are random",
    "max_batch_size": "all sequences of the batch run at once",
    "max_seq_len": "the longest sequence of the request",
    "max_num_tokens": "all prompts of the batch fit in one step",
}
"""Arguments that llm-perf chooses, each with its reason."""
_PER_REQUEST: Chosen = {
    "top_k": (1, GREEDY),
    "ignore_eos": (True, EXACTLY),
    "detokenize": (False, "tokens are not turned into text"),
}
"""Parameters of each request."""


def _settings(arguments: Mapping[str, Any], given: Mapping[str, Any]) -> list[EngineSetting]:
    chosen: Chosen = {name: (arguments[name], why) for name, why in _WHY.items() if name in arguments}
    if "enable_block_reuse" not in given.get("kv_cache_config", {}):
        chosen["kv_cache_config.enable_block_reuse"] = (False, "every request has the same prompts, to be computed")
    return stated({**chosen, **_PER_REQUEST}, given)


def _check_device(request: RunnerRequest) -> None:
    if request.device.type != "cuda":
        raise ResourceError(
            f"TensorRT-LLM needs an NVIDIA GPU, but the run requests {request.device.type}.",
            "Run on a machine that has one, or choose runtime=pytorch.",
        )
    if (request.device.index or 0) != 0:
        raise ConfigError(
            f"TensorRT-LLM uses the first visible GPU, but hardware.device_index={request.device.index}.",
            f"Set CUDA_VISIBLE_DEVICES={request.device.index} and leave hardware.device_index at 0.",
        )


def _workers(request: RunnerRequest) -> int:
    """Return the number of devices that the model runs on; a size that is not a number counts as 1."""
    engine = request.config.runtime.engine
    return math.prod(_whole(engine.get(name, 1)) or 1 for name in _PARALLEL)


def _uncosted(request: RunnerRequest) -> str:
    engine = request.config.runtime.engine
    for name, why in (("quant_config", QUANTIZED), ("speculative_config", SPECULATIVE)):
        if engine.get(name) is not None:
            return why
    cache = engine.get("kv_cache_config", {})
    changed = changed_work(engine, CHANGING) or changed_work(cache, CHANGING_CACHE, "runtime.engine.kv_cache_config.")
    changed = changed or other_cache_dtype(str(cache.get("dtype", "auto")), request.dtype)
    if changed or cache.get("enable_block_reuse"):
        return changed or PREFIX_CACHED
    sizes = {name: _whole(engine.get(name, 1)) for name in _PARALLEL}
    for name, size in sizes.items():
        if size is None:  # the engine accepted it, with unknown effect
            return f"runtime.engine.{name}={engine[name]} does not give the number of devices"
    if sizes["tensor_parallel_size"] != _workers(request):
        return not_tensor_parallel(_workers(request))
    if len(set(request.prompts.lengths)) > 1:
        return UNPADDED
    if getattr(request.architecture, "quantization_config", None):
        return "the checkpoint is quantized, which the cost model does not count"
    return ""


def _whole(given: Any) -> int | None:
    """Return a size of at least 1 as an integer, also if it is given as text; None for anything else."""
    try:
        found = int(str(given))
    except ValueError:
        return None
    return found if found >= 1 else None

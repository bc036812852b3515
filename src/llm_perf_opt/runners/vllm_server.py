"""The OpenAI-compatible server of vLLM: its command line from the settings of a run.

Unlike the runner, which steps the engine for one batch, the server uses the engine's own defaults.
"""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llm_perf_opt.config.serving import LOOPBACK, Server, ServerCommand
from llm_perf_opt.runners import models
from llm_perf_opt.runners.base import ServerRequest
from llm_perf_opt.runners.engines import write_model_folder
from llm_perf_opt.runners.plain_tokenizer import write_tokenizer

SERVER = Server(
    "llm_perf_opt.runners.vllm_server:server_command",
    start_profile="/start_profile",
    stop_profile="/stop_profile",
    traces="*.pt.trace.json*",
    generators=("llm_perf_opt.runners.vllm_bench:GENERATOR",),
)
_MODULES = ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server")
"""The newer name first: the other one is deprecated where both exist."""
_CPU_SEQUENCES = 64
"""Sequences of the requested length that the cache on a CPU holds; the engine's default takes most of the machine's memory."""
_LEAST_CPU_CACHE_BYTES = 256 * 2**20
_SPAN_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http", "opentelemetry.exporter.otlp.proto.grpc")
"""vLLM imports all of them."""


def server_command(request: ServerRequest) -> ServerCommand:
    """Return the command of vLLM's server."""
    import vllm

    config = request.config
    random = config.model.source == "random"
    folder = write_model_folder(request.architecture, request.folder) if random else Path(config.model.path or "").expanduser()
    notes = []
    plain = not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))
    tokenizer = write_tokenizer(request.folder, _vocabulary(request)) if plain else folder
    if plain:
        notes.append("The model has no tokenizer: prompts are random token ids, written as text.")
    arguments = _arguments(request, folder, tokenizer)
    spans = bool(request.spans_url) and _spans_available()
    if spans:
        arguments["otlp_traces_endpoint"] = request.spans_url
    elif request.spans_url:
        notes.append("OpenTelemetry is not installed next to vLLM: there are no spans.")
    if request.trace_dir is not None:
        arguments["profiler_config"] = _profiler(request.trace_dir)
    given = {**arguments, **config.runtime.engine}
    if not given["enable_prefix_caching"]:
        why = "the prompts of warm-up requests repeat"
        notes.append(f"Prefix caching is off: {why}. runtime.engine.enable_prefix_caching=true turns it on.")
    return ServerCommand(
        module=next(module for module in _MODULES if _has(module)),
        arguments=("--host", LOOPBACK, "--port", str(request.port), *command_line(given)),
        model=config.model.name,
        tokenizer=str(tokenizer),
        version=str(vllm.__version__),
        variables={"VLLM_NO_USAGE_STATS": "1", **({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"} if spans else {})},
        notes=tuple(notes),
        random_ids=plain,
    )


def _arguments(request: ServerRequest, folder: Path, tokenizer: Path) -> dict[str, Any]:
    """Return the arguments that the settings of the run stand for."""
    config = request.config
    random = config.model.source == "random"
    found: dict[str, Any] = {
        "model": str(folder),
        "tokenizer": str(tokenizer),
        "served_model_name": config.model.name,
        "dtype": str(request.dtype).removeprefix("torch."),
        "seed": config.model.seed % 2**32,
        "trust_remote_code": config.model.trust_remote_code,
        "load_format": "dummy" if random else "safetensors",
        "enable_prefix_caching": bool(config.runtime.engine.get("enable_prefix_caching", False)),
    }
    if request.device.type == "cpu":
        found["kv_cache_memory_bytes"] = _cpu_cache_bytes(request)
    return found


def _cpu_cache_bytes(request: ServerRequest) -> int:
    runtime, model = request.config.runtime, request.config.model
    text = request.architecture.get_text_config(decoder=True)
    longest = int(request.config.runtime.engine.get("max_model_len") or getattr(text, "max_position_embeddings", 0) or 0)
    tokens = max(_CPU_SEQUENCES * (runtime.prompt_tokens + runtime.num_new_tokens), 2 * longest)
    return max(models.memory_need(request.architecture, model, request.dtype, 1, tokens).cache_bytes, _LEAST_CPU_CACHE_BYTES)


def _vocabulary(request: ServerRequest) -> int:
    return int(request.architecture.get_text_config(decoder=True).vocab_size)


def _profiler(folder: Path) -> dict[str, Any]:
    """Return the configuration of the profiler. Stacks are off: with them, writing a trace takes minutes."""
    return {"profiler": "torch", "torch_profiler_dir": str(folder.resolve()), "torch_profiler_with_stack": False}


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Return engine arguments as options: `max_model_len=512` is `--max-model-len 512`, mappings are JSON."""
    found: list[str] = []
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if value is None:
            continue
        if isinstance(value, bool):
            found.append(option if value else f"--no-{option[2:]}")
        elif isinstance(value, (list, tuple)):
            found += [option, *(item if isinstance(item, str) else json.dumps(item) for item in value)]
        else:
            found += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


def _has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _spans_available() -> bool:
    return all(map(_has, _SPAN_PACKAGES))

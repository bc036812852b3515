"""vLLM engines as their runner sees them after opening, without vLLM, and every argument that is offered for one of them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from llm_perf_opt.config.composition import compose
from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.core.remedy_records import EngineRemedy
from llm_perf_opt.runners import models, vllm_remedies
from llm_perf_opt.runners.base import RunnerRequest
from llm_perf_opt.runners.vllm_remedies import Opened
from llm_perf_opt.workspace.data.prompts import Prompts

ARGUMENTS = frozenset(
    {
        "async_scheduling", "attention_backend", "compilation_config", "cudagraph_capture_sizes", "enable_prefix_caching",
        "enforce_eager", "gpu_memory_utilization", "kv_cache_dtype", "kv_cache_memory_bytes", "max_cudagraph_capture_size",
        "max_num_batched_tokens", "max_num_seqs", "num_gpu_blocks_override", "optimization_level", "quantization",
        "speculative_config",
    }
)  # fmt: skip
"""Those that are offered; test_vllm_engine.py compares them with the real ones."""


def opened(
    arguments: Mapping[str, Any] | None = None,
    *,
    device: str = "cuda",
    ids: tuple[tuple[int, ...], ...] = ((1,) * 64, (2,) * 64),
    known: frozenset[str] = ARGUMENTS,
    **resolved: Any,
) -> Opened:
    """An engine that runs two prompts of 64 tokens, in bf16, with its own defaults and a cache of 100 blocks of 16 tokens."""
    values: dict[str, Any] = {
        "async_scheduling": True, "cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4, 8],
        "max_num_batched_tokens": 8192, "max_num_seqs": 256, "num_gpu_blocks": 100, "block_size": 16,
        "gpu_memory_utilization": 0.9, "cache_dtype": "auto", "enable_prefix_caching": True, "quantization": None,
        "speculative_config": None, "pipeline_parallel_size": 1, "backend": None, **resolved,
    }  # fmt: skip
    sections = {
        "scheduler_config": ("async_scheduling", "max_num_batched_tokens", "max_num_seqs"),
        "compilation_config": ("cudagraph_mode", "cudagraph_capture_sizes"),
        "cache_config": ("num_gpu_blocks", "block_size", "gpu_memory_utilization", "cache_dtype", "enable_prefix_caching"),
        "model_config": ("quantization",),
        "parallel_config": ("pipeline_parallel_size",),
        "attention_config": ("backend",),
    }
    config = SimpleNamespace(
        speculative_config=values["speculative_config"],
        **{section: SimpleNamespace(**{name: values[name] for name in names}) for section, names in sections.items()},
    )
    settings, architecture = tiny()
    request = RunnerRequest(settings, architecture, Prompts(ids, "by hand"), torch.device(device), torch.bfloat16, None)
    return Opened(config, arguments or {}, known, request)


@cache
def tiny() -> tuple[RunConfig, Any]:
    settings = compose(["hardware=cpu", "model=tiny", "runtime=vllm", "runtime.num_new_tokens=16"]).config
    return settings, models.load_config(settings.model)


@contextmanager
def h200(*, numba: bool = False) -> Iterator[None]:
    """A GPU with fp8 and two attention backends, without vLLM."""
    usable = ["FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION"]
    with patch.multiple(
        vllm_remedies,
        _has_fp8=lambda opened: opened.on_gpu,
        _backends=lambda opened, _: usable if opened.on_gpu else [],
        _quantization_methods=lambda: ("awq", "fp8", "fp8_per_tensor"),
        find_spec=lambda _: object() if numba else None,
    ):
        yield


def every_offer() -> list[EngineRemedy]:
    """Each kind in each of its spellings."""
    shared = ((1,) * 64, (1,) * 64)
    engines = [
        opened(ids=shared, enable_prefix_caching=False),
        opened({"async_scheduling": False, "enforce_eager": True}, cudagraph_mode="NONE"),
        opened({"optimization_level": 0}, cudagraph_mode="NONE"),
        opened({"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, cudagraph_mode="PIECEWISE"),
        opened(cudagraph_capture_sizes=[1, 4], max_num_batched_tokens=100, max_num_seqs=1),
        opened({"compilation_config": {"cudagraph_capture_sizes": [1]}}, cudagraph_capture_sizes=[1]),
        opened({"max_cudagraph_capture_size": 1}, cudagraph_capture_sizes=[1]),
        opened({"num_gpu_blocks_override": 6}, num_gpu_blocks=6),
        opened({"kv_cache_memory_bytes": 2**26}, num_gpu_blocks=6),
        opened(num_gpu_blocks=6),
    ]
    with h200(numba=True):
        return [remedy for engine in engines for remedy in vllm_remedies.remedies(engine)]

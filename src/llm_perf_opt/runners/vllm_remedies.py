"""What could be changed in a vLLM engine: the arguments that it accepts in a run and does not already run with.

Names and values are those of the installed version; what it does not know is not offered.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from math import ceil
from typing import Any

from llm_perf_opt.core.remedy_records import EngineRemedy, Remedy
from llm_perf_opt.runners.base import RunnerRequest
from llm_perf_opt.runners.engines import shared_prefix_tokens

FP8_CAPABILITY = 89
"""Compute capability × 10 of the first GPUs with fp8 tensor cores (Ada)."""
PROPOSED_TOKENS = 4
"""Tokens that n-gram speculation proposes per step; vLLM's documentation uses 5 for prompts that are repeated in the answer."""
MOST_MEMORY = 0.95
"""Share of the device's memory that is proposed for a larger cache; vLLM's default is 0.9 or 0.92."""
_SLOW_BACKENDS = ("FLEX_ATTENTION", "TORCH_SDPA")
"""Backends that exist for what the others do not support."""


@dataclass(frozen=True)
class Opened:
    """An opened engine and its request."""

    config: Any
    """The engine's VllmConfig, resolved."""
    arguments: Mapping[str, Any]
    """What the engine was given."""
    known: Collection[str]
    """The arguments that the installed vLLM accepts."""
    request: RunnerRequest
    problems: list[str] = field(default_factory=list)
    """Sentences on what could not be determined, and so is not offered."""

    @property
    def batch(self) -> int:
        """Sequences of the request."""
        return len(self.request.prompts.ids)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self.request.prompts.lengths)

    @property
    def on_gpu(self) -> bool:
        """Whether the engine runs on a GPU."""
        return self.request.device.type == "cuda"

    def value(self, path: str) -> Any:
        """Return a resolved setting by its dotted path; None if this version does not have it."""
        found = self.config
        for part in path.split("."):
            found = getattr(found, part, None)
        return found

    def given(self, name: str, *inner: str) -> Any:
        """Return an argument that was given, or a value inside it; None if it was not."""
        found: Any = self.arguments.get(name)
        for part in inner:
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def remedy(self, kind: Remedy, values: Mapping[str, Any], now: str, **more: Any) -> EngineRemedy | None:
        """Return the change of these arguments, or None if the installed version does not have them."""
        if not {name.partition(".")[0] for name in values} <= set(self.known):
            return None
        overrides = tuple(f"runtime.engine.{name}={_text(value)}" for name, value in values.items())
        change = f"Pass {', '.join(f'{name}={_text(value)}' for name, value in values.items())} to the engine."
        return EngineRemedy(kind.value, overrides, change, now, **more)


def offered(
    config: Any, arguments: Mapping[str, Any], request: RunnerRequest
) -> tuple[tuple[EngineRemedy, ...], tuple[str, ...]]:
    """Return every change that an engine accepts, and sentences on what could not be determined.

    `config` is the engine's own, `arguments` is what it was given.
    """
    from vllm import EngineArgs

    opened = Opened(config, arguments, frozenset(each.name for each in fields(EngineArgs)), request)
    return remedies(opened), tuple(dict.fromkeys(opened.problems))


def remedies(opened: Opened) -> tuple[EngineRemedy, ...]:
    """Return every change that the opened engine accepts, by kind."""
    return tuple(found for offer in _OFFERS if (found := offer(opened)) is not None)


def _overlap(opened: Opened) -> EngineRemedy | None:
    """Offer it only if it was turned off: the engine turns it on by itself where it can."""
    turned_off = opened.given("async_scheduling") is False
    if not opened.on_gpu or not turned_off or opened.value("speculative_config") is not None:
        return None
    if opened.value("parallel_config.pipeline_parallel_size") != 1:
        return None
    return opened.remedy(Remedy.OVERLAP, {"async_scheduling": True}, "async_scheduling=False")


def _graphs(opened: Opened) -> EngineRemedy | None:
    if not opened.on_gpu or _graph_mode(opened) not in ("NONE", "None"):
        return None
    costs = "The engine compiles the model and captures graphs when it starts, which takes about a minute and some memory."
    if opened.given("enforce_eager"):
        return opened.remedy(Remedy.GRAPHS, {"enforce_eager": False}, "enforce_eager=True", condition=costs)
    if opened.given("optimization_level") == 0:
        return opened.remedy(Remedy.GRAPHS, {"optimization_level": 2}, "optimization_level=0", condition=costs)
    if opened.given("compilation_config", "cudagraph_mode") is None:
        return None  # the engine itself decided against graphs
    full = {"compilation_config.cudagraph_mode": "FULL_AND_PIECEWISE"}
    return opened.remedy(Remedy.GRAPHS, full, "cudagraph_mode=NONE", condition=costs)


def _full_graphs(opened: Opened) -> EngineRemedy | None:
    """Offer them only if piecewise graphs were requested: the engine falls back to them where it must."""
    requested = opened.given("compilation_config", "cudagraph_mode") is not None
    if not opened.on_gpu or not requested or _graph_mode(opened) != "PIECEWISE":
        return None
    full = {"compilation_config.cudagraph_mode": "FULL_AND_PIECEWISE"}
    return opened.remedy(Remedy.FULL_GRAPHS, full, "cudagraph_mode=PIECEWISE")


def _graph_sizes(opened: Opened) -> EngineRemedy | None:
    sizes = sorted(opened.value("compilation_config.cudagraph_capture_sizes") or ())
    if not opened.on_gpu or not sizes or opened.batch in sizes or _graph_mode(opened) in ("NONE", "None"):
        return None
    padded = next((size for size in sizes if size >= opened.batch), 0)
    inside = opened.given("compilation_config", "cudagraph_capture_sizes") is not None
    name = "compilation_config.cudagraph_capture_sizes" if inside else "cudagraph_capture_sizes"
    values: dict[str, Any] = {name: sorted({*sizes, opened.batch})}
    for path in (("max_cudagraph_capture_size",), ("compilation_config", "max_cudagraph_capture_size")):
        if opened.given(*path) is not None:  # the engine refuses one that is not the largest size
            values[".".join(path)] = max(*sizes, opened.batch)
    return opened.remedy(
        Remedy.GRAPH_SIZES,
        values,
        f"captured batch sizes: {', '.join(map(str, sizes))}",
        before=padded,
        after=opened.batch,
    )


def _larger_step(opened: Opened) -> EngineRemedy | None:
    most = opened.value("scheduler_config.max_num_batched_tokens")
    if not most or most >= opened.prompt_tokens:
        return None
    return opened.remedy(
        Remedy.LARGER_STEP,
        {"max_num_batched_tokens": opened.prompt_tokens},
        f"max_num_batched_tokens={most}",
        before=most,
        after=opened.prompt_tokens,
        condition="While a long prefill runs, sequences in decode wait for it: in a server, their token gaps become longer.",
    )


def _more_sequences(opened: Opened) -> EngineRemedy | None:
    """Offer what limits the sequences that run at once: their number, or else the size of the cache."""
    most = opened.value("scheduler_config.max_num_seqs")
    if most and most < opened.batch:
        now = f"max_num_seqs={most}"
        return opened.remedy(Remedy.MORE_SEQUENCES, {"max_num_seqs": opened.batch}, now, before=most, after=opened.batch)
    blocks, size = opened.value("cache_config.num_gpu_blocks"), opened.value("cache_config.block_size")
    if not blocks or not size:
        return None
    longest = max(opened.request.prompts.lengths) + opened.request.config.runtime.num_new_tokens
    each = ceil(longest / size)
    fitting = (blocks - 1) // each  # the engine keeps one block free
    if fitting >= opened.batch:
        return None
    values, condition = _larger_cache(opened, each * opened.batch + 1, blocks)
    now = f"a cache of {blocks:,} blocks of {size} tokens; a sequence needs {each:,}"
    return (
        opened.remedy(Remedy.MORE_SEQUENCES, values, now, before=max(fitting, 1), after=opened.batch, condition=condition)
        if values
        else None
    )


def _larger_cache(opened: Opened, needed: int, blocks: int) -> tuple[dict[str, Any], str]:
    """Return the arguments of a cache of `needed` blocks, and their condition; none if the cache cannot grow."""
    if opened.given("num_gpu_blocks_override"):
        return {"num_gpu_blocks_override": needed}, "The blocks must fit in memory."
    given = opened.given("kv_cache_memory_bytes")
    if given:
        return {"kv_cache_memory_bytes": ceil(given / blocks * needed)}, "The cache must fit in memory."
    share = opened.value("cache_config.gpu_memory_utilization")
    if not share or share >= MOST_MEMORY:
        return {}, ""
    return {"gpu_memory_utilization": MOST_MEMORY}, "The cache may still be too small for the batch."


def _cache_format(opened: Opened) -> EngineRemedy | None:
    stored, dtype = str(opened.value("cache_config.cache_dtype")), opened.request.dtype
    if dtype.itemsize != 2 or stored not in ("auto", str(dtype).removeprefix("torch.")) or not _has_fp8(opened):
        return None
    if not _backends(opened, "fp8"):
        return None
    return opened.remedy(
        Remedy.CACHE_FORMAT,
        {"kv_cache_dtype": "fp8"},
        f"kv_cache_dtype={stored}",
        before=8 * dtype.itemsize,
        after=8,
        alters_output=True,
    )


def _weight_format(opened: Opened) -> EngineRemedy | None:
    """Offer the engine's own quantization while it loads; checkpoints quantized in advance are other models."""
    if opened.value("model_config.quantization") or opened.request.dtype.itemsize != 2 or not _has_fp8(opened):
        return None
    method = next((name for name in ("fp8_per_tensor", "fp8") if name in _quantization_methods()), None)
    if method is None:
        return None
    return opened.remedy(
        Remedy.WEIGHT_FORMAT,
        {"quantization": method},
        "quantization=None",
        before=8 * opened.request.dtype.itemsize,
        after=8,
        alters_output=True,
    )


def _attention(opened: Opened) -> EngineRemedy | None:
    usable = _backends(opened, str(opened.value("cache_config.cache_dtype") or "auto"))
    set_to = opened.value("attention_config.backend")
    current = getattr(set_to, "name", None) or (usable[0] if usable else None)
    other = next((name for name in usable if name != current and name not in _SLOW_BACKENDS), None)
    if current is None or other is None:
        return None
    return opened.remedy(Remedy.ATTENTION, {"attention_backend": other}, f"attention backend {current}")


def _prefix_cache(opened: Opened) -> EngineRemedy | None:
    size = opened.value("cache_config.block_size")
    if opened.value("cache_config.enable_prefix_caching") is not False or not size:
        return None
    if opened.value("model_config.is_prefix_caching_supported") is False:
        return None
    shared = shared_prefix_tokens(opened.request.prompts.ids, size)
    if not shared:
        return None
    return opened.remedy(
        Remedy.PREFIX_CACHE,
        {"enable_prefix_caching": True},
        "enable_prefix_caching=False",
        before=opened.prompt_tokens,
        after=opened.prompt_tokens - shared,
    )


def _speculation(opened: Opened) -> EngineRemedy | None:
    """Offer n-gram speculation, which needs no draft model, if its proposer can be loaded."""
    if opened.value("speculative_config") is not None or opened.value("parallel_config.pipeline_parallel_size") != 1:
        return None
    if not opened.on_gpu or find_spec("numba") is None:
        return None
    values: dict[str, Any] = {
        "speculative_config.method": "ngram",
        "speculative_config.num_speculative_tokens": PROPOSED_TOKENS,
        "speculative_config.prompt_lookup_max": PROPOSED_TOKENS,
    }
    if opened.given("async_scheduling"):
        values["async_scheduling"] = False
    overlaps = opened.value("scheduler_config.async_scheduling")
    return opened.remedy(
        Remedy.SPECULATION,
        values,
        "no speculative_config",
        before=1,
        after=1 + PROPOSED_TOKENS,
        condition="N-gram proposals are accepted only where the answer repeats the prompt or itself. The engine does not overlap "
        "scheduling with them (async_scheduling).",
        implied=("async_scheduling=False",) if overlaps else (),
    )


_OFFERS: tuple[Callable[[Opened], EngineRemedy | None], ...] = (
    _overlap,
    _graphs,
    _full_graphs,
    _graph_sizes,
    _larger_step,
    _more_sequences,
    _cache_format,
    _weight_format,
    _attention,
    _prefix_cache,
    _speculation,
)


def _text(value: Any) -> str:
    """Return a value as overrides spell it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)


def _graph_mode(opened: Opened) -> str:
    return str(opened.value("compilation_config.cudagraph_mode")).rpartition(".")[2]


def _has_fp8(opened: Opened) -> bool:
    """Return whether the device has fp8 tensor cores."""
    if not opened.on_gpu:
        return False
    from vllm.platforms import current_platform

    return bool(current_platform.has_device_capability(FP8_CAPABILITY))


def _quantization_methods() -> Collection[str]:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    return tuple(QUANTIZATION_METHODS)


def _backends(opened: Opened, cache_dtype: str) -> list[str]:
    """Return the attention backends that can run this model with such a cache, the engine's first choice first."""
    if not opened.on_gpu:
        return []
    try:
        return list(_valid_backends(opened.config, cache_dtype))
    except (ImportError, AttributeError, TypeError, ValueError, AssertionError, RuntimeError) as error:
        opened.problems.append(
            f"vLLM's attention backends cannot be listed ({type(error).__name__}: {error}), so neither another backend nor an "
            "fp8 cache is proposed."
        )
        return []


def _valid_backends(config: Any, cache_dtype: str) -> Iterator[str]:
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    known = selector_values(config, cache_dtype)
    wanted = AttentionSelectorConfig(**{name: value for name, value in known.items() if name in AttentionSelectorConfig._fields})
    with set_current_vllm_config(config):
        valid, _ = current_platform.get_valid_backends(current_platform.get_device_capability(), wanted)
    for candidate in valid:
        backend = getattr(candidate, "backend", None) or candidate[0]
        yield str(backend.name)


def selector_values(config: Any, cache_dtype: str) -> dict[str, Any]:
    """Return what decides between attention backends, as far as the configuration says; versions differ in what they ask."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    transfer = getattr(config, "kv_transfer_config", None)
    return {
        "head_size": model.get_head_size(),
        "dtype": model.dtype,
        "kv_cache_dtype": cache_dtype,
        "block_size": cache.block_size if getattr(cache, "user_specified_block_size", False) else None,
        "use_mla": model.use_mla,
        "has_sliding_window": model.get_sliding_window() is not None,
        "use_non_causal": getattr(config.attention_config, "use_non_causal", False),
        "use_batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"),
        "use_kv_connector": transfer is not None and bool(transfer.is_kv_transfer_instance),
        "use_pcp": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "use_dcp": getattr(parallel, "decode_context_parallel_size", 1) > 1,
        "use_rswa": getattr(model, "rswa_window", None) is not None,
    }

"""The settings of llama.cpp that `runtime.engine.NAME=VALUE` changes, and those that llm-perf chooses."""

import os
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_perf_opt.core.engine_records import EngineSetting
from llm_perf_opt.core.errors import ConfigError, nearest
from llm_perf_opt.runners.base import RunnerRequest
from llm_perf_opt.runners.engines import short_dtype

if TYPE_CHECKING:
    import torch

INTEGERS = ("n_ctx", "n_batch", "n_ubatch")
SWITCHES = ("cont_batching", "kv_unified", "no_extra_bufts", "swa_full")
_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
NAMED = {
    "flash_attn_type": ("LLAMA_FLASH_ATTN_TYPE", ("auto", "disabled", "enabled")),
    "cache_type_k": ("GGML_TYPE", _CACHE_TYPES),
    "cache_type_v": ("GGML_TYPE", _CACHE_TYPES),
    "load_mode": ("LLAMA_LOAD_MODE", ("auto", "none", "mmap", "mlock", "mmap_mlock", "direct_io")),
    "numa": ("GGML_NUMA_STRATEGY", ("disabled", "distribute", "isolate", "numactl", "mirror")),
}
"""Settings whose values are members of an enumeration: the beginning of their names in llama.cpp, and the rest of each."""
SETTINGS = (*INTEGERS, *SWITCHES, *NAMED)
"""The fields of xllamacpp's CommonParams that change how the model runs. Others run tools, open files or fetch models."""
RESERVED = {
    "model": "model.path",
    "cpuparams": "hardware.threads",
    "cpuparams_batch": "hardware.threads",
    "n_parallel": "runtime.batch_size",
    "n_predict": "runtime.num_new_tokens",
    "sampling": "",
    "cache_prompt": "",
    "fit_params": "",
    "cache_ram_mib": "",
    "cache_idle_slots": "",
}
"""Field → the key of llm-perf's own configuration that sets it; empty: llm-perf always sets it."""
CACHE_BITS = {"f32": 32, "f16": 16, "bf16": 16}
_CACHE_BLOCK = 256
"""llama.cpp rounds the cache of a sequence up to a multiple of this."""
VARIABLES = {"GGML_NO_BACKTRACE": "1"}
"""Environment variables for the engine: if it fails, it would start a debugger."""
_WARNINGS = 2
"""The engine's level of messages that has warnings and errors, but not a line per request."""


class SettingNames:
    """The arguments of the engine; see `EngineArguments`."""

    def known(self) -> frozenset[str]:
        """Return the names."""
        return frozenset(SETTINGS)

    def refuse(self, given: Mapping[str, Any], known: Collection[str] | None) -> None:
        """Raise a ConfigError for a setting that llm-perf sets itself, that is unknown, or that has an invalid value."""
        for name, value in given.items():
            if name == "n_gpu_layers":
                raise ConfigError(f"runtime.engine.{name}: llm-perf runs llama.cpp only on the CPU.", "Remove it.")
            if name in RESERVED:
                own = RESERVED[name]
                raise ConfigError(
                    f"runtime.engine.{name} is set by {own or 'llm-perf'}.", f"Set {own} instead." if own else "Remove it."
                )
            if name not in SETTINGS:
                raise ConfigError(
                    f"runtime.engine.{name}: llama.cpp has no such setting here.{nearest(name, SETTINGS)}",
                    f"Known: {', '.join(SETTINGS)}.",
                )
            _check_value(name, value)


def _check_value(name: str, value: Any) -> None:
    if name in NAMED:
        choices = NAMED[name][1]
        valid, expected = value in choices, f"one of {', '.join(choices)}"
    elif name in SWITCHES:
        valid, expected = isinstance(value, bool), "true or false"
    else:
        valid, expected = type(value) is int and value > 0, "a positive integer"
    if not valid:
        raise ConfigError(f"runtime.engine.{name}={value} is invalid.", f"Use {expected}.")


REQUESTED = (
    EngineSetting("cache_prompt", "false", "every request computes its whole prompts"),
    EngineSetting("ignore_eos", "true", "every sequence has the requested length; tokens that end one are not selected"),
    EngineSetting("samplers", "top_k=1", "greedy decoding"),
)


def chosen_settings(request: RunnerRequest, dtype: "torch.dtype") -> dict[str, tuple[Any, str]]:
    """Return what llm-perf sets unless the user does: name → value and reason."""
    sequences = len(request.prompts.ids)
    longest = max(request.prompts.lengths) + request.config.runtime.num_new_tokens
    each = -(-longest // _CACHE_BLOCK) * _CACHE_BLOCK
    found: dict[str, tuple[Any, str]] = {
        "n_ctx": (sequences * each, "room for the request; by default, for the longest context of the model"),
        "n_parallel": (sequences, "all sequences run at once"),
        "n_gpu_layers": (0, "the model runs on the CPU"),
        "fit_params": (False, "settings are not reduced to fit the free memory"),
        "cache_ram_mib": (0, "prompts of earlier requests are not kept"),
        "cache_idle_slots": (False, "prompts of earlier requests are not kept"),
    }
    if dtype.itemsize * 8 != CACHE_BITS["f16"]:
        why = f"model.dtype={short_dtype(dtype)}; the engine's default is f16"
        found |= {"cache_type_k": ("f32", why), "cache_type_v": ("f32", why)}
    return found


def parameters(file: Path, values: Mapping[str, Any], threads: int) -> Any:
    """Return the engine's parameters. Its port is closed to others, and it fetches nothing."""
    import xllamacpp as engine

    os.environ.update(VARIABLES)
    found = engine.CommonParams()
    found.model.path = str(file)
    found.cpuparams.n_threads = found.cpuparams_batch.n_threads = threads
    found.verbosity = _WARNINGS
    found.offline = True
    found.ui = found.endpoint_slots = False
    found.api_keys = [secrets.token_urlsafe()]
    for name, value in values.items():
        if name in NAMED:
            setattr(found, name, type(getattr(found, name))[f"{NAMED[name][0]}_{value.upper()}"])
        else:
            setattr(found, name, value)
    return found

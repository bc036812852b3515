"""Facts of a model that every runner tells in the same words."""

from typing import Any

import torch

from llm_perf_opt.config import canonical_dtype
from llm_perf_opt.host import last_level_cache_bytes
from llm_perf_opt.records import Maybe


def last_level_cache_of(device: torch.device) -> Maybe[int]:
    """Bytes of the device's last-level cache."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return last_level_cache_bytes()


def short_dtype(dtype: torch.dtype) -> str:
    """bf16, fp16, fp32; another as torch calls it."""
    return canonical_dtype(str(dtype))


def plain_config(values: dict[str, Any]) -> dict[str, Any]:
    """Only what JSON can hold; the rest of a configuration is no fact about the architecture."""

    def keep(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return all(keep(item) for item in value)
        if isinstance(value, dict):
            return all(isinstance(key, str) and keep(item) for key, item in value.items())
        return value is None or isinstance(value, (bool, int, float, str))

    return {str(key): value for key, value in values.items() if keep(value)}

"""The documented settings of the cache."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class KvCacheConfig:
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    free_gpu_memory_fraction: float | None = None
    max_attention_window: list[int] | None = None
    host_cache_size: int | None = None
    use_uvm: bool = False
    dtype: str = "auto"

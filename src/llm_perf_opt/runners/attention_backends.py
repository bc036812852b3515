"""The kernels of scaled_dot_product_attention, chosen once for the process: a choice at every step would show in the times."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from llm_perf_opt.config.schema import AttentionBackend
from llm_perf_opt.core.errors import ConfigError

_ON_GPU = ("efficient", "cudnn")
_UNSUPPORTED = ("No viable backend", "No available kernel", "No execution plans support")
"""What torch says if the chosen kernels cannot compute a call, by version."""


def use_attention_backend(name: AttentionBackend, attention: str, device: torch.device) -> None:
    """Allow only these kernels, or all for `auto`. Raise ConfigError if they cannot run on the device."""
    if name != "auto" and attention != "sdpa":
        raise ConfigError(
            f"runtime.attention_backend={name} has no effect: the attention of this model is {attention}.",
            "Use it with runtime.attn_implementation=sdpa.",
        )
    if name in _ON_GPU and device.type != "cuda":
        raise ConfigError(f"runtime.attention_backend={name} needs a GPU; the device is {device}.", "Choose flash, math or auto.")
    torch.backends.cuda.enable_flash_sdp(name in ("auto", "flash"))
    torch.backends.cuda.enable_mem_efficient_sdp(name in ("auto", "efficient"))
    torch.backends.cuda.enable_cudnn_sdp(name in ("auto", "cudnn"))
    torch.backends.cuda.enable_math_sdp(name in ("auto", "math"))


@contextmanager
def explained_backend(name: AttentionBackend) -> Iterator[None]:
    """Turn torch's error about missing kernels into a ConfigError."""
    try:
        yield
    except RuntimeError as error:
        if not any(text in str(error) for text in _UNSUPPORTED):
            raise
        raise ConfigError(
            f"runtime.attention_backend={name} does not support the attention of this model on this device.",
            "Choose another backend, or auto.",
        ) from error

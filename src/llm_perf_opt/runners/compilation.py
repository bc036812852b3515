"""How torch.compile compiles the steps of a model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from llm_perf_opt.config.schema import CompileMode
from llm_perf_opt.core.errors import ConfigError

_CAPTURING = ("reduce-overhead", "max-autotune")
"""Modes that capture CUDA graphs."""
_DESCENT = "coordinate_descent_tuning"
R = TypeVar("R")


@dataclass(frozen=True)
class Compilation:
    """The settings of torch.compile for the steps of a model."""

    mode: CompileMode = "none"
    prefill: bool = False
    """Whether prefill is compiled, too."""
    coordinate_descent: bool = False
    """Whether Inductor tunes the block sizes of its kernels and writes products of one row itself, on a GPU."""

    @property
    def words(self) -> str:
        """The settings as they are recorded."""
        more = ("with prefill" if self.prefill else "", "coordinate descent tuning" if self.coordinate_descent else "")
        return ", ".join([self.mode, *filter(None, more)])

    def check(self, device: torch.device) -> None:
        """Raise a ConfigError for a setting without effect on this device."""
        if self.coordinate_descent and device.type != "cuda":
            raise ConfigError(
                f"runtime.{_DESCENT}=true has no effect on {device}: it tunes Triton kernels, which run on a GPU.",
                f"Use runtime.{_DESCENT}=false.",
            )

    def captures(self, device: torch.device) -> bool:
        """Return whether steps are replayed as CUDA graphs."""
        return self.mode in _CAPTURING and device.type == "cuda"

    def compiled(self, function: Callable[..., R]) -> Callable[..., R]:
        """Return the function compiled in this mode; unchanged for `none`."""
        if self.mode == "none":
            return function
        if not self.coordinate_descent:
            made: Callable[..., R] = torch.compile(function, mode=None if self.mode == "default" else self.mode)
            return made
        tuned: Callable[..., R] = torch.compile(function, options=self.options())
        return tuned

    def options(self) -> dict[str, Any]:
        """Return the options of the mode and of the tuning: torch.compile takes either a mode or options."""
        from torch._inductor import list_mode_options

        return {**list_mode_options(self.mode), _DESCENT: True}


NOT_COMPILED = Compilation()

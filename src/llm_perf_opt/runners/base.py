"""The contract between what is measured and what measures it.

A runner is opened by a function that takes a `RunnerRequest`; other packages bring theirs by an entry point of the group
`llm_perf_opt.runners`. It is one of two kinds, told apart by what it has:

- steppable (`prefill`, `decode_step`): this program calls every step, so that stages are what was called;
- engine (`generate`): it runs the whole batch by itself and tells when each token arrived. It says how its stages can be told
  apart, and what it cannot separate is not shown.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Union

from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.core.records import Missing, ModelFacts, RuntimeFacts
from llm_perf_opt.runners.measure.engine_meter import Generated, Generates
from llm_perf_opt.runners.measure.meter import Steppable
from llm_perf_opt.workspace.data.prompts import Prompts

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

__all__ = ["WHOLE_PROCESS", "EngineProfiler", "EngineRunner", "Generated", "Runner", "RunnerRequest", "SteppableRunner"]


@dataclass(frozen=True)
class RunnerRequest:
    """What a runner is opened with; everything in it has been checked."""

    config: RunConfig
    architecture: "PretrainedConfig"
    """The model's Hugging Face configuration."""
    prompts: Prompts
    device: "torch.device"
    dtype: "torch.dtype"
    trace_dir: Path | None
    """Where an engine's own profiler is to leave its trace; none outside the torch pass."""


class SteppableRunner(Steppable, Protocol):
    """A runner whose prefill and decode steps can be called one by one."""

    facts: ModelFacts
    runtime: RuntimeFacts
    model: Any
    """The torch module that runs, for sub-stages and parts; None where there is none to look into."""

    def place(self, prompts: Prompts) -> Any:
        """Put prompts on the device, in the form `prefill` takes."""


class EngineProfiler(Protocol):
    """torch.profiler where the engine runs it."""

    def start(self) -> None:
        """Begin to record, what `profiling.torch.preset` of the request asks for."""

    def stop(self) -> Path:
        """End recording; the Chrome trace it left."""


WHOLE_PROCESS = None
"""Of an engine's `profiler`: the model runs on the thread that calls `generate`, where this program's own profiler sees it."""


class EngineRunner(Generates, Protocol):
    """A runner that is given a whole batch and hands back tokens as they come."""

    facts: ModelFacts
    runtime: RuntimeFacts
    profiler: EngineProfiler | Missing | None
    """How torch.profiler gets to the model: the engine's own, this program's (WHOLE_PROCESS), or why it cannot."""


Runner = Union[SteppableRunner, EngineRunner]  # noqa: UP007 - protocols, evaluated at run time
Opener = Callable[[RunnerRequest], Runner]

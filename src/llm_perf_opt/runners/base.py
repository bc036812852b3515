"""The interface of a runner.

A function that takes a `RunnerRequest` opens a runner; other packages register theirs as an entry point of the group
`llm_perf_opt.runners`. There are two kinds, recognized by their methods:

- steppable (`prefill`, `decode_step`): llm-perf calls and times every step;
- engine (`generate`): runs the whole batch and returns when each token arrived. It declares how its stages are separated;
  stages that it cannot separate are not reported.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Union

from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.core.records import Missing, ModelFacts, RuntimeFacts
from llm_perf_opt.runners.measure.engine_meter import EngineProfiler, Generated, Generates
from llm_perf_opt.runners.measure.meter import Steppable

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from llm_perf_opt.runners.rank_group import RankGroup
    from llm_perf_opt.workspace.data.prompts import Prompts

__all__ = [
    "WHOLE_PROCESS",
    "EngineProfiler",
    "EngineRunner",
    "Generated",
    "Runner",
    "RunnerRequest",
    "ServerRequest",
    "SteppableRunner",
]


@dataclass(frozen=True)
class RunnerRequest:
    """The validated input of a runner."""

    config: RunConfig
    architecture: "PretrainedConfig"
    """The model's Hugging Face configuration."""
    prompts: "Prompts"
    device: "torch.device"
    dtype: "torch.dtype"
    trace_dir: Path | None
    """Output folder of an engine's own profiler; None outside the torch pass."""
    compare_tokens: bool = False
    """Whether a runner that quantizes weights also runs the request before, to compare the tokens (`reference_tokens`)."""
    profiled: bool = False
    """Whether the pass is profiled: llm-perf's ranges must enclose the work, even if an engine has to be changed for that."""
    ranks: "RankGroup | None" = None
    """The ranks that share the model, for a runtime with `Runtime.ranks`; None: there is one. The runner splits its model."""


@dataclass(frozen=True)
class ServerRequest:
    """The validated input of an engine's server."""

    config: RunConfig
    architecture: "PretrainedConfig"
    device: "torch.device"
    dtype: "torch.dtype"
    folder: Path
    """For the folder of a model with random weights."""
    port: int
    trace_dir: Path | None
    """Output folder of the server's own profiler; None: it is not configured."""
    spans_url: str
    """Receives OpenTelemetry spans; empty: none are sent."""


class SteppableRunner(Steppable, Protocol):
    """A runner whose prefill and decode steps can be called one by one."""

    facts: ModelFacts
    runtime: RuntimeFacts
    model: Any
    """The torch module, used for sub-stages and components; None if there is none."""

    def place(self, prompts: "Prompts") -> Any:
        """Return the prompts on the device, in the form that `prefill` takes."""


WHOLE_PROCESS = None
"""Value of `profiler` for an engine that runs the model on the thread that calls `generate`: llm-perf's own profiler sees it."""


class EngineRunner(Generates, Protocol):
    """A runner that runs a whole batch and returns the arrival time of each token."""

    facts: ModelFacts
    runtime: RuntimeFacts
    profiler: EngineProfiler | Missing | None
    """The engine's own profiler, WHOLE_PROCESS, or the reason why torch.profiler cannot see the model."""


Runner = Union[SteppableRunner, EngineRunner]  # noqa: UP007 - protocols, evaluated at run time
Opener = Callable[[RunnerRequest], Runner]

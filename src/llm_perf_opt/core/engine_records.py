"""Records of the runtime: how it ran, what llm-perf changed in an engine, and the memory that an engine reserves."""

from dataclasses import dataclass, field
from typing import Any

from llm_perf_opt.core.missing import Maybe
from llm_perf_opt.core.remedy_records import EngineRemedy


@dataclass(frozen=True)
class EngineSetting:
    """A setting that llm-perf chose: neither the engine's default nor set by the user."""

    name: str
    """An engine argument, an environment variable, or a parameter of each request."""
    value: str
    why: str

    @property
    def words(self) -> str:
        """The setting with its reason."""
        return f"{self.name}={self.value} ({self.why})"


@dataclass(frozen=True)
class EngineMemory:
    """Memory that an engine reserves in advance, and what the request of this run needs of it."""

    share: Maybe[float]
    """Share of the device's memory that the engine may use."""
    cache_tokens: Maybe[int]
    """Tokens that the reserved cache holds."""
    cache_bytes: Maybe[int]
    needed_tokens: int
    """Tokens of the cache that the request needs: prompts and new tokens of all sequences."""
    needed_bytes: Maybe[int]
    weights_bytes: Maybe[int] | None = None
    """The weights as the engine stores them; None in older runs, where they are those of the model's facts."""


@dataclass(frozen=True)
class ChangedEngine:
    """How a profiled pass changed the engine, and the times of these changes alone: measured before the profiler records."""

    settings: tuple[EngineSetting, ...]
    stage_wall_ns: dict[str, int]
    """Medians of prefill and decode over the repeats."""
    decode_steps: int
    repeats: int
    samples_ns: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Prefill and decode of each repeat. Empty in older runs."""


@dataclass(frozen=True)
class RuntimeFacts:
    """The runtime as it actually ran."""

    type: str
    version: str
    method: str
    """How prefill and decode were separated, as text."""
    inseparable: str = ""
    """Why prefill and decode could not be separated; empty if they were. Without separation, neither is reported."""
    unstepped: str = ""
    """Why single decode steps have no times; empty if they have. Decode as a whole has a time in both cases."""
    held_back: bool | None = None
    """Whether sequences waited until others had ended, or were preempted; None in older runs, and if it is not known."""
    uncosted: str = ""
    """Why FLOPs and bytes cannot be computed from the architecture; empty if they can."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Every argument of the engine, including those that the runner set."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables the runner set for the engine."""
    notes: tuple[str, ...] = ()
    """What else a reader needs to interpret the numbers."""
    devices: int = 1
    """Devices that the model is spread over; they share the work of each step."""
    settings: tuple[EngineSetting, ...] = ()
    """What differs from the engine's defaults without being set by the user, in every pass. Empty in older runs."""
    changes: tuple[EngineSetting, ...] = ()
    """What differs in addition because the pass is profiled; empty in the unprofiled pass."""
    elsewhere: bool = False
    """Whether the model runs in other processes than the measured one. False in older runs, which did not record it."""
    memory: EngineMemory | None = None
    """None if the engine reserves none, or does not report it, and in older runs."""
    remedies: tuple[EngineRemedy, ...] = ()
    """What findings may propose to change in the engine. Empty in older runs."""

"""What ran the model: the runtime, what it was given, and how far prefill and decode can be told apart in it."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RuntimeFacts:
    """The runtime as it really ran."""

    type: str
    version: str
    method: str
    """How prefill and decode were told apart, in words."""
    inseparable: str = ""
    """Why they could not be in this run; empty where they could. Nothing is then said of the one or the other."""
    unstepped: str = ""
    """Why single steps of decode have no times of their own; empty where they have. Decode as a whole has one all the same."""
    uncosted: str = ""
    """Why its FLOPs and bytes cannot be counted from the architecture; empty where they can."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Every argument the engine was given, the runner's own among them."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables the runner set for the engine."""
    notes: tuple[str, ...] = ()
    """What else a reader must know to read the figures right."""
    devices: int = 1
    """Devices that the model is spread over. Where its FLOPs and bytes are counted, all of them share each step's work."""

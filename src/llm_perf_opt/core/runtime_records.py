"""What ran the model, on what: the runtime, how far prefill and decode can be told apart in it, weights and texts."""

from dataclasses import dataclass, field
from typing import Any, Literal


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


@dataclass(frozen=True)
class WeightFacts:
    """Where the weights came from."""

    source: Literal["random", "stored"]
    stored_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that the files hold in each format; empty for random weights, and where the files' heads do not tell."""


@dataclass(frozen=True)
class TextUse:
    """What of a dataset's texts a batch holds."""

    used: int
    """Different texts; where they are fewer than the batch has sequences, they are repeated."""
    cut: int
    """So many of them were longer than the limit, and are cut to it."""
    longest: int
    """Tokens of the longest, before it was cut."""
    limit: int
    unused: int | None
    """Records that come after them; None: there are more than are counted."""

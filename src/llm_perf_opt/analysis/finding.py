"""A finding: what is wrong, what stands behind it, what a change would save on the wall clock, and exactly what to try."""

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from llm_perf_opt.analysis.evidence import StageEvidence
from llm_perf_opt.records import Maybe, Missing

Confidence = Literal["high", "medium", "low"]


class Kind(str, Enum):
    """What a finding is about; they are listed in this order."""

    LATENCY = "latency"
    """A change makes a request faster."""
    THROUGHPUT = "throughput"
    """A change makes more of the device; a single request is no faster."""
    TRUST = "trust"
    """A reason to measure again before anything is changed."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Saving:
    """Wall-clock time per unit of the stage."""

    expected_ns: int
    low_ns: int
    high_ns: int
    unit: str
    """token, prefill or step."""
    counted: int = 0
    """Units in the trace that it is a mean over; 0: not known."""

    def __post_init__(self) -> None:
        if not self.low_ns <= self.expected_ns <= self.high_ns:
            raise ValueError(f"a saving of {self.expected_ns} is not within {self.low_ns} and {self.high_ns}")


@dataclass(frozen=True)
class ToTry:
    """What to change."""

    overrides: tuple[str, ...] = ()
    """Settings of `llm-perf run`; empty where the change is not one of configuration."""
    change: str = ""
    """The same, or what there is no setting for, in words."""

    def __str__(self) -> str:
        return " ".join(self.overrides) if self.overrides else self.change


@dataclass(frozen=True)
class Finding:
    """One claim."""

    id: str
    kind: Kind
    stage: str
    claim: str
    evidence: tuple[str, ...]
    """The rows it stands on."""
    saving: Maybe[Saving]
    units: int
    """How often the unit occurs in a request, or in the trace: what a saving counts for."""
    confidence: Confidence
    because: str
    """Why not more, or less, confident."""
    to_try: ToTry

    @property
    def weight_ns(self) -> int:
        """The expected saving over a whole request."""
        return 0 if isinstance(self.saving, Missing) else self.saving.expected_ns * self.units


def saving_of(stage: StageEvidence, low: float, expected: float, high: float) -> Saving:
    """Sums over the trace's units as a saving per unit; none is below zero or above the wall time."""
    most = stage.budget.wall_ns
    values = [min(max(value, 0.0), most) / stage.units for value in (low, expected, high)]
    rounded = sorted(round(value) for value in (values[0], values[2]))
    return Saving(min(max(round(values[1]), rounded[0]), rounded[1]), rounded[0], rounded[1], stage.unit, stage.units)


def milliseconds(ns: float) -> str:
    """A time as claims spell it."""
    return f"{ns / 1e6:,.3g} ms" if abs(ns) < 1e9 else f"{ns / 1e6:,.0f} ms"

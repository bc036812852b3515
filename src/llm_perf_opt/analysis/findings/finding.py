"""A finding: what is wrong, what stands behind it, what a change would save on the wall clock, and exactly what to try."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import msgspec

from llm_perf_opt.analysis.evidence import StageEvidence
from llm_perf_opt.analysis.trace.document import Finding, ThroughputLine
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.units import duration

NO_FASTER = "a single request is no faster"
Confidence = Literal["high", "medium", "low"]
Bounds = tuple[float, float, float]
"""Least, expected and most, in ns over all units of the stage."""


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
class After:
    """The time per unit once the change is made, told from the time before. Where that turns out otherwise, `kept` tells on."""

    expected_ns: int
    low_ns: int
    high_ns: int
    before_ns: int
    """The time it was told from."""
    kept: float = 1.0
    """The share of a difference of the time before that is one of the time after, too: all of it where a saving is predicted,
    none where the time after is predicted by itself, a part where what goes, or stays, is a share of the time before."""


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
    after: After | None = None
    """None: the time before less the saving, whatever that time is."""

    def __post_init__(self) -> None:
        if not self.low_ns <= self.expected_ns <= self.high_ns:
            raise ValueError(f"a saving of {self.expected_ns} is not within {self.low_ns} and {self.high_ns}")


@dataclass(frozen=True)
class Throughput:
    """Tokens per second at the present batch and at a larger one. A token takes as long as its step: no request is faster."""

    batch: int
    larger: int
    step_ns: int
    """Of the present batch."""
    then_ns: int
    """Of the larger batch, with what it may be at least and at most."""
    least_ns: int
    most_ns: int
    unit: str
    counted: int
    """Steps in the trace that it is a mean over."""

    @property
    def after(self) -> After:
        """A token's share of the step, by which a trial is compared. A step that turns out otherwise is shared out, too."""
        then, least, most = (round(ns / self.larger) for ns in (self.then_ns, self.least_ns, self.most_ns))
        return After(then, least, most, round(self.step_ns / self.batch), kept=self.batch / self.larger)

    @property
    def line(self) -> ThroughputLine:
        """The tokens per second, as a finding keeps them."""
        rates = [self.larger * 1e9 / ns for ns in (self.then_ns, self.most_ns, self.least_ns)]
        now = self.batch * 1e9 / self.step_ns
        steps = (self.step_ns, self.then_ns, self.least_ns, self.most_ns)
        return ThroughputLine(self.batch, self.larger, *steps, now, *rates)


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
class Grounds:
    """What a finding stands on."""

    rows: tuple[str, ...]
    confidence: Confidence
    because: str
    """Why not more, or less, confident."""


Claim = tuple[str, ...]
"""The headline, and what is to be said after it."""
Place = tuple[str, int]
"""The stage, and how often its unit occurs in a request, or in the trace: what a saving counts for."""


def finding(id: str, place: Place, claim: Claim, grounds: Grounds, effect: Maybe[Saving | Throughput], to_try: ToTry) -> Finding:
    """Return a finding. Its kind is that of its effect; without one it is about trust in the figures."""
    saving = effect if isinstance(effect, Saving) else None
    throughput = effect if isinstance(effect, Throughput) else None
    known = saving or throughput
    after = known.after if known else None
    return Finding(
        id=id,
        headline=claim[0],
        claim=" ".join(text for text in claim if text),
        saving_ns=saving.expected_ns if saving else None,
        evidence=list(grounds.rows),
        to_try=str(to_try),
        kind=(Kind.LATENCY if saving else Kind.THROUGHPUT if throughput else Kind.TRUST).value,
        stage=place[0],
        saving_low_ns=saving.low_ns if saving else None,
        saving_high_ns=saving.high_ns if saving else None,
        saving_per=known.unit if known else "",
        saving_why=effect.why if isinstance(effect, Missing) else "" if saving else NO_FASTER,
        units=place[1],
        confidence=grounds.confidence,
        because=grounds.because,
        overrides=list(to_try.overrides),
        change=to_try.change,
        counted=known.counted if known else 0,
        before_ns=after.before_ns if after else None,
        after_ns=after.expected_ns if after else None,
        after_low_ns=after.low_ns if after else None,
        after_high_ns=after.high_ns if after else None,
        kept=after.kept if after else 1.0,
        throughput=throughput.line if throughput else None,
    )


def without_overrides(found: Finding, why: str = "") -> Finding:
    """The same with the change in words as what to try."""
    change = found.change + why
    return msgspec.structs.replace(found, overrides=[], change=change, to_try=change)


def weightiest(found: Sequence[Finding]) -> Finding | None:
    """Of what one rule finds in several stages, that which saves a request most; of equals the last."""
    return max(reversed(found), key=lambda one: one.weight_ns, default=None)


def saving_of(
    stage: StageEvidence, low: float, expected: float, high: float, *, after: Bounds | None = None, kept: float = 1.0
) -> Saving:
    """Sums over the trace's units as a saving per unit; none is below zero or above the wall time.

    `after` is the least, expected and greatest time after the change, where that is what is predicted; else it is what the saving
    leaves, and `kept` is as in `After`.
    """
    most = stage.budget.wall_ns
    values = [min(max(value, 0.0), most) / stage.units for value in (low, expected, high)]
    rounded = sorted(round(value) for value in (values[0], values[2]))
    middle = min(max(round(values[1]), rounded[0]), rounded[1])
    before = round(stage.wall_ns)
    if after is None:
        then = After(before - middle, before - rounded[1], before - rounded[0], before, kept)
    else:
        least, told, longest = (round(stage.per_unit(ns)) for ns in after)
        then = After(told, least, longest, before, kept=0.0)
    return Saving(middle, rounded[0], rounded[1], stage.unit, stage.units, then)


def gap_saving_of(stage: StageEvidence, low: float, expected: float, high: float) -> Saving:
    """The same of a share of the idle time: with a longer or shorter wall time the gaps, and so the saving, are other ones."""
    idle = stage.budget.idle_ns
    return saving_of(stage, low, expected, high, kept=1.0 - min(max(expected, 0.0) / idle, 1.0) if idle > 0 else 1.0)


def milliseconds(ns: float) -> str:
    """A time as claims spell it."""
    return duration(ns, 3)

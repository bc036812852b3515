"""The building blocks of a finding: claim, evidence, wall-clock saving, and what to try."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import msgspec

from llm_perf_opt.analysis.evidence import Evidence, StageEvidence, StageFigures
from llm_perf_opt.analysis.trace.document import Finding, ThroughputLine
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.units import duration, percentage

NO_FASTER = "a single request is no faster"
Confidence = Literal["high", "medium", "low"]
ATTENTION, PRODUCTS, CACHE, HOST = ("attention",), ("products",), ("cache",), ("host",)
"""What a change of a stage concerns."""
Bounds = tuple[float, float, float]
"""Least, expected and most, in ns, summed over all units of the stage."""


class Kind(str, Enum):
    """What a finding is about, in the order of the report."""

    LATENCY = "latency"
    """The change makes a request faster."""
    THROUGHPUT = "throughput"
    """The change raises throughput; a single request is no faster."""
    TRUST = "trust"
    """A reason to measure again before changing anything."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class PredictedTime:
    """The predicted time per unit after the change. `kept` adapts it if the time before is measured again and differs."""

    expected_ns: int
    low_ns: int
    high_ns: int
    before_ns: int
    """The time before the change that the prediction is based on."""
    kept: float = 1.0
    """How much of a difference in the time before carries over to the time after: 1 if the finding predicts a saving, 0 if it
    predicts the time after by itself, in between if it predicts a share of the time before."""


@dataclass(frozen=True)
class Saving:
    """Wall-clock time saved per unit of the stage."""

    expected_ns: int
    low_ns: int
    high_ns: int
    unit: str
    """token, prefill or step."""
    counted: int = 0
    """Units in the trace that the mean is taken over; 0: unknown."""
    after: PredictedTime | None = None
    """None: the time before minus the saving, whatever the time before is."""

    def __post_init__(self) -> None:
        if not self.low_ns <= self.expected_ns <= self.high_ns:
            raise ValueError(f"a saving of {self.expected_ns} is not within {self.low_ns} and {self.high_ns}")


@dataclass(frozen=True)
class Throughput:
    """Tokens per second at the current batch and at a larger one. A token takes as long as its step: no request is faster."""

    batch: int
    larger_batch: int
    step_ns: int
    """Time of a step at the current batch."""
    larger_step_ns: int
    """Expected time of a step at the larger batch, with its bounds."""
    larger_step_low_ns: int
    larger_step_high_ns: int
    unit: str
    counted: int
    """Steps in the trace that the mean is taken over."""

    @property
    def after(self) -> PredictedTime:
        """The time per token: the step's time divided by the batch. A trial is compared by it."""
        steps = (self.larger_step_ns, self.larger_step_low_ns, self.larger_step_high_ns)
        expected, low, high = (round(ns / self.larger_batch) for ns in steps)
        return PredictedTime(expected, low, high, round(self.step_ns / self.batch), self.batch / self.larger_batch)

    @property
    def line(self) -> ThroughputLine:
        """The figures as the finding stores them."""
        steps = (self.step_ns, self.larger_step_ns, self.larger_step_low_ns, self.larger_step_high_ns)
        rates = [self.larger_batch * 1e9 / ns for ns in (self.larger_step_ns, self.larger_step_high_ns, self.larger_step_low_ns)]
        return ThroughputLine(self.batch, self.larger_batch, *steps, self.batch * 1e9 / self.step_ns, *rates)


@dataclass(frozen=True)
class ToTry:
    """What to change."""

    overrides: tuple[str, ...] = ()
    """Settings of `llm-perf run`; empty if the change is not a configuration change."""
    change: str = ""
    """The change in words, for other programs and for what has no setting."""
    title: str = ""
    """The change in a few words, as an imperative: the heading of the finding."""
    concerns: tuple[str, ...] = ()
    """What of its stage it changes; empty: any of it. Findings on different ones can be tried together."""

    def __str__(self) -> str:
        return " ".join(self.overrides) if self.overrides else self.change


@dataclass(frozen=True)
class Grounds:
    """What a finding is based on."""

    rows: tuple[str, ...]
    confidence: Confidence
    because: str
    """The reason for this confidence."""


Claim = tuple[str, ...]
"""The headline and the sentences that follow it."""
Place = tuple[str, int]
"""The stage, and how often its unit occurs in a request (or in the trace, if no request is known)."""


def finding(id: str, place: Place, claim: Claim, grounds: Grounds, effect: Maybe[Saving | Throughput], to_try: ToTry) -> Finding:
    """Return a finding. Its effect decides its kind; without an effect it is about trust in the figures."""
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
        title=to_try.title,
        concerns=list(to_try.concerns),
    )


def without_overrides(found: Finding, why: str = "") -> Finding:
    """Return the finding with the change in words, followed by `why`, as the only thing to try."""
    change = found.change + why
    return msgspec.structs.replace(found, overrides=[], change=change, to_try=change)


def largest_saving(found: Sequence[Finding]) -> Finding | None:
    """Return the finding that saves a request most; of equals the last."""
    return max(reversed(found), key=lambda finding: finding.weight_ns, default=None)


def saving_of(
    stage: StageFigures, low: float, expected: float, high: float, *, after: Bounds | None = None, kept: float = 1.0
) -> Saving:
    """Return a saving per unit from sums over all units, each limited to between zero and the wall time.

    Pass `after` (least, expected and greatest time after the change) if the finding predicts that time. Otherwise the time after
    is the time before minus the saving, and `kept` is that of `PredictedTime`.
    """
    wall_ns = stage.budget.wall_ns
    least, middle, most = (round(min(max(value, 0.0), wall_ns) / stage.units) for value in (low, expected, high))
    least, most = sorted((least, most))
    middle = min(max(middle, least), most)
    before = round(stage.wall_ns)
    if after is None:
        predicted = PredictedTime(before - middle, before - most, before - least, before, kept)
    else:
        low_after, expected_after, high_after = (round(stage.per_unit(ns)) for ns in after)
        predicted = PredictedTime(expected_after, low_after, high_after, before, kept=0.0)
    return Saving(middle, least, most, stage.unit, stage.units, predicted)


def gap_saving_of(stage: StageEvidence, low: float, expected: float, high: float) -> Saving:
    """Return `saving_of` for a share of the idle time: if the wall time changes, so do the gaps and the saving."""
    idle = stage.budget.idle_ns
    return saving_of(stage, low, expected, high, kept=1.0 - min(max(expected, 0.0) / idle, 1.0) if idle > 0 else 1.0)


def unit_time(stage: StageFigures, ns: float) -> str:
    """Return the text of a time per unit, from a sum over all units."""
    return duration(stage.per_unit(ns), 3)


def place_of(evidence: Evidence, stage: StageFigures) -> Place:
    """Return the stage and how often its unit occurs in a request, or in the trace if no request is known."""
    timings = evidence.facts.timings
    if isinstance(timings, Missing):
        return stage.name, stage.units
    return stage.name, timings.workload.decode_steps if stage.by_token else 1


# --- from kernel time to wall time ------------------------------------------------------------------------------------

HOST_BOUND = 0.5
"""If the device is busy for less than this share of a stage, a faster kernel only lengthens a gap."""
DEVICE_BOUND = 0.9
"""From this busy share on, all saved kernel time is saved wall time. Between the two, the counted share grows linearly."""
INFLATED = 3.0
"""If a profiler slows a stage more than this many times, the proportions of its gaps say little about the unprofiled ones."""


@dataclass(frozen=True)
class WallClockSaving:
    """How much of a kernel-time saving reaches the wall clock."""

    bounds: Bounds
    claim: str = ""
    """A sentence to append to the claim."""
    because: str = ""
    """A reason to add to the confidence; empty if there is nothing to add."""
    certain: bool = False
    """Whether it is certain that nothing is saved."""


def wall_clock_saving(stage: StageEvidence, bounds: Bounds) -> WallClockSaving:
    """Count kernel time only as far as the stage waits for the device and kernels do not run concurrently."""
    low, expected, high = bounds
    share = min(max((stage.busy_share - HOST_BOUND) / (DEVICE_BOUND - HOST_BOUND), 0.0), 1.0)
    idle = f"the device is idle for {percentage(1 - stage.busy_share)} of {stage.name}"
    if share == 0 and stage.busy_share * (1.0 if stage.unprofiled else INFLATED) < HOST_BOUND:
        why = "faster kernels only lengthen the gaps; first remove what the device waits for"
        return WallClockSaving((0, 0, 0), f"Changing this saves nothing now: {idle}.", why, certain=True)
    if share == 0:
        why = "under the profiler, faster kernels only lengthen the gaps; without it the gaps are shorter"
        return WallClockSaving((0, 0, high), f"Under the profiler, changing this saves nothing: {idle}.", why)
    alone = stage.overlap
    if share == 1 and alone == 1:
        return WallClockSaving(bounds)
    reasons = []
    if share < 1:
        reasons.append(f"{idle}, so {percentage(share)} of the saved kernel time shortens the stage")
    if round(alone, 3) < 1:
        reasons.append(f"kernels run concurrently, so they cover only {percentage(alone, 1)} of their summed time")
    worst = low * alone if share == 1 else 0.0
    return WallClockSaving((worst, expected * share * alone, high), because="; ".join(reasons))

"""The analysis of several ranks as plain records, which are printed as JSON and shown as a page. A missing number is None."""

from collections.abc import Sequence

import msgspec

from llm_perf_opt.analysis.trace.document import ProblemLine


class HostLine(msgspec.Struct, frozen=True):
    """The clock of one host."""

    host: str
    """Empty if the traces do not state it."""
    ranks: list[int]
    offset_ns: int | None
    """How far its clock is ahead of the first host's; None if the collectives do not show it."""
    residual_ns: int | None
    """The spread of the differences that the offset was estimated from: times of different hosts agree within it."""
    pairs: int
    """Collectives that the offset was estimated from; 0 for the host that the others are compared with."""
    drift_ppm: float = 0.0
    """How much faster its clock ran, in millionths; 0 if the collectives show no drift. Times are given without it."""


class RankLine(msgspec.Struct, frozen=True):
    """One rank. Its budget: computing + waiting + transferring + communication not divided + idle = span; busy + idle = span."""

    rank: int
    file: str
    busy_ns: int | None
    idle_ns: int | None
    exposed_comm_ns: int | None
    """Time in which a collective ran and nothing else computed: waiting, transferring, and what cannot be divided into them."""
    offset_ns: int | None
    """How far its clock is ahead of that of the first host with a known offset; None if unknown."""
    host: str
    device: str
    span_ns: int | None
    comm_ns: int | None
    """Time in which a collective ran; what is not exposed overlaps with computation."""
    compute_ns: int | None
    """Busy time without exposed communication."""
    wait_ns: int | None
    """Exposed time in collectives before their last rank entered them; None if it is known for no collective."""
    transfer_ns: int | None
    """Exposed time after that."""
    collectives: int
    last: int | None
    """Collectives that it was the last to enter; None if the last rank is known for none of its collectives."""
    late_ns: int | None
    """How much later than the second-to-last rank it entered those, summed."""
    undivided_ns: int | None = None
    """Exposed time in collectives whose waiting is unknown."""
    newly_late_ns: int | None = None
    """What the job would save if the rank took no longer than the others for the same work; None if nothing compares them."""
    delay_why: str = ""
    """Why that is unknown, or what it cannot include."""
    late_start_ns: int = 0
    """What the job would save if the recorded work of the rank began with that of the others. Traces do not show why it began
    later: it is not in its delay."""
    why: str = ""
    """Why it has no collectives, or no figures at all."""
    analysis: msgspec.Raw | None = None
    """The analysis of its trace alone."""


class CollectiveLine(msgspec.Struct, frozen=True):
    """One collective, on all ranks that took part in it."""

    index: int
    kind: str
    bytes: int | None
    """The larger of a rank's input and output."""
    ranks: list[int]
    start_skew_ns: int | None
    """From the first to the last rank that entered it; None if unknown or below what the clocks of several hosts can tell."""
    last_rank: int | None
    """The rank that entered it last; None if the clocks cannot tell."""
    transfer_ns: int | None
    """From the entry of the last rank until all have left; None if unknown."""
    group: str
    group_size: int | None
    wait_ns: int | None
    """Time that all other ranks waited for the last one, summed."""
    late_ns: int | None
    """How much later than the second-to-last rank the last one entered it; None if no rank waits for it."""
    step: str
    """Empty if it is in no step, or ranks disagree."""
    cause: str
    """The operator that took longer on the last rank than on the others since the previous collective.

    Empty if nothing explains half of the lateness.
    """
    cause_ns: int | None
    """How much longer."""
    cause_on: str
    """`device` or `host`; empty if the rank was behind before."""
    missing: list[int]
    """Ranks of the group whose trace does not have it."""
    mismatched: bool
    """Whether ranks disagree on kind or size."""
    why: str = ""
    """Why the waiting is unknown; empty if it is known."""
    newly_late_ns: int | None = None
    """The part of the last rank's delay that arose since its previous collective; None if unknown."""


class CollectiveKindLine(msgspec.Struct, frozen=True):
    """All collectives of one kind, size and group."""

    kind: str
    bytes: int | None
    group: str
    group_size: int | None
    count: int
    transfer_ns: int | None
    """Of those whose transfer is known, summed."""
    median_transfer_ns: int | None
    bus_bytes_per_s: float | None
    """Of the median transfer: bytes · factor / time, the factor being that of nccl-tests."""
    bus_why: str
    """Why there is no bus bandwidth; empty if there is."""
    link_bytes_per_s: float | None
    """The datasheet peak of the link, one direction."""
    link_why: str
    wait_ns: int | None
    """Waiting of all early ranks in those whose waiting is known, summed."""
    median_skew_ns: int | None
    transfers: int = 0
    """Collectives whose transfer is known."""
    waits: int = 0
    """Collectives whose waiting is known."""
    why: str = ""
    """Why it is not known for the first of the others."""


class RankStepLine(msgspec.Struct, frozen=True):
    """One step on all ranks."""

    step: str
    collectives: int
    slowest_wall_ns: int
    fastest_wall_ns: int
    wait_ns: int | None
    """Waiting of all early ranks in its collectives, summed; None if it is known for none of them."""
    straggler: int | None
    """The rank that fell behind most; None if no rank was last in any of its collectives."""
    late_ns: int | None
    """How much later than the second-to-last rank it entered the collectives of the step, summed; None without a straggler."""
    cause: str
    """The operator with the most time among the causes; that it was behind already only if there is no other."""
    newly_late_ns: int | None = None
    """The part of its delay that arose in the step."""


class CauseLine(msgspec.Struct, frozen=True):
    """What made one rank late, over all collectives it was last in."""

    rank: int
    cause: str
    cause_on: str
    collectives: int
    cause_ns: int
    """How much longer it took than on the other ranks, at most as much as the rank was late, summed."""
    late_ns: int


class RanksAnalysis(msgspec.Struct, frozen=True):
    """The analysis of several ranks of one job."""

    source: str
    complete: bool
    """Whether every trace is complete."""
    problems: list[ProblemLine]
    world_size: int | None
    hosts: list[HostLine]
    ranks: list[RankLine]
    collectives: list[CollectiveLine]
    """In the order in which they happened: by the entry of the last rank."""
    collective_kinds: list[CollectiveKindLine]
    steps: list[RankStepLine]
    causes: list[CauseLine]


_MOST_RUNS = 16


def listed_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, three or more in a row as a range."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(parts[:_MOST_RUNS]) + (" …" if len(parts) > _MOST_RUNS else "")

"""Times requests that several ranks run together: the time of a request is that of the slowest rank."""

import hashlib
from typing import Any, Protocol, TypeVar

import msgspec

from llm_perf_opt.core.errors import CaptureError
from llm_perf_opt.core.records import Iteration
from llm_perf_opt.runners.child import send
from llm_perf_opt.runners.measure.annotations import StageMarker, unmarked
from llm_perf_opt.runners.measure.clock import Clock
from llm_perf_opt.runners.measure.meter import Meter, Steppable

T = TypeVar("T")


class Exchange(Protocol):
    """How ranks exchange values."""

    rank: int

    def gather_as(self, value: T, kind: type[T], what: str) -> list[T]:
        """Return the values of all ranks, by rank."""

    def wait_for_all(self, what: str) -> None:
        """Wait until every rank has called this."""

    def agree(self, value: T, kind: type[T]) -> T:
        """Return the value of rank 0."""


class RankMeter(Meter):
    """Runs every request on all ranks at once, from a common start, and returns the times of the slowest."""

    def __init__(
        self,
        runner: Steppable,
        prompts: Any,
        new_tokens: int,
        clock: Clock,
        marker: StageMarker = unmarked,
        *,
        ranks: Exchange,
    ) -> None:
        super().__init__(runner, prompts, new_tokens, clock, marker)
        self._ranks = ranks
        self.own: list[Iteration] = []
        """The requests as this rank timed them."""

    def iterate(self) -> Iteration:
        """Run one request on all ranks."""
        send("position", text=f"request {len(self.own) + 1}")
        self._ranks.wait_for_all("the start of a request")
        self.own.append(super().iterate())
        return slowest(self._ranks.gather_as(self.own[-1], Iteration, "the end of a request"))

    def tokens(self) -> list[list[int]]:
        """Return the tokens of the latest request; raise a CaptureError if the ranks have different ones."""
        found = super().tokens()
        digest = hashlib.sha256(msgspec.json.encode(found)).hexdigest()
        digests = self._ranks.gather_as(digest, str, "the tokens of a request")
        if len(set(digests)) > 1:
            raise disagreement(self._ranks.gather_as(found, list[list[int]], "the tokens of all ranks"))
        return found

    def _agreed(self, seconds: float) -> float:
        return self._ranks.agree(seconds, float)


def slowest(iterations: list[Iteration]) -> Iteration:
    """Return the request of the rank that took longest."""
    return max(iterations, key=lambda iteration: iteration.wall_ns)


def disagreement(tokens: list[list[list[int]]]) -> CaptureError:
    """Return the error for ranks with different tokens: which rank differs from rank 0, and where first."""
    places = [(rank, *_first_difference(tokens[0], other)) for rank, other in enumerate(tokens) if other != tokens[0]]
    rank, sequence, position = min(places, key=lambda place: (place[2], place[0]))
    here, there = (rows[sequence][position] if position < len(rows[sequence]) else None for rows in (tokens[0], tokens[rank]))
    differing = ", ".join(str(place[0]) for place in places)
    return CaptureError(
        f"The ranks disagree on the tokens: rank {differing} differs from rank 0. First at new token {position + 1} of sequence "
        f"{sequence + 1}: {here} on rank 0, {there} on rank {rank}.",
        "The ranks do not hold parts of the same model, or their collectives return different values.",
    )


def _first_difference(one: list[list[int]], other: list[list[int]]) -> tuple[int, int]:
    """Return the sequence and the position of the earliest difference."""
    found = []
    for sequence, (left, right) in enumerate(zip(one, other, strict=True)):
        common = min(len(left), len(right))
        position = next((place for place in range(common) if left[place] != right[place]), common)
        if left != right:
            found.append((position, sequence))
    position, sequence = min(found)
    return sequence, position

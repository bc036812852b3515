"""Requests of several ranks: the slowest rank's time counts, all decide alike, and their tokens must be equal."""

from typing import Any, TypeVar

import pytest

from builders import MS, iteration
from llm_perf_opt.core.errors import CaptureError
from llm_perf_opt.core.records import Iteration
from llm_perf_opt.runners.measure.clock import HostClock
from llm_perf_opt.runners.measure.meter import Effort
from llm_perf_opt.runners.measure.rank_meter import RankMeter, disagreement, slowest

T = TypeVar("T")


class Steps:
    """Counts tokens up."""

    def __init__(self, first: int = 0) -> None:
        self._first = first

    def begin(self) -> None: ...

    def prefill(self, prompts: int) -> int:
        return prompts + self._first

    def decode_step(self, token: int) -> int:
        return token + 1

    def to_lists(self, tokens: list[int]) -> list[list[int]]:
        return [list(tokens)]


class OtherRank:
    """An exchange with one other rank, whose requests take `slower_ns` longer and whose tokens may differ."""

    rank = 0

    def __init__(self, slower_ns: int = 0, tokens: list[list[int]] | None = None, elapsed_s: float = 0.0) -> None:
        self._slower_ns, self._tokens, self._elapsed_s = slower_ns, tokens, elapsed_s
        self.waited: list[str] = []

    def gather_as(self, value: T, kind: type[T], what: str) -> list[T]:
        other: Any = value
        if isinstance(value, Iteration):
            other = Iteration(value.started_ns, value.wall_ns + self._slower_ns, value.prefill_ns, value.steps_ns)
        elif self._tokens is not None:
            other = self._tokens if isinstance(value, list) else "another digest"
        return [value, other]

    def wait_for_all(self, what: str) -> None:
        self.waited.append(what)

    def agree(self, value: T, kind: type[T]) -> T:
        return self._elapsed_s  # type: ignore[return-value]


def meter(ranks: OtherRank) -> RankMeter:
    return RankMeter(Steps(), 5, 3, HostClock(), ranks=ranks)


def test_the_slowest_rank_counts_and_the_own_times_are_kept() -> None:
    ranks = OtherRank(slower_ns=7 * MS)
    timed = meter(ranks)
    found = timed.iterate()
    assert found.wall_ns == timed.own[0].wall_ns + 7 * MS
    assert ranks.waited == ["the start of a request"]
    fast, slow = iteration(wall_ns=200 * MS), iteration(wall_ns=300 * MS)
    assert slowest([fast, slow, fast]) is slow


def test_all_ranks_stop_when_the_first_does() -> None:
    """The clock of rank 0 is past the limit, whatever this rank's says."""
    effort = Effort(max_warmup=5, min_repeats=1, max_repeats=50, ci_target=0.0001, time_limit_s=10)
    measured = meter(OtherRank(elapsed_s=11.0)).measure(effort)
    assert (len(measured.warmup), len(measured.iterations)) == (1, 1)
    assert "time_limit_s" in measured.stopped
    assert measured.tokens == [[5, 6, 7]]


def test_ranks_with_other_tokens_end_the_pass() -> None:
    timed = meter(OtherRank(tokens=[[5, 9, 7]]))
    timed.iterate()
    with pytest.raises(CaptureError) as caught:
        timed.tokens()
    assert "rank 1 differs from rank 0" in caught.value.fact
    assert "new token 2 of sequence 1: 6 on rank 0, 9 on rank 1" in caught.value.fact


def test_the_earliest_difference_is_named() -> None:
    same, late, early = [[1, 2, 3], [4, 5, 6]], [[1, 2, 9], [4, 5, 6]], [[1, 2, 3], [7, 5, 6]]
    words = disagreement([same, late, early]).fact
    assert "rank 1, 2 differs" in words
    assert "new token 1 of sequence 2: 4 on rank 0, 7 on rank 2" in words


class Drifting(Steps):
    """Its tokens differ from request to request."""

    def begin(self) -> None:
        self._first += 1


class CountsTokens(OtherRank):
    """Counts how often tokens are compared."""

    compared = 0

    def gather_as(self, value: T, kind: type[T], what: str) -> list[T]:
        self.compared += what == "the tokens of a request"
        return super().gather_as(value, kind, what)


def test_tokens_are_compared_after_every_repeat_even_if_they_do_not_repeat() -> None:
    ranks = CountsTokens()
    timed = RankMeter(Drifting(), 5, 3, HostClock(), ranks=ranks)
    measured = timed.measure(Effort(max_warmup=1, min_repeats=4, max_repeats=4, ci_target=0.0001, time_limit_s=600))
    assert not measured.tokens_repeat
    assert len(measured.iterations) == 4
    assert ranks.compared == 1 + 4

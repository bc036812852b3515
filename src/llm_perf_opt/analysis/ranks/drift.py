"""Clocks of hosts that run at different speeds: the differences of the ends of common collectives grow with time.

The drift of each further host is the usual slope of these differences, and its times are put on the speed of the first.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_perf_opt.analysis.ranks.clocks import Clocks, matched_on_one_clock, shared_ends
from llm_perf_opt.analysis.ranks.matching import CLOCKS_AGREE_NS, GroupMatch
from llm_perf_opt.analysis.ranks.rank_trace import RankTrace
from llm_perf_opt.traces.events import Int64

_LEAST_ENDS = 8
"""The least number of collectives that show a drift."""
_LARGEST = 1e-3
"""No clock drifts by more: something else changes."""
_ROUNDS = 3
_MUCH = 2
"""How many times closer together the differences must be without the drift."""
_NEAR = 0.9
"""The share of the differences that are compared."""


def at_one_speed(ranks: Sequence[RankTrace]) -> tuple[Sequence[RankTrace], list[float], tuple[Clocks, list[GroupMatch]]]:
    """Return the ranks with times at one speed, how much faster the clock of each ran (0: the same), their offsets and matches.

    Offsets are known better without the drift, and the drift with better offsets.
    """
    drifts, found = [0.0] * len(ranks), matched_on_one_clock(ranks)
    for _ in range(_ROUNDS):
        ranks, more = _without_drift(ranks, *found)
        if not any(more):
            break
        drifts = [drift + new for drift, new in zip(drifts, more, strict=True)]
        found = matched_on_one_clock(ranks)
    return ranks, drifts, found


def _without_drift(
    ranks: Sequence[RankTrace], clocks: Clocks, found: Sequence[GroupMatch]
) -> tuple[list[RankTrace], list[float]]:
    same, drifts = list(ranks), [0.0] * len(ranks)
    offsets = clocks.offsets(len(ranks))
    pending = [number for number, clock in enumerate(clocks.hosts) if clock.offset_ns is not None]
    pending.sort(key=lambda number: -sum(len(ranks[index].collectives) for index in clocks.hosts[number].traces))
    known: set[int] = set(clocks.hosts[pending.pop(0)].traces) if pending else set()
    while pending:
        shared = [_ends(same, found, set(clocks.hosts[number].traces), known, offsets) for number in pending]
        most = max(range(len(pending)), key=lambda place: len(shared[place][0]))
        number = pending.pop(most)
        mine, drift = clocks.hosts[number].traces, _drift(*shared[most])
        own, others = shared[most]
        offset = _middle(own - drift * (own - _origin(ranks, mine)) - others) if len(own) else offsets[mine[0]]
        for index in mine:
            offsets[index] = offset
            if drift:
                drifts[index], same[index] = drift, _at_speed(ranks[index], drift, _origin(ranks, mine))
        known |= set(mine)
    return same, drifts


def _ends(
    ranks: Sequence[RankTrace], found: Sequence[GroupMatch], own: set[int], known: set[int], offsets: Sequence[int | None]
) -> tuple[Int64, Int64]:
    """Return the ends of the collectives on both sides, by time."""
    parts = list(shared_ends(ranks, found, own, known, offsets))
    mine, others = (np.concatenate([np.empty(0, np.int64), *(part[side] for part in parts)]) for side in (0, 1))
    order = np.argsort(mine, kind="stable")
    return mine[order], others[order]


def _drift(mine: Int64, others: Int64) -> float:
    half = len(mine) // 2
    if len(mine) < _LEAST_ENDS:
        return 0.0
    difference = mine - others
    apart = np.maximum(mine[half:] - mine[: len(mine) - half], 1)
    slope = float(np.median((difference[half:] - difference[: len(mine) - half]) / apart))
    before, after = _spread(difference), _spread(difference - slope * (mine - mine[0]))
    shown = abs(slope) * (mine[-1] - mine[0]) > CLOCKS_AGREE_NS and _MUCH * after < before and abs(slope) < _LARGEST
    return slope if shown else 0.0


def _spread(values: NDArray[np.number[Any]]) -> float:
    return float(np.quantile(np.abs(values - np.median(values)), _NEAR))


def _middle(values: NDArray[np.number[Any]]) -> int:
    return round(float(np.median(values)))


def _origin(ranks: Sequence[RankTrace], mine: Sequence[int]) -> int:
    return min(int(ranks[index].collectives.start_ns[0]) for index in mine)


def _at_speed(trace: RankTrace, drift: float, origin: int) -> RankTrace:
    """Return a rank with the times that a clock without the drift shows; both agree at the origin."""

    def at(times: Int64) -> Int64:
        found: Int64 = times - np.rint(drift * (times - origin)).astype(np.int64)
        return found

    met, done, alone = trace.collectives, trace.work, trace.exposed
    collectives = replace(met, start_ns=at(met.start_ns), end_ns=at(met.end_ns))
    work = replace(done, start_ns=at(done.start_ns), end_ns=at(done.end_ns))
    exposed = replace(alone, start_ns=at(alone.start_ns), end_ns=at(alone.end_ns))
    first = None if trace.first_ns is None else int(at(np.array([trace.first_ns]))[0])
    return replace(trace, first_ns=first, collectives=collectives, work=work, exposed=exposed)

"""How much longer each rank took than the others for the same own work, beyond the usual scatter."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_perf_opt.analysis.ranks.matching import CLOCKS_AGREE_NS
from llm_perf_opt.analysis.ranks.programs import Chain, Program
from llm_perf_opt.traces.events import Bool, Int64

_BEYOND = 6
"""How many times the scatter an excess must be to count."""
_NEAREST, _TO_DEVIATION = 0.25, 3.139
"""The share of values that are surely not delayed, even if several ranks are late; and the standard deviation of normal values
as a multiple of the distance from the middle within which this share lies."""
_OF_MIDDLE, _FAR, _ROUNDS = 1.4826, 3, 8
"""The deviation as a multiple of the median distance, how many deviations away a value is left out, and how often at most."""
_MOST_APART = 8
"""Repetitions that are compared with each other are fewer than this apart."""
_OF_MEDIAN = 1.2533
"""The standard error of the median of normal values as a multiple of that of their mean."""
_LEAST_OWN = 4
"""The least number of times a rank must have done some work for its own median to show what is usual."""


@dataclass(frozen=True)
class ProgramExcess:
    """The excess of the ranks of a program. Never negative."""

    work_ns: list[Int64]
    """Per rank and event of its chain, in the own time since the previous event; then in what follows the last."""
    lag_ns: list[Int64]
    """Per rank and collective, between what it waited for and its entry."""
    known: bool = True
    """Whether there was anything to compare with."""


def excess_of(program: Program) -> ProgramExcess:
    """Return the excess of every rank over the median of the others or, if it is alone, over its own usual time."""
    if len(program.chains) == 1:
        return _of_repetitions(program.chains[0], program.kinds)
    lag = np.stack([chain.lag_ns for chain in program.chains], axis=1)
    return ProgramExcess(_of_work(program), list(_beyond_scatter(lag, program.kinds).T))


def _of_work(program: Program) -> list[Int64]:
    """Return the excess of the work between events or, if the ranks waited for different collectives, between their entries."""
    first = program.chains[0]
    same = all(
        np.array_equal(chain.place, first.place) and np.array_equal(chain.is_wait, first.is_wait) for chain in program.chains
    )
    kept = [np.arange(len(chain.place)) if same else np.flatnonzero(~chain.is_wait) for chain in program.chains]
    done = np.stack(
        [np.append(chain.own_ns[rows], chain.own_at_end_ns) for chain, rows in zip(program.chains, kept, strict=True)], axis=1
    )
    kinds = 2 * program.kinds[first.place[kept[0]]] + first.is_wait[kept[0]]
    between = np.append(-1, kinds) * (kinds.max(initial=0) + 2) + np.append(kinds, -1)
    excess = _beyond_scatter(np.diff(done, axis=0, prepend=0), between)
    found = []
    for column, (chain, rows) in enumerate(zip(program.chains, kept, strict=True)):
        mine = np.zeros(len(chain.place) + 1, np.int64)
        mine[np.append(rows, len(chain.place))] = excess[:, column]
        found.append(mine)
    return found


def _of_repetitions(chain: Chain, kinds: Int64) -> ProgramExcess:
    """Return the excess of a rank whose work no other does, over its own usual time, if its collectives and its work repeat."""
    count, pieces = len(kinds), len(chain.of_pieces_ns)
    nothing = np.zeros(len(chain.place) + 1, np.int64)
    for often in range(min(count, pieces), _LEAST_OWN - 1, -1):
        if not count % often and not pieces % often and (kinds.reshape(often, -1) == kinds[: count // often]).all():
            excess = _beyond_scatter(chain.of_pieces_ns[:, None], np.arange(pieces) % (pieces // often))[:, 0]
            lag = _beyond_scatter(chain.lag_ns[:, None], np.arange(count) % (count // often))[:, 0]
            before = np.concatenate([[0], np.cumsum(excess)])
            work = np.diff(before[np.append(chain.piece, pieces)], prepend=0)
            return ProgramExcess([work], [lag])
    return ProgramExcess([nothing], [np.zeros(count, np.int64)], known=False)


def late_starts(began_ns: Int64) -> Int64:
    """Return how much later than the median of the others each of several ranks began; 0 below what clocks can tell."""
    late = _excess(began_ns[None, :])[0]
    return np.where(late > CLOCKS_AGREE_NS, late, 0)


def _beyond_scatter(values: Int64, kinds: Int64) -> Int64:
    """Return the excess. What repeats too rarely to show its scatter is taken to scatter like the rest, in proportion."""
    found = np.zeros(values.shape, np.int64)
    order = np.argsort(kinds, kind="stable")
    groups = [rows for rows in np.split(order, np.flatnonzero(np.diff(kinds[order])) + 1) if len(rows)]
    scatter = [_scatter(values[rows]) if values.shape[1] > 1 or len(rows) > 1 else 0.0 for rows in groups]
    typical = [float(np.median(values[rows])) for rows in groups]
    often = [of / mean for of, mean, rows in zip(scatter, typical, groups, strict=True) if len(rows) >= _LEAST_OWN and mean > 0]
    usual = float(np.median(often)) if often else math.inf
    for rows, of, mean in zip(groups, scatter, typical, strict=True):
        rarely = len(rows) < _LEAST_OWN and mean > 0
        found[rows] = _of_one_kind(values[rows], min(of, usual * mean) if rarely else of)
    return found


def _of_one_kind(values: Int64, scatter: float) -> Int64:
    """Return the excess of each rank in the repetitions of the same work: what is usual for it, and what stands out."""
    excess = _excess(values)
    usual = _lower_median(excess)
    least = max(_BEYOND * scatter * _OF_MEDIAN / math.sqrt(len(values)), CLOCKS_AGREE_NS)
    steady = np.where(usual > least, usual, 0)
    beyond = max(_BEYOND * scatter, CLOCKS_AGREE_NS)
    apart: Bool = np.abs(excess - steady) > beyond
    return np.asarray(np.where(~apart, steady, np.where(excess > beyond, excess, 0)), np.int64)


def _excess(values: Int64) -> Int64:
    """Return how far values are above the median of the other ranks or, of one rank, above its own."""
    return values - (_lower_median(values) if values.shape[1] == 1 else _median_of_others(values))


def _lower_median(values: Int64) -> Int64:
    """Return the lower median of each column: if half of the values are late, it is not."""
    found: Int64 = np.sort(values, axis=0)[(len(values) - 1) // 2]
    return found


def _scatter(values: Int64) -> float:
    """Return the deviation of the values that nothing delayed.

    Of four ranks or more, it is that from the middle of each repetition or, if it is smaller, that between the repetitions of a
    rank together with that between ranks; of fewer, that between the repetitions.
    """
    count, ranks = values.shape
    compared = values if ranks >= _LEAST_OWN else _excess(values)
    apart = range(1, min(count, _MOST_APART))
    differences = [np.abs(compared[by:] - compared[:-by]).reshape(-1) for by in apart]
    within = _of_distances(np.concatenate(differences) / math.sqrt(2)) if differences else None
    if ranks < _LEAST_OWN:
        return within or 0.0
    across = _of_distances(_from_the_middle(values))
    if within is None or within >= across:
        return across
    between = _from_the_middle(_lower_median(values)[None, :])
    return min(across, math.hypot(within, _TO_DEVIATION * float(np.quantile(between, _NEAREST, method="lower"))))


def _from_the_middle(values: Int64) -> Int64:
    """Return how far the others are from the middle of each row."""
    ordered, middle = np.sort(values, axis=1), (values.shape[1] - 1) // 2
    found: Int64 = np.delete(np.abs(ordered - ordered[:, middle : middle + 1]), middle, axis=1).reshape(-1)
    return found


def _of_distances(around: NDArray[np.number[Any]]) -> float:
    """Return the deviation that distances show: the nearest quarter shows it roughly, even if half of the values are late; what
    is far beyond that is left out."""
    found = _TO_DEVIATION * float(np.quantile(around, _NEAREST))
    for _ in range(_ROUNDS):
        closer = _OF_MIDDLE * float(np.median(around[around <= _FAR * found]))
        if closer >= found:
            return closer
        found = closer
    return found


def _median_of_others(values: Int64) -> Int64:
    """Return, per row and column, the median of the other columns."""
    count = values.shape[1]
    order = np.argsort(values, axis=1, kind="stable")
    rank = np.argsort(order, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=1)
    low, high = (count - 2) // 2, (count - 1) // 2
    picked = [np.take_along_axis(ordered, np.where(rank <= middle, middle + 1, middle), axis=1) for middle in (low, high)]
    return np.asarray((picked[0] + picked[1]) // 2)

"""Put the ranks on one clock. Ranks of one host share its clock, so their times are compared as they are.

Collectives end on all ranks at about the same time. For each further host, the median difference of these ends is the offset of
its clock, and the spread of the differences is the residual: differences below it mean nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llm_perf_opt.analysis.ranks.matching import GroupMatch, gathered, match_collectives
from llm_perf_opt.analysis.ranks.rank_trace import Occurrences, RankGroup, RankTrace
from llm_perf_opt.analysis.stats import least_values, percentile
from llm_perf_opt.traces.events import Int64
from llm_perf_opt.traces.nesting import NONE

MOST_SHIFT = 64
"""The windows of two traces may begin this many collectives apart."""
_LEAST_COMMON = 0.5
"""The least share of the shorter sequence that both must have at a shift."""
_LEAST_ALIKE = 0.25
"""The share of these that must end with the same difference: traces may lack collectives, which moves those after them."""
_ALONE = "\0"
"""Begins the name of a host that is not known and has one rank."""
_RESIDUAL = 0.95
"""The share of the differences that lie within the residual."""


@dataclass(frozen=True)
class HostClock:
    """The clock of one host."""

    host: str
    """Empty if the traces do not state it."""
    traces: tuple[int, ...]
    """Indices of its ranks."""
    offset_ns: int | None
    """How far its clock is ahead of the first host's; None if no collective connects them."""
    residual_ns: int
    """Differences of times between this host and others are not meaningful below it; 0 for the first host."""
    pairs: int
    """Collectives that the offset was estimated from."""


@dataclass(frozen=True)
class Clocks:
    """The clocks of all hosts."""

    hosts: tuple[HostClock, ...]

    def offsets(self, ranks: int) -> list[int | None]:
        """Return the offset of each rank."""
        found: list[int | None] = [None] * ranks
        for host in self.hosts:
            for index in host.traces:
                found[index] = host.offset_ns
        return found


def matched_on_one_clock(ranks: Sequence[RankTrace]) -> tuple[Clocks, list[GroupMatch]]:
    """Estimate the clocks of all hosts and match the collectives."""
    hosts = _hosts(ranks, apart=False)
    clocks, found = _estimated(ranks, hosts)
    if any(not trace.host for trace in ranks) and any(group.contradicted for group in found):
        # the traces do not state their host, and their clocks do not fit together
        return _estimated(ranks, _hosts(ranks, apart=True))
    return clocks, found


def _hosts(ranks: Sequence[RankTrace], *, apart: bool) -> dict[str, list[int]]:
    """Return the ranks of each host. With `apart`, each rank without a host is on a host of its own."""
    hosts: dict[str, list[int]] = {}
    for index, trace in enumerate(ranks):
        alone = trace.own_clock or (apart and not trace.host)
        hosts.setdefault(f"{_ALONE}{index}" if alone else trace.host, []).append(index)
    return hosts


def _shown(host: str) -> str:
    return "" if host.startswith(_ALONE) else host


def _estimated(ranks: Sequence[RankTrace], hosts: dict[str, list[int]]) -> tuple[Clocks, list[GroupMatch]]:
    first, *others = hosts
    offsets: list[int | None] = [0 if index in hosts[first] else None for index in range(len(ranks))]
    pending = list(others)
    while pending:
        placed = next((name for name in pending if _place(ranks, hosts[name], offsets)), None)
        if placed is None:
            break
        pending.remove(placed)
    found = match_collectives(ranks, offsets)
    clocks = [HostClock(_shown(first), tuple(hosts[first]), 0, 0, 0)]
    for name in others:
        clocks.append(_refined(ranks, found, name, hosts[name], offsets))
        for index in hosts[name]:
            offsets[index] = clocks[-1].offset_ns
    widest = max(clock.residual_ns for clock in clocks)
    return Clocks(tuple(clocks)), match_collectives(ranks, offsets, 2 * widest)


def _place(ranks: Sequence[RankTrace], mine: Sequence[int], offsets: list[int | None]) -> bool:
    """Set the offset of a host by the collectives that one of its ranks shares with a rank whose offset is known."""
    pairs = [
        (min(len(_rows(ranks[one], group)), len(_rows(ranks[two], group))), one, two, group)
        for two in mine
        for group in ranks[two].groups
        for one, known in enumerate(offsets)
        if known is not None and group in ranks[one].groups
    ]
    for _, one, two, group in sorted(pairs, key=lambda pair: -pair[0])[:4]:
        difference = _first_difference(ranks[one], ranks[two], group)
        if difference is not None:
            for index in mine:
                offsets[index] = difference + (offsets[one] or 0)
            return True
    return False


def _rows(trace: RankTrace, group: RankGroup) -> Int64:
    return np.flatnonzero(trace.collectives.group == trace.groups.index(group))


def _first_difference(one: RankTrace, two: RankTrace, group: RankGroup) -> int | None:
    """Return the difference of the ends at the shift between the two sequences where most of them agree best."""
    rows = _rows(one, group), _rows(two, group)
    first, second = one.collectives.rows(rows[0]), two.collectives.rows(rows[1])
    if (first.sequence >= 0).all() and (second.sequence >= 0).all():
        _, left, right = np.intersect1d(first.sequence, second.sequence, return_indices=True)
        return _median(second.end_ns[right] - first.end_ns[left]) if len(left) else None
    codes: dict[tuple[str, int], int] = {}
    kinds = [_codes(one, first, codes), _codes(two, second, codes)]
    best: tuple[int, int, int] | None = None
    for shift in sorted(range(-MOST_SHIFT, MOST_SHIFT + 1), key=abs):
        low, high = max(0, -shift), min(len(first), len(second) - shift)
        if high - low < max(1, _LEAST_COMMON * min(len(first), len(second))):
            continue
        alike = kinds[0][low:high] == kinds[1][low + shift : high + shift]
        differences = (second.end_ns[low + shift : high + shift] - first.end_ns[low:high])[alike]
        least = max(3, math.ceil(_LEAST_ALIKE * (high - low)))
        if len(differences) >= min(least, high - low):
            width, middle = _densest(differences, min(least, len(differences)))
            best = min(best or (width, abs(shift), middle), (width, abs(shift), middle))
    return None if best is None else best[2]


def _densest(values: Int64, count: int) -> tuple[int, int]:
    """Return the width of the shortest interval with this many values, and their median."""
    ordered = np.sort(values)
    widths = ordered[count - 1 :] - ordered[: len(ordered) - count + 1]
    first = int(widths.argmin())
    return int(widths[first]), _median(ordered[first : first + count])


def _codes(trace: RankTrace, table: Occurrences, codes: dict[tuple[str, int], int]) -> Int64:
    """Return a number per collective that is the same for the same kind and size."""
    pairs = zip(table.kind.tolist(), table.size_bytes.tolist(), strict=True)
    return np.array([codes.setdefault((trace.names[kind], size), len(codes)) for kind, size in pairs], np.int64)


def _median(values: Int64) -> int:
    """Return the lower median, which is one of the values."""
    return int(np.sort(values)[(len(values) - 1) // 2])


def _refined(
    ranks: Sequence[RankTrace], found: Sequence[GroupMatch], name: str, mine: Sequence[int], offsets: Sequence[int | None]
) -> HostClock:
    """Return the clock of a host by all collectives that it shares with ranks whose offset is known."""
    own, known = set(mine), {index for index, offset in enumerate(offsets) if offset is not None} - set(mine)
    parts = [np.empty(0, np.int64)]
    for group in found:
        parts.append(_differences(ranks, group, own, known, offsets))
    differences = np.concatenate(parts)
    if not len(differences):
        return HostClock(_shown(name), tuple(mine), None, 0, 0)
    offset = _median(differences)
    apart = np.abs(differences - offset).tolist()
    enough = len(apart) >= least_values(_RESIDUAL)
    residual = round(percentile(apart, _RESIDUAL)) if enough else max(apart)
    return HostClock(_shown(name), tuple(mine), offset, residual, len(apart))


def _differences(
    ranks: Sequence[RankTrace], group: GroupMatch, own: set[int], known: set[int], offsets: Sequence[int | None]
) -> Int64:
    """Return, per collective with ranks on both sides, the difference of the median ends."""
    ends = []
    for side, shifted in ((own, False), (known, True)):
        columns = [place for place, index in enumerate(group.ranks.tolist()) if index in side]
        rows = group.rows[:, columns]
        times = [
            ranks[int(group.ranks[place])].collectives.end_ns - ((offsets[int(group.ranks[place])] or 0) if shifted else 0)
            for place in columns
        ]
        ends.append(_row_medians(gathered(times, rows, np.iinfo(np.int64).max), rows))
    both = (ends[0][1] > 0) & (ends[1][1] > 0) & ~group.mismatched
    difference: Int64 = (ends[0][0] - ends[1][0])[both]
    return difference


def _row_medians(values: Int64, rows: Int64) -> tuple[Int64, Int64]:
    """Return the lower median of the known values of each row, and their number."""
    count = (rows != NONE).sum(axis=1)
    if not values.shape[1]:
        return np.zeros(len(values), np.int64), count
    middle = np.maximum(count - 1, 0) // 2
    return np.sort(values, axis=1)[np.arange(len(values)), middle], count

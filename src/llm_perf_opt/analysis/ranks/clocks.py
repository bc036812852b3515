"""Put the ranks on one clock. Ranks of one host share its clock, so their times are compared as they are.

A collective that synchronizes ends on all ranks at about the same time. For each further host, the median difference of these
ends is the offset of its clock, and the spread of the differences is the residual: differences below it mean nothing.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llm_perf_opt.analysis.ranks.kinds import POINT_TO_POINT, SYNCHRONIZING, UNEVEN
from llm_perf_opt.analysis.ranks.matching import CLOCKS_AGREE_NS, ENOUGH, GroupMatch, gathered, match_collectives
from llm_perf_opt.analysis.ranks.rank_trace import Occurrences, RankGroup, RankTrace
from llm_perf_opt.analysis.ranks.transfers import transfers
from llm_perf_opt.analysis.stats import least_values, percentile
from llm_perf_opt.traces.events import Int64
from llm_perf_opt.traces.nesting import NONE

MOST_SHIFT = 64
"""The windows of two traces may begin this many collectives apart."""
LEAST_PAIRS = 3
"""The least number of common collectives that show an offset and its residual."""
_LEAST_COMMON = 0.5
"""The least share of the shorter sequence that both must have at a shift."""
_LEAST_ALIKE = 0.25
"""The share of these whose differences are compared: a missing collective moves those after it."""
_LEAST_COMPARED = 8
"""The least number of differences that are compared: few may be close by chance."""
_CLEARLY = 3
"""How many times wider the differences at every other shift must be."""
_MOST_COMPARED = 1024
"""How many collectives of two equal sequences are compared at other shifts."""
_MOST_ALIKE, _MUCH = 0.75, 4
"""The share of their differences that are compared, and how many times closer they must be at another shift than in order."""
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
    """Indices of its ranks that have collectives."""
    offset_ns: int | None
    """How far its clock is ahead of the first host's; None if the collectives do not show it."""
    residual_ns: int
    """Differences of times between this host and others are not meaningful below it; 0 for the host that others refer to."""
    pairs: int
    """Collectives that the offset was estimated from."""


@dataclass(frozen=True)
class Clocks:
    """The clocks of all hosts."""

    hosts: tuple[HostClock, ...]
    apart: bool = False
    """Whether ranks that seem to share a clock do not, so that each has an offset of its own."""

    def offsets(self, ranks: int) -> list[int | None]:
        """Return the offset of each rank."""
        found: list[int | None] = [None] * ranks
        for host in self.hosts:
            for index in host.traces:
                found[index] = host.offset_ns
        return found

    def host_of(self, ranks: int) -> list[int]:
        """Return the index of each rank's host; -1 for a rank without collectives."""
        found = [NONE] * ranks
        for number, host in enumerate(self.hosts):
            for index in host.traces:
                found[index] = number
        return found


def matched_on_one_clock(ranks: Sequence[RankTrace]) -> tuple[Clocks, list[GroupMatch]]:
    """Estimate the clocks of all hosts and match the collectives."""
    hosts = _hosts(ranks, apart=False)
    clocks, found = _estimated(ranks, hosts)
    reversed_ = _received_before_sent(ranks, clocks)
    if not (reversed_ or any(_doubtful(group) for group in found)) or all(len(mine) == 1 for mine in hosts.values()):
        return clocks, found
    # ranks that should share a clock do not fit together: the host is not stated, or several have the same name
    others, again = _estimated(ranks, _hosts(ranks, apart=True))
    offsets = others.offsets(len(ranks))
    exact = match_collectives(ranks, offsets, others.host_of(len(ranks)))  # a tolerance would make everything possible
    # a clock that nothing shows must not hide what is missing
    told = all(clock.offset_ns is not None for clock in others.hosts) or not _unfit(exact)
    if told and 2 * (_unfit(exact) + _received_before_sent(ranks, others)) < _unfit(found) + reversed_:
        return replace(others, apart=True), again
    return clocks, found


def _received_before_sent(ranks: Sequence[RankTrace], clocks: Clocks) -> int:
    """Return how many transfers end on the receiver before the sender begins them, as far as their clocks are known."""
    offsets = clocks.offsets(len(ranks))
    return sum(
        int((meeting.end_ns[:, 1] + CLOCKS_AGREE_NS < meeting.start_ns[:, 0]).sum())
        for meeting in transfers(ranks, [offset or 0 for offset in offsets])
        if meeting.directed and all(offsets[index] is not None for index in meeting.ranks.tolist())
    )


def _doubtful(group: GroupMatch) -> bool:
    """Return whether the clocks contradict the matches, or most collectives are missing on a rank that has others."""
    there = group.rows[:, (group.rows != NONE).any(axis=0)]
    wrong = (group.impossible | group.mismatched).mean() > 1 - ENOUGH
    return bool(group.contradicted or wrong or (there == NONE).any(axis=1).mean() > 0.5)


def _unfit(found: Sequence[GroupMatch]) -> int:
    contradicted = sum(len(group.rows) for group in found if group.contradicted)
    return contradicted + sum(
        int(group.impossible.sum() + group.mismatched.sum() + (group.rows == NONE).sum()) for group in found
    )


def _hosts(ranks: Sequence[RankTrace], *, apart: bool) -> dict[str, list[int]]:
    """Return the ranks with collectives of each host. With `apart`, each rank is on a host of its own."""
    hosts: dict[str, list[int]] = {}
    for index, trace in enumerate(ranks):
        if len(trace.collectives):
            hosts.setdefault(f"{_ALONE}{index}" if apart or trace.own_clock else trace.host, []).append(index)
    return hosts


def _estimated(ranks: Sequence[RankTrace], hosts: dict[str, list[int]]) -> tuple[Clocks, list[GroupMatch]]:
    """Estimate the clocks, beginning with the host that has the most collectives."""
    if not hosts:
        return Clocks(()), []
    root = max(hosts, key=lambda name: sum(len(ranks[index].collectives) for index in hosts[name]))
    offsets: list[int | None] = [0 if index in hosts[root] else None for index in range(len(ranks))]
    pending = [name for name in hosts if name != root]
    while pending:
        placed = next((name for name in pending if _place(ranks, hosts[name], offsets)), None)
        if placed is None:
            break
        pending.remove(placed)
    clocks = Clocks(tuple(HostClock(_shown(ranks, mine), tuple(mine), 0, 0, 0) for mine in hosts.values()))
    host_of = clocks.host_of(len(ranks))
    found = match_collectives(ranks, offsets, host_of)
    refined = []
    for name, clock in zip(hosts, clocks.hosts, strict=True):
        refined.append(clock if name == root else _refined(ranks, found, clock, offsets))
        for index in hosts[name]:
            offsets[index] = refined[-1].offset_ns
    clocks = Clocks(tuple(_from_the_first(refined)))
    widest = max(clock.residual_ns for clock in clocks.hosts)
    return clocks, match_collectives(ranks, clocks.offsets(len(ranks)), host_of, 2 * widest)


def _shown(ranks: Sequence[RankTrace], mine: Sequence[int]) -> str:
    return ranks[mine[0]].host


def _from_the_first(clocks: Sequence[HostClock]) -> list[HostClock]:
    """Return the clocks with offsets from the first that has one."""
    first = next(clock.offset_ns for clock in clocks if clock.offset_ns is not None)
    return [replace(clock, offset_ns=None if clock.offset_ns is None else clock.offset_ns - first) for clock in clocks]


def _place(ranks: Sequence[RankTrace], mine: Sequence[int], offsets: list[int | None]) -> bool:
    """Set the offset of a host by the collectives that one of its ranks shares with a rank whose offset is known."""
    known = _longest(ranks, [index for index, offset in enumerate(offsets) if offset is not None])
    own = _longest(ranks, mine)
    pairs = [(min(known[group][0], own[group][0]), known[group][1], own[group][1], group) for group in own if group in known]
    for _, one, two, group in sorted(pairs, key=lambda pair: -pair[0])[:4]:
        difference = _first_difference(ranks[one], ranks[two], group)
        if difference is not None:
            for index in mine:
                offsets[index] = difference + (offsets[one] or 0)
            return True
    return False


def _longest(ranks: Sequence[RankTrace], members: Sequence[int]) -> dict[RankGroup, tuple[int, int]]:
    """Return, per group, the rank that has the most of its collectives, after their number."""
    found: dict[RankGroup, tuple[int, int]] = {}
    for index in members:
        counts = np.bincount(ranks[index].collectives.group, minlength=len(ranks[index].groups)).tolist()
        for group, count in zip(ranks[index].groups, counts, strict=True):
            if not group.unclear and (group not in found or count > found[group][0]):
                found[group] = (count, index)
    return found


def _rows(trace: RankTrace, group: RankGroup) -> Int64:
    """Return the collectives of a group that synchronize its ranks; of a group of two, also the transfers between them."""
    wanted = SYNCHRONIZING | POINT_TO_POINT if group.size == 2 else SYNCHRONIZING
    kinds = [place for place, name in enumerate(trace.names) if name in wanted]
    mine = trace.collectives.group == trace.groups.index(group)
    return np.flatnonzero(mine & np.isin(trace.collectives.kind, kinds))


def _first_difference(one: RankTrace, two: RankTrace, group: RankGroup) -> int | None:
    """Return the difference of the ends; None if the two sequences do not show which of their collectives belong together."""
    first, second = one.collectives.rows(_rows(one, group)), two.collectives.rows(_rows(two, group))
    if not len(first) or not len(second):
        return None
    if (first.sequence >= 0).all() and (second.sequence >= 0).all():
        _, left, right = np.intersect1d(first.sequence, second.sequence, return_indices=True)
        return _median(second.end_ns[right] - first.end_ns[left]) if len(left) else None
    codes: dict[tuple[str, int], int] = {}
    kinds = _codes(one, first, codes), _codes(two, second, codes)
    if np.array_equal(*kinds) and not _fits_elsewhere(first.end_ns, second.end_ns, kinds[0]):
        return _median(second.end_ns - first.end_ns)
    return _clearest(_at_shifts(first.end_ns, second.end_ns, *kinds, _LEAST_ALIKE))


def _fits_elsewhere(first: Int64, second: Int64, kinds: Int64) -> bool:
    """Return whether two equal sequences fit much better if one is shifted: then they are of different windows."""
    first, second, kinds = (column[:_MOST_COMPARED] for column in (first, second, kinds))
    in_order, _ = _densest(second - first, math.ceil(_MOST_ALIKE * len(first)))
    return any(_MUCH * width < in_order for width, _ in _at_shifts(first, second, kinds, kinds, _MOST_ALIKE))


def _at_shifts(first: Int64, second: Int64, kinds: Int64, others: Int64, share: float) -> list[tuple[int, int]]:
    """Return, per shift between two sequences of ends, how close this share of the differences are, and their median."""
    found = []
    shorter = min(len(first), len(second))
    for shift in range(-MOST_SHIFT, MOST_SHIFT + 1):
        low, high = max(0, -shift), min(len(first), len(second) - shift)
        if high - low < _LEAST_COMMON * shorter:
            continue
        alike = kinds[low:high] == others[low + shift : high + shift]
        differences = (second[low + shift : high + shift] - first[low:high])[alike]
        least = max(_LEAST_COMPARED, math.ceil(share * (high - low)))
        if len(differences) >= least:
            found.append(_densest(differences, least))
    return found


def _clearest(found: Sequence[tuple[int, int]]) -> int | None:
    """Return the median with the closest differences; None if another one is almost as close and not the same."""
    if not found:
        return None
    width, middle = min(found)
    for wide, other in found:
        if wide <= _CLEARLY * width and abs(other - middle) > width + wide + CLOCKS_AGREE_NS:
            return None
    return middle


def _densest(values: Int64, count: int) -> tuple[int, int]:
    """Return the width of the shortest interval with this many values, and their median."""
    ordered = np.sort(values)
    widths = ordered[count - 1 :] - ordered[: len(ordered) - count + 1]
    first = int(widths.argmin())
    return int(widths[first]), _median(ordered[first : first + count])


def _codes(trace: RankTrace, table: Occurrences, codes: dict[tuple[str, int], int]) -> Int64:
    """Return a number per collective that is the same for the same kind and size, where ranks have the same."""
    pairs = zip((trace.names[kind] for kind in table.kind.tolist()), table.size_bytes.tolist(), strict=True)
    keys = [("" if kind in POINT_TO_POINT else kind, -1 if kind in UNEVEN else size) for kind, size in pairs]
    return np.array([codes.setdefault(key, len(codes)) for key in keys], np.int64)


def _median(values: Int64) -> int:
    """Return the lower median, which is one of the values."""
    return int(np.sort(values)[(len(values) - 1) // 2])


def _refined(
    ranks: Sequence[RankTrace], found: Sequence[GroupMatch], clock: HostClock, offsets: Sequence[int | None]
) -> HostClock:
    """Return the clock of a host by all collectives that it shares with ranks whose offset is known.

    The offset is unknown if the host could not be placed, or if too few collectives show it.
    """
    own = set(clock.traces)
    known = {index for index, offset in enumerate(offsets) if offset is not None} - own
    if offsets[clock.traces[0]] is None:
        return replace(clock, offset_ns=None)
    shared = list(shared_ends(ranks, found, own, known, offsets))
    differences = np.concatenate([np.empty(0, np.int64), *(mine - others for mine, others, _ in shared)])
    if len(differences) < max(LEAST_PAIRS, _LEAST_COMMON * sum(count for _, _, count in shared)):
        return replace(clock, offset_ns=None, pairs=len(differences))
    offset = _median(differences)
    apart = np.abs(differences - offset).tolist()
    enough = len(apart) >= least_values(_RESIDUAL)
    residual = round(percentile(apart, _RESIDUAL)) if enough else max(apart)
    return replace(clock, offset_ns=offset, residual_ns=residual, pairs=len(apart))


def shared_ends(
    ranks: Sequence[RankTrace], found: Sequence[GroupMatch], own: set[int], known: set[int], offsets: Sequence[int | None]
) -> Iterator[tuple[Int64, Int64, int]]:
    """Return the ends of collectives and transfers with ranks on both sides: on the own clock, and on the common one.

    Also returns how many there should be: if they are matched by time, as many as the side with fewer collectives has.
    """
    for group in found:
        yield _of_collectives(ranks, group, own, known, offsets)
    for meeting in transfers(ranks, [offset or 0 for offset in offsets]):
        first, second = meeting.ranks.tolist()
        if len({first, second} & own) == 1 and len({first, second} & known) == 1:
            mine = 0 if first in own else 1
            times = meeting.end_ns[:, mine] + (offsets[meeting.ranks[mine]] or 0)
            yield times, meeting.end_ns[:, 1 - mine], len(times)


def _of_collectives(
    ranks: Sequence[RankTrace], group: GroupMatch, own: set[int], known: set[int], offsets: Sequence[int | None]
) -> tuple[Int64, Int64, int]:
    """Return, per synchronizing collective of a group, the median end of each side."""
    ends = []
    for side, shifted in ((own, False), (known, True)):
        columns = [place for place, index in enumerate(group.ranks.tolist()) if index in side]
        rows = group.rows[:, columns]
        times = [
            ranks[int(group.ranks[place])].collectives.end_ns - ((offsets[int(group.ranks[place])] or 0) if shifted else 0)
            for place in columns
        ]
        ends.append(_row_medians(gathered(times, rows, np.iinfo(np.int64).max), rows))
    here, there = (count > 0 for _, count in ends)
    both = here & there & ~group.mismatched & group.synchronizing
    least = min(int((side & group.synchronizing).sum()) for side in (here, there)) if group.method == "time" else 0
    return ends[0][0][both], ends[1][0][both], least


def _row_medians(values: Int64, rows: Int64) -> tuple[Int64, Int64]:
    """Return the lower median of the known values of each row, and their number."""
    count = (rows != NONE).sum(axis=1)
    if not values.shape[1]:
        return np.zeros(len(values), np.int64), count
    middle = np.maximum(count - 1, 0) // 2
    return np.sort(values, axis=1)[np.arange(len(values)), middle], count

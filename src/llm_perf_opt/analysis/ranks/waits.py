"""Who waited for whom: skew, the last rank and transfer time of every collective, and what made the last rank late."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llm_perf_opt.analysis.ranks.clocks import Clocks
from llm_perf_opt.analysis.ranks.matching import GroupMatch, gathered
from llm_perf_opt.analysis.ranks.rank_trace import DEVICE_IDLE, LEFT_LATE, RankTrace
from llm_perf_opt.analysis.trace.intervals import sums
from llm_perf_opt.traces.events import Bool, Columns, Int64, UInt8
from llm_perf_opt.traces.nesting import NONE

_BEFORE, _AFTER = np.iinfo(np.int64).min // 2, np.iinfo(np.int64).max // 2
_CHUNK = 4096
"""Collectives whose causes are held in memory at once."""


@dataclass(frozen=True)
class GroupWaits:
    """The waits of one group, a row per collective."""

    match: GroupMatch
    start_ns: Int64
    """Per collective and rank, on the common clock."""
    end_ns: Int64
    known: Bool
    """Which ranks took part."""
    arrived_ns: Int64
    """The entry of the last rank."""
    skew_ns: Int64
    """-1 if it is below what the clocks can tell."""
    last: Int64
    """Index of the last trace, or -1."""
    late_ns: Int64
    """0 if the last rank is unknown."""
    transfer_ns: Int64
    """-1 if a clock is unknown."""
    wait_ns: Int64
    """-1 if the skew is unknown."""


def group_waits(ranks: Sequence[RankTrace], match: GroupMatch, clocks: Clocks) -> GroupWaits:
    """Return the waits of the collectives of a group."""
    offsets = clocks.offsets(len(ranks))
    tables = [ranks[index].collectives for index in match.ranks.tolist()]
    shifts = [offsets[index] or 0 for index in match.ranks.tolist()]
    known = match.rows != NONE
    start = gathered([table.start_ns - by for table, by in zip(tables, shifts, strict=True)], match.rows, _AFTER)
    end = gathered([table.end_ns - by for table, by in zip(tables, shifts, strict=True)], match.rows, _BEFORE)
    first, every = start.min(axis=1), np.arange(len(start))
    entered = np.where(known, start, _BEFORE)
    order = np.argsort(entered, axis=1, kind="stable")
    last = order[:, -1]
    arrived = entered[every, last]
    second = entered[every, order[:, -2]] if entered.shape[1] > 1 else np.full(len(start), _BEFORE)
    late = np.where(second == _BEFORE, 0, arrived - second)
    residual = _residuals(match, known, clocks)
    unknown = (known & np.array([offsets[index] is None for index in match.ranks.tolist()], np.bool_)).any(axis=1)
    skew = arrived - first
    vague = unknown | (skew < residual) | (known.sum(axis=1) < 2)
    tied = vague | (late < _between_hosts(match, order, known, clocks, residual)) | (late == 0)
    waits = np.where(known, arrived[:, None] - start, 0).sum(axis=1)
    return GroupWaits(
        match=match,
        start_ns=start,
        end_ns=end,
        known=known,
        arrived_ns=arrived,
        skew_ns=np.where(vague, -1, skew),
        last=np.where(tied, NONE, match.ranks[last]),
        late_ns=np.where(tied, 0, late),
        transfer_ns=np.where(unknown, -1, np.maximum(end.max(axis=1) - arrived, 0)),
        wait_ns=np.where(vague, -1, waits),
    )


def _host_of(match: GroupMatch, clocks: Clocks) -> Int64:
    host = {index: number for number, clock in enumerate(clocks.hosts) for index in clock.traces}
    return np.array([host[index] for index in match.ranks.tolist()], np.int64)


def _residuals(match: GroupMatch, known: Bool, clocks: Clocks) -> Int64:
    """Return, per collective, how well the clocks of its ranks agree: the two largest residuals of its hosts together."""
    found = np.zeros((len(known), len(clocks.hosts)), np.int64)
    hosts = _host_of(match, clocks)
    for number, clock in enumerate(clocks.hosts):
        found[:, number] = np.where(known[:, hosts == number].any(axis=1), clock.residual_ns, 0)
    present = np.stack([known[:, hosts == number].any(axis=1) for number in range(len(clocks.hosts))], axis=1)
    worst = np.sort(found, axis=1)[:, -2:].sum(axis=1)
    return np.where(present.sum(axis=1) > 1, worst, 0)


def _between_hosts(match: GroupMatch, order: Int64, known: Bool, clocks: Clocks, residual: Int64) -> Int64:
    """Return the least lead of the last rank over the one before that the clocks can tell: 0 if both are on one host."""
    if known.shape[1] < 2:
        return np.zeros(len(known), np.int64)
    host = _host_of(match, clocks)
    return np.where(host[order[:, -1]] == host[order[:, -2]], 0, residual)


# --- what made the last rank late -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LateCauses(Columns):
    """The cause per collective of a group."""

    name: "Int64"
    """Index of the operator's name, or -1."""
    ns: "Int64"
    """How much longer it took on the last rank than on the others on average."""
    on_device: "UInt8"
    """Whether it is time of the device."""


class CauseNames(dict[str, int]):
    """Name → its index over all ranks."""

    def __missing__(self, name: str) -> int:
        self[name] = len(self)
        return self[name]


def late_causes(ranks: Sequence[RankTrace], waits: GroupWaits, names: CauseNames) -> LateCauses:
    """Return, per collective with a last rank, the operator with the largest excess over the mean of the other ranks.

    If the device of the last rank was idle for longer, the host decides: its operator with the largest excess. If the rank was
    behind by more than that when it left the collective before, that is the cause.
    """
    count = len(waits.arrived_ns)
    found = LateCauses(np.full(count, NONE), np.zeros(count, np.int64), np.zeros(count, np.uint8))
    codes = [np.array([names[name] for name in ranks[index].names], np.int64) for index in waits.match.ranks.tolist()]
    idle = names[DEVICE_IDLE]
    behind = _behind(ranks, waits)
    late = np.flatnonzero((waits.last != NONE) & (behind > 0))
    found.name[late], found.ns[late] = names[LEFT_LATE], behind[late]
    on_host = np.array([not trace.on_device for trace in ranks], np.bool_)
    for low in range(0, count, _CHUNK):
        rows = np.arange(low, min(low + _CHUNK, count))
        rows = rows[waits.last[rows] != NONE]
        _set_causes(ranks, waits, rows, codes, 1, found)
        idling = rows[found.name[rows] == idle]
        idle_ns = found.ns[idling].copy()
        found.ns[idling] = 0  # the host explains an idle device
        asked = rows[on_host[waits.last[rows]] | (found.name[rows] == idle)]
        _set_causes(ranks, waits, asked, codes, 0, found)
        found.ns[idling] = np.where(found.name[idling] == idle, idle_ns, found.ns[idling])
    return found


def _behind(ranks: Sequence[RankTrace], waits: GroupWaits) -> Int64:
    """Return how much later than the others on average the last rank left the collective before; 0 if unknown."""
    left: Int64 = np.zeros_like(waits.end_ns)
    usable = (waits.last != NONE) & _same_before(waits)
    for column, index in enumerate(waits.match.ranks.tolist()):
        rows, ends = waits.match.rows[:, column], np.maximum.accumulate(ranks[index].collectives.end_ns)
        there = waits.known[:, column]
        usable &= ~there | (rows > 0)
        earlier = there & (rows > 0)
        shift = waits.end_ns[there, column][:1] - ranks[index].collectives.end_ns[rows[there]][:1]  # to the common clock
        left[earlier, column] = ends[rows[earlier] - 1] + shift.sum()
    place = np.searchsorted(waits.match.ranks, np.maximum(waits.last, 0))
    own = left[np.arange(len(left)), np.minimum(place, len(waits.match.ranks) - 1)]
    others = np.maximum(waits.known.sum(axis=1) - 1, 1)
    difference = np.where(waits.known, own[:, None] - left, 0).sum(axis=1) // others
    return np.where(usable, difference, 0)


def _same_before(waits: GroupWaits) -> Bool:
    """Return which collectives follow the same one on all their ranks, as far as the group shows."""
    rows, known = waits.match.rows, waits.known
    same = np.zeros(len(rows), np.bool_)
    follows = rows[1:] - 1 == rows[:-1]
    same[1:] = (follows | ~known[1:]).all(axis=1) | (~follows & known[:-1] | ~known[1:]).all(axis=1)
    return same


def _set_causes(
    ranks: Sequence[RankTrace], waits: GroupWaits, asked: Int64, codes: Sequence[Int64], on_device: int, found: LateCauses
) -> None:
    """Set the cause of collectives whose excess is larger than that of the cause so far."""
    parts: list[tuple[Int64, Int64, Int64, Bool]] = []
    for column, index in enumerate(waits.match.ranks.tolist()):
        place = np.full(len(ranks[index].collectives), NONE, np.int64)
        rows = waits.match.rows[asked, column]
        there = rows[rows != NONE]
        place[there] = np.flatnonzero(rows != NONE)
        causes = ranks[index].causes
        low, high = np.searchsorted(causes.collective, [there.min(), there.max() + 1] if len(there) else [0, 0])
        causes = causes.rows(slice(low, high))
        at = place[causes.collective]
        kept = (at != NONE) & (causes.on_device == on_device)
        at = at[kept]
        parts.append((at, codes[column][causes.name[kept]], causes.ns[kept], waits.last[asked][at] == index))
    at, name, ns, mine = (np.concatenate(column) for column in zip(*parts, strict=True))
    width = int(name.max(initial=0)) + 1
    keys, place = np.unique(at * width + name, return_inverse=True)
    place = place.reshape(-1)
    others = np.maximum(waits.known[asked].sum(axis=1) - 1, 1)[keys // width]
    own, rest = sums(place[mine], ns[mine], len(keys)), sums(place[~mine], ns[~mine], len(keys))
    excess = own - rest // others
    order = np.lexsort((excess, keys // width))
    top = order[np.append(np.diff(keys[order] // width) > 0, len(order) > 0)] if len(order) else order
    top = top[excess[top] > found.ns[asked[keys[top] // width]]]
    rows = asked[keys[top] // width]
    found.name[rows], found.ns[rows], found.on_device[rows] = keys[top] % width, excess[top], on_device

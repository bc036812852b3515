"""Who waited for whom: skew, the last rank and transfer time of every collective, and what made the last rank late."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llm_perf_opt.analysis.ranks.clocks import Clocks
from llm_perf_opt.analysis.ranks.matching import CLOCKS_AGREE_NS, GroupMatch, gathered
from llm_perf_opt.analysis.ranks.rank_trace import DEVICE_IDLE, LEFT_LATE, NameIndex, RankTrace
from llm_perf_opt.analysis.trace.intervals import sums
from llm_perf_opt.traces.events import Bool, Columns, Int64, UInt8
from llm_perf_opt.traces.nesting import NONE

_BEFORE, _AFTER = np.iinfo(np.int64).min // 2, np.iinfo(np.int64).max // 2
_WELL_ABOVE = 10
"""How many times the residual a transfer must be to be known where the skew is below it."""
_CHUNK = 4096
"""Collectives whose causes are held in memory at once."""
KNOWN, NO_SIZE, INCOMPLETE, MISMATCHED, NO_CLOCK, IMPOSSIBLE, BELOW, LEAVES_EARLY = range(8)
WHY = (
    "",
    "the traces disagree on the number of ranks",
    "some ranks of the group are missing in the given traces",
    "the ranks disagree on its kind or size",
    "the collectives do not show the offset of a clock",
    "it ends on one rank before another has entered it: the clocks or the match are wrong",
    "the ranks enter it closer together than the clocks of their hosts can tell",
    "a rank may leave this kind of collective before others enter it",
)
"""Why the waiting in a collective is unknown, by code."""
COMPARABLE = (KNOWN, BELOW, LEAVES_EARLY)
"""Codes of collectives whose entries are on one clock on all ranks."""


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
    """-1 if it is unknown or below what the clocks can tell."""
    last: Int64
    """Index of the last trace, or -1 if two enter at the same time as far as the clocks can tell."""
    late_ns: Int64
    """-1 if the last rank is unknown, or no rank waits for it."""
    transfer_ns: Int64
    """-1 if unknown."""
    wait_ns: Int64
    """-1 if unknown."""
    why: Int64
    """Code of the reason why the waiting is unknown."""


def group_waits(ranks: Sequence[RankTrace], match: GroupMatch, clocks: Clocks) -> GroupWaits:
    """Return the waits of the collectives of a group. They are known only if all its ranks are there and can be compared."""
    offsets = clocks.offsets(len(ranks))
    tables = [ranks[index].collectives for index in match.ranks.tolist()]
    shifts = [offsets[index] or 0 for index in match.ranks.tolist()]
    known = match.rows != NONE
    start = gathered([table.start_ns - by for table, by in zip(tables, shifts, strict=True)], match.rows, _AFTER)
    end = gathered([table.end_ns - by for table, by in zip(tables, shifts, strict=True)], match.rows, _BEFORE)
    entered = np.where(known, start, _BEFORE)
    order = np.argsort(entered, axis=1, kind="stable")
    arrived = entered.max(axis=1)
    pairs = entered.shape[1] > 1
    late = arrived - np.take_along_axis(entered, order[:, -2:-1], axis=1)[:, 0] if pairs else np.zeros(len(start), np.int64)
    skew = arrived - start.min(axis=1)
    residual, several = _residuals(match, known, clocks, len(ranks))
    why = _why(ranks, match, several & _unknown(match, known, offsets), skew < residual)
    timed = why == KNOWN
    why = np.where(timed & ~match.synchronizing, LEAVES_EARLY, why)
    sure = why == KNOWN
    tied = (
        ~timed | (late < CLOCKS_AGREE_NS) | (_lead_over_other_hosts(match, entered, order[:, -1], clocks, len(ranks)) < residual)
    )
    transfer = np.maximum(end.max(axis=1) - arrived, 0)
    moved = sure | ((why == BELOW) & match.synchronizing & (transfer >= _WELL_ABOVE * residual))
    waits = np.where(known, np.minimum(arrived[:, None], end) - start, 0).sum(axis=1)
    return GroupWaits(
        match=match,
        start_ns=start,
        end_ns=end,
        known=known,
        arrived_ns=arrived,
        skew_ns=np.where(timed, skew, -1),
        last=np.where(tied, NONE, match.ranks[order[:, -1]]),
        late_ns=np.where(tied | ~sure, -1, late),
        transfer_ns=np.where(moved, transfer, -1),
        wait_ns=np.where(sure, np.maximum(waits, 0), -1),
        why=why,
    )


def _why(ranks: Sequence[RankTrace], match: GroupMatch, unknown: Bool, below: Bool) -> Int64:
    """Return why the entries of the ranks cannot be compared, per collective."""
    size = match.group.size or _world_size(ranks)
    there = (match.rows != NONE).sum(axis=1)
    reasons = (
        (np.full(len(there), not size, np.bool_), NO_SIZE),
        (there < size, INCOMPLETE),
        (match.mismatched, MISMATCHED),
        (unknown, NO_CLOCK),
        (match.impossible, IMPOSSIBLE),
        (below, BELOW),
    )
    found = np.full(len(there), KNOWN, np.int64)
    for applies, code in reversed(reasons):
        found[applies] = code
    return found


def _world_size(ranks: Sequence[RankTrace]) -> int:
    """Return the number of ranks of the job, which collectives without a named group have; 0 if the traces disagree.

    If no trace states it, those that are given are taken to be all.
    """
    sizes = {trace.world_size for trace in ranks if trace.world_size} or {len(ranks)}
    return sizes.pop() if len(sizes) == 1 else 0


def _unknown(match: GroupMatch, known: Bool, offsets: Sequence[int | None]) -> Bool:
    """Return which collectives have a rank whose clock is unknown."""
    lost = np.array([offsets[index] is None for index in match.ranks.tolist()], np.bool_)
    return np.asarray(known[:, lost].any(axis=1), np.bool_)


def _host_of(match: GroupMatch, clocks: Clocks, ranks: int) -> Int64:
    return np.array(clocks.host_of(ranks), np.int64)[match.ranks]


def _residuals(match: GroupMatch, known: Bool, clocks: Clocks, ranks: int) -> tuple[Int64, Bool]:
    """Return, per collective, how well the clocks of its ranks agree, and whether they are on several hosts.

    Between hosts, it is the two largest residuals together. The clock of one host is taken as it is.
    """
    hosts = _host_of(match, clocks, ranks)
    present = np.stack([known[:, hosts == number].any(axis=1) for number in range(len(clocks.hosts))], axis=1)
    found = np.where(present, np.array([clock.residual_ns for clock in clocks.hosts], np.int64), 0)
    worst = np.sort(found, axis=1)[:, -2:].sum(axis=1)
    several: Bool = present.sum(axis=1) > 1
    return np.where(several, worst, 0), several


def _lead_over_other_hosts(match: GroupMatch, entered: Int64, last: Int64, clocks: Clocks, ranks: int) -> Int64:
    """Return how much later the last rank entered than the last one of the other hosts."""
    host = _host_of(match, clocks, ranks)
    elsewhere = np.where(host[None, :] == host[last][:, None], _BEFORE, entered).max(axis=1)
    lead: Int64 = entered.max(axis=1) - elsewhere
    return lead


# --- what made the last rank late -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LateCauses(Columns):
    """The cause per collective of a group."""

    name: "Int64"
    """Index of the operator's name, or -1."""
    ns: "Int64"
    """How much longer it took on the last rank than on the others on average, at most as much as the rank was late."""
    on_device: "UInt8"
    """Whether it is time of the device."""
    newly_ns: "Int64"
    """What the job would save if the last rank had taken no longer than the others since its previous collective; -1: unknown."""


def late_causes(ranks: Sequence[RankTrace], waits: GroupWaits, parts: Int64, names: NameIndex) -> LateCauses:
    """Return, per collective with a last rank, the operator with the largest excess over the mean of the other ranks.

    If the device of the last rank was idle for longer, the host decides: its operator with the largest excess. If the rank was
    late by more than that for other reasons than its own work since the previous collective, that is the cause. What explains
    less than half of the lateness is no cause. `parts` is what each collective and rank adds to the delay.
    """
    count = len(waits.arrived_ns)
    late_ns = np.maximum(waits.late_ns, 0)
    found = LateCauses(np.full(count, NONE), np.zeros(count, np.int64), np.zeros(count, np.uint8), np.zeros(count, np.int64))
    caused = waits.late_ns >= 0
    place = np.minimum(np.searchsorted(waits.match.ranks, np.maximum(waits.last, 0)), len(waits.match.ranks) - 1)
    newly = np.where(caused, parts[np.arange(count), place], NONE)
    behind = np.where(newly >= 0, np.maximum(late_ns - newly, 0), 0)
    late = np.flatnonzero(caused & (behind > 0))
    found.name[late], found.ns[late] = names[LEFT_LATE], behind[late]
    _search(ranks, waits, np.flatnonzero(caused), names, found)
    explained = caused & (2 * found.ns >= late_ns)
    return LateCauses(
        name=np.where(explained, found.name, NONE),
        ns=np.minimum(found.ns, late_ns),
        on_device=found.on_device,
        newly_ns=newly,
    )


def _search(ranks: Sequence[RankTrace], waits: GroupWaits, caused: Int64, names: NameIndex, found: LateCauses) -> None:
    """Set what took longer on the last rank: on its device or, if that was idle, on its host, at most for as long as it idled.

    The host is examined only if all ranks have its times.
    """
    codes = [np.array([names[name] for name in ranks[index].names], np.int64) for index in waits.match.ranks.tolist()]
    idle = names[DEVICE_IDLE]
    on_host = np.array([not trace.on_device for trace in ranks], np.bool_)
    mine = [ranks[index] for index in waits.match.ranks.tolist() if len(ranks[index].collectives)]
    have_hosts = all((trace.causes.on_device == 0).any() for trace in mine)
    for low in range(0, len(caused), _CHUNK):
        rows = caused[low : low + _CHUNK]
        _set_causes(ranks, waits, rows, codes, 1, found)
        if not have_hosts:
            continue
        idling = rows[found.name[rows] == idle]
        idle_ns = found.ns[idling].copy()
        found.ns[idling] = 0  # the host explains an idle device
        asked = rows[on_host[waits.last[rows]] | (found.name[rows] == idle)]
        _set_causes(ranks, waits, asked, codes, 0, found)
        found.ns[idling] = np.where(found.name[idling] == idle, idle_ns, np.minimum(found.ns[idling], idle_ns))


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

"""What the work of each rank waited for, inferred from the times of all ranks that run the same program.

A rank is a chain of work (kernels; on a CPU, blocks of operators) and its collectives. A collective begins after some work of
its rank, and after other collectives of its stream; work resumes after collectives that it needs. Traces do not state these
dependencies. Ranks whose collectives correspond one to one run the same program, and a dependency must hold on all of them: work
that one rank does before a collective ends does not need that collective on any rank. What remains is own time: work and gaps of
the rank itself, which are compared between the ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from llm_perf_opt.analysis.ranks.rank_trace import RankTrace
from llm_perf_opt.traces.events import Bool, Int64
from llm_perf_opt.traces.nesting import NONE

_TOUCH_NS = 1_000
"""Work that begins this much before a collective ends began after it: traces round times, and a stream starts early."""
_WIDE = 1 << 31
_PROPOSERS = 8
"""Ranks that are asked what a collective may have begun after."""
_LEAST_SHOWN = 3
"""The least number of collectives of a kind that show what belongs to the others."""
_FEW = 0.1
"""The share of collectives of a kind that may begin with the end of work by chance."""
_NEVER = np.iinfo(np.int64).max // 2


@dataclass(frozen=True)
class Chain:
    """One rank: its collectives in order, and what they and its work waited for. Times are on the rank's clock.

    Its events are, in the order of the program: a collective is ready, or work needs a collective that began earlier.
    """

    index: int
    """Of the trace."""
    rows: Int64
    """Rows of the collectives."""
    start_ns: Int64
    end_ns: Int64
    before: Int64
    """Per collective, the places of earlier ones that it begins after, or -1."""
    lag_ns: Int64
    """How much later each collective begins than it could."""
    place: Int64
    """Per event, its collective."""
    is_wait: Bool
    """Per event, whether work needs the collective."""
    piece: Int64
    """Per event, the number of pieces of work before it."""
    free_ns: Int64
    """Per event, the end of the work before it."""
    own_ns: Int64
    """Per event, all own time before it."""
    of_pieces_ns: Int64
    """Per piece of work, its own time and that of the gap before it."""
    free_at_end_ns: int
    own_at_end_ns: int


@dataclass(frozen=True)
class Program:
    """Ranks with the same collectives in the same order."""

    chains: tuple[Chain, ...]
    kinds: Int64
    """Per collective, the number of its kind, the same for the same kind, size and process groups."""


@dataclass(frozen=True)
class _Member:
    """One rank before the dependencies are known."""

    trace: RankTrace
    index: int
    rows: Int64
    start: Int64
    end: Int64
    first: Int64
    """The first piece of work that belongs to each collective, to what follows the last, and their number."""
    work_start: Int64
    reach: Int64
    """The end of all work up to each piece, after the start of the recording."""


def programs(ranks: Sequence[RankTrace], keys: Sequence[Int64], began_ns: Sequence[int]) -> list[Program]:
    """Return the ranks by program. `keys` has the same number for collectives that correspond, or -1.

    A collective that has no counterpart on a rank with collectives of the same groups is left out. `began_ns` is where the
    time of each rank begins.
    """
    found: list[Program] = []
    for indices, rows in _alike(ranks, keys):
        order = _order([ranks[index] for index in indices], rows)
        members = [_member(ranks[index], index, mine, began_ns[index], order) for index, mine in zip(indices, rows, strict=True)]
        kinds = keys[indices[0]][rows[0]] // _WIDE
        found.append(Program(_chains(members, order, kinds), kinds))
    return found


def key_of(kind: Int64, ordinal: Int64) -> Int64:
    """Return the numbers of collectives by the number of their kind and theirs among it."""
    return kind * _WIDE + ordinal


def _alike(ranks: Sequence[RankTrace], keys: Sequence[Int64]) -> list[tuple[list[int], list[Int64]]]:
    """Return the ranks that have the same collectives in the same order, and their rows.

    Collectives of several streams may begin in another order on each rank. If the work has numbers, they are in the order of the
    first rank.
    """
    by_kinds: dict[bytes, list[int]] = {}
    for index, mine in enumerate(keys):
        kinds = np.unique(mine[mine != NONE] // _WIDE)
        if len(kinds):
            by_kinds.setdefault(kinds.tobytes(), []).append(index)
    found: list[tuple[list[int], list[Int64]]] = []
    for indices in by_kinds.values():
        common = keys[indices[0]]
        for index in indices[1:]:
            common = np.intersect1d(common, keys[index])
        common = common[common != NONE]
        rows = {index: np.flatnonzero(np.isin(keys[index], common)) for index in indices}
        by_order: dict[bytes, list[int]] = {}
        for index in indices:
            by_order.setdefault(keys[index][rows[index]].tobytes(), []).append(index)
        if len(by_order) > 1 and len({len(ranks[index].work) for index in indices}) == 1:
            sorted_rows = {index: rows[index][np.argsort(keys[index][rows[index]], kind="stable")] for index in indices}
            first = np.argsort(sorted_rows[indices[0]])
            found.append((indices, [sorted_rows[index][first] for index in indices]))
        else:
            found += [(members, [rows[index] for index in members]) for members in by_order.values()]
    return [entry for entry in found if len(entry[1][0])]


class _Order(Enum):
    """How work has a place in the program that is the same on all ranks."""

    LAUNCHES = "by the collectives between which it was launched"
    NUMBER = "by its number: all ranks have as much"
    TIME = "by the collectives between which it ran: only roughly"


def _order(traces: Sequence[RankTrace], rows: Sequence[Int64]) -> _Order:
    if all(trace.ordered_from is not None for trace in traces) and all((np.diff(mine) > 0).all() for mine in rows):
        return _Order.LAUNCHES
    return _Order.NUMBER if len({len(trace.work) for trace in traces}) == 1 else _Order.TIME


def _member(trace: RankTrace, index: int, rows: Int64, began_ns: int, order: _Order) -> _Member:
    table, work = trace.collectives, trace.work
    first = np.where(np.arange(len(rows) + 1) > 0, len(work), 0)
    if order is not _Order.NUMBER and len(work):
        by_time = np.searchsorted(table.start_ns, work.start_ns, "right")
        following = np.maximum.accumulate(work.following.astype(np.int64) if order is _Order.LAUNCHES else by_time)
        first = np.searchsorted(np.searchsorted(rows, following), np.arange(len(rows) + 1))
    reach = np.maximum.accumulate(np.concatenate([[began_ns], work.end_ns]))
    return _Member(
        trace, index, rows, table.start_ns[rows], table.end_ns[rows], np.append(first, len(work)), work.start_ns, reach
    )


def _chains(members: Sequence[_Member], order: _Order, kinds: Int64) -> tuple[Chain, ...]:
    after = _after(members)
    waits = _waits(members, order, kinds)
    before = _before(members, after, kinds)
    free = _independent_of_work(members, after, before, kinds)
    after = [np.where(free, 0, done) for done in after]
    return tuple(_chain(*each, before) for each in zip(members, after, waits, strict=True))


def _positions(member: _Member, piece: Int64) -> Int64:
    """Return the place of pieces of work in the program: the collective that they belong to, and their number among its own."""
    segment = np.minimum(np.searchsorted(member.first, piece, "right") - 1, len(member.first) - 2)
    return segment * _WIDE + piece - member.first[segment]


def _pieces(member: _Member, position: Int64) -> Int64:
    """Return the piece of work at each place of the program."""
    segment = position // _WIDE
    found: Int64 = np.minimum(member.first[segment] + position % _WIDE, member.first[segment + 1])
    return found


def _after(members: Sequence[_Member]) -> list[Int64]:
    """Return the work that every collective begins after on all ranks, at most that which was launched before it."""
    least = np.arange(1, len(members[0].rows) + 1) * _WIDE
    for member in members:
        done = np.searchsorted(member.reach[1:], member.start + _TOUCH_NS, "right")
        least = np.minimum(least, _positions(member, done))
    return [_pieces(member, least) for member in members]


def _waits(members: Sequence[_Member], order: _Order, kinds: Int64) -> list[Int64]:
    """Return, per rank, pairs of a collective and the work that needs it, by work."""
    found = [_resumed(member, order) for member in members]
    if order is not _Order.TIME:
        pairs = np.concatenate(
            [np.stack([mine[:, 0], _positions(member, mine[:, 1])], 1) for member, mine in zip(members, found, strict=True)]
        )
        pairs = _repeated(members[0], np.unique(pairs, axis=0), kinds)
        valid = np.ones(len(pairs), np.bool_)
        for member in members:
            valid &= _begins_after(member, pairs[:, 0], _pieces(member, pairs[:, 1]))
        found = [np.stack([pairs[valid, 0], _pieces(member, pairs[valid, 1])], 1) for member in members]
        return [mine[np.argsort(at[:, 1], kind="stable")] for mine, at in zip(found, [pairs[valid]] * len(members), strict=True)]
    return found


def _repeated(member: _Member, pairs: Int64, kinds: Int64) -> Int64:
    """Return the waits, and those that no rank shows because the collective ended early, by those of its kind before it."""
    piece, more = _pieces(member, pairs[:, 1]), [pairs]
    for kind in np.unique(kinds[pairs[:, 0]]).tolist():
        places, mine = np.flatnonzero(kinds == kind), np.flatnonzero(kinds[pairs[:, 0]] == kind)[::-1]
        needed = np.full(len(places), NONE, np.int64)
        needed[np.searchsorted(places, pairs[mine, 0])] = piece[mine]
        filled = _filled(needed, len(member.work_start))
        new = np.flatnonzero(filled != needed)
        more.append(np.stack([places[new], _positions(member, filled[new])], axis=1))
    return np.concatenate(more)


def _filled(needed: Int64, limit: int) -> Int64:
    """Return the numbers with those that are not known, as far as they go on at the usual interval from the last known one."""
    known = np.flatnonzero(needed != NONE)
    many, apart = np.diff(known), np.diff(needed[known])
    values, counts = np.unique(apart[many == 1], return_counts=True)
    if len(known) < _LEAST_SHOWN or not len(values) or 2 * counts.max() < counts.sum() or values[counts.argmax()] <= 0:
        return needed
    usual = int(values[counts.argmax()])
    at = np.arange(len(needed))
    last = np.searchsorted(known, at, "right") - 1
    guess = needed[known[np.maximum(last, 0)]] + usual * (at - known[np.maximum(last, 0)])
    most = np.append(needed[known], limit)[last + 1]
    return np.asarray(np.where((needed == NONE) & (last >= 0) & (guess < most), guess, needed), np.int64)


def _resumed(member: _Member, order: _Order) -> Int64:
    """Return the work before which the rank idled until a collective ended: the last that ended before it."""
    if not len(member.rows):
        return np.empty((0, 2), np.int64)
    ended = np.argsort(member.end, kind="stable")
    last = np.searchsorted(member.end[ended], member.work_start + _TOUCH_NS, "right") - 1
    place = ended[np.maximum(last, 0)]
    segment = np.searchsorted(member.first, np.arange(len(last)), "right") - 1
    kept = (last >= 0) & (member.end[place] > member.reach[:-1])
    if order is not _Order.NUMBER:
        kept &= place < segment
    return np.stack([place[kept], np.flatnonzero(kept)], axis=1)


def _begins_after(member: _Member, place: Int64, piece: Int64) -> Bool:
    there = piece < len(member.work_start)
    begins = np.append(member.work_start, 0)[np.minimum(piece, len(member.work_start))]
    found: Bool = ~there | (begins + _TOUCH_NS >= member.end[place])
    return found


def _before(members: Sequence[_Member], after: Sequence[Int64], kinds: Int64) -> Int64:
    """Return the earlier collectives that each begins after: the one before it on its stream, and the last to end before it.

    The second must hold on all ranks, and be what at least one of them waited for; what most waited for is taken.
    """
    count = len(members[0].rows)
    found = np.full((count, 2), NONE, np.int64)
    if not count:
        return found
    stream = members[0].trace.collectives.stream[members[0].rows]
    order = np.argsort(stream, kind="stable")
    same = np.flatnonzero(np.diff(stream[order]) == 0)
    found[order[same + 1], 0] = order[same]
    best = np.zeros(count, np.int64)
    for member, done in zip(members[:_PROPOSERS], after, strict=False):
        proposed = _last_ended(member, done)
        ends = [np.where(proposed == NONE, _NEVER, other.end[proposed]) for other in members]
        holds = np.all([end <= other.start + _TOUCH_NS for end, other in zip(ends, members, strict=True)], axis=0)
        touches = np.sum([_nearer(*each, _TOUCH_NS) for each in zip(members, after, ends, strict=True)], axis=0)
        better = holds & (touches > best) & (proposed != found[:, 0])
        found[better, 1], best[better] = proposed[better], touches[better]
    pair = np.unique(np.stack([kinds, np.where(best > 0, kinds[found[:, 1]], NONE)]), axis=1, return_inverse=True)[1].reshape(-1)
    many = np.bincount(kinds, minlength=int(kinds.max()) + 1)[kinds]
    found[np.bincount(pair, best)[pair] < _FEW * len(members) * many, 1] = NONE
    found[:, 1] = _like_others_of_their_kind(members, found[:, 1], kinds)
    for member in members:
        wrong = (found[:, 0] != NONE) & (member.end[found[:, 0]] > member.start + _TOUCH_NS)
        found[wrong, 0] = NONE
    return found


def _independent_of_work(members: Sequence[_Member], after: Sequence[Int64], before: Int64, kinds: Int64) -> Bool:
    """Return which collectives begin with the end of an earlier one on all ranks, if few of their kind begin with work's."""
    held = (before != NONE).any(axis=1)
    with_work = np.zeros(len(before), np.int64)
    for member, done in zip(members, after, strict=True):
        end = np.where(before == NONE, -_NEVER, member.end[before]).max(axis=1)
        held &= _nearer(member, done, end, _TOUCH_NS)
        with_work += (np.abs(member.start - member.reach[done]) <= _TOUCH_NS) & (np.abs(member.start - end) > _TOUCH_NS)
    kind = np.unique(kinds, return_inverse=True)[1].reshape(-1)
    few = np.bincount(kind, with_work) < _FEW * len(members) * np.bincount(kind)
    found: Bool = held & few[kind]
    return found


def _like_others_of_their_kind(members: Sequence[_Member], before: Int64, kinds: Int64) -> Int64:
    """Return the earlier collectives with those that no rank shows, because something else held the later one back for longer."""
    found: Int64 = before.copy()
    for kind in np.unique(kinds[before != NONE]).tolist():
        places = np.flatnonzero(kinds == kind)
        of, counts = np.unique(kinds[before[places][before[places] != NONE]], return_counts=True)
        others = np.flatnonzero(kinds == of[counts.argmax()])
        shown = (before[places] != NONE) & np.isin(before[places], others)
        needed = np.where(shown, np.searchsorted(others, before[places]), NONE)
        filled = _filled(needed, len(others))
        new = np.flatnonzero((filled != needed) & (before[places] == NONE))
        one, other = places[new], others[filled[new]]
        holds = other < one
        for member in members:
            holds &= member.end[other] <= member.start[one] + _TOUCH_NS
        found[one[holds]] = other[holds]
    return found


def _nearer(member: _Member, done: Int64, end: Int64, most: int) -> Bool:
    """Return which collectives begin with the end of the other one rather than with that of the work before them."""
    apart = np.abs(member.start - end)
    found: Bool = (apart <= most) & (apart < np.abs(member.start - member.reach[done]))
    return found


def _last_ended(member: _Member, done: Int64) -> Int64:
    """Return the collective that ended last before each, if it ended after the work that each begins after; otherwise -1."""
    ended = np.argsort(member.end, kind="stable")
    last = np.searchsorted(member.end[ended], member.start + _TOUCH_NS, "right") - 1
    place = ended[np.maximum(last, 0)]
    kept = (last >= 0) & (member.end[place] > member.reach[done]) & (place < np.arange(len(place)))
    return np.where(kept, place, NONE)


def _chain(member: _Member, after: Int64, waits: Int64, before: Int64) -> Chain:
    free, base = member.reach, member.reach[:-1].copy()
    inner = waits[waits[:, 1] < len(base)]
    np.maximum.at(base, inner[:, 1], member.end[inner[:, 0]])
    own = np.concatenate([[0], np.cumsum(np.maximum(free[1:] - base, 0))])
    earliest = free[after]
    for column in before.T:
        earliest = np.where(column == NONE, earliest, np.maximum(earliest, member.end[column]))
    piece = np.concatenate([after, inner[:, 1]])
    is_wait = np.arange(len(piece)) >= len(after)
    order = np.lexsort((is_wait, piece))
    return Chain(
        index=member.index,
        rows=member.rows,
        start_ns=member.start,
        end_ns=member.end,
        before=before,
        lag_ns=member.start - earliest,
        place=np.concatenate([np.arange(len(after)), inner[:, 0]])[order],
        is_wait=is_wait[order],
        piece=piece[order],
        free_ns=free[piece[order]],
        own_ns=own[piece[order]],
        of_pieces_ns=np.diff(own),
        free_at_end_ns=int(free[-1]),
        own_at_end_ns=int(own[-1]),
    )

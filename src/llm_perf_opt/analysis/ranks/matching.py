"""Match the collectives of several ranks: by group, kind, size and order.

If every rank of a group has the same sequence, and no rank ends a collective before another begins it, the k-th collectives
belong together. Otherwise the library's numbers decide. If it wrote none, collectives that were open on one clock when the first
of them ended belong together. If the sequences are equal and few of the k-th collectives are impossible, numbers are used only if
none differs in kind or size and fewer are impossible, and times only around the collectives that they explain. A collective that
a rank does not have is missing there; one that differs in kind or size is a mismatch. Each is reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from llm_perf_opt.analysis.ranks.kinds import POINT_TO_POINT, SYNCHRONIZING, UNEVEN
from llm_perf_opt.analysis.ranks.rank_trace import NameIndex, RankGroup, RankTrace
from llm_perf_opt.traces.events import Bool, Int64
from llm_perf_opt.traces.nesting import NONE

CLOCKS_AGREE_NS = 5_000
"""Clocks of processes on one host agree within this (measured with torch.profiler)."""
ENOUGH = 0.9
"""The least share of collectives matched by order that must be possible in time; with less, the windows of the traces differ."""
_APART = 0.25
"""The ends of one collective differ by at most this share of the time to the end before or after it."""
_FAR = np.iinfo(np.int64).max


@dataclass(frozen=True)
class GroupMatch:
    """The matched collectives of one group: a row per collective, a column per rank."""

    group: RankGroup
    ranks: Int64
    """Indices of the traces."""
    rows: Int64
    """Two-dimensional: the row in the rank's collectives, or -1 if it is missing there."""
    kind: list[str]
    size_bytes: Int64
    """-1: unknown; the largest if ranks move different amounts."""
    mismatched: Bool
    """Whether ranks disagree on the kind or the size."""
    method: str
    """`order`, `number` or `time`."""
    impossible: Bool
    """Which collectives one rank left before another arrived: the clocks or the match are wrong."""
    contradicted: bool = False
    """Whether all ranks have the same sequence, but the clocks contradict that its members belong together."""

    @property
    def synchronizing(self) -> Bool:
        """Return which collectives no rank leaves before the last has arrived."""
        return np.array([kind in SYNCHRONIZING for kind in self.kind], np.bool_)


@dataclass(frozen=True)
class _Sequence:
    """The collectives of one group on one rank."""

    trace: int
    rows: Int64
    start_ns: Int64
    end_ns: Int64
    kind: Int64
    size: Int64
    """Compared between ranks: -1 if unknown or if ranks may differ."""
    bytes: Int64
    sequence: Int64

    def __len__(self) -> int:
        return len(self.rows)


def match_collectives(
    ranks: Sequence[RankTrace], offsets: Sequence[int | None], hosts: Sequence[int], tolerance_ns: int = 0
) -> list[GroupMatch]:
    """Return the matched collectives of every group whose ranks are known.

    Offsets put the ranks on one clock; None if a rank's is unknown: then it can be compared with ranks of its host alone.
    """
    kinds = NameIndex()
    groups: dict[RankGroup, list[_Sequence]] = {}
    for index, trace in enumerate(ranks):
        code = np.array([kinds[name] for name in trace.names], np.int64)
        for number, group in enumerate(trace.groups):
            rows = np.flatnonzero((trace.collectives.group == number) & ~point_to_point(trace))
            groups.setdefault(group, []).append(_sequence(index, trace, rows, code, offsets[index] or 0))
    names = list(kinds)
    found = []
    for group, listed in groups.items():
        members = [member for member in listed if len(member)]
        if not members or group.unclear or len(members) > (group.size or len(members)):
            continue  # which ranks belong together is not known
        there = {member.trace for member in members}
        absent = [index for index, trace in enumerate(ranks) if trace.rank in group.ranks and index not in there]
        one_host = len({hosts[member.trace] for member in members}) == 1
        comparable = one_host or all(offsets[member.trace] is not None for member in members)
        found.append(_matched(group, members, absent, names, tolerance_ns if comparable else None))
    return found


def point_to_point(trace: RankTrace) -> Bool:
    """Return which collectives of a rank are transfers between two ranks."""
    codes = [place for place, name in enumerate(trace.names) if name in POINT_TO_POINT]
    return np.isin(trace.collectives.kind, codes)


def _sequence(index: int, trace: RankTrace, rows: Int64, code: Int64, offset: int) -> _Sequence:
    table = trace.collectives.rows(rows)
    kind = code[table.kind]
    uneven = np.isin(table.kind, [place for place, name in enumerate(trace.names) if name in UNEVEN])
    size = np.where(uneven, -1, table.size_bytes)
    return _Sequence(index, rows, table.start_ns - offset, table.end_ns - offset, kind, size, table.size_bytes, table.sequence)


def _matched(
    group: RankGroup, members: Sequence[_Sequence], absent: Sequence[int], names: Sequence[str], tolerance_ns: int | None
) -> GroupMatch:
    """Return the matches of one group; without a tolerance, the clocks of the ranks cannot be compared."""
    synchronizing = np.array([name in SYNCHRONIZING for name in names], np.bool_)
    if any((member.size < 0).any() for member in members):
        members = [_without_size(member, members) for member in members]
    in_order = _by_order(members)
    possible = None if in_order is None or tolerance_ns is None else _possible(members, in_order, synchronizing, tolerance_ns)
    contradicted = possible is not None and bool(possible.mean() < ENOUGH)
    if in_order is not None:
        found = _group_match(group, members, absent, names, in_order, "order", possible)
        if possible is None or possible.all():
            return found
    method, places = "number", _by_number(members)
    if places is None and tolerance_ns is not None:
        method, places = "time", _by_time(members, tolerance_ns, 0 if in_order is None else CLOCKS_AGREE_NS)
    if places is None:
        method, places = "order", _to_the_shortest(members)
    possible = None if tolerance_ns is None else _possible(members, places, synchronizing, tolerance_ns)
    other = _group_match(group, members, absent, names, places, method, possible)
    if in_order is None or contradicted:
        return replace(other, contradicted=contradicted)
    if method == "number":
        return other if not other.mismatched.any() and other.impossible.sum() < found.impossible.sum() else found
    explained = found.impossible & _ends_apart(members, in_order)
    places = _by_time_where_explained(in_order, explained, places, other.impossible | other.mismatched)
    possible = _possible(members, places, synchronizing, tolerance_ns or 0)
    return _group_match(group, members, absent, names, places, "time", possible) if len(places) > len(in_order) else found


def _by_time_where_explained(in_order: Int64, explained: Bool, by_time: Int64, unfit: Bool) -> Int64:
    """Return the matches by order, and the matches by time where they explain impossible ones.

    Matches that both ways have in common divide the sequence into stretches. In a stretch, matching by time is used if no match
    is unfit, and if it adds at most `ranks - 1` matches for each one that it explains. Without this limit, one odd time would
    split a match, because matching by time gives no impossible ones.
    """
    both = np.flatnonzero((by_time == by_time[:, :1]).all(axis=1))
    rows = np.concatenate([[-1], both, [len(by_time)]])
    places = np.concatenate([[-1], by_time[both, 0], [len(in_order)]])
    parts, done = [], 0
    for number in np.flatnonzero(np.diff(rows) > 1).tolist():
        here = slice(int(rows[number]) + 1, int(rows[number + 1]))
        first, end = int(places[number]) + 1, int(places[number + 1])
        added, most = here.stop - here.start - (end - first), int(explained[first:end].sum()) * (in_order.shape[1] - 1)
        if added <= most and not unfit[here].any():
            parts += [in_order[done:first], by_time[here]]
            done = end
    return np.concatenate([*parts, in_order[done:]])


def _without_size(member: _Sequence, members: Sequence[_Sequence]) -> _Sequence:
    """Return the sequence without sizes of kinds whose size is unknown on some rank."""
    unknown = np.unique(np.concatenate([other.kind[other.size < 0] for other in members]))
    size = np.where(np.isin(member.kind, unknown), -1, member.size)
    return _Sequence(member.trace, member.rows, member.start_ns, member.end_ns, member.kind, size, member.bytes, member.sequence)


# --- three ways to match; each returns a place in every rank's sequence, or -1 ----------------------------------------


def _by_order(members: Sequence[_Sequence]) -> Int64 | None:
    """Return the k-th of every rank, if all ranks have the same sequence."""
    first = members[0]
    same = all(
        len(member) == len(first) and (member.kind == first.kind).all() and (member.size == first.size).all()
        for member in members
    )
    return np.tile(np.arange(len(first))[:, None], (1, len(members))) if same else None


def _to_the_shortest(members: Sequence[_Sequence]) -> Int64:
    """Return the k-th of every rank as far as each goes: nothing better is known."""
    longest = max(len(member) for member in members)
    place = np.tile(np.arange(longest)[:, None], (1, len(members)))
    return np.where(place < np.array([len(member) for member in members]), place, NONE)


def _by_number(members: Sequence[_Sequence]) -> Int64 | None:
    """Return those with the same number, if every collective has a different one."""
    for member in members:
        if (member.sequence < 0).any() or len(np.unique(member.sequence)) < len(member):
            return None
    numbers = np.unique(np.concatenate([member.sequence for member in members]))
    places = np.full((len(numbers), len(members)), NONE, np.int64)
    for column, member in enumerate(members):
        places[np.searchsorted(numbers, member.sequence), column] = np.arange(len(member))
    return places


def _by_time(members: Sequence[_Sequence], tolerance_ns: int, slack_ns: int) -> Int64:
    """Return collectives that were open together, in the order of their ends.

    Of the next collectives of all ranks, the one that ends first is matched with those that began before its end, unless they end
    nearer to the collective after it. One that begins and ends within the slack after that end is matched as well.
    """
    start = [member.start_ns.tolist() for member in members]
    end = [member.end_ns.tolist() for member in members]
    at = [0] * len(members)
    found: list[list[int]] = []
    left = {column for column in range(len(members)) if end[column]}
    while left:
        first = min(left, key=lambda column: end[column][at[column]])
        ended = end[first][at[first]]
        following = end[first][at[first] + 1] if at[first] + 1 < len(end[first]) else None
        row = [NONE] * len(members)
        for column in sorted(left):
            place = at[column]
            if start[column][place] > ended + tolerance_ns and end[column][place] > ended + tolerance_ns + slack_ns:
                continue
            if column != first and following is not None and following - end[column][place] < end[column][place] - ended:
                continue
            row[column] = place
        for column, place in enumerate(row):
            if place != NONE:
                at[column] += 1
                if at[column] == len(end[column]):
                    left.discard(column)
        found.append(row)
    return np.array(found, np.int64).reshape(len(found), len(members))


# --- what is known about each match -----------------------------------------------------------------------------------


def gathered(columns: Sequence[Int64], places: Int64, missing: int) -> Int64:
    """Return a value per match and rank: that of the rank's column at its place, or `missing`."""
    found = np.full(places.shape, missing, np.int64)
    for number, column in enumerate(columns):
        known = places[:, number] != NONE
        found[known, number] = column[places[known, number]]
    return found


def _possible(members: Sequence[_Sequence], places: Int64, synchronizing: Bool, tolerance_ns: int) -> Bool:
    """Return which matches are possible in time: no rank leaves a synchronizing collective before the last has arrived."""
    latest = gathered([member.start_ns for member in members], places, np.iinfo(np.int64).min).max(axis=1)
    earliest = gathered([member.end_ns for member in members], places, np.iinfo(np.int64).max).min(axis=1)
    kind = gathered([member.kind for member in members], places, -1).max(axis=1)
    found: Bool = ~synchronizing[kind] | (latest <= earliest + tolerance_ns + CLOCKS_AGREE_NS)
    return found


def _ends_apart(members: Sequence[_Sequence], places: Int64) -> Bool:
    """Return which matches have ends so far apart that they are probably of different collectives."""
    ends = gathered([member.end_ns for member in members], places, 0)
    distance = np.abs(np.diff(ends, axis=0)).min(axis=1)
    nearest = np.minimum(np.append(distance, _FAR), np.append(_FAR, distance))
    found: Bool = np.ptp(ends, axis=1) > _APART * nearest
    return found


def _group_match(
    group: RankGroup,
    members: Sequence[_Sequence],
    absent: Sequence[int],
    names: Sequence[str],
    places: Int64,
    method: str,
    possible: Bool | None,
) -> GroupMatch:
    kind = gathered([member.kind for member in members], places, NONE)
    size = gathered([member.size for member in members], places, NONE)
    rows = gathered([member.rows for member in members], places, NONE)
    known = places != NONE
    ranks = [member.trace for member in members] + list(absent)
    order = np.argsort(ranks, kind="stable")
    whole = np.concatenate([rows, np.full((len(rows), len(absent)), NONE, np.int64)], axis=1)
    return GroupMatch(
        group=group,
        ranks=np.array(ranks, np.int64)[order],
        rows=whole[:, order],
        kind=[names[code] for code in _usual(kind, known).tolist()],
        size_bytes=gathered([member.bytes for member in members], places, -1).max(axis=1, initial=-1),
        mismatched=_differ(kind, known) | _differ(size, known),
        method=method,
        impossible=np.zeros(len(rows), np.bool_) if possible is None else ~possible,
    )


def _usual(values: Int64, known: Bool) -> Int64:
    """Return the value of the first rank that has one."""
    first = known.argmax(axis=1)
    return np.asarray(values[np.arange(len(values)), first])


def _differ(values: Int64, known: Bool) -> Bool:
    differ: Bool = ((values != _usual(values, known)[:, None]) & known).any(axis=1) if len(values) else np.zeros(0, np.bool_)
    return differ

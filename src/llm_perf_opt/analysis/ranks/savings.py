"""What it would save if a rank took no longer than the others: its delay.

The job is replayed without the excess of one rank. Everything that waited for it, on any rank and through any number of
collectives, begins earlier, but only until something else holds it back: work of the rank itself, another collective of the
stream, another rank that enters as late. These margins are known from the times. What reaches the end of the job is saved.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llm_perf_opt.analysis.ranks.excess import excess_of
from llm_perf_opt.analysis.ranks.programs import Chain, key_of, programs
from llm_perf_opt.analysis.ranks.rank_trace import NameIndex, RankTrace
from llm_perf_opt.traces.events import Bool, Int64
from llm_perf_opt.traces.nesting import NONE

_Advance = Int64 | None
"""How much earlier something happens without the excess of each late rank; None for 0."""


@dataclass(frozen=True)
class Meeting:
    """Collectives of one process group: a row per collective, a column per rank."""

    ranks: Int64
    """Indices of the traces."""
    rows: Int64
    """Rows of their collectives; -1 if a rank does not have it."""
    kind: Sequence[str]
    size_bytes: Int64
    joined: Bool
    """Which collectives end on all ranks only after the last has entered, and have entries that can be compared."""
    directed: bool = False
    """Whether the ranks have different parts in it: one sends, one receives."""


@dataclass(frozen=True)
class Savings:
    """What removing the excess of each rank saves."""

    total_ns: Int64
    """Per rank, of the time of the job."""
    known: Bool
    """Per rank, whether any of its collectives could be compared with those of others."""
    parts_ns: list[Int64]
    """Per meeting: per collective and rank, the part of the rank's total that arose since its previous collective; -1 if
    no other rank did the same work in the same order, unless the rank's own other times show it."""


def savings(ranks: Sequence[RankTrace], offsets: Sequence[int], meetings: Sequence[Meeting]) -> Savings:
    """Return what removing the excess of each rank would save. `offsets` put the ranks on one clock."""
    total, parts = np.zeros(len(ranks), np.int64), [np.zeros(meeting.rows.shape, np.int64) for meeting in meetings]
    lines: list[_Line] = []
    for program in programs(ranks, _keys(ranks, meetings), _beginnings(ranks, offsets)):
        excess = excess_of(program)
        if len(program.chains) == 1 or any((np.diff(chain.start_ns) < 0).any() for chain in program.chains):
            for chain in program.chains:
                _set_unknown(chain.index, meetings, parts)
        lines += [
            _Line(*each, offsets[each[0].index]) for each in zip(program.chains, excess.work_ns, excess.lag_ns, strict=True)
        ]
    late = [line for line in lines if line.work_ns.any() or line.lag_ns.any()]
    known = _compared(len(ranks), meetings)
    if not late:
        return Savings(total, known, parts)
    for column, line in enumerate(late):
        line.column, line.columns = column, len(late)
    for line in lines:
        line.columns = len(late)
    met = _met(lines, meetings, len(ranks))
    for _, collective in sorted(met, key=lambda entry: entry[0]):
        _enter(collective)
    saved = _at_end(lines, meetings)
    for line in late:
        total[line.chain.index] = saved[line.chain.index]
        _set_parts(line, int(total[line.chain.index]), meetings, parts)
    return Savings(total, known, parts)


def _compared(count: int, meetings: Sequence[Meeting]) -> Bool:
    joined = [index for meeting in meetings if meeting.joined.any() for index in meeting.ranks.tolist()]
    return np.isin(np.arange(count), joined)


def _beginnings(ranks: Sequence[RankTrace], offsets: Sequence[int]) -> list[int]:
    """Return where the time of each rank begins: with its first work or, if that is unknown, with the first collective of all."""
    starts = [int(trace.collectives.start_ns[0]) - by for trace, by in zip(ranks, offsets, strict=True) if len(trace.collectives)]
    together = min(starts, default=0)
    return [together + by if trace.first_ns is None else trace.first_ns for trace, by in zip(ranks, offsets, strict=True)]


def _keys(ranks: Sequence[RankTrace], meetings: Sequence[Meeting]) -> list[Int64]:
    """Return, per rank, a number per collective that is the same on ranks whose collectives correspond, or -1.

    Groups correspond if their ranks are as far apart and they have the same collectives.
    """
    keys = [np.full(len(trace.collectives), NONE, np.int64) for trace in ranks]
    kinds = NameIndex()
    alike: Counter[str] = Counter()
    for meeting in meetings:
        named = [f"{kind} {size}" for kind, size in zip(meeting.kind, meeting.size_bytes.tolist(), strict=True)]
        axis = f"{(meeting.ranks - meeting.ranks[0]).tolist()} {hash(tuple(named))}"
        same_ranks = f"{meeting.ranks.tolist()} {axis}"
        alike[same_ranks] += 1
        axis += f" {alike[same_ranks]}"
        for column, index in enumerate(meeting.ranks.tolist()):
            part = f"{axis} {column if meeting.directed else 0}"
            code = np.array([kinds[f"{part} {name}"] for name in named], np.int64)
            there = np.flatnonzero(meeting.rows[:, column] != NONE)
            keys[index][meeting.rows[there, column]] = key_of(code[there], there)
    return keys


# --- the replay -------------------------------------------------------------------------------------------------------


class _Line:
    """The replay of one rank."""

    column: int | None = None
    """Of the advances, the one without the excess of this rank."""
    columns = 0

    def __init__(self, chain: Chain, work_ns: Int64, lag_ns: Int64, offset: int) -> None:
        self.chain, self.offset, self.work_ns, self.lag_ns = chain, offset, work_ns, lag_ns
        self.ends: list[_Advance] = [None] * len(chain.rows)
        """Per collective, the advance of its end."""
        self._work, self._lag = work_ns.tolist(), lag_ns.tolist()
        self._place, self._is_wait, self._free = chain.place.tolist(), chain.is_wait.tolist(), chain.free_ns.tolist()
        self._start, self._end = chain.start_ns.tolist(), chain.end_ns.tolist()
        self._before = chain.before.tolist()
        self._next = 0
        self._now: _Advance = None
        self._ready: dict[int, tuple[_Advance, int]] = {}

    def enter(self, place: int) -> _Advance:
        """Return the advance of the entry of a collective."""
        while place not in self._ready:
            self._pass()
        now, free = self._ready.pop(place)
        held = [(now, free)] + [(self.ends[other], self._end[other]) for other in self._before[place] if other != NONE]
        return self._plus(_latest(held), self._lag[place])

    def at_end(self) -> tuple[int, _Advance]:
        """Return when everything is done, on the common clock, and its advance."""
        while self._next < len(self._place):
            self._pass()
        now = self._plus(self._now, self._work[-1])
        last = np.argsort(self.chain.end_ns)[-1:].tolist()
        held = [(now, self.chain.free_at_end_ns)] + [(self.ends[place], self._end[place]) for place in last]
        return max(end for _, end in held) - self.offset, _latest(held)

    def _pass(self) -> None:
        """Pass the next event."""
        number, place, free = self._next, self._place[self._next], self._free[self._next]
        self._now = self._plus(self._now, self._work[number])
        if self._is_wait[number]:
            self._now = _latest([(self._now, free), (self.ends[place], self._end[place])])
        else:
            self._ready[place] = (self._now, free)
        self._next += 1

    def _plus(self, advance: _Advance, ns: int) -> _Advance:
        if not ns or self.column is None:
            return advance
        found: Int64 = _known(advance, self.columns).copy()
        found[self.column] += ns
        return found


def _known(advance: _Advance, columns: int) -> Int64:
    found: Int64 = np.zeros(columns, np.int64) if advance is None else advance
    return found


def _latest(held: Sequence[tuple[_Advance, int]]) -> _Advance:
    """Return the advance of the latest of several moments, each with its own."""
    if all(advance is None for advance, _ in held):
        return None
    latest = max([moment for _, moment in held])
    fixed = min([latest - moment for advance, moment in held if advance is None], default=None)
    moved = [advance + (latest - moment) if latest > moment else advance for advance, moment in held if advance is not None]
    found: Int64 = moved[0] if fixed is None else np.minimum(moved[0], fixed)
    for other in moved[1:]:
        found = np.minimum(found, other)
    return found


def _met(lines: Sequence[_Line], meetings: Sequence[Meeting], count: int) -> Iterator[tuple[int, list[tuple[_Line, int]]]]:
    """Return the collectives of all ranks, with when the last rank entered them. What is not matched is of one rank alone."""
    of_rank: list[_Line | None] = [None] * count
    places = {}
    for line in lines:
        of_rank[line.chain.index] = line
        places[line.chain.index] = {row: place for place, row in enumerate(line.chain.rows.tolist())}
    alone = {line.chain.index: set(range(len(line.chain.rows))) for line in lines}
    for meeting in meetings:
        members = meeting.ranks.tolist()
        if any(of_rank[index] is None for index in members):
            continue
        for joined, rows in zip(meeting.joined.tolist(), meeting.rows.tolist(), strict=True):
            at = [places[index].get(row) for index, row in zip(members, rows, strict=True)] if joined else [None]
            if None in at:
                continue
            collective = []
            for index, place in zip(members, at, strict=True):
                line = of_rank[index]
                if line is not None and place is not None:
                    collective.append((line, place))
                    alone[index].discard(place)
            yield max(line._start[place] - line.offset for line, place in collective), collective
    for line in lines:
        for place in alone[line.chain.index]:
            yield line._start[place] - line.offset, [(line, place)]


def _enter(collective: Sequence[tuple[_Line, int]]) -> None:
    """Set the advance of the end of a collective on all its ranks."""
    held = [(line.enter(place), line._start[place] - line.offset) for line, place in collective]
    advance = _latest(held)
    for line, place in collective:
        line.ends[place] = advance


def _at_end(lines: Sequence[_Line], meetings: Sequence[Meeting]) -> dict[int, int]:
    """Return the advance of the end of the job without the excess of each late rank; ranks that share nothing have a job each."""
    job = {line.chain.index: line.chain.index for line in lines}
    for meeting in meetings:
        members = [index for index in meeting.ranks.tolist() if index in job]
        joined = {job[index] for index in members}
        job = {index: min(joined) if of in joined else of for index, of in job.items()}
    found: dict[int, int] = {}
    for of in set(job.values()):
        mine = [line for line in lines if job[line.chain.index] == of]
        advance = _known(_latest([(advance, end) for end, advance in (line.at_end() for line in mine)]), mine[0].columns)
        found |= {line.chain.index: max(int(advance[line.column]), 0) for line in mine if line.column is not None}
    return found


def _set_unknown(index: int, meetings: Sequence[Meeting], parts: Sequence[Int64]) -> None:
    for meeting, part in zip(meetings, parts, strict=True):
        part[:, meeting.ranks == index] = NONE


def _set_parts(line: _Line, total: int, meetings: Sequence[Meeting], parts: Sequence[Int64]) -> None:
    """Divide the saving of a rank among its collectives: to each what is saved from then on to the end."""
    column = line.column or 0
    advances = [0 if advance is None else int(advance[column]) for advance in line.ends]
    kept = np.minimum.accumulate(np.array([*advances, total], np.int64)[::-1])[::-1][:-1]
    new = np.maximum(np.diff(np.maximum(kept, 0), prepend=0), 0)
    by_row = np.zeros(int(line.chain.rows.max(initial=0)) + 1, np.int64)
    by_row[line.chain.rows] = new
    for meeting, part in zip(meetings, parts, strict=True):
        for at in np.flatnonzero(meeting.ranks == line.chain.index).tolist():
            rows = meeting.rows[:, at]
            there = (rows != NONE) & (rows < len(by_row))
            part[there, at] = np.maximum(part[there, at], np.where(by_row[rows[there]] > 0, by_row[rows[there]], NONE))

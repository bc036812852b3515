"""What it would save if a rank took no longer than the others: its delay.

The job is replayed without the excess of one rank. Everything that waited for it, on any rank and through any number of
collectives, begins earlier, but only until something else holds it back: work of the rank itself, another collective of the
stream, another rank that enters as late. These margins are known from the times. What reaches the end of the job is saved.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llm_perf_opt.analysis.ranks.excess import excess_of, late_starts
from llm_perf_opt.analysis.ranks.programs import Chain, key_of, programs
from llm_perf_opt.analysis.ranks.rank_trace import NameIndex, RankTrace
from llm_perf_opt.analysis.ranks.replay import Line, replay
from llm_perf_opt.traces.events import Bool, Int64
from llm_perf_opt.traces.nesting import NONE

_NO_OTHER = "no other rank runs the same program: what is slow in every step is not seen"
_NO_STEPS = "no other rank runs the same program, and fewer than four of its steps are alike"
_NO_PROGRAM = "its collectives do not correspond to those of the other ranks"
_Compared = tuple[Chain, Int64, Int64]
"""A rank and its excess: in its work, and before its entries."""


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
    """Per rank, whether any of its collectives could be compared with those of others, and its work with other work."""
    why: list[str]
    """Per rank, why that is not so, or what is not seen; empty if all is."""
    of_start_ns: Int64
    """Per rank, what it would save if its recorded work began with that of the others. Not in its total."""
    parts_ns: list[Int64]
    """Per meeting: per collective and rank, the part of the rank's total that arose since its previous collective; -1 if
    no other rank did the same work in the same order, unless the rank's own other times show it."""


def savings(ranks: Sequence[RankTrace], offsets: Sequence[int], meetings: Sequence[Meeting]) -> Savings:
    """Return what removing the excess of each rank would save. `offsets` put the ranks on one clock."""
    total, parts = np.zeros(len(ranks), np.int64), [np.zeros(meeting.rows.shape, np.int64) for meeting in meetings]
    compared: list[_Compared] = []
    joined = _joined(len(ranks), meetings)
    known, starts = np.zeros(len(ranks), np.bool_), np.zeros(len(ranks), np.int64)
    why = [_NO_PROGRAM if has else "" for has in joined.tolist()]
    for program in programs(ranks, _keys(ranks, meetings), _beginnings(ranks, offsets)):
        excess, mine = excess_of(program), [chain.index for chain in program.chains]
        known[mine] = excess.known & joined[mine]
        for index in mine:
            why[index] = "" if len(mine) > 1 or not joined[index] else _NO_OTHER if excess.known else _NO_STEPS
        if len(mine) > 1 and all(ranks[index].first_ns is not None for index in mine):
            starts[mine] = late_starts(np.array([(ranks[index].first_ns or 0) - offsets[index] for index in mine]))
        if len(program.chains) == 1 or any((np.diff(chain.start_ns) < 0).any() for chain in program.chains):
            for chain in program.chains:
                _set_unknown(chain.index, meetings, parts)
        compared += zip(program.chains, excess.work_ns, excess.lag_ns, strict=True)
    lines, of_starts = _numbered(compared, offsets, meetings, starts), np.zeros(len(ranks), np.int64)
    late = [place for place, line in enumerate(lines) if line.late]
    starters = [place for place, line in enumerate(lines) if line.late_start_ns]
    if late or starters:
        advances = replay(lines, _jobs(lines, meetings))
        for column, place in enumerate(late):
            line = lines[place]
            index = line.chain.index
            total[index] = advances.of_end_ns[place, column]
            _set_parts(line, advances.of_collectives_ns[line.collective, column], int(total[index]), meetings, parts)
        for column, place in enumerate(starters, len(late)):
            of_starts[lines[place].chain.index] = advances.of_end_ns[place, column]
    return Savings(total, known, why, of_starts, parts)


def _joined(count: int, meetings: Sequence[Meeting]) -> Bool:
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


def _numbered(compared: Sequence[_Compared], offsets: Sequence[int], meetings: Sequence[Meeting], starts: Int64) -> list[Line]:
    """Return the ranks with the numbers of their collectives. What is not matched is of one rank alone."""
    places, numbers = {}, {}
    for chain, _, _ in compared:
        place = np.full(int(chain.rows.max(initial=NONE)) + 2, NONE, np.int64)
        place[chain.rows] = np.arange(len(chain.rows))
        places[chain.index], numbers[chain.index] = place, np.full(len(chain.rows), NONE, np.int64)
    total = 0
    for meeting in meetings:
        members = meeting.ranks.tolist()
        if not numbers.keys() >= set(members):
            continue
        rows = [np.minimum(mine, len(places[index]) - 1) for index, mine in zip(members, meeting.rows.T, strict=True)]
        at = [places[index][mine] for index, mine in zip(members, rows, strict=True)]
        whole = np.flatnonzero(meeting.joined & (np.stack(at) != NONE).all(axis=0))
        for index, place in zip(members, at, strict=True):
            numbers[index][place[whole]] = total + np.arange(len(whole))
        total += len(whole)
    found = []
    for chain, work, lag in compared:
        mine = numbers[chain.index]
        alone = np.flatnonzero(mine == NONE)
        mine[alone] = total + np.arange(len(alone))
        total += len(alone)
        found.append(Line(chain, work, lag, offsets[chain.index], mine, int(starts[chain.index])))
    return found


def _jobs(lines: Sequence[Line], meetings: Sequence[Meeting]) -> list[int]:
    """Return a number per rank, the same for those that share a collective, directly or through others."""
    job = {line.chain.index: line.chain.index for line in lines}
    for meeting in meetings:
        members = [index for index in meeting.ranks.tolist() if index in job]
        joined = {job[index] for index in members}
        job = {index: min(joined) if of in joined else of for index, of in job.items()}
    return [job[line.chain.index] for line in lines]


def _set_unknown(index: int, meetings: Sequence[Meeting], parts: Sequence[Int64]) -> None:
    for meeting, part in zip(meetings, parts, strict=True):
        part[:, meeting.ranks == index] = NONE


def _set_parts(line: Line, advances: Int64, total: int, meetings: Sequence[Meeting], parts: Sequence[Int64]) -> None:
    """Divide the saving of a rank among its collectives: to each what is saved from then on to the end."""
    kept = np.minimum.accumulate(np.append(advances, total)[::-1])[::-1][:-1]
    new = np.maximum(np.diff(np.maximum(kept, 0), prepend=0), 0)
    by_row = np.zeros(int(line.chain.rows.max(initial=0)) + 1, np.int64)
    by_row[line.chain.rows] = new
    for meeting, part in zip(meetings, parts, strict=True):
        for at in np.flatnonzero(meeting.ranks == line.chain.index).tolist():
            rows = meeting.rows[:, at]
            there = (rows != NONE) & (rows < len(by_row))
            part[there, at] = np.maximum(part[there, at], np.where(by_row[rows[there]] > 0, by_row[rows[there]], NONE))

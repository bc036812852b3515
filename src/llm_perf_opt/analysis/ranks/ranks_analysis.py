"""The analysis of several ranks, as one record."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from llm_perf_opt.analysis.ranks.clocks import Clocks
from llm_perf_opt.analysis.ranks.document import (
    CauseLine,
    CollectiveLine,
    HostLine,
    RankLine,
    RanksAnalysis,
    RankStepLine,
)
from llm_perf_opt.analysis.ranks.drift import at_one_speed
from llm_perf_opt.analysis.ranks.kind_table import kind_lines
from llm_perf_opt.analysis.ranks.problems import drift_problems, named_ranks, rank_problems
from llm_perf_opt.analysis.ranks.rank_trace import LEFT_LATE, Intervals, NameIndex, RankFile, RankTrace
from llm_perf_opt.analysis.ranks.savings import Meeting, Savings, savings
from llm_perf_opt.analysis.ranks.timeline import shared_ns, without
from llm_perf_opt.analysis.ranks.transfers import transfers
from llm_perf_opt.analysis.ranks.waits import COMPARABLE, WHY, GroupWaits, LateCauses, group_waits, late_causes
from llm_perf_opt.analysis.trace.document import ProblemLine
from llm_perf_opt.analysis.trace.intervals import union_blocks
from llm_perf_opt.traces.events import Int64
from llm_perf_opt.traces.nesting import NONE


def analyze_ranks(files: Sequence[RankFile], source: str) -> RanksAnalysis:
    """Return the analysis of several ranks, sorted by rank."""
    numbers = [entry.rank for entry in files]
    ranks, drifts, (clocks, matches) = at_one_speed([entry.trace for entry in files])
    waits = [group_waits(ranks, match, clocks) for match in matches]
    offsets = [offset or 0 for offset in clocks.offsets(len(ranks))]
    saved = savings(ranks, offsets, [*map(_meeting, waits), *_transfers(ranks, clocks)])
    names = NameIndex()
    causes = [late_causes(ranks, group, parts, names) for group, parts in zip(waits, saved.parts_ns, strict=False)]
    lines = _collectives(ranks, numbers, waits, causes, list(names))
    return RanksAnalysis(
        source=source,
        complete=all(entry.complete for entry in files),
        problems=[*_of_files(files), *rank_problems(ranks, numbers, clocks, matches, lines), *drift_problems(numbers, drifts)],
        world_size=max((trace.world_size for trace in ranks), default=0) or None,
        hosts=_hosts(numbers, clocks, drifts),
        ranks=_ranks(files, ranks, clocks, waits, lines, saved),
        collectives=lines,
        collective_kinds=kind_lines(ranks, waits, clocks),
        steps=_steps(ranks, numbers, lines),
        causes=_causes(lines),
    )


def _meeting(group: GroupWaits) -> Meeting:
    match = group.match
    ended = (group.end_ns.min(axis=1) >= group.arrived_ns) | match.synchronizing
    return Meeting(match.ranks, match.rows, match.kind, match.size_bytes, ended & np.isin(group.why, COMPARABLE))


def _transfers(ranks: Sequence[RankTrace], clocks: Clocks) -> list[Meeting]:
    """Return the transfers between ranks whose clocks are known."""
    offsets = clocks.offsets(len(ranks))
    return [
        Meeting(found.ranks, found.rows, found.kind, found.size_bytes, found.joined, directed=True)
        for found in transfers(ranks, [offset or 0 for offset in offsets])
        if all(offsets[index] is not None for index in found.ranks.tolist())
    ]


def _of_files(files: Sequence[RankFile]) -> list[ProblemLine]:
    """Return the problems of the traces: one line for each, with the ranks that have it."""
    found: dict[tuple[str, bool], list[tuple[int, ProblemLine]]] = {}
    for entry in files:
        for problem in entry.problems:
            found.setdefault((problem.id, problem.fatal), []).append((entry.rank, problem))
    return [_of_ranks(having) for having in found.values()]


def _of_ranks(having: Sequence[tuple[int, ProblemLine]]) -> ProblemLine:
    """Return one problem of several ranks, with the words of the first."""
    first, problem = having[0]
    who = named_ranks(sorted({rank for rank, _ in having}))
    alike = len({other.what for _, other in having}) == 1
    what = problem.what if alike else f"{problem.what} (rank {first})"
    return ProblemLine(problem.id, f"{who}: {what}", problem.fatal, problem.remedy)


def _hosts(numbers: Sequence[int], clocks: Clocks, drifts: Sequence[float]) -> list[HostLine]:
    return [
        HostLine(
            host=clock.host,
            ranks=[numbers[index] for index in clock.traces],
            offset_ns=clock.offset_ns,
            residual_ns=clock.residual_ns if clock.offset_ns is not None else None,
            pairs=clock.pairs,
            drift_ppm=round(drifts[clock.traces[0]] * 1e6, 3),
        )
        for clock in clocks.hosts
    ]


# --- collectives ------------------------------------------------------------------------------------------------------


def _collectives(
    ranks: Sequence[RankTrace],
    numbers: Sequence[int],
    waits: Sequence[GroupWaits],
    causes: Sequence[LateCauses],
    names: list[str],
) -> list[CollectiveLine]:
    """Return all collectives in the order in which their last rank entered them."""
    order = np.argsort(np.concatenate([np.empty(0, np.int64), *(group.arrived_ns for group in waits)]), kind="stable")
    index = np.empty(len(order), np.int64)
    index[order] = np.arange(len(order))
    found: list[CollectiveLine] = []
    for group, cause in zip(waits, causes, strict=True):
        mine = index[len(found) : len(found) + len(group.arrived_ns)]
        found += _of_group(numbers, group, mine.tolist(), _step_names(ranks, group), _named_causes(cause, names))
    return [found[place] for place in order.tolist()]


class _Cause(NamedTuple):
    """What made the last rank of a collective late."""

    name: str
    ns: int | None
    where: str
    newly_ns: int


def _named_causes(causes: LateCauses, names: Sequence[str]) -> list[_Cause]:
    columns = (causes.name, causes.ns, causes.on_device, causes.newly_ns)
    return [
        _Cause("", None, "", newly)
        if name == NONE
        else _Cause(names[name], ns, "" if names[name] == LEFT_LATE else "device" if on_device else "host", newly)
        for name, ns, on_device, newly in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _of_group(
    numbers: Sequence[int], group: GroupWaits, index: Sequence[int], steps: Sequence[str], causes: Sequence[_Cause]
) -> list[CollectiveLine]:
    """Return the collectives of a group; `index` is their place among all."""
    match, name, size = group.match, group.match.group.name, group.match.group.size or None
    who = [numbers[place] for place in match.ranks.tolist()]
    values = (match.size_bytes, group.skew_ns, group.transfer_ns, group.wait_ns, group.late_ns)
    known = (_or_none(column) for column in values)
    last = [None if place == NONE else numbers[place] for place in group.last.tolist()]
    whole: list[bool] = np.all(group.known, axis=1).tolist()
    there: list[list[bool]] = group.known.tolist()
    columns = zip(index, match.kind, *known, last, steps, causes, match.mismatched.tolist(), group.why.tolist(), strict=True)
    found = []
    for row, (place, kind, moved, skew, transfer, wait, late, latest, step, cause, mismatched, why) in enumerate(columns):
        line = CollectiveLine(
            index=place,
            kind=kind,
            bytes=moved,
            ranks=list(who) if whole[row] else [rank for rank, present in zip(who, there[row], strict=True) if present],
            start_skew_ns=skew,
            last_rank=latest,
            transfer_ns=transfer,
            group=name,
            group_size=size,
            wait_ns=wait,
            late_ns=late,
            step=step,
            cause=cause.name,
            cause_ns=cause.ns,
            cause_on=cause.where,
            missing=[] if whole[row] else [rank for rank, present in zip(who, there[row], strict=True) if not present],
            mismatched=mismatched,
            why=WHY[why],
            newly_late_ns=None if late is None or cause.newly_ns < 0 else cause.newly_ns,
        )
        found.append(line)
    return found


def _or_none(values: Int64) -> list[int | None]:
    return [None if value < 0 else value for value in values.tolist()]


def _step_names(ranks: Sequence[RankTrace], group: GroupWaits) -> list[str]:
    """Return the step of each collective, if all its ranks agree on it."""
    names = NameIndex()
    none = names[""]
    code = np.full(group.match.rows.shape, NONE, np.int64)
    for column, index in enumerate(group.match.ranks.tolist()):
        codes = np.array([*(names[f"{step.name} {step.number}"] for step in ranks[index].steps), none], np.int64)
        there = np.flatnonzero(group.match.rows[:, column] != NONE)
        code[there, column] = codes[ranks[index].collectives.step[group.match.rows[there, column]]]
    usual = code.max(axis=1)
    agree = ((code == usual[:, None]) | (code == NONE)).all(axis=1) & (usual != NONE)
    named = list(names)
    return [named[place] for place in np.where(agree, usual, none).tolist()]


# --- ranks ------------------------------------------------------------------------------------------------------------


def _ranks(
    files: Sequence[RankFile],
    traces: Sequence[RankTrace],
    clocks: Clocks,
    waits: Sequence[GroupWaits],
    lines: Sequence[CollectiveLine],
    saved: Savings,
) -> list[RankLine]:
    offsets = clocks.offsets(len(files))
    lateness = _lateness(lines)
    found = []
    for index, entry in enumerate(files):
        trace, offset = traces[index], offsets[index]
        known = trace.span_ns > 0
        waited, undivided = _divided(trace, index, waits, offset or 0) if known else (None, None)
        last, late = lateness.get(entry.rank, (None, None))
        found.append(
            RankLine(
                rank=entry.rank,
                file=entry.file,
                busy_ns=trace.busy_ns if known else None,
                idle_ns=trace.span_ns - trace.busy_ns if known else None,
                exposed_comm_ns=trace.exposed_ns if known else None,
                offset_ns=offset,
                host=trace.host,
                device=trace.device,
                span_ns=trace.span_ns if known else None,
                comm_ns=trace.comm_ns if known else None,
                compute_ns=trace.busy_ns - trace.exposed_ns if known else None,
                wait_ns=waited,
                transfer_ns=None if waited is None else trace.exposed_ns - waited - (undivided or 0),
                collectives=len(trace.collectives),
                last=last,
                late_ns=late,
                undivided_ns=undivided,
                newly_late_ns=int(saved.total_ns[index]) if saved.known[index] else None,
                delay_why=saved.why[index],
                late_start_ns=int(saved.of_start_ns[index]),
                why=trace.why,
            )
        )
    return found


def _lateness(lines: Sequence[CollectiveLine]) -> dict[int, tuple[int, int]]:
    """Return, per rank with collectives whose waiting is known: how often it was last, and how late."""
    found: dict[int, list[int]] = {}
    for line in lines:
        if line.wait_ns is None:
            continue
        for rank in line.ranks:
            found.setdefault(rank, [0, 0])
        if line.last_rank is not None:
            mine, late = found[line.last_rank], line.late_ns or 0
            mine[0] += 1
            mine[1] += late
    return {rank: (last, late) for rank, (last, late) in found.items()}


def _divided(trace: RankTrace, index: int, waits: Sequence[GroupWaits], offset: int) -> tuple[int | None, int]:
    """Return the exposed time in which a rank was in a collective that another rank had not entered yet, and what is not divided.

    Not divided is the exposed time in collectives whose waiting is unknown, unless the rank waited in another one. The first is
    None if it is known for no collective.
    """
    starts, ends = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    unknown = np.ones(len(trace.collectives), np.bool_)
    for group in waits:
        for column in np.flatnonzero(group.match.ranks == index).tolist():
            kept = group.known[:, column] & (group.wait_ns >= 0)
            unknown[group.match.rows[kept, column]] = False
            starts.append(group.start_ns[kept, column] + offset)
            ends.append(np.minimum(group.end_ns[kept, column], group.arrived_ns[kept]) + offset)
    if len(unknown) and unknown.all():
        return None, trace.exposed_ns
    waiting = union_blocks(np.concatenate(starts), np.concatenate(ends))
    others = union_blocks(trace.collectives.start_ns[unknown], trace.collectives.end_ns[unknown])
    waited = shared_ns(trace.exposed, Intervals(waiting.start_ns, waiting.end_ns))
    return waited, shared_ns(trace.exposed, without(others, waiting))


# --- steps and causes -------------------------------------------------------------------------------------------------


def _steps(ranks: Sequence[RankTrace], numbers: Sequence[int], lines: Sequence[CollectiveLine]) -> list[RankStepLine]:
    """Return every step that has collectives, in order, with the time of the ranks that take part in them."""
    walls: dict[str, dict[int, int]] = {}
    for trace, number in zip(ranks, numbers, strict=True):
        for step in trace.steps:
            walls.setdefault(f"{step.name} {step.number}", {})[number] = step.wall_ns
    mine: dict[str, list[CollectiveLine]] = {}
    for line in lines:
        if line.step:
            mine.setdefault(line.step, []).append(line)
    taking_part = {step: {rank for line in found for rank in line.ranks} for step, found in mine.items()}
    return [_step(step, [walls[step][rank] for rank in taking_part[step]], found) for step, found in mine.items()]


def _step(step: str, walls: Sequence[int], lines: Sequence[CollectiveLine]) -> RankStepLine:
    late: Counter[int] = Counter()
    newly: Counter[int] = Counter()
    for line in lines:
        if line.last_rank is not None and line.late_ns is not None:
            late[line.last_rank] += line.late_ns
            newly[line.last_rank] += line.newly_late_ns or 0
    straggler = max(late, key=lambda rank: (newly[rank], late[rank]), default=None)
    causes: Counter[tuple[bool, str]] = Counter()
    for line in lines:
        if line.last_rank == straggler and line.cause:
            causes[line.cause != LEFT_LATE, line.cause] += min(line.cause_ns or 0, line.late_ns or 0)
    worst = max(causes, key=lambda cause: (cause[0], causes[cause]), default=(False, ""))
    return RankStepLine(
        step=step,
        collectives=len(lines),
        slowest_wall_ns=max(walls),
        fastest_wall_ns=min(walls),
        wait_ns=_sum(line.wait_ns for line in lines),
        straggler=straggler,
        late_ns=late[straggler] if straggler is not None else None,
        newly_late_ns=_sum(line.newly_late_ns for line in lines if line.last_rank == straggler and line.late_ns is not None),
        cause=worst[1],
    )


def _causes(lines: Sequence[CollectiveLine]) -> list[CauseLine]:
    """Return what made each rank late, the most late time first; that it was behind already comes last."""
    found: dict[tuple[int, str, str], list[CollectiveLine]] = {}
    for line in lines:
        if line.last_rank is not None and line.cause:
            found.setdefault((line.last_rank, line.cause, line.cause_on), []).append(line)
    made = [
        CauseLine(
            rank, cause, where, len(mine), sum(line.cause_ns or 0 for line in mine), sum(line.late_ns or 0 for line in mine)
        )
        for (rank, cause, where), mine in found.items()
    ]
    return sorted(made, key=lambda line: (line.cause == LEFT_LATE, -line.late_ns, line.rank, line.cause))


def _sum(values: Iterable[int | None]) -> int | None:
    """Return the sum of the known values; None if there is none."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None

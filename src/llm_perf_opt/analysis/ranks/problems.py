"""What makes the comparison of ranks incomplete: ranks, collectives and clocks that are missing or do not fit."""

from collections.abc import Iterator, Sequence

import numpy as np

from llm_perf_opt.analysis.ranks.clocks import Clocks
from llm_perf_opt.analysis.ranks.document import CollectiveLine, listed_ranks
from llm_perf_opt.analysis.ranks.matching import GroupMatch, point_to_point
from llm_perf_opt.analysis.ranks.rank_trace import RankTrace
from llm_perf_opt.analysis.trace.document import ProblemLine
from llm_perf_opt.traces.nesting import NONE

_MOST_NAMED = 8


def rank_problems(
    ranks: Sequence[RankTrace],
    numbers: Sequence[int],
    clocks: Clocks,
    matches: Sequence[GroupMatch],
    lines: Sequence[CollectiveLine],
) -> list[ProblemLine]:
    """Return all problems between ranks."""
    return [
        *_absent_ranks(ranks, numbers, matches),
        *_without_collectives(ranks, numbers),
        *_clock_problems(ranks, numbers, clocks),
        *(problem for match in matches for problem in _match_problems(match, ranks, numbers, lines)),
        *_unmatched(ranks, matches),
    ]


def _note(identity: str, what: str, remedy: str = "") -> ProblemLine:
    return ProblemLine(identity, what, fatal=False, remedy=remedy)


def _absent_ranks(ranks: Sequence[RankTrace], numbers: Sequence[int], matches: Sequence[GroupMatch]) -> Iterator[ProblemLine]:
    world = {trace.world_size for trace in ranks if trace.world_size}
    if len(world) > 1:
        sizes = ", ".join(str(size) for size in sorted(world))
        yield _note("several_jobs", f"the traces are of jobs with different numbers of ranks: {sizes}", "Give traces of one job.")
    elif world and max(world) > len(numbers):
        what = f"{len(numbers)} of the job's {max(world):,} ranks are given: the last to enter a collective may be another one"
        yield _note("ranks_not_given", what, "Give the traces of all ranks.")
    elif not world and any(not match.group.size for match in matches):
        what = f"the traces do not state how many ranks the job has: the {len(numbers)} that are given are taken to be all"
        yield _note("size_not_stated", what)


def _without_collectives(ranks: Sequence[RankTrace], numbers: Sequence[int]) -> Iterator[ProblemLine]:
    reasons: dict[str, list[int]] = {}
    for trace, number in zip(ranks, numbers, strict=True):
        if trace.why:
            reasons.setdefault(trace.why, []).append(number)
    for why, mine in reasons.items():
        yield _note("no_collectives", f"{named_ranks(mine)}: {why}")


def _clock_problems(ranks: Sequence[RankTrace], numbers: Sequence[int], clocks: Clocks) -> Iterator[ProblemLine]:
    stated = all(trace.host for trace in ranks if len(trace.collectives))
    if clocks.apart and stated:
        yield _note("clocks_differ", "the clocks of ranks with the same host name differ: an offset is estimated for each rank")
    elif clocks.apart:
        what = "the traces do not state their hosts, and their clocks differ: an offset is estimated for each"
        yield _note("unknown_hosts", what)
    elif not stated and any(len(clock.traces) > 1 and not clock.host for clock in clocks.hosts):
        yield _note("unknown_hosts", "the traces do not state their hosts: their clocks are taken to be one")
    for clock in clocks.hosts:
        if clock.offset_ns is None:
            who = named_ranks([numbers[index] for index in clock.traces])
            what = f"{who}: the clock differs and nothing common shows its offset: times between it and other hosts are n/a"
            yield _note("no_common_collective", what, "Record the same collectives on all ranks.")


def drift_problems(numbers: Sequence[int], drifts: Sequence[float]) -> Iterator[ProblemLine]:
    """Return the note on clocks that drift, with the largest drift."""
    mine = [number for number, drift in zip(numbers, drifts, strict=True) if drift]
    if mine:
        largest = max(drifts, key=abs) * 1e6
        yield _note("clocks_drift", f"{named_ranks(mine)}: the clocks drift, by up to {largest:+.1f} ppm: times are corrected")


def _match_problems(
    match: GroupMatch, ranks: Sequence[RankTrace], numbers: Sequence[int], lines: Sequence[CollectiveLine]
) -> Iterator[ProblemLine]:
    group = f"group {match.group.name}: " if match.group.name else ""
    counts = [
        f"rank {numbers[index]}: {int(column.sum()):,}"
        for index, column in zip(match.ranks.tolist(), (match.rows == NONE).T, strict=True)
        if column.any() and not ranks[index].why
    ]
    if counts:
        more = f" and {len(counts) - _MOST_NAMED} more ranks" if len(counts) > _MOST_NAMED else ""
        what = f"{group}collectives are missing in traces ({', '.join(counts[:_MOST_NAMED])}{more}); matched by {match.method}"
        yield _note("missing_collectives", what, "Let the profilers of all ranks start and stop at the same step.")
    if match.mismatched.any():
        first = next((line for line in lines if line.mismatched and line.group == match.group.name), None)
        which = "" if first is None else f", first: collective {first.index} ({first.kind})"
        share = f"{int(match.mismatched.sum()):,} of {len(match.rows):,}"
        what = f"{group}ranks disagree on the kind or the size of {share} collectives{which}"
        yield _note("mismatched_collectives", what, "Check that all ranks run the same program on the same shapes.")
    if match.impossible.any():
        count = int(match.impossible.sum())
        what = f"{group}{count:,} of {len(match.rows):,} collectives end on one rank before another has entered them"
        remedy = "Their clocks differ, or the collectives are of several groups that the traces do not name."
        yield _note("impossible_order", what, remedy)


def _unmatched(ranks: Sequence[RankTrace], matches: Sequence[GroupMatch]) -> Iterator[ProblemLine]:
    matched = {match.group for match in matches}
    pairs = unclear = 0
    for trace in ranks:
        of_two = point_to_point(trace)
        groups = [place for place, group in enumerate(trace.groups) if group not in matched]
        pairs += int(of_two.sum())
        unclear += int((np.isin(trace.collectives.group, groups) & ~of_two).sum())
    if pairs:
        what = f"{pairs:,} transfers between two ranks (send, recv), or kernels that may be such, are not matched"
        yield _note("point_to_point", what)
    if unclear:
        what = f"{unclear:,} collectives are not matched: the traces do not state which ranks form their process group"
        yield _note("unclear_groups", what)


def named_ranks(numbers: Sequence[int]) -> str:
    """Return ranks for a sentence."""
    return f"{'ranks' if len(numbers) > 1 else 'rank'} {listed_ranks(numbers)}"

"""Transfers between two ranks (send, recv): which belong together, so that a delay can be followed along a pipeline."""

from collections.abc import Iterator, Sequence

import numpy as np

from llm_perf_opt.analysis.ranks.matching import CLOCKS_AGREE_NS, point_to_point
from llm_perf_opt.analysis.ranks.rank_trace import RankGroup, RankTrace
from llm_perf_opt.analysis.ranks.savings import Meeting
from llm_perf_opt.traces.events import Int64

_SEND, _RECEIVE, _EITHER = "send", "recv", "send_recv"


def transfers(ranks: Sequence[RankTrace], offsets: Sequence[int]) -> list[Meeting]:
    """Return the transfers of every two ranks that correspond one to one.

    In a group of two, the k-th that one rank sends is the k-th that the other receives. In a larger group, traces do not state
    the other rank: a transfer ends on both at the same time.
    """
    members: dict[RankGroup, list[int]] = {}
    for index, trace in enumerate(ranks):
        for group in trace.groups:
            if not group.unclear:
                members.setdefault(group, []).append(index)
    found: list[Meeting] = []
    for group, mine in members.items():
        for kinds in ((_SEND, _RECEIVE), (_EITHER, _EITHER)):
            own = [{kind: _rows(ranks[index], group, kind) for kind in kinds} for index in mine]
            if len(mine) != 2:
                found += _by_end(ranks, offsets, mine, own) if kinds[0] != kinds[1] else []
                continue
            for sender, receiver in ((0, 1), (1, 0)) if kinds[0] != kinds[1] else ((0, 1),):
                rows = own[sender][kinds[0]], own[receiver][kinds[1]]
                if len(rows[0]) == len(rows[1]) > 0:
                    found.append(_meeting(ranks, offsets, (mine[sender], mine[receiver]), rows))
    return found


def _rows(trace: RankTrace, group: RankGroup, kind: str) -> Int64:
    table = trace.collectives
    code = trace.names.index(kind) if kind in trace.names else -1
    return np.flatnonzero((table.group == trace.groups.index(group)) & (table.kind == code) & point_to_point(trace))


def _by_end(
    ranks: Sequence[RankTrace], offsets: Sequence[int], mine: Sequence[int], own: Sequence[dict[str, Int64]]
) -> Iterator[Meeting]:
    """Return the transfers of two ranks each whose ends are nearest to each other."""
    sides = []
    for kind in (_SEND, _RECEIVE):
        who = np.concatenate([np.full(len(rows[kind]), index) for index, rows in zip(mine, own, strict=True)])
        rows = np.concatenate([rows[kind] for rows in own])
        ends = np.concatenate(
            [ranks[index].collectives.end_ns[rows[kind]] - offsets[index] for index, rows in zip(mine, own, strict=True)]
        )
        order = np.argsort(ends, kind="stable")
        sides.append((who[order], rows[order], ends[order]))
    (sender, sent, sent_at), (receiver, received, received_at) = sides
    if not len(sent) or not len(received):
        return
    there, back = _nearest(sent_at, received_at), _nearest(received_at, sent_at)
    at = np.flatnonzero((back[there] == np.arange(len(there))) & (np.abs(received_at[there] - sent_at) <= CLOCKS_AGREE_NS))
    at = at[sender[at] != receiver[there[at]]]
    pairs = sender[at] * len(ranks) + receiver[there[at]]
    for pair in np.unique(pairs).tolist():
        these = at[pairs == pair]
        both = int(sender[these[0]]), int(receiver[there[these[0]]])
        yield _meeting(ranks, offsets, both, (np.sort(sent[these]), np.sort(received[there[these]])))


def _nearest(times: Int64, others: Int64) -> Int64:
    after = np.clip(np.searchsorted(others, times), 0, len(others) - 1)
    before = np.maximum(after - 1, 0)
    return np.where(np.abs(others[before] - times) < np.abs(others[after] - times), before, after)


def _meeting(
    ranks: Sequence[RankTrace], offsets: Sequence[int], both: tuple[int, int], rows: tuple[Int64, Int64]
) -> Meeting:
    """Return transfers; one that the sender left before the receiver began was buffered, and neither waited."""
    tables = [ranks[index].collectives.rows(mine) for index, mine in zip(both, rows, strict=True)]
    starts, ends = (
        [column - offsets[index] for index, column in zip(both, columns, strict=True)]
        for columns in ([table.start_ns for table in tables], [table.end_ns for table in tables])
    )
    joined = np.minimum(*ends) + CLOCKS_AGREE_NS >= np.maximum(*starts)
    kinds = [ranks[both[0]].names[kind] for kind in tables[0].kind.tolist()]
    return Meeting(np.array(both), np.stack(rows, axis=1), kinds, tables[0].size_bytes, joined, directed=True)

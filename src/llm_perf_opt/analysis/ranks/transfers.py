"""Transfers between two ranks (send, recv): which belong together, so that a delay can be followed along a pipeline."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llm_perf_opt.analysis.ranks.matching import CLOCKS_AGREE_NS, point_to_point
from llm_perf_opt.analysis.ranks.rank_trace import RankGroup, RankTrace
from llm_perf_opt.traces.events import Bool, Int64

_SEND, _RECEIVE, _EITHER = "send", "recv", "send_recv"


@dataclass(frozen=True)
class Transfers:
    """Transfers between two ranks; a row per transfer, the sender first. Times are on one clock."""

    ranks: Int64
    rows: Int64
    start_ns: Int64
    end_ns: Int64
    kind: list[str]
    size_bytes: Int64
    directed: bool
    """Whether it is known which rank sends."""

    @property
    def joined(self) -> Bool:
        """Return which ended only after both ranks had begun; of the others, the sender did not wait."""
        found: Bool = self.end_ns.min(axis=1) + CLOCKS_AGREE_NS >= self.start_ns.max(axis=1)
        return found


def transfers(ranks: Sequence[RankTrace], offsets: Sequence[int]) -> list[Transfers]:
    """Return the transfers of every two ranks that correspond one to one.

    In a group of two, the k-th that one rank sends is the k-th that the other receives. In a larger group, traces do not state
    the other rank: a transfer ends on both at the same time.
    """
    members: dict[RankGroup, list[int]] = {}
    for index, trace in enumerate(ranks):
        for group in trace.groups:
            if not group.unclear:
                members.setdefault(group, []).append(index)
    found: list[Transfers] = []
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
) -> Iterator[Transfers]:
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


def _meeting(ranks: Sequence[RankTrace], offsets: Sequence[int], both: tuple[int, int], rows: tuple[Int64, Int64]) -> Transfers:
    tables = [ranks[index].collectives.rows(mine) for index, mine in zip(both, rows, strict=True)]
    kinds = [ranks[both[0]].names[kind] for kind in tables[0].kind.tolist()]
    return Transfers(
        ranks=np.array(both),
        rows=np.stack(rows, axis=1),
        start_ns=np.stack([table.start_ns - offsets[index] for index, table in zip(both, tables, strict=True)], axis=1),
        end_ns=np.stack([table.end_ns - offsets[index] for index, table in zip(both, tables, strict=True)], axis=1),
        kind=kinds,
        size_bytes=tables[0].size_bytes,
        directed=_EITHER not in kinds,
    )

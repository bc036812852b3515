"""The table of collectives by kind, size and group."""

from collections.abc import Sequence

import numpy as np

from llm_perf_opt.analysis.ranks.clocks import Clocks
from llm_perf_opt.analysis.ranks.document import CollectiveKindLine
from llm_perf_opt.analysis.ranks.links import bus_bandwidth, link_peak
from llm_perf_opt.analysis.ranks.rank_trace import RankTrace
from llm_perf_opt.analysis.ranks.waits import WHY, GroupWaits
from llm_perf_opt.core.records import Missing
from llm_perf_opt.traces.events import Int64


def kind_lines(ranks: Sequence[RankTrace], waits: Sequence[GroupWaits], clocks: Clocks) -> list[CollectiveKindLine]:
    """Return a line per kind, size and group, the longest transfer first."""
    found = [line for group in waits for line in _of_group(ranks, group, clocks)]
    return sorted(found, key=lambda line: (-(line.transfer_ns or 0) - (line.wait_ns or 0), line.kind, line.bytes or 0))


def _of_group(ranks: Sequence[RankTrace], group: GroupWaits, clocks: Clocks) -> list[CollectiveKindLine]:
    match = group.match
    rows: dict[tuple[str, int], list[int]] = {}
    for row, key in enumerate(zip(match.kind, match.size_bytes.tolist(), strict=True)):
        rows.setdefault(key, []).append(row)
    link = link_peak(ranks, match, clocks)
    found = []
    for (kind, size), mine in rows.items():
        transfer, skew, wait = (_known(column, mine) for column in (group.transfer_ns, group.skew_ns, group.wait_ns))
        middle = float(np.median(transfer)) if len(transfer) else None
        unknown = np.array(mine, np.int64)[group.wait_ns[mine] < 0]
        why = WHY[int(group.why[unknown[0]])] if len(unknown) else ""
        bus = bus_bandwidth(kind, size, Missing(why) if middle is None else middle, match)
        found.append(
            CollectiveKindLine(
                kind=kind,
                bytes=size if size >= 0 else None,
                group=match.group.name,
                group_size=match.group.size or None,
                count=len(mine),
                transfer_ns=int(transfer.sum()) if len(transfer) else None,
                median_transfer_ns=None if middle is None else round(middle),
                bus_bytes_per_s=None if isinstance(bus, Missing) else bus,
                bus_why=bus.why if isinstance(bus, Missing) else "",
                link_bytes_per_s=None if isinstance(link, Missing) else link,
                link_why=link.why if isinstance(link, Missing) else "",
                wait_ns=int(wait.sum()) if len(wait) else None,
                median_skew_ns=round(float(np.median(skew))) if len(skew) else None,
                transfers=len(transfer),
                waits=len(wait),
                why=why,
            )
        )
    return found


def _known(column: Int64, rows: Sequence[int]) -> Int64:
    values = column[np.array(rows, np.int64)]
    return values[values >= 0]

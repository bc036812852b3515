"""The replay of a job without the excess of its late ranks: how much earlier everything happens.

The job is a graph. A node is a collective, which ends on all its ranks after the last has entered it, or a moment at which work
of a rank resumes after the collectives that it needs. An edge leads from what a node waited for, with the *slack*: how much
earlier that could happen, for all that the node waited for anyway, and the *gain*: the excess of the rank on the way. What is
held back by several things advances as much as the one that advances least beyond its slack.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llm_perf_opt.analysis.ranks.programs import Chain
from llm_perf_opt.traces.events import Bool, Columns, Int64
from llm_perf_opt.traces.nesting import NONE

_START = 0
"""The node that nothing advances: the start of the recording. A rank that began late has a beginning of its own."""
_PASSES = 4
"""Times of one µs may contradict each other: what does not fit after this many passes is taken not to advance."""


@dataclass(frozen=True)
class Line:
    """One rank."""

    chain: Chain
    work_ns: Int64
    """Per event, the excess in the own time since the previous event; then in what follows the last."""
    lag_ns: Int64
    """Per collective, the excess between what it waited for and its entry."""
    offset_ns: int
    collective: Int64
    """Per collective, its number in the job: the same on all ranks that take part."""
    late_start_ns: int = 0
    """How much later than the others the rank began."""

    @property
    def late(self) -> bool:
        """Return whether the rank has an excess."""
        return bool(self.work_ns.any() or self.lag_ns.any())


@dataclass(frozen=True)
class Advances:
    """How much earlier things happen without the excess of each late rank, and without the late start of each (a column each)."""

    of_end_ns: Int64
    """Per rank, the end of its job."""
    of_collectives_ns: Int64
    """Per collective of the job, its end."""


@dataclass(frozen=True)
class _Edges(Columns):
    """What nodes waited for."""

    node: "Int64"
    source: "Int64"
    slack_ns: "Int64"
    gain_ns: "Int64"
    column: "Int64"
    """Of the rank that has the gain."""


def replay(lines: Sequence[Line], jobs: Sequence[int]) -> Advances:
    """Return the advances. `jobs` has the same number for ranks that share collectives: `of_end_ns` is that of its end."""
    count = 1 + max((int(line.collective.max(initial=NONE)) for line in lines), default=NONE)
    entered = np.full(count, np.iinfo(np.int64).min)
    for line in lines:
        np.maximum.at(entered, line.collective, line.chain.start_ns - line.offset_ns)
    columns = np.cumsum([line.late for line in lines]) - 1
    starters = [place for place, line in enumerate(lines) if line.late_start_ns]
    ended = {job: max(_end(line) for line, of in zip(lines, jobs, strict=True) if of == job) for job in set(jobs)}
    parts, keys, first = [], [np.full(1, np.iinfo(np.int64).min), entered], 1 + count
    ends = {job: at for at, job in enumerate(ended)}
    total = first + sum(len(_resumptions(line.chain)[0]) for line in lines)
    begin = {place: total + len(ends) + number for number, place in enumerate(starters)}
    for place, (line, job, column) in enumerate(zip(lines, jobs, columns.tolist(), strict=True)):
        nodes = int(first), begin.get(place, _START)
        made, moments = _edges_of(line, nodes, entered, (total + ends[job], ended[job]), column)
        parts.append(made)
        keys.append(moments - line.offset_ns)
        first += len(moments)
    keys += [np.full(len(ends), np.iinfo(np.int64).max), np.full(len(begin), np.iinfo(np.int64).min)]
    parts.append(_of_starts([lines[place] for place in starters], total + len(ends), int(columns[-1]) + 1))
    whole = {name: np.concatenate([part.columns()[name] for part in parts]) for name in parts[0].columns()}
    found = _advance(_Edges(**whole), np.concatenate(keys), int(columns[-1]) + 1 + len(starters))
    return Advances(found[[total + ends[job] for job in jobs]], found[1 : 1 + count])


def _end(line: Line) -> int:
    return max(line.chain.free_at_end_ns, int(line.chain.end_ns.max())) - line.offset_ns


def _resumptions(chain: Chain) -> tuple[Int64, Int64]:
    """Return the first event of each moment at which work resumes after collectives, and the moment of each wait."""
    waits = np.flatnonzero(chain.is_wait)
    new = np.diff(chain.piece[waits], prepend=-1) > 0
    return waits[new], np.cumsum(new) - 1


def _of_starts(starters: Sequence[Line], first: int, column: int) -> _Edges:
    """Return the edges to the beginnings of ranks that began late; `first` and `column` are those of the first of them."""
    numbers, nothing = np.arange(len(starters)), np.zeros(len(starters), np.int64)
    return _Edges(
        first + numbers, nothing, nothing, np.array([line.late_start_ns for line in starters], np.int64), column + numbers
    )


def _edges_of(line: Line, nodes: tuple[int, int], entered: Int64, end: tuple[int, int], column: int) -> tuple[_Edges, Int64]:
    """Return the edges to the nodes of a rank, and when its work resumes. `nodes`: its first resumption, its beginning."""
    chain, (first, begin), parts = line.chain, nodes, []
    resumed, moment = _resumptions(chain)
    waits, gain = np.flatnonzero(chain.is_wait), np.cumsum(line.work_ns)
    needed = chain.place[waits]
    base = chain.free_ns[resumed].copy()
    np.maximum.at(base, moment, chain.end_ns[needed])
    # the work before each event began at the resumption before it
    before = np.searchsorted(resumed, np.arange(len(chain.place) + 1)) - 1
    source = np.where(before < 0, begin, first + before)
    gained = gain - np.where(before < 0, 0, gain[resumed[before]] if len(resumed) else 0)

    def add(node: Int64, source: Int64, slack: Int64, gain: Int64) -> None:
        parts.append(_Edges(node, source, slack, gain, np.full(len(node), column)))

    add(first + np.arange(len(resumed)), source[resumed], base - chain.free_ns[resumed], gained[resumed])
    add(first + moment, 1 + line.collective[needed], base[moment] - chain.end_ns[needed], np.zeros(len(waits), np.int64))
    at = np.flatnonzero(~chain.is_wait)
    place = chain.place[at]
    late = entered[line.collective[place]] + line.offset_ns - chain.lag_ns[place]
    node, lag = 1 + line.collective[place], line.lag_ns[place]
    add(node, source[at], late - chain.free_ns[at], gained[at] + lag)
    since = np.full(len(chain.rows) + 1, len(resumed))  # a collective that work needed already holds back what follows
    np.minimum.at(since, needed, moment)
    for earlier in chain.before[place].T:
        there = np.flatnonzero((earlier != NONE) & (since[earlier] > before[at]))
        held = earlier[there]
        add(node[there], 1 + line.collective[held], late[there] - chain.end_ns[held], lag[there])
    last, (node_of_end, ended) = int(np.argmax(chain.end_ns)), end
    moments = np.array([chain.free_at_end_ns, chain.end_ns[last]]) - line.offset_ns
    sources = np.array([source[-1], 1 + line.collective[last]])
    add(np.full(2, node_of_end), sources, ended - moments, np.array([gained[-1], 0]))
    whole = {name: np.concatenate([part.columns()[name] for part in parts]) for name in parts[0].columns()}
    return _Edges(**whole), base


def _advance(edges: _Edges, keys: Int64, columns: int) -> Int64:
    """Return the advance of each node. `keys` are moments of the nodes, nearly in the order of the graph."""
    most = int(np.bincount(edges.column.clip(0), edges.gain_ns).max(initial=0))
    edges = edges.rows(np.flatnonzero(edges.slack_ns < max(most, 1)))  # the others never hold anything back
    place = np.empty(len(keys), np.int64)
    place[np.argsort(keys, kind="stable")] = np.arange(len(keys))
    edges = edges.rows(np.argsort(place[edges.node], kind="stable"))
    level, fits = _levels(edges, len(keys))
    order = np.lexsort((edges.node, level[edges.node]))
    edges, source = edges.rows(order), np.where(fits, edges.source, _START)[order]
    number = np.argsort(np.argsort(level, kind="stable"), kind="stable")  # nodes without edges come first: their level is 0
    found = np.zeros((len(keys), columns), np.int64)
    _by_level(edges, number[source], number[edges.node], level[edges.node], found)
    return found[number]


def _levels(edges: _Edges, count: int) -> tuple[Int64, Bool]:
    """Return the longest way to each node, and which edges lead to a node that is farther than their source."""
    level = [0] * count
    source, node = edges.source.tolist(), edges.node.tolist()
    for _ in range(_PASSES):
        for one, other in zip(source, node, strict=True):
            if level[one] >= level[other]:
                level[other] = level[one] + 1
        found = np.array(level, np.int64)
        fits: Bool = found[edges.source] < found[edges.node]
        if fits.all():
            break
    return found, fits


def _by_level(edges: _Edges, source: Int64, node: Int64, level: Int64, found: Int64) -> None:
    """Set the advances of the nodes, level by level. Nodes are numbered, and edges sorted, by level."""
    gaining = np.flatnonzero(edges.gain_ns)
    if not len(gaining):
        return
    begins = np.flatnonzero(np.diff(node, prepend=-1))
    bounds = np.append(np.flatnonzero(np.diff(level, prepend=-1)), len(node))
    groups = np.searchsorted(begins, bounds)
    gains = np.searchsorted(gaining, bounds).tolist()
    within = begins - bounds[np.repeat(np.arange(len(bounds) - 1), np.diff(groups))]
    slack, limits, of_nodes = edges.slack_ns[:, None], bounds.tolist(), groups.tolist()
    first = int(node[0])
    for number in range(int(np.searchsorted(bounds, gaining[0], "right")) - 1, len(limits) - 1):
        low, high, one, other = limits[number], limits[number + 1], of_nodes[number], of_nodes[number + 1]
        values = found.take(source[low:high], axis=0)
        values += slack[low:high]
        if gains[number] < gains[number + 1]:
            mine = gaining[gains[number] : gains[number + 1]]
            values[mine - low, edges.column[mine]] += edges.gain_ns[mine]
        if other - one < high - low:
            values = np.minimum.reduceat(values, within[one:other])
        found[first + one : first + other] = values

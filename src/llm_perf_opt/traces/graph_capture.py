"""CUDA graphs in a trace: the launches that a capture recorded, and the kernels that a replay ran.

Launches between `cudaStreamBeginCapture` and `cudaStreamEndCapture` run nothing: each becomes a node of the graph. A replay is
one call, and its kernels are those nodes in the order of their capture. If a capture recorded as many nodes as a replay ran, of
the same kinds in the same order, each kernel of the replay belongs to one captured launch.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llm_perf_opt.traces.events import Bool, Int64, Trace, WorkKind, different_pairs
from llm_perf_opt.traces.projection import NONE, calls_named, graph_launches, is_kernel_launch

_BEGINS = re.compile(r"(cu|cuda|hip)StreamBeginCapture\w*")
_ENDS = re.compile(r"(cu|cuda|hip)StreamEndCapture\w*")
_COPY = re.compile(r"(cu|cuda|hip)Memcpy\w*")
_SET = re.compile(r"(cu|cuda|hip)Memset\w*")


@dataclass(frozen=True)
class Capture:
    """One captured graph."""

    begin: int
    """The call that begins it."""
    nodes: Int64
    """The calls that became nodes, in order."""
    kinds: bytes
    """A WorkKind per node."""
    start_ns: int
    end_ns: int
    """From the begin of the capture to its end; if the end is not in the trace, to its last call."""


@dataclass(frozen=True)
class Replay:
    """One launch of a graph."""

    call: int
    work: Int64
    """Its device work, in the order of the graph's nodes."""
    kinds: bytes


def while_capturing(trace: Trace) -> Bool:
    """Return, per call, whether its thread was capturing a CUDA graph, when launches run nothing."""
    inside = np.zeros(len(trace.calls), np.bool_)
    for rows, depth, _ in _captures_by_thread(trace):
        inside[rows] = depth > 0
    return inside


def graph_captures(trace: Trace) -> tuple[Capture, ...]:
    """Return every capture, by start."""
    threads = _captures_by_thread(trace)
    if not threads:
        return ()
    kind_of = np.array([*(_node_kind(name) for name in trace.names), NONE], np.int64)[trace.calls.name]
    found = []
    for rows, depth, begins in threads:
        first = np.flatnonzero(begins & (depth == 1))
        closed = np.append(np.flatnonzero(depth == 0), len(rows))
        stop = closed[np.searchsorted(closed, first)]
        nodes = np.flatnonzero((depth > 0) & (kind_of[rows] != NONE))
        nodes = nodes[_is_first(trace.calls.correlation[rows[nodes]])]
        low, high = np.searchsorted(nodes, first), np.searchsorted(nodes, stop)
        last = rows[np.minimum(stop, len(rows) - 1)]
        starts, ends = trace.calls.start_ns[rows[first]].tolist(), trace.calls.end_ns[last].tolist()
        for number, begin in enumerate(rows[first].tolist()):
            mine = rows[nodes[low[number] : high[number]]]
            found.append(Capture(begin, mine, kind_of[mine].astype(np.uint8).tobytes(), starts[number], ends[number]))
    return tuple(sorted(found, key=lambda capture: capture.start_ns))


def graph_replays(trace: Trace, call_of_work: Int64) -> tuple[Replay, ...]:
    """Return every launch of a graph with the work that it ran, if the order of that work is known."""
    launched = np.flatnonzero((call_of_work != NONE) & graph_launches(trace)[call_of_work])
    if not len(launched):
        return ()
    work = trace.work
    order = launched[np.lexsort((work.start_ns[launched], call_of_work[launched]))]
    cuts = np.flatnonzero(np.diff(call_of_work[order])) + 1
    found = []
    for rows in np.split(order, cuts):
        ordered = _in_node_order(trace, rows)
        if ordered is not None:
            found.append(Replay(int(call_of_work[rows[0]]), ordered, work.kind[ordered].tobytes()))
    return tuple(found)


def nodes_of(captures: Sequence[Capture]) -> Int64:
    """Return the nodes of all captures, one after the other."""
    return np.concatenate([capture.nodes for capture in captures]) if captures else np.empty(0, np.int64)


def by_capture(captures: Sequence[Capture], values: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """Return the begin of each capture → its part of the values that belong to `nodes_of`."""
    ends = itertools.accumulate(len(capture.nodes) for capture in captures)
    return {capture.begin: tuple(values[end - len(capture.nodes) : end]) for capture, end in zip(captures, ends, strict=True)}


def _captures_by_thread(trace: Trace) -> "list[tuple[Int64, Int64, Bool]]":
    """Return, per thread that captures, its calls, how many captures are open at each, and which calls begin one."""
    if not any("StreamBeginCapture" in name for name in trace.names):
        return []  # as in almost every trace
    begins = calls_named(trace, _BEGINS.fullmatch)
    ends = calls_named(trace, _ENDS.fullmatch)
    found = []
    for process, thread in zip(*different_pairs(trace.calls.process[begins], trace.calls.thread[begins]), strict=True):
        mine = np.flatnonzero((trace.calls.process == process) & (trace.calls.thread == thread))
        steps: Int64 = np.cumsum(begins[mine].astype(np.int64) - ends[mine])
        lowest = np.minimum(np.minimum.accumulate(steps), 0)  # an end whose begin was before the recording
        found.append((mine, steps - lowest, begins[mine]))
    return found


def _node_kind(name: str) -> int:
    """Return the kind of work that a captured call of this name adds to its graph, or -1."""
    if is_kernel_launch(name):
        return int(WorkKind.KERNEL)
    if _COPY.fullmatch(name):
        return int(WorkKind.MEMCPY)
    return int(WorkKind.MEMSET) if _SET.fullmatch(name) else NONE


def _is_first(correlation: Int64) -> Bool:
    """Return which calls are not inside the one before: a driver call shares the correlation of its runtime call."""
    return np.append(True, (correlation[1:] != correlation[:-1]) | (correlation[1:] == 0))[: len(correlation)]


def _in_node_order(trace: Trace, rows: Int64) -> Int64 | None:
    """Return the work of a replay in the order of its nodes: of its starts on one stream, otherwise of the nodes' numbers."""
    work = trace.work
    if (work.stream[rows] == work.stream[rows[0]]).all():
        return rows
    nodes = work.graph_node[rows]
    if (nodes == 0).any() or len(np.unique(nodes)) < len(nodes):
        return None
    return np.asarray(rows[np.argsort(nodes, kind="stable")])

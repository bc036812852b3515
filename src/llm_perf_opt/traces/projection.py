"""Assign device work to the host: the call that launched it, the range of that call, and its stage.

A kernel belongs to the ranges that were open on the launching thread when its launch call began, not to those that overlap it on
the device, because the host runs ahead. All functions take and return arrays; -1 means none.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llm_perf_opt.core.stages import DOMAIN, Stage
from llm_perf_opt.traces.events import NO_NAME, HostCalls, Int32, Int64, RangeKind, Ranges, Trace
from llm_perf_opt.traces.events import Bool as Bool
from llm_perf_opt.traces.nesting import MOST_DEPTH, depth_error, depths, lanes_of, nest, numbered
from llm_perf_opt.traces.nesting import NONE as NONE


@dataclass(frozen=True)
class Projection:
    """The assignments, as row numbers of the tables of a trace."""

    call_of_work: Int64
    """Per row of device work: the call that launched it. All kernels of a CUDA graph belong to its launch."""
    range_of_call: Int64
    """Per call: the innermost push/pop range open on its thread when it began."""
    range_of_work: Int64
    """Per row of device work: the range of its call."""
    parent: Int64
    """Per range: the push/pop range around it. Start/end ranges have no parent and no children."""
    depth: Int64
    """Per range: the number of ranges around it."""
    path: Int32
    """Per range: the path of names that leads to it."""
    path_parent: Int32
    """Per path: the path without its last name."""
    path_label: tuple[str, ...]
    """Per path: its last name, as `DOMAIN@name` if the range has a domain."""

    def path_names(self, path: int) -> tuple[str, ...]:
        """Return the labels of a path, outermost first."""
        labels: list[str] = []
        while path != NONE:
            labels.append(self.path_label[path])
            path = int(self.path_parent[path])
        return tuple(reversed(labels))


def project(trace: Trace) -> Projection:
    """Join device work to calls by correlation and process, calls to ranges by thread and time, ranges to their parents."""
    call_of_work = launching_calls(trace)
    parent, range_of_call = _nesting(trace.ranges, trace.calls)
    depth = depths(parent)
    if depth.max(initial=0) >= MOST_DEPTH:
        raise depth_error("ranges")
    path, path_parent, path_label = _paths(trace, parent, depth)
    return Projection(
        call_of_work, range_of_call, through(call_of_work, range_of_call), parent, depth, path, path_parent, path_label
    )


def stage_of_range(trace: Trace, projection: Projection, stages: Sequence[Stage]) -> Int64:
    """Return, per range, the index in `stages` of the innermost stage that it is or is inside of, or -1.

    Only labels in the NVTX domain of llm-perf, or without a domain (torch traces have none), are stages.
    """
    own = own_stage(trace, stages)
    marked = nearest_marked(projection.parent, own != NONE)
    return through(marked, own)


def step_of_work(trace: Trace, projection: Projection, stage: Stage = Stage.DECODE_STEP) -> Int64:
    """Return, per row of device work, the row of the range with label `stage` that it was launched in, or -1."""
    marked = nearest_marked(projection.parent, own_stage(trace, (stage,)) != NONE)
    return through(projection.range_of_work, marked)


_TABLE_ENTRIES_PER_ROW = 8
"""A lookup table of all keys is used up to this many entries per row, which takes less memory than the rows."""


def launching_calls(trace: Trace) -> Int64:
    """Return, per row of device work, the first call with its correlation and process, or -1."""
    work, calls = trace.work, trace.calls
    if not len(work) or not len(calls):
        return np.full(len(work), NONE, np.int64)
    call_key, work_key = packed_keys((calls.process, calls.correlation), (work.process, work.correlation))
    widest = int(max(call_key.max(), work_key.max())) + 1
    if widest <= _TABLE_ENTRIES_PER_ROW * (len(work) + len(calls)):  # usual, as correlations are counted up
        first = np.full(widest, NONE, np.int64)
        first[call_key[::-1]] = np.arange(len(calls) - 1, -1, -1)  # in reverse, so that the first call of a correlation remains
        return np.where(work.correlation != 0, first[work_key], NONE)
    order = np.argsort(call_key, kind="stable")  # the first call of a correlation encloses the others
    sorted_keys = call_key[order]
    place = np.minimum(np.searchsorted(sorted_keys, work_key), len(order) - 1)
    found = (sorted_keys[place] == work_key) & (work.correlation != 0)
    return np.where(found, order[place], NONE).astype(np.int64)


def through(first: Int64, second: npt.NDArray[np.integer]) -> Int64:
    """Return the values of `second` at the row numbers in `first`; -1 stays -1."""
    if not len(second):
        return np.full(len(first), NONE, np.int64)
    return np.where(first == NONE, NONE, second[first]).astype(np.int64)


def nearest_marked(parent: Int64, marked: Bool) -> Int64:
    """Return, per row, the row itself if marked, else its nearest marked ancestor, or -1. Each round doubles the distance."""
    rows = np.arange(len(parent))
    found = np.where(marked, rows, parent)
    while True:
        unsettled = np.flatnonzero(found != NONE)
        unsettled = unsettled[~marked[found[unsettled]]]
        if not len(unsettled):
            return found
        found[unsettled] = found[found[unsettled]]


def own_stage(trace: Trace, stages: Sequence[Stage]) -> Int64:
    """Return, per range, the index in `stages` of its own label, or -1."""
    place = {stage.value: index for index, stage in enumerate(stages)}
    of_name = np.array([place.get(name, NONE) for name in trace.names] + [NONE], np.int64)  # the last entry is for NO_NAME
    ours = np.array([name == DOMAIN for name in trace.names] + [True], np.bool_)
    return np.where(ours[trace.ranges.domain], of_name[trace.ranges.name], NONE)


def packed_keys(*tables: tuple[Int64, Int64]) -> list[Int64]:
    """Return two columns as one integer per row, comparable across tables."""
    high = np.concatenate([table[0] for table in tables])
    low = np.concatenate([table[1] for table in tables])
    if not len(low):
        return [table[1] for table in tables]
    number = numbered(high)
    if low.min() < 0 or low.max() >= 2**62 // (int(number.max()) + 1):
        low = numbered(low)  # too wide to pack
    packed = number * (int(low.max()) + 1) + low
    bounds = np.cumsum([len(table[0]) for table in tables])[:-1]
    return list(np.split(packed, bounds))


def _nesting(ranges: Ranges, calls: HostCalls) -> tuple[Int64, Int64]:
    """Return the parent per range and the innermost range per call. Ranges of several NVTX domains may overlap on a thread."""
    parent = np.full(len(ranges), NONE, np.int64)
    nested = np.flatnonzero(ranges.kind == RangeKind.PUSH_POP)
    lane, call_lane = lanes_of((ranges.process[nested], ranges.thread[nested]), (calls.process, calls.thread))
    found = nest(ranges.start_ns[nested], ranges.end_ns[nested], lane, overlapping=True)
    parent[nested] = through(found.parent, nested)
    return parent, through(found.innermost(calls.start_ns, call_lane), nested)


def _paths(trace: Trace, parent: Int64, depth: Int64) -> tuple[Int32, Int32, tuple[str, ...]]:
    """Number the distinct paths of labels, level by level; a path has a higher number than its parent."""
    ranges = trace.ranges
    path = np.full(len(parent), NONE, np.int64)
    parents: list[int] = []
    labels: list[str] = []
    by_depth = np.argsort(depth, kind="stable")
    bounds = np.searchsorted(depth[by_depth], np.arange(depth.max(initial=-1) + 2))
    for level in range(len(bounds) - 1):
        rows = by_depth[bounds[level] : bounds[level + 1]]
        key = np.stack([through(parent[rows], path), ranges.domain[rows].astype(np.int64), ranges.name[rows].astype(np.int64)])
        distinct, number = np.unique(key, axis=1, return_inverse=True)
        path[rows] = number.reshape(-1) + len(parents)
        parents += distinct[0].tolist()
        labels += [_label(trace, domain, name) for domain, name in zip(*distinct[1:].tolist(), strict=True)]
    return path.astype(np.int32), np.array(parents, np.int32), tuple(labels)


def _label(trace: Trace, domain: int, name: int) -> str:
    return trace.name_of(name) if domain == NO_NAME else f"{trace.name_of(domain)}@{trace.name_of(name)}"


# --- launch calls -----------------------------------------------------------------------------------------------------

# `cudaLaunchKernel_v7000`, `cuLaunchKernelEx`, `cudaLaunchCooperativeKernel_ptsz`; `cudaLaunchHostFunc` runs on the host.
_KERNEL = re.compile(r"(cu|cuda|hip)(Ext)?(Module)?Launch(?!HostFunc)\w*")
_GRAPH = re.compile(r"(cu|cuda|hip)GraphLaunch(_\w+)?")


def is_kernel_launch(call: str) -> bool:
    """Return whether a call of this name launches one kernel."""
    return _KERNEL.fullmatch(call) is not None


def is_graph_launch(call: str) -> bool:
    """Return whether a call of this name launches a CUDA graph."""
    return _GRAPH.fullmatch(call) is not None


def kernel_launches(trace: Trace) -> Bool:
    """Return, per call, whether it launches one kernel."""
    return calls_named(trace, is_kernel_launch)


def graph_launches(trace: Trace) -> Bool:
    """Return, per call, whether it launches a CUDA graph."""
    return calls_named(trace, is_graph_launch)


def calls_named(trace: Trace, test: Callable[[str], object]) -> Bool:
    """Return, per call, whether its name passes a test."""
    matches = np.array([bool(test(name)) for name in trace.names] + [False], np.bool_)  # the last entry is for NO_NAME
    chosen: Bool = matches[trace.calls.name]
    return chosen

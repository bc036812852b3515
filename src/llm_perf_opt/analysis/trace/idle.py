"""All idle gaps of a device, each with exactly one cause.

A gap is the time between the end of the last work before it and the start of the first work after it (the *next* work). The
first rule that applies decides the cause:

1. **other work**: only for gaps of one stage: work of other stages kept the device busy for at least half of the gap.
2. **unknown**: the trace does not have the call that launched the next work.
3. **copy wait**: the next work is a copy whose call began before the device went idle or in the first half of the gap: the copy
   was being set up or staged through host memory. Or the gap follows a copy and the next work's call returned before the gap:
   the work waited for the copy to complete.
4. **device latency**: the next work's call returned before the device went idle, or one call (a CUDA graph) launched the work on
   both sides: the work was queued and still started late.
5. **sync**: the launching thread was in a synchronizing call (or in a copy call that returned only when its copy was done) when
   the device went idle, so it could not run ahead; or such calls filled at least half of the gap. At the boundary of a step,
   where the host has other work to do, only the second condition applies.
6. **graph capture**: for at least half of the gap, the launching thread was capturing a CUDA graph, which runs nothing.
7. **host work between steps**: the two sides belong to different steps or stages, and the next work's launch call began in the
   second half of the gap.
8. **launch-bound**: all other gaps. The launch call came, or returned, after the device went idle.

The gaps of a trace add up to its idle time exactly.
"""

import re
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from llm_perf_opt.analysis.trace.intervals import Blocks, covered_before, covered_of_group, exact_sum, matching, union_blocks
from llm_perf_opt.traces.events import Columns, Int64, Trace, UInt8, WorkKind
from llm_perf_opt.traces.graph_capture import graph_captures
from llm_perf_opt.traces.nesting import lanes_of
from llm_perf_opt.traces.projection import NONE, through

Bool = npt.NDArray[np.bool_]


class IdleCause(IntEnum):
    """Why a device was idle."""

    LAUNCH_BOUND = 0
    SYNC = 1
    HOST_BETWEEN_STEPS = 2
    COPY_WAIT = 3
    DEVICE_LATENCY = 4
    OTHER_WORK = 5
    UNKNOWN = 6
    GRAPH_CAPTURE = 7

    @property
    def label(self) -> str:
        """The name in tables and JSON."""
        return _LABELS[self]


_LABELS = {
    IdleCause.LAUNCH_BOUND: "launch-bound",
    IdleCause.SYNC: "sync",
    IdleCause.HOST_BETWEEN_STEPS: "host work between steps",
    IdleCause.COPY_WAIT: "copy wait",
    IdleCause.DEVICE_LATENCY: "device latency",
    IdleCause.OTHER_WORK: "other work",
    IdleCause.UNKNOWN: "unknown",
    IdleCause.GRAPH_CAPTURE: "graph capture",
}

SYNCHRONIZING = re.compile(
    r"(cuda|hip)(Device|Stream|Event|Thread)Synchronize|cu(Ctx|Stream|Event)Synchronize"
    r"|(cuda|hip)(Memcpy|Memset)(?!.*Async)\w*|cu(Memcpy|Memset)(?!.*Async)\w*"
    r"|(cuda|hip)Free|cuMemFree"  # freeing device memory waits for the device
)
"""Calls that return only when the device is done, without version (`_v3020`) or per-thread-stream (`_ptsz`) suffix."""
_VERSION = re.compile(r"(_v\d+|_ptsz|_ptds)+$")
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class IdleGaps(Columns):
    """One row per gap, sorted by group and time."""

    start_ns: "Int64"
    end_ns: "Int64"
    cause: "UInt8"
    """An IdleCause."""
    before: "Int64"
    """Row of the last device work before the gap."""
    after: "Int64"
    """Row of the first device work after the gap."""
    group: "Int64"

    def by_cause(self) -> dict[IdleCause, int]:
        """Return nanoseconds per cause, for every cause."""
        length = self.end_ns - self.start_ns
        return {cause: exact_sum(length[self.cause == cause]) for cause in IdleCause}


@dataclass(frozen=True)
class HostSide:
    """What the host did, computed once for all gaps."""

    call_of_work: Int64
    """Per row of device work: its launching call, or -1."""
    blocked: Blocks
    """When each launching thread was in a synchronizing call; the group is the thread's lane."""
    lane_of_call: Int64
    capturing: Blocks | None = None
    """When each thread was capturing a CUDA graph; None if none was."""


def host_side(trace: Trace, call_of_work: Int64) -> HostSide:
    """Return when each thread was in a call that waits for the device."""
    calls = trace.calls
    lane = lanes_of((calls.process, calls.thread))[0]
    waits = synchronizing_calls(trace) | _blocking_copies(trace, call_of_work)
    rows = np.flatnonzero(waits)
    blocked = union_blocks(calls.start_ns[rows], calls.end_ns[rows], lane[rows])
    return HostSide(call_of_work, blocked, lane, _capturing(trace, lane))


def _capturing(trace: Trace, lane: Int64) -> Blocks | None:
    captures = graph_captures(trace)
    if not captures:
        return None
    columns = [[it.start_ns, it.end_ns, it.begin] for it in captures]
    start, end, begin = np.array(columns, np.int64).T
    return union_blocks(start, end, lane[begin])


@dataclass(frozen=True)
class Occupation:
    """The time that some device work covers, and the gaps in between."""

    busy_ns: int
    gaps: IdleGaps


def occupation(
    trace: Trace, host: HostSide, instance: Int64, rows: Int64, group: Int64 | None = None, around: Blocks | None = None
) -> Occupation:
    """Return the time that the device work in `rows` covers, and the gaps in between with their causes.

    `instance` is the step or stage per row of work (-1 for none); `group`, also per row of work, separates work that is analyzed
    on its own, such as the instances of a stage; `around` is what all work covers, which may fill a gap (rule 1).
    """
    work, chosen = trace.work, rows
    groups = np.zeros(len(chosen), np.int64) if group is None else group[chosen]
    call = host.call_of_work[chosen]
    issued = np.where(call == NONE, _NEVER, through(call, trace.calls.start_ns))
    blocks = union_blocks(work.start_ns[chosen], work.end_ns[chosen], groups, tie_break=issued)
    inner = np.flatnonzero(blocks.group[1:] == blocks.group[:-1])
    start, end = blocks.end_ns[inner], blocks.start_ns[inner + 1]
    before, after = chosen[blocks.closes[inner]], chosen[blocks.opens[inner + 1]]
    cause = _causes(trace, host, instance, start, end, before, after)
    if around is not None:
        filled = covered_before(around, end) - covered_before(around, start)
        cause[2 * filled >= end - start] = IdleCause.OTHER_WORK
    busy_ns = exact_sum(blocks.end_ns - blocks.start_ns)
    return Occupation(busy_ns, IdleGaps(start, end, cause, before, after, blocks.group[inner]))


def _causes(trace: Trace, host: HostSide, instance: Int64, start: Int64, end: Int64, before: Int64, after: Int64) -> UInt8:
    work, calls = trace.work, trace.calls
    call = host.call_of_work[after]
    known = call != NONE
    if not len(calls):
        return np.full(len(start), IdleCause.UNKNOWN, np.uint8)
    begun, returned = calls.start_ns[call], calls.end_ns[call]
    queued = (returned <= start) | (call == host.call_of_work[before])
    boundary = instance[before] != instance[after]
    held_before, held_at_start = covered_of_group(host.blocked, start, host.lane_of_call[call])
    held_ns = covered_of_group(host.blocked, end, host.lane_of_call[call])[0] - held_before
    length = end - start
    in_launch = np.clip(end - np.maximum(begun, start), 0, None)
    set_up = (work.kind[after] == WorkKind.MEMCPY) & ((begun <= start) | (2 * in_launch >= length))
    reported = (work.kind[before] == WorkKind.MEMCPY) & (returned <= start)
    rules = [
        (~known, IdleCause.UNKNOWN),
        (set_up | reported, IdleCause.COPY_WAIT),
        (queued, IdleCause.DEVICE_LATENCY),
        ((held_at_start & ~boundary) | (2 * held_ns >= length), IdleCause.SYNC),
        (_captured(host, call, start, end), IdleCause.GRAPH_CAPTURE),
        (boundary & (2 * in_launch < length), IdleCause.HOST_BETWEEN_STEPS),
    ]
    chosen = np.select([rule for rule, _ in rules], [int(cause) for _, cause in rules], int(IdleCause.LAUNCH_BOUND))
    return chosen.astype(np.uint8)


def _captured(host: HostSide, call: Int64, start: Int64, end: Int64) -> Bool:
    """Return the gaps for half of which the launching thread was capturing."""
    if host.capturing is None:
        return np.zeros(len(start), np.bool_)
    lane = host.lane_of_call[call]
    covered = covered_of_group(host.capturing, end, lane)[0] - covered_of_group(host.capturing, start, lane)[0]
    return np.asarray(2 * covered >= end - start)


def synchronizing_calls(trace: Trace) -> Bool:
    """Return per call whether it is one that returns only when the device is done."""
    return matching(trace, trace.calls.name, lambda name: SYNCHRONIZING.fullmatch(_VERSION.sub("", name)))


def _blocking_copies(trace: Trace, call_of_work: Int64) -> Bool:
    """Return per call whether it started a copy and returned only when it was done: a copy to or from pageable memory."""
    waits = np.zeros(len(trace.calls), np.bool_)
    copies = np.flatnonzero((trace.work.kind == WorkKind.MEMCPY) & (call_of_work != NONE))
    calls = call_of_work[copies]
    waits[calls[trace.calls.end_ns[calls] >= trace.work.end_ns[copies]]] = True
    return waits

"""Reduce the trace of one rank to what the analysis of several ranks needs."""

from dataclasses import dataclass

import numpy as np

from llm_perf_opt.analysis.ranks.occurrences import FoundCollectives, communication, find_collectives
from llm_perf_opt.analysis.ranks.rank_trace import (
    DEVICE_IDLE,
    OUTSIDE,
    Causes,
    Intervals,
    NameIndex,
    Occurrences,
    RankStep,
    RankTrace,
    Work,
)
from llm_perf_opt.analysis.ranks.timeline import innermost_pieces, overlaps, without
from llm_perf_opt.analysis.trace.document import ON_CPU
from llm_perf_opt.analysis.trace.gpu_metrics import device_name
from llm_perf_opt.analysis.trace.intervals import Blocks, covered_before, matching, sums, union_blocks
from llm_perf_opt.analysis.trace.operator_classes import HostRow, row_of
from llm_perf_opt.analysis.trace.stage_instances import PREFILL, TraceStages
from llm_perf_opt.core.stages import PROFILER_OPERATORS
from llm_perf_opt.traces.events import Bool, Int32, Int64, Trace, WorkKind, different
from llm_perf_opt.traces.nesting import NONE, lanes_of, nest
from llm_perf_opt.traces.projection import launching_calls, through

_LATEST_NS = 2**61
_NO_KERNELS = "the trace has launches of collectives but no kernels of them: record CUDA activity as well"
_NOTHING = "the trace contains no collective"
_NO_ROWS = np.empty(0, np.int64)


def rank_trace(trace: Trace, stages: TraceStages) -> RankTrace:
    """Return what a rank's trace contributes."""
    devices = len(different(trace.work.device[trace.work.kind == WorkKind.KERNEL]))
    if devices > 1:
        return without_figures(trace, f"the trace has kernels of {devices} devices: record one trace per rank")
    comm = communication(trace)
    calls = launching_calls(trace)
    found = find_collectives(trace, comm, calls)
    names = _Names()
    side = _device_side(trace, comm, found) if len(trace.work) else _host_side(trace, found)
    stalled = _stalled(found, side.compute)
    units, steps = _units(stages)
    order = _launch_order(trace, found, side, calls) if len(found.work) else None
    causes = _causes(trace, found, _segments(found, stalled, side.first_ns), side, calls, names, order)
    by_id = {id(group): group for group in found.groups}  # a group is one object for all its collectives: hash it once
    groups = list(dict.fromkeys(by_id.values()))
    place = {key: groups.index(group) for key, group in by_id.items()}
    base = _base(trace)
    rows = Occurrences(
        start_ns=found.start_ns + base,
        end_ns=found.end_ns + base,
        kind=np.array([names[kind] for kind in found.kinds], np.int32),
        group=np.array([place[id(group)] for group in found.groups], np.int32),
        size_bytes=found.size_bytes,
        sequence=found.sequence,
        step=_steps_of(found, stages, units),
        stream=trace.work.stream[found.work] if len(found.work) else np.zeros(len(found.start_ns), np.int64),
    )
    return RankTrace(
        rank=stated_number(trace, "rank"),
        world_size=stated_number(trace, "world_size") or 0,
        host=trace.facts.get("host_name", ""),
        device=_device(trace),
        on_device=bool(comm.any()),
        span_ns=side.last_ns - side.first_ns,
        busy_ns=_length(side.busy),
        comm_ns=_length(side.comm),
        exposed_ns=_length(side.exposed),
        own_clock=trace.source == "nsys",
        first_ns=side.first_ns + base,
        ordered_from=None if order is None else _ordered_from(trace, found, side, calls, order),
        why="" if len(rows) else _NO_KERNELS if len(trace.collectives) else _NOTHING,
        names=tuple(names),
        groups=tuple(groups),
        steps=steps,
        collectives=rows,
        exposed=Intervals(side.exposed.start_ns + base, side.exposed.end_ns + base),
        causes=causes,
        work=_computing(trace, found, side, calls, order, base),
    )


def without_figures(trace: Trace, why: str) -> RankTrace:
    """Return a rank whose trace cannot be used."""
    host, device = trace.facts.get("host_name", ""), ""
    return RankTrace(stated_number(trace, "rank"), stated_number(trace, "world_size") or 0, host, device, False, 0, 0, 0, 0, why)


class _Names(NameIndex):
    """Names of a trace and their indices."""

    def codes(self, trace: Trace, column: Int64 | Int32) -> Int64:
        """Return the indices of names of the trace."""
        used = different(column)
        table = np.zeros(len(trace.names) + 1, np.int64)
        table[used] = [self[trace.name_of(int(index))] for index in used]
        return np.asarray(table[column])


@dataclass(frozen=True)
class _Side:
    """Where the collectives run: the time of the device or, without one, of the host."""

    first_ns: int
    last_ns: int
    busy: Blocks
    comm: Blocks
    compute: Blocks
    exposed: Intervals
    """Communication without other work."""
    other: Int64
    """Rows of the device work that are not of collectives; empty on a host."""


def _device_side(trace: Trace, comm: Bool, found: FoundCollectives) -> _Side:
    """Return the time of the device, and that of collectives on the host if there are such."""
    work = trace.work
    labels = (found.start_ns, found.end_ns) if not len(found.work) else (_NO_ROWS, _NO_ROWS)
    start, end = (np.concatenate(pair) for pair in ((work.start_ns, labels[0]), (work.end_ns, labels[1])))
    shared = union_blocks(found.start_ns, found.end_ns)
    compute = ~comm & (work.kind == WorkKind.KERNEL)
    computing = union_blocks(work.start_ns[compute], work.end_ns[compute])
    first, last, busy = int(start.min()), int(end.max()), union_blocks(start, end)
    return _Side(first, last, busy, shared, computing, without(shared, computing), np.flatnonzero(~comm))


def _host_side(trace: Trace, found: FoundCollectives) -> _Side:
    operators = trace.operators
    start = np.concatenate([operators.start_ns, found.start_ns])
    end = np.concatenate([operators.end_ns, found.end_ns])
    busy, comm = union_blocks(start, end), union_blocks(found.start_ns, found.end_ns)
    waits = matching(trace, operators.name, lambda name: row_of(name, calls_others=False) is HostRow.COMMUNICATION)
    waits |= matching(trace, operators.name, lambda name: name.startswith("_c10d_functional::"))
    (lane,) = lanes_of((operators.process, operators.thread))
    computing: list[Intervals] = []
    for number in different(lane).tolist():
        rows = np.flatnonzero(lane == number)
        pieces = innermost_pieces(operators.start_ns[rows], operators.end_ns[rows])
        kept = (pieces.row != NONE) & ~waits[rows[pieces.row]]
        computing.append(Intervals(pieces.start_ns[kept], pieces.end_ns[kept]))
    compute = union_blocks(
        np.concatenate([_NO_ROWS, *[part.start_ns for part in computing]]),
        np.concatenate([_NO_ROWS, *[part.end_ns for part in computing]]),
    )
    first, last = (int(start.min()), int(end.max())) if len(start) else (0, 0)
    return _Side(first, last, busy, comm, compute, without(comm, compute), _NO_ROWS)


def _computing(trace: Trace, found: FoundCollectives, side: _Side, calls: Int64, launched: Int64 | None, base: int) -> Work:
    """Return the work between which the collectives run, and the collective that follows each piece."""
    start, end = side.compute.start_ns, side.compute.end_ns
    following = np.searchsorted(found.start_ns, start, "right")
    if launched is not None:
        rows = side.other[trace.work.kind[side.other] == WorkKind.KERNEL]
        start, end = trace.work.start_ns[rows], trace.work.end_ns[rows]
        following = _following(trace, rows, calls, launched, np.searchsorted(found.start_ns, start, "right"))
    return Work(start + base, end + base, following.astype(np.int32))


def _following(trace: Trace, rows: Int64, calls: Int64, launched: Int64, by_time: Int64) -> Int64:
    """Return the first collective that was launched after each row of work; by time if its launch is unknown."""
    by_launch = np.searchsorted(launched, through(calls[rows], trace.calls.start_ns))
    return np.where(calls[rows] == NONE, by_time, by_launch)


def _length(blocks: Blocks | Intervals) -> int:
    return int((blocks.end_ns - blocks.start_ns).sum())


def _base(trace: Trace) -> int:
    """Return the time that the clock of the trace counts from, in ns since 1970; 0 if unknown."""
    text = trace.facts.get("baseTimeNanoseconds", "")
    base = int(text) if text.isdecimal() and len(text) < 20 else 0
    return base if base < _LATEST_NS else 0


def stated_number(trace: Trace, key: str) -> int | None:
    """Return the `rank` or the `world_size` that a trace states."""
    text = trace.facts.get(f"distributed_{key}", "")
    return int(text) if text.isdecimal() and len(text) < 10 else None


def _device(trace: Trace) -> str:
    used = different(trace.work.device)
    return ON_CPU if not len(used) else device_name(trace, int(used[0]))


# --- steps ------------------------------------------------------------------------------------------------------------


def _units(stages: TraceStages) -> tuple[Int64, tuple[RankStep, ...]]:
    """Return the instances of steps and prefills in order, and the same as records."""
    names = [name for name in (PREFILL, stages.step_stage) if name in stages.names]
    rows = np.sort(np.concatenate([_NO_ROWS, *[stages.rows_of(name) for name in names if name]]))
    counts: dict[str, int] = {}
    found = []
    for row in rows.tolist():
        name = stages.names[int(stages.instances.stage[row])]
        counts[name] = counts.get(name, -1) + 1
        wall_ns = int(stages.instances.end_ns[row] - stages.instances.start_ns[row])
        found.append(RankStep(name, counts[name], wall_ns))
    return rows, tuple(found)


def _steps_of(found: FoundCollectives, stages: TraceStages, units: Int64) -> Int32:
    """Return the step of each collective: that of its kernel's launch, or the one around it on the host."""
    step = np.full(len(found.start_ns), NONE, np.int64)
    if not len(units):
        return step.astype(np.int32)
    place = np.full(len(stages.instances), NONE, np.int64)
    place[units] = np.arange(len(units))
    if len(found.work):
        for name in (PREFILL, stages.step_stage):
            if name:
                owner = through(stages.of_stage(name)[found.work], place)
                step = np.where(owner == NONE, step, owner)
        return step.astype(np.int32)
    last = np.searchsorted(stages.instances.start_ns[units], found.start_ns, side="right") - 1
    inside = (last >= 0) & (found.start_ns < stages.instances.end_ns[units][np.maximum(last, 0)])
    return np.where(inside, last, NONE).astype(np.int32)


# --- what happened between collectives --------------------------------------------------------------------------------


def _stalled(found: FoundCollectives, compute: Blocks) -> Int64:
    """Return, per collective, how long at its end the rank computed nothing."""
    if not len(compute):
        return found.end_ns - found.start_ns
    last = np.searchsorted(compute.start_ns, found.end_ns, side="left") - 1
    computed = np.where(last >= 0, compute.end_ns[np.maximum(last, 0)], found.start_ns)
    return np.asarray(found.end_ns - np.clip(computed, found.start_ns, found.end_ns))


def _segments(found: FoundCollectives, stalled: Int64, first_ns: int) -> Intervals:
    """Return two intervals per collective, in which the rank could work since it entered the previous one.

    The first is during the previous collective, without the time at its end in which the rank stalled; the second is after it.
    What is cut off at the entries is cut off on all ranks, so that the same work counts the same, whether it overlaps the
    collective or not.
    """
    start, count = found.start_ns, len(found.start_ns)
    if not count:
        return Intervals.none()
    left = np.minimum(found.end_ns[:-1], start[1:])
    resumed = np.where(found.end_ns[:-1] > start[1:], left, found.end_ns[:-1] - stalled[:-1])
    begins, ends = np.full((count, 2), first_ns, np.int64), np.full((count, 2), first_ns, np.int64)
    begins[1:, 0], ends[1:, 0] = start[:-1], resumed
    begins[1:, 1], ends[:, 1] = left, start
    begins[0] = np.minimum(first_ns, start[0])
    ends[0, 0] = begins[0, 0]
    return Intervals(begins.reshape(-1), ends.reshape(-1))


def _causes(
    trace: Trace,
    found: FoundCollectives,
    segments: Intervals,
    side: _Side,
    calls: Int64,
    names: _Names,
    order: Int64 | None,
) -> Causes:
    parts = []
    if not len(segments):
        return Causes.none()
    if len(found.work):
        parts.append(_device_causes(trace, segments, side, calls, names, order))
        launched = through(found.call, trace.calls.start_ns)
        known = bool((launched != NONE).all()) and bool((np.diff(launched) >= 0).all())
        if known:
            thread = int(np.bincount(_call_lanes(trace)[1][found.call]).argmax())
            windows = Intervals(np.concatenate([launched[:1], launched[:-1]]), launched)
            parts.append(_host_causes(trace, thread, windows, np.arange(len(windows)), names))
    else:
        parts.append(_host_causes(trace, _main_lane(trace), segments, np.arange(len(segments)) // 2, names))
    whole = {name: np.concatenate([part.columns()[name] for part in parts]) for name in parts[0].columns()}
    return Causes(**whole).rows(np.argsort(whole["collective"], kind="stable"))


def _call_lanes(trace: Trace) -> list[Int64]:
    operators, calls = trace.operators, trace.calls
    return lanes_of((operators.process, operators.thread), (calls.process, calls.thread))


def _main_lane(trace: Trace) -> int:
    """Return the thread with the most operators."""
    lane = _call_lanes(trace)[0]
    return int(np.bincount(lane).argmax()) if len(lane) else NONE


def _host_causes(trace: Trace, thread: int, windows: Intervals, collective: Int64, names: _Names) -> Causes:
    """Return the time of each innermost operator of a thread in the windows of each collective, and that outside operators."""
    operators = trace.operators
    own = matching(trace, operators.name, lambda name: name.startswith(PROFILER_OPERATORS))
    rows = np.flatnonzero((_call_lanes(trace)[0] == thread) & ~own)
    pieces = innermost_pieces(operators.start_ns[rows], operators.end_ns[rows])
    kept = pieces.row != NONE
    pieces = pieces.rows(kept)
    piece, window, ns = overlaps(pieces, windows)
    code = names.codes(trace, operators.name[rows[pieces.row]])[piece]
    outside = windows.end_ns - windows.start_ns - sums(window, ns, len(windows))
    return _summed(
        np.concatenate([collective[window], collective]),
        np.concatenate([code, np.full(len(windows), names[OUTSIDE])]),
        np.concatenate([ns, outside]),
        on_device=False,
    )


def _launch_order(trace: Trace, found: FoundCollectives, side: _Side, calls: Int64) -> Int64 | None:
    """Return when each collective was launched; None if that is unknown, or if a call launches other kernels with it (a graph).

    The first ones may have been launched before the recording began.
    """
    known = found.call != NONE
    launched = np.where(known, through(found.call, trace.calls.start_ns), -_LATEST_NS + np.arange(len(known)))
    first = int(known.argmax())
    if not known[first:].all() or np.isin(calls[side.other], found.call[first:]).any():
        return None
    return launched if bool((np.diff(launched) > 0).all()) else None


def _ordered_from(trace: Trace, found: FoundCollectives, side: _Side, calls: Int64, launched: Int64) -> int:
    """Return the row of the first collective before which every launch is known."""
    of_others = calls[side.other]
    unknown, known = trace.work.start_ns[side.other[of_others == NONE]], of_others[of_others != NONE]
    if not len(unknown) and found.call[0] != NONE:
        return 0
    recorded = trace.calls.start_ns[known].min(initial=int(launched[-1]))
    by_launch, by_time = np.searchsorted(launched, recorded), np.searchsorted(found.start_ns, unknown.max(initial=0))
    return int(max(by_launch, by_time)) + 1


def _device_causes(trace: Trace, segments: Intervals, side: _Side, calls: Int64, names: _Names, launched: Int64 | None) -> Causes:
    """Return the time of each operator's kernels that belong to each collective, and the time without work.

    These are the kernels that were launched since the previous collective or, if its launch is unknown, ran in the segments.
    """
    work = trace.work
    rows = side.other
    collective = np.arange(len(segments)) // 2
    if launched is None:
        piece, window, ns = overlaps(Intervals(work.start_ns[rows], work.end_ns[rows]), segments)
        following = collective[window]
    else:
        by_time = np.searchsorted(segments.end_ns[1::2], work.start_ns[rows])
        following = _following(trace, rows, calls, launched, by_time)
        piece = np.flatnonzero(following < len(launched))
        following = following[piece]
        ns = work.end_ns[rows[piece]] - work.start_ns[rows[piece]]
    owner = _operator_names(trace, rows[piece], calls, names)
    alone = union_blocks(work.start_ns[rows], work.end_ns[rows])
    lengths = segments.end_ns - segments.start_ns
    idle = lengths - _covered(side.busy, segments)
    idle[::2] = (lengths - _covered(alone, segments))[::2]  # during the previous collective, which does not stall the rank
    return _summed(
        np.concatenate([following, collective]),
        np.concatenate([owner, np.full(len(segments), names[DEVICE_IDLE])]),
        np.concatenate([ns, idle]),
        on_device=True,
    )


def _covered(blocks: Blocks, windows: Intervals) -> Int64:
    return covered_before(blocks, windows.end_ns) - covered_before(blocks, windows.start_ns)


def _operator_names(trace: Trace, rows: Int64, calls: Int64, names: _Names) -> Int64:
    """Return the name of the operator that launched each row of work, otherwise the name of the kernel."""
    lane, call_lane = _call_lanes(trace)
    call = calls[rows]
    nesting = nest(trace.operators.start_ns, trace.operators.end_ns, lane)
    operator = np.full(len(rows), NONE, np.int64)
    launched = np.flatnonzero(call != NONE)
    operator[launched] = nesting.innermost(trace.calls.start_ns[call[launched]], call_lane[call[launched]])
    name = np.where(operator == NONE, trace.work.name[rows], through(operator, trace.operators.name))
    return names.codes(trace, name)


def _summed(collective: Int64, name: Int64, ns: Int64, *, on_device: bool) -> Causes:
    """Return the sums by collective and name."""
    width = int(name.max(initial=0)) + 1
    keys, place = np.unique(collective * width + name, return_inverse=True)
    total = sums(place.reshape(-1), ns, len(keys))
    kept = total > 0
    keys, total = keys[kept], total[kept]
    return Causes(
        (keys // width).astype(np.int32), (keys % width).astype(np.int32), total, np.full(len(keys), on_device, np.uint8)
    )

"""Device time, exact to the nanosecond: busy + idle = span, for the whole trace, each stage and each step.

*Busy* is the union of kernels, copies and memsets over all streams; *span* is from the start of the first to the end of the
last; *idle* is the rest. Sums, which count overlapping work more than once, are reported next to the unions.

- A **stage** owns the work that its launches started, whenever that work ran on the device. The device window of an instance
  is from the first to the last of its own work; busy is the union of that work, and a stage's figures are sums over its
  instances. Its wall time is that of the label on the host.
- The **steps** of a decode divide its time without remainder: a step's window is from its first work to the first work of the
  next step (for the last step, to the end of its last work), and busy is everything that the device did in it. The windows
  therefore add up to the time from the first step's first work to the last step's end, including gaps between steps.
- With several devices, the total is the union over all of them ("at least one was busy"); each device also has its own figures.
"""

from dataclasses import dataclass, replace

import numpy as np

from llm_perf_opt.analysis.kernels.classes import CLASSES, KernelClass
from llm_perf_opt.analysis.trace.idle import HostSide, IdleCause, IdleGaps, Occupation, host_side, occupation
from llm_perf_opt.analysis.trace.intervals import (
    Blocks,
    distinct,
    exact_sum,
    group_spans,
    renumbered,
    sums,
    union_blocks,
    union_ns,
)
from llm_perf_opt.analysis.trace.stage_instances import TraceStages
from llm_perf_opt.traces.events import Int64, Trace, UInt8, WorkKind, different, different_pairs
from llm_perf_opt.traces.projection import NONE, Bool, launching_calls


@dataclass(frozen=True)
class KindTime:
    """All work of one kind."""

    count: int
    sum_ns: int
    union_ns: int


@dataclass(frozen=True)
class DeviceTime:
    """Busy and idle time of one device, or of all together, from the first to the last of its work."""

    device: int | None
    """None for all devices together."""
    span_ns: int
    busy_ns: int
    idle_ns: int
    kernels: KindTime
    copies: KindTime
    memsets: KindTime
    idle: dict[IdleCause, int]
    """Idle time by cause; sums to `idle_ns`."""


@dataclass(frozen=True)
class StageTime:
    """One stage, all its instances together."""

    name: str
    count: int
    """Instances, including those without device work."""
    wall_ns: int
    """Sum of the labels' host time; for stages found in device work, of their windows."""
    span_ns: int
    busy_ns: int
    idle_ns: int
    kernels: int
    kernel_ns: int
    """Sum over the kernels."""
    launches: int
    """Calls that started the kernels: one per kernel, or one per CUDA graph replay."""
    idle: dict[IdleCause, int]


@dataclass(frozen=True)
class StepTimes:
    """The steps of a stage as parallel columns, sorted by parent and first work."""

    stage: str
    instance: Int64
    start_ns: Int64
    end_ns: Int64
    busy_ns: Int64
    idle_ns: Int64
    wall_ns: Int64
    kernels: Int64
    kernel_ns: Int64
    launches: Int64
    idle: dict[IdleCause, Int64]

    def __len__(self) -> int:
        return len(self.instance)


@dataclass(frozen=True)
class Account:
    """The device time of the whole trace, each device, each stage and each step."""

    total: DeviceTime
    devices: tuple[DeviceTime, ...]
    stages: tuple[StageTime, ...]
    steps: StepTimes | None
    """None if the trace has no steps."""
    gaps: IdleGaps
    """Gaps of all devices together."""


def account(trace: Trace, stages: TraceStages, device: int | None = None) -> Account:
    """Return the device time of a trace. With `device`, total, stages and steps include only its work."""
    host = host_side(trace, launching_calls(trace))
    rows = _on_device(trace, device)
    whole = occupation(trace, host, stages.of_work, rows)
    total = _device_time(trace, rows, whole, device)
    numbers = different(trace.work.device).tolist()
    return Account(
        total=total,
        devices=(replace(total, device=numbers[0]),)
        if len(numbers) == 1 and device in (None, numbers[0])
        else tuple(_one_device(trace, host, stages, number) for number in numbers),
        stages=_stage_times(trace, host, stages, {name: stages.of_stage(name) for name in stages.names}, rows),
        steps=step_times(trace, host, stages, rows, whole.gaps),
        gaps=whole.gaps,
    )


def stages_by_device(trace: Trace, stages: TraceStages) -> dict[int, tuple[StageTime, ...]]:
    """Return the stages of each device's own work."""
    host = host_side(trace, launching_calls(trace))
    groups = {name: stages.of_stage(name) for name in stages.names}
    return {
        device: _stage_times(trace, host, stages, groups, _on_device(trace, device))
        for device in different(trace.work.device).tolist()
    }


def _stage_times(
    trace: Trace, host: HostSide, stages: TraceStages, groups: dict[str, Int64], rows: Int64
) -> tuple[StageTime, ...]:
    """Return every stage of these rows of device work. `groups`: stage → instance per row of work, or -1."""
    blocks = union_blocks(trace.work.start_ns[rows], trace.work.end_ns[rows])
    return tuple(_stage_time(trace, host, stages, name, group, rows, blocks) for name, group in groups.items())


def step_times(trace: Trace, host: HostSide, stages: TraceStages, rows: Int64, gaps: IdleGaps) -> StepTimes | None:
    """Divide the time of each decode (or run of steps) among its steps; `gaps` are those of the work in `rows`."""
    name = stages.step_stage
    if name is None:
        return None
    instance = stages.of_stage(name)[rows]
    mine = rows[instance != NONE]
    steps = distinct(instance, len(stages.instances))
    of_step = renumbered(instance[instance != NONE], steps, len(stages.instances))
    first, last = group_spans(of_step, trace.work.start_ns[mine], trace.work.end_ns[mine], len(steps))
    order = np.lexsort((steps, first, stages.instances.parent[steps]))
    steps, first, last = steps[order], first[order], last[order]
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    end = _window_ends(stages.instances.parent[steps], first, last)
    kernel = trace.work.kind[mine] == WorkKind.KERNEL
    number = place[of_step]
    duration = trace.work.end_ns[mine] - trace.work.start_ns[mine]
    idle = _idle_in_windows(gaps, first, end)
    idle_ns: Int64 = np.stack(list(idle.values())).sum(axis=0)
    return StepTimes(
        stage=name,
        instance=steps,
        start_ns=first,
        end_ns=end,
        busy_ns=end - first - idle_ns,
        idle_ns=idle_ns,
        wall_ns=stages.instances.end_ns[steps] - stages.instances.start_ns[steps],
        kernels=np.bincount(number[kernel], minlength=len(steps)).astype(np.int64),
        kernel_ns=sums(number[kernel], duration[kernel], len(steps)),
        launches=_distinct_per_group(number[kernel], host.call_of_work[mine[kernel]], len(steps)),
        idle=idle,
    )


def _on_device(trace: Trace, device: int | None) -> Int64:
    if device is None:
        return np.arange(len(trace.work), dtype=np.int64)
    return np.flatnonzero(trace.work.device == device)


def _one_device(trace: Trace, host: HostSide, stages: TraceStages, device: int) -> DeviceTime:
    rows = _on_device(trace, device)
    return _device_time(trace, rows, occupation(trace, host, stages.of_work, rows), device)


def _device_time(trace: Trace, rows: Int64, occupied: Occupation, device: int | None) -> DeviceTime:
    starts, ends, kind_of = trace.work.start_ns[rows], trace.work.end_ns[rows], trace.work.kind[rows]
    busy_ns, idle = occupied.busy_ns, occupied.gaps.by_cause()
    kinds = {}
    for kind in WorkKind:
        start, end = starts[kind_of == kind], ends[kind_of == kind]
        kinds[kind] = KindTime(len(start), int((end - start).sum()), union_ns(start, end))
    idle_ns = sum(idle.values())
    return DeviceTime(
        device=device,
        span_ns=busy_ns + idle_ns,
        busy_ns=busy_ns,
        idle_ns=idle_ns,
        kernels=kinds[WorkKind.KERNEL],
        copies=kinds[WorkKind.MEMCPY],
        memsets=kinds[WorkKind.MEMSET],
        idle=idle,
    )


def _stage_time(
    trace: Trace, host: HostSide, stages: TraceStages, name: str, group: Int64, rows: Int64, everything: Blocks
) -> StageTime:
    mine = rows[group[rows] != NONE]
    occupied = occupation(trace, host, stages.of_work, mine, group, around=everything)
    start, end = trace.work.start_ns[mine], trace.work.end_ns[mine]
    busy_ns, idle = occupied.busy_ns, occupied.gaps.by_cause()
    idle_ns = sum(idle.values())
    kernel = trace.work.kind[mine] == WorkKind.KERNEL
    calls = host.call_of_work[mine[kernel]]
    instances = stages.instances.rows(stages.rows_of(name))
    return StageTime(
        name=name,
        count=len(instances),
        wall_ns=exact_sum(instances.end_ns - instances.start_ns),
        span_ns=busy_ns + idle_ns,
        busy_ns=busy_ns,
        idle_ns=idle_ns,
        kernels=int(kernel.sum()),
        kernel_ns=int((end - start)[kernel].sum()),
        launches=len(distinct(calls, len(trace.calls))),
        idle=idle,
    )


def _window_ends(parent: Int64, first: Int64, last: Int64) -> Int64:
    """Return the end of each step's window: where the next step of the same parent begins, or where its own work ends."""
    if not len(first):
        return last
    followed = np.append(parent[1:] == parent[:-1], False)
    return np.asarray(np.where(followed, np.append(first[1:], 0), last))


def _idle_in_windows(gaps: IdleGaps, first: Int64, end: Int64) -> dict[IdleCause, Int64]:
    """Return idle time per cause and window. Windows start and end with work, so no gap crosses their bounds."""
    found = {}
    for cause in IdleCause:
        mine = gaps.cause == cause
        before = np.append(0, np.cumsum((gaps.end_ns - gaps.start_ns)[mine]))
        start = gaps.start_ns[mine]
        found[cause] = before[np.searchsorted(start, end)] - before[np.searchsorted(start, first)]
    return found


def _distinct_per_group(group: Int64, value: Int64, groups: int) -> Int64:
    known = value != NONE
    width = int(value.max(initial=0)) + 1
    pairs = np.sort(group[known] * width + value[known], kind="stable")
    first = np.append(True, pairs[1:] != pairs[:-1])[: len(pairs)]
    counts: Int64 = np.bincount(pairs[first] // width, minlength=groups).astype(np.int64)
    return counts


# --- concurrency ------------------------------------------------------------------------------------------------------


def side_by_side_notes(trace: Trace, stages: TraceStages, inner: str, devices: int) -> tuple[str, ...]:
    """Return notes on figures of work that several devices or threads do at the same time."""
    found = []
    if devices > 1:
        found.append(f"Busy is the time in which at least one of the stage's {devices} devices was working.")
    instances = stages.instances.rows(stages.rows_of(inner))
    label = instances.range[instances.range != NONE]
    threads = len(different_pairs(trace.ranges.process[label], trace.ranges.thread[label])[0])
    length = exact_sum(instances.end_ns - instances.start_ns)
    if threads > 1 and union_ns(instances.start_ns, instances.end_ns) < length:
        found.append(
            f"{threads} threads label the stage at the same time, as workers do: times and counts are sums over all of them, "
            "and figures per unit are means."
        )
    return tuple(found)


def overlap_of(trace: Trace, group: Int64, busiest: Bool, devices: int, kernels_ns: int) -> float:
    """Return covered time / summed time of the busiest device's kernels; `kernels_ns` is the time covered on all devices."""
    mine = (group != NONE) & (trace.work.kind == WorkKind.KERNEL) & busiest
    total = int((trace.work.end_ns - trace.work.start_ns)[mine].sum())
    covered = kernels_ns if devices == 1 else _kernels_ns(trace, np.where(mine, group, NONE))
    return covered / total if total else 1.0


def on_the_busiest(trace: Trace, group: Int64) -> Bool:
    """Return per row of work whether it ran on the device with the most work of its instance.

    If workers with one device each label their own steps, all of them count; if devices share a step, the slowest counts.
    """
    found = np.ones(len(trace.work), np.bool_)
    mine = np.flatnonzero(group != NONE)
    numbers, device = np.unique(trace.work.device[mine], return_inverse=True)
    if len(numbers) < 2:
        return found
    instance = np.unique(group[mine], return_inverse=True)[1]
    device, instance = device.reshape(-1), instance.reshape(-1)
    duration = (trace.work.end_ns - trace.work.start_ns)[mine]
    pairs, pair = np.unique(instance * len(numbers) + device, return_inverse=True)
    time = sums(pair.reshape(-1), duration, len(pairs))
    order = np.lexsort((pairs, -time, pairs // len(numbers)))
    of_instance = pairs[order] // len(numbers)
    first = np.append(True, of_instance[1:] != of_instance[:-1])
    found[mine] = device == (pairs[order][first] % len(numbers))[instance]
    return found


def kernels_cover(trace: Trace, group: Int64, classes: UInt8) -> tuple[int, int]:
    """Return the time that a stage's kernels cover, summed over instances: without collectives, and all."""
    collective = classes == CLASSES.index(KernelClass.COLLECTIVE)
    total = _kernels_ns(trace, group)
    return (_kernels_ns(trace, np.where(collective, NONE, group)) if collective.any() else total), total


def _kernels_ns(trace: Trace, group: Int64) -> int:
    """Return the union of kernels per group, summed over groups."""
    rows = np.flatnonzero((group != NONE) & (trace.work.kind == WorkKind.KERNEL))
    blocks = union_blocks(trace.work.start_ns[rows], trace.work.end_ns[rows], group[rows])
    return int((blocks.end_ns - blocks.start_ns).sum())

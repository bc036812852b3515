"""What runs side by side in a stage: devices, streams, and the threads that label it. Sums over such work are not time passed."""

import numpy as np

from llm_perf_opt.analysis.kernels.classes import CLASSES, KernelClass
from llm_perf_opt.analysis.trace.intervals import union_blocks, union_ns
from llm_perf_opt.analysis.trace.row_numbers import exact_sum, sums
from llm_perf_opt.analysis.trace.stage_instances import TraceStages
from llm_perf_opt.traces.events import Int64, Trace, UInt8, WorkKind, different_pairs
from llm_perf_opt.traces.projection import NONE, Bool


def side_by_side_notes(trace: Trace, stages: TraceStages, inner: str, devices: int) -> tuple[str, ...]:
    """What is to be known of sums over work that several devices or threads do at the same time."""
    found = []
    if devices > 1:
        found.append(f"Busy is the time in which at least one of the stage's {devices} devices worked.")
    instances = stages.instances.rows(stages.rows_of(inner))
    label = instances.range[instances.range != NONE]
    threads = len(different_pairs(trace.ranges.process[label], trace.ranges.thread[label])[0])
    length = exact_sum(instances.end_ns - instances.start_ns)
    if threads > 1 and union_ns(instances.start_ns, instances.end_ns) < length:
        found.append(
            f"{threads} threads label the stage at the same time, as workers do: times and numbers are sums over all of them, "
            "and those of one unit are means."
        )
    return tuple(found)


def overlap_of(trace: Trace, group: Int64, busiest: Bool, devices: int, kernels_ns: int) -> float:
    """The time that the kernels of the busiest device cover in their sum; `kernels_ns` is what those of all devices cover."""
    mine = (group != NONE) & (trace.work.kind == WorkKind.KERNEL) & busiest
    total = int((trace.work.end_ns - trace.work.start_ns)[mine].sum())
    covered = kernels_ns if devices == 1 else _kernels_ns(trace, np.where(mine, group, NONE))
    return covered / total if total else 1.0


def on_the_busiest(trace: Trace, group: Int64) -> Bool:
    """Per row of work: whether it ran on the device with the most work of its instance. Workers with a device each, which label
    their own steps, all count; of devices that share a step, the one that it waits for longest."""
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
    """What the kernels of a stage cover, instance by instance: collectives left out, and all of them."""
    collective = classes == CLASSES.index(KernelClass.COLLECTIVE)
    everything = _kernels_ns(trace, group)
    return (_kernels_ns(trace, np.where(collective, NONE, group)) if collective.any() else everything), everything


def _kernels_ns(trace: Trace, group: Int64) -> int:
    """Union of kernels, group by group."""
    rows = np.flatnonzero((group != NONE) & (trace.work.kind == WorkKind.KERNEL))
    blocks = union_blocks(trace.work.start_ns[rows], trace.work.end_ns[rows], group[rows])
    return int((blocks.end_ns - blocks.start_ns).sum())

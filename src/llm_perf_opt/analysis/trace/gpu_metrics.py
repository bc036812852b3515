"""What the samples of a GPU's metrics say of each stage.

A sample belongs to a stage where its time lies between the first and the last of the stage's own work on that device, instance by
instance: samples are on the device's clock, and the host's labels run ahead of it. Idle time inside a window counts.
"""

from collections.abc import Sequence

import numpy as np

from llm_perf_opt.analysis.trace.accounting import Account, DeviceTime, StageTime, stages_by_device
from llm_perf_opt.analysis.trace.document import DeviceLine, DeviceStageLine, GpuMetricLine, IdleLine
from llm_perf_opt.analysis.trace.intervals import covered_before, distinct, group_spans, renumbered, union_blocks
from llm_perf_opt.analysis.trace.stage_instances import TraceStages
from llm_perf_opt.traces.events import Int64, Trace, different
from llm_perf_opt.traces.projection import NONE


def device_lines(trace: Trace, stages: TraceStages, whole: Account) -> list[DeviceLine]:
    """Every device with work; where there are several, with what each stage did on it."""
    found = stages_by_device(trace, stages) if len(whole.devices) > 1 else {}
    return [_line(trace, one, _stages(found.get(one.device, ()) if one.device is not None else ())) for one in whole.devices]


def device_name(trace: Trace, device: int) -> str:
    """What the trace calls a device: nsys names each, torch lists all that the program saw; empty where neither does."""
    listed = [name.strip() for name in trace.facts.get("devices", "").split(", ")]
    return trace.facts.get(f"device.{device}", "") or (listed[device] if 0 <= device < len(listed) else "")


def _line(trace: Trace, one: DeviceTime, stages: list[DeviceStageLine]) -> DeviceLine:
    number = -1 if one.device is None else one.device
    return DeviceLine(
        device=number,
        name=device_name(trace, number),
        kernels=one.kernels.count,
        kernel_ns=one.kernels.sum_ns,
        busy_ns=one.busy_ns,
        idle_ns=one.idle_ns,
        span_ns=one.span_ns,
        idle=[IdleLine(cause.label, ns) for cause, ns in one.idle.items() if ns],
        stages=stages,
    )


def _stages(found: Sequence[StageTime]) -> list[DeviceStageLine]:
    return [
        DeviceStageLine(stage.name, stage.busy_ns, stage.idle_ns, stage.span_ns, stage.kernels, stage.kernel_ns)
        for stage in found
    ]


WHOLE = ""
"""In place of a stage's name: from the first to the last work of the device."""


def gpu_metric_lines(trace: Trace, stages: TraceStages) -> list[GpuMetricLine]:
    """Mean, least and most of each metric, for the whole and for each stage that a sample fell into."""
    found: list[GpuMetricLine] = []
    for device in different(trace.samples.device).tolist():
        on_device = trace.work.device == device
        for stage in (WHOLE, *stages.names):
            group = np.zeros(len(trace.work), np.int64) if stage == WHOLE else stages.of_stage(stage)
            inside = _inside(trace, np.where(on_device, group, NONE), device)
            found += _lines(trace, stage, device, inside)
    return found


def _inside(trace: Trace, group: Int64, device: int) -> Int64:
    """Rows of the device's samples that lie in a window of a group's work."""
    rows = np.flatnonzero(group != NONE)
    groups = distinct(group[rows], int(group.max(initial=0)) + 1)
    of_group = renumbered(group[rows], groups, int(group.max(initial=0)) + 1)
    windows = union_blocks(*group_spans(of_group, trace.work.start_ns[rows], trace.work.end_ns[rows], len(groups)))
    mine = np.flatnonzero(trace.samples.device == device)
    times = trace.samples.time_ns[mine]
    return np.asarray(mine[covered_before(windows, times + 1) > covered_before(windows, times)])


def _lines(trace: Trace, stage: str, device: int, rows: Int64) -> list[GpuMetricLine]:
    rows = rows[np.argsort(trace.samples.metric[rows], kind="stable")]
    metric, value = trace.samples.metric[rows], trace.samples.value[rows]
    parts = np.split(value, np.flatnonzero(metric[1:] != metric[:-1]) + 1) if len(rows) else []
    return [
        GpuMetricLine(
            stage=stage,
            device=device,
            metric=trace.name_of(index),
            samples=len(mine),
            mean=float(mine.mean()),
            least=int(mine.min()),
            most=int(mine.max()),
        )
        for index, mine in zip(different(metric).tolist(), parts, strict=True)
    ]

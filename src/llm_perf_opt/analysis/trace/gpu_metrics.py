"""Device time per device, and sampled GPU metrics per stage.

A sample belongs to a stage if its time is between the first and the last of the work of one of the stage's instances on that
device. Host labels do not decide, because they run ahead of the device. Idle time inside a window counts.
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
    """Return every device with work; if there are several, with the stages on each."""
    found = stages_by_device(trace, stages) if len(whole.devices) > 1 else {}
    return [_line(trace, time, found.get(-1 if time.device is None else time.device, ())) for time in whole.devices]


def device_name(trace: Trace, device: int) -> str:
    """Return the device's name in the trace: nsys names each, torch lists all visible ones. Empty if neither does."""
    listed = [name.strip() for name in trace.facts.get("devices", "").split(", ")]
    return trace.facts.get(f"device.{device}", "") or (listed[device] if 0 <= device < len(listed) else "")


def _line(trace: Trace, time: DeviceTime, stages: Sequence[StageTime]) -> DeviceLine:
    number = -1 if time.device is None else time.device
    return DeviceLine(
        device=number,
        name=device_name(trace, number),
        kernels=time.kernels.count,
        kernel_ns=time.kernels.sum_ns,
        busy_ns=time.busy_ns,
        idle_ns=time.idle_ns,
        span_ns=time.span_ns,
        idle=[IdleLine(cause.label, ns) for cause, ns in time.idle.items() if ns],
        stages=[
            DeviceStageLine(stage.name, stage.busy_ns, stage.idle_ns, stage.span_ns, stage.kernels, stage.kernel_ns)
            for stage in stages
        ],
    )


WHOLE = ""
"""Used as the stage's name for the time from the first to the last work of the device."""


def gpu_metric_lines(trace: Trace, stages: TraceStages) -> list[GpuMetricLine]:
    """Return mean, minimum and maximum of each metric, for the whole and for each stage with samples."""
    found: list[GpuMetricLine] = []
    for device in different(trace.samples.device).tolist():
        on_device = trace.work.device == device
        for stage in (WHOLE, *stages.names):
            group = np.zeros(len(trace.work), np.int64) if stage == WHOLE else stages.of_stage(stage)
            inside = _inside(trace, np.where(on_device, group, NONE), device)
            found += _lines(trace, stage, device, inside)
    return found


def _inside(trace: Trace, group: Int64, device: int) -> Int64:
    """Return the rows of the device's samples inside a window of a group's work."""
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

"""Devices side by side: what each did by itself, and the stages on each. Shown where there is more than one."""

from collections.abc import Sequence

from llm_perf_opt.analysis.trace.document import DeviceLine, TraceAnalysis
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.report.html_tables import Cell, Column, HtmlTable, numbers
from llm_perf_opt.report.text import escape, milliseconds, percent, table

TOGETHER = (
    "Figures of the whole trace and of its stages are of all devices together: busy is the time in which at least one of them "
    "worked."
)
DEVICE_HEADER = ("device", "name", "kernels", "kernel time", "busy", "idle", "span", "busy share")
STAGE_HEADER = ("stage", "device", "busy", "idle", "span", "busy share", "kernels")


def device_rows(devices: Sequence[DeviceLine]) -> list[list[str]]:
    """One row per device; busy and idle add up to its span, from its own first work to its last."""
    return [
        [
            str(one.device),
            one.name,
            f"{one.kernels:,}",
            milliseconds(one.kernel_ns),
            milliseconds(one.busy_ns),
            milliseconds(one.idle_ns),
            milliseconds(one.span_ns),
            _share(one.busy_ns, one.span_ns),
        ]
        for one in devices
    ]


def device_stage_rows(devices: Sequence[DeviceLine]) -> list[list[str]]:
    """One row per stage and device; a stage without work on a device is left out there."""
    names = list(dict.fromkeys(stage.name for one in devices for stage in one.stages))
    return [
        [
            name,
            str(one.device),
            milliseconds(stage.busy_ns),
            milliseconds(stage.idle_ns),
            milliseconds(stage.span_ns),
            _share(stage.busy_ns, stage.span_ns),
            f"{stage.kernels:,}",
        ]
        for name in names
        for one in devices
        for stage in one.stages
        if stage.name == name and stage.span_ns
    ]


def devices_section(trace: Maybe[TraceAnalysis]) -> str:
    """For report.md; empty where one device did all."""
    if isinstance(trace, Missing) or len(trace.devices) < 2:
        return ""
    rows = [[cell if place != 1 else escape(cell) for place, cell in enumerate(row)] for row in device_rows(trace.devices)]
    return "\n".join(
        [
            "## Devices\n",
            f"{TOGETHER} Times are the trace's.\n",
            table(DEVICE_HEADER, rows, "llrrrrrr"),
            table(STAGE_HEADER, device_stage_rows(trace.devices), "llrrrrr"),
        ]
    )


def device_html_tables(trace: Maybe[TraceAnalysis]) -> list[HtmlTable]:
    """For report.html; none where one device did all."""
    if isinstance(trace, Missing) or len(trace.devices) < 2:
        return []
    whole = HtmlTable("devices", "Each device by itself", [*map(Column, DEVICE_HEADER[:2]), *numbers(*DEVICE_HEADER[2:])])
    for row in device_rows(trace.devices):
        whole.add(*map(Cell, row))
    whole.foot = TOGETHER
    stages = HtmlTable(
        "device-stages", "The stages on each device", [*map(Column, STAGE_HEADER[:2]), *numbers(*STAGE_HEADER[2:])]
    )
    for row in device_stage_rows(trace.devices):
        stages.add(*map(Cell, row))
    return [whole, stages]


def _share(part_ns: int, whole_ns: int) -> str:
    return percent(part_ns / whole_ns) if whole_ns else "n/a: no length"

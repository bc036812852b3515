"""Tables of a trace: budgets, devices, labels and sampled metrics."""

from collections.abc import Sequence

from llm_perf_opt.analysis.trace.document import BudgetTable, DeviceLine, GpuMetricLine, LabelLine
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.report.document import Cell, Column, Table, cell, count_cell, name_cell, numbers
from llm_perf_opt.report.text import grouped, milliseconds, percent, significant

MOST_LABELS = 100
"""Of a page; --json of analyze has them all."""
TOGETHER = (
    "Figures of the whole trace and of its stages are of all devices together: busy is the time in which at least one of them "
    "worked."
)
LABELS = (
    "Labels of the program itself (record_function, NVTX) that mark no stage. Time is that of the labels under the profiler; "
    "kernels are those launched while a label was open on the launching thread, inner labels included."
)
SAMPLED = (
    "Means of the samples that nsys took while the stage's work ran on the device, under the profiler; idle time between kernels "
    "counts. Units are in the names, percent where none is given; the number of samples is in brackets."
)
_NO_LENGTH = Missing("it has no length")
_OTHER_THREAD = Missing("the range may end on another thread than it began on")


def budget_table(number: int, budget: BudgetTable) -> Table:
    """Return where the time of a stage goes; the rows sum to its wall time."""
    many = f"{budget.units:,} {budget.unit}s" if budget.units > 1 else f"one {budget.unit}"
    columns = [Column("use"), *numbers("time", f"per {budget.unit}", "share")]
    caption = f"Where {budget.stage} goes: {milliseconds(budget.wall_ns)} for {many}"
    table = Table(f"budget-{number}", caption, columns)
    for label, ns, share in (*[(row.label, row.ns, row.share) for row in budget.rows], ("sum", budget.wall_ns, 1.0)):
        table.add(label, cell(ns, milliseconds), cell(ns / max(budget.units, 1), milliseconds), cell(share, percent))
    table.foot = " ".join([f"Wall time from {budget.wall_source}.", *budget.notes])
    return table


def device_tables(devices: Sequence[DeviceLine]) -> list[Table]:
    """Return each device by itself, and the stages on each; nothing where one device did all the work."""
    if len(devices) < 2:
        return []
    columns = [Column("device"), Column("name"), *numbers("kernels", "kernel time", "busy", "idle", "span", "busy share")]
    whole = Table("devices", "Each device by itself", columns, foot=TOGETHER)
    for one in devices:
        spent = [cell(ns, milliseconds) for ns in (one.kernel_ns, one.busy_ns, one.idle_ns, one.span_ns)]
        whole.add(str(one.device), name_cell(one.name), count_cell(one.kernels), *spent, _share(one.busy_ns, one.span_ns))
    columns = [Column("stage"), Column("device"), *numbers("busy", "idle", "span", "busy share", "kernels")]
    stages = Table("device-stages", "The stages on each device", columns)
    names = dict.fromkeys(stage.name for one in devices for stage in one.stages)
    found = [(stage, one) for name in names for one in devices for stage in one.stages if stage.name == name and stage.span_ns]
    for stage, one in found:
        spent = [cell(ns, milliseconds) for ns in (stage.busy_ns, stage.idle_ns, stage.span_ns)]
        stages.add(stage.name, str(one.device), *spent, _share(stage.busy_ns, stage.span_ns), count_cell(stage.kernels))
    return [whole, stages] if found else [whole]


def label_tables(labels: Sequence[LabelLine], most: int = MOST_LABELS) -> list[Table]:
    """Return the labels that are neither stages nor modules; nothing where there are none."""
    if not labels:
        return []
    columns = [Column("label"), *numbers("calls", "time", "kernels", "kernel time")]
    table = Table("labels", "Labels that mark no stage", columns, tools=True)
    for line in labels[:most]:
        table.add(
            name_cell(line.name),
            count_cell(line.calls),
            cell(line.wall_ns, milliseconds),
            cell(_told(line.kernels), grouped),
            cell(_told(line.kernel_ns), milliseconds),
        )
    more = len(labels) - len(table.rows)
    table.foot = LABELS + (f" {more:,} more are not shown." if more else "")
    return [table]


def gpu_metric_tables(lines: Sequence[GpuMetricLine], most: int | None = None) -> list[Table]:
    """Return the metrics that nsys sampled, a column per stage; nothing where nothing was sampled."""
    if not lines:
        return []
    stages = list(dict.fromkeys(line.stage for line in lines))
    several = len({line.device for line in lines}) > 1
    columns = [Column("metric"), *([Column("device")] if several else []), *numbers(*[stage or "all work" for stage in stages])]
    table = Table("gpu-metrics", "Metrics of the GPU, sampled by nsys", columns, foot=SAMPLED)
    found = {(line.metric, line.device, line.stage): line for line in lines}
    rows = list(dict.fromkeys((line.metric, line.device) for line in lines))
    for metric, device in rows[:most]:
        means = [_mean(found.get((metric, device, stage))) for stage in stages]
        table.add(name_cell(metric), *([str(device)] if several else []), *means)
    if len(rows) > len(table.rows):
        table.foot = f"{len(rows) - len(table.rows):,} more are not shown. {SAMPLED}"
    return [table]


def _mean(line: GpuMetricLine | None) -> Cell | Missing:
    if line is None:
        return Missing("no sample")
    return Cell(f"{significant(line.mean, 3)} ({line.samples:,})", line.mean)


def _told(value: int | None) -> Maybe[int]:
    return _OTHER_THREAD if value is None else value


def _share(part_ns: int, whole_ns: int) -> Cell | Missing:
    return cell(part_ns / whole_ns, percent) if whole_ns else _NO_LENGTH

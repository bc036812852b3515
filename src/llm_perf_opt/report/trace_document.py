"""The report of a trace: health, stages, budget, idle causes, kernels, modules, operators, findings."""

from collections.abc import Sequence

from llm_perf_opt.analysis.kernels.names import short_name
from llm_perf_opt.analysis.trace.document import (
    ON_CPU,
    WHOLE,
    BudgetLine,
    BudgetTable,
    DeviceLine,
    GpuMetricLine,
    HostOperatorLine,
    HostTable,
    LabelLine,
    OwnerLine,
    ProblemLine,
    StageLine,
    TraceAnalysis,
)
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.units import durations
from llm_perf_opt.report.document import (
    Banner,
    Block,
    Cell,
    Column,
    Document,
    Item,
    Items,
    Paragraph,
    Section,
    Table,
    Unavailable,
    bullets,
    cell,
    count_cell,
    name_cell,
    numbers,
)
from llm_perf_opt.report.findings import banner_items, finding_blocks
from llm_perf_opt.report.graph_tables import borrowed_tables, capture_tables, structure_tables
from llm_perf_opt.report.terminal import render_text
from llm_perf_opt.report.text import duration, grouped, percent, significant

MOST_LABELS = 100
"""Most labels in a report; `analyze --json` has all."""
TOGETHER = (
    "Figures of the whole trace and of its stages cover all devices together: busy is the time in which at least one of them "
    "worked."
)
LABELS = (
    "These labels in the program (record_function, NVTX) are not stages. Times are measured under the profiler; kernels are "
    "those launched while the label was open on the launching thread, including inner labels."
)
SAMPLED = (
    "Values are means of the samples that nsys took while the work of the stage ran on the device, including idle time between "
    "kernels. Units are in the names, percent by default; the number of samples is in brackets."
)
_NO_LENGTH = Missing("it has no duration")
_OTHER_THREAD = Missing("the range may end on a different thread from the one it started on")


def budget_table(number: int, budget: BudgetTable) -> Table:
    """Return the budget of a stage; the rows sum to its wall time."""
    many = f"{budget.units:,} {budget.unit}s" if budget.units > 1 else f"one {budget.unit}"
    estimated = any(row.low_ns is not None for row in budget.rows)
    names = ("time", f"per {budget.unit}", *(["interval"] if estimated else []), "share")
    columns = [Column("use"), *numbers(*names)]
    what, of = ("the time of the trace", "") if budget.stage == WHOLE else (budget.stage, f" for {many}")
    caption = f"Where {what} goes: {duration(budget.wall_ns)}{of}{f' ({budget.scope})' if budget.scope else ''}"
    table = Table(f"budget-{number}", caption, columns)
    units = max(budget.units, 1)
    for row in (*budget.rows, BudgetLine("", "sum", budget.wall_ns, 1.0)):
        within = [_interval(row, units)] if estimated else []
        table.add(row.label, cell(row.ns, duration), cell(row.ns / units, duration), *within, cell(row.share, percent))
    table.foot = " ".join([f"Wall time from {budget.wall_source}.", *budget.notes])
    return table


def _interval(row: BudgetLine, units: int) -> str:
    """Return the interval of a row per unit; empty for a row that is not an estimate."""
    return "" if row.low_ns is None or row.high_ns is None else durations(row.low_ns / units, row.high_ns / units, 3)


def component_tables(number: int, budget: BudgetTable) -> list[Table]:
    """Return the time of each component by row of the budget, if the trace labels components."""
    if not budget.components:
        return []
    keys = [key for key in _COMPONENT_ROWS if any(line.rows.get(key) for line in budget.components)]
    names = [_COMPONENT_ROWS[key] for key in keys]
    caption = f"{budget.stage.capitalize()} by component and operator class, under the profiler"
    table = Table(f"component-rows-{number}", caption, [Column("component"), *numbers(*names, "all")])
    for line in budget.components:
        table.add(line.name, *[cell(line.rows.get(key, 0), duration) for key in keys], cell(line.ns, duration))
    table.foot = "These times include the cost of the profiler, which the budget above does not."
    return [table]


_COMPONENT_ROWS = {
    "matmul": "matrix products",
    "attention": "attention",
    "norm": "norms",
    "elementwise": "elementwise",
    "compiled": "compiled",
    "memory": "memory",
    "communication": "communication",
    "framework": "framework",
    "python": "Python",
}
"""Row of the budget → column."""


def device_tables(devices: Sequence[DeviceLine]) -> list[Table]:
    """Return a table of devices and one of their stages; nothing for a single device."""
    if len(devices) < 2:
        return []
    columns = [Column("device"), Column("name"), *numbers("kernels", "kernel time", "busy", "idle", "span", "busy share")]
    whole = Table("devices", "Devices", columns, foot=TOGETHER)
    for device in devices:
        spent = [cell(ns, duration) for ns in (device.kernel_ns, device.busy_ns, device.idle_ns, device.span_ns)]
        whole.add(
            str(device.device), name_cell(device.name), count_cell(device.kernels), *spent, _share(device.busy_ns, device.span_ns)
        )
    columns = [Column("stage"), Column("device"), *numbers("busy", "idle", "span", "busy share", "kernels")]
    stages = Table("device-stages", "Stages on each device", columns)
    names = dict.fromkeys(stage.name for device in devices for stage in device.stages)
    found = [
        (stage, device) for name in names for device in devices for stage in device.stages if stage.name == name and stage.span_ns
    ]
    for stage, device in found:
        spent = [cell(ns, duration) for ns in (stage.busy_ns, stage.idle_ns, stage.span_ns)]
        stages.add(stage.name, str(device.device), *spent, _share(stage.busy_ns, stage.span_ns), count_cell(stage.kernels))
    return [whole, stages] if found else [whole]


def label_tables(labels: Sequence[LabelLine], most: int = MOST_LABELS) -> list[Table]:
    """Return a table of the labels that are neither stages nor modules, if there are any."""
    if not labels:
        return []
    columns = [Column("label"), *numbers("calls", "time", "kernels", "kernel time")]
    table = Table("labels", "Labels that are not stages", columns, tools=True)
    for line in labels[:most]:
        table.add(
            name_cell(line.name),
            count_cell(line.calls),
            cell(line.wall_ns, duration),
            cell(_launched(line.kernels), grouped),
            cell(_launched(line.kernel_ns), duration),
        )
    more = len(labels) - len(table.rows)
    table.foot = LABELS + (f" {more:,} more are not shown." if more else "")
    return [table]


def gpu_metric_tables(lines: Sequence[GpuMetricLine], most: int | None = None) -> list[Table]:
    """Return a table of the metrics that nsys sampled, with a column per stage, if there are any."""
    if not lines:
        return []
    stages = list(dict.fromkeys(line.stage for line in lines))
    several = len({line.device for line in lines}) > 1
    columns = [Column("metric"), *([Column("device")] if several else []), *numbers(*[stage or "all work" for stage in stages])]
    table = Table("gpu-metrics", "GPU metrics, sampled by nsys", columns, foot=SAMPLED)
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


def _launched(value: int | None) -> Maybe[int]:
    return _OTHER_THREAD if value is None else value


def _share(part_ns: int, whole_ns: int) -> Cell | Missing:
    return cell(part_ns / whole_ns, percent) if whole_ns else _NO_LENGTH


TOP = 15
_NAME = 52
_OWNERS = 8
"""Most modules and operators in the report; `--json` has all."""
_LISTED_STAGES = ("prefill", "decode", "mixed_step", "step")
"""The stages whose operators are listed; those of `decode_step` and `profile` would repeat them."""
_NO_OPERATORS = Missing("no operator was recorded in it")
_NO_WORK = Missing("the trace has no device work")


def trace_text(found: TraceAnalysis, top: int = TOP) -> str:
    """Return the report for the terminal."""
    return render_text(trace_document(found, top))


def trace_document(found: TraceAnalysis, top: int = TOP) -> Document:
    """Return the report, with `top` rows of each long table."""
    traced = f"{found.profiler} trace{', ' + found.device if found.device else ''}"
    health = "complete" if found.complete else "INCOMPLETE"
    subtitle = f"{traced}, {health}{'' if found.problems else ', no problems'}."
    notice = "" if found.complete else f"The trace cannot be used: {found.why}"
    sections = [_untitled("health", [Items([_problem(problem) for problem in found.problems])] if found.problems else [])]
    if found.complete:
        sections += [
            _untitled("gpu", [*_gpu(found), *device_tables(found.devices)]),
            _untitled("stages", [_stages(found), *label_tables(found.labels, top), *_host_operators(found.host, top)]),
            *[_untitled(f"budget-{number}", _budget(found, number)) for number in range(len(found.budgets))],
            _untitled("idle", _idle(found)),
            _untitled("kernels", _kernels(found, top)),
            _untitled("owners", [*_owners("modules", found.modules, top), *_owners("operators", found.operators, top)]),
            _untitled("components", structure_tables(found.components)),
            _untitled("captures", capture_tables(found.captures, min(top, _OWNERS))),
            _untitled("borrowed", borrowed_tables(found.borrowed, min(top, _OWNERS))),
            _untitled("metrics", gpu_metric_tables(found.gpu_metrics, top)),
            Section("findings", "What to change first", _findings(found)),
        ]
    return Document(found.source, subtitle, notice, sections)


def _untitled(name: str, blocks: Sequence[Block]) -> Section:
    """Return a section without a heading."""
    return Section(name, "", blocks)


def _problem(problem: ProblemLine) -> Item:
    remedy = f" → {problem.remedy}" if problem.remedy else ""
    return Item("fatal:" if problem.fatal else "note:", f"{problem.what}{remedy}")


def _gpu(found: TraceAnalysis) -> list[Block]:
    gpu = found.gpu
    if found.device == ON_CPU:
        return []
    if not gpu.span_ns or gpu.busy_ns is None or gpu.idle_ns is None or gpu.kernel_ns is None:
        return [Unavailable("GPU:", found.why or "the device work has no duration")]
    several = len(found.devices) > 1
    which = f" on {len(found.devices)} devices" if several else ""
    busy = "at least one busy" if several else "busy"
    words = (
        f"GPU: {gpu.kernels:,} kernels{which}, {duration(gpu.kernel_ns)} of kernel time; {busy} {duration(gpu.busy_ns)} "
        f"({percent(gpu.busy_ns / gpu.span_ns)}), idle {duration(gpu.idle_ns)} of a span of {duration(gpu.span_ns)}"
    )
    return [Paragraph(words)]


def _stages(found: TraceAnalysis) -> Block:
    if not found.stages:
        return Unavailable("Stages:", found.stage_why)
    covered = "" if found.stage_coverage is None else f", {percent(found.stage_coverage)} of the device time"
    caption = f"Stages, by {found.stage_method} ({found.stage_why}{covered})"
    if all(stage.gpu_busy_ns is None for stage in found.stages):
        return _host_stages(caption, found.stages, found.host)
    names = ("count", "wall, profiled", "GPU busy", "GPU idle", "GPU span", "kernels", "launches")
    table = Table("stages", caption, [Column("stage"), *numbers(*names)])
    for stage in found.stages:
        spent = [_time(ns) for ns in (stage.wall_ns, stage.gpu_busy_ns, stage.idle_ns, stage.span_ns)]
        table.add(stage.name, count_cell(stage.count), *spent, _count(stage.kernels), _count(stage.launches))
    return table


def _host_stages(caption: str, stages: Sequence[StageLine], host: HostTable | None) -> Table:
    """Return the stages of a trace without device work: wall time, and how much of it is inside operators."""
    inside = {} if host is None else {stage.name: stage for stage in host.stages}
    columns = [Column("stage"), *numbers("count", "wall, profiled", *(("in operators", "outside operators") if host else ()))]
    table = Table("stages", caption, columns)
    for stage in stages:
        found = inside.get(stage.name)
        spent = [_time(found.operator_ns), _time(found.outside_ns)] if found else [_NO_OPERATORS] * 2
        table.add(stage.name, count_cell(stage.count), _time(stage.wall_ns), *(spent if host else []))
    return table


def _host_operators(host: HostTable | None, top: int) -> list[Block]:
    """Return operators by host time, for the whole trace and for each stage."""
    if host is None or not host.operators:
        return []
    found = [("the whole trace", host.operators)]
    found += [(stage.name, stage.operators) for stage in host.stages if stage.name in _LISTED_STAGES and stage.operators]
    return [_host_table(number, where, lines, min(top, _OWNERS)) for number, (where, lines) in enumerate(found)]


def _host_table(number: int, where: str, lines: Sequence[HostOperatorLine], most: int) -> Table:
    shown = lines[:most]
    caption = f"Operators by host self time, {where}: the first {len(shown)} of {len(lines)} (under the profiler)"
    columns = [Column("operator"), *numbers("calls", "self", "total", "share")]
    table = Table(f"host-operators-{number}", caption, columns)
    for row in shown:
        table.add(name_cell(row.name), count_cell(row.calls), _time(row.self_ns), _time(row.total_ns), cell(row.share, percent))
    return table


def _budget(found: TraceAnalysis, number: int) -> list[Block]:
    budget = found.budgets[number]
    problems: list[Block] = [bullets([f"PROBLEM: {text}" for text in budget.problems])] if budget.problems else []
    return [budget_table(number, budget), *problems, *component_tables(number, budget)]


def _idle(found: TraceAnalysis) -> list[Block]:
    whole = sum(line.ns for line in found.idle)
    if not whole:
        return []
    caption = "Why the device was idle (under the profiler)"
    table = Table("idle", caption, [Column("cause"), *numbers("time", "share")])
    for line in sorted(found.idle, key=lambda line: -line.ns):
        table.add(line.cause, _time(line.ns), cell(line.ns / whole, percent))
    return [table]


def _kernels(found: TraceAnalysis, top: int) -> list[Block]:
    if not found.kernels:
        return []
    shown = found.kernels[:top]
    unknown = f"; {percent(found.unknown_share)} of the time is in kernels of unknown class" if found.unknown_share else ""
    caption = f"Kernels: the longest {len(shown)} of {len(found.kernels)}{unknown}"
    table = Table("kernels", caption, [Column("kernel"), Column("class"), *numbers("calls", "total", "mean", "share")])
    for row in shown:
        spent = (_time(row.total_ns), cell(row.mean_ns, duration), cell(row.share, percent))
        table.add(name_cell(row.name, short_name(row.name, _NAME)), row.kind, count_cell(row.calls), *spent)
    return [table]


def _owners(what: str, rows: Sequence[OwnerLine], top: int) -> list[Block]:
    """Return modules or operators by device self time."""
    if not rows:
        return []
    shown, owned = rows[: min(top, _OWNERS)], sum(row.share for row in rows)
    caption = (
        f"{what.capitalize()} by device self time: the first {len(shown)} of {len(rows)}; "
        f"{percent(owned)} of the device time is attributed"
    )
    table = Table(what, caption, [Column(what), *numbers("calls", "launched", "self", "total", "share")])
    for row in shown:
        counts = (count_cell(row.calls), count_cell(row.kernels))
        table.add(name_cell(row.name), *counts, _time(row.self_ns), _time(row.total_ns), cell(row.share, percent))
    return [table]


def _findings(found: TraceAnalysis) -> list[Block]:
    if not found.findings and found.why:
        return [Unavailable("Findings:", found.why)]
    items = banner_items(found.findings)
    return [*([Banner(items)] if items else []), *finding_blocks(found.findings)]


def _time(ns: int | None) -> Cell | Missing:
    return _NO_WORK if ns is None else cell(ns, duration)


def _count(number: int | None) -> Cell | Missing:
    return _NO_WORK if number is None else cell(number, grouped)

"""The tables of a run's page."""

from collections.abc import Callable, Sequence

from llm_perf_opt.analysis.kernels.evidence import KernelEvidence
from llm_perf_opt.analysis.kernels.hfu import Hfu, StageHfu
from llm_perf_opt.analysis.kernels.names import short_name
from llm_perf_opt.analysis.kernels.table import PerCall, StageKernel
from llm_perf_opt.analysis.latency import compile_seconds
from llm_perf_opt.analysis.limits.efficiency import Efficiency, StageEfficiency
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.telemetry import TelemetrySummary
from llm_perf_opt.analysis.verification import Verification
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing, OperatorRow, TorchPass
from llm_perf_opt.report.advice import TRIAL_HEADER, trial_cells
from llm_perf_opt.report.efficiency import bound_words
from llm_perf_opt.report.html_tables import Cell, Column, HtmlTable, figure, name_cell, numbers
from llm_perf_opt.report.kernel_remarks import differs_mark, half_mark
from llm_perf_opt.report.text import (
    bounds,
    bytes_per_s,
    fine_percent,
    flops_per_s,
    gibibytes,
    growth,
    milliseconds,
    percent,
    significant,
    with_unit,
)

MOST_ROWS = 400
"""Of a large table in the page; the rest is one row, and all are in the run's files."""
_NAME = 90


def _ms(value: Maybe[float]) -> Cell | Missing:
    return figure(value, milliseconds)


def _number(value: Maybe[float], scale: float = 1.0, digits: int = 4, mark: str = "") -> Cell | Missing:
    return figure(value, lambda known: significant(known * scale, digits) + mark)


def _rate(value: Maybe[float], show: Callable[[float], str], mark: str) -> Cell | Missing:
    return figure(value, lambda known: show(known) + mark)


def _share(value: Maybe[float]) -> Cell | Missing:
    return figure(value, percent)


def metrics_table(analysis: RunAnalysis) -> HtmlTable:
    """Latency and throughput over the repeats."""
    columns = [Column("figure"), *numbers("median", "95 % interval of the median", "interquartile range", "p90", "p99", "n")]
    table = HtmlTable("metrics", "Latency and throughput, unprofiled", columns)
    for metric in analysis.metrics:
        value = metric.value
        if isinstance(value, Missing):
            table.add(metric.label, value, value, value, value, value, Cell("0", 0))
            continue
        p90: Maybe[float] = value.p90
        p99: Maybe[float] = value.p99
        if metric.key.startswith("itl"):  # already a percentile of its own request
            p90 = p99 = Missing("the figure is itself a percentile of the gaps of one request")

        def unit(number: float, name: str = metric.unit) -> str:
            return with_unit(number, name)

        within = Cell(bounds(value, metric.unit))
        table.add(
            metric.label,
            figure(value.median, unit),
            within,
            figure(value.iqr, unit),
            figure(p90, unit),
            figure(p99, unit),
            Cell(str(value.n), value.n),
        )
    return table


def other_figures_table(analysis: RunAnalysis, timings: CleanTimings) -> HtmlTable:
    """Growth with context, warm-up, memory."""
    table = HtmlTable("figures", "Other figures of the measured process", [Column("figure"), Column("value")])
    drift = analysis.drift
    table.add(
        "Decode step's growth with context",
        drift if isinstance(drift, Missing) else growth(drift),
    )
    first = Missing("no warm-up") if not timings.warmup else milliseconds(timings.warmup[0].wall_ns)
    table.add("Warm-up iterations", str(len(timings.warmup)))
    table.add("First iteration", first)
    extra = compile_seconds(timings)
    table.add(
        "Warm-up beyond settled times", extra if isinstance(extra, Missing) else f"{significant(extra, 3)} s over the warm-up"
    )
    table.add("Loading", f"{significant(timings.load_s, 3)} s")
    table.add("Repeats", f"{len(timings.iterations)}: {timings.stopped}")
    table.add("Clock", timings.clock)
    memory = timings.memory
    for name, size in (
        ("Peak memory, allocator (tensors)", memory.allocated_bytes),
        ("Peak memory, allocator (reserved)", memory.reserved_bytes),
        ("Device memory in use at the end, everyone", memory.device_used_bytes),
        ("Peak resident memory of the process", memory.process_rss_bytes),
    ):
        table.add(name, size if isinstance(size, Missing) else gibibytes(size))
    table.add("Weights", f"{gibibytes(timings.model.weight_bytes)} ({timings.model.parameters:,} parameters)")
    return table


def stages_table(analysis: RunAnalysis) -> HtmlTable:
    """Stages and sub-stages; children are indented."""
    columns = [
        Column("stage"),
        *numbers("runs", "one run, median", "95 % interval", "n", "share", "under torch.profiler", "× unprofiled"),
    ]
    table = HtmlTable("stages", "Stages of one request, unprofiled", columns)
    for stage in analysis.stages:
        within = Cell(bounds(stage.time_ns, "ns"))
        table.add(
            "\u2003" * stage.depth + stage.name,
            Cell(str(stage.per_iteration), stage.per_iteration),
            _ms(stage.time_ns.median),
            within,
            Cell(str(stage.time_ns.n), stage.time_ns.n),
            _share(stage.share),
            _ms(stage.profiled_ns),
            _number(stage.inflation, 1, 3),
        )
    return table


def trials_table(found: Verification) -> HtmlTable:
    """What became of findings that were tried."""
    columns = [Column("finding"), *numbers(*TRIAL_HEADER[1:-1]), Column("verdict")]
    table = HtmlTable("trials", f"Tried, each alone, against {found.base}", columns)
    for trial in found.trials:
        table.add(*trial_cells(trial))
    table.foot = f"The base was measured again: {found.remeasured}." if found.remeasured else ""
    return table


def limits_table(found: Efficiency, hfus: Sequence[StageHfu]) -> HtmlTable:
    """Every stage against every pair of limits."""
    columns = [
        Column("stage"),
        Column("against"),
        *numbers(
            "MFU (causal)", "MFU (whole attention)", "HFU", "MBU", "floor", "times off the floor", "kernels' share of the time"
        ),
    ]
    table = HtmlTable("limits-table", "Distance from the limits", columns)
    for stage in found.stages:
        for entry in stage.against:
            least = entry.floor
            table.add(
                stage.stage,
                f"{entry.roof.name} limits",
                _percent3(entry.mfu),
                _percent3(entry.mfu_full_attention),
                _hfu(stage, entry.roof.name, hfus),
                _percent3(entry.mbu),
                least if isinstance(least, Missing) else _ms(least.seconds * 1e9),
                figure(entry.times_floor, lambda times: f"× {significant(times, 3)}"),
                _share(stage.busy),
            )
    return table


def _percent3(value: Maybe[float]) -> Cell | Missing:
    return figure(value, fine_percent)


def _hfu(stage: StageEfficiency, roof: str, hfus: Sequence[StageHfu]) -> Cell | Missing:
    found = next((dict(entry.against) for entry in hfus if entry.stage == stage.stage), None)
    if found is None:
        return Missing("no hardware counters were read")
    value: Maybe[Hfu] = found.get(roof, Missing("it was not compared with this limit"))
    if isinstance(value, Missing):
        return value
    return Cell(f"{value.sign} {fine_percent(value.share)}".strip(), value.share)


def roofs_table(found: Efficiency) -> HtmlTable:
    """The limits themselves."""
    columns = [Column("limits"), *numbers(f"peak, {found.dtype}", "memory bandwidth", "ridge"), Column("source")]
    table = HtmlTable("roofs", "Limits", columns)
    for roof in found.roofs:
        table.add(
            roof.name,
            figure(roof.peak_flops_per_s, flops_per_s),
            figure(roof.bandwidth_bytes_per_s, bytes_per_s),
            figure(roof.ridge_flops_per_byte, lambda v: f"{significant(v)} FLOP/byte"),
            roof.source,
        )
    return table


def parts_table(found: Efficiency) -> HtmlTable:
    """Every part of every stage against its own floor."""
    columns = [
        Column("stage"),
        Column("part"),
        *numbers("time", "FLOP/s", "bytes/s", "FLOP/byte", "MFU", "MBU", "floor", "× floor"),
        Column("floor is"),
    ]
    table = HtmlTable("parts", "Parts of the model, in the profiled steps", columns, tools=True)
    outside = Missing("it is outside the cost model")
    for stage in found.stages:
        if isinstance(stage.parts, Missing):
            table.add(stage.stage, *[stage.parts] * (len(columns) - 1))
            continue
        for part in stage.parts:
            least, time = part.floor, part.time_ns
            if least is None:
                table.add(stage.stage, part.name, _ms(time), *[outside] * 8)
                continue
            intensity: Maybe[float] = least.flops / least.bytes if least.bytes else Missing("no bytes")
            flops: Maybe[float] = time if isinstance(time, Missing) else least.flops * 1e9 / max(time, 1)
            moved: Maybe[float] = time if isinstance(time, Missing) else least.bytes * 1e9 / max(time, 1)
            table.add(
                stage.stage,
                part.name,
                _ms(time),
                figure(flops, flops_per_s),
                figure(moved, bytes_per_s),
                _number(intensity),
                _percent3(part.mfu),
                _percent3(part.mbu),
                _ms(least.seconds * 1e9),
                _number(part.times_floor, 1, 3),
                bound_words(least),
            )
    return table


def kernels_table(found: KernelEvidence) -> HtmlTable:
    """Kernels by time."""
    columns = [Column("stage"), Column("kernel"), *numbers("calls", "total", "mean", "share of its stage", "FLOP/s", "bytes/s")]
    table = HtmlTable("kernels", "Kernels, from the timeline", columns, tools=True)
    left_out = 0
    for stage in found.stages:
        for row in stage.rows[:MOST_ROWS]:
            table.add(
                stage.stage,
                name_cell(row.spelled, short_name(row.name, _NAME)),
                Cell(f"{row.calls:,}", row.calls),
                _ms(row.total_ns),
                _ms(row.mean_ns),
                _share(row.share),
                _rate(row.flops_per_s, flops_per_s, half_mark(row)),
                _rate(row.bytes_per_s, bytes_per_s, differs_mark(row)),
            )
        rest = stage.rows[MOST_ROWS:]
        left_out += len(rest)
        if rest:
            calls, time = sum(row.calls for row in rest), sum(row.total_ns for row in rest)
            why = Missing("a row of many kernels")
            table.add(
                stage.stage,
                f"{len(rest):,} others",
                Cell(f"{calls:,}", calls),
                _ms(time),
                _ms(time / calls),
                _share(time / max(stage.total_ns, 1)),
                why,
                why,
            )
    table.foot = f"The {MOST_ROWS} longest of each stage; all are in kernels.md." if left_out else ""
    return table


def counters_table(found: KernelEvidence) -> HtmlTable:
    """What hardware counters said, of the kernels that were counted."""
    columns = [
        Column("stage"),
        Column("kernel"),
        *numbers(
            "tensor, MFLOP per call",
            "vector, MFLOP per call",
            "packed half, MFLOP per call at most",
            "DRAM, kB per call",
            "FLOP/byte",
            "SM, % of peak",
            "DRAM, % of peak",
            "occupancy, %",
            "mean",
            "mean under ncu",
        ),
    ]
    table = HtmlTable("counters", "Hardware counters, per call", columns, tools=True)
    uncounted: dict[str, int] = {}
    for stage in found.stages:
        for row in stage.rows:
            if isinstance(row.per_call, Missing):
                uncounted[row.per_call.why] = uncounted.get(row.per_call.why, 0) + 1
            elif len(table.rows) < MOST_ROWS:
                _counted(table, row, row.per_call)
    table.foot = " ".join(f"{count:,} kernels have no counters: {why}." for why, count in uncounted.items())
    return table


def _counted(table: HtmlTable, row: StageKernel, counted: PerCall) -> None:
    differs = differs_mark(row)
    table.add(
        row.stage,
        name_cell(row.spelled, short_name(row.name, _NAME)),
        _number(counted.tensor_flops, 1e-6),
        _number(counted.vector_flops, 1e-6),
        _number(counted.half_flops, 1e-6),
        _number(counted.dram_bytes, 1e-3, mark=differs),
        _number(row.flops_per_byte, mark=half_mark(row) + differs),
        _number(counted.sm_pct, 1, 3, differs),
        _number(counted.dram_pct, 1, 3, differs),
        _number(counted.occupancy_pct, 1, 3, differs),
        _ms(row.mean_ns),
        _rate(counted.time_ns, milliseconds, differs),
    )


def operators_table(torch: TorchPass) -> HtmlTable:
    """Operators of the torch pass by self time."""
    columns = [
        Column("operator"),
        *numbers("calls", "CPU self", "CPU total", "device self", "device total", "CPU memory", "device memory"),
    ]
    table = HtmlTable("operators", "Operators, under torch.profiler", columns, tools=True)
    for row in torch.operators[:MOST_ROWS]:
        table.add(
            name_cell(row.name),
            Cell(f"{row.calls:,}", row.calls),
            _ms(row.cpu_self_ns),
            _ms(row.cpu_total_ns),
            _ms(row.device_self_ns),
            _ms(row.device_total_ns),
            _memory(row.cpu_memory_bytes),
            _memory(row.device_memory_bytes),
        )
    rest: Sequence[OperatorRow] = torch.operators[MOST_ROWS:]
    if rest:
        table.foot = f"The {MOST_ROWS} longest; {len(rest):,} others are in operators.md and ops.csv."
    return table


def _memory(value: Maybe[int]) -> Cell | Missing:
    return value if isinstance(value, Missing) else Cell(gibibytes(value), value)


def telemetry_table(summary: TelemetrySummary) -> HtmlTable:
    """Readings while the repeats ran."""
    table = HtmlTable(
        "readings",
        "Readings while the repeats ran",
        [Column("reading"), *numbers("least", "median", "most", "n"), Column("unit")],
    )
    for reading in summary.readings:
        table.add(
            reading.name,
            _number(reading.low, 1, 3),
            _number(reading.median, 1, 3),
            _number(reading.high, 1, 3),
            Cell(str(reading.n), reading.n),
            reading.unit,
        )
    return table


def energy_table(summary: TelemetrySummary) -> HtmlTable:
    """Energy from both sources."""
    columns = [Column("energy over"), *numbers("window", "from the counter", "from the power readings")]
    table = HtmlTable("energy", "Energy", columns)
    for row in summary.energy:
        joules = [figure(value, lambda v: f"{significant(v)} J") for value in (row.from_counter_j, row.from_power_j)]
        table.add(row.window, Cell(f"{row.seconds:.3f} s", row.seconds), *joules)
    return table

"""Tables of a run: latency, stages, operators, readings, passes, environment."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from llm_perf_opt.analysis.contention import thread_words
from llm_perf_opt.analysis.metrics import compile_seconds
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.telemetry import TelemetrySummary
from llm_perf_opt.config.passes import sees_stages
from llm_perf_opt.config.schema import PYTORCH
from llm_perf_opt.core.host_records import HostLoad
from llm_perf_opt.core.records import CleanTimings, Maybe, Metric, Missing, ModelFacts, OperatorRow, StageTiming
from llm_perf_opt.core.stages import STAGE_NAMES
from llm_perf_opt.report.document import Cell, Column, Table, cell, count_cell, name_cell, numbers
from llm_perf_opt.report.kernel_tables import MOST_ROWS
from llm_perf_opt.report.run_ranks import split_words
from llm_perf_opt.report.text import (
    bounds,
    count,
    duration,
    flops,
    growth,
    known,
    mean_count,
    memory_size,
    percent,
    seconds,
    significant,
    then,
    times,
    with_unit,
)


def what_ran(timings: CleanTimings) -> str:
    """Return model, device and workload in one sentence."""
    model, work = timings.model, timings.workload
    lengths = sorted(set(work.prompt_tokens))
    prompt = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    weights = "" if model.weights is None else f", {model.weights.words}"
    return (
        f"{model.name} ({count(model.parameters)} {parameters_words(model)}, {model.dtype}{weights}) on {model.device_name}"
        f"{split_words(timings)}: batch {work.batch_size}, {prompt} prompt tokens, {work.new_tokens} new tokens, "
        f"{model.cache} cache, compile {model.compile}, attention {model.attention}{_ran_by(timings)}."
    )


def parameters_words(model: ModelFacts) -> str:
    """Return the word after the number of parameters, with what it was counted on if not on the module that ran."""
    return "parameters" if model.weights is None else model.weights.parameters_words


def environment_rows(env: Mapping[str, Any], timings: Maybe[CleanTimings]) -> list[tuple[str, str]]:
    """Return the machine and the software as names and values."""
    cpu, gpu = env.get("cpu", {}), env.get("gpu")
    cuda = f" (CUDA {env['gpu_driver_cuda']})" if "gpu_driver_cuda" in env else ""
    total = env.get("memory", {}).get("total_bytes")
    rows = [
        ("Host", f"{env.get('host')}, {env.get('system')}, {env.get('machine')}"),
        ("CPU", f"{cpu.get('name')}, {cpu.get('usable')} usable of {cpu.get('logical')} logical processors"),
        ("Memory", memory_size(total) if isinstance(total, int) else "n/a: not recorded"),
        *_topology_rows(env),
        ("GPU", _gpu_words(gpu)),
        ("Driver", f"{env.get('gpu_driver')}{cuda}"),
        ("Python", str(env.get("python"))),
        ("Packages", ", ".join(f"{name} {version}" for name, version in env.get("packages", {}).items())),
        ("llm-perf-opt", _tool_words(env.get("tool", {}))),
    ]
    if not isinstance(timings, Missing):
        framework = ", ".join(f"{name} {version}" for name, version in timings.framework.items())
        rows.append(("Measured process", f"{framework}, {thread_words(timings)}{_host_words(timings.host)}"))
        rows += _runtime_rows(timings)
    return rows


def _topology_rows(env: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the NUMA nodes and the connections of all GPUs; nothing if they were not recorded."""
    nodes = [entry for entry in _entries(env, "numa") if "node" in entry]
    rows = [("NUMA nodes", ", ".join(f"{entry.get('node')} (CPUs {entry.get('cpus')})" for entry in nodes))] if nodes else []
    for entry in _entries(env, "gpus"):
        links, pcie = entry.get("nvlink"), entry.get("pcie")
        words = [f"{entry.get('name')}"]
        if isinstance(pcie, Mapping):
            words.append(
                f"PCIe {pcie.get('generation')} × {pcie.get('width')} of {pcie.get('generation_max')} × {pcie.get('width_max')}"
            )
        words.append(f"{links.get('links')} NVLinks" if isinstance(links, Mapping) else "no NVLink")
        words.append(f"NUMA node {entry.get('numa_node')}")
        rows.append((f"GPU {entry.get('index')}", ", ".join(words)))
    for entry in _entries(env, "gpu_connections"):
        ends = entry.get("gpus")
        pair = " – ".join(map(str, ends)) if isinstance(ends, list) else str(ends)
        rows.append((f"GPUs {pair}", f"{entry.get('path')}, {entry.get('nvlink')} direct NVLinks"))
    return rows


def _entries(env: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = env.get(name)
    return [entry for entry in found if isinstance(entry, Mapping)] if isinstance(found, list) else []


def _host_words(host: HostLoad | None) -> str:
    """Return the CPUs of the measured process and how its threads wait; empty if they were not recorded."""
    if host is None:
        return ""
    cpus = "" if isinstance(host.cpus, Missing) else f" on CPUs {host.cpus}"
    return cpus if host.wait_policy == "default" else f"{cpus}, {host.wait_policy} OpenMP waiting"


def _gpu_words(gpu: Any) -> str:
    if not isinstance(gpu, Mapping):
        return str(gpu)
    memory = gpu.get("memory_bytes")
    size = memory_size(memory) if isinstance(memory, int) else str(memory)
    return (
        f"{gpu.get('name')}, {size}, SM clock {gpu.get('sm_clock_mhz')} of {gpu.get('sm_clock_max_mhz')} MHz, "
        f"power limit {gpu.get('power_limit_w')} W"
    )


def _tool_words(tool: Mapping[str, Any]) -> str:
    changed = {True: " with changes", False: ""}.get(tool.get("dirty", False), " (changes unknown)")
    commit = f", commit {str(tool['commit'])[:12]}{changed}" if "commit" in tool else ""
    return f"{tool.get('version')}{commit}"


def _ran_by(timings: CleanTimings) -> str:
    """Return `, run by NAME VERSION`; empty for plain PyTorch."""
    runtime = timings.runtime
    return "" if runtime is None or runtime.type == PYTORCH else f", run by {runtime.type} {runtime.version}"


def _runtime_rows(timings: CleanTimings) -> list[tuple[str, str]]:
    """Return the runtime, how its stages were separated, and its arguments; nothing for plain PyTorch."""
    runtime = timings.runtime
    if runtime is None or runtime.type == PYTORCH:
        return []
    apart = f"not separated: {runtime.inseparable}" if runtime.inseparable else runtime.method
    given = {"Engine arguments": runtime.engine, "Engine variables": runtime.variables}
    return [
        ("Runtime", f"{runtime.type} {runtime.version}"),
        ("Prefill and decode", apart),
        *_conversion_row(timings.model),
        *[(name, ", ".join(f"{key}={value}" for key, value in held.items())) for name, held in given.items() if held],
    ]


def _conversion_row(model: ModelFacts) -> list[tuple[str, str]]:
    made = model.weights.conversion if model.weights else None
    if made is None:
        return []
    what = f"from {made.source}" if made.source else "from random weights"
    reused = "; taken from the cache" if made.reused else ""
    return [("Conversion", f"{what} by {made.by} {made.version} in {seconds(made.seconds)}, before the measurement{reused}")]


_ABOUT_PASSES = (
    "Reported times come from the unprofiled pass. The overhead of another pass shows how much slower its stages were. Under "
    "torch.profiler and Nsight Systems, kernels keep their duration, but the gaps between them grow. Nsight Compute replays "
    "kernels."
)
_ABOUT_STAGES = (
    "A parent includes its children. Runs are counted per iteration. The time of a step is the iteration's median step."
)


# --- latency and stages ---------------------------------------------------------------------------------------------------


def metrics_table(analysis: RunAnalysis) -> Table:
    """Return latency and throughput over the repeats."""
    columns = [Column("figure"), *numbers("median", "95 % interval of the median", "interquartile range", "p90", "p99", "n")]
    table = Table("metrics", "Latency and throughput, unprofiled", columns)
    for metric in analysis.metrics:
        table.add(metric.label, *_metric_cells(metric))
    return table


def _metric_cells(metric: Metric) -> list[Cell | Missing]:
    value, show = metric.value, partial(with_unit, unit=metric.unit)
    if isinstance(value, Missing):
        return [*[value] * 5, Cell("0", 0)]
    percentiles = (value.p90, value.p99)
    if metric.key.startswith("itl"):  # already a percentile over one request
        percentiles = (Missing("the figure is itself a percentile over the gaps of one request"),) * 2
    return [
        cell(value.median, show),
        cell(bounds(value, metric.unit)),
        cell(value.iqr, show),
        *[cell(percentile, show) for percentile in percentiles],
        count_cell(value.n),
    ]


def stages_table(analysis: RunAnalysis) -> Table:
    """Return stages and sub-stages, with children indented."""
    names = ("runs", "one run, median", "95 % interval", "interquartile range", "n", "share", "under torch.profiler")
    table = Table("stages", "Stages of one request, unprofiled", [Column("stage"), *numbers(*names, "× unprofiled")])
    for stage in analysis.stages:
        time = stage.time_ns
        table.add(
            Cell(stage.name, indent=stage.depth),
            count_cell(stage.per_iteration),
            cell(time.median, duration),
            cell(bounds(time, "ns")),
            cell(time.iqr, duration),
            count_cell(time.n),
            cell(stage.share, percent),
            cell(stage.profiled_ns, duration),
            cell(stage.inflation, times),
        )
    steps = then(
        analysis.torch,
        lambda torch: f" The torch pass ran {torch.decode_steps} decode steps and is compared with as many unprofiled steps.",
    )
    table.foot = _ABOUT_STAGES + known(steps, "")
    return table


def substage_tables(stages: Sequence[StageTiming]) -> list[Table]:
    """Return the sub-stages of each stage that has any, with their share."""
    found = [(stage, list(_below(stage, stages))) for stage in stages if stage.name in STAGE_NAMES]
    return [_substages(stage, below) for stage, below in found if below]


def _below(stage: StageTiming, stages: Sequence[StageTiming]) -> Iterator[StageTiming]:
    """Yield the rows between a stage and the next stage: its sub-stages at any depth."""
    for row in stages[stages.index(stage) + 1 :]:
        if row.name in STAGE_NAMES:
            return
        yield row


def _substages(stage: StageTiming, below: Sequence[StageTiming]) -> Table:
    names = ("forwards", "total of medians", f"share of {stage.name}")
    table = Table(f"substages-{stage.name}", f"Sub-stages of {stage.name}", [Column("sub-stage"), *numbers(*names)])
    whole, direct = stage.time_ns.median, 0.0
    for row in below:
        runs = row.per_iteration / stage.per_iteration
        time = row.time_ns.median * runs
        direct += time if row.depth == stage.depth + 1 else 0.0
        name = Cell(row.name, indent=row.depth - stage.depth - 1)
        table.add(name, cell(runs, mean_count), cell(time, duration), cell(time / whole, percent))
    rest = max(0.0, whole - direct)
    table.add("the rest", "", cell(rest, duration), cell(rest / whole, percent))
    table.foot = "Medians of single sub-stages need not add up."
    return table


def other_figures_table(analysis: RunAnalysis, timings: CleanTimings) -> Table:
    """Return growth with context, warm-up and memory."""
    table = Table("figures", "Other figures of the measured process", [Column("figure"), Column("value")])
    memory, model = timings.memory, timings.model
    first: Maybe[int] = timings.warmup[0].wall_ns if timings.warmup else Missing("no warm-up")
    rows: list[tuple[str, Cell | Missing | str]] = [
        ("Growth of a decode step with the context", cell(analysis.drift, growth)),
        ("Warm-up iterations", count_cell(len(timings.warmup))),
        ("First iteration", cell(first, duration)),
        ("Warm-up beyond the settled times (compiling, allocating, noise)", cell(compile_seconds(timings), seconds)),
        ("Loading", seconds(timings.load_s)),
        ("Repeats", f"{len(timings.iterations)}: {timings.stopped}"),
        ("Clock", timings.clock),
        ("Peak memory, allocator (tensors)", cell(memory.allocated_bytes, memory_size)),
        ("Peak memory, allocator (reserved)", cell(memory.reserved_bytes, memory_size)),
        ("Device memory in use at the end, all processes", cell(memory.device_used_bytes, memory_size)),
        (_resident(timings), cell(memory.process_rss_bytes, memory_size)),
        (
            "Weights",
            f"{memory_size(model.weight_bytes)} ({model.parameters:,} {parameters_words(model)}{_quantized_words(model)})",
        ),
    ]
    for row in rows:
        table.add(*row)
    return table


def _resident(timings: CleanTimings) -> str:
    elsewhere = timings.runtime is not None and timings.runtime.elsewhere
    return "Peak resident memory of the process" + (" and its children, summed" if elsewhere else "")


def _quantized_words(model: ModelFacts) -> str:
    found = model.weights.quantized if model.weights else None
    return "" if found is None else f", {found.weights:,} of them in {found.layers} linear layers quantized to {found.format}"


# --- operators --------------------------------------------------------------------------------------------------------------


def operators_table(operators: Sequence[OperatorRow], most: int | None = MOST_ROWS) -> Table:
    """Return operators of the torch pass by self time."""
    shown = operators[:most]
    times_of, sizes_of = ("CPU self", "CPU total", "CPU mean", "device self", "device total"), ("CPU memory", "device memory")
    columns = [Column("operator"), *numbers("calls", *times_of, *sizes_of, "FLOPs", "share of self time")]
    table = Table("operators", "Operators, under torch.profiler", columns, tools=True)
    whole = sum(map(self_ns, operators)) or 1
    for row in shown:
        mean: Maybe[float] = row.cpu_total_ns / row.calls if row.calls else Missing("no call")
        spent = (row.cpu_self_ns, row.cpu_total_ns, mean, row.device_self_ns, row.device_total_ns)
        table.add(
            name_cell(row.name),
            count_cell(row.calls),
            *[cell(ns, duration) for ns in spent],
            *[cell(size, memory_size) for size in (row.cpu_memory_bytes, row.device_memory_bytes)],
            cell(row.flops, flops),
            cell(self_ns(row) / whole, percent),
        )
    rest = len(operators) - len(shown)
    table.foot = f"The {len(shown)} longest; operators.md and ops.csv have {rest:,} more." if rest else ""
    return table


def self_ns(row: OperatorRow) -> int:
    """Return the time that an operator is ranked by: on the device, or on the CPU if there is none."""
    return known(row.device_self_ns, row.cpu_self_ns)


# --- readings ---------------------------------------------------------------------------------------------------------------


def telemetry_table(summary: TelemetrySummary) -> Table:
    """Return the readings of the sampler during the repeats."""
    columns = [Column("reading"), *numbers("least", "median", "most", "n"), Column("unit")]
    table = Table("readings", "Readings during the repeats", columns)
    for reading in summary.readings:
        values = [cell(value, lambda number: significant(number, 3)) for value in (reading.low, reading.median, reading.high)]
        table.add(reading.name, *values, count_cell(reading.n), reading.unit)
    return table


def exporter_tables(summary: TelemetrySummary) -> list[Table]:
    """Return the series of an exporter as a table; nothing if no file was read."""
    columns = [Column("series"), Column("kind"), *numbers("least", "median", "most", "increase", "increase over", "n")]
    table = Table("exporter", "Metrics of an exporter", columns, tools=True)
    for series in summary.exporter[:MOST_ROWS]:
        values = (series.low, series.median, series.high, series.increase)
        shown = [cell(value, lambda number: significant(number, 4)) for value in values]
        table.add(name_cell(series.name), series.kind, *shown, cell(series.increase_s, seconds), count_cell(series.n))
    rest = len(summary.exporter) - MOST_ROWS
    more = f" raw/nvml/samples.jsonl has {rest:,} more series." if rest > 0 else ""
    table.foot = f"{summary.exporter_note}{more}"
    return [table] if summary.exporter_note else []


def energy_table(summary: TelemetrySummary) -> Table:
    """Return energy from the counter and from the power readings."""
    columns = [Column("energy over"), *numbers("window", "from the counter", "from the power readings")]
    table = Table("energy", "Energy", columns)
    for row in summary.energy:
        joules = [cell(value, lambda energy: f"{significant(energy)} J") for value in (row.from_counter_j, row.from_power_j)]
        table.add(row.window, cell(row.seconds, seconds), *joules)
    return table


# --- passes and machine -----------------------------------------------------------------------------------------------------


def passes_table(analysis: RunAnalysis) -> Table:
    """Return the status, time and overhead of each pass: the time of its stages over their unprofiled time."""
    names = ("took", "prefill, × unprofiled", "decode, × unprofiled")
    columns = [Column("pass"), Column("status"), Column("tool"), *numbers(*names), Column("note")]
    table = Table("passes", "Passes", columns)
    measured = {entry.name: entry for entry in analysis.overheads}
    for entry in analysis.manifest.passes:
        took: Maybe[float] = Missing(f"the pass {entry.outcome}") if entry.seconds is None else entry.seconds
        overhead = measured.get(entry.name)
        none = Missing("the pass has no times of its stages")
        factors: list[Cell | Missing | str] = [none, none]
        if overhead is not None:
            factors = [cell(overhead.prefill, times), cell(overhead.decode, times)]
        elif not sees_stages(entry.name):
            factors = ["", ""]
        note = f"{entry.why} {entry.remedy}".strip()
        table.add(entry.name, entry.status, entry.tool_version, cell(took, seconds), *factors, note)
    table.foot = " ".join([_ABOUT_PASSES, *[entry.own_words for entry in analysis.overheads if entry.own]])
    return table


def environment_table(env: Mapping[str, Any], timings: Maybe[CleanTimings]) -> Table:
    """Return the machine and the software of the run."""
    table = Table("environment-table", "Machine and software", [Column("what"), Column("value")])
    for name, value in environment_rows(env, timings):
        table.add(name, value)
    return table

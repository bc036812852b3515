"""Tables of a whole run, made from several passes: its stages and steps, devices and their metrics, modules, budget and so on.

They lie in tables/ as Parquet files beside the tables of the run's traces, and `llm-perf sql` opens them with those.
"""

from collections.abc import Sequence
from typing import Any

from llm_perf_opt.analysis.kernels.table import StageKernel
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.trace.document import TraceAnalysis
from llm_perf_opt.core.errors import ParseError, ResourceError
from llm_perf_opt.core.machine_records import Telemetry
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.run_folder import RunFolder, disk_error
from llm_perf_opt.traces.trace_tables import write_rows

Row = dict[str, Any]

_TYPES = {
    "stages": "name text, count bigint, wall_ns bigint, gpu_busy_ns bigint, idle_ns bigint, kernels bigint, launches bigint, "
    "kernel_ns bigint, span_ns bigint",
    "devices": "device bigint, name text, kernels bigint, kernel_ns bigint, busy_ns bigint, idle_ns bigint, span_ns bigint",
    "stage_metrics": "stage text, device bigint, metric text, samples bigint, mean double, least bigint, most bigint",
    "steps": "stage text, step bigint, wall_ns bigint, span_ns bigint, gpu_busy_ns bigint, idle_ns bigint, kernels bigint, "
    "kernel_ns bigint, launches bigint",
    "modules": "name text, calls bigint, kernels bigint, self_ns bigint, total_ns bigint, share double",
    "budget": "stage text, key text, label text, ns bigint, share double, units bigint, wall_ns bigint",
    "parts": "stage text, part text, pieces bigint, time_ns bigint",
    "counters": "stage text, name text, calls bigint, total_ns bigint, share double, tensor_flops double, vector_flops double, "
    "half_flops double, dram_read_bytes double, dram_write_bytes double, sm_pct double, dram_pct double, occupancy_pct double, "
    "waves double",
    "samples": "at_ns bigint, power_mw bigint, sm_clock_mhz bigint, memory_clock_mhz bigint, temperature_c bigint, "
    "gpu_utilisation_pct bigint, memory_used_bytes bigint, throttle_bits bigint, energy_mj bigint",
}
"""Table → its columns. A value that could not be had is NULL."""
RUN_TABLES = tuple(_TYPES)


def write_run_tables(folder: RunFolder, analysis: RunAnalysis, telemetry: Maybe[Telemetry]) -> Missing | None:
    """Write every table, or return why there are none: a machine may be without DuckDB."""
    try:
        for name, rows in _rows(analysis, telemetry).items():
            write_rows(folder.derived_tables / f"{name}.parquet", _TYPES[name], rows)
    except (ParseError, ResourceError) as error:
        return Missing(f"tables/ was not written: {error.fact} {error.remedy}")
    except OSError as error:
        raise disk_error(error, folder.derived_tables) from error
    return None


def _rows(analysis: RunAnalysis, telemetry: Maybe[Telemetry]) -> dict[str, list[Row]]:
    found = analysis.trace
    trace = None if isinstance(found, Missing) else found
    kernels = () if isinstance(analysis.kernels, Missing) else analysis.kernels.stages
    parts = () if isinstance(analysis.torch, Missing) or isinstance(analysis.torch.parts, Missing) else analysis.torch.parts
    return {
        "stages": _fields(trace.stages if trace else (), _names("stages")),
        "devices": _fields(trace.devices if trace else (), _names("devices")),
        "stage_metrics": _fields(trace.gpu_metrics if trace else (), _names("stage_metrics")),
        "steps": _fields(trace.steps if trace else (), _names("steps")),
        "modules": _fields(trace.modules if trace else (), _names("modules")),
        "budget": _budget(trace),
        "parts": _fields(parts, _names("parts")),
        "counters": [_counters(row) for stage in kernels for row in stage.rows],
        "samples": _fields(() if isinstance(telemetry, Missing) else telemetry.gpu, _names("samples")),
    }


def _names(table: str) -> list[str]:
    return [column.split()[0] for column in _TYPES[table].split(",")]


def _fields(records: Sequence[Any], names: Sequence[str]) -> list[Row]:
    return [{name: _value(getattr(record, name)) for name in names} for record in records]


def _value(value: Any) -> Any:
    return None if isinstance(value, Missing) else value


def _budget(trace: TraceAnalysis | None) -> list[Row]:
    return [
        {"stage": budget.stage, "key": row.key, "label": row.label, "ns": row.ns, "share": row.share, "units": budget.units,
         "wall_ns": budget.wall_ns}
        for budget in (trace.budgets if trace else ())
        for row in budget.rows
    ]  # fmt: skip


def _counters(row: StageKernel) -> Row:
    known = {name: _value(getattr(row, name)) for name in ("stage", "name", "calls", "total_ns", "share")}
    counted = None if isinstance(row.per_call, Missing) else row.per_call
    return known | {name: _value(getattr(counted, name)) if counted else None for name in _names("counters")[5:]}

"""Parts of an nsys export other than its events: devices, facts, GPU metrics; checks of rows; messages of nsys."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from llm_perf_opt.core.secrets import shown_command
from llm_perf_opt.traces.events import DeviceSamples, DeviceWork, Int64, TraceProblem, is_beyond_clocks
from llm_perf_opt.traces.sqlite_tables import Database, Integer, IntegerTable

_PID_SHIFT, _PID_BITS = 24, 0xFFFFFF
"""The position of the process number in a global process id."""
GpuNumbers = dict[tuple[int, int], int]
"""(process number, its CUDA device) → the number of the GPU in the report."""


def gpu_numbers(database: Database) -> GpuNumbers:
    """Return the mapping if processes use one device number for different GPUs; empty if the numbers are unambiguous."""
    found: GpuNumbers = {}
    for gpu, device, pid in database.rows("TARGET_INFO_CUDA_DEVICE", ("gpuId", "cudaId", "pid")):
        if isinstance(gpu, int) and isinstance(device, int) and isinstance(pid, int) and 0 <= gpu < 2**31:
            found[(pid, device)] = gpu
    gpus_of: dict[int, set[int]] = {}
    for (_, device), gpu in found.items():
        gpus_of.setdefault(device, set()).add(gpu)
    return found if any(len(gpus) > 1 for gpus in gpus_of.values()) else {}


def renumbered_devices(work: DeviceWork, numbers: GpuNumbers) -> DeviceWork:
    """Return the work with the GPU numbers of the report. A device that is not in the mapping keeps its number."""
    if not numbers or not len(work):
        return work
    pairs, place = np.unique(
        np.stack([(work.process >> _PID_SHIFT) & _PID_BITS, work.device.astype(np.int64)]), axis=1, return_inverse=True
    )
    gpus = [numbers.get((pid, device), device) for pid, device in zip(*pairs.tolist(), strict=True)]
    return replace(work, device=np.array(gpus, np.int32)[place.reshape(-1)])


_EXPORT_FACTS = {
    "EXPORT_PRODUCT_NAME": "tool",
    "EXPORT_PRODUCT_VERSION": "tool_version",
    "EXPORT_SCHEMA_VERSION": "schema_version",
}
_ARGUMENT = re.compile(r"PROCESS_0:ARGUMENT_(\d+)")


def read_facts(database: Database, processes: Sequence[int], by_gpu: bool = False) -> dict[str, str]:
    """Return the facts that the report contains: `tool`, `tool_version`, `schema_version`, `command`, `graph_trace`,
    `started_utc_ns`, `recorded_ns`; `device.N` and `chip.N`, the names of a device and its chip; `pid.GLOBAL_ID`, the number and
    name of each process that recorded something. N is the CUDA number, or with `by_gpu` the number in the report.
    """
    facts: dict[str, str] = {}
    for name, value in database.rows("META_DATA_EXPORT", ("name", "value")):
        if name in _EXPORT_FACTS and value:
            facts[_EXPORT_FACTS[name]] = str(value)
    facts.update(_capture(database))
    for (started,) in database.rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",)):
        if isinstance(started, int):
            facts["started_utc_ns"] = str(started)
    for (duration,) in database.rows("ANALYSIS_DETAILS", ("duration",)):
        if isinstance(duration, int):
            facts["recorded_ns"] = str(duration)
    facts.update(_devices(database, by_gpu))
    wanted = set(processes)
    for number, pid, name in database.rows("PROCESSES", ("globalPid", "pid", "name")):
        if number in wanted:
            facts[f"pid.{number}"] = f"{pid} {name or ''}".strip()
    return facts


def _capture(database: Database) -> dict[str, str]:
    command, arguments, facts = "", {}, {}
    for name, value in database.rows("META_DATA_CAPTURE", ("name", "value"), "name NOT LIKE '%ENVIRONMENT%'"):
        argument = _ARGUMENT.fullmatch(str(name))
        if argument and value is not None and len(argument[1]) < 6:
            arguments[int(argument[1])] = str(value)
        elif name == "PROCESS_0:COMMAND":
            command = str(value)
        elif name == "PROCESS_0:CUDA_GRAPH_TRACE_OPTIONS:MODE":
            facts["graph_trace"] = str(value)
    if command:
        facts["command"] = shown_command([command, *[arguments[place] for place in sorted(arguments)]])
    return facts


def _devices(database: Database, by_gpu: bool) -> dict[str, str]:
    facts: dict[str, str] = {}
    number = "cuDevice" if database.has("TARGET_INFO_GPU", "cuDevice") and not by_gpu else "id"
    for device, name in database.rows("TARGET_INFO_GPU", (number, "name")):
        if isinstance(device, int) and name:
            facts[f"device.{device}"] = str(name)
    for device, chip in database.rows("TARGET_INFO_GPU", (number, "chipName")):
        if isinstance(device, int) and chip:
            facts[f"chip.{device}"] = str(chip)
    return facts


TABLE = "GPU_METRICS"
_SAMPLE = {
    "time": Integer(("timestamp",)),
    "type": Integer(("typeId",)),
    "metric": Integer(("metricId",)),
    "value": Integer(("value",)),
}
_GPU_BITS = 0xFF


def read_samples(
    database: Database, work: DeviceWork, name: Callable[[str], int], by_gpu: bool
) -> tuple[DeviceSamples, TraceProblem | None]:
    """Return the samples during the device work, sorted by time, and a problem if some are unreadable.

    `name` returns the index of a name. Devices have the CUDA number, or with `by_gpu` the number in the report.
    """
    if not len(work) or not database.has(TABLE, *(column.names[0] for column in _SAMPLE.values())):
        return DeviceSamples.none(), None
    first, last = int(work.start_ns.min()), int(work.end_ns.max())
    read = database.integers(TABLE, _SAMPLE, f"timestamp BETWEEN {first} AND {last}")
    rows, problem = read.columns, None
    if read.dropped:
        what = f"{read.dropped:,} of {read.dropped + len(read):,} samples of GPU metrics are unreadable and left out"
        problem = TraceProblem("unreadable_samples", what, fatal=False)
    kinds, place = np.unique(np.stack([rows["type"], rows["metric"]]), axis=1, return_inverse=True)
    texts = _names(database)
    numbers = {} if by_gpu else _cuda_numbers(database)
    metrics, devices = [], []
    for kind, metric in zip(*kinds.tolist(), strict=True):
        metrics.append(name(texts.get((kind, metric), f"[metric {metric} is not in the report]")))
        gpu = kind & _GPU_BITS
        devices.append(numbers.get(gpu, gpu))
    place = place.reshape(-1)
    samples = DeviceSamples(
        time_ns=rows["time"],
        device=np.array(devices, np.int32)[place] if devices else np.empty(0, np.int32),
        metric=np.array(metrics, np.int32)[place] if metrics else np.empty(0, np.int32),
        value=rows["value"],
    )
    return samples.rows(np.argsort(samples.time_ns, kind="stable")), problem


def _names(database: Database) -> dict[tuple[int, int], str]:
    found = {}
    for kind, metric, text in database.rows("TARGET_INFO_GPU_METRICS", ("typeId", "metricId", "metricName")):
        if isinstance(kind, int) and isinstance(metric, int) and isinstance(text, str):
            found[(kind, metric)] = text
    return found


def _cuda_numbers(database: Database) -> dict[int, int]:
    """Return the number of a GPU in the report → its CUDA number."""
    rows = database.rows("TARGET_INFO_GPU", ("id", "cuDevice"))
    return {gpu: device for gpu, device in rows if isinstance(gpu, int) and isinstance(device, int) and 0 <= device < 2**31}


_LARGEST_DEVICE = 2**16
LOST_SHARE = 0.01
"""Rows without a time; with more, sums over the trace are wrong."""


class RowChecks:
    """Collects the problems of all tables."""

    def __init__(self) -> None:
        self.problems: list[TraceProblem] = []

    def note(self, id: str, what: str, fatal: bool, remedy: str = "") -> None:
        """Add a problem unless it is already there."""
        problem = TraceProblem(id, what, fatal, remedy)
        if problem not in self.problems:
            self.problems.append(problem)

    def valid_rows(self, table: str, read: IntegerTable, work: bool = False) -> dict[str, Int64]:
        """Return the columns without impossible rows, and add a problem per kind. `work`: whether these are device work."""
        columns = read.columns
        if read.dropped:
            self.note("bad_rows", f"{read.dropped:,} rows of {table} have values of a wrong type and are left out", fatal=True)
        start, end = columns["start"], columns["end"]
        absurd = is_beyond_clocks(start, end)
        if "device" in columns:
            absurd |= (columns["device"] < 0) | (columns["device"] > _LARGEST_DEVICE)
        backward = ~absurd & (end < start)
        untimed = ~absurd & (start == 0) & (end == 0) & work
        if absurd.any():
            what = f"{np.count_nonzero(absurd):,} rows of {table} have impossible times or devices and are left out"
            self.note("absurd_value", what, fatal=True)
        if backward.any():
            what = f"{np.count_nonzero(backward):,} rows of {table} end before they start and are left out"
            self.note("negative_duration", what, fatal=work)
        if untimed.any():
            share = np.count_nonzero(untimed) / len(start)
            what = (
                f"{np.count_nonzero(untimed):,} of {len(start):,} rows of {table} were recorded without a time and are left out"
            )
            self.note("untimed", what, fatal=bool(share > LOST_SHARE), remedy="Record a shorter time.")
        self._extents(columns)
        wrong = absurd | backward | untimed
        return {name: column[~wrong] for name, column in columns.items()} if wrong.any() else columns

    def _extents(self, columns: dict[str, Int64]) -> None:
        for extent in columns.keys() & {"grid", "block"}:
            if (columns[extent] < 0).any():
                what = f"some kernels have an impossible {extent}; it is shown as unknown"
                self.note("absurd_value", what, fatal=False)
                columns[extent] = columns[extent].clip(0)


# --- messages of nsys -------------------------------------------------------------------------------------------------

_MOST_MESSAGES = 20
_LONGEST_MESSAGE = 500

# Lower case. What Nsight Systems writes into its report when its importer finds something unknown.
_GAVE_UP = (
    "errors occurred while processing the raw events",
    "unknown runtime api function index",
    "unknown driver api function index",
    "importer error status",
    "importation failed",
    "wrong event order has been detected",
)
_LOST = ("dropped", "overflow", "lost events", "events were lost", "incomplete trace", "data loss")
_PERHAPS_LOST = ("might have been collected", "may have been lost", "might have not been started")


def message_problems(messages: Iterable[tuple[str, str]]) -> tuple[TraceProblem, ...]:
    """Return the problems in (severity, text) pairs, without repetitions. Messages of severity `info` are ignored."""
    found: dict[str, TraceProblem] = {}
    for severity, text in messages:
        problem = _problem(severity.lower(), " ".join(text.split())[:_LONGEST_MESSAGE])
        if problem is not None:
            found.setdefault(problem.what, problem)
    ordered = sorted(found.values(), key=lambda problem: not problem.fatal)
    if len(ordered) > _MOST_MESSAGES:
        rest = len(ordered) - _MOST_MESSAGES
        more = TraceProblem("tool_warning", f"{rest} more messages of the profiler are not shown", _any_fatal(ordered[-rest:]))
        ordered = [*ordered[:_MOST_MESSAGES], more]
    return tuple(ordered)


def _problem(severity: str, text: str) -> TraceProblem | None:
    lower = text.lower()
    if any(sign in lower for sign in _GAVE_UP):
        return TraceProblem(
            "importer_gave_up",
            f"the importer of the profiler stopped half-way: {text}",
            fatal=True,
            remedy="Use a version of Nsight Systems that is as new as the CUDA runtime of the profiled program.",
        )
    if any(sign in lower for sign in _LOST):
        return TraceProblem("events_lost", f"the profiler lost events: {text}", True, "Record a shorter time, or less.")
    if any(sign in lower for sign in _PERHAPS_LOST):
        return TraceProblem("events_perhaps_lost", f"the profiler may have missed events: {text}", fatal=False)
    if "error" in severity or "fatal" in severity:
        return TraceProblem("tool_error", f"the profiler reports an error: {text}", fatal=False)
    if "warn" in severity:
        return TraceProblem("tool_warning", f"the profiler warns: {text}", fatal=False)
    return None


def _any_fatal(problems: Iterable[TraceProblem]) -> bool:
    return any(problem.fatal for problem in problems)

"""What an export of Nsight Systems says of its own making. Environment variables are in there too; they are not read."""

import re
import shlex
from collections.abc import Sequence

from llm_perf_opt.parsers.sqlite_tables import Database

_EXPORT_FACTS = {
    "EXPORT_PRODUCT_NAME": "tool",
    "EXPORT_PRODUCT_VERSION": "tool_version",
    "EXPORT_SCHEMA_VERSION": "schema_version",
}
_ARGUMENT = re.compile(r"PROCESS_0:ARGUMENT_(\d+)")


def read_facts(database: Database, processes: Sequence[int], by_gpu: bool = False) -> dict[str, str]:
    """`tool`, `tool_version`, `schema_version`, `command`, `graph_trace`, `started_utc_ns`, `recorded_ns`; `device.N` with its
    name and `chip.N`; `pid.GLOBAL_ID` with process number and name of each process that recorded something. Absent if not told.
    Devices go by CUDA's numbers, or, `by_gpu`, by the report's own.
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
        facts["command"] = shlex.join([command, *[arguments[place] for place in sorted(arguments)]])
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

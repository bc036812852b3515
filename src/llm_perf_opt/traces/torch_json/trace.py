"""A torch.profiler trace (Chrome JSON) of any torch version and size → `Trace`. Memory holds the columns, not the file."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llm_perf_opt.core.host import without_garbage_collection
from llm_perf_opt.core.stages import PART_LABEL
from llm_perf_opt.traces.events import (
    GPUS,
    NO_NAME,
    Collectives,
    DeviceWork,
    HostCalls,
    Operators,
    RangeKind,
    Ranges,
    Trace,
    TraceProblem,
)
from llm_perf_opt.traces.packed import PackedFile
from llm_perf_opt.traces.torch_json import problems
from llm_perf_opt.traces.torch_json.array_reader import ArrayReader
from llm_perf_opt.traces.torch_json.collectives import process_groups
from llm_perf_opt.traces.torch_json.columns import TorchColumns
from llm_perf_opt.traces.torch_json.event_chunks import EventChunks, Surroundings
from llm_perf_opt.traces.trace_mark import Checksum


def read_torch_trace(path: Path, checksum: Checksum | None = None) -> Trace:
    """Return the trace in a file, or raise a ParseError. The file has times in µs, whatever its displayTimeUnit; exact ns here.

    Device work is kernels, copies and memsets. Ranges are user annotations and, in the domain `nn.Module`, the frames of modules.
    Annotations on the device (gpu_user_annotation), flow arrows and Python frames are skipped.
    `checksum` receives the bytes of the file as they are read.
    """
    with without_garbage_collection():
        columns = TorchColumns(str(path))
        reader = ArrayReader(columns)
        with PackedFile(path, checksum) as file:
            chunks = EventChunks(str(path), file.read_into, reader, file.add_values)
            around = chunks.run()
            chunks.cut_short = chunks.cut_short or file.cut_short
    return _trace(columns, chunks.events, around, _file_problems(chunks, reader.not_events, around))


def _trace(columns: TorchColumns, events: int, around: Surroundings, file_problems: list[TraceProblem]) -> Trace:
    work, calls = columns.table(DeviceWork), columns.table(HostCalls)
    operators, ranges = _with_component_labels(columns.table(Operators), columns.table(Ranges), columns.names)
    work = replace(work, process=_processes(work, calls))
    trace = Trace(
        "torch",
        columns.names,
        work,
        calls,
        ranges,
        operators,
        facts=_facts(events, around),
        collectives=columns.table(Collectives),
    )
    found = [*file_problems, *_content_problems(events, columns, trace), *problems.notices(around.after)]
    return replace(trace, problems=tuple(found))


def _with_component_labels(operators: Operators, ranges: Ranges, names: Sequence[str]) -> tuple[Operators, Ranges]:
    """Return the labels of a model's components as ranges: torch records a fast label as an operator."""
    label = np.array([name.startswith(PART_LABEL) for name in names] + [False], np.bool_)
    mine = label[operators.name]
    if not mine.any():
        return operators, ranges
    rows = operators.rows(mine)
    every = {name: np.concatenate([column, _as_ranges(rows, name, column)]) for name, column in ranges.columns().items()}
    order = np.lexsort((-every["end_ns"], every["start_ns"]))
    return operators.rows(~mine), Ranges(**{name: column[order] for name, column in every.items()})


def _as_ranges(rows: Operators, name: str, like: Any) -> Any:
    fixed = {"domain": NO_NAME, "kind": RangeKind.PUSH_POP}
    return np.full(len(rows), fixed[name], like.dtype) if name in fixed else getattr(rows, name).astype(like.dtype)


def _processes(work: DeviceWork, calls: HostCalls) -> Any:
    """Return the host process of each row of device work: that of its launch, or else the one with most calls."""
    if not len(calls):
        return np.zeros(len(work), np.int64)
    if (calls.process == calls.process[0]).all():  # usual, and much faster to check than to count
        return np.full(len(work), calls.process[0], np.int64)
    processes, counts = np.unique(calls.process, return_counts=True)
    most = processes[np.argmax(counts)]
    rows = problems.launch_rows(work, calls)
    return np.where(rows >= 0, calls.process[rows], most)


def _file_problems(chunks: EventChunks, not_events: int, around: Surroundings) -> list[TraceProblem]:
    found = []
    remedy = "Copy the file again, or profile again and let the export finish."
    if chunks.cut_short:
        what = f"the file ends in the middle of its events; the {chunks.events:,} complete ones before that are read"
        found.append(TraceProblem("truncated", what, True, remedy))
    elif not around.readable:
        what = "the text before or after the events cannot be read: the device and the notices of the profiler are unknown"
        found.append(TraceProblem("damaged_edges", what, False, remedy))
    lost = chunks.unreadable + not_events
    if lost:
        found.append(TraceProblem("unreadable_events", f"{lost:,} events cannot be read and are left out", True, remedy))
    if chunks.repaired:
        what = f"{chunks.repaired:,} parts of the file were not JSON (torch does not escape a quote in a name) and were repaired"
        found.append(TraceProblem("repaired", what, False, "Names in repaired parts may differ from the label that was set."))
    return found


def _content_problems(events: int, columns: TorchColumns, trace: Trace) -> list[TraceProblem]:
    if not events:
        return [TraceProblem("empty", "the trace has no events", True, "Run the profiler around the work, then export.")]
    if not any(len(table) for table in (trace.work, trace.calls, trace.operators, trace.ranges)):
        kinds = ", ".join(repr(name) for name in columns.other_categories[:6]) or "none"
        what = f"none of its {events:,} events is a kernel, a copy, a call, an operator or a host label; categories: {kinds}"
        return [TraceProblem("foreign", what, True, "Give a trace that torch.profiler exported.")]
    return [
        *problems.count_problems(columns.negative_work, columns.negative_host, columns.unplaced_work),
        *problems.work_problems(trace),
        *problems.process_problem(trace.calls.process),
        *problems.shape_problem(trace),
    ]


_FACTS = (
    "trace_id", "traceName", "host_name", "displayTimeUnit", "baseTimeNanoseconds",
    "record_shapes", "with_stack", "with_modules", "profile_memory",
    "cupti_version", "cuda_driver_version", "cuda_runtime_version", "hip_driver_version", "hip_runtime_version",
)  # fmt: skip


def _facts(events: int, around: Surroundings) -> dict[str, str]:
    """Return what the file states about the recording."""
    stated = {**around.after, **around.before}
    facts = {"tool": "torch.profiler", "events": str(events)}
    facts.update({key: str(stated[key])[:500] for key in _FACTS if isinstance(stated.get(key), str | int | float)})
    devices = stated.get("deviceProperties")
    if isinstance(devices, list):
        facts[GPUS] = str(len(devices))
        names = [str(device["name"]) for device in devices if isinstance(device, dict) and device.get("name")]
        if names:
            facts["devices"] = ", ".join(names)[:500]
    distributed = stated.get("distributedInfo")
    if isinstance(distributed, dict):
        facts.update({f"distributed_{key}": str(distributed[key])[:100] for key in ("rank", "world_size") if key in distributed})
        groups = process_groups(distributed.get("pg_config"))
        facts.update({"distributed_groups": groups} if groups else {})
    return facts

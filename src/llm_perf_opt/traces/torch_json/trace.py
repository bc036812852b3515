"""A trace of torch.profiler (Chrome JSON) → `Trace`. Any version of torch, any size, in the memory of its columns."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llm_perf_opt.traces.events import DeviceWork, HostCalls, Operators, Ranges, Trace, TraceProblem
from llm_perf_opt.traces.packed import PackedFile
from llm_perf_opt.traces.torch_json import problems
from llm_perf_opt.traces.torch_json.array_reader import ArrayReader
from llm_perf_opt.traces.torch_json.columns import TorchColumns
from llm_perf_opt.traces.torch_json.event_chunks import EventChunks, Surroundings
from llm_perf_opt.traces.torch_json.events import repaired
from llm_perf_opt.traces.trace_mark import Checksum


def read_torch_trace(path: Path, checksum: Checksum | None = None) -> Trace:
    """Everything the trace says, or a ParseError. Times are µs in the file, whatever its displayTimeUnit; exact integer ns here.

    Device work comes from kernels, copies and memsets; ranges from user annotations and, in the domain `nn.Module`, from the
    frames of modules. Copies of annotations on the device (gpu_user_annotation), flow arrows and Python frames are passed over.
    `checksum` is given the bytes of the file as they are read.
    """
    with _without_collector():
        columns = TorchColumns()
        reader = ArrayReader(columns)
        with PackedFile(path, checksum) as file:
            chunks = EventChunks(str(path), file.read_into, reader, repaired)
            around = chunks.run()
            chunks.cut_short = chunks.cut_short or file.cut_short
    return _trace(columns, chunks.events, around, _file_problems(chunks, reader.not_events, around))


def _trace(columns: TorchColumns, events: int, around: Surroundings, file_problems: list[TraceProblem]) -> Trace:
    work, calls = columns.table(DeviceWork), columns.table(HostCalls)
    operators, ranges = columns.table(Operators), columns.table(Ranges)
    work = replace(work, process=_processes(work, calls))
    trace = Trace("torch", columns.names, work, calls, ranges, operators, facts=_facts(events, around))
    found = [*file_problems, *_content_problems(events, columns, trace), *problems.notices(around.after)]
    return replace(trace, problems=tuple(found))


@contextmanager
def _without_collector() -> Iterator[None]:
    """Decoded events hold no cycles; looking for cycles among a million of them costs more than decoding them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _processes(work: DeviceWork, calls: HostCalls) -> Any:
    """The host process of each piece of device work: that of its launch, else the one with most calls."""
    if not len(calls):
        return np.zeros(len(work), np.int64)
    if (calls.process == calls.process[0]).all():  # the rule, and told much faster than it is counted
        return np.full(len(work), calls.process[0], np.int64)
    processes, counts = np.unique(calls.process, return_counts=True)
    most = processes[np.argmax(counts)]
    rows = problems.launch_rows(work, calls)
    return np.where(rows >= 0, calls.process[rows], most)


def _file_problems(chunks: EventChunks, not_events: int, around: Surroundings) -> list[TraceProblem]:
    found = []
    again = "Copy it again, or profile again and let the export finish."
    if chunks.cut_short:
        what = f"the file ends in the middle of its events; the {chunks.events:,} whole ones before that are read"
        found.append(TraceProblem("truncated", what, True, again))
    elif not around.readable:
        what = "what stands before or behind the events cannot be read: the device and the profiler's own notices are not known"
        found.append(TraceProblem("damaged_edges", what, False, again))
    lost = chunks.unreadable + not_events
    if lost:
        found.append(TraceProblem("unreadable_events", f"{lost:,} events cannot be read and are left out", True, again))
    if chunks.repaired:
        what = f"{chunks.repaired:,} stretches of the file were no JSON (torch writes a quote in a name as it is) and were mended"
        found.append(TraceProblem("repaired", what, False, "Names in mended stretches may differ from the label that was set."))
    return found


def _content_problems(events: int, columns: TorchColumns, trace: Trace) -> list[TraceProblem]:
    if not events:
        return [TraceProblem("empty", "the trace has no events", True, "Let the profiler run around the work, then export.")]
    if not any(len(table) for table in (trace.work, trace.calls, trace.operators, trace.ranges)):
        kinds = ", ".join(repr(name) for name in columns.other_categories[:6]) or "none"
        what = (
            f"none of its {events:,} events is a kernel, a copy, a call, an operator or a label of the host; categories: {kinds}"
        )
        return [TraceProblem("foreign", what, True, "Give a trace that torch.profiler exported.")]
    return [
        *problems.count_problems(columns.negative_work, columns.negative_host, columns.unplaced_work),
        *problems.work_problems(trace),
        *problems.process_problem(trace.calls.process),
        *problems.shape_problem(trace.operators),
    ]


_FACTS = (
    "trace_id", "traceName", "host_name", "displayTimeUnit", "baseTimeNanoseconds",
    "record_shapes", "with_stack", "with_modules", "profile_memory",
    "cupti_version", "cuda_driver_version", "cuda_runtime_version", "hip_driver_version", "hip_runtime_version",
)  # fmt: skip


def _facts(events: int, around: Surroundings) -> dict[str, str]:
    """What the file says of its making."""
    said = {**around.after, **around.before}
    facts = {"tool": "torch.profiler", "events": str(events)}
    facts.update({key: str(said[key])[:500] for key in _FACTS if isinstance(said.get(key), str | int | float)})
    devices = said.get("deviceProperties")
    if isinstance(devices, list):
        names = [str(device["name"]) for device in devices if isinstance(device, dict) and "name" in device]
        if names:
            facts["devices"] = ", ".join(names)[:500]
    distributed = said.get("distributedInfo")
    if isinstance(distributed, dict):
        facts.update({f"distributed_{key}": str(distributed[key])[:100] for key in ("rank", "world_size") if key in distributed})
    return facts

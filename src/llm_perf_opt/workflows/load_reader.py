"""Read the loads of a serving run: each `raw/load_NN/` with its point.json and the files that this names."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from llm_perf_opt.analysis.serving.breakdown import Int64
from llm_perf_opt.analysis.serving.points import MeasuredLoad
from llm_perf_opt.analysis.trace.stage_instances import DECODE_STEP, PREFILL
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.core.errors import LlmPerfError, ParseError
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.run_folder import RunFolder, read_record
from llm_perf_opt.core.serving_records import POINT_FILE, LoadPoint, LoadRecords
from llm_perf_opt.core.stages import MIXED_STEP, STEP
from llm_perf_opt.core.user_files import present
from llm_perf_opt.core.value_limits import number_in
from llm_perf_opt.traces.events import Trace
from llm_perf_opt.traces.open_trace import read_trace
from llm_perf_opt.traces.serving.json_files import LATEST_NS
from llm_perf_opt.traces.serving.load_file import read_load
from llm_perf_opt.traces.serving.server_files import read_samples, read_spans

R = TypeVar("R")

LoadFiles = dict[tuple[int, int, bool], list[LoadRecords]]
"""Device, inode and `cut_short` of the last file that was read: an imported file with several loads is linked to each of them."""
_STEPS = (PREFILL, DECODE_STEP, STEP, MIXED_STEP)
_BASE = "baseTimeNanoseconds"


def read_points(folder: RunFolder) -> list[tuple[Path, LoadPoint]]:
    """Return the points of a run with their folders. Raise ParseError if one is damaged."""
    return [(path, _point(path)) for path in folder.load_folders() if _has_point(path)]


def _point(folder: Path) -> LoadPoint:
    found = read_record(present(folder / POINT_FILE), LoadPoint)
    if number_in(found.asked) is None or found.asked <= 0:
        raise ParseError(f"{folder / POINT_FILE} has an impossible load: {found.asked}.", "The file is damaged, or was edited.")
    return found


def _has_point(path: Path) -> bool:
    """Return whether a load was begun at all: its folder is made before its point is written."""
    return present(path / POINT_FILE).exists()


def read_measured(folder: Path, point: LoadPoint, files: LoadFiles) -> MeasuredLoad:
    """Return a load with what its files hold. Damaged ones are Missing with the reason. What is read is kept in `files`."""
    part = point.status != "complete"
    return MeasuredLoad(
        point,
        _read(folder, point.file, "the generator left no file", lambda path: _records(path, point, files)),
        _read(folder, point.metrics, "the server's metrics were not sampled", lambda path: read_samples(path, cut_short=True)),
        _read(folder, point.spans, "the server recorded no spans", lambda path: read_spans(path, cut_short=part)),
        _read(folder, point.trace, "the server was not profiled", lambda path: step_times(read_trace(path))),
    )


def _records(path: Path, point: LoadPoint, files: LoadFiles) -> LoadRecords:
    status, cut_short = path.stat(), point.status != "complete"
    key = (status.st_dev, status.st_ino, cut_short)
    loads = files.get(key)
    if loads is None:
        files.clear()
        loads = read_load(path, cut_short=cut_short)
        if status.st_nlink > 1:
            files[key] = loads
    if not 0 <= point.part < len(loads):
        raise ParseError(f"{path} has {len(loads)} loads, and {POINT_FILE} names number {point.part}.")
    return loads[point.part]


def _read(folder: Path, name: str, none: str, read: Callable[[Path], R]) -> Maybe[R]:
    if not name:
        return Missing(none)
    if Path(name).name != name:
        return Missing(f"{POINT_FILE} names {name!r}, which is not a file of its folder")
    path = present(folder / name)
    if not path.exists():
        return Missing(f"{folder.name}/{name} is missing")
    try:
        return read(path)
    except LlmPerfError as error:
        return Missing(error.fact)


def step_times(trace: Trace) -> Int64:
    """Return start and end of each model step in a server's trace, in unix nanoseconds. Raise ParseError without steps.

    On a device, a step lasts from the start of its first work to the end of its last: an engine launches a step while the
    one before it still runs, so the time of its label is that of launching.
    """
    stages = find_stages(trace)
    found = np.concatenate([_device_times(trace, stages.of_stage(name)) for name in _STEPS])
    if not len(found):
        rows = np.concatenate([stages.rows_of(name) for name in _STEPS])
        found = np.stack([stages.instances.start_ns[rows], stages.instances.end_ns[rows]], axis=1)
    if not len(found):
        raise ParseError("The server's trace has no label of a model step.")
    base = trace.facts.get(_BASE, "0")
    offset = min(int(base), LATEST_NS) if base.isdigit() and len(base) < 20 else 0
    return found[np.argsort(found[:, 0], kind="stable")].astype(np.int64) + offset


def _device_times(trace: Trace, step_of_work: Int64) -> Int64:
    """Return the first start and the last end of the device work of each step that has some."""
    work = np.flatnonzero(step_of_work >= 0)
    steps, place = np.unique(step_of_work[work], return_inverse=True)
    times = np.stack([np.full(len(steps), LATEST_NS), np.full(len(steps), -LATEST_NS)], axis=1)
    np.minimum.at(times[:, 0], place, trace.work.start_ns[work])
    np.maximum.at(times[:, 1], place, trace.work.end_ns[work])
    return times

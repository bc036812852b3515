"""A short load on a server under its own profiler."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from llm_perf_opt.config.serving import LoadRequest, Server
from llm_perf_opt.core.errors import CaptureError, LlmPerfError
from llm_perf_opt.core.inside import move, remove_empty
from llm_perf_opt.core.records import load_name
from llm_perf_opt.core.serving_records import POINT_FILE
from llm_perf_opt.profiling.serving.http import ask
from llm_perf_opt.profiling.serving.load import Driven, Rig, drive

START_S, STOP_S = 60.0, 600.0
"""How long a server may take to start its profiler, and to write the trace."""


class NoProfilerError(CaptureError):
    """The server cannot be profiled."""


def profiled_load(
    rig: Rig, server: Server, traces: Path, load: LoadRequest, number: int, time_left: Callable[[float], float]
) -> Driven:
    """Run a load between the server's profiler endpoints and keep its trace in the folder of the load.

    `time_left` returns the seconds that a wait may take, given its own limit. After an interrupt the trace is not waited for.
    Raise a NoProfilerError if the server does not start its profiler.
    """
    if not server.start_profile:
        raise NoProfilerError("The server has no profiler.", "Use --no-profile.")
    answer = ask(rig.facts.url + server.start_profile, post=True, timeout_s=time_left(START_S))
    if answer.code != 200:
        said = f"{answer.code} {answer.text}" if answer.code else answer.why
        raise NoProfilerError(f"The server did not start its profiler: {said}.", "Use --no-profile.")
    driven = drive(rig, load, number, time_left(math.inf), profiled=True)
    if rig.server is not None and not rig.server.alive:
        return driven
    stopped = ask(rig.facts.url + server.stop_profile, post=True, timeout_s=time_left(STOP_S))
    found = sorted(traces.glob(server.traces), key=lambda path: path.stat().st_size)
    error: LlmPerfError | None = None
    if stopped.code != 200 or not found:
        said = "wrote no trace" if stopped.code == 200 else f"did not stop: {stopped.code} {stopped.text}"
        error = CaptureError(f"The server's profiler {said}.", "See the server's log.txt.")
    place = rig.folder.raw(load_name(number))
    kept = [place / path.name for path in found]
    for path, target in zip(found, kept, strict=True):
        move(rig.folder.path, path, target)  # the largest is the model's, not the front end's
    point = replace(driven.point, trace=kept[-1].name if kept else "")
    if error is not None and point.status == "complete":
        point = replace(point, status="partial", why=error.fact)
        entry = rig.folder.manifest().pass_named(place.name)
        if entry is not None:
            rig.folder.update_pass(replace(entry, status="failed", why=error.fact, remedy=error.remedy))
    rig.folder.write_record(place / POINT_FILE, point)
    remove_empty(rig.folder.path, traces)  # unless the profiler left other files
    return replace(driven, point=point, error=driven.error or error)

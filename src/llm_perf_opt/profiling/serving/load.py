"""Put one load on a server: run the generator next to the samplers, check what it left, and write `point.json`."""

import math
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from llm_perf_opt.analysis.serving.outcome import LoadOutcome, outcome_of
from llm_perf_opt.analysis.serving.slo import Slo
from llm_perf_opt.config.serving import LoadRequest
from llm_perf_opt.core.errors import CaptureError, Interrupted, LlmPerfError, ParseError, ResourceError
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.records import PassRecord, load_name
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.core.serving_records import (
    METRICS_FILE,
    POINT_FILE,
    SPANS_FILE,
    LoadPoint,
    LoadRecords,
    ServedRequest,
    ServerFacts,
)
from llm_perf_opt.profiling.passes import TICK, Listener, begin_pass
from llm_perf_opt.profiling.serving.generators import LocatedGenerator, generator_environment
from llm_perf_opt.profiling.serving.metrics import MetricsSampler
from llm_perf_opt.profiling.serving.server import ServerProcess, last_lines
from llm_perf_opt.profiling.serving.spans import SpanReceiver
from llm_perf_opt.profiling.vendor.launch import Callbacks, Finished, run_child, verdict
from llm_perf_opt.runners import ends_with_parent
from llm_perf_opt.traces.serving.load_file import read_load

GRACE_S = (15.0, 5.0, 5.0)
"""Seconds after SIGINT, SIGTERM and SIGKILL for a generator, which writes its records when it is interrupted."""
_TIMEOUT = ("timeout", "timed out")
_ANSWERED = re.compile(r"[1-5]\d\d\b")
"""The start of an error that a server answered, such as `504 Gateway Timeout`."""


@dataclass(frozen=True)
class Driven:
    """One load, as it went."""

    point: LoadPoint
    outcome: LoadOutcome | None
    """None if the generator left no records."""
    error: LlmPerfError | None = None
    """Why it is not complete."""
    e2e_s: float | None = None
    """Median end-to-end time of the successful requests."""


@dataclass(frozen=True)
class Rig:
    """What all loads of a run share."""

    folder: RunFolder
    listener: Listener
    facts: ServerFacts
    located: LocatedGenerator
    server: ServerProcess | None
    """None: the server was running already."""
    spans: SpanReceiver | None
    slo: Maybe[Slo]


class _ServerWatch:
    """Stops the generator when the server has ended."""

    interval_s = 1.0

    def __init__(self, server: ServerProcess) -> None:
        self._server = server

    def due(self) -> bool:
        return not self._server.alive

    def problem(self) -> LlmPerfError | None:
        return None if self._server.alive else self._server.death()


def words(load: LoadRequest) -> str:
    """Return a load as shown to users."""
    return f"{load.asked:g} requests/s" if load.kind == "rate" else f"{load.asked:g} at a time"


def drive(rig: Rig, load: LoadRequest, number: int, timeout_s: float, *, profiled: bool = False) -> Driven:
    """Run one load to its end and record it. An interrupt is raised after what was captured has been recorded."""
    name = load_name(number)
    place = rig.folder.raw(name)
    argv = (*rig.located.launch, *rig.located.generator.arguments(load))
    begin_pass(rig.folder, name, argv)
    rig.listener.pass_started(name, f"{words(load)}, {load.requests} requests{' under the profiler' if profiled else ''}")
    entry = PassRecord(name, "started", argv, tool_version=f"{rig.located.generator.label} {rig.located.version}".strip())
    rig.folder.update_pass(entry)
    point = _begun(rig, number, load, profiled=profiled)
    rig.folder.write_record(place / POINT_FILE, point)
    stopped: LlmPerfError | None = None
    finished: Finished | None = None
    problems: list[str] = []
    try:
        finished = _run(rig, load, name, argv, timeout_s, problems)
    except LlmPerfError as raised:
        stopped = raised
    driven = _ended(rig, replace(point, problems=tuple(problems)), load, finished, stopped)
    rig.folder.write_record(place / POINT_FILE, driven.point)
    entry = replace(
        entry,
        status="complete" if driven.point.status == "complete" else "failed",
        exit_code=finished.exit_code if finished else None,
        seconds=round((driven.point.ended_ns - point.started_ns) / 1e9, 3),
        why=driven.point.why or _failures(driven.outcome),
        remedy=driven.error.remedy if driven.error else "",
    )
    rig.folder.update_pass(entry)
    rig.listener.pass_ended(entry)
    if isinstance(stopped, Interrupted):
        raise stopped
    return driven


def _begun(rig: Rig, number: int, load: LoadRequest, *, profiled: bool) -> LoadPoint:
    now = time.time_ns()
    return LoadPoint(
        number=number,
        kind=load.kind,
        asked=load.asked,
        arrival=load.arrival,
        generator=rig.located.generator.name,
        file=rig.located.generator.file,
        requests=load.requests,
        started_ns=now,
        ended_ns=now,
        status="partial",
        why="The load has not ended.",
        profiled=profiled,
        monotonic_offset_ns=now - time.monotonic_ns(),
        prompt_tokens=load.prompt_tokens,
        new_tokens=load.new_tokens,
        seed=load.seed,
    )


def _run(rig: Rig, load: LoadRequest, name: str, argv: Sequence[str], timeout_s: float, problems: list[str]) -> Finished:
    """Run the generator to its end. What goes wrong next to it is added to `problems`."""
    place, log = rig.folder.raw(name), rig.folder.log_file(name)
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="llm-perf-load-"))
        environment = {**generator_environment(rig.located), **rig.located.generator.prepare(load, Path(scratch))}
        sampler = None
        if not isinstance(rig.facts.metrics_url, Missing):
            sampler = MetricsSampler(rig.facts.metrics_url, place / METRICS_FILE)
            stack.callback(lambda: problems.extend(sampler.problems))
            stack.enter_context(sampler)
        if rig.spans is not None:
            rig.spans.write_to(place / SPANS_FILE)
            stack.callback(lambda: problems.extend(_end_spans(rig.spans)))

        def tick() -> None:
            text = _queue(sampler.last) if sampler else ""
            rig.listener.pass_message(name, {"event": "progress", "phase": "under load", "text": text} if text else TICK)

        return run_child(
            [sys.executable, str(ends_with_parent.__file__), str(log), *argv],
            log=log,
            timeout_s=timeout_s,
            callbacks=Callbacks(on_message=lambda _: None, on_tick=tick),
            environment=environment,
            watch=_ServerWatch(rig.server) if rig.server else None,
            grace_s=GRACE_S,
        )


def _end_spans(spans: SpanReceiver | None) -> list[str]:
    """Stop writing spans; return what could not be read."""
    if spans is None:
        return []
    spans.write_to(None)
    return [f"{spans.refused} exports of spans could not be read, the last because {spans.problem}"] if spans.refused else []


def _queue(series: Mapping[str, float]) -> str:
    """Return how many requests run and wait, as far as the server's metrics say."""
    found = []
    for word in ("running", "waiting"):
        values = [value for name, value in series.items() if name.partition("{")[0].endswith(f"requests_{word}")]
        found += [f"{sum(values):.0f} {word}"] if values else []
    return ", ".join(found)


def _ended(rig: Rig, point: LoadPoint, load: LoadRequest, finished: Finished | None, stopped: LlmPerfError | None) -> Driven:
    """Return the load with its outcome: what the generator recorded, and why it is not complete."""
    place = rig.folder.raw(load_name(point.number))
    error = stopped or _error(rig, load, finished, rig.folder.log_file(load_name(point.number)))
    records: LoadRecords | None = None
    try:
        records = read_load(place / point.file, cut_short=error is not None)[0]
    except (ParseError, ResourceError) as unread:
        error = error or CaptureError(f"The records of the load generator cannot be used: {unread.fact}", unread.remedy)
    sent = len(records.requests) if records else 0
    alive = rig.server is None or rig.server.alive
    if records is not None and (error is None or (alive and _all_failed_by_themselves(records, finished))):
        error = _incomplete(records, load) or error
    point = replace(
        point,
        ended_ns=time.time_ns(),
        status="complete" if error is None else "partial" if sent else "failed",
        why=error.fact if error else "",
        metrics=METRICS_FILE if _written(place / METRICS_FILE) else "",
        spans=SPANS_FILE if _written(place / SPANS_FILE) else "",
    )
    if records is None or not sent:
        return Driven(point, None, error)
    took = [(request.end_ns - request.sent_ns) / 1e9 for request in records.requests if not request.error]
    return Driven(point, outcome_of(point, records, rig.slo), error, median(took) if took else None)


def _written(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


def _error(rig: Rig, load: LoadRequest, finished: Finished | None, log: Path) -> LlmPerfError | None:
    """Return why the generator did not run to its end, the server's end first."""
    if finished is None:
        return None
    if rig.server is not None and not rig.server.alive:
        return finished.stopped or rig.server.death()
    label = rig.located.generator.label
    found = verdict(
        f"{label} at {words(load)}",
        finished,
        (),
        log,
        limit="--point-s or --timeout-s allows",
        longer="Raise --point-s, or send fewer --requests.",
        smaller="send fewer --requests.",
    )
    if found is None or finished.timed_out or finished.stopped:
        return found
    return CaptureError(found.fact + last_lines(log), found.remedy)


def _incomplete(records: LoadRecords, load: LoadRequest) -> LlmPerfError | None:
    """Return why records are not those of a whole load: some are missing, or a request was given up."""
    late = sum(map(_given_up, records.requests))
    if late:
        return CaptureError(
            f"{late} of {len(records.requests)} requests took longer than {load.request_s:g} s and were given up.",
            "See the server's log; raise --request-s if such requests are expected.",
        )
    failed = [request.error for request in records.requests if request.failed]
    cut = sum(request.cut for request in records.requests)
    if failed and len(failed) + cut == len(records.requests):
        which = f"All {len(failed)} requests{' that ended' if cut else ''} failed"
        return CaptureError(f"{which}: {failed[0][:300]}.", "See the server's log.")
    if cut and cut == len(records.requests):
        return CaptureError(f"None of {cut} requests ended before the load generator did.", "See the log.txt of the load.")
    if len(records.requests) < load.requests:
        return CaptureError(
            f"The load generator recorded {len(records.requests)} of {load.requests} requests.", "See the log.txt of the load."
        )
    return None


def _all_failed_by_themselves(records: LoadRecords, finished: Finished | None) -> bool:
    """Return whether no request succeeded though nothing was stopped: their errors say more than the generator's exit code."""
    ended = finished is not None and not finished.timed_out and finished.stopped is None
    nothing = all(request.error for request in records.requests)
    return ended and nothing and any(request.failed for request in records.requests)


def _given_up(request: ServedRequest) -> bool:
    """Return whether the generator gave up a request; an error that the server answered is no such case."""
    return not _ANSWERED.match(request.error) and any(word in request.error.lower() for word in _TIMEOUT)


def _failures(outcome: LoadOutcome | None) -> str:
    """Return a note about failed requests of a complete load."""
    return f"{outcome.failed} of {outcome.requests} requests failed." if outcome and outcome.failed else ""


def profiled_requests(load: float, kind: str, requests: int, seconds: float) -> int:
    """Return how many requests a short profiled load has."""
    wanted = load * seconds if kind == "rate" else 4 * load
    return math.ceil(min(requests, max(8, wanted)))

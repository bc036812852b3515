"""The analysis of one load: its figures, the checks of its generator, the server during it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llm_perf_opt.analysis.serving.agreement import AgreedFigure, agreement
from llm_perf_opt.analysis.serving.breakdown import Int64, ModelSteps, RequestParts, model_steps, request_parts
from llm_perf_opt.analysis.serving.generator import GeneratorCheck, generator_checks, issued_rate
from llm_perf_opt.analysis.serving.outcome import LoadOutcome, outcome_of, window_of
from llm_perf_opt.analysis.serving.requests import LATENCIES, Estimate, Latency, latency
from llm_perf_opt.analysis.serving.server import ServerLoad, ServerState, server_load, state_of
from llm_perf_opt.analysis.serving.slo import Goodput, Slo
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.serving_records import LoadPoint, LoadRecords, MetricsSample, RequestSpan

_NOT_MEASURED = Missing("not measured")
_PROFILED = Missing("the server ran under its profiler, which slows it")


@dataclass(frozen=True)
class MeasuredLoad:
    """What one load left: its point and what its files hold."""

    point: LoadPoint
    records: Maybe[LoadRecords]
    samples: Maybe[tuple[MetricsSample, ...]]
    spans: Maybe[tuple[RequestSpan, ...]]
    steps: Maybe[Int64]
    """Start and end of each model step in the server's trace, in unix time."""


@dataclass(frozen=True)
class PointAnalysis:
    """The analysis of one load."""

    point: LoadPoint
    unusable: Missing | None
    """Why there are no requests to analyze."""
    requests: int
    failed: int
    cut: int
    """Stopped by the end of the measurement: neither succeeded nor failed."""
    errors: tuple[tuple[str, int], ...]
    """Error and how many requests ended with it, the most frequent first."""
    latencies: dict[str, Maybe[Latency]]
    request_rate: Maybe[float]
    """Successful requests per second, from the first start to the last end."""
    output_rate: Maybe[float]
    """Output tokens of successful requests per second, over the same time."""
    issued_rate: Maybe[float]
    kept_up: Maybe[Estimate]
    """The rate at which requests end ÷ the rate at which they are sent, with its 95 % interval. 1: the server keeps up."""
    goodput: Maybe[Goodput]
    checks: tuple[GeneratorCheck, ...]
    agreement: tuple[AgreedFigure, ...]
    server: Maybe[ServerLoad]
    states: tuple[ServerState, ...]
    start_ns: int
    parts: Maybe[RequestParts]
    steps: Maybe[ModelSteps]
    generator: str = ""
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    """Files of this load that could not be read, and what went wrong next to it."""
    short: bool = False
    """Whether requests were sent for too short a time for a steady state (`pace.STEADY_TIMES`)."""
    lasting: bool = False
    """Whether they were sent for long enough to conclude that the server falls behind (`pace.LASTING_TIMES`)."""
    steady_rate: Maybe[float] = _NOT_MEASURED
    """Output tokens per second from the first end to the last start."""
    objective: bool = False
    """Whether there is an objective."""

    @property
    def failed_share(self) -> float:
        """The share of requests that failed, of those that ended."""
        return self.outcome.failed_share if self.outcome else 0.0

    @property
    def outcome(self) -> LoadOutcome | None:
        """What decides whether it was carried; None without requests, and under the profiler."""
        if self.unusable is not None or self.point.profiled:
            return None
        return LoadOutcome(
            self.point, self.requests, self.failed, self.cut, self.kept_up, self.short, self.lasting, self.steady_rate,
            self.goodput, self.objective,
        )  # fmt: skip

    def typical(self, key: str) -> Maybe[float]:
        """Return the median of a latency."""
        found = self.latencies.get(key, _NOT_MEASURED)
        return found if isinstance(found, Missing) else found.typical


def analyze_point(load: MeasuredLoad, slo: Maybe[Slo]) -> PointAnalysis:
    """Analyze one load. A profiled one has no latencies of its own."""
    if isinstance(load.records, Missing):
        return _without_requests(load, load.records)
    records = with_unix_times(load.records, load.point)
    requests, point = records.requests, load.point
    outcome = outcome_of(point, records, slo)
    rate, output = _rates(records, window_of(records))
    states = () if isinstance(load.samples, Missing) else tuple(map(state_of, load.samples))
    start, end = _span(records, point)
    figures = {entry.key: _PROFILED if point.profiled else latency(entry, requests) for entry in LATENCIES}
    return PointAnalysis(
        point=point,
        unusable=None,
        requests=len(requests),
        failed=outcome.failed,
        cut=outcome.cut,
        errors=tuple(Counter(request.error for request in requests if request.failed).most_common()),
        latencies=figures,
        request_rate=_PROFILED if point.profiled else rate,
        output_rate=_PROFILED if point.profiled else output,
        issued_rate=issued_rate(records),
        kept_up=_PROFILED if point.profiled else outcome.kept_up,
        goodput=_PROFILED if point.profiled else outcome.goodput,
        checks=generator_checks(records, point),
        agreement=agreement(records, rate, output),
        server=load.samples if isinstance(load.samples, Missing) else server_load(states, start, end),
        states=tuple(state for state in states if start <= state.at_ns <= end),
        start_ns=start,
        parts=request_parts(requests, load.spans, load.steps),
        steps=model_steps(requests, load.steps),
        generator=records.generator,
        notes=(*records.notes, *_chunk_notes(records)),
        problems=problems_of(load),
        short=outcome.short,
        lasting=outcome.lasting,
        steady_rate=_PROFILED if point.profiled else outcome.steady_rate,
        objective=outcome.objective,
    )


def problems_of(load: MeasuredLoad) -> tuple[str, ...]:
    """Return what was recorded next to a load but cannot be used, with reasons."""
    named = (
        (load.point.metrics, "metrics", load.samples),
        (load.point.spans, "spans", load.spans),
        (load.point.trace, "trace", load.steps),
    )
    unread = [f"the server's {what}: {found.why}" for file, what, found in named if file and isinstance(found, Missing)]
    empty = ["the server's metrics: no sample can be read"] if load.point.metrics and load.samples == () else []
    return (*load.point.problems, *empty, *unread)


def _without_requests(load: MeasuredLoad, why: Missing) -> PointAnalysis:
    nothing: dict[str, Maybe[Latency]] = {definition.key: why for definition in LATENCIES}
    return PointAnalysis(
        load.point, why, 0, 0, 0, (), nothing, why, why, why, why, why, (), (), why, (), load.point.started_ns, why, why,
        problems=problems_of(load),
    )  # fmt: skip


def with_unix_times(records: LoadRecords, point: LoadPoint) -> LoadRecords:
    """Return the records with unix times, if the point knows how the generator's clock relates to them."""
    offset = point.monotonic_offset_ns
    if records.clock != "monotonic" or isinstance(offset, Missing):
        return records
    moved = tuple(
        replace(
            request,
            sent_ns=request.sent_ns + offset,
            end_ns=request.end_ns + offset,
            token_ns=tuple(time + offset for time in request.token_ns),
        )
        for request in records.requests
    )
    return replace(records, requests=moved, clock="unix")


def _rates(records: LoadRecords, window: Maybe[int]) -> tuple[Maybe[float], Maybe[float]]:
    if isinstance(window, Missing):
        return window, window
    good = [request for request in records.requests if not request.error]
    counts = [request.output_tokens for request in good]
    missing = next((count for count in counts if isinstance(count, Missing)), None)
    tokens = sum(count for count in counts if not isinstance(count, Missing))
    output = Missing(f"the number of output tokens was {missing.why}") if missing else tokens * 1e9 / window
    return len(good) * 1e9 / window, output


def _span(records: LoadRecords, point: LoadPoint) -> tuple[int, int]:
    """Return the unix time of the load: of its requests, or of its process if their clock is unknown."""
    if records.clock != "unix" or not records.requests:
        return point.started_ns, point.ended_ns
    return min(request.sent_ns for request in records.requests), max(request.end_ns for request in records.requests)


def _chunk_notes(records: LoadRecords) -> Sequence[str]:
    """Return a note if chunks hold several tokens, because ITL is then a gap between chunks."""
    good = [request for request in records.requests if not request.error and request.token_ns]
    tokens = sum(request.output_tokens for request in good if not isinstance(request.output_tokens, Missing))
    chunks = sum(len(request.token_ns) for request in good)
    if not good or any(not isinstance(request.last_token_ns, Missing) for request in good) or tokens <= chunks:
        return ()
    return ("some chunks hold several tokens, so a gap of ITL may be followed by several",)

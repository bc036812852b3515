"""Where the time of a request goes: network, server front end, queue, prefill, decode; and decode into steps and gaps."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llm_perf_opt.analysis.serving.requests import last_token
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.serving_records import RequestSpan, ServedRequest

Int64 = npt.NDArray[np.int64]

_PREFIX, _SUFFIX = re.compile(r"^[a-z]+-"), re.compile(r"-\d+$")
"""A server puts the kind of request before an id and the number of the choice after it: `cmpl-ID-0`."""
LEAST_COVERED = 0.8
"""Share of the requests whose decode must lie inside the trace; a profiler starts late and stops early."""


@dataclass(frozen=True)
class RequestParts:
    """The mean time of a request and its parts, which sum to it."""

    requests: int
    """Successful requests with a span."""
    without_span: int
    e2e_ns: float
    network_ns: Maybe[float]
    """Between client and server, both ways, and in the client."""
    frontend_ns: Maybe[float]
    """In the server outside the engine: HTTP, tokenizing, detokenizing."""
    queue_ns: float
    prefill_ns: float
    decode_ns: float
    steps_ns: Maybe[float]
    """The part of decode in which the model ran a step."""
    between_ns: Maybe[float]
    """The part of decode between steps: scheduling, sampling, sending tokens."""


def known_parts(parts: RequestParts) -> dict[str, float]:
    """Return the parts that are known, without the split of decode: network, frontend, queue, prefill, decode."""
    found = {name: getattr(parts, f"{name}_ns") for name in ("network", "frontend", *_ENGINE)}
    return {name: value for name, value in found.items() if not isinstance(value, Missing)}


@dataclass(frozen=True)
class BatchSteps:
    """The steps of the model while so many requests were decoding: a range between powers of two."""

    least: int
    most: int
    steps: int
    median_ns: float


@dataclass(frozen=True)
class ModelSteps:
    """The steps of the model in a server's trace."""

    steps: int
    median_ns: float
    between_ns: float
    """Median gap between neighboring steps while a request was decoding."""
    by_batch: tuple[BatchSteps, ...]


def joined(requests: Sequence[ServedRequest], spans: Sequence[RequestSpan]) -> list[tuple[ServedRequest, RequestSpan]]:
    """Return the successful requests that have a span, by request id."""
    known = {request.id: request for request in requests if not request.error}
    pairs: dict[str, RequestSpan] = {}
    for span in spans:
        name = next((name for name in _names(span.id) if name in known), None)
        if name is not None:
            pairs.setdefault(name, span)
    return [(known[name], span) for name, span in pairs.items()]


def _names(span_id: str) -> tuple[str, ...]:
    bare = _PREFIX.sub("", span_id)
    return span_id, bare, _SUFFIX.sub("", span_id), _SUFFIX.sub("", bare)


def request_parts(
    requests: Sequence[ServedRequest], spans: Maybe[Sequence[RequestSpan]], steps: Maybe[Int64]
) -> Maybe[RequestParts]:
    """Return the mean parts of a request. `steps`: start and end of each model step in unix time, in order."""
    if isinstance(spans, Missing):
        return spans
    pairs = joined(requests, spans)
    if not pairs:
        return Missing(f"none of the {len(spans)} spans has the id of a request")
    count = len(pairs)
    e2e = sum(request.end_ns - request.sent_ns for request, _ in pairs) / count
    queue, prefill, decode = (sum(getattr(span, f"{name}_ns") for _, span in pairs) / count for name in _ENGINE)
    served = _server_time(pairs)
    network = served if isinstance(served, Missing) else e2e - served
    inside = _in_steps(pairs, decode, steps)
    return RequestParts(
        requests=count,
        without_span=sum(not request.error for request in requests) - count,
        e2e_ns=e2e,
        network_ns=network,
        frontend_ns=served if isinstance(served, Missing) else served - queue - prefill - decode,
        queue_ns=queue,
        prefill_ns=prefill,
        decode_ns=decode,
        steps_ns=inside,
        between_ns=inside if isinstance(inside, Missing) else decode - inside,
    )


_ENGINE = ("queue", "prefill", "decode")


def _server_time(pairs: Sequence[tuple[ServedRequest, RequestSpan]]) -> Maybe[float]:
    """Return the mean time between a request's arrival at the server and its end there."""
    times = [span.e2e_ns for _, span in pairs]
    missing = next((time for time in times if isinstance(time, Missing)), None)
    known = [time for time in times if not isinstance(time, Missing)]
    return missing or sum(known) / len(known)


def _decode_interval(span: RequestSpan) -> tuple[int, int]:
    """Return when a request was decoding, on the server's clock."""
    ready = span.queue_ns + span.prefill_ns if isinstance(span.ttft_ns, Missing) else span.ttft_ns
    start = span.start_ns + ready
    return start, start + span.decode_ns


def _in_steps(pairs: Sequence[tuple[ServedRequest, RequestSpan]], decode_ns: float, steps: Maybe[Int64]) -> Maybe[float]:
    """Return the part of the mean decode inside model steps, from the requests whose decode the trace covers."""
    if isinstance(steps, Missing):
        return steps
    intervals = [_decode_interval(span) for _, span in pairs]
    covered = [(start, end) for start, end in intervals if len(steps) and start >= steps[0, 0] and end <= steps[:, 1].max()]
    if len(covered) < LEAST_COVERED * len(intervals):
        return Missing(f"the trace covers the decode of {len(covered)} of {len(intervals)} requests")
    merged = merged_intervals(steps)
    inside = sum(_overlap(merged, start, end) for start, end in covered)
    whole = sum(end - start for start, end in covered)
    return decode_ns * inside / whole if whole else Missing("no request was decoding")


def merged_intervals(intervals: Int64) -> Int64:
    """Return sorted intervals with overlapping ones joined."""
    found: list[list[int]] = []
    for start, end in intervals.tolist():
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return np.asarray(found, np.int64).reshape(-1, 2)


def _overlap(merged: Int64, start: int, end: int) -> int:
    inside = np.minimum(merged[:, 1], end) - np.maximum(merged[:, 0], start)
    return int(inside[inside > 0].sum())


def model_steps(requests: Sequence[ServedRequest], steps: Maybe[Int64]) -> Maybe[ModelSteps]:
    """Return the steps of a server's trace, by how many requests were decoding; clocks must agree."""
    if isinstance(steps, Missing):
        return steps
    decoding = [
        (request.token_ns[0], end)
        for request in requests
        if not request.error and request.token_ns and not isinstance(end := last_token(request), Missing)
    ]
    if not len(steps) or not decoding:
        return Missing("the trace has no model step" if not len(steps) else "no request was streamed")
    starts, ends = (np.sort([pair[place] for pair in decoding]) for place in (0, 1))
    middle = (steps[:, 0] + steps[:, 1]) // 2
    batch = np.searchsorted(starts, middle) - np.searchsorted(ends, middle)
    if not (batch > 0).any():
        return Missing("no model step falls into the decode of a request: the clocks or the loads differ")
    took = steps[:, 1] - steps[:, 0]
    by_batch = []
    most = 1
    while most // 2 < batch.max():
        inside = (batch > most // 2) & (batch <= most)
        if inside.any():
            by_batch.append(BatchSteps(most // 2 + 1, most, int(inside.sum()), float(np.median(took[inside]))))
        most *= 2
    gaps = (steps[1:, 0] - steps[:-1, 1])[(batch[1:] > 0) & (batch[:-1] > 0)]
    between = float(np.median(np.maximum(gaps, 0))) if len(gaps) else 0.0
    return ModelSteps(int((batch > 0).sum()), float(np.median(took[batch > 0])), between, tuple(by_batch))

"""The figures of single requests, and their percentiles over the requests of one load."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llm_perf_opt.analysis.stats import CONFIDENCE, least_values
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.serving_records import ServedRequest

Floats = npt.NDArray[np.float64]

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
LEAST_REQUESTS = 10
"""Fewer requests have no bootstrap interval: resampling them cannot show what was not seen."""
MOST_DRAWS, LEAST_DRAWS = 1000, 100
_WORK = 200_000_000
"""Values that all draws together may touch; a second of work."""
_AT_ONCE = 4_000_000
"""Values that are held in memory at a time."""
_SEED = 20240229
NOT_STREAMED = Missing("no token arrival was recorded: the answer was not streamed")


@dataclass(frozen=True)
class LatencyDefinition:
    """A latency that requests have."""

    key: str
    label: str
    definition: str
    values: Callable[[ServedRequest], Maybe[tuple[float, ...]]]
    """Its values in one request, in nanoseconds: one, or one per gap."""


@dataclass(frozen=True)
class Estimate:
    """A statistic with its 95 % bootstrap interval."""

    value: float
    low: Maybe[float]
    high: Maybe[float]


@dataclass(frozen=True)
class Latency:
    """A latency over the successful requests of one load."""

    key: str
    n: int
    """Values: one per request, or one per gap between chunks."""
    requests: int
    mean: float
    p50: Maybe[Estimate]
    p90: Maybe[Estimate]
    p99: Maybe[Estimate]

    @property
    def typical(self) -> Maybe[float]:
        """The median, without its interval."""
        return self.p50 if isinstance(self.p50, Missing) else self.p50.value


def ttft(request: ServedRequest) -> Maybe[tuple[float, ...]]:
    """Return the time to the first token."""
    return (float(request.token_ns[0] - request.sent_ns),) if request.token_ns else NOT_STREAMED


def last_token(request: ServedRequest) -> Maybe[int]:
    """Return the arrival of the last token."""
    if not isinstance(request.last_token_ns, Missing):
        return request.last_token_ns
    return request.token_ns[-1] if request.token_ns else NOT_STREAMED


def tpot(request: ServedRequest) -> Maybe[tuple[float, ...]]:
    """Return the mean time per output token after the first, with the server's count of tokens."""
    return tpot_with(request, request.output_tokens)


def tpot_with(request: ServedRequest, tokens: Maybe[int]) -> Maybe[tuple[float, ...]]:
    """Return the same with another count of tokens."""
    last = last_token(request)
    if isinstance(last, Missing) or not request.token_ns:
        return NOT_STREAMED
    if isinstance(tokens, Missing):
        return Missing(f"the number of output tokens was {tokens.why}")
    if tokens < 2:
        return ()
    return ((last - request.token_ns[0]) / (tokens - 1),)


def itl(request: ServedRequest) -> Maybe[tuple[float, ...]]:
    """Return the gaps between the arrivals of chunks."""
    if not isinstance(request.last_token_ns, Missing):
        return Missing("the generator records the first and the last token only")
    if not request.token_ns:
        return NOT_STREAMED
    return tuple(float(later - earlier) for earlier, later in zip(request.token_ns[:-1], request.token_ns[1:], strict=True))


def e2e(request: ServedRequest) -> Maybe[tuple[float, ...]]:
    """Return the time from sending to the end of the answer."""
    return (float(request.end_ns - request.sent_ns),)


LATENCIES = (
    LatencyDefinition("ttft", "TTFT", "from sending the request to its first token", ttft),
    LatencyDefinition("tpot", "TPOT", "(last token − first token) ÷ (output tokens − 1), per request", tpot),
    LatencyDefinition("itl", "ITL", "each gap between two chunks of one answer; a chunk may hold several tokens", itl),
    LatencyDefinition("e2e", "end-to-end", "from sending the request to the end of its answer", e2e),
)


def values_of(definition: LatencyDefinition, requests: Sequence[ServedRequest]) -> Maybe[list[tuple[float, ...]]]:
    """Return the values of each successful request, or why one has none."""
    found = []
    for request in requests:
        if request.error:
            continue
        values = definition.values(request)
        if isinstance(values, Missing):
            return values
        found.append(values)
    if not any(found):
        return Missing("no request succeeded" if not found else "no request has two output tokens")
    return found


def latency(definition: LatencyDefinition, requests: Sequence[ServedRequest]) -> Maybe[Latency]:
    """Return a latency with its percentiles and their intervals."""
    found = values_of(definition, requests)
    if isinstance(found, Missing):
        return found
    pooled = np.concatenate([np.asarray(values, np.float64) for values in found])
    intervals = _intervals(found, block_of(requests))
    estimates = {name: _estimate(pooled, len(found), name, intervals) for name in SHARES}
    return Latency(definition.key, len(pooled), len(found), float(pooled.mean()), **estimates)


def _estimate(pooled: Floats, requests: int, name: str, intervals: Maybe[dict[str, tuple[float, float]]]) -> Maybe[Estimate]:
    """Return a percentile. It needs enough requests: the gaps of one request depend on each other."""
    needed = least_values(SHARES[name])
    if requests < needed:
        return Missing(f"{name} needs {needed} requests")
    value = float(np.quantile(pooled, SHARES[name]))
    if isinstance(intervals, Missing):
        return Estimate(value, intervals, intervals)
    low, high = intervals[name]
    return Estimate(value, min(low, value), max(high, value))


def block_of(requests: Sequence[ServedRequest]) -> int:
    """Return how many neighboring requests are drawn together: as many as were in flight at a time.

    Requests that share steps of the server have similar latencies, so n of them tell less than n independent ones.
    """
    good = [request for request in requests if not request.error]
    start, end = min((request.sent_ns for request in good), default=0), max((request.end_ns for request in good), default=0)
    if end <= start:
        return 1
    mean = sum(request.end_ns - request.sent_ns for request in good) / (end - start)
    return max(1, min(round(mean), len(good) // LEAST_REQUESTS))


def _intervals(found: Sequence[tuple[float, ...]], block: int) -> Maybe[dict[str, tuple[float, float]]]:
    """Return percentile intervals from a circular block bootstrap over requests; the gaps of a request stay together."""
    count = len(found)
    if count < LEAST_REQUESTS:
        return Missing(f"{count} requests; an interval needs {LEAST_REQUESTS}")
    owner = np.repeat(np.arange(count), [len(values) for values in found])
    pooled = np.concatenate([np.asarray(values, np.float64) for values in found])
    order = np.argsort(pooled, kind="stable")
    pooled, owner = pooled[order], owner[order]
    draws = int(max(LEAST_DRAWS, min(MOST_DRAWS, _WORK // max(1, len(pooled)))))
    generator = np.random.default_rng(_SEED)
    drawn: dict[str, list[Floats]] = {name: [] for name in SHARES}
    at_once = max(1, _AT_ONCE // max(count, len(pooled)))
    for first in range(0, draws, at_once):
        rows = min(at_once, draws - first)
        reached = np.cumsum(_weights(generator, rows, count, block)[:, owner], axis=1)
        for name, share in SHARES.items():
            place = (reached < share * reached[:, -1:]).sum(axis=1)
            drawn[name].append(pooled[np.minimum(place, len(pooled) - 1)])
    tail = (1 - CONFIDENCE) / 2
    found_ends = {name: np.quantile(np.concatenate(values), (tail, 1 - tail)) for name, values in drawn.items()}
    return {name: (float(low), float(high)) for name, (low, high) in found_ends.items()}


def _weights(generator: np.random.Generator, rows: int, count: int, block: int) -> npt.NDArray[np.int64]:
    """Return how often each draw chose each request; blocks wrap around at the end."""
    starts = generator.integers(0, count, (rows, -(-count // block)))
    chosen = ((starts[:, :, None] + np.arange(block)) % count).reshape(rows, -1)[:, :count]
    flat = chosen + count * np.arange(rows)[:, None]
    return np.bincount(flat.ravel(), minlength=rows * count).reshape(rows, count)

"""Whether the load generator did what it was asked: its rate, the spread of its gaps, and how late it sent."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import numpy as np

from llm_perf_opt.analysis.serving.requests import Floats, ttft
from llm_perf_opt.analysis.stats import percentile, student_quantile
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.serving_records import LoadPoint, LoadRecords, ServedRequest

Outcome = Literal["ok", "off", "cannot tell"]

LEVEL = 0.99
"""A generator that works is called off in one check of a hundred."""
EVEN_RATE, EVEN_SPREAD = 0.02, 0.1
"""Tolerances for even gaps, which have no sampling error: of the rate, and of the coefficient of variation."""
LATE_SHARE = 0.1
"""Of the median TTFT. Requests that are sent late hide waiting that their TTFT does not contain."""
STEADY_SHARE = 0.9
"""The least mean number of requests in flight, as a share of the asked one, while requests are being sent."""
LEAST_GAPS = 10


class CheckId(Enum):
    """What is checked."""

    RATE = "issued rate"
    SPREAD = "spread of the gaps"
    DELAY = "send delay"
    IN_FLIGHT = "requests in flight"


@dataclass(frozen=True)
class GeneratorCheck:
    """One check of the generator."""

    id: CheckId
    outcome: Outcome
    found: Maybe[float]
    """Requests per second; coefficient of variation; nanoseconds; requests."""
    low: Maybe[float]
    """What would be ok, from here …"""
    high: Maybe[float]
    """… to here."""
    n: int
    why: str = ""
    """Why it cannot be told."""


def generator_checks(load: LoadRecords, point: LoadPoint) -> tuple[GeneratorCheck, ...]:
    """Check one load against what was asked."""
    requests, asked, arrival = load.requests, point.asked, point.arrival
    if load.clock == "none":
        why = "the file does not say when requests were sent"
        return tuple(_unknown(check, why) for check in (CheckId.RATE, CheckId.SPREAD))
    delay = _delay_check(requests)
    if point.kind == "concurrency":
        return (_in_flight_check(requests, asked), delay) if arrival == "closed" else (delay,)
    if arrival == "burst":  # everything at once: there is no rate, and there are no gaps
        return (delay,)
    gaps = np.diff(np.sort([request.sent_ns for request in requests])).astype(np.float64)
    if len(gaps) < LEAST_GAPS or not gaps.sum():
        why = f"{len(gaps)} gaps between requests; a check needs {LEAST_GAPS}"
        return _unknown(CheckId.RATE, why), _unknown(CheckId.SPREAD, why), delay
    return _rate_check(point, gaps), _spread_check(point, gaps), delay


def _rate_check(point: LoadPoint, gaps: Floats) -> GeneratorCheck:
    if "asked" in point.unrecorded:
        return _unknown(CheckId.RATE, "the file does not name the asked rate")
    issued = len(gaps) * 1e9 / float(gaps.sum())
    low, high = _poisson_reach(len(gaps)) if point.arrival == "poisson" else (1 - EVEN_RATE, 1 + EVEN_RATE)
    return _judged(CheckId.RATE, issued, point.asked * low, point.asked * high, len(gaps))


def _poisson_reach(gaps: int) -> tuple[float, float]:
    """Return the interval of issued ÷ asked rate for Poisson arrivals: the sum of n exponential gaps has a gamma distribution.

    Its quantiles are Wilson and Hilferty's approximation, within 1 % from ten gaps on.
    """
    quantile, spread = student_quantile((1 + LEVEL) / 2, None), 1 / (9 * gaps)
    longest, shortest = ((1 - spread + sign * quantile * math.sqrt(spread)) ** 3 for sign in (1, -1))
    return 1 / longest, 1 / shortest


def _spread_check(point: LoadPoint, gaps: Floats) -> GeneratorCheck:
    if "arrival" in point.unrecorded:
        return _unknown(CheckId.SPREAD, "the file does not say how requests were to arrive")
    spread = float(gaps.std(ddof=1) / gaps.mean())
    # The coefficient of variation of n exponential gaps has a standard error of 1/√n.
    error = student_quantile((1 + LEVEL) / 2, None) / math.sqrt(len(gaps))
    low, high = (1 - error, 1 + error) if point.arrival == "poisson" else (0.0, EVEN_SPREAD)
    return _judged(CheckId.SPREAD, spread, low, high, len(gaps))


def issued_rate(load: LoadRecords) -> Maybe[float]:
    """Return the requests per second that were sent, from the first to the last."""
    sent = [request.sent_ns for request in load.requests]
    if load.clock == "none":
        return Missing("the file does not say when requests were sent")
    if len(sent) < 2 or max(sent) == min(sent):
        return Missing(f"{len(sent)} requests have no rate")
    return (len(sent) - 1) * 1e9 / (max(sent) - min(sent))


def _judged(check: CheckId, found: float, low: float, high: float, n: int) -> GeneratorCheck:
    return GeneratorCheck(check, "ok" if low <= found <= high else "off", found, max(low, 0.0), high, n)


def _unknown(check: CheckId, why: str) -> GeneratorCheck:
    missing = Missing(why)
    return GeneratorCheck(check, "cannot tell", missing, missing, missing, 0, why)


def _delay_check(requests: Sequence[ServedRequest]) -> GeneratorCheck:
    """Compare the median delay between the planned and the real start with the median TTFT."""
    delays = [
        float(request.sent_ns - request.scheduled_ns) for request in requests if not isinstance(request.scheduled_ns, Missing)
    ]
    first = [values[0] for request in requests if not request.error and not isinstance(values := ttft(request), Missing)]
    if not delays:
        return _unknown(CheckId.DELAY, "the generator does not record when it meant to send")
    if not first:
        return _unknown(CheckId.DELAY, "there is no TTFT to compare it with")
    return _judged(CheckId.DELAY, percentile(delays, 0.5), -math.inf, LATE_SHARE * percentile(first, 0.5), len(delays))


def _in_flight_check(requests: Sequence[ServedRequest], asked: float) -> GeneratorCheck:
    """Compare the mean number of requests in flight, while requests were being sent, with the asked one."""
    start, end = min(request.sent_ns for request in requests), max(request.sent_ns for request in requests)
    if end <= start:
        return _unknown(CheckId.IN_FLIGHT, "all requests were sent at once")
    open_ns = sum(max(0, min(request.end_ns, end) - request.sent_ns) for request in requests)
    return _judged(CheckId.IN_FLIGHT, open_ns / (end - start), STEADY_SHARE * asked, asked * (1 + EVEN_RATE), len(requests))

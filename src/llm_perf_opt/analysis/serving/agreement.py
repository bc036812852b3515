"""Whether the generator's own summary and ours agree, and what explains a difference."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from llm_perf_opt.analysis.serving.requests import LATENCIES, SHARES, tpot_with, values_of
from llm_perf_opt.analysis.stats import percentile
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.serving_records import LoadRecords

SAME = 1e-6
"""Relative difference that rounding explains."""
ROUNDED = 1e-4
"""Relative difference that the rounding of a recorded duration explains: AIPerf writes microseconds."""
RESOLUTION_NS = 1000.0
"""Unix seconds in a 64-bit float have a resolution of 0.24 µs; a latency is a difference of two."""


class Agreement(Enum):
    """How a figure of the generator relates to ours."""

    SAME = "the same"
    RETOKENIZED = "it counts tokens with its own tokenizer, not as the server does"
    RANK = "it takes one of the two neighboring values instead of interpolating between them"
    WINDOW = "it divides by the time that it took itself, which starts before the first request or ends after the last"
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True)
class AgreedFigure:
    """A figure of the generator's summary next to ours."""

    key: str
    statistic: str
    ours: Maybe[float]
    own: float
    """Nanoseconds, or 1/s."""
    agreement: Maybe[Agreement]


def agreement(load: LoadRecords, request_rate: Maybe[float], output_rate: Maybe[float]) -> tuple[AgreedFigure, ...]:
    """Compare every figure that the generator's summary has."""
    found = []
    for definition in LATENCIES:
        values = values_of(definition, load.requests)
        pooled = values if isinstance(values, Missing) else [value for each in values for value in each]
        for statistic, own in load.own.get(definition.key, {}).items():
            found.append(_latency(load, definition.key, statistic, pooled, own))
    for key, ours in (("request_rate", request_rate), ("output_rate", output_rate)):
        own_rate = load.own.get(key, {}).get("mean")
        if own_rate is not None:
            found.append(AgreedFigure(key, "mean", ours, own_rate, _rate_agreement(load, key, ours, own_rate)))
    return tuple(found)


def _latency(load: LoadRecords, key: str, statistic: str, values: Maybe[list[float]], own: float) -> AgreedFigure:
    if isinstance(values, Missing):
        return AgreedFigure(key, statistic, values, own, values)
    ours = _statistic(values, statistic)
    if _same(ours, own):
        found = Agreement.SAME
    elif key == "tpot" and _same(_statistic(_retokenized(load), statistic), own):
        found = Agreement.RETOKENIZED
    elif statistic in SHARES and any(_same(value, own) for value in _neighbors(values, SHARES[statistic])):
        found = Agreement.RANK
    else:
        found = Agreement.UNEXPLAINED
    return AgreedFigure(key, statistic, ours, own, found)


def _statistic(values: Sequence[float], name: str) -> float:
    if not values:
        return math.nan
    return math.fsum(values) / len(values) if name == "mean" else percentile(values, SHARES[name])


def _retokenized(load: LoadRecords) -> list[float]:
    """Return the TPOT of each request with the generator's count of tokens."""
    found = [tpot_with(request, request.client_tokens) for request in load.requests if not request.error]
    return [value for values in found if not isinstance(values, Missing) for value in values]


def _neighbors(values: Sequence[float], share: float) -> list[float]:
    """Return the values around a percentile; which of them is chosen depends on the definition."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    return [ordered[index] for index in range(math.floor(place), min(math.ceil(place) + 2, len(ordered)))]


def _same(ours: float, own: float) -> bool:
    return math.isclose(ours, own, rel_tol=SAME, abs_tol=RESOLUTION_NS)


def _rate_agreement(load: LoadRecords, key: str, ours: Maybe[float], own: float) -> Maybe[Agreement]:
    """Return why a rate differs: the same amount over the time that the generator recorded, or its own count of tokens."""
    if isinstance(ours, Missing):
        return ours
    if math.isclose(ours, own, rel_tol=SAME):
        return Agreement.SAME
    good = [request for request in load.requests if not request.error]
    amounts: dict[Agreement, Sequence[Maybe[int]]] = {
        Agreement.WINDOW: [1] * len(good) if key == "request_rate" else [request.output_tokens for request in good]
    }
    if key == "output_rate":
        amounts[Agreement.RETOKENIZED] = [request.client_tokens for request in good]
    for reason, counts in amounts.items():
        known = [count for count in counts if not isinstance(count, Missing)]
        if good and len(known) == len(good) and _is_over(sum(known), load, own, reason):
            return reason
    return Agreement.UNEXPLAINED


def _is_over(amount: int, load: LoadRecords, own: float, reason: Agreement) -> bool:
    """Return whether a rate is this amount over the time that the generator took; tokens of its own also over our time."""
    window = max(request.end_ns for request in load.requests) - min(request.sent_ns for request in load.requests)
    times = [load.duration_s] if reason is Agreement.WINDOW else [load.duration_s, window / 1e9]
    return any(not isinstance(time, Missing) and time > 0 and math.isclose(amount / time, own, rel_tol=ROUNDED) for time in times)

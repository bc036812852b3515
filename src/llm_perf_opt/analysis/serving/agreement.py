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
RESOLUTION_NS = 1000.0
"""Unix seconds in a 64-bit float have a resolution of 0.24 µs; a latency is a difference of two."""


class Agreement(Enum):
    """How a figure of the generator relates to ours."""

    SAME = "the same"
    RETOKENIZED = "it counts tokens with its own tokenizer, not as the server does"
    RANK = "it takes one of the two neighboring values instead of interpolating between them"
    WINDOW = "it divides by a longer time, which starts before the first request or ends after the last"
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
    if isinstance(ours, Missing):
        return ours
    if math.isclose(ours, own, rel_tol=SAME):
        return Agreement.SAME
    if key == "output_rate":
        counts = [(request.output_tokens, request.client_tokens) for request in load.requests if not request.error]
        server = sum(count for count, _ in counts if not isinstance(count, Missing))
        client = sum(count for _, count in counts if not isinstance(count, Missing))
        if server and client and client != server:
            return Agreement.RETOKENIZED if own <= ours * client / server * (1 + SAME) else Agreement.UNEXPLAINED
    return Agreement.WINDOW if own < ours else Agreement.UNEXPLAINED

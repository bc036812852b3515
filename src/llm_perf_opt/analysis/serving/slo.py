"""Goodput: the requests per second that meet every limit of a service-level objective."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llm_perf_opt.analysis.serving.requests import LATENCIES
from llm_perf_opt.analysis.stats import CONFIDENCE, student_quantile
from llm_perf_opt.core.errors import ConfigError, nearest
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.serving_records import ServedRequest
from llm_perf_opt.core.units import duration

_LIMIT = re.compile(r"(?P<key>[a-z0-9]+)\s*=\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>ms|s|us|µs)")
_UNITS = {"s": 1e9, "ms": 1e6, "us": 1e3, "µs": 1e3}
_KEYS = tuple(definition.key for definition in LATENCIES)
NO_SLO = Missing("no objective was given; --slo ttft=200ms,tpot=20ms gives one")


@dataclass(frozen=True)
class Slo:
    """A limit in nanoseconds per latency; for ITL, of the longest gap."""

    limits: dict[str, int]

    @property
    def words(self) -> str:
        """The limits as text."""
        labels = {definition.key: definition.label for definition in LATENCIES}
        return ", ".join(f"{labels[key]} ≤ {duration(limit, 3)}" for key, limit in self.limits.items())


@dataclass(frozen=True)
class Goodput:
    """The requests that met the objective."""

    good: int
    requests: int
    """All that can be judged: failed ones do not meet it, and neither do those that were cut after they had exceeded a limit."""
    share: float
    share_low: float
    """95 % interval of the share (Wilson)."""
    share_high: float
    rate: Maybe[float]
    """Per second."""
    undecided: int = 0
    """Others that the end of the measurement cut: they might have met it or not."""


def parse_slo(text: str) -> Slo:
    """Return an objective from `ttft=200ms,tpot=20ms`."""
    limits: dict[str, int] = {}
    for part in (part.strip() for part in text.split(",")):
        found = _LIMIT.fullmatch(part)
        if not found:
            raise ConfigError(f"--slo: {part[:60]!r} is not KEY=TIME.", "Write --slo ttft=200ms,tpot=20ms,e2e=2s.")
        if found["key"] not in _KEYS:
            raise ConfigError(
                f"--slo: there is no latency {found['key']!r}.{nearest(found['key'], _KEYS)}", f"Known: {', '.join(_KEYS)}."
            )
        if found["key"] in limits:
            raise ConfigError(f"--slo: {found['key']} has two limits.", "Give one.")
        limits[found["key"]] = round(float(found["number"]) * _UNITS[found["unit"]])
        if limits[found["key"]] <= 0:
            raise ConfigError(f"--slo: {part} can never be met.", "Give a time above zero.")
    return Slo(limits)


def recorded_slo(limits: Mapping[str, int]) -> Maybe[Slo]:
    """Return the objective that a run recorded; limits of unknown latencies are left out."""
    known = {key: limit for key, limit in limits.items() if key in _KEYS and limit > 0}
    return Slo(known) if known else NO_SLO


def goodput(requests: Sequence[ServedRequest], slo: Maybe[Slo], window_ns: Maybe[int]) -> Maybe[Goodput]:
    """Return how many requests met the objective, and how many per second."""
    if isinstance(slo, Missing):
        return slo
    judged = [request for request in requests if not request.cut or _exceeded(request, slo)]
    if not judged:
        return Missing("no request was sent" if not requests else "the measurement ended before any request did")
    good = 0
    for request in judged:
        met = meets(request, slo)
        if isinstance(met, Missing):
            return met
        good += met
    low, high = share_interval(good, len(judged))
    rate = window_ns if isinstance(window_ns, Missing) else good * 1e9 / window_ns
    return Goodput(good, len(judged), good / len(judged), low, high, rate, undecided=len(requests) - len(judged))


def _exceeded(request: ServedRequest, slo: Slo) -> bool:
    """Return whether a request that was cut had exceeded a limit. Without token times, its TTFT is unknown."""
    limits = slo.limits
    late = bool(request.token_ns) and request.token_ns[0] - request.sent_ns > limits.get("ttft", math.inf)
    return late or request.end_ns - request.sent_ns > limits.get("e2e", math.inf)


def meets(request: ServedRequest, slo: Slo) -> Maybe[bool]:
    """Return whether a request met every limit. A failed one did not; a single token has no TPOT to exceed."""
    if request.error:
        return False
    for definition in LATENCIES:
        if definition.key in slo.limits:
            values = definition.values(request)
            if isinstance(values, Missing):
                return Missing(f"{definition.label}: {values.why}")
            if any(value > slo.limits[definition.key] for value in values):
                return False
    return True


def share_interval(count: int, total: int) -> tuple[float, float]:
    """Return Wilson's interval of a share."""
    quantile = student_quantile((1 + CONFIDENCE) / 2, None)
    share, square = count / total, quantile**2
    middle = (share + square / (2 * total)) / (1 + square / total)
    half = quantile * math.sqrt(share * (1 - share) / total + square / (4 * total**2)) / (1 + square / total)
    return max(0.0, middle - half), min(1.0, middle + half)

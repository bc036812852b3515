"""Choose the rates to try: double until the server falls behind, then bisect towards the knee."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from llm_perf_opt.analysis.serving.knee import GOOD_SHARE, KEEPS_UP, MOST_FAILED
from llm_perf_opt.analysis.serving.points import kept_up
from llm_perf_opt.analysis.serving.slo import Slo, goodput
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.serving_records import LoadRecords

CLOSE = 1.15
"""The search ends when the lowest rate that was too high is at most this much above the highest that was not."""
_DIGITS = 3


@dataclass(frozen=True)
class Judgment:
    """Whether the server kept up with a load."""

    kept_up: bool
    sent: int
    failed: int


def judge(records: LoadRecords, slo: Maybe[Slo]) -> Judgment:
    """Return whether a server kept up: with an SLO if enough requests met it, without if it completed as many as were sent."""
    requests = records.requests
    failed = sum(bool(request.error) for request in requests)
    met = goodput(requests, slo, Missing("not needed"))
    ratio = kept_up(records)
    if not isinstance(met, Missing):
        good = met.share >= GOOD_SHARE
    else:
        good = failed <= MOST_FAILED * len(requests) and not isinstance(ratio, Missing) and ratio >= KEEPS_UP
    return Judgment(good and failed < len(requests), len(requests), failed)


def first_rate(request_s: float) -> float:
    """Return the first rate to try: one request at a time on average."""
    return _rounded(1 / max(request_s, 1e-3))


def next_rate(tried: Mapping[float, bool], most: int) -> float | None:
    """Return the rate to try after these (rate → kept up), or None if the knee is known well enough or `most` were tried."""
    if len(tried) >= most:
        return None
    low, high = knee(tried)
    if high is None:
        return _rounded(max(tried) * 2)
    if low is None:
        return _rounded(min(tried) / 2)
    middle = _rounded(math.sqrt(low * high))
    return None if high / low <= CLOSE or middle in tried else middle


def knee(tried: Mapping[float, bool]) -> tuple[float | None, float | None]:
    """Return the highest rate below the knee and the lowest above it; None where there is none."""
    high = min((rate for rate, kept_up in tried.items() if not kept_up), default=None)
    low = max((rate for rate, kept_up in tried.items() if kept_up and (high is None or rate < high)), default=None)
    return low, high


def _rounded(rate: float) -> float:
    return float(f"{rate:.{_DIGITS}g}")

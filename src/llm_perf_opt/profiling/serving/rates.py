"""Choose the rates to try: double until the server falls behind, then bisect towards the knee."""

import math
from collections.abc import Mapping

from llm_perf_opt.analysis.serving.outcome import RESOLVED

_DIGITS = 3


def first_rate(request_s: float) -> float:
    """Return the first rate to try: one request at a time on average."""
    return _rounded(1 / max(request_s, 1e-3))


def next_rate(tried: Mapping[float, bool], most: int) -> float | None:
    """Return the rate to try after these (rate → carried), or None if the knee is known well enough or `most` were tried."""
    if len(tried) >= most:
        return None
    low, high = knee(tried)
    if high is None:
        return _rounded(max(tried) * 2)
    if low is None:
        return _rounded(min(tried) / 2)
    middle = _rounded(math.sqrt(low * high))
    return None if high / low <= RESOLVED or middle in tried else middle


def knee(tried: Mapping[float, bool]) -> tuple[float | None, float | None]:
    """Return the highest rate below the knee and the lowest above it; None where there is none."""
    high = min((rate for rate, carried in tried.items() if not carried), default=None)
    low = max((rate for rate, carried in tried.items() if carried and (high is None or rate < high)), default=None)
    return low, high


def _rounded(rate: float) -> float:
    return float(f"{rate:.{_DIGITS}g}")

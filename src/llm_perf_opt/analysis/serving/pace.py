"""Whether requests end as fast as they are sent, from how their end-to-end time changes while requests are being sent.

If requests are sent at a rate λ and a server completes μ of them per second, each one waits longer than the one before: its
end-to-end time grows by λ/μ − 1 seconds per second. The slope shows this no matter how long the answers are, and needs neither
a server that was full from the start nor the time after the last request, in which fewer and fewer run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llm_perf_opt.analysis.serving.requests import Estimate, Floats
from llm_perf_opt.analysis.stats import CONFIDENCE, student_quantile
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.serving_records import Arrival, LoadRecords, ServedRequest
from llm_perf_opt.core.units import counted, percentage

STEADY_TIMES = 3.0
"""How many times the median end-to-end time requests must be sent for: until then, the server fills."""
LASTING_TIMES = 10.0
"""How many times the first requests' end-to-end time requests must be sent for before growing times mean that the server falls
behind: while it fills, its steps take longer and longer too."""
FILLING = 0.2
"""Share of the sending time that is left out at the start."""
GROUPS, LEAST_IN_GROUP, LEAST_GROUPS = 10, 5, 4
"""The requests are divided into so many groups by their start, whose means show the spread."""
WALK = 1.2
"""The variance of the fitted slope of a random walk ÷ that of its mean step (Durlauf and Phillips, Econometrica 1988)."""
_FIRST = 10
_LEAST_SLOPE = -0.5
"""Times that fall faster than this come from a rush at the start, not from the pace."""


@dataclass(frozen=True)
class Pace:
    """How a load went on while requests were being sent."""

    kept_up: Maybe[Estimate]
    """The rate at which requests end ÷ the rate at which they were sent, as issued, with its 95 % interval."""
    short: bool
    """Whether requests were sent for less than `STEADY_TIMES` the median end-to-end time."""
    lasting: bool
    """Whether they were sent for at least `LASTING_TIMES` the median end-to-end time of the first ones."""


def pace_of(records: LoadRecords, arrival: Arrival) -> Pace:
    """Return the pace of a load. Requests that were sent after the first one that the end of the measurement cut are left out."""
    if records.clock == "none":
        return Pace(Missing("the file does not say when requests were sent"), short=False, lasting=False)
    first_cut = min((request.sent_ns for request in records.requests if request.cut), default=math.inf)
    good = [request for request in records.requests if not request.error and request.sent_ns < first_cut]
    good.sort(key=lambda request: request.sent_ns)
    if not good:
        return Pace(Missing("no request succeeded"), short=False, lasting=False)
    sending = good[-1].sent_ns - good[0].sent_ns
    short = arrival != "burst" and sending < STEADY_TIMES * _median_e2e(good)
    kept_up = _kept_up(good, arrival)
    if short and not isinstance(kept_up, Missing) and _at_least(kept_up.low, 1):
        kept_up = Missing("requests were sent for too short a time for a steady state")  # those of a first rush wait longest
    return Pace(
        kept_up=kept_up,
        short=short,
        lasting=sending >= LASTING_TIMES * _median_e2e(good[:_FIRST]),
    )


def _at_least(value: Maybe[float], least: float) -> bool:
    return not isinstance(value, Missing) and value >= least


def _median_e2e(requests: Sequence[ServedRequest]) -> float:
    return float(np.median([request.end_ns - request.sent_ns for request in requests]))


def _kept_up(good: Sequence[ServedRequest], arrival: Arrival) -> Maybe[Estimate]:
    if arrival in ("closed", "burst"):
        return Missing("requests were not sent at a rate of their own")
    sent = np.asarray([request.sent_ns - good[0].sent_ns for request in good], np.float64)
    took = np.asarray([request.end_ns - request.sent_ns for request in good], np.float64)
    kept = sent >= FILLING * sent[-1]
    groups = min(GROUPS, int(kept.sum()) // LEAST_IN_GROUP)
    if groups < LEAST_GROUPS:
        needed, found = LEAST_GROUPS * LEAST_IN_GROUP, int(kept.sum())
        return Missing(
            f"{counted(found, 'request')} succeeded after the first {percentage(FILLING)} of the sending time; it needs {needed}"
        )
    return _from_slope(sent[kept], took[kept], groups)


def _from_slope(sent: Floats, took: Floats, groups: int) -> Maybe[Estimate]:
    """Return 1 / (1 + slope) with its interval."""
    times, means = (np.asarray([part.mean() for part in np.array_split(values, groups)]) for values in (sent, took))
    around = sent - sent.mean()
    if not around.any() or (np.diff(times) <= 0).any():
        return Missing("the requests were sent at once")
    slope = float(around @ took / (around @ around))
    noise = float((np.diff(took - slope * sent) ** 2).mean()) / 2
    middle = times - times.mean()
    rest = means - means.mean() - middle * float(middle @ means / (middle @ middle))
    scatter = float(rest @ rest) / (groups - 2) / float(middle @ middle)
    variance = max(scatter, noise / float(around @ around) + _walk(times, means, noise * groups / len(sent)))
    error = student_quantile((1 + CONFIDENCE) / 2, groups - 2) * math.sqrt(variance)
    value, least, most = (1 / (1 + max(rise, _LEAST_SLOPE)) for rise in (slope, slope + error, slope - error))
    return Estimate(value, least, most)


def _walk(times: Floats, means: Floats, noise: float) -> float:
    """Return the variance of the slope that comes from a queue that grows and shrinks. `noise`: the variance of a group's mean.

    Times of such a queue depend on those before, like those of a random walk. The steps from group to group show how far it
    goes; two means contribute their noise to each step.
    """
    steps, gap = np.diff(means) / np.diff(times), float(np.diff(times).mean())
    return WALK * max(0.0, float(steps.var(ddof=1)) - 2 * noise / gap**2) / len(steps)

"""Whether a server carries a load: the one definition, for the search of `llm-perf serve` and for the report.

A verdict is yes, no, or Missing with the reason why it cannot be told.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from llm_perf_opt.analysis.serving.pace import LASTING_TIMES, STEADY_TIMES, pace_of
from llm_perf_opt.analysis.serving.requests import Estimate
from llm_perf_opt.analysis.serving.slo import Goodput, Slo, goodput, share_interval
from llm_perf_opt.analysis.stats import least_values
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.serving_records import LoadPoint, LoadRecords
from llm_perf_opt.core.units import percentage

KEEPS_UP = 0.95
"""The least ratio of the rates at which requests end and are sent at which a server keeps up."""
RESOLVED = 1.15
"""A load is carried only if it can be excluded that it is so many times what the server completes. The search for the knee ends
when the loads on both sides of it are this close."""
GOOD_SHARE = 0.9
"""The share of requests that must meet the objective, as in DistServe (OSDI 2024)."""
MOST_FAILED = 0.05
GAIN = 0.5
"""Of a closed loop: the least growth of the throughput, relative to that of the concurrency (both as logarithms)."""

_SHORT = Missing(
    f"requests were sent for less than {STEADY_TIMES:g} times their end-to-end time, too short for a steady state; send more"
)
_FILLING = Missing(
    f"requests take longer and longer, but were sent for less than {LASTING_TIMES:g} times the time of the first ones, in which "
    "the server fills; send more"
)


class Criterion(Enum):
    """What a load must fulfill to be carried."""

    THROUGHPUT = "throughput"
    OBJECTIVE = "objective"
    FAILURES = "failures"


@dataclass(frozen=True)
class LoadOutcome:
    """What decides whether a load was carried."""

    point: LoadPoint
    requests: int
    """All that were sent."""
    failed: int
    cut: int
    """Stopped by the end of the measurement: neither succeeded nor failed."""
    kept_up: Maybe[Estimate]
    short: bool
    lasting: bool
    steady_rate: Maybe[float]
    """Output tokens per second from the first end to the last start, while a closed loop is full."""
    goodput: Maybe[Goodput]
    objective: bool
    """Whether there is an objective."""

    @property
    def failed_share(self) -> float:
        """The share of requests that failed, of those that ended."""
        ended = self.requests - self.cut
        return self.failed / ended if ended else 0.0


@dataclass(frozen=True)
class Verdict:
    """Whether the server carried one load."""

    number: int
    load: float
    carried: Maybe[bool]
    broken: tuple[Criterion, ...] = ()
    """The criteria that it did not fulfill."""


def outcome_of(point: LoadPoint, records: LoadRecords, slo: Maybe[Slo]) -> LoadOutcome:
    """Return what decides about a load."""
    pace = pace_of(records, point.arrival)
    return LoadOutcome(
        point=point,
        requests=len(records.requests),
        failed=sum(request.failed for request in records.requests),
        cut=sum(request.cut for request in records.requests),
        kept_up=pace.kept_up,
        short=pace.short,
        lasting=pace.lasting,
        steady_rate=_steady_rate(records),
        goodput=goodput(records.requests, slo, window_of(records)),
        objective=not isinstance(slo, Missing),
    )


def window_of(records: LoadRecords) -> Maybe[int]:
    """Return the time from the first start to the last end."""
    if records.clock == "none":
        return Missing("the file does not say when requests were sent")
    start = min((request.sent_ns for request in records.requests), default=0)
    end = max((request.end_ns for request in records.requests), default=0)
    return end - start if end > start else Missing("the requests took no time")


def _steady_rate(records: LoadRecords) -> Maybe[float]:
    """Return the output tokens per second while a closed loop is full: from the first end to the last start.

    The tokens of a request count evenly from its start to its end. Requests that all end at the same time would otherwise count
    at the first end, though they were produced before it.
    """
    good = [request for request in records.requests if not request.error]
    if records.clock == "none" or not good:
        return Missing("no request succeeded" if not good else "the file does not say when requests were sent")
    start, end = min(request.end_ns for request in good), max(request.sent_ns for request in good)
    tokens = 0.0
    for request in good:
        if isinstance(request.output_tokens, Missing):
            return Missing("the number of output tokens was not recorded")
        inside = min(request.end_ns, end) - max(request.sent_ns, start)
        if inside > 0:
            tokens += request.output_tokens * inside / (request.end_ns - request.sent_ns)
    return tokens * 1e9 / (end - start) if tokens else Missing("all requests were sent before the first one ended")


def verdict(load: LoadOutcome, lower: Sequence[LoadOutcome] = ()) -> Verdict:
    """Return whether a load was carried. `lower`: the smaller loads of the same kind, in order.

    What is broken stays broken in a load that was too short or ended early: its requests met a server that was still filling.
    What cannot be judged leaves the verdict open.
    """
    point = load.point
    judged = {
        Criterion.THROUGHPUT: _gains(load, lower) if point.kind == "concurrency" else _keeps_up(load),
        Criterion.FAILURES: _succeeds(load),
    }
    if load.objective:
        judged[Criterion.OBJECTIVE] = _is_good(load)
    broken = tuple(criterion for criterion, fulfilled in judged.items() if fulfilled is False)
    reasons = [value for value in judged.values() if isinstance(value, Missing)]
    if point.status != "complete":
        reasons.insert(0, Missing(f"the load is {point.status}: {point.why.strip().rstrip('.') or 'it did not end'}"))
    carried: Maybe[bool] = False if broken else reasons[0] if reasons else True
    return Verdict(point.number, point.asked, carried, broken)


def _keeps_up(load: LoadOutcome) -> Maybe[bool]:
    found = load.kept_up
    if isinstance(found, Missing):
        return _SHORT if load.short else found
    low, high = found.low, found.high
    if isinstance(low, Missing) or isinstance(high, Missing):
        return Missing("the ratio of the rates has no interval")
    if high < 1 and found.value < KEEPS_UP:
        return False if load.lasting else _FILLING
    if load.short:
        return _SHORT
    if low >= 1 / RESOLVED:
        return True
    share = f"{percentage(low)} to {percentage(high)}"
    return Missing(f"requests end at {share} of the rate at which they are sent (95 % interval): too uncertain; send more")


def _gains(load: LoadOutcome, lower: Sequence[LoadOutcome]) -> Maybe[bool]:
    """Return whether more requests at a time still raised the throughput, relative to the next load that is clearly smaller."""
    if load.short:
        return _SHORT
    smaller = [each for each in lower if each.point.asked < load.point.asked]
    before = next((each for each in reversed(smaller) if each.point.asked * RESOLVED <= load.point.asked), None)
    if before is None:
        close = Missing(f"the smaller loads differ by less than {percentage(RESOLVED - 1)}: too close to compare")
        return close if smaller else True
    if before.short or before.point.status != "complete":
        return Missing(f"the load before it, {before.point.asked:g} at a time, was too short or is not complete")
    now, then = load.steady_rate, before.steady_rate
    if isinstance(now, Missing):
        return now
    if isinstance(then, Missing):
        return then
    return math.log(now / then) / math.log(load.point.asked / before.point.asked) >= GAIN


def _succeeds(load: LoadOutcome) -> Maybe[bool]:
    """Return whether few enough requests failed; of few requests, only what their interval excludes is decided."""
    ended, needed = load.requests - load.cut, least_values(1 - MOST_FAILED)
    if load.failed_share <= MOST_FAILED:
        return True
    if ended >= needed or share_interval(load.failed, ended)[0] > MOST_FAILED:
        return False
    return Missing(f"{load.failed} of {ended} requests failed; whether that is typical needs {needed} requests")


def _is_good(load: LoadOutcome) -> Maybe[bool]:
    """Return whether enough requests met the objective, whatever would have become of those that were cut."""
    found = load.goodput
    if isinstance(found, Missing):
        return Missing(f"the objective cannot be judged: {found.why}")
    total = found.requests + found.undecided
    if _enough(found.good, total) is True:
        return True
    if _enough(found.good + found.undecided, total) is False:
        return False
    if found.undecided:
        words = f"{found.good} of {total} requests met it, and {found.undecided} were cut before it was decided"
        return Missing(f"the objective cannot be judged: {words}")
    return Missing(f"the objective cannot be judged: {total} requests; it needs {least_values(GOOD_SHARE)}")


def _enough(good: int, total: int) -> bool | None:
    """Return whether so many good requests are enough; of few requests, only what their interval excludes is decided."""
    low, high = share_interval(good, total)
    decided = total >= least_values(GOOD_SHARE) or not low < GOOD_SHARE <= high
    return good / total >= GOOD_SHARE if decided else None

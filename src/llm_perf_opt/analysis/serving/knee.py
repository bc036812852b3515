"""The knee of the saturation curve: the largest load that the server carries, and why it does not carry more."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from llm_perf_opt.analysis.serving.breakdown import known_parts
from llm_perf_opt.analysis.serving.points import PointAnalysis
from llm_perf_opt.analysis.serving.requests import Latency
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.serving_records import LoadKind

KEEPS_UP = 0.95
"""The least ratio of the rates at which requests end and are sent at which a server keeps up."""
GOOD_SHARE = 0.9
"""The share of requests that must meet the objective, as in DistServe (OSDI 2024)."""
MOST_FAILED = 0.05
GAIN = 0.5
"""Of a closed loop: the least growth of the throughput, relative to that of the concurrency (both as logarithms)."""
FULL_CACHE = 0.95
LONGER_STEP = 1.2
"""Growth of the median gap between tokens, relative to the lowest load, that counts as a longer step."""
LATER_START = 2.0
"""Growth of the median TTFT, relative to the lowest load, that counts as waiting if no metrics were sampled."""
MAIN_PART = 0.4
"""Share of the added time of a request that one part must have to be named."""
LEVEL_RUNNING = 0.9
"""Requests run at a limit if, while others wait, at least this share of the most ever seen runs."""


class Criterion(Enum):
    """What a load must fulfill to be carried."""

    THROUGHPUT = "throughput"
    OBJECTIVE = "objective"
    FAILURES = "failures"


class CauseId(Enum):
    """Why the server does not carry more."""

    QUEUE = "requests wait"
    BATCH_LIMIT = "the batch is full"
    KV_CACHE = "the KV cache is full"
    PREEMPTIONS = "requests are preempted"
    LONGER_STEPS = "steps take longer"
    LONGER_TTFT = "the first token takes longer"
    LONGER_PART = "one part of a request takes longer"
    REFUSED = "requests fail"
    GENERATOR = "the generator is off"


@dataclass(frozen=True)
class Cause:
    """One reason, with the figures that show it."""

    id: CauseId
    figures: dict[str, float]
    """What was seen, by name; units are in the names."""


@dataclass(frozen=True)
class Verdict:
    """Whether the server carried one load."""

    number: int
    load: float
    carried: Maybe[bool]
    broken: tuple[Criterion, ...] = ()
    """The criteria that it did not fulfill."""


@dataclass(frozen=True)
class Knee:
    """Where the server stops to carry the load."""

    kind: LoadKind
    status: Literal["found", "above", "below"]
    """Between two loads, above the largest or below the smallest one."""
    carried: Maybe[float]
    """The largest load that was carried, as were all lower ones."""
    not_carried: Maybe[float]
    """The next larger load."""
    broken: tuple[Criterion, ...]
    causes: tuple[Cause, ...]
    verdicts: tuple[Verdict, ...]


def find_knee(points: Sequence[PointAnalysis], slots: Maybe[int]) -> Maybe[Knee]:
    """Return the knee over loads of one kind. `slots`: requests that the server runs at a time, if it was told."""
    measured = [point for point in points if not point.point.profiled and point.unusable is None]
    kinds = {point.point.kind for point in measured}
    if len(kinds) > 1:
        return Missing("the loads are rates and concurrencies; a curve needs one kind")
    ordered = sorted(measured, key=lambda point: point.point.asked)
    if len({point.point.asked for point in ordered}) < 2:
        return Missing("a knee needs two different loads")
    verdicts = [_verdict(point, ordered[:place]) for place, point in enumerate(ordered)]
    unknown = next((verdict.carried for verdict in verdicts if isinstance(verdict.carried, Missing)), None)
    broken = next((place for place, verdict in enumerate(verdicts) if verdict.carried is False), None)
    if broken is None:
        if unknown is not None:
            return Missing(unknown.why)
        return Knee(ordered[0].point.kind, "above", ordered[-1].point.asked, _ALL, (), (), tuple(verdicts))
    found = ordered[broken]
    carried = [verdict.load for verdict in verdicts[:broken] if verdict.carried is True]
    return Knee(
        kind=found.point.kind,
        status="found" if carried else "below",
        carried=max(carried) if carried else Missing("no smaller load was carried"),
        not_carried=found.point.asked,
        broken=verdicts[broken].broken,
        causes=causes(found, ordered[0], slots),
        verdicts=tuple(verdicts),
    )


_ALL = Missing("every load was carried")


def _verdict(point: PointAnalysis, lower: Sequence[PointAnalysis]) -> Verdict:
    """Return whether a load was carried. A criterion that cannot be judged leaves it open unless another one is broken."""
    judged = {
        Criterion.THROUGHPUT: _gains(point, lower) if point.point.kind == "concurrency" else _keeps_up(point),
        Criterion.FAILURES: point.failed_share <= MOST_FAILED,
    }
    if not isinstance(point.goodput, Missing):
        judged[Criterion.OBJECTIVE] = point.goodput.share >= GOOD_SHARE
    broken = tuple(criterion for criterion, fulfilled in judged.items() if fulfilled is False)
    open_why = next((value for value in judged.values() if isinstance(value, Missing)), None)
    carried: Maybe[bool] = False if broken else open_why or True
    return Verdict(point.point.number, point.point.asked, carried, broken)


def _keeps_up(point: PointAnalysis) -> Maybe[bool]:
    if isinstance(point.kept_up, Missing):
        return point.kept_up
    keeps_up = point.kept_up >= KEEPS_UP
    if keeps_up and point.short:  # requests that end after the last one is sent end fast
        return Missing("requests were sent for too short a time for a steady state; send more of them")
    return keeps_up


def _gains(point: PointAnalysis, lower: Sequence[PointAnalysis]) -> Maybe[bool]:
    """Return whether more requests at a time still raised the throughput."""
    if not lower:
        return True
    before, now = lower[-1].output_rate, point.output_rate
    if isinstance(before, Missing) or isinstance(now, Missing):
        return before if isinstance(before, Missing) else Missing("no throughput")
    more = math.log(point.point.asked / lower[-1].point.asked)
    if more <= 0 or before <= 0 or now <= 0:
        return Missing("the loads or the throughputs cannot be compared")
    return math.log(now / before) / more >= GAIN


def causes(point: PointAnalysis, lowest: PointAnalysis, slots: Maybe[int]) -> tuple[Cause, ...]:
    """Return every reason that the evidence shows at a load that was not carried."""
    found = (
        _generator(point),
        _refused(point),
        _longer_part(point, lowest),
        _kv_cache(point),
        _preempted(point),
        _batch_limit(point, slots),
        _waits(point),
        _longer_steps(point, lowest),
        _longer_ttft(point, lowest),
    )
    return tuple(cause for cause in found if cause is not None)


def _generator(point: PointAnalysis) -> Cause | None:
    off = {check.id.value: check.found for check in point.checks if check.outcome == "off"}
    figures = {name: value for name, value in off.items() if not isinstance(value, Missing)}
    return Cause(CauseId.GENERATOR, figures) if figures else None


def _refused(point: PointAnalysis) -> Cause | None:
    if point.failed_share <= MOST_FAILED:
        return None
    return Cause(CauseId.REFUSED, {"failed": point.failed, "requests": point.requests})


def _longer_part(point: PointAnalysis, lowest: PointAnalysis) -> Cause | None:
    """Return the part of a request that grew most since the lowest load, from the server's spans of both."""
    if isinstance(point.parts, Missing) or isinstance(lowest.parts, Missing) or point is lowest:
        return None
    before, now = known_parts(lowest.parts), known_parts(point.parts)
    added = {name: now[name] - before[name] for name in now if name in before}
    whole = point.parts.e2e_ns - lowest.parts.e2e_ns
    name = max(added, key=lambda part: added[part])
    if whole <= 0 or added[name] < MAIN_PART * whole:
        return None
    return Cause(CauseId.LONGER_PART, {f"{name}_ns": now[name], f"{name}_lowest_ns": before[name], "share": added[name] / whole})


def _kv_cache(point: PointAnalysis) -> Cause | None:
    usage = Missing("") if isinstance(point.server, Missing) else point.server.kv_usage_max
    if isinstance(usage, Missing) or usage < FULL_CACHE:
        return None
    return Cause(CauseId.KV_CACHE, {"kv_usage_max": usage})


def _preempted(point: PointAnalysis) -> Cause | None:
    count = Missing("") if isinstance(point.server, Missing) else point.server.preemptions
    return None if isinstance(count, Missing) or count <= 0 else Cause(CauseId.PREEMPTIONS, {"preemptions": count})


def _batch_limit(point: PointAnalysis, slots: Maybe[int]) -> Cause | None:
    """Return the limit on requests that run at a time: the server's setting, or a level that waiting does not exceed."""
    server = point.server
    if isinstance(server, Missing) or isinstance(server.running_max, Missing):
        return None
    if not isinstance(slots, Missing) and server.running_max >= slots:
        return Cause(CauseId.BATCH_LIMIT, {"running_max": server.running_max, "slots": slots})
    least = server.running_min_waiting
    cached = not isinstance(server.kv_usage_max, Missing) and server.kv_usage_max >= FULL_CACHE
    if isinstance(least, Missing) or cached or not isinstance(slots, Missing) or not server.running_max:
        return None
    if least < LEVEL_RUNNING * server.running_max:
        return None
    return Cause(CauseId.BATCH_LIMIT, {"running_max": server.running_max, "running_min_waiting": least})


def _waits(point: PointAnalysis) -> Cause | None:
    server = point.server
    if isinstance(server, Missing) or isinstance(server.waiting_mean, Missing) or isinstance(server.waiting_max, Missing):
        return None
    if server.waiting_max <= 0:
        return None
    figures = {"waiting_mean": server.waiting_mean, "waiting_max": server.waiting_max}
    for name in ("waiting_first", "waiting_last"):
        value = getattr(server, name)
        if not isinstance(value, Missing):
            figures[name] = value
    return Cause(CauseId.QUEUE, figures)


def _longer_steps(point: PointAnalysis, lowest: PointAnalysis) -> Cause | None:
    """Return whether the gap between tokens grew: each step then serves more requests and takes longer."""
    key = next((key for key in ("itl", "tpot") if all(_has(each, key) for each in (point, lowest))), None)
    if key is None or point is lowest:
        return None
    before, now = _median(lowest, key), _median(point, key)
    if before <= 0 or now < LONGER_STEP * before:
        return None
    figures = {f"{key}_lowest_ns": before, f"{key}_ns": now}
    for name, each in (("running_lowest", lowest), ("running", point)):
        if not isinstance(each.server, Missing) and not isinstance(each.server.running_mean, Missing):
            figures[name] = each.server.running_mean
    for name, rate in (("output_rate_lowest", lowest.output_rate), ("output_rate", point.output_rate)):
        if not isinstance(rate, Missing):
            figures[name] = rate
    return Cause(CauseId.LONGER_STEPS, figures)


def _longer_ttft(point: PointAnalysis, lowest: PointAnalysis) -> Cause | None:
    """Return whether the first token takes longer: the client's view of waiting, with or without metrics."""
    if point is lowest or not (_has(point, "ttft") and _has(lowest, "ttft")):
        return None
    before, now = _median(lowest, "ttft"), _median(point, "ttft")
    if before <= 0 or now < LATER_START * before:
        return None
    return Cause(CauseId.LONGER_TTFT, {"ttft_lowest_ns": before, "ttft_ns": now})


def _has(point: PointAnalysis, key: str) -> bool:
    return not isinstance(point.typical(key), Missing)


def _median(point: PointAnalysis, key: str) -> float:
    found = point.latencies[key]
    return found.typical if isinstance(found, Latency) and isinstance(found.typical, float) else 0.0

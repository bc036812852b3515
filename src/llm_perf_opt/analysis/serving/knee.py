"""The knee of the saturation curve: the largest load that the server carries, and why it does not carry more."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from llm_perf_opt.analysis.serving.breakdown import known_parts
from llm_perf_opt.analysis.serving.outcome import MOST_FAILED, Criterion, Verdict, verdict
from llm_perf_opt.analysis.serving.points import PointAnalysis
from llm_perf_opt.analysis.serving.requests import LEAST_REQUESTS, Latency
from llm_perf_opt.analysis.serving.server import ServerState
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.serving_records import LoadKind

FULL_CACHE = 0.95
LONGER_STEP = 1.2
"""Growth of the median gap between tokens, relative to the lowest load, that counts as a longer step."""
LATER_START = 2.0
"""Growth of the median TTFT, relative to the lowest load, that counts as waiting if no metrics were sampled."""
MAIN_PART = 0.4
"""Share of the added time of a request that one part must have to be named."""
LEVEL_RUNNING = 0.9
"""Requests run at a limit if, while others wait, at least this share of the most ever seen runs."""
LEAST_SEEN = 3
"""Samples of the server's metrics that must show a cause: a single one may have caught a moment."""


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
class Knee:
    """Where the server stops to carry the load."""

    kind: LoadKind
    status: Literal["found", "above", "below", "unclear"]
    """Between two loads, above the largest or below the smallest one. `unclear`: loads that cannot be judged leave it open."""
    carried: Maybe[float]
    """The largest load that was carried, below every one that was not."""
    not_carried: Maybe[float]
    """The smallest load that was not carried."""
    broken: tuple[Criterion, ...]
    causes: tuple[Cause, ...]
    verdicts: tuple[Verdict, ...]
    """One per load, in order."""

    @property
    def unclear(self) -> tuple[Verdict, ...]:
        """The loads that cannot be judged, without those above one that was not carried."""
        end = next((place for place, found in enumerate(self.verdicts) if found.carried is False), len(self.verdicts))
        return tuple(found for found in self.verdicts[:end] if isinstance(found.carried, Missing))


def find_knee(points: Sequence[PointAnalysis], slots: Maybe[int]) -> Maybe[Knee]:
    """Return the knee over the loads of one curve. `slots`: how many requests the server runs at a time, if known."""
    ordered = one_per_load(points)
    usable = [point for point in ordered if point.unusable is None]
    if len(usable) < 2:
        return Missing("a knee needs two different loads")
    verdicts = tuple(_verdict(point, ordered[:place]) for place, point in enumerate(ordered))
    beyond = next((place for place, found in enumerate(verdicts) if found.carried is False), None)
    lower = verdicts[:beyond]
    carried = [found.load for found in lower if found.carried is True]
    unknown = [found.carried for found in lower if isinstance(found.carried, Missing)]
    kind = ordered[0].point.kind
    if beyond is None:
        if not carried:
            return Missing(unknown[0].why)
        open_end = isinstance(verdicts[-1].carried, Missing)
        return Knee(kind, "unclear" if open_end else "above", max(carried), _NONE_BROKEN, (), (), verdicts)
    none = Missing("the smaller loads cannot be judged" if unknown else "no smaller load was carried")
    return Knee(
        kind=kind,
        status="found" if carried else "unclear" if unknown else "below",
        carried=max(carried) if carried else none,
        not_carried=verdicts[beyond].load,
        broken=verdicts[beyond].broken,
        causes=causes(ordered[beyond], usable[0], slots),
        verdicts=verdicts,
    )


_NONE_BROKEN = Missing("no load was found that is not carried")


def one_per_load(points: Sequence[PointAnalysis]) -> list[PointAnalysis]:
    """Return the points in order of their load; of several with the same load, the one with the most requests."""
    found: dict[float, PointAnalysis] = {}
    for point in sorted(points, key=lambda point: (point.point.asked, point.requests, point.point.number)):
        found[point.point.asked] = point
    return list(found.values())


def _verdict(point: PointAnalysis, lower: Sequence[PointAnalysis]) -> Verdict:
    if point.outcome is None:
        return Verdict(point.point.number, point.point.asked, point.unusable or Missing("the load was profiled"))
    return verdict(point.outcome, [each.outcome for each in lower if each.outcome is not None])


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
    if min(point.parts.requests, lowest.parts.requests) < LEAST_REQUESTS:
        return None
    before, now = known_parts(lowest.parts), known_parts(point.parts)
    added = {name: now[name] - before[name] for name in now if name in before}
    whole = point.parts.e2e_ns - lowest.parts.e2e_ns
    name = max(added, key=lambda part: added[part])
    if whole <= 0 or added[name] < MAIN_PART * whole:
        return None
    return Cause(CauseId.LONGER_PART, {f"{name}_ns": now[name], f"{name}_lowest_ns": before[name], "share": added[name] / whole})


def _seen(point: PointAnalysis, shows: Callable[[ServerState], bool]) -> bool:
    """Return whether enough samples of the server's metrics show something."""
    return sum(shows(state) for state in point.states) >= LEAST_SEEN


def _at_least(value: Maybe[float], least: float) -> bool:
    return not isinstance(value, Missing) and value >= least


def _kv_cache(point: PointAnalysis) -> Cause | None:
    if isinstance(point.server, Missing) or isinstance(point.server.kv_usage_max, Missing):
        return None
    if not _seen(point, lambda state: _at_least(state.kv_usage, FULL_CACHE)):
        return None
    return Cause(CauseId.KV_CACHE, {"kv_usage_max": point.server.kv_usage_max})


def _preempted(point: PointAnalysis) -> Cause | None:
    count = Missing("") if isinstance(point.server, Missing) else point.server.preemptions
    return None if isinstance(count, Missing) or count <= 0 else Cause(CauseId.PREEMPTIONS, {"preemptions": count})


def _batch_limit(point: PointAnalysis, slots: Maybe[int]) -> Cause | None:
    """Return the limit on requests that run at a time: the server's setting, or a level that waiting does not exceed."""
    server = point.server
    if isinstance(server, Missing) or isinstance(server.running_max, Missing):
        return None
    if not isinstance(slots, Missing):
        full = _seen(point, lambda state: _at_least(state.running, slots))
        return Cause(CauseId.BATCH_LIMIT, {"running_max": server.running_max, "slots": slots}) if full else None
    least, most = server.running_min_waiting, server.running_max
    if isinstance(least, Missing) or not most or least < LEVEL_RUNNING * most or _kv_cache(point) is not None:
        return None
    if not _seen(point, lambda state: _above_zero(state.waiting)):
        return None
    return Cause(CauseId.BATCH_LIMIT, {"running_max": most, "running_min_waiting": least})


def _above_zero(value: Maybe[float]) -> bool:
    return not isinstance(value, Missing) and value > 0


def _waits(point: PointAnalysis) -> Cause | None:
    server = point.server
    if isinstance(server, Missing) or isinstance(server.waiting_mean, Missing) or isinstance(server.waiting_max, Missing):
        return None
    if not _seen(point, lambda state: _above_zero(state.waiting)):
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

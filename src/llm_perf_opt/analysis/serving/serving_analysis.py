"""The analysis of a server under several loads."""

from collections.abc import Sequence
from dataclasses import dataclass

from llm_perf_opt.analysis.serving.knee import Knee, find_knee, one_per_load
from llm_perf_opt.analysis.serving.points import MeasuredLoad, PointAnalysis, analyze_point
from llm_perf_opt.analysis.serving.slo import Slo
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.records import Manifest
from llm_perf_opt.core.serving_records import ServerFacts

_SLOT_OPTIONS = ("--max-num-seqs", "--max-running-requests", "--parallel", "--max-batch-size")
"""Options of several servers for the number of requests that run at a time."""


@dataclass(frozen=True)
class ServingAnalysis:
    """What a run of kind `serving` shows."""

    run: str
    manifest: Manifest
    server: Maybe[ServerFacts]
    slo: Maybe[Slo]
    points: tuple[PointAnalysis, ...]
    """In order of their load; profiled ones last."""
    knee: Maybe[Knee]
    env: Maybe[dict[str, object]]
    problems: tuple[str, ...] = ()
    """What could not be read or written, apart from the loads."""

    @property
    def measured(self) -> tuple[PointAnalysis, ...]:
        """The points that were not profiled."""
        return tuple(point for point in self.points if not point.point.profiled)

    @property
    def curve(self) -> tuple[PointAnalysis, ...]:
        """The points of the saturation curve."""
        return curve_of(self.points)


def analyze_loads(
    run: str,
    manifest: Manifest,
    server: Maybe[ServerFacts],
    loads: Sequence[MeasuredLoad],
    slo: Maybe[Slo],
    env: Maybe[dict[str, object]],
) -> ServingAnalysis:
    """Analyze the loads of a run."""
    points = [analyze_point(load, slo) for load in loads]
    points.sort(key=lambda point: (point.point.profiled, point.point.kind, point.point.asked, point.point.number))
    return ServingAnalysis(run, manifest, server, slo, tuple(points), find_knee(_loads_of_curve(points), slots_of(server)), env)


def curve_of(points: Sequence[PointAnalysis]) -> tuple[PointAnalysis, ...]:
    """Return the points of one curve: rates or concurrencies, whichever are more, without bursts if there is anything else.

    Of several loads of the same size, the one with the most requests counts.
    """
    return tuple(point for point in one_per_load(_loads_of_curve(points)) if point.unusable is None)


def _loads_of_curve(points: Sequence[PointAnalysis]) -> list[PointAnalysis]:
    """Return the same points with those that left no requests."""
    measured = [point for point in points if not point.point.profiled]
    steady = [point for point in measured if point.point.arrival != "burst"]
    found = steady if any(point.unusable is None for point in steady) else measured
    usable = [point.point.kind for point in found if point.unusable is None]
    kind = "rate" if usable.count("rate") >= usable.count("concurrency") else "concurrency"
    return [point for point in found if point.point.kind == kind]


def slots_of(server: Maybe[ServerFacts]) -> Maybe[int]:
    """Return how many requests the server runs at a time, if its command says so."""
    if isinstance(server, Missing):
        return server
    for place, word in enumerate(server.argv):
        option, _, value = word.partition("=")
        if option in _SLOT_OPTIONS:
            text = value or "".join(server.argv[place + 1 : place + 2])
            if text.isdigit() and len(text) < 10:
                return int(text)
    return Missing("its command does not set it")

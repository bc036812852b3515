"""What the points of a sweep came to, side by side: figures, floors, what binds each, and which are not beaten by another."""

from collections.abc import Sequence
from dataclasses import dataclass

from llm_perf_opt.analysis.limits.efficiency import StageEfficiency
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.stats import ends
from llm_perf_opt.records import Distribution, Maybe, Missing

METRIC_KEYS = ("ttft", "tpot", "e2e", "decode_rate", "output_rate")


@dataclass(frozen=True)
class SweepEntry:
    """One point as it was asked for, and the analysis of its run."""

    swept: tuple[str, ...]
    """`KEY=VALUE` of what differs between the points."""
    status: str
    why: str
    folder: str
    analysis: Maybe[RunAnalysis]
    page: str = ""
    """Its own report, from the folder of the sweep; empty where there is none."""


@dataclass(frozen=True)
class Reach:
    """A median and the ends it is known within."""

    low: float
    median: float
    high: float

    def overlaps(self, other: "Reach") -> bool:
        """Whether the two may be the same."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class SweepRow:
    """One point."""

    number: int
    values: dict[str, str]
    """Swept key → value."""
    status: str
    why: str
    """Why it is not complete, or has no figures."""
    folder: str
    metrics: dict[str, Maybe[Distribution]]
    batch: Maybe[int]
    floor_ns: Maybe[float]
    """The least time of a decode step, on the best limits known."""
    times_floor: Maybe[float]
    """Of decode."""
    prefill_bound: Maybe[str]
    decode_bound: Maybe[str]
    warnings: int
    page: str = ""
    """Its own report; empty where there is none to lead to."""

    def reach(self, key: str) -> Reach | None:
        """A metric with the ends it is known within: the 95 % interval; below the repeats that need, the least and the most."""
        value = self.metrics.get(key)
        if value is None or isinstance(value, Missing):
            return None
        low, high = ends(value)
        return Reach(low, value.median, high)

    @property
    def repeats(self) -> Maybe[int]:
        """How many times the request was measured."""
        known = [value for value in self.metrics.values() if not isinstance(value, Missing)]
        absent = [value for value in self.metrics.values() if isinstance(value, Missing)]
        return known[0].n if known else absent[0] if absent else Missing("it was not measured")

    def median(self, key: str) -> Maybe[float]:
        """The median of a metric."""
        value = self.metrics.get(key, Missing("it was not measured"))
        return value if isinstance(value, Missing) else value.median

    @property
    def floor_rate(self) -> Maybe[float]:
        """Decode tokens per second of the batch, if every step took its floor."""
        if isinstance(self.floor_ns, Missing):
            return self.floor_ns
        return self.batch if isinstance(self.batch, Missing) else self.batch * 1e9 / self.floor_ns

    @property
    def label(self) -> str:
        """Its values, for a chart."""
        return ", ".join(f"{key.rsplit('.', 1)[-1]} {value}" for key, value in self.values.items()) or f"point {self.number}"


def sweep_rows(entries: Sequence[SweepEntry]) -> tuple[SweepRow, ...]:
    """A row for each point, in the order they were asked for."""
    return tuple(_row(number, entry) for number, entry in enumerate(entries))


def swept_keys(rows: Sequence[SweepRow]) -> list[str]:
    """What differs between the points, in the order it was given."""
    return list(dict.fromkeys(key for row in rows for key in row.values))


def pareto_front(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """The points that no other beats in both TPOT and decode throughput beyond their intervals, the fastest first."""
    placed = [
        (latency, rate, row)
        for row in rows
        if (latency := row.reach("tpot")) is not None and (rate := row.reach("decode_rate")) is not None
    ]

    def beaten(latency: Reach, rate: Reach) -> bool:
        for other, more, _ in placed:
            less_time, more_rate = other.high < latency.low, more.low > rate.high
            same_time, same_rate = other == latency, more == rate
            if (less_time and (more_rate or same_rate)) or (same_time and more_rate):
                return True
        return False

    front = [place for place in placed if not beaten(place[0], place[1])]
    front.sort(key=lambda place: (place[0].median, -place[1].median))
    return [row for _, _, row in front]


def not_told_apart(rows: Sequence[SweepRow], key: str, *, most: bool = False) -> list[SweepRow]:
    """The point with the least median of a metric (or the `most`), then those whose intervals reach into its own."""
    placed = [(reach, row) for row in rows if (reach := row.reach(key)) is not None]
    placed.sort(key=lambda place: -place[0].median if most else place[0].median)
    return [row for reach, row in placed if reach.overlaps(placed[0][0])]


def _row(number: int, entry: SweepEntry) -> SweepRow:
    values = {key: value for key, _, value in (text.partition("=") for text in entry.swept)}
    analysis = entry.analysis
    if isinstance(analysis, Missing):
        none = dict.fromkeys(METRIC_KEYS, analysis)
        return SweepRow(
            number, values, entry.status, entry.why or analysis.why, entry.folder, dict(none), analysis, analysis, analysis,
            analysis, analysis, 0, entry.page,
        )  # fmt: skip
    found: dict[str, Maybe[Distribution]] = {}
    timings = analysis.timings
    for key in METRIC_KEYS:
        metric = analysis.metric(key)
        absent = timings if isinstance(timings, Missing) else Missing("it was not measured")
        found[key] = absent if metric is None else metric.value
    decode = _stage(analysis, "decode")
    steps = timings if isinstance(timings, Missing) else timings.workload.decode_steps
    return SweepRow(
        number, values, entry.status, entry.why, entry.folder, found,
        timings if isinstance(timings, Missing) else timings.workload.batch_size,
        _floor_ns(decode, steps), _times_floor(decode), _bound(_stage(analysis, "prefill")), _bound(decode),
        len(analysis.warnings), entry.page,
    )  # fmt: skip


def _stage(analysis: RunAnalysis, name: str) -> Maybe[StageEfficiency]:
    found = analysis.efficiency
    if isinstance(found, Missing):
        return found
    return next((stage for stage in found.stages if stage.stage == name), Missing(f"the request has no {name}"))


def _floor_ns(decode: Maybe[StageEfficiency], steps: Maybe[int]) -> Maybe[float]:
    if isinstance(decode, Missing):
        return decode
    if isinstance(steps, Missing):
        return steps
    for entry in reversed(decode.against):
        if not isinstance(entry.floor, Missing) and steps:
            return entry.floor.seconds * 1e9 / steps
    return Missing("no limit is known to compare with")


def _times_floor(decode: Maybe[StageEfficiency]) -> Maybe[float]:
    if isinstance(decode, Missing):
        return decode
    known = [entry.times_floor for entry in reversed(decode.against) if not isinstance(entry.times_floor, Missing)]
    return known[0] if known else Missing("no limit is known to compare with")


def _bound(stage: Maybe[StageEfficiency]) -> Maybe[str]:
    if isinstance(stage, Missing):
        return stage
    return Missing(stage.because) if stage.verdict == "unknown" else stage.verdict

"""Many runs at once: which of them may be pooled, the best of each model and hardware, and a metric over commits."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from llm_perf_opt.analysis.metrics import metric_named
from llm_perf_opt.core.records import Maybe, Missing

COMMIT_LETTERS = 10
"""Characters of a commit that are shown."""
UNKNOWN = "unknown"


class Reading(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A metric of one run: the median of its repeats."""

    median: float
    low: float
    """Lower end of the 95 % interval; of the range, if there are too few repeats for an interval."""
    high: float
    repeats: int
    is_interval: bool

    def overlaps(self, other: "Reading") -> bool:
        """Return whether the intervals of two readings overlap."""
        return self.low <= other.high and other.low <= self.high


class FleetRun(msgspec.Struct, frozen=True, gc=False):
    """The facts of one run that lists, tables and charts need. What is unknown is empty or None."""

    path: str
    """Relative to the folder that was searched."""
    created: str
    status: str
    """One of RUN_STATUSES."""
    why: str = ""
    kind: str = "run"
    experiment: str = ""
    model: str = ""
    weights: str = ""
    """`random` or `real`."""
    dtype: str = ""
    runtime: str = ""
    hardware: str = ""
    """The name of the device."""
    devices: int | None = None
    """How many devices shared the work of the timed run, not how many the machine has."""
    batch: int | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    host: str = ""
    commit: str = ""
    """Of the folder that the run was started in."""
    dirty: bool | None = None
    """Whether that folder had uncommitted changes."""
    unranked: str = ""
    """Why the run is in no ranking, trend or comparison; empty if it is."""
    warnings: int = 0
    page: bool = False
    """Whether it has a report.html."""
    readings: dict[str, Reading] = {}
    missing: dict[str, str] = {}
    """The reasons of metrics without a reading."""
    same_model: str = ""
    """Equal for runs of the same model: architecture, parameters, dtype, random or real weights."""
    same_work: str = ""
    """Equal for runs of the same workload: batch, prompts and their lengths, new tokens."""
    same_hardware: str = ""
    """Equal for runs on the same kind of machine with the same limits."""
    settings: str = ""
    """Equal for runs with the same settings, apart from those of profiling."""
    measurement: str = ""
    """Equal for copies of one run: no two measurements start and end at the same nanoseconds."""

    @property
    def workload(self) -> str:
        """Batch × prompt tokens + new tokens; empty if unknown."""
        return "" if self.batch is None else f"{self.batch} × {self.prompt_tokens} + {self.new_tokens}"

    @property
    def on(self) -> str:
        """The device, with the number of devices if there are several."""
        return f"{self.devices} × {self.hardware}" if (self.devices or 1) > 1 else self.hardware

    @property
    def version(self) -> str:
        """The commit in short; uncommitted changes are shown. Empty if unknown."""
        if not self.commit:
            return ""
        return self.commit[:COMMIT_LETTERS] + (
            "" if self.dirty is False else " + changes" if self.dirty else " (changes unknown)"
        )

    @property
    def is_ranked(self) -> bool:
        """Whether rankings, trends and comparisons use the run."""
        return not self.unranked

    @property
    def series(self) -> tuple[str, str, str, str, int]:
        """Equal for runs that are repeats of each other apart from their commit and time."""
        return self.same_model, self.same_work, self.same_hardware, self.settings, self.devices or 1

    def reading(self, key: str) -> Maybe[Reading]:
        """Return a metric, or why there is none."""
        found = self.readings.get(key)
        return found if found is not None else Missing(self.missing.get(key) or self.unranked or "it was not measured")


def without_copies(runs: Sequence[FleetRun]) -> list[FleetRun]:
    """Return the runs; of copies of one run, only the first by path that may be ranked is: a copy is not a repeat."""
    first: dict[str, str] = {}
    for run in sorted(runs, key=lambda run: run.path):
        if run.measurement and run.is_ranked:  # a copy may be damaged
            first.setdefault(run.measurement, run.path)
    return [
        run
        if first.get(run.measurement, run.path) == run.path or run.unranked
        else msgspec.structs.replace(run, unranked=f"a copy of another run: {first[run.measurement]}")
        for run in runs
    ]


# --- the best run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Best:
    """The best run of one model, workload and kind of hardware."""

    run: FleetRun
    reading: Reading
    runs: int
    """Runs that it was chosen from."""
    close: int
    """Others whose intervals overlap with its own: they cannot be distinguished from it."""
    settings: Mapping[str, str] | None = None
    """Its settings in which the runs that it was chosen from differ; None if its settings are unknown."""


def best_runs(runs: Iterable[FleetRun], key: str, settings: Mapping[str, Mapping[str, str]]) -> tuple[Best, ...]:
    """Return the best run of each model, workload, device and number of devices, over all settings and commits.

    Runs of random and of real weights, of other precisions and of other prompts are never ranked with each other.
    `settings`: the settings by `FleetRun.settings`.
    """
    groups: dict[tuple[str, str, str, int], list[tuple[Reading, FleetRun]]] = {}
    for run in runs:
        found = run.reading(key)
        if run.is_ranked and not isinstance(found, Missing):
            groups.setdefault((run.same_model, run.same_work, run.hardware, run.devices or 1), []).append((found, run))
    sign = -1 if metric_named(key).higher_is_better else 1
    best = []
    for members in groups.values():
        reading, run = min(members, key=lambda member: (sign * member[0].median, member[1].created, member[1].path))
        close = sum(other.overlaps(reading) for other, _ in members) - 1
        known = {member.settings: settings[member.settings] for _, member in members if member.settings in settings}
        own = _only(known[run.settings], _differing(known.values())) if run.settings in known else None
        best.append(Best(run, reading, len(members), close, own))
    return tuple(sorted(best, key=lambda row: (row.run.model, row.run.on, row.run.weights, row.run.batch or 0, row.run.path)))


_MOST_NAMED = 4
"""Settings that are shown of a run or a series."""
_UNSET = "unset"


def _differing(settings: Collection[Mapping[str, str]]) -> list[str]:
    """Return the keys whose values are not all the same."""
    return sorted(key for key in {*chain(*settings)} if len({values.get(key) for values in settings}) > 1)


def _only(values: Mapping[str, str], keys: Iterable[str]) -> dict[str, str]:
    return {key: values.get(key, _UNSET) for key in keys}


def settings_words(values: Mapping[str, str]) -> list[str]:
    """Return the first settings as KEY=VALUE, and whether there are more."""
    words = [f"{key}={value}" for key, value in values.items()]
    return words if len(words) <= _MOST_NAMED else [*words[:_MOST_NAMED], "…"]


# --- over commits -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """The runs of a series at one commit. Each run with uncommitted changes is a point of its own."""

    commit: str
    version: str
    is_clean: bool
    """Whether the folder is known to have had no uncommitted changes."""
    first: str
    """When the commit was first measured, in any series."""
    runs: tuple[FleetRun, ...]
    """In the order they were made."""
    value: float
    """The geometric mean of the medians of the runs, as in a comparison."""
    low: float
    """Of one run the lower end of its interval or range, of several the least median."""
    high: float


@dataclass(frozen=True)
class Series:
    """Runs of one model, workload, machine and settings, over commits."""

    name: str
    """What distinguishes it from the other series."""
    run: FleetRun
    """Its newest run."""
    points: tuple[Point, ...]
    """In the order in which the commits were first measured."""

    @property
    def clean(self) -> tuple[Point, ...]:
        """The points without uncommitted changes."""
        return tuple(point for point in self.points if point.is_clean)

    @property
    def runs(self) -> int:
        """How many runs it has."""
        return sum(len(point.runs) for point in self.points)


ORDER = "Commits are in the order in which they were first measured, by the times of the runs; the history of git is not read."


def series_of(
    runs: Sequence[FleetRun], key: str, settings: Mapping[str, Mapping[str, str]], every: Iterable[FleetRun] | None = None
) -> tuple[Series, ...]:
    """Return the series of ranked runs with a commit and this metric, those with the most points first.

    `settings`: the settings by `FleetRun.settings`. `every`: the runs that decide the order of commits, if not `runs`.
    """
    first: dict[str, str] = {}
    for run in runs if every is None else every:
        if run.commit:
            first[run.commit] = min(first.get(run.commit, run.created), run.created)
    groups: dict[tuple[str, str, str, str, int], list[FleetRun]] = {}
    for run in runs:
        if run.is_ranked and run.commit and not isinstance(run.reading(key), Missing):
            groups.setdefault(run.series, []).append(run)
    names = _names({group: members[0] for group, members in groups.items()}, settings)
    found = [
        Series(names[group], max(members, key=lambda run: (run.created, run.path)), _points(members, key, first))
        for group, members in groups.items()
    ]
    return tuple(sorted(found, key=lambda series: (-len(series.points), series.name)))


def _points(runs: Sequence[FleetRun], key: str, first: Mapping[str, str]) -> tuple[Point, ...]:
    states: dict[tuple[str, str], list[FleetRun]] = {}
    for run in sorted(runs, key=lambda run: (run.created, run.path)):
        # Two trees with uncommitted changes may differ, although their commit is the same.
        states.setdefault((run.commit, "" if run.dirty is False else run.path), []).append(run)
    found = [_point(members, key, first[commit]) for (commit, _), members in states.items()]
    return tuple(sorted(found, key=lambda point: (point.first, point.commit, not point.is_clean, point.runs[0].created)))


def _point(runs: Sequence[FleetRun], key: str, first: str) -> Point:
    readings = [run.readings[key] for run in runs]
    medians = [reading.median for reading in readings]
    positive = all(median > 0 for median in medians)
    value = math.exp(sum(map(math.log, medians)) / len(medians)) if positive else sum(medians) / len(medians)
    alone = readings[0] if len(readings) == 1 else None
    low, high = (alone.low, alone.high) if alone else (min(medians), max(medians))
    return Point(runs[0].commit, runs[0].version, runs[0].dirty is False, first, tuple(runs), value, low, high)


_KINDS = ("architecture", "set of prompts", "kind of machine")
"""What the first three keys of a series stand for, if two series have the same description."""


def _names(
    groups: Mapping[tuple[str, str, str, str, int], FleetRun], settings: Mapping[str, Mapping[str, str]]
) -> dict[tuple[str, str, str, str, int], str]:
    """Return a name for each series; series with equal facts are distinguished by the settings in which they differ."""
    alike: dict[str, list[tuple[str, str, str, str, int]]] = {}
    for group, run in groups.items():
        facts = (run.model, f"{run.weights or UNKNOWN} weights", run.dtype, run.runtime, run.workload, run.on)
        alike.setdefault(", ".join(fact for fact in facts if fact), []).append(group)
    named = {}
    for name, members in alike.items():
        known = [settings.get(group[3], {}) for group in members]
        keys = _differing(known)
        for number, (group, values) in enumerate(zip(members, known, strict=True), start=1):
            words = settings_words(_only(values, keys))
            words += [f"another {kind}" for place, kind in enumerate(_KINDS) if group[place] != members[0][place]]
            apart = f" ({', '.join(words)})" if words else ""
            named[group] = name if len(members) == 1 else f"{name}{apart} #{number}"
    return named


# --- changes between commits ------------------------------------------------------------------------------------------


class ChangedMetric(msgspec.Struct, frozen=True):
    """A metric of a series at two commits, as `llm-perf compare` judges it."""

    key: str
    verdict: str
    """faster, slower, not distinguishable, not judged, or n/a."""
    words: str
    """The verdict with its interval and its reason."""
    base: float | None = None
    new: float | None = None
    change: float | None = None
    low: float | None = None
    """Lower end of the interval of the change; None if there is none."""
    high: float | None = None


class CommitChange(msgspec.Struct, frozen=True):
    """The comparison of a series at two commits."""

    base_commit: str
    new_commit: str
    base_runs: tuple[str, ...]
    new_runs: tuple[str, ...]
    metrics: tuple[ChangedMetric, ...] = ()
    cautions: tuple[str, ...] = ()
    """What a reader must know before trusting a verdict, as `llm-perf compare` states it."""
    environment: tuple[str, ...] = ()
    """Facts of the machine and the software that also differ."""
    unjudged: str = ""
    """Why there is no verdict, or why the runs cannot be compared."""
    level: float = 0.0
    """Of the intervals."""

    def metric(self, key: str) -> ChangedMetric:
        """Return the change of a metric."""
        none = ChangedMetric(key, "n/a", self.unjudged or "not compared")
        return next((row for row in self.metrics if row.key == key), none)


@dataclass(frozen=True)
class SeriesChange:
    """The newest clean commit of a series compared with the one before it."""

    series: Series
    change: CommitChange


@dataclass(frozen=True)
class Fleet:
    """Everything that the page of a folder of runs shows."""

    folder: str
    runs: tuple[FleetRun, ...]
    """Newest first, after filtering."""
    found: int
    """Runs before filtering."""
    key: str
    """The metric."""
    best: tuple[Best, ...]
    series: tuple[Series, ...]
    changes: tuple[SeriesChange, ...]
    filters: tuple[str, ...] = ()
    """The filters as typed."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Path of a run → path of its report as seen from the page."""

    @property
    def unranked(self) -> dict[str, int]:
        """Runs that are in no ranking, by reason."""
        counts: dict[str, int] = {}
        for run in self.runs:
            if run.unranked:
                reason = run.unranked.partition(":")[0]
                counts[reason] = counts.get(reason, 0) + 1
        return counts

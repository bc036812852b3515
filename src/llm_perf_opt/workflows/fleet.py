"""`llm-perf runs` over many runs: filters, the best run, a metric over commits, and what changed with the last commit."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from llm_perf_opt.analysis.fleet import (
    CommitChange,
    Fleet,
    FleetRun,
    Point,
    SeriesChange,
    best_runs,
    series_of,
    without_copies,
)
from llm_perf_opt.analysis.metrics import METRICS
from llm_perf_opt.core.errors import ConfigError, nearest
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.core.run_status import check_status
from llm_perf_opt.workflows.fleet_index import FleetIndex, open_index

METRIC_NAMES = tuple(metric.key for metric in METRICS)
DEFAULT_METRIC = "tpot"
MOST_RUNS_OF_A_SIDE = 10
"""The newest runs of a commit that are compared. More take longer and hardly narrow an interval."""
_UNITS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}
_WHERE = re.compile(r"(?P<key>[a-z_0-9]+)\s*(?P<sign><=|>=|<|>)\s*(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(?P<unit>[a-zµ/]*)")
_SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": lambda one, other: one < other,
    "<=": lambda one, other: one <= other,
    ">": lambda one, other: one > other,
    ">=": lambda one, other: one >= other,
}


@dataclass(frozen=True)
class Filters:
    """Which runs to show. Names match exactly, hardware as a part of the device's name in any case."""

    model: str | None = None
    experiment: str | None = None
    hardware: str | None = None
    runtime: str | None = None
    status: str | None = None
    since: str | None = None
    where: Sequence[str] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The filters as typed."""
        given = [(name, value) for name, value in vars(self).items() if name != "where" and value is not None]
        return (*(f"--{name} {value}" for name, value in given), *(f"--where {text}" for text in self.where))


def check_metric(key: str) -> str:
    """Return the key of a metric, or raise a ConfigError."""
    if key not in METRIC_NAMES:
        raise ConfigError(
            f"--metric {key}: there is no such metric.{nearest(key, METRIC_NAMES)}", f"Known: {', '.join(METRIC_NAMES)}."
        )
    return key


def matcher(filters: Filters, now: datetime | None = None) -> Callable[[FleetRun], bool]:
    """Return whether a run matches. Raise ConfigError if a filter is invalid."""
    check_status(filters.status, sweeps=False)
    since = None if filters.since is None else parse_since(filters.since, now)
    limits = [_limit(text) for text in filters.where]
    hardware = None if filters.hardware is None else filters.hardware.casefold()

    def matches(run: FleetRun) -> bool:
        return (
            filters.model in (None, run.model)
            and filters.experiment in (None, run.experiment)
            and filters.runtime in (None, run.runtime)
            and filters.status in (None, run.status)
            and (hardware is None or hardware in run.hardware.casefold())
            and (since is None or _is_since(run.created, since))
            and all(limit(run) for limit in limits)
        )

    return matches


def parse_since(text: str, now: datetime | None = None) -> datetime:
    """Return the time in `2026-01-31`, `2026-01-31T12:00` (UTC unless it has a zone) or an age such as `30d`."""
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        return (now or datetime.now(timezone.utc)) - _age(text)
    return found if found.tzinfo else found.replace(tzinfo=timezone.utc)


def _age(text: str) -> timedelta:
    from llm_perf_opt.workflows.housekeeping import parse_age  # loads the analysis of runs

    try:
        return parse_age(text)
    except (ConfigError, OverflowError) as error:
        raise ConfigError(
            f"--since {text}: neither a date nor an age.", "Give a date (2026-01-31), a time (2026-01-31T12:00) or an age (30d)."
        ) from error


def _is_since(created: str, since: datetime) -> bool:
    """Return whether a run was made at that time or later; one whose time is unreadable was not."""
    try:
        found = datetime.fromisoformat(created)
    except ValueError:
        return False
    return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)) >= since


def _limit(text: str) -> Callable[[FleetRun], bool]:
    """Return whether a run's median is within a limit such as `tpot<20ms`. A run without the metric is not."""
    match = _WHERE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--where {text}: not METRIC<VALUE.", "Write --where 'tpot<20ms' or --where 'decode_rate>=100'.")
    key = match["key"]
    definition = next((metric for metric in METRICS if metric.key == key), None)
    if definition is None:
        raise ConfigError(
            f"--where {text}: there is no metric {key!r}.{nearest(key, METRIC_NAMES)}", f"Known: {', '.join(METRIC_NAMES)}."
        )
    is_time, unit = definition.unit == "ns", match["unit"]
    if is_time and unit not in _UNITS:
        raise ConfigError(f"--where {text}: a time needs a unit.", "Write ns, us, ms or s: --where 'tpot<20ms'.")
    if not is_time and unit not in ("", definition.unit):
        raise ConfigError(f"--where {text}: {key} is in {definition.unit}.", f"Write --where '{key}{match['sign']}100'.")
    bound, compared = float(match["number"]) * (_UNITS[unit] if is_time else 1.0), _SIGNS[match["sign"]]

    def within(run: FleetRun) -> bool:
        reading = run.readings.get(key)
        return reading is not None and compared(reading.median, bound)

    return within


def find_fleet(folder: Path, filters: Filters, note: Callable[[int], None] = lambda _: None) -> tuple[FleetIndex, list[FleetRun]]:
    """Return the index of a folder, and the runs that match, newest first."""
    matches = matcher(filters)
    index = open_index(folder, note)
    every = without_copies([entry.run for entry in index.runs.values()])
    chosen = [run for run in every if matches(run)]
    return index, sorted(chosen, key=lambda run: (run.created, run.path), reverse=True)


def view_fleet(
    index: FleetIndex, runs: Sequence[FleetRun], key: str, filters: Filters, *, compared: bool = True, page: Path | None = None
) -> Fleet:
    """Return the best runs, the series and, if `compared`, what the last commit changed. `page`: the file that links to runs."""
    series = series_of(runs, key, index.settings, [entry.run for entry in index.runs.values()])
    changes = []
    if compared:
        before = len(index.changes)
        pairs = [(found, found.clean[-2], found.clean[-1]) for found in series if len(found.clean) > 1]
        changes = [SeriesChange(found, _change(index, base, new)) for found, base, new in pairs]
        if len(index.changes) > before:
            index.keep()
    return Fleet(
        folder=str(index.folder),
        runs=tuple(runs),
        found=len(index.runs),
        key=key,
        best=best_runs(runs, key, index.settings),
        series=series,
        changes=tuple(changes),
        filters=filters.words,
        links={} if page is None else _links(index.folder, runs, page),
    )


def _links(folder: Path, runs: Sequence[FleetRun], page: Path) -> dict[str, str]:
    """Return the way from a page to the report of each run that has one."""
    name = RunFolder(folder).page_file.name
    way = os.path.relpath(folder.resolve(), page.resolve().parent)
    return {run.path: os.path.normpath(f"{way}/{run.path}/{name}") for run in runs if run.page}


def _change(index: FleetIndex, base: Point, new: Point) -> CommitChange:
    """Return the comparison of two commits, from the index if their runs have not changed."""
    sides = base.runs[-MOST_RUNS_OF_A_SIDE:], new.runs[-MOST_RUNS_OF_A_SIDE:]
    key = index.change_key(*sides)
    if key not in index.changes:
        from llm_perf_opt.workflows.fleet_changes import compare_commits  # loads the analysis of runs

        index.changes[key] = compare_commits(index.folder, *sides)
    return index.changes[key]

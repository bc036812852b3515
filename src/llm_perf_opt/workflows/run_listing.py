"""List the runs and sweeps under a folder, newest first. Only the rows that are shown are read in full."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from llm_perf_opt.analysis.metrics import metric_named, value_of
from llm_perf_opt.analysis.stats import percentile
from llm_perf_opt.core.errors import ConfigError, ParseError, ResourceError, file_error
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.core.run_status import DAMAGED, PLANNED, UNREADABLE, check_status, is_denied, status_of
from llm_perf_opt.core.units import counted
from llm_perf_opt.core.user_files import DEEPEST_RUN
from llm_perf_opt.workflows.run_reader import RunReader
from llm_perf_opt.workflows.sweep_folder import Sweep, SweepFolder, damage_of, is_sweep

_BETWEEN = ", "
"""Separates the models of a sweep; no name contains it."""


@dataclass(frozen=True)
class Listed:
    """A row of the list."""

    kind: Literal["run", "sweep"]
    path: str
    created: str
    status: str
    why: str
    experiment: str = ""
    model: str = ""
    """For a sweep over models, all of them, separated by commas."""
    weights: str = ""
    """`random` or `real`, both for a sweep that has both; empty if unknown."""
    workload: str = ""
    device: str = ""
    ttft_ns: Maybe[float] | None = None
    """None for a sweep and for a run under load."""
    tpot_ns: Maybe[float] | None = None


@dataclass(frozen=True)
class Listing:
    """The rows to show, and how many match and exist."""

    rows: tuple[Listed, ...]
    matching: int
    found: int


def list_runs(
    folder: Path, *, model: str | None = None, experiment: str | None = None, status: str | None = None, limit: int = 20
) -> Listing:
    """Return runs and sweeps, newest first. Filters match exactly; `limit` 0 returns all."""
    chosen, found = find_runs(folder, model=model, experiment=experiment, status=status)
    shown = chosen[:limit] if limit else chosen
    return Listing(tuple(shown if status else map(_with_details, shown)), len(chosen), found)


def find_runs(
    folder: Path, *, model: str | None = None, experiment: str | None = None, status: str | None = None
) -> tuple[list[Listed], int]:
    """Return the runs and sweeps that match, newest first and without details, and how many there are in all.

    Filtering by status reads every run, because its times may be damaged.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder.", "Run `llm-perf run` first, or give the folder with the runs.")
    check_status(status, sweeps=True)
    every = sorted((_summary_row(*found) for found in _find(folder, 0)), key=lambda row: (row.created, row.path), reverse=True)
    chosen = [row for row in map(_with_details, every) if row.status == status] if status else every
    if model or experiment:
        chosen = [
            named
            for named in map(_with_names, chosen)
            if model in (None, *named.model.split(_BETWEEN)) and experiment in (None, *named.experiment.split(_BETWEEN))
        ]
    return chosen, len(every)


def _find(folder: Path, depth: int) -> Iterator[tuple[Path, bool, OSError | None]]:
    """Yield runs and sweeps (True), without searching inside them, unless the folder itself is a sweep.

    A folder that cannot be read may be a run; it comes with the reason. Raise OSError if that is the first folder.
    """
    try:
        if RunFolder(folder).manifest_file.exists():
            yield folder, False, None
            return
        if depth and is_sweep(folder):
            yield folder, True, None
            return
        if depth >= DEEPEST_RUN:
            return
        with os.scandir(folder) as entries:
            inside = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")]
    except FileNotFoundError:  # removed in the meantime
        return
    except OSError as error:
        if not depth:
            raise
        yield folder, False, error
        return
    for path in inside:
        yield from _find(Path(path), depth + 1)


def _summary_row(path: Path, sweep: bool, unreadable: OSError | None) -> Listed:
    """Return the row from run.json or sweep.json. If it is damaged or not readable, the row has the reason."""
    kind: Literal["run", "sweep"] = "sweep" if sweep else "run"
    if unreadable is not None:
        return Listed(kind, str(path), file_time(path), UNREADABLE, file_error(unreadable).fact)
    try:
        return _sweep_row(path, SweepFolder(path).read()) if sweep else _run_row(path)
    except ParseError as error:
        file = SweepFolder(path).sweep_file if sweep else RunFolder(path).manifest_file
        return Listed(kind, str(path), file_time(file), status_of(error), error.fact)
    except OSError as error:
        return Listed(kind, str(path), file_time(path), UNREADABLE, file_error(error).fact)


def _run_row(path: Path) -> Listed:
    manifest = RunFolder(path).manifest()
    return Listed("run", str(path), manifest.created, manifest.status, manifest.why)


def _sweep_row(path: Path, sweep: Sweep) -> Listed:
    points = SweepFolder(path).points(sweep)
    done = sum(point.status == "complete" for point in points)
    started = any(point.folder for point in points)
    status = "complete" if done == len(points) else "partial" if started else PLANNED
    why = "" if done == len(points) else f"{done} of {len(points)} points are complete" if started else "no point has started"
    swept = sorted({text.split("=")[0] for point in sweep.points for text in point.swept})
    over = f" over {', '.join(swept)}" if swept else ""
    return Listed("sweep", str(path), sweep.created, status, why, workload=f"{counted(len(points), 'point')}{over}")


def file_time(file: Path) -> str:
    """Return when a file was last written; empty if that is unknown."""
    from datetime import datetime, timezone

    try:
        return datetime.fromtimestamp(file.stat().st_mtime, timezone.utc).isoformat(timespec="seconds")
    except OSError:
        return ""


def _with_names(row: Listed) -> Listed:
    """Add the names of model and experiment. What cannot be read has none."""
    points = [Path(row.path)]
    if row.kind == "sweep" and row.status != UNREADABLE:
        points = sorted(child for child in points[0].iterdir() if _is_run(child))
    readers = [RunReader(RunFolder(point)) for point in points]
    found = [(*reader.names, reader.weights) for reader in readers]
    experiment, model, weights = (_BETWEEN.join(dict.fromkeys(row[place] for row in found if row[place])) for place in range(3))
    return replace(row, experiment=experiment, model=model, weights=weights)


def _is_run(folder: Path) -> bool:
    try:
        return RunFolder(folder).manifest_file.exists()
    except OSError:
        return False


def _with_details(row: Listed) -> Listed:
    """Add what is read only for rows that are shown."""
    if row.status in (DAMAGED, UNREADABLE):
        return row
    try:
        row = row if row.model else _with_names(row)
        return _detailed(row)
    except ParseError as error:
        return replace(row, status=status_of(error), why=error.fact)
    except (ResourceError, OSError) as error:
        return replace(row, status=UNREADABLE, why=(file_error(error) if isinstance(error, OSError) else error).fact)


def _detailed(row: Listed) -> Listed:
    if row.kind == "sweep":
        return _with_damage(row)
    run = RunReader(RunFolder(Path(row.path)))
    if run.manifest.kind == "serving":
        return _with_loads(row, run)
    damage, timings = run.damage, run.timings
    if damage or isinstance(timings, Missing):
        why = Missing(f"its times are {status_of(damage)}" if damage else "the run has no times")
        row = replace(row, ttft_ns=why, tpot_ns=why)
        return replace(row, status=status_of(damage), why=damage.fact) if damage else row
    work = timings.workload
    words = f"{work.batch_size} × {work.padded_tokens} + {work.new_tokens}"
    return replace(
        row, workload=words, device=timings.model.device_name, ttft_ns=_median("ttft", timings), tpot_ns=_median("tpot", timings)
    )


def _with_loads(row: Listed, run: RunReader) -> Listed:
    """Add the loads of a run under load. A single TTFT would say nothing about it."""
    points = [point for _, point in run.load_points if not point.profiled]
    loads = sorted({point.asked for point in points})
    span = f"{loads[0]:g} – {loads[-1]:g}" if len(loads) > 1 else f"{loads[0]:g}" if loads else ""
    unit = "at a time" if points and points[0].kind == "concurrency" else "requests/s"
    return replace(row, workload=f"{counted(len(loads), 'load')}, {span} {unit}" if loads else "no load")


def _with_damage(row: Listed) -> Listed:
    """Update a sweep from its runs: a point whose times are damaged is not complete. Raise ParseError if some are denied."""
    folder = SweepFolder(Path(row.path))
    there = folder.points()
    damage = []
    for point in there:
        run = folder.run(point)
        if (found := damage_of(point, run)) is not None:
            if not isinstance(run, Missing) and run.damage is not None and is_denied(run.damage):
                raise run.damage
            damage.append(found.why)
    if not damage:
        return row
    done = sum(point.status == "complete" for point in there) - len(damage)
    words = f"{counted(done, 'point')} {'is' if done == 1 else 'are'}"
    return replace(row, status="partial", why=f"{words} complete, {len(damage)} damaged: {damage[0]}")


def _median(key: str, timings: CleanTimings) -> Maybe[float]:
    definition = metric_named(key)
    values = [value_of(definition, repeat, timings) for repeat in timings.iterations]
    missing = next((value for value in values if isinstance(value, Missing)), None)
    present = [value for value in values if not isinstance(value, Missing)]
    return missing or (percentile(present, 0.5) if present else Missing("no iteration was measured"))

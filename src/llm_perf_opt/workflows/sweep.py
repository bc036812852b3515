"""Sweeps: plan the points, run one, run those that are left one after the other, report.

Every point is composed before the first one starts. Each point is a run with its own folder and reports.
"""

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from llm_perf_opt import __version__
from llm_perf_opt.analysis.comparison.facts import facts_of
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.sweep import Hardware, SweepEntry, differences, sweep_rows
from llm_perf_opt.config.code_settings import Stored
from llm_perf_opt.config.composition import Composed, compose, expand_sweep, without_plus
from llm_perf_opt.config.guide_keys import RUN_DIR
from llm_perf_opt.config.schema import LauncherConfig
from llm_perf_opt.config.weights import RANDOM_SUFFIX
from llm_perf_opt.core.errors import CaptureError, ConfigError, Interrupted, LlmPerfError
from llm_perf_opt.core.records import SCHEMA, Manifest, Maybe, Missing
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.core.run_status import DAMAGED, UNREADABLE, is_denied
from llm_perf_opt.profiling.preflight import refuse_anywhere, refuse_early
from llm_perf_opt.profiling.provenance import environment
from llm_perf_opt.profiling.requested_metrics import resolve_metrics
from llm_perf_opt.report.html import render_html
from llm_perf_opt.report.markdown import render_markdown
from llm_perf_opt.report.sweep import SweepReport, sweep_document
from llm_perf_opt.workflows.analyze_run import analyze, is_reported, report_run
from llm_perf_opt.workflows.images import draw_images
from llm_perf_opt.workflows.run_reader import RunReader
from llm_perf_opt.workflows.sweep_folder import (
    PlannedPoint,
    Sweep,
    SweepFolder,
    SweepPoint,
    damage_of,
    resume_command,
    resume_hint,
)
from llm_perf_opt.workflows.sweep_plan import check_words, composed_points, enter_project, stored_sweep

_SETTINGS = ("threads",)
"""Facts about a machine that a sweep may vary."""
_GPU = "gpu.name"
_RUN_DIR = f"{RUN_DIR}="

RunOne = Callable[[Composed, str], tuple[RunFolder, LlmPerfError | None]]
"""Captures and reports one point; the text describes the point."""


# --- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """Every point of a sweep, composed."""

    points: tuple[PlannedPoint, ...]
    composed: tuple[Composed, ...]
    folder: Path
    notes: tuple[str, ...] = ()

    @property
    def launcher(self) -> LauncherConfig:
        """Where the points run, the same for all."""
        return self.composed[0].config.launcher

    @property
    def code(self) -> list[str]:
        """The settings that can run code and were typed, as KEY=VALUE."""
        return list(dict.fromkeys(str(one) for point in self.composed for one in point.code))


def plan_sweep(overrides: Sequence[str], config_dir: Path | None, *, elsewhere: bool = False) -> Planned:
    """Compose every point, so that an invalid one is rejected before the first one runs.

    What depends on the machine is checked here only if the points run here: not on a cluster, and not `elsewhere`.
    """
    words = [without_plus(text) for text in overrides]
    wanted = [text for text in words if text.startswith(_RUN_DIR)]
    points = _points([text for text in words if not text.startswith(_RUN_DIR)])
    composed = tuple(compose(point.overrides, config_dir) for point in points)
    _require_one_launcher(point.config.launcher for point in composed)
    if composed[0].config.launcher.type == "local" and not elsewhere:
        for point in composed:
            resolve_metrics(point.config)
        refuse_early(point.config for point in composed)
    else:
        refuse_anywhere(point.config for point in composed)
    if wanted:
        return Planned(points, composed, compose(wanted[-1:], config_dir).run_dir)
    first = composed[0]
    folder = Path("runs") / first.config.experiment / "sweeps" / first.run_dir.name.removesuffix(RANDOM_SUFFIX)
    note = f"{RUN_DIR} in the project's files is for single runs: this sweep is in {folder}; {RUN_DIR}=DIR sets another folder."
    return Planned(points, composed, folder, (note,) if first.run_dir_file else ())


def _points(overrides: Sequence[str]) -> tuple[PlannedPoint, ...]:
    expanded = expand_sweep(overrides)
    varying = {index for index in range(len(overrides)) if len({point[index] for point in expanded}) > 1}
    return tuple(
        PlannedPoint(tuple(point), tuple(text for index, text in enumerate(point) if index in varying)) for point in expanded
    )


def _require_one_launcher(launchers: Iterable[LauncherConfig]) -> None:
    first, *others = launchers
    if any(other != first for other in others):
        raise ConfigError("The launcher differs between the points of the sweep.", "Give launcher.* one value each.")


def begin_sweep(planned: Planned, command: Sequence[str], config_dir: Path | None) -> SweepFolder:
    """Create the folder of a sweep and write its plan."""
    folder = SweepFolder.create(planned.folder)
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    kept = str(config_dir.resolve()) if config_dir else None
    sweep = Sweep(SCHEMA, __version__, created, tuple(command), kept, planned.points, str(Path.cwd()))
    folder.write_plan(sweep, [asdict(point.config) for point in planned.composed])
    return folder


# --- running ----------------------------------------------------------------------------------------------------------


def waiting_points(folder: SweepFolder) -> list[int]:
    """Return the points that are not complete, or whose run is damaged."""
    states = enumerate(folder.points())
    return [number for number, point in states if point.status != "complete" or damage_of(point, folder.run(point))]


def run_planned(folder: SweepFolder, number: int, run_one: RunOne, code: Sequence[str] = ()) -> LlmPerfError | None:
    """Run one point as it was planned, in the project of the sweep, and return the error that it ended with.

    Nothing but a new run folder of this point is written. A point that is complete is not run again. `code`: settings of the
    sweep that can run code, as typed.
    """
    sweep = folder.read()
    if not 0 <= number < len(sweep.points):
        raise ConfigError(f"{folder.path} has no point {number}.", f"Its points are 0 to {len(sweep.points) - 1}.")
    point = folder.point(number, sweep)
    if point.status == "complete" and not damage_of(point, folder.run(point)):
        return None
    stored = stored_sweep(folder, sweep, code, f"llm-perf run --point {shlex.quote(str(folder.path))} {number}")
    check_words(folder, sweep, stored)
    try:
        enter_project(folder, sweep)
        composed = composed_points(folder, sweep, [number], stored)[number]
    except LlmPerfError as error:
        _leave_failed(folder.point_folder(number), error)
        return error
    return run_point(composed, point_words(sweep, number), run_one)


def run_point(composed: Composed, words: str, run_one: RunOne) -> LlmPerfError | None:
    """Run one point. Its run.json says how it ended, also if it was refused before its first pass."""
    try:
        run, error = run_one(composed, words)
    except LlmPerfError as raised:  # it left no folder
        _leave_failed(composed.run_dir, raised)
        return raised
    if error is not None:
        _record(run, error)
    return error


def _leave_failed(wanted: Path, error: LlmPerfError) -> None:
    """Leave a run folder of a point that could not start, unless the disk does not take it."""
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with suppress(LlmPerfError):
        RunFolder.create(wanted).write_manifest(
            Manifest(SCHEMA, __version__, "failed", created, (), (), error.fact, error.remedy)
        )


def _record(run: RunFolder, error: LlmPerfError) -> None:
    """Record an error that run.json does not have yet: a complete run with an impossible figure is partial in a sweep."""
    manifest = run.manifest()
    if manifest.status == "complete" and isinstance(error, Interrupted):
        return  # only its report is missing
    if manifest.status == "complete":
        run.write_manifest(replace(manifest, status="partial", why=error.fact, remedy=error.remedy))
    elif not manifest.why:
        run.write_manifest(replace(manifest, why=error.fact, remedy=error.remedy))


def run_sweep(folder: SweepFolder, run_one: RunOne, code: Sequence[str] = ()) -> LlmPerfError | None:
    """Run every point that is not complete, or whose run is damaged, one after the other.

    `code`: settings of the sweep that can run code, as typed.
    Return the error that the command ends with: an interruption, or how many points failed. Raise ConfigError on other hardware.
    """
    sweep = folder.read()
    waiting = waiting_points(folder)
    stored = stored_sweep(folder, sweep, code)
    enter_project(folder, sweep)
    composed = composed_points(folder, sweep, waiting, stored)
    if waiting:
        require_same_hardware(folder, composed[waiting[0]].config.hardware.device_index)
        if sweep.project is None:
            _require_same_weights(folder, sweep, stored)
    failed = 0
    for number in waiting:
        error = run_point(composed[number], point_words(sweep, number), run_one)
        if isinstance(error, Interrupted):
            return Interrupted(error.fact, resume_hint(folder))
        failed += error is not None
    if failed:
        return CaptureError(
            f"{failed} of {len(waiting)} runs of the sweep did not complete.",
            f"See {folder.page_file} for the reasons; `{resume_command(folder)}` runs them again.",
        )
    return None


def point_words(sweep: Sweep, number: int) -> str:
    """Return the line that announces a point."""
    return f"run {number + 1} of {len(sweep.points)}: {' '.join(sweep.points[number].swept) or 'as given'}"


def hardware_of(analysis: RunAnalysis) -> Hardware:
    """Return the hardware that a point ran on."""
    return {key: value for key, value in facts_of(analysis)["hardware"].items() if key not in _SETTINGS}


def require_same_hardware(folder: SweepFolder, device_index: int) -> None:
    """Raise ConfigError if complete points ran on other hardware: no setting in the table would explain the difference."""
    here: dict[str, object] | None = None
    for number, point in enumerate(folder.points()):
        run = folder.run(point)
        if point.status != "complete" or isinstance(run, Missing) or damage_of(point, run):
            continue
        try:
            measured = analyze(run, traces=False)
        except LlmPerfError:  # its hardware is unknown; its row says why
            continue
        here = here or environment(device_index)
        difference = _hardware_difference(
            hardware_of(measured), hardware_of(replace(measured, env=here, timings=Missing("not run yet")))
        )
        if difference:
            raise ConfigError(
                f"This machine differs from the one that ran point {number} of the sweep: {difference}. "
                "Points from different machines cannot be ranked together.",
                f"Resume {folder.path} on that machine, or start a new sweep on this one.",
            )


def _hardware_difference(there: Hardware, here: Hardware) -> str:
    if _GPU in there and _GPU not in here:
        return f"no GPU is available (the sweep: {there[_GPU]})"
    return differences(there, here, "the sweep")


def _require_same_weights(folder: SweepFolder, sweep: Sweep, stored: Stored) -> None:
    """Raise ConfigError if complete points had random weights and would now have real ones, or the other way round."""
    config_dir = Path(sweep.config_dir) if sweep.config_dir else None
    now: dict[tuple[str, ...], str] = {}
    for number, point in enumerate(folder.points(sweep)):
        run = folder.run(point)
        if point.status != "complete" or isinstance(run, Missing) or not run.weights:
            continue
        chosen = tuple(text for text in point.overrides if text.lstrip("+").startswith("model"))
        if chosen not in now:
            now[chosen] = "random" if compose(chosen, config_dir, stored).config.model.source == "random" else "real"
        if run.weights != now[chosen]:
            raise ConfigError(
                f"Point {number} of the sweep had {run.weights} weights; its settings now select {now[chosen]} ones.",
                "Restore the links in models/ and the files in conf/ as they were, or start a new sweep.",
            )


# --- sweep report -----------------------------------------------------------------------------------------------------


def report_sweep(path: Path) -> tuple[SweepFolder, SweepReport]:
    """Write sweep.html and sweep.md."""
    folder = SweepFolder.open(path)
    sweep = folder.read()
    entries = [_entry(folder, point) for point in folder.points(sweep)]
    found = SweepReport("/".join(folder.path.parts[-3:]), sweep.created, sweep.command, sweep_rows(entries), str(folder.path))
    document = sweep_document(found)
    folder.write(folder.page_file, render_html(document).encode())
    folder.write(folder.report_file, render_markdown(document).encode())
    return folder, found


def report_unreported(folder: SweepFolder) -> list[str]:
    """Write the reports of complete points that have none, and return why some could not be written."""
    problems = []
    for number, point in enumerate(folder.points()):
        run = folder.run(point)
        if point.status != "complete" or isinstance(run, Missing) or damage_of(point, run) or is_reported(run.folder):
            continue
        try:
            analysis = report_run(run)
            draw_images(run.folder)
            if analysis.fault is not None:
                _record(run.folder, analysis.fault)
        except Interrupted:
            raise
        except LlmPerfError as error:
            problems.append(f"Point {number} has no report: {error.fact} {error.remedy}".rstrip())
    return problems


def _entry(folder: SweepFolder, point: SweepPoint) -> SweepEntry:
    """Return a point in its current state: the times of its run may be damaged."""
    run = folder.run(point)
    damage = damage_of(point, run)
    status, why = point.status, point.why
    if damage is not None:
        denied = not isinstance(run, Missing) and run.damage is not None and is_denied(run.damage)
        status, why = UNREADABLE if denied else DAMAGED, damage.why
    analysis = _point_analysis(run)
    hardware = {} if isinstance(analysis, Missing) else hardware_of(analysis)
    return SweepEntry(point.swept, status, why, point.folder, analysis, _page(folder, point), hardware)


def _page(folder: SweepFolder, point: SweepPoint) -> str:
    """Return the report of a point; empty if it has none, for example because its run was moved away."""
    run = RunFolder(folder.path / point.folder)
    pages = [page for page in (run.page_file, run.report_file) if point.folder and page.is_file()]
    return pages[0].relative_to(folder.path).as_posix() if pages else ""


def _point_analysis(run: Maybe[RunReader]) -> Maybe[RunAnalysis]:
    if isinstance(run, Missing):
        return run
    try:
        return analyze(run, traces=False)
    except LlmPerfError as error:  # the other points are shown all the same
        return Missing(error.fact)


def sweep_error(found: SweepReport) -> LlmPerfError | None:
    """Return an error if a point is not complete or not ranked."""
    faulty = [row for row in found.rows if row.status != "complete" or not row.ranked]
    if not faulty:
        return None
    kinds = Counter(row.status for row in faulty)
    return CaptureError(
        f"{len(faulty)} of {len(found.rows)} points of the sweep are incomplete or not ranked: "
        f"{', '.join(f'{status} ({count})' for status, count in kinds.items())}.",
        "See their rows in the report for the reasons.",
    )

"""Sweeps: plan, run, resume, report.

Every point is composed before the first one starts. Each point is a run with its own folder and reports.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from llm_perf_opt import __version__
from llm_perf_opt.analysis.comparison.facts import facts_of
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.sweep import Hardware, SweepEntry, differences, sweep_rows
from llm_perf_opt.config.composition import Composed, compose, expand_sweep, without_plus
from llm_perf_opt.config.guide_keys import RUN_DIR
from llm_perf_opt.config.weights import RANDOM_SUFFIX
from llm_perf_opt.core.errors import CaptureError, ConfigError, Interrupted, LlmPerfError
from llm_perf_opt.core.records import SCHEMA, Maybe, Missing
from llm_perf_opt.core.run_folder import RunFolder, write_whole
from llm_perf_opt.profiling.preflight import refuse_early
from llm_perf_opt.profiling.provenance import environment
from llm_perf_opt.profiling.requested_metrics import resolve_metrics
from llm_perf_opt.report.html import render_html
from llm_perf_opt.report.markdown import render_markdown
from llm_perf_opt.report.sweep import SweepReport, sweep_document
from llm_perf_opt.workflows.analyze_run import analyze
from llm_perf_opt.workflows.run_reader import RunReader
from llm_perf_opt.workflows.sweep_folder import Sweep, SweepFolder, SweepPoint, damage_of

_SETTINGS = ("threads",)
"""Facts about a machine that a sweep may vary."""
_GPU = "gpu.name"


def hardware_of(analysis: RunAnalysis) -> Hardware:
    """Return the hardware that a point ran on."""
    return {key: value for key, value in facts_of(analysis)["hardware"].items() if key not in _SETTINGS}


def require_same_hardware(folder: SweepFolder, sweep: Sweep, device_index: int) -> None:
    """Raise ConfigError if complete points ran on other hardware: no setting in the table would explain the difference."""
    here: dict[str, object] | None = None
    for number, point in enumerate(sweep.points):
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


_RUN_DIR = f"{RUN_DIR}="

RunOne = Callable[[Composed, str], tuple[RunFolder, LlmPerfError | None]]
"""Captures and reports one point; the text describes the point."""


@dataclass(frozen=True)
class Planned:
    """Every point of a sweep, composed."""

    points: tuple[SweepPoint, ...]
    composed: tuple[Composed, ...]
    folder: Path
    notes: tuple[str, ...] = ()


def plan_sweep(overrides: Sequence[str], config_dir: Path | None) -> Planned:
    """Compose every point, so that an invalid one is rejected before the first one runs."""
    words = [without_plus(text) for text in overrides]
    wanted = [text for text in words if text.startswith(_RUN_DIR)]
    points = _points([text for text in words if not text.startswith(_RUN_DIR)])
    composed = tuple(compose(point.overrides, config_dir) for point in points)
    for point in composed:
        resolve_metrics(point.config)
    refuse_early(point.config for point in composed)
    if wanted:
        return Planned(points, composed, compose(wanted[-1:], config_dir).run_dir)
    first = composed[0]
    folder = Path("runs") / first.config.experiment / "sweeps" / first.run_dir.name.removesuffix(RANDOM_SUFFIX)
    note = f"{RUN_DIR} in the project's files is for single runs: this sweep is in {folder}; {RUN_DIR}=DIR sets another folder."
    return Planned(points, composed, folder, (note,) if first.run_dir_in_files else ())


def _points(overrides: Sequence[str]) -> tuple[SweepPoint, ...]:
    expanded = expand_sweep(overrides)
    varying = {index for index in range(len(overrides)) if len({point[index] for point in expanded}) > 1}
    return tuple(
        SweepPoint(tuple(point), tuple(text for index, text in enumerate(point) if index in varying)) for point in expanded
    )


def begin_sweep(planned: Planned, command: Sequence[str], config_dir: Path | None) -> SweepFolder:
    """Create the folder of a sweep, with its points in sweep.json."""
    folder = SweepFolder.create(planned.folder)
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    kept = str(config_dir.resolve()) if config_dir else None
    folder.write(Sweep(SCHEMA, __version__, created, tuple(command), kept, planned.points))
    return folder


def run_sweep(folder: SweepFolder, run_one: RunOne) -> LlmPerfError | None:
    """Run every point that is not complete, or whose run is lost or damaged.

    Return the error that the command ends with: an interruption, or how many points failed. Raise ConfigError on other hardware.
    """
    sweep = folder.read()
    config_dir = Path(sweep.config_dir) if sweep.config_dir else None
    waiting = [
        number for number, point in enumerate(sweep.points) if point.status != "complete" or damage_of(point, folder.run(point))
    ]
    composed = {number: compose(sweep.points[number].overrides, config_dir) for number in waiting}
    if waiting:
        require_same_hardware(folder, sweep, composed[waiting[0]].config.hardware.device_index)
        _require_same_weights(folder, sweep, config_dir)
    failed = 0
    for number in waiting:
        point = sweep.points[number]
        words = f"run {number + 1} of {len(sweep.points)}: {' '.join(point.swept) or 'as given'}"
        try:
            run, error = run_one(replace(composed[number], run_dir=folder.point_folder(number)), words)
            status = run.manifest().status
            if error is not None and status == "complete":  # complete, but with an implausible figure
                status = "partial"
            point = replace(point, folder=run.path.name, status=status, why=_why(error) if error else run.manifest().why)
        except LlmPerfError as raised:  # it left no folder
            error = raised
            point = replace(point, status="failed", why=_why(raised))
        folder.update(number, point)
        if isinstance(error, Interrupted):
            return Interrupted(error.fact, f"`llm-perf run --resume {folder.path}` runs the points that are not complete.")
        failed += error is not None
    if failed:
        return CaptureError(
            f"{failed} of {len(waiting)} runs of the sweep did not complete.",
            f"See {folder.sweep_file} for the reasons; `llm-perf run --resume {folder.path}` runs them again.",
        )
    return None


def _require_same_weights(folder: SweepFolder, sweep: Sweep, config_dir: Path | None) -> None:
    """Raise ConfigError if complete points had random weights and would now have real ones, or the other way round."""
    now: dict[tuple[str, ...], str] = {}
    for number, point in enumerate(sweep.points):
        run = folder.run(point)
        if point.status != "complete" or isinstance(run, Missing) or not run.weights:
            continue
        chosen = tuple(text for text in point.overrides if text.lstrip("+").startswith("model"))
        if chosen not in now:
            now[chosen] = "random" if compose(chosen, config_dir).config.model.source == "random" else "real"
        if run.weights != now[chosen]:
            raise ConfigError(
                f"Point {number} of the sweep had {run.weights} weights; its settings now select {now[chosen]} ones.",
                "Restore the links in models/ and the files in conf/ as they were, or start a new sweep.",
            )


def _why(error: LlmPerfError) -> str:
    """Return the error and its remedy on one line."""
    return f"{error.fact} {error.remedy}" if error.remedy else error.fact


# --- sweep report -----------------------------------------------------------------------------------------------------


def report_sweep(path: Path) -> tuple[SweepFolder, SweepReport]:
    """Write sweep.html and sweep.md."""
    folder = SweepFolder.open(path)
    sweep = folder.read()
    entries = [_entry(folder, point) for point in sweep.points]
    found = SweepReport("/".join(folder.path.parts[-3:]), sweep.created, sweep.command, sweep_rows(entries), str(folder.path))
    document = sweep_document(found)
    write_whole(folder.page_file, render_html(document).encode())
    write_whole(folder.report_file, render_markdown(document).encode())
    return folder, found


def _entry(folder: SweepFolder, point: SweepPoint) -> SweepEntry:
    """Return a point in its current state: its run may have been damaged since sweep.json was written."""
    run = folder.run(point)
    damage = damage_of(point, run)
    status, why = (point.status, point.why) if damage is None else ("damaged", damage.why)
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

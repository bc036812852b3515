"""One run after the other over several values: every point is composed before the first one starts, and has a folder of its own.

No tool is ever wrapped around more than one configuration, so each point has reports of its own.
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
from llm_perf_opt.config.composition import Composed, compose, expand_sweep
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
"""Facts of a machine that a sweep may set itself."""
_GPU = "gpu.name"


def hardware_of(analysis: RunAnalysis) -> Hardware:
    """What a point ran on, as a comparison knows it."""
    return {key: value for key, value in facts_of(analysis)["hardware"].items() if key not in _SETTINGS}


def refuse_elsewhere(folder: SweepFolder, sweep: Sweep, device_index: int) -> None:
    """A ConfigError where the points that are complete were measured on other hardware than there is here.

    They would stand in one table with those still to be run, and no setting would say why they differ.
    """
    here: dict[str, object] | None = None
    for number, point in enumerate(sweep.points):
        run = folder.run(point)
        if point.status != "complete" or isinstance(run, Missing) or damage_of(point, run):
            continue
        try:
            measured = analyze(run, traces=False)
        except LlmPerfError:  # what it ran on is not known: its row says why
            continue
        here = here or environment(device_index)
        words = _other(hardware_of(measured), hardware_of(replace(measured, env=here, timings=Missing("not run yet"))))
        if words:
            raise ConfigError(
                f"This is not the hardware that the sweep has been measured on: here {words} (point {number}). "
                "Points of several machines cannot be ranked with each other.",
                f"Go on with {folder.path} on that hardware, or begin a sweep of its own here.",
            )


def _other(there: Hardware, here: Hardware) -> str:
    if _GPU in there and _GPU not in here:
        return f"no GPU can be seen (the sweep: {there[_GPU]})"
    return differences(there, here, "the sweep")


_RUN_DIR = "hydra.run.dir="

RunOne = Callable[[Composed, str], tuple[RunFolder, LlmPerfError | None]]
"""Captures and reports one point; the text says which one it is."""


@dataclass(frozen=True)
class Planned:
    """Every point of a sweep, composed."""

    points: tuple[SweepPoint, ...]
    composed: tuple[Composed, ...]
    folder: Path


def plan_sweep(overrides: Sequence[str], config_dir: Path | None) -> Planned:
    """Compose every point: what is wrong with the last one is told before the first one runs."""
    wanted = [text for text in overrides if text.startswith(_RUN_DIR)]
    points = _points([text for text in overrides if not text.startswith(_RUN_DIR)])
    composed = tuple(compose(point.overrides, config_dir) for point in points)
    for one in composed:
        resolve_metrics(one.config)
    refuse_early(one.config for one in composed)
    if wanted:
        folder = compose(wanted[-1:], config_dir).run_dir
    else:
        first = composed[0]
        folder = Path("runs") / first.config.experiment / "sweeps" / first.run_dir.name
    return Planned(points, composed, folder)


def _points(overrides: Sequence[str]) -> tuple[SweepPoint, ...]:
    expanded = expand_sweep(overrides)
    varying = {index for index in range(len(overrides)) if len({point[index] for point in expanded}) > 1}
    return tuple(
        SweepPoint(tuple(point), tuple(text for index, text in enumerate(point) if index in varying)) for point in expanded
    )


def begin_sweep(planned: Planned, command: Sequence[str], config_dir: Path | None) -> SweepFolder:
    """Write down what is to be run."""
    folder = SweepFolder.create(planned.folder)
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    kept = str(config_dir.resolve()) if config_dir else None
    folder.write(Sweep(SCHEMA, __version__, created, tuple(command), kept, planned.points))
    return folder


def run_sweep(folder: SweepFolder, run_one: RunOne) -> LlmPerfError | None:
    """Run every point that is not complete, or whose run is lost or damaged; on the hardware of those that are, or not at all.

    Returns what the caller ends with: an interruption, or how many points failed.
    """
    sweep = folder.read()
    config_dir = Path(sweep.config_dir) if sweep.config_dir else None
    waiting = [
        number for number, point in enumerate(sweep.points) if point.status != "complete" or damage_of(point, folder.run(point))
    ]
    composed = {number: compose(sweep.points[number].overrides, config_dir) for number in waiting}
    if waiting:
        refuse_elsewhere(folder, sweep, composed[waiting[0]].config.hardware.device_index)
    failed = 0
    for number in waiting:
        point = sweep.points[number]
        words = f"run {number + 1} of {len(sweep.points)}: {' '.join(point.swept) or 'as given'}"
        try:
            run, error = run_one(replace(composed[number], run_dir=folder.point_folder(number)), words)
            status = run.manifest().status
            if error is not None and status == "complete":  # captured whole, but with a figure that cannot be
                status = "partial"
            point = replace(point, folder=run.path.name, status=status, why=_why(error) if error else run.manifest().why)
        except LlmPerfError as raised:  # no folder could be made of it
            error = raised
            point = replace(point, status="failed", why=_why(raised))
        folder.update(number, point)
        if isinstance(error, Interrupted):
            return Interrupted(error.fact, f"`llm-perf run --resume {folder.path}` goes on with what is not complete.")
        failed += error is not None
    if failed:
        return CaptureError(
            f"{failed} of {len(waiting)} runs of the sweep did not complete.",
            f"{folder.sweep_file} says why; `llm-perf run --resume {folder.path}` tries them again.",
        )
    return None


def _why(error: LlmPerfError) -> str:
    """What went wrong and what to do about it, on one line."""
    return f"{error.fact} {error.remedy}" if error.remedy else error.fact


# --- sweep report -----------------------------------------------------------------------------------------------------


def report_sweep(path: Path) -> tuple[SweepFolder, SweepReport]:
    """Make sweep.html and sweep.md anew."""
    folder = SweepFolder.open(path)
    sweep = folder.read()
    entries = [_entry(folder, point) for point in sweep.points]
    found = SweepReport("/".join(folder.path.parts[-3:]), sweep.created, sweep.command, sweep_rows(entries), str(folder.path))
    document = sweep_document(found)
    write_whole(folder.page_file, render_html(document).encode())
    write_whole(folder.report_file, render_markdown(document).encode())
    return folder, found


def _entry(folder: SweepFolder, point: SweepPoint) -> SweepEntry:
    """As the folder is now: sweep.json says what became of the point, not what became of its run afterwards."""
    run = folder.run(point)
    damage = damage_of(point, run)
    status, why = (point.status, point.why) if damage is None else ("damaged", damage.why)
    analysis = _analysis(run)
    hardware = {} if isinstance(analysis, Missing) else hardware_of(analysis)
    return SweepEntry(point.swept, status, why, point.folder, analysis, _page(folder, point), hardware)


def _page(folder: SweepFolder, point: SweepPoint) -> str:
    """The point's own report; a run that ended early, or was moved away, may have none."""
    run = RunFolder(folder.path / point.folder)
    pages = [page for page in (run.page_file, run.report_file) if point.folder and page.is_file()]
    return pages[0].relative_to(folder.path).as_posix() if pages else ""


def _analysis(run: Maybe[RunReader]) -> Maybe[RunAnalysis]:
    if isinstance(run, Missing):
        return run
    try:
        return analyze(run, traces=False)
    except LlmPerfError as error:  # whatever one point lacks, the others are shown
        return Missing(error.fact)


def shortcoming(found: SweepReport) -> LlmPerfError | None:
    """What a verb ends with where not every point is complete and stands beside the others."""
    lacking = [row for row in found.rows if row.status != "complete" or not row.ranked]
    if not lacking:
        return None
    kinds = Counter(row.status for row in lacking)
    return CaptureError(
        f"{len(lacking)} of {len(found.rows)} points of the sweep are not as they should be: "
        f"{', '.join(f'{status} ({count})' for status, count in kinds.items())}.",
        "Their rows in the report say why.",
    )

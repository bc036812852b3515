"""One run after the other over several values: every point is composed before the first one starts, and has a folder of its own.

No tool is ever wrapped around more than one configuration, so each point has reports of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from llm_perf_opt import __version__
from llm_perf_opt.analysis.comparison.facts import facts_of
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.sweep_ran import Hardware, differences
from llm_perf_opt.config.composition import Composed, compose, expand_sweep
from llm_perf_opt.core.errors import CaptureError, ConfigError, Interrupted, LlmPerfError
from llm_perf_opt.core.records import SCHEMA, Missing
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.profiling.preflight import refuse_early
from llm_perf_opt.profiling.provenance import environment
from llm_perf_opt.profiling.requested_metrics import resolve_metrics
from llm_perf_opt.workflows.analyze_run import analyze
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

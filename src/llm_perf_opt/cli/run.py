"""Profile a model, or a sweep."""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llm_perf_opt.cli.completing import complete_override, complete_sweep
from llm_perf_opt.cli.outcome import outcome, print_outcome
from llm_perf_opt.cli.shared import Debug, Json, Quiet, command_line, note_debug, print_json, raise_if
from llm_perf_opt.core.errors import ConfigError, Interrupted, LlmPerfError, interrupted, unreported
from llm_perf_opt.core.processes import under_nsys

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llm_perf_opt.analysis.run_analysis import RunAnalysis
    from llm_perf_opt.config.composition import Composed
    from llm_perf_opt.config.schema import LauncherConfig
    from llm_perf_opt.core.records import Maybe
    from llm_perf_opt.core.run_folder import RunFolder
    from llm_perf_opt.workflows.sweep import Planned, RunOne
    from llm_perf_opt.workflows.sweep_folder import SweepFolder


def run(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="GROUP=OPTION or KEY=VALUE: model=qwen2_5_1_5b runtime.batch_size=4.",
            autocompletion=complete_override,
        ),
    ] = None,
    config_dir: Annotated[
        Path | None, typer.Option(help="A folder with your own options: model/mine.yaml, runtime/mine.yaml …")
    ] = None,
    multirun: Annotated[
        bool, typer.Option("--multirun", "-m", help="Run a sweep, one run per value: runtime.batch_size=1,4,16.")
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="SWEEP",
            help="Resume a sweep: run the points of this folder that are neither complete nor queued.",
            autocompletion=complete_sweep,
        ),
    ] = None,
    point: Annotated[
        tuple[Path, int] | None,
        typer.Option(
            metavar="SWEEP N",
            help="Run only point N of a planned sweep and write its folder; what a launcher starts on a node.",
        ),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="With -m: write the plan of the sweep for --point on other machines, and exit.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the resolved configuration and the passes, and exit.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Profile a model and write a run folder with its report.

    Groups: model, dataset, runtime, hardware, profiling; launcher, for sweeps on a cluster. `llm-perf options` lists their
    options.
    """
    note_debug(debug)
    _refuse_ranks(overrides or [])
    given = _settings(overrides or [])
    if plan and (not multirun or resume or point or dry_run):
        raise ConfigError("--plan writes the plan of a new sweep.", "Use `llm-perf run -m --plan KEY=A,B …`.")
    if point:
        _refuse_with_point(given, multirun=multirun, resume=resume, config_dir=config_dir, dry_run=dry_run)
        _point(*point, given, quiet=quiet, as_json=as_json)
    elif multirun or resume:
        _sweep(given, config_dir, resume, plan=plan, dry_run=dry_run, quiet=quiet, as_json=as_json)
    else:
        _one(given, config_dir, dry_run=dry_run, quiet=quiet, as_json=as_json)


def _refuse_ranks(overrides: list[str]) -> None:
    """Raise if torchrun has started this command several times: each would make its own run, and all would compete."""
    size = os.environ.get("WORLD_SIZE", "")
    if "TORCHELASTIC_RUN_ID" not in os.environ or not size.isdecimal() or int(size) < 2:
        return
    kept = [text for text in overrides if not text.startswith("runtime.tensor_parallel=")]
    raise ConfigError(
        f"torchrun started this command {size} times, which would make {size} competing runs: llm-perf starts the ranks itself.",
        f"Without torchrun: {shlex.join(['llm-perf', 'run', *kept, f'runtime.tensor_parallel={size}'])}",
    )


def _settings(overrides: list[str]) -> list[str]:
    """Return the overrides; those of the profiling guides are translated, with a note for each."""
    from llm_perf_opt.config.guide_overrides import from_guides

    translated = from_guides(overrides)
    for note in translated.notes:
        print("note:", note, file=sys.stderr)
    if under_nsys():
        print(
            "note: this command is running under nsys, which records every pass including model loading and hides kernels from "
            "torch.profiler. Use `llm-perf run profiling=nsys` to profile only the measured process.",
            file=sys.stderr,
        )
    return translated.overrides


def _one(overrides: list[str], config_dir: Path | None, *, dry_run: bool, quiet: bool, as_json: bool) -> None:
    from llm_perf_opt.config.composition import compose
    from llm_perf_opt.profiling.preflight import refuse_early

    composed = compose(overrides, config_dir)
    _print_notes([composed])
    if composed.config.launcher.type != "local":
        raise ConfigError(
            f"launcher.type={composed.config.launcher.type} is for sweeps.",
            "Add -m: without values to sweep over, it is a sweep of one point. Or add launcher=local.",
        )
    refuse_early([composed.config])  # before the capture code is loaded: reject what is already known to be wrong
    if dry_run:
        _print_plan(composed, as_json)
        return
    folder, analysis, images, error = _with_images(composed, quiet)
    if as_json:
        print_json(outcome(folder, analysis))
    else:
        print_outcome(folder, analysis, images)
    raise_if(error)


def _print_notes(points: "Iterable[Composed]", *more: str) -> None:
    """Print what became of settings in the user's files, and which linked weights are used."""
    for note in dict.fromkeys([*(note for point in points for note in point.config.project.notes), *more]):
        print("note:", note, file=sys.stderr)


def _capture(composed: "Composed", quiet: bool) -> "tuple[RunFolder, RunAnalysis | None, LlmPerfError | None]":
    from llm_perf_opt.cli.progress import progress_for
    from llm_perf_opt.profiling.capture import capture

    folder: RunFolder | None = None
    error: LlmPerfError | None = None
    try:
        with progress_for(quiet) as progress:
            folder, error = capture(composed, command_line(), progress)
        return folder, _finish(folder, error), error
    except (KeyboardInterrupt, Interrupted) as stopped:
        if folder is None:
            raise
        return folder, None, unreported(stopped, folder.path, error)


def _with_images(
    composed: "Composed", quiet: bool
) -> "tuple[RunFolder, RunAnalysis | None, Maybe[list[Path]], LlmPerfError | None]":
    from llm_perf_opt.core.records import Missing

    folder, analysis, error = _capture(composed, quiet)
    error = error or (analysis.fault if analysis else None)
    try:
        return folder, analysis, _images(folder, analysis), error
    except (KeyboardInterrupt, Interrupted) as stopped:
        return folder, analysis, Missing("interrupted"), unreported(stopped, folder.path, error)


def _refuse_with_point(overrides: list[str], **options: object) -> None:
    """Reject what a point does not take: the sweep has its settings. Those that can run code are typed all the same."""
    from llm_perf_opt.config.code_settings import may_run_code

    given = [text for text in overrides if not may_run_code(text)]
    given += [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if given:
        raise ConfigError(f"--point uses the settings of the sweep; it does not take {given[0]}.", "Use --point SWEEP N alone.")


def _point(place: Path, number: int, code: list[str], *, quiet: bool, as_json: bool) -> None:
    """Run one point of a sweep. Nothing but its own run folder is written. `code`: its settings that can run code, as typed."""
    from llm_perf_opt.core.processes import end_with_launcher
    from llm_perf_opt.workflows.sweep import run_planned
    from llm_perf_opt.workflows.sweep_folder import SweepFolder

    end_with_launcher()
    folder = SweepFolder.open(place)
    ran: list[str] = []
    report = _reported(quiet=quiet, as_json=as_json, one=True)

    def run_one(composed: "Composed", words: str) -> "tuple[RunFolder, LlmPerfError | None]":
        ran.append(words)
        return report(composed, words)

    error = run_planned(folder, number, run_one, code)
    if not ran and error is None:
        print(f"Point {number} of {folder.path} is complete; nothing was run.", file=sys.stderr)
    raise_if(error)


def _reported(*, quiet: bool, as_json: bool, one: bool = False) -> "RunOne":
    """Return the function that captures and reports a point, and prints its outcome."""

    def run_one(composed: "Composed", words: str) -> "tuple[RunFolder, LlmPerfError | None]":
        if not quiet:
            print(words, file=sys.stderr)
        run, analysis, images, error = _with_images(composed, quiet)
        if not as_json:
            print(words)
            print_outcome(run, analysis, images)
        elif one:
            print_json(outcome(run, analysis))
        return run, error

    return run_one


def _sweep(
    overrides: list[str], config_dir: Path | None, resume: Path | None, *, plan: bool, dry_run: bool, quiet: bool, as_json: bool
) -> None:
    from llm_perf_opt.workflows.sweep import begin_sweep, plan_sweep
    from llm_perf_opt.workflows.sweep_folder import SweepFolder, resume_hint
    from llm_perf_opt.workflows.sweep_plan import code_words, launcher_of, with_launcher

    if resume and (dry_run or config_dir):
        raise ConfigError(
            "--resume uses the settings of the sweep; it takes no other options.", "Use `llm-perf run --resume SWEEP` alone."
        )
    if resume:
        folder = SweepFolder.open(resume)
        folder.hold()
        code = code_words(folder, overrides)
        launcher = with_launcher(folder, launcher_of(folder), overrides)
    else:
        planned = plan_sweep(overrides, config_dir, elsewhere=plan)
        _print_notes(planned.composed, *planned.notes)
        if dry_run:
            print_json([point.overrides for point in planned.points]) if as_json else _print_points(planned)
            return
        if not plan:
            _require_launcher(planned.launcher)
        folder = begin_sweep(planned, command_line(), config_dir)
        if plan:
            _print_plan_of_sweep(folder, planned.code, as_json)
            return
        launcher, code = planned.launcher, planned.code
    try:
        _run_points(folder, launcher, code, resumed=resume is not None, quiet=quiet, as_json=as_json)
    except KeyboardInterrupt as stopped:
        raise interrupted(stopped, resume_hint(folder)) from stopped


def _run_points(
    folder: "SweepFolder", launcher: "LauncherConfig", code: list[str], *, resumed: bool, quiet: bool, as_json: bool
) -> None:
    """Run the points that are left, write the page of the sweep and print where it is."""
    from llm_perf_opt.workflows.sweep import report_sweep, report_unreported, sweep_error

    for problem in report_unreported(folder) if resumed else ():
        print("warning:", problem, file=sys.stderr)
    error = _launched(folder, launcher, code, _reported(quiet=quiet, as_json=as_json), quiet=quiet)
    try:
        _, found = report_sweep(folder.path)
        error = error or (sweep_error(found) if launcher.wait else None)
    except LlmPerfError:  # a page that fails must not hide why points failed
        if error is None:
            raise
    if as_json:
        print_json({"sweep": str(folder.path), "points": folder.points()})
    else:
        print(f"sweep: {folder.path}\nreport: {folder.page_file}")
    raise_if(error)


def _print_plan_of_sweep(folder: "SweepFolder", code: list[str], as_json: bool) -> None:
    """Print the folder of a planned sweep, and how its points are run."""
    points = folder.points()
    if as_json:
        print_json({"sweep": str(folder.path), "points": points})
        return
    place = shlex.quote(str(folder.path))
    one = " ".join(["llm-perf run --point", place, "N", *map(shlex.quote, code)])
    print(f"sweep: {folder.path}\n# points: 0 to {len(points) - 1}; run one with: {one}")
    print(f"# when they have ended: llm-perf report {place}")


def _launched(
    folder: "SweepFolder", launcher: "LauncherConfig", code: list[str], run_one: "RunOne", *, quiet: bool
) -> LlmPerfError | None:
    """Run the points that are left where the launcher says."""
    from llm_perf_opt.workflows.sweep import run_sweep
    from llm_perf_opt.workflows.sweep_folder import resume_command
    from llm_perf_opt.workflows.sweep_plan import enter_project, gpus_of_points

    def say(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr)

    if launcher.type == "local":
        return run_sweep(folder, run_one, code)
    from llm_perf_opt.workflows.clusters.ray_tasks import run_on_ray
    from llm_perf_opt.workflows.clusters.slurm import run_on_slurm

    enter_project(folder, folder.read())
    submit = run_on_slurm if launcher.type == "slurm" else run_on_ray
    try:
        return submit(folder, launcher, gpus_of_points(folder, launcher, code), say, code)
    except LlmPerfError as error:
        again = resume_command(folder)
        if again in error.remedy:
            raise
        raise type(error)(error.fact, f"{error.remedy} `{again}` continues the sweep.".lstrip()) from error


def _require_launcher(launcher: "LauncherConfig") -> None:
    """Raise ResourceError if a cluster cannot be used from this machine, before the sweep has a folder."""
    if launcher.type == "slurm":
        from llm_perf_opt.workflows.clusters.slurm import require_slurm

        require_slurm()
    elif launcher.type == "ray":
        from llm_perf_opt.workflows.clusters.ray_tasks import require_ray

        require_ray()


def _images(folder: "RunFolder", analysis: "RunAnalysis | None") -> "Maybe[list[Path]]":
    from llm_perf_opt.core.records import Missing
    from llm_perf_opt.workflows.images import draw_images

    return Missing("the run has no report") if analysis is None else draw_images(folder)


def _print_points(planned: "Planned") -> None:
    for number, point in enumerate(planned.points):
        print(f"{number:3d}  {' '.join(point.overrides)}")
    print(f"# sweep folder: {planned.folder}")


def _finish(folder: "RunFolder", error: LlmPerfError | None) -> "RunAnalysis | None":
    """Write the reports, also of a run that failed; an error in the report must not hide why the run failed."""
    from llm_perf_opt.workflows.analyze_run import report_run
    from llm_perf_opt.workflows.run_reader import RunReader

    try:
        return report_run(RunReader(folder))
    except LlmPerfError:
        if error is None:
            raise
        return None


def _print_plan(composed: "Composed", as_json: bool) -> None:
    from dataclasses import asdict

    from llm_perf_opt.config.composition import config_to_yaml
    from llm_perf_opt.config.passes import planned_passes
    from llm_perf_opt.profiling.requested_metrics import resolve_metrics

    config, run_dir = resolve_metrics(composed.config), composed.checked_run_dir()
    passes = planned_passes(config)
    if as_json:
        print_json({"run_dir": str(run_dir), "passes": passes, "config": asdict(config)})
        return
    print(config_to_yaml(config))
    print(f"# passes: {', '.join(passes)}\n# run folder: {run_dir}")

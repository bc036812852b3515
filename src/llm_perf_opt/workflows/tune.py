"""`llm-perf tune`: find a faster configuration of a run, step by step, and write the page."""

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from llm_perf_opt import __version__
from llm_perf_opt.analysis.comparison.differences import config_differences
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.tuning.deciding import Decision
from llm_perf_opt.analysis.tuning.goals import GOALS, Constraint, Goal, objective_named, parse_constraints
from llm_perf_opt.analysis.tuning.measures import level_of
from llm_perf_opt.analysis.tuning.outcomes import distance_of
from llm_perf_opt.analysis.tuning.records import ConstraintLine, StageDistance, Step, TuneResult, tune_json
from llm_perf_opt.analysis.tuning.tokens import Tried
from llm_perf_opt.config.code_settings import CodeSetting
from llm_perf_opt.config.composition import Composed, compose, with_overrides
from llm_perf_opt.config.runtimes import Lever, Machine, traits_of
from llm_perf_opt.core.errors import ConfigError, Interrupted, LlmPerfError, ParseError, ResourceError, interrupted
from llm_perf_opt.core.records import CleanTimings, Manifest, Maybe, Missing
from llm_perf_opt.core.units import duration
from llm_perf_opt.profiling.passes import Listener
from llm_perf_opt.report.html import render_html
from llm_perf_opt.report.markdown import render_markdown
from llm_perf_opt.report.tune import final_command, tune_document
from llm_perf_opt.report.tune_charts import staircase_svg
from llm_perf_opt.workflows.advise import captured_run, overridden, require_same_device
from llm_perf_opt.workflows.analyze_run import analyze, is_reported, report_run
from llm_perf_opt.workflows.calibration import add_calibration, read_calibration
from llm_perf_opt.workflows.run_reader import RunReader
from llm_perf_opt.workflows.tune_folder import SCHEMA, TuneFolder, TuneOptions, TuneState, resume_command
from llm_perf_opt.workflows.tune_options import allowed_code, check_for_base, check_options, user_levers
from llm_perf_opt.workflows.tune_runs import (
    Clock,
    Configuration,
    OutOfBudgetError,
    Recorder,
    Runs,
    StoppedError,
    again_s,
    configuration,
)
from llm_perf_opt.workflows.tune_search import Place, Rules, Search

RUNS_ON_CPU, RUNS_ON_GPU = 3, 2
"""Runs per side of a decision. On a CPU, three measure how much processes differ; an accelerator needs fewer."""

_FEW_RUNS = (
    f"--runs {{}} may be too few on a CPU: with fewer than {RUNS_ON_CPU} runs per side, a change is kept only if telemetry shows "
    "that the machine was quiet (profiling.nvml.enable=true)."
)


def measure_base(
    overrides: Sequence[str], config_dir: Path | None, command: Sequence[str], listener: Listener, options: TuneOptions
) -> tuple[Path, float]:
    """Make the run that a search starts from; return its folder and its seconds. Options that do not fit it are refused first."""
    begun = time.monotonic()
    composed = compose(overrides, config_dir)
    if composed.config.profiling.logits_reference is not None:
        raise ConfigError(
            "profiling.logits_reference cannot be set here: `tune` compares logits with those of the base.", "Leave it out."
        )
    check_for_base(options, asdict(composed.config))
    if options.logits:
        profiling = replace(composed.config.profiling, logits=True)
        composed = replace(composed, config=replace(composed.config, profiling=profiling))
    run, error = captured_run(composed, command, listener)
    path = run.folder.path
    if isinstance(error, Interrupted) and run.manifest.status == "complete":
        raise Interrupted(error.fact, f"`{shlex.join(['llm-perf', 'tune', str(path)])}` searches from this run.")
    if error is not None:
        raise error
    return path, time.monotonic() - begun


def begin(
    base: Path,
    options: TuneOptions,
    command: Sequence[str],
    *,
    fresh: bool = False,
    spent_s: float = 0.0,
    code: Sequence[str] = (),
) -> TuneFolder:
    """Create the folder of a search. `fresh`: the base was measured just now, which took `spent_s`.

    `code`: settings of the base that can run code, as typed.
    """
    check_options(options)
    run = RunReader.open(base)
    if run.manifest.kind != "run" or not run.settings:
        raise ParseError(
            f"{base} cannot be tuned: it is not a run of a model with its configuration.", "Give a run of `llm-perf run`."
        )
    allowed_code(run, options, code, shlex.join(["llm-perf", "tune", str(base)]), typed_levers=True)
    device = "" if isinstance(run.timings, Missing) else run.timings.model.device
    check_for_base(options, asdict(with_overrides(run.settings, ())), device, is_run=True)
    if not fresh:
        _check_budget(run, options.budget_s)
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    points = () if isinstance(run.timings, Missing) else read_calibration(run.timings.model.device_name)[0]
    state = TuneState(
        SCHEMA, __version__, created, tuple(command), str(run.folder.path), fresh, options, points, spent_s=spent_s
    )  # fmt: skip
    return TuneFolder.create(run.folder.path, state)


def _check_budget(run: RunReader, budget_s: float) -> None:
    """Raise ConfigError if the run is known to take longer than the budget, before the search has a folder."""
    needed_s = again_s(_pass_seconds(run.manifest)[0], run.timings)
    if budget_s <= needed_s:
        given, needed = (duration(seconds * 1e9) for seconds in (budget_s, needed_s))
        raise ConfigError(
            f"--budget {given} is too short to measure the base, which takes about {needed}.", "Give a longer --budget."
        )


def resume(path: Path, budget_s: float | None) -> TuneFolder:
    """Open the last search of a run; with a new budget if one is given, which must be more than what was spent."""
    folder = TuneFolder.find(path)
    state = folder.read()
    if budget_s is not None and budget_s <= state.spent_s:
        folder.close()
        raise ConfigError(
            f"--budget {duration(budget_s * 1e9)} is too short: more than {duration(state.spent_s * 1e9)} is needed.",
            "It counts from the start of the search, which has spent this time. To see the result alone, leave out --budget.",
        )
    if budget_s is not None:
        folder.write_state(replace(state, options=replace(state.options, budget_s=budget_s)))
    return folder


class CapturedRuns:
    """Runs of this machine: ordinary run folders inside the folder of the search."""

    def __init__(self, folder: Path, base: RunReader, listener: Listener, code: tuple[CodeSetting, ...] = ()) -> None:
        self._folder, self._base, self._listener, self._code = folder, base, listener, code
        self._values, self._command = base.settings, base.manifest.command
        self.logits = False
        """Whether runs record logits."""
        self.reference: str | None = None
        """The run whose tokens are fed for that; None: the next run is that one."""

    def measure(
        self, overrides: tuple[str, ...], name: str, *, profiled: bool, limit_s: float
    ) -> tuple[Path | None, LlmPerfError | None]:
        """Capture and report a run."""
        try:
            composed = Composed(self._config(overrides, profiled, limit_s), self._folder / name, code=self._code)
            command = final_command(self._command, overrides) or self._command
            run, error = captured_run(composed, command, self._listener)
        except LlmPerfError as raised:
            return None, raised
        return run.folder.path, error

    def _config(self, overrides: tuple[str, ...], profiled: bool, limit_s: float) -> Any:
        """Return the configuration, unprofiled unless its findings are wanted. No pass may take longer than the budget."""
        config = overridden(self._values, overrides, profiled=profiled)
        profiling = config.profiling
        limit = min(profiling.pass_timeout_s, max(limit_s, 1.0))
        reference = self.reference if self.logits else None
        profiling = replace(profiling, pass_timeout_s=limit, logits=self.logits, logits_reference=reference)
        return replace(config, profiling=profiling)

    def read(self, path: Path, *, profiled: bool) -> Tried:
        """Analyze a run. Unprofiled runs measure no peaks, so those of the base count for all runs with its hardware settings.

        If it is a run of the search and its report was interrupted, that is written first.
        """
        run = RunReader.open(path)
        if path.parent == self._folder and not is_reported(run.folder):
            report_run(run)
        return Tried(str(run.folder.path), analyze(run, traces=profiled, like=self._base), run.tokens, run.logits)


@dataclass(frozen=True)
class _Start:
    """The base and what can be changed in it."""

    place: Place
    given: Tried
    values: Mapping[str, Any]
    rules: Rules
    levers: tuple[Lever, ...]
    notes: tuple[str, ...]


def tune(
    folder: TuneFolder,
    listener: Listener,
    *,
    runs: Runs | None = None,
    clock: Clock = time.monotonic,
    on_step: Callable[[Step], None] = lambda _: None,
    code: Sequence[str] = (),
) -> tuple[TuneResult, LlmPerfError | None]:
    """Run or resume a search, and write its pages. Return the result and the interruption that ended it, if one did.

    `code`: settings of the base and of levers that can run code, as typed.
    """
    state = folder.read()
    run = RunReader.open(Path(state.base))
    values, again = run.settings, resume_command(state.base)
    here = runs is None
    allowed = allowed_code(run, state.options, code, again, typed_levers=folder.begun_here)
    captured = CapturedRuns(folder.path, run, listener, allowed)
    captured.logits = state.options.logits
    runs = runs or captured
    recorder = Recorder(folder, runs, clock)
    try:
        given = runs.read(Path(state.base), profiled=True)
        if here:
            require_same_device(run.folder, given.analysis, values)
        start = _start(state, given, values, recorder)
    except (StoppedError, Interrupted, KeyboardInterrupt) as stop:
        raise Interrupted(_interruption(stop).fact, f"Nothing was tried yet. `{again}` continues.") from stop
    captured.reference = start.place.runs[0].path
    search = Search(start.rules, values, start.place, recorder, start.levers, state.calibration)
    stopped: LlmPerfError | None = None

    def stepped(step: Step) -> None:
        on_step(step)
        partial = _result(folder, start, search, recorder, (None, "the search has not ended", None))
        folder.write_record(folder.result_file, tune_json(partial))  # a search that is killed shows what it had kept

    search.on_step = stepped
    confirmed: tuple[bool | None, str, Decision | None] = (None, "the search was interrupted", None)
    try:
        search.run()
        confirmed = search.confirm()
    except (StoppedError, KeyboardInterrupt) as stop:
        stopped = Interrupted(_interruption(stop).fact, f"`{again}` continues the search.")
        search.progress.ending, search.progress.why = "interrupted", stopped.fact.rstrip(".")
    unkept = add_calibration(search.progress.points)
    start = replace(start, notes=(*start.notes, *([unkept] if unkept else [])))
    found = _result(folder, start, search, recorder, confirmed)
    _write(folder, found)
    folder.write_state(replace(folder.read(), spent_s=recorder.spent_s, ended="" if stopped else found.why))
    return found, stopped


def _interruption(stop: StoppedError | Interrupted | KeyboardInterrupt) -> Interrupted:
    """Return the error for a stop during a run, or for one between the runs, while they are read."""
    if isinstance(stop, KeyboardInterrupt):
        return interrupted(stop, "")
    return stop.error if isinstance(stop, StoppedError) else stop


def _start(state: TuneState, given: Tried, values: Mapping[str, Any], recorder: Recorder) -> _Start:
    """Measure the base again unless it was measured for this search, and return what the search starts with."""
    goal = objective_named(state.options.objective)
    unchanged = configuration(values, ())
    first = given if state.fresh else _again(recorder, unchanged)
    notes = [warning.text for warning in first.analysis.warnings]
    timings = first.timings
    if isinstance(timings, Missing):
        raise ParseError(f"{first.path} has no times to improve: {timings.why}.", "Measure the base again.")
    value = level_of([first.analysis], goal)
    if isinstance(value, Missing):
        raise ConfigError(f"--objective {goal.name} cannot be measured here: {value.why}.", "Choose another objective.")
    trace = given.analysis.trace
    has_findings = not isinstance(trace, Missing) and trace.complete
    if not has_findings:
        notes.append(f"The base has no findings, so only levers without a prediction are tried: {trace.why}")
    notes += read_calibration(timings.model.device_name)[1]
    options = state.options
    on_cpu = timings.model.device.startswith("cpu")
    if on_cpu and options.runs and options.runs < RUNS_ON_CPU:
        notes.append(_FEW_RUNS.format(options.runs))
    levers = (*user_levers(options.levers), *traits_of(str(values["runtime"]["type"])).levers(_machine(timings, given.analysis)))
    rules = Rules(
        goal,
        parse_constraints(options.constraints),
        options.tokens,
        options.lossy,
        options.runs or (RUNS_ON_CPU if on_cpu else RUNS_ON_GPU),
        options.top,
        options.max_steps,
        options.max_logit_diff,
    )
    recorder.expect(unchanged, *_pass_seconds(given.analysis.manifest), given.timings)
    place = Place(unchanged, (first,), given if has_findings else None)
    return _Start(place, given, values, rules, levers, tuple(notes))


def _pass_seconds(base: Manifest) -> tuple[float, float]:
    """Return how long the unprofiled pass of the base took, and all others together."""
    seconds = {entry.name: entry.seconds or 0.0 for entry in base.passes}
    clean = seconds.pop("clean", 0.0)
    seconds.pop("nvml", None)  # it runs next to the unprofiled pass
    return clean, sum(seconds.values())


def _again(recorder: Recorder, unchanged: Configuration) -> Tried:
    try:
        found = recorder.run(unchanged, "base")
    except OutOfBudgetError:
        raise ConfigError("The budget is too short to measure the base.", "Give a longer --budget.") from None
    if isinstance(found, Missing):
        raise ParseError(f"The base could not be measured again: {found.why}", "See run.json in its folder for the reason.")
    return found


def _machine(timings: CleanTimings, analysis: RunAnalysis) -> Machine:
    compiler = analysis.env.get("compiler")
    missing = isinstance(compiler, str) and compiler.startswith("n/a")
    return Machine(timings.model.device.split(":")[0], len(os.sched_getaffinity(0)), not missing)


# --- the result ---------------------------------------------------------------------------------------------------------


def _result(
    folder: TuneFolder, start: _Start, search: Search, recorder: Recorder, confirmed: tuple[bool | None, str, Decision | None]
) -> TuneResult:
    state, progress, goal = folder.read(), search.progress, start.rules.goal
    lost = confirmed[0] is False
    best = search.base if lost else search.current
    kept = [step for step in progress.steps if step.kept]
    moved = bool(best.configuration.overrides) and bool(kept)
    best_run = best.profiled or best.runs[-1]
    base_value = _base_value(search, goal, confirmed[2])
    recorded = level_of([start.given.analysis], goal)
    points = {(point.run, point.made, point.finding): point for point in (*state.calibration, *progress.points)}
    timings = start.place.runs[0].timings
    return TuneResult(
        base=state.base,
        best=best_run.path if moved else state.base,
        objective=goal.name,
        unit=goal.unit,
        steps=tuple(progress.steps),
        ending=progress.ending,
        why=progress.why or "the search is running",
        overrides=best.configuration.overrides if moved else (),
        confirmation=confirmed[2],
        confirmed=confirmed[0],
        confirmed_why=confirmed[1],
        not_tried=tuple(progress.not_tried),
        constraints=tuple(_constraint_line(one, search.base, best) for one in start.rules.constraints),
        base_value=None if isinstance(base_value, Missing) else base_value,
        recorded_value=None if state.fresh or isinstance(recorded, Missing) else recorded,
        remeasured=not state.fresh,
        base_distance=_base_distance(start, recorded, base_value),
        spent_s=recorder.spent_s,
        budget_s=state.options.budget_s,
        runs_per_side=start.rules.runs,
        command=tuple(final_command(start.given.analysis.manifest.command, best.configuration.overrides if moved else ())),
        diff=_diff(start.given.analysis, best_run.analysis) if moved else (),
        calibration=tuple(points.values()),
        device="" if isinstance(timings, Missing) else timings.model.device_name,
        notes=start.notes,
    )


def _base_value(search: Search, goal: Goal, claim: Decision | None) -> Maybe[float]:
    """Return the objective in the base: in the runs that the claim is based on, otherwise in the first run."""
    if claim is not None and claim.goal == goal.name and claim.before is not None:
        return claim.before
    return level_of(search.base.analyses[:1], goal)


def _base_distance(start: _Start, recorded: Maybe[float], value: Maybe[float]) -> StageDistance | None:
    """Return how far the base is from its roofline time, which is that of the given run, at the time that is shown."""
    goal, found = start.rules.goal, distance_of(start.given, start.rules.goal)
    if found is None or goal.unit != "ns" or isinstance(recorded, Missing) or isinstance(value, Missing):
        return distance_of(start.place.runs[0], goal)
    return replace(found, times=found.times * value / recorded)


def _constraint_line(constraint: Constraint, base: Place, best: Place) -> ConstraintLine:
    goal = GOALS[constraint.goal]
    values = [level_of(place.analyses, goal) for place in (base, best)]
    shown = [str(value) if isinstance(value, Missing) else goal.text(value) for value in values]
    return ConstraintLine(constraint.text, shown[0], shown[1], not constraint.broken_by(values[1]))


def _diff(base: RunAnalysis, best: RunAnalysis) -> tuple[tuple[str, str, str], ...]:
    rows = config_differences(base, best)
    return tuple((row.key, row.base, row.new) for row in rows if not row.key.startswith("profiling."))


def _write(folder: TuneFolder, found: TuneResult) -> None:
    """Write result.json, tune.html and tune.md."""
    folder.write_record(folder.result_file, tune_json(found))
    folder.write(folder.image_file, staircase_svg(found).encode())
    try:
        folder.write(folder.page_file, render_html(tune_document(found, folder.path.name)).encode())
    except ResourceError as error:  # jinja2 is not installed; the Markdown page does not need it
        found = replace(found, notes=(*found.notes, f"No tune.html: {error.fact} {error.remedy}"))
    folder.write(folder.report_file, render_markdown(tune_document(found, folder.path.name)).encode())

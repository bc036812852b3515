"""`llm-perf compare --plan`: how many runs a comparison needs, from pilot runs of one configuration."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from llm_perf_opt.analysis.comparison.compare import with_assumed_spread
from llm_perf_opt.analysis.comparison.differences import check_distinct, check_one_side
from llm_perf_opt.analysis.comparison.effects import Judgement
from llm_perf_opt.analysis.comparison.planning import ComparisonPlan, PlannedMetric, forecast, noise_of
from llm_perf_opt.analysis.comparison.statistics import LEAST_REPEATS
from llm_perf_opt.analysis.metrics import metric_named, value_of
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.stability import run_stability
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import CleanTimings, Maybe, Missing
from llm_perf_opt.core.units import percentage, significant
from llm_perf_opt.workflows.compare import analyzed, resolve
from llm_perf_opt.workflows.compare_serving import are_under_load

METRICS = ("e2e", "ttft", "tpot")
_MOST_EFFECT = 10.0
_FOLDERS = ("base", "new")


def plan_comparison(
    words: Sequence[str], runs_dir: Path, effect: float, power: float, repeats: int | None, judgement: Judgement
) -> ComparisonPlan:
    """Return the plan. Raise ConfigError if the pilots are not repeats of one configuration or the request makes no sense."""
    _check(effect, power, repeats, judgement)
    folders = resolve(words, runs_dir, "pilot")
    if are_under_load([folders]):
        raise ConfigError("--plan is for runs of a model; these put load on a server.", "Name runs that `llm-perf run` made.")
    runs = sorted((analyzed(path, traces=False) for path in folders), key=lambda run: run.manifest.created)
    check_distinct(runs)
    check_one_side("the plan", runs)
    timings = [_timings(run) for run in runs]
    if judgement.process_spread is None:
        judgement = with_assumed_spread(judgement, runs, timings)
    planned = repeats or min(len(run.iterations) for run in timings)
    metrics = tuple(_planned(key, timings, judgement, planned, effect, power) for key in METRICS)
    known = [metric.forecast for metric in metrics if not isinstance(metric.forecast, Missing)]
    needed = next((one.needed for one in known if isinstance(one.needed, Missing)), None)
    most = max((one.needed for one in known if not isinstance(one.needed, Missing)), default=0)
    count: Maybe[int] = needed or most or next(metric.forecast for metric in metrics if isinstance(metric.forecast, Missing))
    seconds = max(_seconds(run, timing, planned) for run, timing in zip(runs, timings, strict=True))
    return ComparisonPlan(
        pilots=tuple(run.run for run in runs),
        effect=effect,
        power=power,
        repeats=planned,
        metrics=metrics,
        runs=count,
        run_seconds=seconds,
        seconds=count if isinstance(count, Missing) else 2 * count * seconds,
        commands=count if isinstance(count, Missing) else _commands(runs[-1], count, repeats, runs_dir),
        cautions=tuple(_cautions(runs, timings, judgement)),
    )


def _check(effect: float, power: float, repeats: int | None, judgement: Judgement) -> None:
    if not 0 < abs(effect) <= _MOST_EFFECT or effect <= -1:
        raise ConfigError(
            f"--effect {significant(effect)} is no change to find.", "Write a change above zero, such as --effect 5%."
        )
    if abs(effect) < judgement.smallest:
        raise ConfigError(
            f"--effect {percentage(effect, 2)} gets no verdict however many runs there are: it is below --smallest.",
            f"Add --smallest {abs(effect) * 100:g}.",
        )
    if not 0.5 <= power < 1:
        raise ConfigError(f"--power {significant(power)} must be at least 50% and below 100%.", "Write --power 90%.")
    if repeats is not None and repeats < LEAST_REPEATS:
        raise ConfigError(f"--repeats {repeats}: a verdict needs {LEAST_REPEATS} repeats per run.", "Plan more repeats.")


def _timings(run: RunAnalysis) -> CleanTimings:
    if isinstance(run.timings, Missing) or not run.timings.iterations:
        why = run.timings.why if isinstance(run.timings, Missing) else "no iteration was measured"
        raise ConfigError(f"{run.run} has no times to plan with: {why}", "Name runs whose clean pass is complete.")
    return run.timings


def _planned(
    key: str, timings: Sequence[CleanTimings], judgement: Judgement, repeats: int, effect: float, power: float
) -> PlannedMetric:
    metric = metric_named(key)
    values = [[value_of(metric, repeat, run) for repeat in run.iterations] for run in timings]
    lost = next((value for run in values for value in run if isinstance(value, Missing)), None)
    noise = lost or noise_of(
        [[value for value in run if not isinstance(value, Missing)] for run in values], judgement.process_spread, repeats
    )
    return PlannedMetric(key, metric.label, noise if isinstance(noise, Missing) else forecast(noise, effect, power))


def _seconds(run: RunAnalysis, timings: CleanTimings, repeats: int) -> float:
    """Return how long a run takes: as the pilot did, with more or fewer repeats."""
    passes = sum(entry.seconds or 0.0 for entry in run.manifest.passes)
    measured = sum(repeat.total_ns for repeat in timings.iterations) / 1e9
    return max(passes, measured) + measured * (repeats / len(timings.iterations) - 1)


def _commands(pilot: RunAnalysis, count: int, repeats: int | None, runs_dir: Path) -> Maybe[tuple[str, ...]]:
    """Return the commands, as the pilot was made, into folders that do not exist yet."""
    words = [word for word in pilot.manifest.command if not word.startswith("hydra.run.dir=")]
    if words[:2] != ["llm-perf", "run"]:
        return Missing(f"{pilot.run} was not made by `llm-perf run`: repeat what made it, base and new in turn")
    if repeats is not None:
        words = [word for word in words if not word.startswith(("runtime.min_repeats=", "runtime.max_repeats="))]
        words += [f"runtime.min_repeats={repeats}", f"runtime.max_repeats={repeats}"]
    number = next(n for n in range(1, 10**6) if not any((runs_dir / f"plan{n}-{side}").exists() for side in _FOLDERS))
    places = [runs_dir / f"plan{number}-{side}" for side in _FOLDERS]
    made = [shlex.join([*words, f"hydra.run.dir={place / str(run + 1)}"]) for run in range(count) for place in places]
    return *made, shlex.join(["llm-perf", "compare", *(f"{place}/*" for place in places)])


def _cautions(runs: Sequence[RunAnalysis], timings: Sequence[CleanTimings], judgement: Judgement) -> list[str]:
    found = []
    if len(runs) == 1:
        spread = judgement.process_spread
        known = "none may be assumed here" if spread is None else f"{percentage(spread, 1)} is assumed, and twice that at most"
        found.append(f"One pilot does not show how much processes differ: {known}. Make 3 pilot runs to measure it.")
    elif len(runs) == 2:
        found.append("Two pilots show only roughly how much processes differ. A third narrows it much.")
    for run, timing in zip(runs, timings, strict=True):
        moved = run_stability(timing).get("e2e")
        if moved is not None and moved.moved:
            found.append(f"{run.run}: {moved.words}. The forecast takes that for correlated noise.")
    return found

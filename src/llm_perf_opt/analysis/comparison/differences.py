"""How runs differ, as configured and as recorded; whether they are comparable; and cautions for the reader."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llm_perf_opt.analysis.comparison.effects import Judgement, Order
from llm_perf_opt.analysis.comparison.facts import (
    KINDS,
    PROMPTS,
    WEIGHTS,
    Facts,
    Kind,
    facts_of_side,
    flatten,
    is_unavailable,
    machine_cautions,
)
from llm_perf_opt.analysis.comparison.statistics import RECOMMENDED_RUNS, are_several, is_measured, runs_to_measure
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.core.errors import ConfigError, nearest
from llm_perf_opt.core.records import CleanTimings, Missing
from llm_perf_opt.core.warnings import WarningId

_RELATED: dict[Kind, tuple[str, ...]] = {
    "hardware": ("hardware",),
    "model": ("model",),
    "workload": ("runtime.batch_size", "runtime.prompt_tokens", "runtime.num_new_tokens", "dataset"),
}
"""Settings that can cause a difference of this kind."""
ABSENT = "(not there)"
EMPTY_GROUP, UNSET = "{}", "null"
"""As written by `flatten`."""
_NEVER_AN_EXPERIMENT = ("experiment", "hydra", "launcher", "project")
_MOST_NAMED = 5
"""Settings that a message names; more are named by their group."""
_VOLATILE = (
    "taken", "python_executable", "memory.available_bytes", "cpu.flags", "gpu.sm_clock_mhz", "gpu.memory_clock_mhz",
    "waiting.why", "waiting.others", "waiting.seconds", "gpus", "cluster",
)  # fmt: skip
"""Facts that differ from moment to moment, or do not affect speed."""


@dataclass(frozen=True)
class Difference:
    """One difference between the sides."""

    key: str
    base: str
    new: str


@dataclass(frozen=True)
class FactDifference(Difference):
    """A difference in what actually ran."""

    kind: Kind
    settings: tuple[str, ...]
    """The differing settings that can cause it; empty: none."""


def config_differences(base: RunAnalysis, new: RunAnalysis) -> tuple[Difference, ...]:
    """Return the settings that differ, by dotted key; none if they are unknown. The experiment's name is not compared."""
    if not base.config or not new.config:
        return ()
    return tuple(
        difference
        for difference in _differences(flatten(base.config), flatten(new.config))
        if not _under(difference.key, _NEVER_AN_EXPERIMENT)
    )


def settings_of_repeats(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings in which repeats of one configuration must agree, by dotted key, without those that are not set."""
    return {
        key: value
        for key, value in flatten(config).items()
        if not _under(key, (*_NEVER_AN_EXPERIMENT, "profiling")) and not _all_unset(value)
    }


def environment_differences(base: Sequence[RunAnalysis], new: Sequence[RunAnalysis]) -> tuple[Difference, ...]:
    """Return differences of machine, driver and software between any two runs, with every value on each side."""
    sides = [[flatten(run.env) for run in side if run.env] for side in (base, new)]
    if not all(sides):
        return ()
    found = []
    for key in sorted({key for side in sides for env in side for key in env}):
        values = [list(dict.fromkeys(env.get(key, ABSENT) for env in side)) for side in sides]
        every = {*values[0], *values[1]}
        known = not _all_unset(*every) and not all(is_unavailable(value) for value in every)
        if len(every) > 1 and known and not _under(key, _VOLATILE):
            found.append(Difference(key, "; ".join(values[0]), "; ".join(values[1])))
    return tuple(found)


def fact_differences(base: Facts, new: Facts, settings: Iterable[Difference]) -> tuple[FactDifference, ...]:
    """Return recorded differences of hardware, model and workload, with the settings that can cause them."""
    changed = [difference.key for difference in settings]
    found = []
    for kind in KINDS:
        related = tuple(key for key in changed if _under(key, _RELATED[kind]))
        unknown = {key for key in base[kind].keys() ^ new[kind].keys() if kind == "hardware" or key in (PROMPTS, WEIGHTS)}
        sides = [{key: side[key] for key in side if key not in unknown} for side in (base[kind], new[kind])]
        rows = _differences(sides[0], sides[1])
        if any(row.key in ("batch_size", "prompt_tokens") for row in rows):  # prompts of other shapes always differ
            rows = [row for row in rows if row.key != PROMPTS]
        found += [FactDifference(row.key, row.base, row.new, kind, related) for row in rows]
    return tuple(found)


def check_comparable(
    facts: Sequence[FactDifference],
    settings: Sequence[Difference],
    known: Iterable[str],
    experiment: Sequence[str],
    allow: Sequence[str],
) -> None:
    """Raise a ConfigError if the runs differ in a way that is not named as the experiment; it states the option to add.

    `known`: every setting of the runs. `experiment`: settings or groups that are meant to differ. `allow`: kinds that may differ.
    """
    changed = [difference.key for difference in settings]
    _check_words(changed, sorted(set(known)), experiment, allow)
    model_differs = "model" in allow or any(_under(key, ("model",)) for key in changed if _under(key, experiment))
    for fact in facts:
        if fact.kind in allow:
            continue
        unnamed = [key for key in fact.settings if not _under(key, experiment)]
        if fact.settings and not unnamed:
            continue
        if fact.kind == "workload" and not fact.settings and fact.key in ("source", "prompt_tokens", PROMPTS) and model_differs:
            continue  # another model has another tokenizer, and so other lengths
        shown = unnamed if len(unnamed) <= _MOST_NAMED else list(dict.fromkeys(key.split(".")[0] for key in unnamed))
        option = " ".join(f"--experiment {key}" for key in shown) if shown else f"--allow {fact.kind}"
        raise ConfigError(
            f"The runs differ in their {fact.kind}: {fact.key} is {fact.base} on one side and {fact.new} on the other.",
            f"If that is the experiment, add {option}; otherwise compare runs with the same {fact.key}.",
        )


def _check_words(changed: Sequence[str], known: Sequence[str], experiment: Sequence[str], allow: Sequence[str]) -> None:
    for word in allow:
        if word not in KINDS:
            raise ConfigError(
                f"--allow {word}: there is no such kind of difference.{nearest(word, KINDS)}", f"Known: {', '.join(KINDS)}."
            )
    for key in experiment:
        if any(_under(setting, (key,)) for setting in changed):
            continue
        if any(_under(setting, (key,)) for setting in known):
            raise ConfigError(
                f"--experiment {key}: the setting is the same on both sides.",
                f"What differs: {', '.join(changed) or 'no setting at all'}.",
            )
        raise ConfigError(
            f"--experiment {key}: the runs have no such setting.{nearest(key, known)}",
            f"What differs: {', '.join(changed) or 'no setting at all'}.",
        )


def check_one_side(name: str, runs: Sequence[RunAnalysis]) -> Facts:
    """Return what the runs of a side ran, or raise a ConfigError if they are not repeats of each other."""
    unknown = next((run for run in runs if not run.config), None)
    if unknown and len(runs) > 1:
        raise ConfigError(
            f"It is unknown whether the runs of {name} are repeats of each other: the recorded settings of {unknown.run} are "
            "missing or damaged.",
            "Leave that run out.",
        )
    for other in runs[1:]:
        found = [row for row in config_differences(runs[0], other) if not _under(row.key, ("profiling",))]
        if found:
            row = found[0]
            raise ConfigError(
                f"The runs of {name} are not repeats of one configuration: {row.key} is {row.base} in "
                f"{runs[0].run} and {row.new} in {other.run}.",
                "Name runs of the same configuration.",
            )
    return facts_of_side(name, runs)


def _differences(base: Mapping[str, str], new: Mapping[str, str]) -> list[Difference]:
    keys = sorted({*base, *new})
    found = [Difference(key, base.get(key, ABSENT), new.get(key, ABSENT)) for key in keys if base.get(key) != new.get(key)]
    return [row for row in found if not _all_unset(row.base, row.new)]


def _all_unset(*values: str) -> bool:
    """Return whether all values are empty groups, null or absent: another version may not have had the setting."""
    return set(values) <= {ABSENT, EMPTY_GROUP, UNSET}


def _under(key: str, groups: Iterable[str]) -> bool:
    return any(key == group or key.startswith(f"{group}.") for group in groups)


# --- cautions ---------------------------------------------------------------------------------------------------------


def few_runs(runs: tuple[int, int], judgement: Judgement) -> tuple[str, ...]:
    """Return a caution if there are too few runs."""
    if judgement.process_spread is None and not are_several(runs):
        return (
            "Too few runs for a verdict: other processes used this CPU during a run, or its load was not sampled, and "
            "identical runs may then differ by a factor of two or more. "
            f"Make {RECOMMENDED_RUNS} alternating runs per side, or state the spread with --process-spread. "
            "With profiling.nvml.enable=true, the sampler shows whether the machine is quiet.",
        )
    if not is_measured(runs, judgement):
        fewest = runs_to_measure(judgement)
        roughly = f" roughly; {RECOMMENDED_RUNS} would detect smaller changes" if fewest < RECOMMENDED_RUNS else ""
        return (
            "Too few runs: the spread between processes on this machine is assumed, not measured. "
            f"{fewest} runs per side would measure it{roughly}.",
        )
    return ()


def order_of(base: Sequence[RunAnalysis], new: Sequence[RunAnalysis]) -> Order:
    """Return which side was made first, or "in turn" if neither ended before the other began.

    Each side is in the order its runs were made, as `side_of` returns it.
    """
    if base[-1].manifest.created < new[0].manifest.created:
        return "base first"
    return "new first" if new[-1].manifest.created < base[0].manifest.created else "in turn"


def not_in_turn(runs: tuple[int, int], judgement: Judgement) -> tuple[str, ...]:
    """Return a caution if all runs of one side were made before the other side's."""
    if judgement.order == "in turn" or max(runs) == 1:
        return ()
    first, then = ("base", "new") if judgement.order == "base first" else ("new", "base")
    return (
        f"All runs of {first} were made before those of {then}. A change in the machine's speed between them looks like a "
        "change of the program. Alternate the runs: one of base, one of new, and so on.",
    )


@dataclass(frozen=True)
class InvalidRun:
    """A run that no verdict may be based on."""

    run: str
    why: str
    impossible: bool = False
    """Whether one of its figures exceeds what the hardware can do."""


def cautions(
    base: Sequence[RunAnalysis],
    new: Sequence[RunAnalysis],
    timings: Sequence[Sequence[CleanTimings]],
    settings: Sequence[Difference],
    experiment: Sequence[str],
    invalid: InvalidRun | None = None,
) -> tuple[str, ...]:
    """Return what a reader must know before trusting a verdict, except for the reason in `invalid`."""
    found = []
    other = [row.key for row in settings if not any(row.key == key or row.key.startswith(f"{key}.") for key in experiment)]
    if experiment and other:
        found.append(f"In addition to the experiment, these settings differ: {', '.join(other)}.")
    found += [*unknown_records([*base, *new]), *machine_cautions([*base, *new])]
    kinds = [next((run.model.weights.kind for run in side if run.model.weights), "unknown") for side in timings]
    if kinds[0] != kinds[1]:
        found.append(f"The weights are {kinds[0]} in base and {kinds[1]} in new.")
    clocks = list(dict.fromkeys(run.clock for side in timings for run in side))
    if len(clocks) > 1:
        found.append(f"The runs were timed by different clocks: {' and '.join(clocks)}.")
    same_work = timings[0][0].workload == timings[1][0].workload
    if same_work and all(run.tokens_repeat for side in timings for run in side):
        tokens = [{run.tokens_sha256 for run in side} for side in timings]
        if tokens[0] != tokens[1]:
            prompts = {run.prompts_sha256 for run in (*base, *new)}
            same = len(prompts) == 1 and not any(isinstance(prompt, Missing) for prompt in prompts)
            found.append(f"The two sides produced different tokens{' from the same prompts' if same else ''}.")
    for name, side in (("base", base), ("new", new)):
        for run in side:
            stated = WarningId.IMPLAUSIBLE if invalid and invalid.impossible and invalid.run == run.run else None
            found += [f"{name}, {run.run}: {warning}" for warning in run.warnings if warning.id is not stated]
    return tuple(dict.fromkeys(found))


def check_distinct(runs: Sequence[RunAnalysis]) -> None:
    """Raise a ConfigError if a run is a copy of another.

    Repeats record start and duration in nanoseconds, so two measurements never share one.
    """
    measured = [(run, set(() if isinstance(run.timings, Missing) else run.timings.iterations)) for run in runs]
    for (first, repeats), (second, others) in itertools.combinations(measured, 2):
        if repeats & others:
            raise ConfigError(
                f"{first.run} and {second.run} are one run: they contain the same repeats, made {first.manifest.created}.",
                "A copy of a run is not a repeat. Name each run once.",
            )


def check_known(runs: Sequence[RunAnalysis], allow: Sequence[str]) -> None:
    """Raise a ConfigError if the hardware of a run is unknown, unless hardware may differ."""
    for run in runs:
        if _no_machine(run) and "hardware" not in allow:
            raise ConfigError(
                f"The hardware of {run.run} is unknown: its record of the machine is missing or damaged.",
                "If the runs were made on one machine, add --allow hardware; otherwise rerun it.",
            )


def _no_machine(run: RunAnalysis) -> bool:
    """Return whether the recorded environment contains neither processor nor card."""
    return not {"cpu", "gpu"} & run.env.keys()


def unknown_records(runs: Sequence[RunAnalysis]) -> list[str]:
    """Return cautions for runs whose settings, hardware or prompts are unknown."""
    found = []
    for run in runs:
        if not run.config:
            found.append(f"The settings of {run.run} are unknown: their record is missing or damaged. They may differ.")
        if _no_machine(run):
            found.append(f"The hardware of {run.run} is unknown: its record is missing or damaged. It may differ.")
        if isinstance(run.prompts_sha256, Missing):
            found.append(f"The prompts of {run.run} are unknown and may differ: {run.prompts_sha256.why}.")
    return found


def invalid_run(runs: Sequence[RunAnalysis]) -> InvalidRun | None:
    """Return the first run that no verdict may be based on, or None."""
    for run in runs:
        entry = run.manifest.pass_named("clean")
        if run.impossible is not None:
            words = f"a figure of {run.run} is implausible: {run.impossible.fact} {run.impossible.remedy}".strip()
            return InvalidRun(run.run, words, impossible=True)
        if entry is not None and entry.status != "complete":
            words = f"the unprofiled pass of {run.run} {entry.outcome}: {entry.why or 'it did not end normally'}"
            return InvalidRun(run.run, words)
    return None

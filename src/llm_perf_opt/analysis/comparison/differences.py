"""How two runs differ as they were asked for and as they ran, and whether that lets them be compared."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from llm_perf_opt.analysis.comparison.effects import Judgement, Order
from llm_perf_opt.analysis.comparison.facts import KINDS, PROMPTS, Facts, Kind, facts_of_side, flatten, machine_cautions
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
"""Settings that a difference of this kind can come from."""
ABSENT = "(not there)"
EMPTY_GROUP, UNSET = "{}", "null"
"""As `flatten` writes them."""
_NEVER_AN_EXPERIMENT = ("experiment", "hydra")
_VOLATILE = ("taken", "python_executable", "memory.available_bytes", "cpu.flags", "gpu.sm_clock_mhz", "gpu.memory_clock_mhz")
"""What differs from moment to moment, or says nothing of speed."""


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same on both sides."""

    key: str
    base: str
    new: str


@dataclass(frozen=True)
class FactDifference(Difference):
    """A difference in what really ran."""

    kind: Kind
    settings: tuple[str, ...]
    """The differing settings it can come from; empty: no setting explains it."""


def config_differences(base: RunAnalysis, new: RunAnalysis) -> tuple[Difference, ...]:
    """Settings that differ, by dotted key; none where they are not known. The name of the experiment only names the folder."""
    if not base.config or not new.config:
        return ()
    return tuple(
        difference
        for difference in _differences(flatten(base.config), flatten(new.config))
        if not _under(difference.key, _NEVER_AN_EXPERIMENT)
    )


def environment_differences(base: Sequence[RunAnalysis], new: Sequence[RunAnalysis]) -> tuple[Difference, ...]:
    """Machine, driver and software that differ between any two of all runs; each side with every value that its runs have."""
    sides = [[flatten(run.env) for run in side if run.env] for side in (base, new)]
    if not all(sides):
        return ()
    found = []
    for key in sorted({key for side in sides for env in side for key in env}):
        values = [list(dict.fromkeys(env.get(key, ABSENT) for env in side)) for side in sides]
        if len({*values[0], *values[1]}) > 1 and not _under(key, _VOLATILE) and not _nothing(*values[0], *values[1]):
            found.append(Difference(key, "; ".join(values[0]), "; ".join(values[1])))
    return tuple(found)


def fact_differences(base: Facts, new: Facts, settings: Iterable[Difference]) -> tuple[FactDifference, ...]:
    """Where hardware, model or workload really differ, with the settings each can come from."""
    changed = [difference.key for difference in settings]
    found = []
    for kind in KINDS:
        related = tuple(key for key in changed if _under(key, _RELATED[kind]))
        one, other = base[kind], new[kind]
        unknown = {key for key in (*one, *other) if (key in one) != (key in other) and (kind == "hardware" or key == PROMPTS)}
        one, other = ({key: side[key] for key in side if key not in unknown} for side in (one, other))  # not known: no difference
        rows = _differences(one, other)
        if any(row.key in ("batch_size", "prompt_tokens") for row in rows):  # prompts of other shapes are other prompts
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
    """Refuse runs that differ in a way nobody named as the experiment, with the option that would name it.

    `known`: every setting of the runs. `experiment`: settings, or groups of them, whose difference is meant. `allow`: kinds.
    """
    changed = [difference.key for difference in settings]
    _check_words(changed, sorted(set(known)), experiment, allow)
    model_is_meant = "model" in allow or any(_under(key, ("model",)) for key in changed if _under(key, experiment))
    for fact in facts:
        if fact.kind in allow:
            continue
        left = [key for key in fact.settings if not _under(key, experiment)]
        if fact.settings and not left:
            continue
        if fact.kind == "workload" and not fact.settings and fact.key in ("source", "prompt_tokens", PROMPTS) and model_is_meant:
            continue  # another model, another tokenizer, other lengths
        option = " ".join(f"--experiment {key}" for key in left) if left else f"--allow {fact.kind}"
        raise ConfigError(
            f"The runs differ in their {fact.kind}: {fact.key} is {fact.base} on one side and {fact.new} on the other.",
            f"If that is the experiment, add {option}; else compare runs that share it.",
        )


def _check_words(changed: Sequence[str], known: Sequence[str], experiment: Sequence[str], allow: Sequence[str]) -> None:
    for word in allow:
        if word not in KINDS:
            raise ConfigError(f"--allow {word}: no such kind of difference.{nearest(word, KINDS)}", f"Known: {', '.join(KINDS)}.")
    for key in experiment:
        if any(_under(one, (key,)) for one in changed):
            continue
        if any(_under(one, (key,)) for one in known):
            raise ConfigError(
                f"--experiment {key}: it is the same on both sides.",
                f"What differs: {', '.join(changed) or 'no setting at all'}.",
            )
        raise ConfigError(
            f"--experiment {key}: the runs have no such setting.{nearest(key, known)}",
            f"What differs: {', '.join(changed) or 'no setting at all'}.",
        )


def check_one_side(name: str, runs: Sequence[RunAnalysis]) -> Facts:
    """Runs of one side must be repeats of each other, as they were asked for and as they ran; what they ran."""
    unknown = next((run for run in runs if not run.config), None)
    if unknown and len(runs) > 1:
        raise ConfigError(
            f"Whether the runs of {name} are repeats of each other is not known: the record of the settings of {unknown.run} is "
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
                "Give runs that differ in nothing but their time.",
            )
    return facts_of_side(name, runs)


def _differences(base: Mapping[str, str], new: Mapping[str, str]) -> list[Difference]:
    keys = sorted({*base, *new})
    found = [Difference(key, base.get(key, ABSENT), new.get(key, ABSENT)) for key in keys if base.get(key) != new.get(key)]
    return [row for row in found if not _nothing(row.base, row.new)]


def _nothing(*values: str) -> bool:
    """A group that is empty, or a setting that is null, holds as little as one that is not there: a version before it had none.
    What the other side has in a group has keys of its own."""
    return set(values) <= {ABSENT, EMPTY_GROUP, UNSET}


def _under(key: str, groups: Iterable[str]) -> bool:
    return any(key == group or key.startswith(f"{group}.") for group in groups)


# --- cautions ---------------------------------------------------------------------------------------------------------


def few_runs(runs: tuple[int, int], judgement: Judgement) -> tuple[str, ...]:
    """What too few runs leave open."""
    if judgement.process_spread is None and not are_several(runs):
        return (
            "Too few runs for a verdict: other work used this CPU while a run was measured, or nobody watched, and runs of the "
            f"same thing were then seen a factor of two and more apart. {RECOMMENDED_RUNS} runs a side, in turn, measure it; "
            "--process-spread states it; with profiling.nvml.enable=true the sampler sees whether the machine is quiet.",
        )
    if not is_measured(runs, judgement):
        fewest = runs_to_measure(judgement)
        roughly = f", if roughly; {RECOMMENDED_RUNS} find smaller changes" if fewest < RECOMMENDED_RUNS else ""
        return (
            "Too few runs: how much processes differ on this machine is assumed, not measured. "
            f"{fewest} runs a side measure it{roughly}.",
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
        f"All runs of {first} were made before those of {then}. If the machine changed its speed in between, that looks like a "
        "change of the program. Make the runs in turn: one of base, one of new, and so on.",
    )


@dataclass(frozen=True)
class Doubt:
    """Why no verdict may rest on a run."""

    run: str
    why: str
    impossible: bool = False
    """Whether one of its figures is beyond the hardware."""


def cautions(
    base: Sequence[RunAnalysis],
    new: Sequence[RunAnalysis],
    timings: Sequence[Sequence[CleanTimings]],
    settings: Sequence[Difference],
    experiment: Sequence[str],
    doubt: Doubt | None = None,
) -> tuple[str, ...]:
    """What a reader must know before believing a verdict; not again the `doubt` for which there is none."""
    found = []
    other = [row.key for row in settings if not any(row.key == key or row.key.startswith(f"{key}.") for key in experiment)]
    if experiment and other:
        found.append(f"Besides the experiment these settings differ: {', '.join(other)}.")
    found += [*unknown_records([*base, *new]), *machine_cautions([*base, *new])]
    clocks = list(dict.fromkeys(run.clock for side in timings for run in side))
    if len(clocks) > 1:
        found.append(f"The runs are timed by different clocks: {' and '.join(clocks)}.")
    same_work = timings[0][0].workload == timings[1][0].workload
    if same_work and all(run.tokens_repeat for side in timings for run in side):
        tokens = [{run.tokens_sha256 for run in side} for side in timings]
        if tokens[0] != tokens[1]:
            prompts = {run.prompts_sha256 for run in (*base, *new)}
            same = len(prompts) == 1 and not any(isinstance(one, Missing) for one in prompts)
            found.append(f"The two sides produced different tokens{' from the same prompts' if same else ''}.")
    for name, side in (("base", base), ("new", new)):
        for run in side:
            stated = WarningId.IMPLAUSIBLE if doubt and doubt.impossible and doubt.run == run.run else None
            found += [f"{name}, {run.run}: {warning}" for warning in run.warnings if warning.id is not stated]
    return tuple(dict.fromkeys(found))


def check_distinct(runs: Sequence[RunAnalysis]) -> None:
    """Refuse a run that is a copy of another: what was measured once is no repeat of itself.

    Repeats begin at a nanosecond of the machine's clock and last so many: two measurements never share one.
    """
    measured = [(run, set(() if isinstance(run.timings, Missing) else run.timings.iterations)) for run in runs]
    for (one, its), (other, others) in itertools.combinations(measured, 2):
        if its & others:
            raise ConfigError(
                f"{one.run} and {other.run} are one run: the same repeats, measured once ({one.manifest.created}).",
                "A copy of a run is no repeat of it, and nothing to compare it with: name each run once.",
            )


def check_known(runs: Sequence[RunAnalysis], allow: Sequence[str]) -> None:
    """Refuse runs of which nobody knows the hardware, unless that may differ: what is not known is not equal."""
    for run in runs:
        if _no_machine(run) and "hardware" not in allow:
            raise ConfigError(
                f"The hardware of {run.run} is unknown: its record of the machine is missing or damaged.",
                "If the runs are known to be of one machine, add --allow hardware; else make the run anew.",
            )


def _no_machine(run: RunAnalysis) -> bool:
    """Whether the record of the environment says nothing of processor or card."""
    return not {"cpu", "gpu"} & run.env.keys()


def unknown_records(runs: Sequence[RunAnalysis]) -> list[str]:
    """What is to be said of runs whose records do not tell how, where or on what they ran."""
    found = []
    for run in runs:
        if not run.config:
            found.append(
                f"The settings of {run.run} are unknown: their record is missing or damaged. Whether they differ is not known."
            )
        if _no_machine(run):
            found.append(
                f"The hardware of {run.run} is unknown: its record is missing or damaged. Whether it differs is not known."
            )
        if isinstance(run.prompts_sha256, Missing):
            found.append(f"Whether {run.run} had the same prompts is not known: {run.prompts_sha256.why}.")
    return found


def unbelievable(runs: Sequence[RunAnalysis]) -> Doubt | None:
    """Why no verdict may rest on these runs; None where one may."""
    for run in runs:
        entry = run.manifest.pass_named("clean")
        if run.impossible is not None:
            words = f"{run.run} cannot be true: {run.impossible.fact} {run.impossible.remedy}".strip()
            return Doubt(run.run, words, impossible=True)
        if entry is not None and entry.status != "complete":
            words = f"the unprofiled pass of {run.run} is {entry.status}: {entry.why or 'it did not end as it should'}"
            return Doubt(run.run, words)
    return None

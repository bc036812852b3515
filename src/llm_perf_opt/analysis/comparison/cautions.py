"""What a reader of a comparison must know before believing a verdict."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from llm_perf_opt.analysis.comparison.differences import Difference
from llm_perf_opt.analysis.comparison.effects import Judgement, Order
from llm_perf_opt.analysis.comparison.facts import machine_cautions
from llm_perf_opt.analysis.comparison.statistics import RECOMMENDED_RUNS, are_several, is_measured, runs_to_measure
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import CleanTimings, Missing
from llm_perf_opt.core.warnings import WarningId


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

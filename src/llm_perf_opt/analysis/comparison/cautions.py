"""What a reader of a comparison must know before believing a verdict."""

from collections.abc import Sequence

from llm_perf_opt.analysis.comparison.differences import Difference
from llm_perf_opt.analysis.comparison.facts import machine_cautions
from llm_perf_opt.analysis.comparison.soundness import unknown_records
from llm_perf_opt.analysis.comparison.statistics import (
    RECOMMENDED_RUNS,
    Judgement,
    Order,
    are_several,
    is_measured,
    runs_to_measure,
)
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.records import CleanTimings, Missing


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


def cautions(
    base: Sequence[RunAnalysis],
    new: Sequence[RunAnalysis],
    timings: Sequence[Sequence[CleanTimings]],
    settings: Sequence[Difference],
    experiment: Sequence[str],
    unjudged: str = "",
) -> tuple[str, ...]:
    """What a reader must know before believing a verdict; not again what `unjudged` says, for which there is none."""
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
        found += [f"{name}, {run.run}: {warning}" for run in side for warning in run.warnings if warning.strip() not in unjudged]
    return tuple(dict.fromkeys(found))

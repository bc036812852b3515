"""Whether runs can be compared at all: runs that are not one and the same, and records that are there."""

import itertools
from collections.abc import Sequence

from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.errors import ConfigError
from llm_perf_opt.records import Missing


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


def unbelievable(runs: Sequence[RunAnalysis]) -> str:
    """Why no verdict may rest on these runs; empty where one may."""
    for run in runs:
        entry = run.manifest.pass_named("clean")
        if run.impossible is not None:
            return f"{run.run} cannot be true: {run.impossible.fact} {run.impossible.remedy}".strip()
        if entry is not None and entry.status != "complete":
            return f"the unprofiled pass of {run.run} is {entry.status}: {entry.why or 'it did not end as it should'}"
    return ""

"""The hardware that a sweep's points ran on, and whether this machine is of the same."""

from dataclasses import replace

from llm_perf_opt.analyse import analyse
from llm_perf_opt.analysis.comparison.facts import facts_of
from llm_perf_opt.analysis.run_analysis import RunAnalysis
from llm_perf_opt.analysis.sweep_ran import Hardware, differences
from llm_perf_opt.errors import ConfigError, LlmPerfError
from llm_perf_opt.provenance import environment
from llm_perf_opt.records import Missing
from llm_perf_opt.run_folder import RunFolder
from llm_perf_opt.sweeps.folder import Sweep, SweepFolder

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
        if point.status != "complete" or folder.damage(point):
            continue
        try:
            measured = analyse(RunFolder.open(folder.path / point.folder), traces=False)
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

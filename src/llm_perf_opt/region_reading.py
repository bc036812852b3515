"""The NVTX regions of a run, from its best timeline, with the counters that were read."""

import itertools
from dataclasses import replace
from typing import Any

import msgspec

from llm_perf_opt.analysis.kernel_names import normal_name
from llm_perf_opt.analysis.patterns import Selection
from llm_perf_opt.analysis.region_records import RegionReport
from llm_perf_opt.analysis.regions import RegionOptions, regions
from llm_perf_opt.config import RegionsConfig
from llm_perf_opt.errors import ParseError
from llm_perf_opt.kernel_reading import believed_counters
from llm_perf_opt.kernel_records import CountedKernel
from llm_perf_opt.records import Maybe, Missing
from llm_perf_opt.run_folder import RunFolder
from llm_perf_opt.timelines import Timeline, timelines

Variant = tuple[str, int, int]


def read_regions(folder: RunFolder, config: dict[str, Any]) -> Maybe[RegionReport]:
    """Every region with what it launched, or why the run has no timeline."""
    why = []
    for timeline in timelines(folder):
        if isinstance(timeline, Timeline):
            counters = _counters(folder)
            options = replace(_options(config), counters=_shown(folder, counters))
            return regions(timeline.trace, options, counters, normal_name)
        why.append(timeline.why)
    return Missing("; ".join(why) or "the run was asked for without a pass that records a timeline")


def _options(config: dict[str, Any]) -> RegionOptions:
    """As the run was configured; a run of an earlier version shows everything."""
    profiling = config.get("profiling")
    asked = profiling.get("regions") if isinstance(profiling, dict) else None
    if asked is None:
        return RegionOptions()
    try:
        found = msgspec.convert(asked, RegionsConfig)
    except msgspec.ValidationError as error:
        raise ParseError(f"config.yaml: profiling.regions cannot be read: {error}.") from error
    return RegionOptions(
        aggregate=found.aggregate,
        kernels=Selection(found.kernels_include, found.kernels_exclude),
        regions=Selection(found.include, found.exclude),
    )


def _shown(folder: RunFolder, counters: dict[Variant, dict[str, float]]) -> tuple[str, ...]:
    """The counters that were asked for; the tool's table holds every other form of them too. Of a section's, all there are."""
    there = {name for values in counters.values() for name in values}
    argv = [word for entry in folder.manifest().passes if entry.name.startswith("ncu") for word in entry.argv]
    if "--section" in argv:  # which counters a section holds, only the tool knows
        return tuple(sorted(there))
    asked = {name for before, words in itertools.pairwise(argv) if before == "--metrics" for name in words.split(",")}
    return tuple(sorted(there & asked or there))


def _counters(folder: RunFolder) -> dict[Variant, dict[str, float]]:
    """Kernel and launch size → the mean of what was counted of it."""
    counted: dict[Variant, list[CountedKernel]] = {}
    for name in ("ncu_prefill", "ncu_decode", "ncu"):
        report = believed_counters(folder, name)
        if isinstance(report, Missing) or not report.complete:
            continue  # kernels.md says why
        for kernel in report.kernels:
            grid, block = (size[0] * size[1] * size[2] for size in (kernel.grid, kernel.block))
            counted.setdefault((normal_name(kernel.name), grid, block), []).append(kernel)
    return {variant: _means(kernels) for variant, kernels in counted.items()}


def _means(kernels: list[CountedKernel]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for kernel in kernels:
        for name, value in kernel.counters.items():
            if not isinstance(value, Missing) and "." in name:  # without a suffix it is a fact of the device or the launch
                values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}

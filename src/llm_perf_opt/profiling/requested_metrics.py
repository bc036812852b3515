"""Resolve and check what the profilers collect before anything starts: sets, counters, sections, traces, patterns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from llm_perf_opt.analysis.regions.records import Selection
from llm_perf_opt.config.schema import MetricsConfig, RegionsConfig, RunConfig
from llm_perf_opt.core.errors import ParseError, ResourceError
from llm_perf_opt.core.processes import ask
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.counters.catalog import chip_of_device, names_listed
from llm_perf_opt.counters.manifest import ResolvedMetrics, resolve
from llm_perf_opt.counters.set_file import PRESETS
from llm_perf_opt.profiling.vendor.compatibility import counter_permission
from llm_perf_opt.profiling.vendor.nsys import gpu_metrics_flag
from llm_perf_opt.profiling.vendor.probe import NsysProbe, find_tool, probe_ncu
from llm_perf_opt.runners.measure.gpu import gpu_count, gpu_name

ANY_CHIP = "gh100"
"""Used where counters do not matter: a set has the same trace modules and torch preset on every chip."""


def resolve_metrics(config: RunConfig) -> RunConfig:
    """Return the configuration with the richest torch.profiler preset that it or its metric sets request.

    Raise a ConfigError for invalid patterns, and for sets and counters that this machine does not know.
    """
    check_patterns(config.profiling.regions)
    wanted = resolve(config.profiling.metrics.sets, chip=ANY_CHIP).torch_preset
    if config.profiling.nsys.enable or config.profiling.ncu.enable:
        counting = config.profiling.ncu.enable and on_gpu(config.hardware.device)
        check_counters(config.profiling.metrics, config.hardware.device_index, gpu=counting)
    preset = max(config.profiling.torch.preset, wanted, key=PRESETS.index)
    torch = replace(config.profiling.torch, preset=preset)
    return replace(config, profiling=replace(config.profiling, torch=torch))


def check_patterns(regions: RegionsConfig) -> None:
    """Raise a ConfigError for an invalid pattern; a `Selection` compiles its patterns."""
    Selection(regions.include, regions.exclude)
    Selection(regions.kernels_include, regions.kernels_exclude)


def check_counters(metrics: MetricsConfig, device_index: int, *, gpu: bool) -> None:
    """Raise a ConfigError for counters that this GPU or the installed ncu does not have.

    Without a GPU, a chip that has all counters is assumed.
    """
    chip = chip_of(device_index) if gpu else Missing("no counters are read here")
    ncu = find_tool("ncu")
    sections = sections_of(ncu) if ncu and metrics.sections else None
    known = names_known_to(ncu, chip) if ncu and not isinstance(chip, Missing) else Missing("there is no ncu")
    chip = ANY_CHIP if isinstance(chip, Missing) else chip
    metrics_on(metrics, chip, None if isinstance(known, Missing) else known, sections)


def counted_metrics(metrics: MetricsConfig, device_index: int, ncu: Path) -> ResolvedMetrics:
    """Return what this ncu collects on this GPU, or raise a ResourceError if its counters are unknown."""
    chip = chip_of(device_index)
    if isinstance(chip, Missing):
        raise ResourceError(f"The counters of this GPU are unknown: {chip.why}.", "`llm-perf metrics list` names the chips.")
    known = names_known_to(ncu, chip)
    if isinstance(known, Missing):
        raise ResourceError(f"{known.why}.", "Use a newer Nsight Compute; see `llm-perf doctor`.")
    return metrics_on(metrics, chip, known, sections_of(ncu))


def metrics_on(
    metrics: MetricsConfig, chip: str, known: frozenset[str] | None = None, sections: Sequence[str] | None = None
) -> ResolvedMetrics:
    """Return what is collected on a chip; `known` and `sections` are the names that the installed ncu lists."""
    return resolve(
        metrics.sets,
        add=metrics.add,
        remove=metrics.remove,
        sections=metrics.sections,
        chip=chip,
        known=known,
        known_sections=sections,
    )


def on_gpu(device: str = "auto") -> bool:
    """Return whether the program can run on an NVIDIA GPU."""
    gpus = gpu_count()
    return device != "cpu" and not isinstance(gpus, Missing) and gpus > 0


def chip_of(device_index: int) -> Maybe[str]:
    """Return the chip of a GPU of this machine."""
    name = gpu_name(device_index)
    return name if isinstance(name, Missing) else chip_of_device(name)


@lru_cache(maxsize=8)
def names_known_to(ncu: Path, chip: str) -> Maybe[frozenset[str]]:
    """Return the base names that this ncu lists for a chip, or why it lists none. Needs no GPU."""
    answer = ask([str(ncu), "--query-metrics", "--chips", chip], timeout_s=60)
    if answer is None:
        return Missing(f"{ncu} lists no counters for {chip}: it is older than the chip, or it does not start")
    try:
        return names_listed(answer)
    except ParseError as error:
        return Missing(error.fact)


def sections_of(ncu: Path) -> tuple[str, ...] | None:
    """Return the sections that this ncu lists; None if it lists none."""
    probe = probe_ncu(ncu)
    return None if isinstance(probe, Missing) or not probe.sections else probe.sections


@dataclass(frozen=True)
class NsysTraces:
    """What nsys records, and what of the request it cannot record."""

    modules: tuple[str, ...]
    gpu_metrics: bool
    note: str
    """What cannot be recorded; empty if nothing."""


def nsys_traces(metrics: ResolvedMetrics, probe: NsysProbe, *, gpu: bool) -> NsysTraces:
    """Return what nsys can record; a trace module or counter that it cannot record is left out with a note."""
    known = probe.trace_modules
    modules = tuple(module for module in metrics.trace_modules if module in known or not known)
    missing = [module for module in metrics.trace_modules if module not in modules]
    notes = [f"nsys {probe.version} cannot trace {', '.join(missing)}"] if missing else []
    reason = _no_gpu_metrics(probe, gpu=gpu) if metrics.gpu_metrics else ""
    notes += [f"GPU metrics are not sampled: {reason}"] if reason else []
    return NsysTraces(modules, metrics.gpu_metrics and not reason, f"{'; '.join(notes)}." if notes else "")


def _no_gpu_metrics(probe: NsysProbe, *, gpu: bool) -> str:
    if not gpu:
        return "the program runs on the CPU"
    if gpu_metrics_flag(probe) is None:
        return f"nsys {probe.version} has no option for it"
    permission = counter_permission()
    return permission.why if permission.status == "denied" else ""


def dropped_notes(metrics: ResolvedMetrics) -> tuple[str, ...]:
    """Return a sentence for each metric of a set that cannot be collected here."""
    return tuple(f"Not collected: {gone.name} ({', '.join(gone.sources)}): {gone.why}." for gone in metrics.dropped)

"""Resolve and check what the profilers collect before anything starts: sets, counters, sections, traces, patterns."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from llm_perf_opt.analysis.regions.records import Selection
from llm_perf_opt.config.passes import label_of
from llm_perf_opt.config.schema import MetricsConfig, NcuConfig, ProfilingConfig, RegionsConfig, RunConfig
from llm_perf_opt.core.errors import ConfigError, ParseError, ResourceError, nearest
from llm_perf_opt.core.processes import ask
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.counters.catalog import chip_of_device, names_listed
from llm_perf_opt.counters.manifest import ResolvedMetrics, chosen_sets, resolve
from llm_perf_opt.counters.set_file import PRESETS, TRACE_MODULES, check_trace_modules
from llm_perf_opt.profiling.vendor.compatibility import counter_permission
from llm_perf_opt.profiling.vendor.nsys import gpu_metrics_flag
from llm_perf_opt.profiling.vendor.own_options import own_options
from llm_perf_opt.profiling.vendor.probe import NcuProbe, NsysProbe, find_tool, probe_ncu, probe_nsys
from llm_perf_opt.runners.measure.gpu import gpu_count, gpu_name

ROOFLINE = "roofline"
"""The metric set of a run that names none."""
ANY_CHIP = "gh100"
"""Used where counters do not matter: a set has the same trace modules and torch preset on every chip."""


def resolve_metrics(config: RunConfig) -> RunConfig:
    """Return the configuration with its metric sets, and with the richest torch.profiler preset that it or they request.

    Raise a ConfigError for invalid patterns and options, for sets and counters that this machine does not know, and for sets
    that nothing collects.
    """
    profiling = config.profiling
    check_patterns(profiling.regions)
    sections = {"torch": profiling.torch.enable, "nsys": profiling.nsys.enable, "ncu": profiling.ncu.enable}
    enabled = [name for name, on in sections.items() if on]
    metrics = with_sets(profiling.metrics, counting=profiling.ncu.enable)
    check_collected(metrics, enabled, "Enable it (profiling=ncu, nsys, full; profiling.NAME.enable=true), or omit the set.")
    check_tools(profiling, enabled)
    if profiling.nsys.enable or profiling.ncu.enable:
        counting = profiling.ncu.enable and on_gpu(config.hardware.device)
        check_counters(with_sections(metrics, profiling.ncu), config.hardware.device_index, gpu=counting)
    wanted = resolve(metrics.sets or (), chip=ANY_CHIP, defined=metrics.defined).torch_preset
    torch = replace(profiling.torch, preset=max(profiling.torch.preset, wanted, key=PRESETS.index))
    return replace(config, profiling=replace(profiling, torch=torch, metrics=metrics))


def with_sets(metrics: MetricsConfig, *, counting: bool) -> MetricsConfig:
    """Return the request with the default set if it names none: roofline, if Nsight Compute counts."""
    return metrics if metrics.sets is not None else replace(metrics, sets=(ROOFLINE,) if counting else ())


def with_sections(metrics: MetricsConfig, ncu: NcuConfig) -> MetricsConfig:
    """Return the request with the sections of `profiling.ncu`."""
    return replace(metrics, sections=(*metrics.sections, *ncu.sections))


def check_collected(metrics: MetricsConfig, passes: Collection[str], remedy: str) -> None:
    """Raise a ConfigError for a requested set of which none of these passes collects anything."""
    for metric_set in chosen_sets(metrics.sets or (), metrics.defined)[1:]:
        needs = metric_set.collected_by
        if needs and not needs & set(passes):
            labels = " or ".join(label_of(name) for name in ("torch", "nsys", "ncu") if name in needs)
            raise ConfigError(f"Nothing collects the metric set {metric_set.name}: it needs {labels}, which is off.", remedy)


def check_tools(profiling: ProfilingConfig, passes: Collection[str]) -> None:
    """Raise a ConfigError for options, trace modules and section sets that cannot be used with the tools of these passes.

    What an installed tool lists is checked too.
    """
    nsys, ncu = profiling.nsys, profiling.ncu
    own_options("nsys", nsys.args)
    own_options("ncu", ncu.args)
    if "nsys" in passes and (nsys.args or nsys.trace) and (path := find_tool("nsys")):
        recorder = probe_nsys(path)
        if not isinstance(recorder, Missing):
            own_options("nsys", nsys.args, recorder.flags)
            check_trace_modules(nsys.trace or (), "profiling.nsys.trace", recorder.trace_modules or TRACE_MODULES)
    if "ncu" in passes and (ncu.args or ncu.set) and (path := find_tool("ncu")):
        counter = probe_ncu(path)
        if not isinstance(counter, Missing):
            own_options("ncu", ncu.args, counter.flags)
            _check_section_set(ncu.set, counter)


def _check_section_set(name: str | None, probe: NcuProbe) -> None:
    if name and probe.sets and name not in probe.sets:
        raise ConfigError(
            f"profiling.ncu.set={name}: ncu {probe.version} has no such set.{nearest(name, probe.sets)}",
            f"It has: {', '.join(probe.sets)}.",
        )


def check_patterns(regions: RegionsConfig) -> None:
    """Raise a ConfigError for an invalid pattern; a `Selection` compiles its patterns."""
    Selection(regions.include, regions.exclude)
    Selection(regions.kernels_include, regions.kernels_exclude)


def check_counters(metrics: MetricsConfig, device_index: int, *, gpu: bool) -> None:
    """Raise a ConfigError for counters that this GPU or the installed ncu does not have.

    Without a GPU, a chip that has all counters is assumed.
    """
    chip = chip_of(device_index) if gpu else Missing("no counters are read without a GPU")
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
        with_sets(metrics, counting=True).sets or (),
        add=metrics.add,
        remove=metrics.remove,
        sections=metrics.sections,
        chip=chip,
        known=known,
        known_sections=sections,
        defined=metrics.defined,
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


def nsys_traces(metrics: ResolvedMetrics, probe: NsysProbe, *, gpu: bool, own: Sequence[str] | None = None) -> NsysTraces:
    """Return what nsys can record; a trace module or counter that it cannot record is left out with a note.

    `own` replaces the trace modules of the sets.
    """
    known, wanted = probe.trace_modules, metrics.trace_modules if own is None else tuple(own)
    modules = tuple(module for module in wanted if module in known or not known)
    missing = [module for module in wanted if module not in modules]
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

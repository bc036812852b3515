"""Warnings and assumptions of a run."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llm_perf_opt.analysis.contention import contention
from llm_perf_opt.analysis.kernels.evidence import KernelEvidence
from llm_perf_opt.analysis.limits.hardware import shared_words
from llm_perf_opt.analysis.rank_run import RankRun
from llm_perf_opt.analysis.separable import steps_unavailable
from llm_perf_opt.analysis.stability import settling_warning
from llm_perf_opt.analysis.telemetry import TelemetrySummary
from llm_perf_opt.analysis.trace.document import TraceAnalysis
from llm_perf_opt.config.passes import label_of
from llm_perf_opt.config.runtimes import traits_of
from llm_perf_opt.config.schema import PYTORCH
from llm_perf_opt.core.errors import ConfigError, ImplausibleError
from llm_perf_opt.core.records import CleanTimings, Manifest, Maybe, Missing, StageTiming
from llm_perf_opt.core.warnings import RunWarning, WarningId
from llm_perf_opt.counters.manifest import chosen_sets
from llm_perf_opt.report.text import significant, times

SMALL_INFLATION = 0.9
"""Below this factor, something must have disturbed the unprofiled pass."""
LARGE_INFLATION = 1.5
"""Above this factor, the times of the torch pass get a warning."""


def counter_warnings(kernels: Maybe[KernelEvidence], impossible: ImplausibleError | None) -> list[RunWarning]:
    """Return warnings about hardware counters."""
    found = [RunWarning(WarningId.IMPLAUSIBLE, f"{impossible.fact} {impossible.remedy}")] if impossible else []
    if not isinstance(kernels, Missing) and not isinstance(kernels.selftest, Missing) and not kernels.selftest.passed:
        found.append(RunWarning(WarningId.COUNTERS_WRONG, f"The counters are not used: {kernels.selftest.why}."))
    return [*found, *(() if isinstance(kernels, Missing) else kernels.warnings)]


def missing_gpu_metrics(manifest: Manifest, trace: Maybe[TraceAnalysis]) -> list[RunWarning]:
    """Return a warning if nsys should have sampled GPU metrics and has no sample: nsys itself does not report that."""
    entry = manifest.pass_named("nsys")
    if isinstance(trace, Missing) or entry is None or entry.status != "complete" or trace.gpu_metrics:
        return []
    requested = any(word.startswith("--gpu-metrics-device") for word in entry.argv)
    why = "the driver may not allow this user to sample, or another program is sampling; see the log of the nsys pass"
    words = f"nsys was requested to sample GPU metrics, but took no sample while the GPU was working: {why}."
    return [RunWarning(WarningId.NO_GPU_METRICS, words)] if requested else []


def rank_warnings(ranks: RankRun | None) -> list[RunWarning]:
    """Return a warning if ranks share a device."""
    return [RunWarning(WarningId.RANKS_SHARE_DEVICE, ranks.shared)] if ranks is not None and ranks.shared else []


def shape_warnings(config: Mapping[str, Any]) -> list[RunWarning]:
    """Return a warning if the weights do not have the shape that the name of the model stands for."""
    project, model = config.get("project"), config.get("model")
    found = project.get("contradictions") if isinstance(project, Mapping) else None
    if not found or not isinstance(found, (list, tuple)) or not isinstance(model, Mapping):
        return []
    words = f"The weights in {model.get('path')} are not those of {model.get('name')}: {', '.join(map(str, found))}."
    return [RunWarning(WarningId.OTHER_ARCHITECTURE, f"{words} The report is about these weights, whatever their name.")]


def partly_collected(manifest: Manifest, config: Mapping[str, Any]) -> list[RunWarning]:
    """Return a warning for each requested metric set that needs a pass which the run does not have."""
    profiling = config.get("profiling")
    metrics = profiling.get("metrics") if isinstance(profiling, Mapping) else None
    sets = metrics.get("sets") if isinstance(metrics, Mapping) else None
    if not isinstance(metrics, Mapping) or not isinstance(sets, list):
        return []
    try:
        chosen = chosen_sets([str(name) for name in sets], metrics.get("defined") or {})
    except ConfigError:  # sets of another version
        return []
    requested = {entry.name.partition("_")[0] for entry in manifest.passes}
    found = []
    for metric_set in chosen[1:]:
        missing = " and ".join(label_of(name) for name in ("torch", "nsys", "ncu") if name in metric_set.collected_by - requested)
        words = f"The metric set {metric_set.name} was collected in part: it also needs {missing}, which the run does not have."
        found += [RunWarning(WarningId.METRICS_PARTLY_COLLECTED, words)] if missing else []
    return found


def run_warnings(
    manifest: Manifest, timings: Maybe[CleanTimings], stages: Sequence[StageTiming], telemetry: Maybe[TelemetrySummary]
) -> Iterator[RunWarning]:
    """Yield warnings about the times."""
    if manifest.status != "complete":
        words = f"The run is {manifest.status}: {manifest.why} {manifest.remedy}".strip()
        yield RunWarning(WarningId.RUN_INCOMPLETE, words)
    clean = manifest.pass_named("clean")
    if isinstance(timings, Missing) and clean is not None and clean.status == "complete":  # the file was lost or damaged later
        yield RunWarning(WarningId.TIMES_UNREADABLE, f"There are no times: {timings.why}")
    if not isinstance(timings, Missing):
        yield from _timing_warnings(timings)
    if not isinstance(telemetry, Missing):
        yield from telemetry.warnings
    for stage in stages:
        yield from _inflation_warnings(stage)


def _timing_warnings(timings: CleanTimings) -> Iterator[RunWarning]:
    weights = timings.model.weights
    if weights is not None and weights.stated_parameters is not None:
        words = (
            f"The runner states {weights.stated_parameters:,} parameters, but the module that ran has "
            f"{timings.model.parameters:,}, which are shown. "
            "FLOPs, bytes and roofline times are those of the stated configuration, so they may be wrong."
        )
        yield RunWarning(WarningId.OTHER_PARAMETERS, words)
    if not timings.stable:
        words = f"The spread target was not reached: {timings.stopped}. Small differences are within the noise."
        yield RunWarning(WarningId.SPREAD_TARGET_MISSED, words)
    if timings.runtime is not None and timings.runtime.inseparable:
        words = (
            f"Prefill and decode cannot be separated: {timings.runtime.inseparable}. Figures that need them separately are n/a."
        )
        yield RunWarning(WarningId.STAGES_INSEPARABLE, f"{words} {traits_of(timings.runtime.type).separate}".strip())
    elif (untimed := steps_unavailable(timings)) is not None:
        words = f"Single decode steps have no times: {untimed.why}. Figures that need them are n/a; decode as a whole is timed."
        yield RunWarning(WarningId.STEPS_UNTIMED, words)
    if (contended := contention(timings)) is not None:
        yield contended
    if (unsettled := settling_warning(timings)) is not None:
        yield unsettled


def _inflation_warnings(stage: StageTiming) -> Iterator[RunWarning]:
    if isinstance(stage.inflation, Missing):
        return
    if stage.name in ("prefill", "decode") and stage.inflation > LARGE_INFLATION:
        slower = f"{significant(stage.inflation, 3)} times slower"
        words = f"torch.profiler made {stage.name} {slower}: its times show where the time goes, not how long it takes."
        yield RunWarning(WarningId.PROFILER_SLOWED, words)
    if stage.name == "decode" and stage.inflation < SMALL_INFLATION:
        words = f"Decode was faster under torch.profiler than without it ({times(stage.inflation)}): "
        yield RunWarning(WarningId.FASTER_UNDER_PROFILER, f"{words}conditions differed between the two passes.")


def assumptions_of(timings: Maybe[CleanTimings]) -> tuple[str, ...]:
    """Return the assumptions behind the figures."""
    if isinstance(timings, Missing):
        return ("Nothing was measured.",)
    model, work = timings.model, timings.workload
    found = [
        "Times come from the unprofiled pass; profiled passes only show where the time goes.",
        "Decoding is greedy and runs to the last new token: an end-of-sequence token does not stop it.",
        f"Prompts: {work.source}.",
        f"Logits are computed for the {model.logits} in prefill.",
        "The 95 % interval of a median comes from order statistics and assumes nothing about the distribution; repeating stops "
        "when the interval is narrow enough, which makes it slightly optimistic.",
    ]
    if not timings.tokens_repeat:
        found.append(
            "Repeats of the same request gave different tokens: kernels that add in varying order resolve near-ties differently, "
            "and random weights make near-ties frequent. The work is the same."
        )
    runtime = timings.runtime
    if runtime is not None and runtime.type != PYTORCH:
        found.append(f"{runtime.type} {runtime.version} ran the model. Prefill and decode: {runtime.method}.")
        if runtime.devices > 1 and not runtime.uncosted:
            found.append(shared_words(runtime.devices))
        return (*found, *runtime.notes)
    if model.compile != "none":
        found.append(f"torch.compile ({model.compile}) covers the decode step; prefill runs eagerly.")
    if len(set(work.prompt_tokens)) > 1:
        padding = work.batch_size * work.padded_tokens - sum(work.prompt_tokens)
        found.append(
            f"Prompts of different lengths are padded on the left: {padding} padding tokens are computed and not counted."
        )
    found += runtime.notes if runtime is not None else ()
    if timings.clock == "cuda events":
        found.append("Steps are timed with CUDA events on the device; nothing waits for the device between steps.")
    return tuple(found)

"""The passes of NVIDIA's tools: a timeline by Nsight Systems, then counters by Nsight Compute of the kernels that carry the time.

Both end with exit code 0 after recording nothing, so each pass is judged by what it left: is the report there, does it open, can
its numbers be believed. A pass that cannot is marked failed with the reason, and nothing is added up from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llm_perf_opt.analysis.kernels.selection import Selection, expected_passes, select
from llm_perf_opt.analysis.trace.stage_launches import stage_launches
from llm_perf_opt.config.schema import RunConfig
from llm_perf_opt.core.errors import CaptureError, ConfigError, Interrupted, LlmPerfError, ResourceError
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.run_folder import RunFolder, write_record
from llm_perf_opt.core.stages import Stage, ncu_range
from llm_perf_opt.counters.manifest import ResolvedMetrics
from llm_perf_opt.profiling.nsight_passes import NcuAsked, NsysAsked, ncu_pass, nsys_pass
from llm_perf_opt.profiling.passes import LABELS, Listener, PassPlan, skip_pass
from llm_perf_opt.profiling.requested_metrics import (
    ANY_CHIP,
    chip_of,
    names_of,
    nsys_traces,
    on_gpu,
    run_metrics,
    sections_of,
    told_drops,
)
from llm_perf_opt.profiling.selftest import Tested, run_selftest
from llm_perf_opt.profiling.timelines import NSYS_PASSES, Timeline, marked_ranges, timelines
from llm_perf_opt.profiling.vendor.compatibility import check_ranges_visible
from llm_perf_opt.profiling.vendor.gates import CUDA_PROFILER_API, on_stage
from llm_perf_opt.profiling.vendor.launch import build_work_argv
from llm_perf_opt.profiling.vendor.ncu import NcuRequest, build_ncu_cmd
from llm_perf_opt.profiling.vendor.nsys import NsysRequest, build_nsys_cmd
from llm_perf_opt.profiling.vendor.permission import counter_permission, permission_error
from llm_perf_opt.profiling.vendor.probe import NsysProbe, locate, probe_nsys, tool_version
from llm_perf_opt.profiling.vendor.tool_pass import STARTS, report_of
from llm_perf_opt.traces.health import Expected
from llm_perf_opt.traces.projection import project

_STAGES = {"ncu_prefill": Stage.PREFILL, "ncu_decode": Stage.DECODE_STEP}
_SLOW_START, _LEAST_START_S = 5, 60.0
"""A program below Nsight Compute starts and launches slower than below Nsight Systems: twice on the H200."""
_OVERRUN = 3
"""How far the estimate of the replays may be off before they are cut short."""
_GATED_BY_RANGE = "The NVTX range opened the capture: on the CPU nothing calls cudaProfilerStart."


def find_or_refuse(name: str, label: str, otherwise: str = "choose profiling=minimal", *, asked: bool = True) -> Path:
    """Where nsys or ncu is; a ResourceError where it is nowhere. Not `asked` for by name, it is only left out."""
    located = locate(name)
    if located.path is None:
        nowhere = located.warning or f"there is no {name} on the PATH or in the usual folders"
        raise ResourceError(
            f"{label} was {'asked for, but' if asked else 'left out:'} {nowhere}.",
            f"Install it, name the binary in the variable {name.upper()}, or {otherwise}; see `llm-perf doctor`.",
        )
    return located.path


def readable_counters(gpu: bool, otherwise: str = "Choose profiling=nsys or minimal.") -> None:
    """A ResourceError where there are no counters, or none that this user may read."""
    if not gpu:
        raise ResourceError("Nsight Compute counts what GPU kernels do, and this run has no NVIDIA GPU.", otherwise)
    permission = counter_permission()
    if permission.status == "denied":
        raise permission_error(permission.why)


# --- Nsight Systems ---------------------------------------------------------------------------------------------------


def run_nsys(folder: RunFolder, config: RunConfig, listener: Listener) -> None:
    """The timeline of the measured iteration; of decode alone where the tool cannot read what prefill calls."""
    listener.pass_started("nsys", LABELS["nsys"])
    try:
        nsys = find_or_refuse("nsys", LABELS["nsys"])
        probe = probe_nsys(nsys)
        if isinstance(probe, Missing):
            raise ResourceError(f"{probe.why}.", "Install Nsight Systems anew, or name another in the variable NSYS.")
        check_ranges_visible(probe.version)
    except ResourceError as absent:
        skip_pass(folder, "nsys", absent, listener)
        raise
    try:
        _nsys_stage(folder, config, listener, nsys, probe, "nsys", Stage.PROFILE)
    except CaptureError as error:
        if not _decode_alone_may_work(folder, config):
            raise
        listener.pass_started("nsys_decode", LABELS["nsys_decode"])
        try:
            _nsys_stage(folder, config, listener, nsys, probe, "nsys_decode", Stage.DECODE)
        except LlmPerfError as again:
            raise error from again


def _decode_alone_may_work(folder: RunFolder, config: RunConfig) -> bool:
    """A tool older than the CUDA runtime gives up over a call of prefill that decode does not make."""
    recorded = report_of("nsys", folder.tool_report("nsys")).exists()
    gated = config.profiling.nsys.capture == "nvtx" and config.runtime.num_new_tokens > 1
    return recorded and gated and on_gpu(config.hardware.device)


def _nsys_stage(
    folder: RunFolder, config: RunConfig, listener: Listener, nsys: Path, probe: NsysProbe, name: str, stage: Stage
) -> None:
    work = build_work_argv(folder.config_file, "plain", folder.raw(name), config.profiling.nsys.decode_steps)
    gpu = on_gpu(config.hardware.device)
    traces = nsys_traces(run_metrics(config, ANY_CHIP), probe, gpu=gpu)
    by_api = config.profiling.nsys.capture == "cudaProfilerApi"
    notes = [traces.note, _GATED_BY_RANGE if by_api and not gpu else ""]
    argv = build_nsys_cmd(
        nsys,
        folder.tool_report(name),
        work,
        NsysRequest(
            probe=probe,
            gate=CUDA_PROFILER_API if by_api and gpu else on_stage(stage),
            trace=traces.modules,
            gpu_metrics=traces.gpu_metrics,
        ),
    )
    runtime = config.runtime
    ranges = marked_ranges(stage, runtime.type, runtime.engine, runtime.num_new_tokens)
    expected = Expected(gpu=gpu, ranges=ranges, command=str(folder.config_file))
    plan = PassPlan(name, argv, config.profiling.pass_timeout_s, f"nsys {probe.version}", " ".join(filter(None, notes)))
    nsys_pass(folder, plan, listener, NsysAsked(nsys, expected, config.profiling.max_trace_gb, STARTS))


# --- Nsight Compute ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Counting:
    """What the passes of Nsight Compute share."""

    ncu: Path
    version: str
    metrics: ResolvedMetrics


def run_ncu(folder: RunFolder, config: RunConfig, listener: Listener, names: Sequence[str]) -> None:
    """The self-test of the counters, then each stage's kernels; what stands in the way is told once."""
    try:
        counting = _counting(config)
    except (ResourceError, ConfigError) as absent:
        for name in names:
            listener.pass_started(name, LABELS[name])
            skip_pass(folder, name, absent, listener)
        raise
    try:
        run_selftest(folder, listener, _tested(config, counting))
    except LlmPerfError as error:
        doubt = CaptureError(f"The counters were not read: {error.fact}", error.remedy)
        for name in names:
            if name in _STAGES:
                listener.pass_started(name, LABELS[name])
                skip_pass(folder, name, doubt, listener)
        raise
    failed: LlmPerfError | None = None
    left_s = config.profiling.ncu.budget_s
    for name in [name for name in names if name in _STAGES]:
        share_s = left_s / 2 if name == "ncu_prefill" and "ncu_decode" in names else left_s
        try:
            left_s -= _count_stage(folder, config, listener, counting, name, share_s)
        except Interrupted:
            raise
        except LlmPerfError as error:  # the other stage still stands
            failed = failed or error
    if failed is not None:
        raise failed


def _tested(config: RunConfig, counting: _Counting) -> Tested:
    asked = config.profiling
    index = config.hardware.device_index
    return Tested(counting.ncu, counting.version, counting.metrics.chip, index, asked.pass_timeout_s, asked.max_trace_gb)


def _counting(config: RunConfig) -> _Counting:
    ncu = find_or_refuse("ncu", "Nsight Compute")
    readable_counters(on_gpu(config.hardware.device))
    chip = chip_of(config.hardware.device_index)
    if isinstance(chip, Missing):
        raise ResourceError(f"Which counters this GPU has is not known: {chip.why}.", "`llm-perf metrics list` names the chips.")
    metrics = run_metrics(config, chip, names_of(ncu, chip), sections_of(ncu))
    return _Counting(ncu, f"ncu {tool_version(ncu) or 'of unknown version'}", metrics)


def _count_stage(
    folder: RunFolder, config: RunConfig, listener: Listener, counting: _Counting, name: str, budget_s: float
) -> float:
    """Count one stage's kernels; returns the seconds it was expected to take."""
    listener.pass_started(name, LABELS[name])
    chosen = _choose(folder, config, counting, _STAGES[name], budget_s)
    if isinstance(chosen, Missing):
        why = CaptureError(f"No launch of {_STAGES[name]} was chosen: {chosen.why}.", "See the passes that record a timeline.")
        skip_pass(folder, name, why, listener)
        raise why
    chosen = replace(chosen, notes=(*chosen.notes, *told_drops(counting.metrics)))
    write_record(folder.selection_file(name), chosen)
    words = (
        f"{len(chosen.kernels)} kernels, {chosen.launch_count} launches × {chosen.passes} passes, "
        f"about {chosen.seconds:.0f} s of {budget_s:.0f}; {chosen.coverage:.0%} of {_STAGES[name]}'s kernel time"
    )
    listener.pass_message(name, {"event": "phase", "text": words})
    steps = chosen.steps_needed if _STAGES[name] is Stage.DECODE_STEP else 0
    work = build_work_argv(folder.config_file, "plain", folder.raw(name), steps)
    argv = build_ncu_cmd(
        counting.ncu,
        folder.tool_report(name),
        work,
        NcuRequest(
            ranges=[ncu_range(_STAGES[name])],
            metrics=counting.metrics.names,
            sections=counting.metrics.sections,
            kernels=[kernel.function for kernel in chosen.kernels],
            launch_skip=chosen.launch_skip,
            launch_count=chosen.launch_count,
        ),
    )
    within_s, limit = counting_limit(folder, budget_s, config.profiling.pass_timeout_s)
    plan = PassPlan(name, argv, within_s, counting.version, limit=limit)
    ncu_pass(folder, plan, listener, NcuAsked(counting.ncu, config.profiling.max_trace_gb, chosen.launch_count))
    return chosen.seconds


def counting_limit(folder: RunFolder, budget_s: float, timeout_s: float) -> tuple[float, str]:
    """The time that counting may take, and the setting it comes from: what the estimate is worth, only the clock knows.

    Starting the program takes what it took below the tool that recorded the timeline, several times over.
    """
    started = [entry.seconds or 0.0 for entry in folder.manifest().passes if entry.name in (*NSYS_PASSES, "torch")]
    within_s = _SLOW_START * max(started, default=0.0) + _LEAST_START_S + _OVERRUN * budget_s
    return (within_s, "profiling.ncu.budget_s") if within_s < timeout_s else (timeout_s, PassPlan.limit)


def _choose(folder: RunFolder, config: RunConfig, counting: _Counting, stage: Stage, budget_s: float) -> Maybe[Selection]:
    asked = config.profiling.ncu
    passes = expected_passes(counting.metrics.names, counting.metrics.sections)
    reasons = []
    for timeline in timelines(folder):
        if isinstance(timeline, Timeline):
            launches = stage_launches(timeline.trace, project(timeline.trace), stage)
            found = select(
                stage, launches, source=timeline.source, top=asked.top, coverage=asked.coverage, passes=passes, budget_s=budget_s
            )
            if isinstance(found, Selection):
                return found
            reasons.append(f"{timeline.source}: {found.why}")
        else:
            reasons.append(timeline.why)
    return Missing("; ".join(reasons) or "no pass recorded a timeline")

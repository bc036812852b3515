"""The torch.profiler pass: one iteration, its operators and its trace."""

import gzip
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from llm_perf_opt.analysis.overhead import PROFILER_EVENTS
from llm_perf_opt.analysis.trace.operators import operator_rows, stage_activity_of
from llm_perf_opt.config.schema import TorchPreset
from llm_perf_opt.core.host_records import ProfilerCost
from llm_perf_opt.core.records import NO_FLOPS, NO_FORMULA, Iteration, Maybe, Missing, OperatorRow, PartTime, StageActivity
from llm_perf_opt.core.stages import PART_LABEL, STAGE_NAMES, Stage
from llm_perf_opt.runners.measure.components import Range, Timeline, host_times, kernel_times
from llm_perf_opt.runners.measure.engine_meter import EngineProfiler
from llm_perf_opt.runners.measure.profiler_cost import profiler_cost
from llm_perf_opt.traces.torch_json.trace import read_torch_trace

T = TypeVar("T")
PRESETS: dict[TorchPreset, dict[str, Any]] = {
    "minimal": {},
    "default": {"record_shapes": True, "profile_memory": True, "with_modules": True},
    "full": {"record_shapes": True, "profile_memory": True, "with_modules": True, "with_flops": True},
    "max": {"record_shapes": True, "profile_memory": True, "with_modules": True, "with_flops": True, "with_stack": True},
}
_FIRST_ONLY = ("profile_memory", "with_flops")
"""On a CPU, recorded in the first iteration only: both lengthen operators."""


@dataclass(frozen=True)
class Profiled:
    """One profiled iteration."""

    iteration: Iteration
    operators: list[OperatorRow]
    activity: Maybe[tuple[StageActivity, ...]]
    parts: Maybe[tuple[PartTime, ...]]
    overhead: tuple[OperatorRow, ...] = ()
    """Rows of the profiler's own work."""
    cost: ProfilerCost | None = None
    unreadable: bool = False
    """Whether torch could not read its own events, so that what only they have is missing."""


_UNREADABLE = Missing("torch could not read its own events: with stacks, it loses names of functions that are freed meanwhile")


def _readable(read: Callable[[], T]) -> Maybe[T]:
    """Return what torch makes of its events; they are unreadable if a name in a stack was lost, but the trace has them."""
    try:
        return read()
    except UnicodeDecodeError:
        return _UNREADABLE


_OWN_WORK = ("Instrumentation", "Resource")


def profile_iteration(
    iterate: Callable[[], Iteration], preset: TorchPreset, cuda: bool, trace: Path, *, shapes: bool = False
) -> Profiled:
    """Profile one iteration after a profiler warm-up iteration; write the gzipped Chrome trace to `trace`.

    `shapes`: record those of inputs whatever the preset, which the sizes of collectives need.
    """
    profiled, more = _profile_gpu if cuda else _profile_cpu, {"record_shapes": True} if shapes else {}
    found = profiled(iterate, preset, trace, more)
    # What is imported during the first attempt is there during the second.
    return profiled(iterate, preset, trace, more) if found.unreadable else found


def _profile_cpu(iterate: Callable[[], Iteration], preset: TorchPreset, trace: Path, more: dict[str, Any]) -> Profiled:
    """Profile two iterations: the first warms the profiler up and records memory and FLOPs, which lengthens operators."""
    from torch.profiler import ProfilerActivity, profile

    settings = {key: value for key, value in PRESETS[preset].items() if key not in _FIRST_ONLY} | more
    with profile(activities=[ProfilerActivity.CPU], **PRESETS[preset]) as first:
        iterate()
    with profile(activities=[ProfilerActivity.CPU], **settings) as profiler:
        measured = iterate()
    _export(profiler, trace)
    rows = _readable(lambda: operators(first.key_averages(), preset, cuda=False)) if PRESETS[preset] else []
    extra = rows if isinstance(rows, Missing) else {row.name: row for row in rows}
    events = _readable(lambda: _events(profiler))
    found = operator_rows(read_torch_trace(trace), on_gpu=False)  # torch's own table takes seconds
    return Profiled(
        iteration=measured,
        operators=[_with_extra(row, extra, preset) for row in found if not _is_label(row.name)],
        activity=Missing("the run is on the CPU"),
        parts=events if isinstance(events, Missing) else part_times(events, cuda=False),
        cost=profiler_cost(settings),
        unreadable=_UNREADABLE in (rows, events),
    )


_OTHER_ITERATION = Missing("the operator did not run in the iteration whose memory and FLOPs were recorded")


def _with_extra(row: OperatorRow, extra: Maybe[Mapping[str, OperatorRow]], preset: TorchPreset) -> OperatorRow:
    """Return an operator with the memory and the FLOPs of the iteration that recorded them."""
    found, why = (None, extra) if isinstance(extra, Missing) else (extra.get(row.name), _OTHER_ITERATION)
    wanted = PRESETS[preset]
    memory: Maybe[int] = why if wanted.get("profile_memory") else _no_memory(preset)
    flops: Maybe[int] = why if wanted.get("with_flops") else NO_FLOPS
    if found is not None:
        memory, flops = found.cpu_memory_bytes, found.flops
    return replace(row, cpu_memory_bytes=memory, flops=flops)


def _no_memory(preset: TorchPreset) -> Missing:
    return Missing(f"the preset {preset} does not record memory; profiling.torch.preset=default does")


def _profile_gpu(iterate: Callable[[], Iteration], preset: TorchPreset, trace: Path, more: dict[str, Any]) -> Profiled:
    from torch.profiler import ProfilerActivity, profile, schedule

    activities, settings = [ProfilerActivity.CPU, ProfilerActivity.CUDA], PRESETS[preset] | more
    with profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=1), **settings) as profiler:
        iterate()
        profiler.step()
        measured = iterate()
    _export(profiler, trace)
    read = _readable(lambda: (_events(profiler), profiler.key_averages()))
    if isinstance(read, Missing):
        rows = operator_rows(read_torch_trace(trace), on_gpu=True)
        shown = [_with_extra(row, read, preset) for row in rows if not _is_label(row.name)]
        return Profiled(measured, shown, read, read, unreadable=True)
    events, averages = read
    return Profiled(
        iteration=measured,
        operators=operators([row for row in averages if not is_own_work(row)], preset, cuda=True),
        overhead=tuple(operators([row for row in averages if is_own_work(row)], preset, cuda=True)),
        activity=stage_activity(events),
        parts=part_times(events, cuda=True),
    )


def profile_steps(step: Callable[[int], Any], steps: int, warmup: int, trace: Path) -> Any:
    """Profile `steps` calls of a function after `warmup` others; write the gzipped Chrome trace and return the profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    trace.parent.mkdir(parents=True, exist_ok=True)
    with profile(activities=activities, schedule=schedule(wait=0, warmup=warmup, active=steps), record_shapes=True) as profiler:
        for number in range(warmup + steps):
            step(number)
            if number < warmup + steps - 1:  # a step after the last one would end the recording and start another
                profiler.step()
    _export(profiler, trace)
    return profiler


def operators_of(profiler: Any) -> list[OperatorRow]:
    """Return the operators of any torch.profiler that has ended, without its own work."""
    from torch.profiler import ProfilerActivity

    cuda = ProfilerActivity.CUDA in profiler.activities
    averages = [row for row in profiler.key_averages() if not is_own_work(row) and row.key not in PROFILER_EVENTS]
    return operators(averages, "default" if profiler.profile_memory else "minimal", cuda)


def _export(profiler: Any, trace: Path) -> None:
    """Write the trace; torch compresses line by line, which takes three times as long."""
    plain = trace.with_name(f".{os.getpid()}.{trace.stem}")
    profiler.export_chrome_trace(str(plain))
    _move_compressed(plain, trace)


@dataclass(frozen=True)
class DeviceEvent:
    """A profiler event on the host or on the device."""

    name: str
    on_device: bool
    start_ns: int
    duration_ns: int
    correlation: int
    """Shared by a launch and the work that it started."""


def _events(profiler: Any) -> list[DeviceEvent]:
    from torch._C._autograd import DeviceType

    return [
        DeviceEvent(
            event.name(), event.device_type() != DeviceType.CPU, event.start_ns(), event.duration_ns(), event.correlation_id()
        )
        for event in profiler.profiler.kineto_results.events()
    ]


def _stage_ranges(events: Sequence[DeviceEvent]) -> list[Range]:
    wanted = (Stage.PREFILL.value, Stage.DECODE.value)
    return _ranges([event for event in events if event.name in wanted])


def _ranges(events: Sequence[DeviceEvent]) -> list[Range]:
    return [Range(event.start_ns, event.start_ns + event.duration_ns, event.name) for event in events if not event.on_device]


def _device_work(events: Sequence[DeviceEvent]) -> list[tuple[int, int, int]]:
    """Return (correlation, launch time, duration) of every kernel, copy and memset."""
    launches = {event.correlation: event.start_ns for event in events if not event.on_device and event.name.startswith("cu")}
    return [
        (event.correlation, launches[event.correlation], event.duration_ns)
        for event in events
        if event.on_device and event.correlation in launches and not _is_label(event.name)
    ]


def _is_label(name: str) -> bool:
    return name in STAGE_NAMES or name.startswith((PART_LABEL, "ProfilerStep"))


def stage_activity(events: Sequence[DeviceEvent]) -> tuple[StageActivity, ...]:
    """Return the device work of each stage: work belongs to the stage whose range encloses its launch."""
    stages = _stage_ranges(events)
    by_stage = Timeline(stages)
    found: dict[str, list[tuple[int, int]]] = {stage.name: [] for stage in stages}
    for launch, launched, duration in _device_work(events):
        stage = by_stage.at(launched)
        if stage:
            found[stage].append((launch, duration))
    return tuple(
        StageActivity(name, len({launch for launch, _ in work}), len(work), sum(duration for _, duration in work))
        for name, work in found.items()
    )


def part_times(events: Sequence[DeviceEvent], cuda: bool) -> Maybe[tuple[PartTime, ...]]:
    """Return the time by stage and component, if components were labeled."""
    parts = _ranges([event for event in events if event.name.startswith(PART_LABEL)])
    if not parts:
        return Missing("components are not labeled with torch.compile, which fuses those of the decode step")
    if cuda:
        return kernel_times(
            _stage_ranges(events), parts, [(launched, duration) for _, launched, duration in _device_work(events)]
        )
    return host_times(_stage_ranges(events), parts)


def is_own_work(row: Any) -> bool:
    """Return whether a row is the profiler's own work and not a user's label, such as record_function("Resource")."""
    return row.key in _OWN_WORK and not getattr(row, "is_user_annotation", True)


def operators(averages: Any, preset: TorchPreset, cuda: bool) -> list[OperatorRow]:
    """Return the operators of the profiler's table, without kernels and stage labels."""
    from torch._C._autograd import DeviceType

    memory = PRESETS[preset].get("profile_memory", False)
    no_memory = _no_memory(preset)
    no_device = Missing("the run is on the CPU")
    flops = PRESETS[preset].get("with_flops", False)

    rows = []
    for row in averages:
        if row.device_type != DeviceType.CPU or _is_label(row.key):
            continue
        rows.append(
            OperatorRow(
                name=row.key,
                calls=int(row.count),
                cpu_total_ns=_ns(row.cpu_time_total),
                cpu_self_ns=_ns(row.self_cpu_time_total),
                device_total_ns=_ns(row.device_time_total) if cuda else no_device,
                device_self_ns=_ns(row.self_device_time_total) if cuda else no_device,
                cpu_memory_bytes=int(row.self_cpu_memory_usage) if memory else no_memory,
                device_memory_bytes=(int(row.self_device_memory_usage) if memory else no_memory) if cuda else no_device,
                flops=(int(row.flops) or NO_FORMULA) if flops else NO_FLOPS,
            )
        )
    return sorted(rows, key=_weight, reverse=True)


def _weight(row: OperatorRow) -> int:
    """Return the device time if there is a device, else the CPU time."""
    return row.cpu_self_ns if isinstance(row.device_self_ns, Missing) else row.device_self_ns


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)


# --- engine trace -----------------------------------------------------------------------------------------------------


def profile_engine(profiler: EngineProfiler, iterate: Callable[[], Iteration], cuda: bool, trace: Path) -> Profiled:
    """Profile one iteration after a profiler warm-up iteration; write the gzipped Chrome trace to `trace`."""
    profiler.start()
    iterate()
    profiler.stop().unlink()
    profiler.start()
    measured = iterate()
    _move_compressed(profiler.stop(), trace)
    found = read_torch_trace(trace)
    return Profiled(
        iteration=measured,
        operators=list(operator_rows(found, cuda)),
        activity=stage_activity_of(found) if cuda else Missing("the run is on the CPU"),
        parts=Missing("the modules of an engine are not labeled with the components of the cost model"),
    )


def _move_compressed(source: Path, trace: Path) -> None:
    """Move the engine's file to `trace`, compressed and atomically."""
    if source.name.endswith(".gz"):
        source.replace(trace)
        return
    partial = _partial_file(trace)
    with source.open("rb") as plain, gzip.open(partial, "wb", compresslevel=6) as packed:
        shutil.copyfileobj(plain, packed)
    partial.replace(trace)
    source.unlink()


def _partial_file(trace: Path) -> Path:
    return trace.with_name(f".{os.getpid()}.{trace.name}")

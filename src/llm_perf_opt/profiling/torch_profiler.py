"""The torch.profiler pass: one iteration, its operators and its trace."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llm_perf_opt.config import TorchPreset
from llm_perf_opt.records import Iteration, Missing, OperatorRow
from llm_perf_opt.stages import STAGE_NAMES

PRESETS: dict[TorchPreset, dict[str, Any]] = {
    "minimal": {},
    "default": {"record_shapes": True, "profile_memory": True, "with_modules": True},
    "max": {"record_shapes": True, "profile_memory": True, "with_modules": True, "with_stack": True},
}


def profile_iteration(
    iterate: Callable[[], Iteration], preset: TorchPreset, cuda: bool, trace: Path
) -> tuple[Iteration, list[OperatorRow]]:
    """Profile one iteration after one that only wakes the profiler up; leaves the gzipped Chrome trace at `trace`."""
    from torch.profiler import ProfilerActivity, profile, schedule

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=1), **PRESETS[preset]) as profiler:
        iterate()
        profiler.step()
        measured = iterate()
    beside = trace.with_name(f".{os.getpid()}.{trace.name}")  # the ending .gz makes torch compress it
    profiler.export_chrome_trace(str(beside))
    beside.replace(trace)
    return measured, operators(profiler.key_averages(), preset, cuda)


def operators(averages: Any, preset: TorchPreset, cuda: bool) -> list[OperatorRow]:
    """Rows of the profiler's table that are operators: no kernels, no stage labels."""
    from torch._C._autograd import DeviceType

    memory = PRESETS[preset].get("profile_memory", False)
    no_memory = Missing(f"the preset {preset} does not record memory; profiling.torch.preset=default does")
    no_device = Missing("the run is on the CPU")

    rows = []
    for row in averages:
        if row.device_type != DeviceType.CPU or row.key in STAGE_NAMES or row.key.startswith("ProfilerStep"):
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
            )
        )
    return sorted(rows, key=_weight, reverse=True)


def _weight(row: OperatorRow) -> int:
    """Device time where there is a device, else CPU time."""
    return row.cpu_self_ns if isinstance(row.device_self_ns, Missing) else row.device_self_ns


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)

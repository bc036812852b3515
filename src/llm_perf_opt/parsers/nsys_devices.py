"""Which GPU a process's CUDA device is. Processes number the devices they see: two that see one each both call it 0."""

from dataclasses import replace

import numpy as np

from llm_perf_opt.events import DeviceWork
from llm_perf_opt.parsers.sqlite_tables import Database

_PID_SHIFT, _PID_BITS = 24, 0xFFFFFF
"""Where a global process id holds the process number."""
GpuNumbers = dict[tuple[int, int], int]
"""(process number, its CUDA device) → the GPU's number among those of the report."""


def gpu_numbers(database: Database) -> GpuNumbers:
    """The report's own mapping, where processes mean different GPUs by one number; empty where their numbers can stay."""
    found: GpuNumbers = {}
    for gpu, device, pid in database.rows("TARGET_INFO_CUDA_DEVICE", ("gpuId", "cudaId", "pid")):
        if isinstance(gpu, int) and isinstance(device, int) and isinstance(pid, int) and 0 <= gpu < 2**31:
            found[(pid, device)] = gpu
    meant: dict[int, set[int]] = {}
    for (_, device), gpu in found.items():
        meant.setdefault(device, set()).add(gpu)
    return found if any(len(gpus) > 1 for gpus in meant.values()) else {}


def renumbered_devices(work: DeviceWork, numbers: GpuNumbers) -> DeviceWork:
    """The same work with GPUs in place of the processes' own numbers; a device that is not in the mapping keeps its number."""
    if not numbers or not len(work):
        return work
    pairs, place = np.unique(
        np.stack([(work.process >> _PID_SHIFT) & _PID_BITS, work.device.astype(np.int64)]), axis=1, return_inverse=True
    )
    meant = [numbers.get((pid, device), device) for pid, device in zip(*pairs.tolist(), strict=True)]
    return replace(work, device=np.array(meant, np.int32)[place.reshape(-1)])

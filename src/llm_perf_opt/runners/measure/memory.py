"""Peak memory of the measured process, and of the processes of an engine that runs the model elsewhere."""

import re
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llm_perf_opt.core.records import Maybe, MemoryPeaks, Missing

if TYPE_CHECKING:
    import torch

PROC = Path("/proc")
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def memory_peaks(device: "torch.device", *, elsewhere: bool) -> MemoryPeaks:
    """Return the peaks. `elsewhere`: the model runs in child processes, whose allocators this process does not see."""
    import torch

    unit = 1 if sys.platform == "darwin" else 1024
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    resident: Maybe[int] = _with_children(own) if elsewhere else own
    if device.type != "cuda":
        none = Missing("the run is on the CPU")
        return MemoryPeaks(none, none, none, resident)
    if elsewhere:
        unseen = Missing("the engine allocates in other processes")
        return MemoryPeaks(unseen, unseen, _used(device), resident)
    return MemoryPeaks(
        allocated_bytes=torch.cuda.max_memory_allocated(device),
        reserved_bytes=torch.cuda.max_memory_reserved(device),
        device_used_bytes=_used(device),
        process_rss_bytes=resident,
    )


def _used(device: "torch.device") -> Maybe[int]:
    """Return the memory in use by all processes. Asking needs some memory itself, which an engine may not have left."""
    import torch

    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        return Missing(f"the driver did not report it: {' '.join(str(error).split())[:100]}")
    return total - free


def _with_children(own: int) -> Maybe[int]:
    """Return the sum of the peaks of this process and all processes below it."""
    import psutil

    peaks = [own]
    for child in psutil.Process().children(recursive=True):
        try:
            found = _PEAK.search((PROC / str(child.pid) / "status").read_text())
        except FileNotFoundError:
            if (PROC / "self").exists():
                continue  # it has ended
            return Missing("this system does not report the peak memory of other processes")
        except OSError:
            continue
        peaks.append(int(found[1]) * 1024 if found else 0)
    return sum(peaks)

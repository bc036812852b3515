"""Facts about the host: its processor and memory."""

import os
import platform
from pathlib import Path

_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def cpu_flags() -> frozenset[str]:
    """Instruction-set flags as the kernel lists them; empty where it does not."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return frozenset()
    for line in cpuinfo.read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def cpu_has_native_bf16() -> bool:
    """Whether the processor multiplies bf16 in hardware."""
    return bool(cpu_flags() & _BF16_FLAGS)


def cpu_name() -> str:
    """The processor's name, or its architecture where it has none."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Processor") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def usable_cpus() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def available_memory_bytes() -> int:
    """Memory that can be taken without swapping, the container's limit respected."""
    import psutil

    available = int(psutil.virtual_memory().available)
    limit = _cgroup_limit()
    if limit is not None:
        available = min(available, max(0, limit))
    return available


def _cgroup_limit() -> int | None:
    """What the control group still allows, where it sets a limit."""
    for maximum, current in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = Path(maximum).read_text().strip(), Path(current).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:
            return int(limit) - int(used)
    return None

"""Facts about the host: its processor and memory."""

import os
import platform
from pathlib import Path
from typing import Literal

from llm_perf_opt.core.records import Maybe, Missing

_CACHE_FILES = ("level", "type", "size", "shared_cpu_list")
_CACHE_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
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


def last_level_cache_bytes(processors: Path = Path("/sys/devices/system/cpu")) -> Maybe[int]:
    """All last-level caches of the processors this process may use, together: threads on several share the data among them."""
    caches: dict[tuple[int, str], int] = {}
    for folder in processors.glob("cpu[0-9]*/cache/index[0-9]*"):
        cpu = int(folder.parent.parent.name.removeprefix("cpu"))
        if hasattr(os, "sched_getaffinity") and cpu not in os.sched_getaffinity(0):
            continue
        try:
            level, kind, size, shared = ((folder / name).read_text().strip() for name in _CACHE_FILES)
        except OSError:
            continue
        if kind != "Instruction" and level.isdigit() and size[:-1].isdigit() and size[-1] in _CACHE_UNITS:
            caches[int(level), shared] = int(size[:-1]) * _CACHE_UNITS[size[-1]]
    if not caches:
        return Missing("the system does not tell its caches")
    last = max(level for level, _ in caches)
    return sum(size for (level, _), size in caches.items() if level == last)


def cpu_frequency_mhz(which: Literal["current", "max"]) -> Maybe[float]:
    """The processors' frequency now, or the highest they reach."""
    import psutil

    try:
        found = psutil.cpu_freq()
    except (OSError, NotImplementedError, AttributeError):
        found = None
    value = getattr(found, which) if found else 0
    return float(value) if value else Missing("the system does not tell the frequency")


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


def total_memory_bytes() -> int:
    """All memory that this process could ever have, the container's limit respected."""
    import psutil

    total = int(psutil.virtual_memory().total)
    group = _cgroup()
    return total if group is None else min(total, group[0])


def _cgroup_limit() -> int | None:
    """What the control group still allows, where it sets a limit."""
    group = _cgroup()
    return None if group is None else group[0] - group[1]


def _cgroup() -> tuple[int, int] | None:
    """The control group's limit and what of it is taken, where it sets one."""
    for folder, maximum, current, cached in (
        (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, used = (folder / maximum).read_text().strip(), (folder / current).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:
            return int(limit), int(used) - _reclaimable(folder / "memory.stat", cached)
    return None


def _reclaimable(statistics: Path, name: str) -> int:
    """Files that were read and are kept in memory count as used, and are let go of as soon as anything else needs the room."""
    try:
        lines = [line.split() for line in statistics.read_text().splitlines()]
    except OSError:
        return 0
    return next((int(line[1]) for line in lines if len(line) == 2 and line[0] == name and line[1].isdigit()), 0)


def user_cache_folder(kind: str) -> Maybe[Path]:
    """Where things that are costly to find out are kept for this user."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if given and Path(given).is_absolute():  # the XDG specification has a relative path ignored
        return Path(given) / "llm-perf-opt" / kind
    try:
        return Path.home() / ".cache" / "llm-perf-opt" / kind
    except RuntimeError:
        return Missing("this user has no home folder; set XDG_CACHE_HOME")

"""The host: facts about its processor and memory, and garbage collection in this process."""

import gc
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from llm_perf_opt.core.records import Maybe, Missing

_PROCESSORS = Path("/sys/devices/system/cpu")
_CACHE_FILES = ("level", "type", "size", "shared_cpu_list")
_CACHE_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_MOST_CPU = 8191
"""The highest CPU number that Linux can have (NR_CPUS of x86_64 and aarch64 is at most 8192)."""
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def cpu_flags() -> frozenset[str]:
    """Return the instruction-set flags that the kernel lists; empty if it lists none."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return frozenset()
    for line in cpuinfo.read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def cpu_has_native_bf16() -> bool:
    """Return whether the processor multiplies bf16 in hardware."""
    return bool(cpu_flags() & _BF16_FLAGS)


def cpu_name() -> str:
    """Return the name of the processor, or its architecture if it has none."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Processor") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def cache_bytes(processors: Path = _PROCESSORS) -> Maybe[dict[int, int]]:
    """Return level → total size of the data caches of the processors that this process may use, in ascending order."""
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
        return Missing("the system does not report its caches")
    levels = sorted({level for level, _ in caches})
    return {level: sum(size for (other, _), size in caches.items() if other == level) for level in levels}


def last_level_cache_bytes(processors: Path = _PROCESSORS) -> Maybe[int]:
    """Return the total size of the last-level caches of the processors that this process may use."""
    levels = cache_bytes(processors)
    return levels if isinstance(levels, Missing) else levels[max(levels)]


def physical_cores(processors: Path = _PROCESSORS) -> Maybe[int]:
    """Return the number of cores that this process may use; hyperthreads of one core count once."""
    found = one_cpu_per_core(processors)
    return found if isinstance(found, Missing) else len(found)


def one_cpu_per_core(processors: Path = _PROCESSORS) -> Maybe[tuple[int, ...]]:
    """Return the first CPU of each core that this process may use."""
    cores: dict[str, int] = {}
    for file in processors.glob("cpu[0-9]*/topology/thread_siblings_list"):
        cpu = int(file.parent.parent.name.removeprefix("cpu"))
        if hasattr(os, "sched_getaffinity") and cpu not in os.sched_getaffinity(0):
            continue
        try:
            core = file.read_text().strip()
        except OSError:
            continue
        cores[core] = min(cpu, cores.get(core, cpu))
    return tuple(sorted(cores.values())) or Missing("the system does not report which processors share a core")


def cpu_frequency_mhz(which: Literal["current", "max"]) -> Maybe[float]:
    """Return the current or the highest frequency of the processors."""
    import psutil

    try:
        found = psutil.cpu_freq()
    except (OSError, NotImplementedError, AttributeError):
        found = None
    value = getattr(found, which) if found else 0
    return float(value) if value else Missing("the system does not report the frequency")


def usable_cpus() -> int:
    """Return the number of processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def allowed_cpus() -> Maybe[frozenset[int]]:
    """Return the numbers of the processors that this process may run on."""
    if not hasattr(os, "sched_getaffinity"):
        return Missing("this system does not report the CPUs of a process")
    return frozenset(os.sched_getaffinity(0))


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the CPUs of a list such as `0-3,8`, sorted; raise a ValueError that says what is wrong."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part.strip()!r} is neither a number nor a range")
        low, high = int(first), int(last or first)
        if high < low:
            raise ValueError(f"the range {part.strip()} ends before it begins")
        if high > _MOST_CPU:
            raise ValueError(f"{high} is more than {_MOST_CPU}")
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def cpu_list(cpus: Iterable[int]) -> str:
    """Return CPUs in the form that `parse_cpu_list` reads, with ranges."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def available_memory_bytes() -> int:
    """Return the memory that can be allocated without swapping, within the limit of the container."""
    import psutil

    available = int(psutil.virtual_memory().available)
    group = _cgroup()
    return available if group is None else min(available, max(0, group[0] - group[1]))


def total_memory_bytes() -> int:
    """Return the total memory, within the limit of the container."""
    import psutil

    total = int(psutil.virtual_memory().total)
    group = _cgroup()
    return total if group is None else min(total, group[0])


def _cgroup() -> tuple[int, int] | None:
    """Return the memory limit of the control group and the memory in use, or None if there is no limit."""
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
    """Return the size of cached files: the kernel counts them as used, but frees them when memory is needed."""
    try:
        lines = [line.split() for line in statistics.read_text().splitlines()]
    except OSError:
        return 0
    return next((int(line[1]) for line in lines if len(line) == 2 and line[0] == name and line[1].isdigit()), 0)


def cluster_node() -> str:
    """Return the name of this machine as its cluster knows it: Slurm may run several nodes on one host."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def user_cache_folder(kind: str) -> Maybe[Path]:
    """Return the folder of a kind of cache for this user."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if given and Path(given).is_absolute():  # the XDG specification says to ignore a relative path
        return Path(given) / "llm-perf-opt" / kind
    try:
        return Path.home() / ".cache" / "llm-perf-opt" / kind
    except RuntimeError:
        return Missing("this user has no home folder; set XDG_CACHE_HOME")


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Turn off garbage collection where many objects without cycles are made: searching them takes longer than making them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

"""How the processors and the memory of the host are laid out: sockets, cores, NUMA nodes. Linux reports it under /sys."""

import re
from pathlib import Path
from typing import Any

from llm_perf_opt.core.host import cache_bytes
from llm_perf_opt.core.records import Maybe, Missing

_NODES = Path("/sys/devices/system/node")
_PROCESSORS = Path("/sys/devices/system/cpu")
_PCI = Path("/sys/bus/pci/devices")


def cpu_layout(processors: Path = _PROCESSORS) -> dict[str, Any]:
    """Return sockets, cores and threads per core of all processors, and the caches that this process may use, for env.json."""
    cores: dict[tuple[str, str], int] = {}
    for folder in processors.glob("cpu[0-9]*/topology"):
        socket, core = _text(folder / "physical_package_id"), _text(folder / "core_id")
        if socket and core:
            cores[socket, core] = cores.get((socket, core), 0) + 1
    unknown = str(Missing("the system does not report it"))
    caches = cache_bytes(processors)
    return {
        "sockets": len({socket for socket, _ in cores}) or unknown,
        "cores": len(cores) or unknown,
        "threads_per_core": max(cores.values()) if cores else unknown,
        "caches": str(caches) if isinstance(caches, Missing) else {f"l{level}_bytes": size for level, size in caches.items()},
    }


def numa_nodes(nodes: Path = _NODES) -> Maybe[list[dict[str, Any]]]:
    """Return each NUMA node with its CPUs, memory and distances to all nodes, in order."""
    found = []
    for folder in sorted(nodes.glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node"))):
        total = re.search(r"MemTotal:\s*(\d+) kB", _text(folder / "meminfo"))
        found.append(
            {
                "node": int(folder.name.removeprefix("node")),
                "cpus": _text(folder / "cpulist"),
                "memory_bytes": int(total[1]) * 1024 if total else str(Missing("the system does not report it")),
                "distances": [int(word) for word in _text(folder / "distance").split() if word.isdecimal()],
            }
        )
    return found or Missing("the system reports no NUMA nodes")


def numa_node_of(bus_id: str, devices: Path = _PCI) -> Maybe[int]:
    """Return the NUMA node of a PCI device, given its bus id as NVML or the kernel spells it."""
    domain, _, rest = bus_id.lower().partition(":")
    if not re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", f"{domain}:{rest}"):
        return Missing(f"{bus_id!r} is not a PCI bus id")
    text = _text(devices / f"{domain[-4:]}:{rest}" / "numa_node")
    if not re.fullmatch(r"-?\d+", text) or int(text) < 0:
        return Missing("the system does not report it")
    return int(text)


def _text(path: Path) -> str:
    """Return the content of a file of the kernel; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""

"""Every NVIDIA GPU of the machine and how they are connected, through NVML, for env.json."""

import itertools
from collections.abc import Callable
from typing import Any

from llm_perf_opt.core.host import cpu_list
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.topology import numa_node_of
from llm_perf_opt.runners.measure.gpu import read, text_of

_MOST_LINKS = 18
"""NVML_NVLINK_MAX_LINKS of nvml.h: the most NVLink connections of a GPU."""
_LEVELS = {
    0: "same board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one PCIe host bridge",
    40: "one NUMA node",
    50: "different NUMA nodes",
}
"""nvmlGpuTopologyLevel_t of nvml.h: the closest common ancestor of two devices."""
_PCIE = {
    "generation": "nvmlDeviceGetCurrPcieLinkGeneration",
    "generation_max": "nvmlDeviceGetMaxPcieLinkGeneration",
    "width": "nvmlDeviceGetCurrPcieLinkWidth",
    "width_max": "nvmlDeviceGetMaxPcieLinkWidth",
}
_STATE = "nvmlDeviceGetNvLinkState"


def gpus(library: Any) -> list[dict[str, Any]]:
    """Return each GPU that the driver lists, with its PCIe and NVLink connections; an unavailable fact is its reason."""
    return [{"index": index, **_facts(library, handle)} for index, handle in enumerate(_handles(library))]


def connections(library: Any) -> list[dict[str, Any]]:
    """Return how each pair of GPUs is connected: their closest common ancestor, and their direct NVLink connections."""
    return [
        {
            "gpus": [first, second],
            "path": _fact(library, _level, "nvmlDeviceGetTopologyCommonAncestor", one, other),
            "nvlink": _shared_links(library, one, other),
        }
        for (first, one), (second, other) in itertools.combinations(enumerate(_handles(library)), 2)
    ]


def _handles(library: Any) -> list[Any]:
    count = _ask(library, int, "nvmlDeviceGetCount")
    indices = range(0 if isinstance(count, Missing) else count)
    found = [_ask(library, lambda handle: handle, "nvmlDeviceGetHandleByIndex", index) for index in indices]
    return [handle for handle in found if not isinstance(handle, Missing)]


def _facts(library: Any, handle: Any) -> dict[str, Any]:
    bus = _fact(library, _bus_id, "nvmlDeviceGetPciInfo", handle)
    node = numa_node_of(str(bus))
    return {
        "name": _fact(library, text_of, "nvmlDeviceGetName", handle),
        "uuid": _fact(library, text_of, "nvmlDeviceGetUUID", handle),
        "memory_bytes": _fact(library, lambda memory: int(memory.total), "nvmlDeviceGetMemoryInfo", handle),
        "pci_bus_id": bus,
        "numa_node": str(node) if isinstance(node, Missing) else node,
        "cpus": _fact(library, _cpus, "nvmlDeviceGetCpuAffinity", handle, _affinity_words()),
        "pcie": {name: _fact(library, int, question, handle) for name, question in _PCIE.items()},
        "nvlink": _nvlink(library, handle),
    }


def _nvlink(library: Any, handle: Any) -> dict[str, Any] | str:
    """Return the number of active links and their versions, or why there are none."""
    first = _ask(library, bool, _STATE, handle, 0)
    if isinstance(first, Missing):
        return str(first)
    active = _active_links(library, handle)
    versions = {str(_fact(library, int, "nvmlDeviceGetNvLinkVersion", handle, link)) for link in active}
    return {"links": len(active), "versions": sorted(versions)}


def _active_links(library: Any, handle: Any) -> list[int]:
    return [link for link in range(_MOST_LINKS) if _ask(library, bool, _STATE, handle, link) is True]


def _shared_links(library: Any, one: Any, other: Any) -> int | str:
    """Return the number of links that lead directly from one GPU to the other; links to a switch lead to neither."""
    bus = _ask(library, _bus_id, "nvmlDeviceGetPciInfo", other)
    if isinstance(bus, Missing):
        return str(bus)
    ends = [_ask(library, _bus_id, "nvmlDeviceGetNvLinkRemotePciInfo", one, link) for link in _active_links(library, one)]
    return ends.count(bus)


def _bus_id(pci: Any) -> str:
    return text_of(pci.busId)


def _affinity_words() -> int:
    import psutil

    return ((psutil.cpu_count() or 1) + 63) // 64


def _cpus(masks: Any) -> str:
    """Return the CPUs of a bit mask in words of 64 bits, such as 0-31."""
    return cpu_list(64 * place + bit for place, mask in enumerate(masks) for bit in range(64) if int(mask) >> bit & 1)


def _level(level: Any) -> str:
    return _LEVELS.get(int(level), f"level {level}")


def _ask(library: Any, shape: Callable[[Any], Any], name: str, *arguments: Any) -> Maybe[Any]:
    """Return the answer of a function of NVML in the wanted shape, or why there is none."""
    question = getattr(library, name, None)
    if question is None:
        return Missing(f"this version of nvidia-ml-py has no {name}")
    return read(library, lambda: shape(question(*arguments)))


def _fact(library: Any, shape: Callable[[Any], Any], name: str, *arguments: Any) -> Any:
    answer = _ask(library, shape, name, *arguments)
    return str(answer) if isinstance(answer, Missing) else answer

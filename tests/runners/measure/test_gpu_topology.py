"""All GPUs and their connections, from a stand-in for NVML."""

from types import SimpleNamespace
from typing import Any

import pytest

from llm_perf_opt.runners.measure.gpu_topology import connections, gpus

BUSES = (b"00000000:1B:00.0", b"00000000:2C:00.0", b"00000000:AA:00.0")


class NVMLError(Exception):
    """What NVML raises."""


def refused(*_: object) -> int:
    raise NVMLError("Not Supported")


def state(handle: int, link: int) -> int:
    return int(link < 3) if link < 4 else refused()


@pytest.fixture
def library() -> Any:
    """Two GPUs: links 0 and 1 of each lead to the other, link 2 to a switch, link 3 is down."""
    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: b"NVIDIA H200",
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=141 * 2**30),
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=BUSES[handle]),
        nvmlDeviceGetCpuAffinity=lambda handle, words: [0b1111 << 4 * handle],
        nvmlDeviceGetCurrPcieLinkGeneration=lambda handle: 1,
        nvmlDeviceGetMaxPcieLinkGeneration=lambda handle: 5,
        nvmlDeviceGetCurrPcieLinkWidth=lambda handle: 16,
        nvmlDeviceGetMaxPcieLinkWidth=refused,
        nvmlDeviceGetNvLinkState=state,
        nvmlDeviceGetNvLinkVersion=lambda handle, link: 4,
        nvmlDeviceGetNvLinkRemotePciInfo=lambda handle, link: SimpleNamespace(busId=BUSES[1 - handle if link < 2 else 2]),
        nvmlDeviceGetTopologyCommonAncestor=lambda one, other: 50,
    )


def test_every_gpu_with_its_connections(library: Any) -> None:
    first, second = gpus(library)
    assert (first["index"], second["index"], second["uuid"], second["cpus"]) == (0, 1, "GPU-1", "4-7")
    assert first["pcie"] == {"generation": 1, "generation_max": 5, "width": 16, "width_max": "n/a: NVML: Not Supported"}
    assert first["nvlink"] == {"links": 3, "versions": ["4"]}
    assert connections(library) == [{"gpus": [0, 1], "path": "different NUMA nodes", "nvlink": 2}]


@pytest.mark.parametrize("missing", ["nvmlDeviceGetNvLinkState", "nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetPciInfo"])
def test_what_an_older_library_does_not_have_is_its_reason(missing: str, library: Any) -> None:
    delattr(library, missing)
    assert f"has no {missing}" in str([*gpus(library), *connections(library)])

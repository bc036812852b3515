"""The layout of processors and memory, as Linux reports it."""

from pathlib import Path

import pytest

from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.topology import cpu_layout, numa_node_of, numa_nodes


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_two_sockets_with_hyperthreads(tmp_path: Path) -> None:
    for cpu in range(8):
        write(tmp_path / f"cpu{cpu}/topology/physical_package_id", f"{cpu // 2 % 2}\n")
        write(tmp_path / f"cpu{cpu}/topology/core_id", f"{cpu % 2}\n")
    found = cpu_layout(tmp_path)
    assert (found["sockets"], found["cores"], found["threads_per_core"]) == (2, 4, 2)


def test_nodes_with_their_memory_and_distances(tmp_path: Path) -> None:
    for node, distances in ((0, "10 21"), (10, "21 10"), (2, "")):
        write(tmp_path / f"node{node}/cpulist", "0-3\n" if node == 0 else "\n")
        write(tmp_path / f"node{node}/meminfo", f"Node {node} MemTotal:       1024 kB\nNode {node} MemFree: 1 kB\n")
        write(tmp_path / f"node{node}/distance", f"{distances}\n")
    found = numa_nodes(tmp_path)
    assert not isinstance(found, Missing)
    assert [entry["node"] for entry in found] == [0, 2, 10]
    assert found[0] == {"node": 0, "cpus": "0-3", "memory_bytes": 2**20, "distances": [10, 21]}
    assert found[2]["cpus"] == "", "a node may have memory only"


def test_a_system_without_these_files_says_so(tmp_path: Path) -> None:
    assert isinstance(numa_nodes(tmp_path), Missing)
    found = cpu_layout(tmp_path)
    assert all(str(value).startswith("n/a: ") for value in found.values())


@pytest.mark.parametrize(
    ("bus_id", "text", "node"),
    [
        ("00000000:1B:00.0", "1\n", 1),
        ("0000:1b:00.0", "0\n", 0),
        ("0000:1b:00.0", "-1\n", None),
        ("0000:1b:00.0", "x", None),
        ("../../etc", "0", None),
        ("n/a: NVML", "0", None),
    ],
)
def test_the_node_of_a_card(tmp_path: Path, bus_id: str, text: str, node: int | None) -> None:
    write(tmp_path / "0000:1b:00.0/numa_node", text)
    found = numa_node_of(bus_id, tmp_path)
    assert found == node if node is not None else isinstance(found, Missing)

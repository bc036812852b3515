"""The machine in the report."""

from typing import Any

import pytest

from llm_perf_opt.core.records import Missing
from llm_perf_opt.report.run_tables import environment_rows

UNMEASURED = Missing("nothing was measured")
GPU = {
    "index": 0,
    "name": "NVIDIA H200",
    "numa_node": 1,
    "pcie": {"generation": 1, "width": 16, "generation_max": 5, "width_max": 16},
    "nvlink": {"links": 18, "versions": ["4"]},
}


def test_nodes_cards_and_connections_have_rows() -> None:
    env = {
        "numa": [{"node": 0, "cpus": "0-3"}, {"node": 1, "cpus": "4-7"}],
        "gpus": [GPU, {**GPU, "index": 1, "nvlink": "n/a: NVML: Not Supported"}],
        "gpu_connections": [{"gpus": [0, 1], "path": "one NUMA node", "nvlink": 6}],
    }
    rows = dict(environment_rows(env, UNMEASURED))
    assert rows["NUMA nodes"] == "0 (CPUs 0-3), 1 (CPUs 4-7)"
    assert rows["GPU 0"] == "NVIDIA H200, PCIe 1 × 16 of 5 × 16, 18 NVLinks, NUMA node 1"
    assert "no NVLink" in rows["GPU 1"]
    assert rows["GPUs 0 – 1"] == "one NUMA node, 6 direct NVLinks"


@pytest.mark.parametrize("odd", ["n/a: no nodes", None, [3], [{}], {"a": 1}])
def test_what_is_not_a_list_of_facts_causes_no_error(odd: Any) -> None:
    rows = dict(environment_rows({"numa": odd, "gpus": odd if odd != [{}] else [], "gpu_connections": []}, UNMEASURED))
    assert "NUMA nodes" not in rows

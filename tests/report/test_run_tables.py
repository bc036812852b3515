"""What ran, and the machine, in the report."""

from typing import Any

import pytest

from builders import clean_timings, rank_facts
from llm_perf_opt.core.engine_records import RuntimeFacts
from llm_perf_opt.core.records import Missing
from llm_perf_opt.report.run_tables import environment_rows, what_ran

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


@pytest.mark.parametrize(
    ("devices", "size", "said"),
    [
        (("cpu", "cpu"), 2, ", tensor parallel 2 (2 ranks share the CPU): "),
        (("cpu",), 2, ", tensor parallel 2 (2 ranks share the CPU): "),  # interrupted
        (("cuda:0", "cuda:1"), 2, ", tensor parallel 2 (2 GPUs): "),
        (("cuda:0", "cuda:0"), 0, ", tensor parallel 2 (2 ranks share one GPU): "),  # of an older version
        (("cuda:0", "cuda:1", "cuda:0", "cuda:1"), 4, ", tensor parallel 4 (4 ranks share 2 GPUs): "),
        (("cuda:0",), 4, ", tensor parallel 4 (4 ranks): "),
        (("cpu",), 0, ": "),  # interrupted, of an older version: the number is not known
        (("cuda:0",), 0, ": "),
    ],
)
def test_what_ran_has_the_ranks_and_their_devices(devices: tuple[str, ...], size: int, said: str) -> None:
    ranks = tuple(rank_facts(number, device, size=size) for number, device in enumerate(devices))
    timings = clean_timings(ranks=ranks)
    assert f"{timings.model.device_name}{said}" in what_ran(timings)


def test_what_ran_has_the_devices_of_an_engine() -> None:
    assert ", 2 devices: " in what_ran(clean_timings(runtime=RuntimeFacts("vllm", "0.32", "by step", devices=2)))
    assert "device" not in what_ran(clean_timings(runtime=RuntimeFacts("vllm", "0.32", "by step")))
    assert "tensor parallel" not in what_ran(clean_timings())


@pytest.mark.parametrize(("threads", "said"), [(1, "1 thread in each of 4 ranks"), (2, "2 threads in each of 4 ranks")])
def test_the_threads_of_each_rank_are_counted(threads: int, said: str) -> None:
    timings = clean_timings(ranks=(rank_facts(0, "cpu", size=4),), threads=threads)
    assert said in dict(environment_rows({}, timings))["Measured process"]


def test_one_rank_of_an_unknown_number_is_not_called_ranks() -> None:
    rows = dict(environment_rows({}, clean_timings(ranks=(rank_facts(0, "cpu", size=0),), threads=2)))
    assert "2 threads" in rows["Measured process"]
    assert "rank" not in rows["Measured process"]

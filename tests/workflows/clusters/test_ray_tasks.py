"""What is known about a Ray cluster before its tasks start. Tasks themselves: `test_real_ray.py`."""

from llm_perf_opt.config.schema import LauncherConfig
from llm_perf_opt.workflows.clusters.ray_tasks import too_large

NODES = [
    {"Alive": True, "Resources": {"CPU": 4.0, "GPU": 1.0, "memory": 8 * 2.0**30}},
    {"Alive": True, "Resources": {"CPU": 64.0, "memory": 64 * 2.0**30}},
    {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0, "memory": 64 * 2.0**30}},
]


def test_a_point_that_fits_on_a_node_is_not_worth_a_word() -> None:
    assert too_large(NODES, LauncherConfig("ray"), gpus=1) == ""
    assert too_large(NODES, LauncherConfig("ray", cpus=64, memory="32G"), gpus=0) == ""


def test_a_point_that_no_living_node_has_room_for_is_announced() -> None:
    assert "8 GPUs" in too_large(NODES, LauncherConfig("ray"), gpus=8)
    assert "32G" in too_large(NODES, LauncherConfig("ray", memory="32G"), gpus=1)  # one has the GPU, another the memory
    assert too_large([], LauncherConfig("ray"), gpus=0)

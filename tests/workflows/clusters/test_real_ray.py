"""A sweep on a real Ray cluster: four points, one interrupted and resumed."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster_points import environment, four_points, llm_perf, points_of, wait_for
from command import HANG_S
from llm_perf_opt.workflows.sweep_folder import SweepFolder

_CLUSTER = """
import sys
from ray.cluster_utils import Cluster

node = {"num_cpus": 2, "node_ip_address": "127.0.0.1", "include_dashboard": False, "object_store_memory": 80_000_000}
cluster = Cluster(initialize_head=True, head_node_args=node)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@contextmanager
def ray_cluster(python: Path, variables: dict[str, str], folder: Path) -> Iterator[str]:
    """The address of a cluster on this machine, which ends with the block."""
    argv, pipe = [str(python), "-c", _CLUSTER], subprocess.PIPE
    with (folder / "ray.log").open("wb") as log:
        started = subprocess.Popen(argv, env=variables, cwd=folder, stdin=pipe, stdout=pipe, stderr=log)
    assert started.stdout is not None
    try:
        address = started.stdout.readline().decode().strip()
        assert address, (folder / "ray.log").read_text()
        yield address
    finally:
        started.communicate(timeout=HANG_S)


def test_a_sweep_of_four_points_one_interrupted_and_resumed(ray_python: Path, tmp_path: Path) -> None:
    sweep, hold = tmp_path / "a sweep", tmp_path / "hold"
    hold.touch()
    # The second variable makes Ray use the loopback address, also on Linux.
    variables = {**environment(tmp_path), "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

    with ray_cluster(ray_python, variables, tmp_path) as address:

        def run(*words: str) -> "subprocess.Popen[str]":
            argv, pipe = [*llm_perf(ray_python), "run", "--json", *words], subprocess.PIPE
            return subprocess.Popen(argv, env=variables, cwd=tmp_path, text=True, stdout=pipe, stderr=pipe)

        words = [*four_points(hold), f"hydra.run.dir={sweep}", "launcher=ray", f"launcher.address={address}"]
        typed = [word for word in words if word.startswith(("profiling.passes.nap.hold=", "launcher.address="))]
        first = run("-m", *words)
        up = [sweep / "003" / "raw" / "nap" / "up", *(sweep / f"{number:03d}" / "report.html" for number in range(3))]
        wait_for(lambda: all(file.exists() for file in up) or first.poll() is not None, "point 3 alone runs")
        second = run("--resume", str(sweep), *typed)
        said = second.communicate(timeout=HANG_S)[1]
        assert second.returncode == 2, said
        assert "Another command runs the points" in said
        first.send_signal(signal.SIGTERM)
        out, said = first.communicate(timeout=HANG_S)
        assert first.returncode == 143, said
        assert "have ended" in said, said
        assert "llm-perf run --resume" in said
        states = [(point.status, point.folder) for point in SweepFolder(sweep).points()]
        assert states[:3] == [("complete", "000"), ("complete", "001"), ("complete", "002")]
        assert states[3][1] == "003"
        assert states[3][0] in ("partial", "failed")
        assert json.loads((sweep / "003" / "run.json").read_text())["why"] in ("Interrupted.", "Ended by SIGTERM.")

        hold.unlink()
        third = run("--resume", str(sweep), *typed)
        out, said = third.communicate(timeout=HANG_S)
        assert points_of(out) == [("complete", "000"), ("complete", "001"), ("complete", "002"), ("complete", "003-2")], said
        assert json.loads((sweep / "jobs" / "002.json").read_text())["points"] == [3]
    assert "4 complete" in (sweep / "sweep.md").read_text()

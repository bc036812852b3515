"""A sweep on a real Slurm: four points on two nodes, one cancelled and resumed."""

import json
import subprocess
from pathlib import Path

from cluster_points import environment, llm_perf, points_of, two_measured_points, wait_for
from command import HANG_S
from llm_perf_opt.workflows.sweep_folder import SweepFolder
from slurm_cluster import SlurmCluster


def test_a_sweep_of_four_points_one_cancelled_and_resumed(slurm_programs: None, tmp_path: Path) -> None:
    sweep, hold, place = tmp_path / "a sweep", tmp_path / "hold", tmp_path / "slurm"
    place.mkdir()
    hold.touch()
    with SlurmCluster(place, environment(tmp_path)) as cluster:

        def run(*words: str) -> "subprocess.Popen[str]":
            argv = [*llm_perf(), "run", "--json", *words]
            pipe = subprocess.PIPE
            return subprocess.Popen(argv, env=cluster.environment, cwd=tmp_path, text=True, stdout=pipe, stderr=pipe)

        words = [*two_measured_points(hold), f"hydra.run.dir={sweep}", "launcher=slurm", "launcher.time=10", "launcher.memory=1M"]
        typed = [word for word in words if word.startswith(("profiling.passes.nap.hold=", "launcher.address="))]
        first = run("-m", *words)
        wait_for(lambda: (sweep / "003" / "raw" / "nap" / "up").exists() or first.poll() is not None, "point 3 starts")
        (job,) = set(cluster.ask("squeue", "--noheader", "--format=%F").split())
        second = run("--resume", str(sweep), *typed, "launcher.wait=false")  # while jobs are queued and running
        said = second.communicate(timeout=HANG_S)[1]
        assert "not submitted again" in said
        cluster.ask("scancel", f"{job}_3")
        out, said = first.communicate(timeout=HANG_S)
        assert first.returncode == 4, said
        assert points_of(out) == [("complete", "000"), ("complete", "001"), ("complete", "002"), ("failed", "003")]
        assert "did not complete: 3." in said
        ended = json.loads((sweep / "003" / "run.json").read_text())
        assert ended["why"] == "Ended by SIGTERM."
        assert sorted(path.name for path in (sweep / "jobs").glob("*.json")) == ["001.json"]

        hold.unlink()
        third = run("--resume", str(sweep), *typed)
        out, said = third.communicate(timeout=HANG_S)
        assert points_of(out) == [("complete", "000"), ("complete", "001"), ("complete", "002"), ("complete", "003-2")], said
        assert json.loads((sweep / "jobs" / "002.json").read_text())["points"] == [3]

    runs = [json.loads((sweep / name / "env.json").read_text())["cluster"] for name in ("000", "001", "002", "003-2")]
    assert {one["node"] for one in runs} == {"n1", "n2"}
    assert [one["variables"].get("SLURM_ARRAY_TASK_ID") for one in runs] == ["0", "1", "2", None]
    assert (sweep / "sweep.html").is_file()
    assert "4 complete" in (sweep / "sweep.md").read_text()
    assert not SweepFolder(sweep).path.joinpath("003-3").exists()

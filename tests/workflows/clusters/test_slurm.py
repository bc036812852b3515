"""Sweeps on Slurm: what is submitted, what is found again, what an interrupt leaves. The cluster here is a list of jobs."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from builders import clean_timings, manifest
from llm_perf_opt.cli import run as verb
from llm_perf_opt.cli.signals import graceful_exit
from llm_perf_opt.config.schema import LauncherConfig
from llm_perf_opt.core.errors import ConfigError, Interrupted, LlmPerfError, ResourceError
from llm_perf_opt.core.processes import Answer, process_start
from llm_perf_opt.core.run_folder import RunFolder, read_record
from llm_perf_opt.workflows.clusters import slurm
from llm_perf_opt.workflows.clusters.job import become_point
from llm_perf_opt.workflows.clusters.submissions import Submission, Submissions
from llm_perf_opt.workflows.sweep import Planned, begin_sweep, plan_sweep
from llm_perf_opt.workflows.sweep_folder import SweepFolder
from writing import write_record

SLURM = LauncherConfig("slurm", partition="gpu", time="01:30:00", gpus=2, memory="32G", exclusive=True, extra={"account": "a"})


class RefusedError(Exception):
    """What submitit raises when sbatch fails."""


@dataclass
class Cluster:
    """A queue in which jobs end when the command waits, and points that then have a run."""

    folder: SweepFolder
    queue: list[tuple[str, int, int, int]] = field(default_factory=list)
    """Name, job, index, point."""
    given: list[dict[str, Any]] = field(default_factory=list)
    points: list[list[int]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    silent: bool = False
    during_submission: Callable[[], None] = lambda: None
    during_wait: Callable[[], None] = lambda: None

    def executor(self, place: Path) -> "Cluster":
        return self

    def update_parameters(self, **given: Any) -> None:
        self.given.append(given)

    def map_array(self, function: Any, sweeps: Sequence[str], points: Sequence[int]) -> list[Any]:
        assert function is become_point
        assert set(sweeps) == {str(self.folder.path)}
        self.points.append(list(points))
        job = 10 + len(self.points)
        self.queue += [(self.given[-1]["job_name"], job, index, point) for index, point in enumerate(points)]
        self.during_submission()
        return [type("Job", (), {"job_id": f"{job}_{index}"}) for index in range(len(points))]

    def answer(self, argv: Sequence[str], **_: Any) -> Answer:
        assert argv[0] == "squeue"
        if self.silent:
            return Answer(1, b"", "slurm_load_jobs error: Unable to contact slurm controller")
        names = argv[-1].removeprefix("--name=").split(",")
        rows = [f"{name}|{job}|{index}|RUNNING\n" for name, job, index, _ in self.queue if name in names]
        return Answer(0, "".join(rows).encode(), "")

    def end_jobs(self, _: float) -> None:
        self.during_wait()
        for *_rest, point in self.queue:
            complete(self.folder, point)
        self.queue.clear()

    def run(self, launcher: LauncherConfig = SLURM) -> LlmPerfError | None:
        numbers = range(len(self.folder.read().points))
        return slurm.run_on_slurm(self.folder, launcher, dict.fromkeys(numbers, launcher.gpus or 0), self.said.append)

    def records(self) -> list[Submission]:
        return Submissions(self.folder).read()


def complete(folder: SweepFolder, number: int) -> None:
    run = RunFolder.create(folder.point_folder(number))
    write_record(run.clean_file, clean_timings())
    run.write_manifest(manifest())


@pytest.fixture(scope="module")
def planned() -> Planned:
    return plan_sweep(["runtime.batch_size=1,2,4,8"], None)


@pytest.fixture
def cluster(planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster(begin_sweep(replace(planned, folder=tmp_path / "a sweep"), ["llm-perf", "run", "-m"], None))
    monkeypatch.setattr(slurm, "_submitit", lambda: (made.executor, (RefusedError,)))
    monkeypatch.setattr(slurm, "answer", made.answer)
    monkeypatch.setattr(time, "sleep", made.end_jobs)
    return made


def test_all_points_are_one_array_with_what_was_asked_for(cluster: Cluster) -> None:
    assert cluster.run() is None
    assert cluster.points == [[0, 1, 2, 3]]
    (given,) = cluster.given
    (record,) = cluster.records()
    assert (record.points, record.job, record.name) == ((0, 1, 2, 3), "11", given["job_name"])
    assert (given["partition"], given["time"], given["gpus_per_node"], given["cpus_per_task"]) == ("gpu", 90, 2, 1)
    assert given["additional_parameters"] == {"account": "a", "mem": "32G", "exclusive": True}
    assert given["signal_delay_s"] == 60
    assert cluster.run() is None
    assert cluster.points == [[0, 1, 2, 3]], "what is complete is not submitted"


def test_failed_and_missing_points_alone_are_queued_again(cluster: Cluster) -> None:
    complete(cluster.folder, 0)
    complete(cluster.folder, 3)
    RunFolder.create(cluster.folder.point_folder(1)).write_manifest(manifest(status="failed"))
    assert cluster.run(LauncherConfig("slurm", time="3")) is None
    assert cluster.points == [[1, 2]]
    assert cluster.given[0]["signal_delay_s"] == 0, "the warning of a short job would come at its start"
    assert [point.folder for point in cluster.folder.points()] == ["000", "001-2", "002", "003"]


def test_what_is_queued_is_waited_for_and_not_submitted_again(cluster: Cluster) -> None:
    assert cluster.run(LauncherConfig("slurm", wait=False)) is None
    assert "--resume" in cluster.said[-1]
    assert len(cluster.queue) == 4
    del cluster.queue[1]  # a point that ended without a run
    assert cluster.run(LauncherConfig("slurm")) is None
    assert cluster.points == [[0, 1, 2, 3], [1]]
    assert any("Points 0, 2, 3 are still queued or running (job 11)" in line for line in cluster.said)


def test_a_kill_between_the_submission_and_its_record_loses_no_job(cluster: Cluster) -> None:
    def killed() -> None:
        raise SystemExit

    cluster.during_submission = killed
    with pytest.raises(SystemExit):
        cluster.run()
    (record,) = cluster.records()
    assert record.job == ""
    cluster.during_submission = lambda: None
    assert cluster.run() is None
    assert cluster.points == [[0, 1, 2, 3]], "the jobs were found by their name"


def test_a_signal_during_the_submission_waits_for_its_record(cluster: Cluster) -> None:
    cluster.during_submission = lambda: os.kill(os.getpid(), signal.SIGTERM)
    with graceful_exit():
        error = cluster.run()
        assert isinstance(error, Interrupted)
    assert cluster.records()[0].job == "11"
    assert "Points 0, 1, 2, 3 are still queued or running" in error.fact
    assert "`scancel 11` cancels them" in error.remedy
    assert f"llm-perf run --resume '{cluster.folder.path}'" in error.remedy, "it can be pasted, blanks and all"


def test_an_interrupt_while_waiting_says_what_goes_on_and_how_to_cancel(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def answer(argv: Sequence[str], **more: Any) -> Answer:
        asked.append(argv[0])
        if len(asked) == 1:  # Ctrl-C while squeue runs
            raise Interrupted("Interrupted.", "Completed results are kept.")
        return cluster.answer(argv, **more)

    monkeypatch.setattr(slurm, "answer", answer)
    error = cluster.run()
    assert isinstance(error, Interrupted)
    assert error.fact == "Interrupted. Points 0, 1, 2, 3 are still queued or running in Slurm."
    assert "scancel 11" in error.remedy


def test_an_interrupt_when_the_queue_does_not_answer_is_not_silent(cluster: Cluster) -> None:
    def stop() -> None:
        cluster.silent = True
        raise KeyboardInterrupt

    cluster.during_wait = stop
    error = cluster.run()
    assert isinstance(error, Interrupted)
    assert "may still be queued or running" in error.fact
    assert "scancel 11" in error.remedy


def test_nothing_is_submitted_while_the_queue_is_unknown(cluster: Cluster) -> None:
    cluster.run(LauncherConfig("slurm", wait=False))
    cluster.silent = True
    with pytest.raises(ResourceError, match="Unable to contact slurm controller"):
        cluster.run()
    assert len(cluster.points) == 1


def test_refused_jobs_are_said_and_can_be_submitted_later(cluster: Cluster) -> None:
    def refuse() -> None:
        cluster.queue.clear()
        raise RefusedError("...\nsbatch: error: invalid partition specified: gpu\n")

    cluster.during_submission = refuse
    with pytest.raises(ResourceError, match="invalid partition specified: gpu"):
        cluster.run()
    cluster.during_submission = lambda: None
    assert cluster.run() is None
    assert len(cluster.points) == 2


def test_a_failed_submission_names_the_sweep_and_how_to_submit_it(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(Cluster):
        def map_array(self, *_: Any) -> list[Any]:
            raise RefusedError("sbatch: error: invalid partition specified: gpu\n")

    monkeypatch.setattr(slurm, "_submitit", lambda: (Refusing(cluster.folder).executor, (RefusedError,)))
    place = tmp_path / "new"
    with pytest.raises(ResourceError, match="invalid partition") as caught:
        verb.run(["launcher=slurm", "runtime.batch_size=1,2", f"hydra.run.dir={place}"], multirun=True, quiet=True)
    assert caught.value.remedy.endswith(f"`llm-perf run --resume {place}` continues the sweep.")
    assert str(place / "jobs") in caught.value.remedy


def test_an_error_after_the_submission_does_not_say_that_the_points_are_to_be_submitted(cluster: Cluster) -> None:
    def lost() -> None:
        raise ResourceError("squeue does not answer.", "Ask the administrator.")

    cluster.during_wait = lost
    with pytest.raises(ResourceError, match="squeue does not answer") as caught:
        verb.run(["launcher=slurm"], resume=cluster.folder.path, quiet=True)
    assert cluster.points == [[0, 1, 2, 3]], "all were submitted"
    again = f"llm-perf run --resume '{cluster.folder.path}'"
    assert caught.value.remedy == f"Ask the administrator. `{again}` continues the sweep."


@pytest.mark.parametrize(("launcher", "package"), [("slurm", "submitit"), ("ray", "ray")])
def test_a_cluster_without_its_package_leaves_no_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, package: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ResourceError, match=f"needs the package {package}"):
        verb.run([f"launcher={launcher}", "runtime.batch_size=1,2", f"hydra.run.dir={tmp_path / 'x'}"], multirun=True, quiet=True)
    assert not (tmp_path / "x").exists()


def test_two_commands_do_not_submit_the_same_points(cluster: Cluster) -> None:
    submissions = Submissions(cluster.folder)
    made, _ = submissions.add("slurm", [0], 0)
    with pytest.raises(ConfigError, match="Another command"):
        submissions.add("slurm", [0], 0)
    file = cluster.folder.jobs_folder / "001.json"
    other = os.getppid()
    write_record(file, {**json.loads(file.read_text()), "pid": other, "started": process_start(other)})
    with pytest.raises(ConfigError, match=f"Process {other} .* is submitting"):
        cluster.run()
    write_record(file, {**json.loads(file.read_text()), "started": 1.0})  # its pid belongs to another process now
    assert read_record(file, Submission).name == made.name
    assert cluster.run() is None
    assert cluster.points == [[0, 1, 2, 3]]
    assert sorted(path.name for path in cluster.folder.jobs_folder.iterdir()) == ["001.json", "002.json"]


def test_points_with_other_needs_are_another_array(cluster: Cluster) -> None:
    error = slurm.run_on_slurm(cluster.folder, LauncherConfig("slurm"), {0: 1, 1: 0, 2: 1, 3: 0}, cluster.said.append)
    assert error is None
    assert cluster.points == [[1, 3], [0, 2]]
    assert ["gpus_per_node" in given for given in cluster.given] == [False, True]


def test_points_that_left_no_run_are_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(_: float) -> None:
        complete(cluster.folder, 0)
        cluster.queue.clear()

    monkeypatch.setattr(time, "sleep", lose)
    error = cluster.run()
    assert error is not None
    assert "3 of 4 points of the sweep did not complete: 1, 2, 3." in error.fact
    assert str(cluster.folder.jobs_folder) in error.remedy

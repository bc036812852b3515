"""The points of a sweep, each in a process or on a machine of its own: the plan, `run --point`, states, writers at once."""

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import command
from builders import clean_timings, manifest
from llm_perf_opt.config.composition import Composed
from llm_perf_opt.core.errors import ConfigError, ImplausibleError, LlmPerfError
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.workflows.clusters.job import become_point
from llm_perf_opt.workflows.sweep import begin_sweep, plan_sweep, run_planned, run_sweep
from llm_perf_opt.workflows.sweep_folder import SweepFolder
from llm_perf_opt.workflows.sweep_plan import gpus_of_points, launcher_of, with_launcher
from writing import write_record


def swept(place: Path, *words: str) -> SweepFolder:
    planned = plan_sweep([f"hydra.run.dir={place}", *words], None)
    return begin_sweep(planned, ["llm-perf", "run", "-m"], None)


def measured(composed: Composed, _: str) -> tuple[RunFolder, LlmPerfError | None]:
    run = RunFolder.create(composed.run_dir)
    run.write_manifest(manifest(status="partial"))
    write_record(run.clean_file, clean_timings())
    run.write_manifest(manifest())
    return run, None


@pytest.mark.slow
def test_a_hundred_points_of_four_writers_all_survive(tmp_path: Path) -> None:
    folder = swept(tmp_path / "sweep", "runtime.batch_size=1,2")
    folder.write_plan(replace(folder.read(), points=folder.read().points[:1] * 100), folder.settings()[:1] * 100)
    plan = folder.sweep_file.read_bytes()
    processes = multiprocessing.get_context("fork")

    def write(first: int) -> None:
        for number in range(first, 100, 4):
            run_planned(SweepFolder(folder.path), number, measured)

    writers = [processes.Process(target=write, args=(first,)) for first in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(command.HANG_S)
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert [point.status for point in folder.points()] == ["complete"] * 100
    assert [point.folder for point in folder.points()] == [f"{number:03d}" for number in range(100)]
    assert folder.sweep_file.read_bytes() == plan, "the plan is written once"
    assert "status" not in json.loads(plan)["points"][0]


def test_a_point_runs_as_planned_in_its_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "project"
    (project / "conf" / "runtime").mkdir(parents=True)
    mine = project / "conf" / "runtime" / "mine.yaml"
    mine.write_text("num_new_tokens: 7\n")
    monkeypatch.chdir(project)
    folder = swept(project / "sweep", "runtime=mine", "runtime.batch_size=1,2")
    mine.write_text("num_new_tokens: 9\n")
    monkeypatch.chdir(tmp_path)
    seen: list[Any] = []

    def run_one(composed: Composed, words: str) -> tuple[RunFolder, LlmPerfError | None]:
        seen.append((composed.config.runtime.num_new_tokens, composed.config.runtime.batch_size, Path.cwd(), words))
        return measured(composed, words)

    assert run_planned(folder, 1, run_one) is None
    assert seen == [(7, 2, project, "run 2 of 2: runtime.batch_size=2")]
    assert [point.status for point in folder.points()] == ["pending", "complete"]
    assert run_planned(folder, 1, run_one) is None
    assert len(seen) == 1, "what is complete is not run again"
    with pytest.raises(ConfigError, match="no point 2"):
        run_planned(folder, 2, run_one)


def test_a_sweep_of_someone_else_chooses_no_folder_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, other = tmp_path / "project", tmp_path / "other"
    project.mkdir()
    other.mkdir()
    monkeypatch.chdir(project)
    folder = swept(tmp_path / "sweep", "runtime.batch_size=1,2")
    monkeypatch.chdir(other)
    places: list[Path] = []

    def run_one(composed: Composed, words: str) -> tuple[RunFolder, LlmPerfError | None]:
        places.append(Path.cwd())
        return measured(composed, words)

    with pytest.raises(ConfigError, match="neither contains it nor is the current folder") as caught:
        run_sweep(folder, run_one)
    assert f"cd {project}" in caught.value.remedy
    refused = run_planned(folder, 0, run_one)
    assert refused is not None
    assert "neither contains it" in refused.fact
    assert places == []
    monkeypatch.chdir(project)
    assert run_sweep(folder, run_one) is None
    assert places == [project, project]


def test_a_node_without_the_project_runs_nothing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    folder = swept(tmp_path / "sweep", "runtime.batch_size=1,2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project").rename(tmp_path / "elsewhere")
    error = run_planned(folder, 0, measured)
    assert error is not None
    assert str(tmp_path / "project") in error.fact
    first = folder.points()[0]
    assert (first.status, first.folder) == ("failed", "000")
    assert str(tmp_path / "project") in first.why


def test_what_needs_the_device_is_checked_on_the_node(tmp_path: Path) -> None:
    with pytest.raises(LlmPerfError):
        plan_sweep(["hardware=single_gpu", "runtime.batch_size=1,2"], None)
    folder = swept(tmp_path / "sweep", "launcher=slurm", "hardware=single_gpu", "runtime.batch_size=1,2")
    assert gpus_of_points(folder, launcher_of(folder)) == {0: 1, 1: 1}
    done = command.llm_perf("run", "--point", folder.path, 1, "--quiet")
    assert done.returncode == 3
    assert [(point.status, point.folder) for point in folder.points()] == [("pending", ""), ("failed", "001")]
    assert "CUDA" in folder.points()[1].why
    with pytest.raises(ConfigError, match="positions"):
        plan_sweep(["launcher=slurm", "runtime.prompt_tokens=10,99999999"], None)


def test_an_impossible_figure_makes_a_point_partial(tmp_path: Path) -> None:
    folder = swept(tmp_path / "sweep", "runtime.batch_size=1,2")
    fault = ImplausibleError("It is above 100 %.", "Check the peak.")
    assert run_planned(folder, 0, lambda composed, words: (measured(composed, words)[0], fault)) is fault
    assert [(point.status, point.why) for point in folder.points()] == [
        ("partial", "It is above 100 %. Check the peak."), ("pending", ""),
    ]  # fmt: skip


def test_the_last_complete_run_of_a_point_counts(tmp_path: Path) -> None:
    folder = swept(tmp_path / "sweep", "runtime.batch_size=1,2")
    states = {"000": "failed", "000-2": "complete", "000-10": "partial", "001": "failed", "001-2": "partial"}
    for name, status in states.items():
        RunFolder.create(folder.path / name).write_manifest(manifest(status=status))
    (folder.path / "000-11").symlink_to(tmp_path)
    assert [(point.folder, point.status) for point in folder.points()] == [("000-2", "complete"), ("001-2", "partial")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["runtime.batch_size=2"], "does not take runtime.batch_size=2"),
        (["-m"], "does not take --multirun"),
        (["--resume", "x"], "does not take --resume"),
        (["--dry-run"], "does not take --dry-run"),
    ],
)
def test_a_point_takes_no_other_settings(tmp_path: Path, words: list[str], said: str) -> None:
    done = command.llm_perf("run", "--point", tmp_path, 0, *words)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_single_run_is_not_launched(tmp_path: Path) -> None:
    done = command.llm_perf("run", "launcher=slurm", cwd=tmp_path)
    assert done.returncode == 2
    assert "Add -m" in done.stderr
    assert not any(tmp_path.iterdir())


def test_resuming_takes_settings_of_the_launcher_alone(tmp_path: Path) -> None:
    folder = swept(tmp_path / "sweep", "launcher=slurm", "launcher.partition=a", "runtime.batch_size=1,2")
    changed = with_launcher(folder, launcher_of(folder), ["launcher.wait=false", "launcher.time=01:30:00"])
    assert (changed.type, changed.partition, changed.wait, changed.time) == ("slurm", "a", False, "01:30:00")
    assert with_launcher(folder, launcher_of(folder), ["launcher=ray"]).type == "ray"
    with pytest.raises(ConfigError, match="does not take runtime"):
        with_launcher(folder, launcher_of(folder), ["runtime.batch_size=3"])


def test_one_launcher_runs_all_points() -> None:
    with pytest.raises(ConfigError, match="launcher differs"):
        plan_sweep(["launcher=slurm,local"], None)


def test_nothing_outside_its_folder_is_written_by_a_point(tmp_path: Path) -> None:
    folder = swept(tmp_path / "sweep", "runtime.batch_size=1,2")
    before = {path: path.stat().st_mtime_ns for path in folder.path.iterdir()}
    run_planned(folder, 1, measured)
    after = {path: path.stat().st_mtime_ns for path in folder.path.iterdir()}
    assert {path.name for path in after.keys() - before.keys()} == {"001"}
    assert all(after[path] == moment for path, moment in before.items())


def test_a_plan_is_written_without_running_anything(tmp_path: Path) -> None:
    words = ["hardware=single_gpu", "runtime.batch_size=1,2", f"hydra.run.dir={tmp_path / 'a sweep'}"]
    done = command.llm_perf("run", "-m", "--plan", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = SweepFolder.open(tmp_path / "a sweep")
    assert [point.status for point in folder.points()] == ["pending", "pending"]
    assert folder.read().project == str(tmp_path)
    assert f"llm-perf run --point '{folder.path}' N" in done.stdout
    assert command.llm_perf("run", "--plan", "runtime.batch_size=1", cwd=tmp_path).returncode == 2


@pytest.mark.slow
def test_a_job_of_submitit_becomes_the_point(tmp_path: Path) -> None:
    """With submitit's executor for this machine, which takes the same calls as the one for Slurm."""
    submitit = pytest.importorskip("submitit")
    folder = swept(tmp_path / "a sweep", "runtime.batch_size=1,2")
    assert run_planned(folder, 1, measured) is None
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    job = executor.submit(become_point, str(folder.path), 1)
    job.wait()
    assert f"Point 1 of {folder.path} is complete" in job.stderr()
    assert [point.folder for point in folder.points()] == ["", "001"]

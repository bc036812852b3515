"""The wheel works from an empty folder; every task of the project file still runs."""

import importlib.resources
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tomli

from command import HANG_S

ROOT = Path(__file__).parent.parent
PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text())
TASKS: dict[str, str] = PROJECT["tool"]["pixi"]["tasks"]


@pytest.mark.slow
def test_wheel_runs_from_an_empty_folder(tmp_path: Path) -> None:
    built = tmp_path / "built"
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(built), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=HANG_S)
    (wheel,) = built.glob("*.whl")
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=HANG_S)
    assert (site / "llm_perf_opt" / "py.typed").is_file()
    environment = {**os.environ, "PYTHONPATH": str(site)}
    where = [sys.executable, "-c", "import llm_perf_opt; print(llm_perf_opt.__file__)"]
    found = subprocess.run(where, cwd=empty, env=environment, capture_output=True, text=True, check=True).stdout
    assert found.startswith(str(site)), "the test must not run the checkout's own code"
    words = [
        "run",
        "--json",
        "--quiet",
        "dataset=sample_prompts",
        "profiling=none",
        "runtime.num_new_tokens=3",
        "runtime.max_repeats=6",
    ]
    words.append("runtime.min_repeats=6")
    argv = [sys.executable, "-m", "llm_perf_opt", *words]
    done = subprocess.run(argv, cwd=empty, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    run = Path(json.loads(done.stdout)["run"])
    assert run.is_relative_to(empty / "runs" / "baseline" / "tiny")
    assert (run / "report.md").exists()
    script = (site / "bin" / "llm-perf").read_text()
    assert "llm_perf_opt.cli.__main__" in script


def test_type_checkers_read_the_annotations() -> None:
    assert importlib.resources.files("llm_perf_opt").joinpath("py.typed").is_file()


def test_tasks_are_the_ones_people_know() -> None:
    expected = {"profile", "nsys", "ncu", "stage2-profile", "test", "externals:init", "externals:update", "externals:snapshot"}
    assert expected <= set(TASKS)
    assert PROJECT["tool"]["pixi"]["workspace"]["channels"] == ["conda-forge"]


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(TASKS))
def test_task_still_runs(task: str, tmp_path: Path) -> None:
    """Each command of each task, asked for its help or a dry run."""
    for command in TASKS[task].split("&&"):
        words = shlex.split(command)
        if words[0] == "python":
            words[0] = sys.executable
        elif words[0] in ("ruff", "mypy"):
            words = [sys.executable, "-m", *words]
        if "run" in words or words[-1].endswith("deep_profile_runner"):
            words.append("--dry-run")
        else:
            words.append("--help")
        words = [str(ROOT / word) if word.startswith("scripts/") else word for word in words]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S, check=False)
        assert done.returncode == 0, done.stderr
        if "--dry-run" in words:
            assert "# passes:" in done.stdout


def test_dependencies_are_pinned_where_a_newer_one_breaks() -> None:
    wanted = " ".join(PROJECT["project"]["dependencies"])
    assert "nvtx>=0.2.10,<0.2.12" in wanted
    assert "omegaconf>=2.3,<2.4" in wanted
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text()


def test_version_is_said_once() -> None:
    import llm_perf_opt

    assert PROJECT["project"]["version"] == llm_perf_opt.__version__

"""What is recorded about the machine, and what must not be."""

import json
import os
import sys
from pathlib import Path

import pytest

from command import llm_perf
from git_repositories import PLACES, Marker, git, new_repository, plant
from llm_perf_opt.core.compiler import INSTALL, Compiler
from llm_perf_opt.core.git import GitError
from llm_perf_opt.profiling import provenance
from llm_perf_opt.profiling.provenance import environment


def test_secrets_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_API_KEY", "hush")
    monkeypatch.setenv("VLLM_AUTH_TOKEN", "hush")
    monkeypatch.setenv("TORCH_LOGS", "dynamo")
    variables = environment(0)["variables"]
    assert variables["TORCH_LOGS"] == "dynamo"
    assert "hush" not in str(variables)


def test_the_place_in_a_cluster_is_recorded_without_its_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"SLURMD_NODENAME": "n7", "SLURM_JOB_ID": "12", "RANK": "3", "CUDA_VISIBLE_DEVICES": "1"}
    for name, value in {**given, "SLURM_JWT": "hush", "RANKED": "no"}.items():
        monkeypatch.setenv(name, value)
    found = environment(0)["cluster"]
    assert found["node"] == "n7"
    assert given.items() <= found["variables"].items()
    assert not {"SLURM_JWT", "RANKED"} & found["variables"].keys()


def test_facts_are_there_or_say_why() -> None:
    found = environment(0)
    assert found["cpu"]["usable"] >= 1
    assert {"sockets", "cores", "threads_per_core", "caches"} <= found["cpu"].keys()
    assert isinstance(found["numa"], list) or found["numa"].startswith("n/a: ")
    assert found["memory"]["total_bytes"] > 0
    assert found["packages"]["torch"]
    assert isinstance(found["gpu"], dict) or found["gpu"].startswith("n/a: ")
    assert isinstance(found["compiler"], str) or set(found["compiler"]) == {"path", "version"}


@pytest.mark.parametrize("problem", ["there is no g++ on the PATH", "the Python headers are not in include"])
def test_a_compiler_that_cannot_be_used_has_a_reason_and_a_remedy(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "find_compiler", lambda: Compiler("g++", "g++ 14"))
    monkeypatch.setattr(provenance, "compiler_problem", lambda: "")
    assert environment(0)["compiler"] == {"path": "g++", "version": "g++ 14"}
    monkeypatch.setattr(provenance, "compiler_problem", lambda: problem)
    assert environment(0)["compiler"] == f"n/a: {problem}. {INSTALL}"


def test_a_commit_is_ours_only_where_the_file_is_tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new_repository(tmp_path / "around")
    (folder / "own.py").write_text("")
    monkeypatch.setattr(provenance, "__file__", str(folder / "own.py"))
    monkeypatch.chdir(folder)
    assert environment(0)["working_folder"] == {}, "no commit yet"
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "x")
    head = git(folder, "rev-parse", "HEAD")
    assert "commit" not in environment(0)["tool"]
    assert environment(0)["working_folder"] == {"commit": head, "dirty": True}
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "y")
    assert environment(0)["tool"]["commit"] == git(folder, "rev-parse", "HEAD")
    assert environment(0)["working_folder"]["dirty"] is False


@pytest.mark.parametrize("where", PLACES)
def test_what_the_repository_of_the_working_folder_names_does_not_run(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, marker = new_repository(tmp_path / "hostile"), Marker(tmp_path / "marker")
    (folder / "a.odd").write_text("a")
    (folder / "b.txt").write_text("b")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "x")
    head = git(folder, "rev-parse", "HEAD")
    plant(folder, marker, where)
    os.utime(folder / "b.txt", (1, 1))
    monkeypatch.chdir(folder)
    _ = marker.marks
    assert environment(0)["working_folder"] == {"commit": head, "dirty": False}
    (folder / "a.odd").write_text("b")
    found = environment(0)["working_folder"]
    assert found["commit"] == head
    assert "filter odd" in found["dirty"]
    assert found["dirty"].startswith("n/a: ")
    (folder / "b.txt").write_text("changed")
    assert environment(0)["working_folder"] == {"commit": head, "dirty": True}
    assert marker.marks == []


def test_a_whole_command_in_such_a_folder(tmp_path: Path) -> None:
    folder, marker = new_repository(tmp_path / "hostile"), Marker(tmp_path / "marker")
    (folder / "a.odd").write_text("a")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "x")
    plant(folder, marker)
    os.utime(folder / "a.odd", (1, 1))
    head = git(folder, "rev-parse", "HEAD")
    _ = marker.marks
    words = ("exec", "--passes", "program", "--out", str(tmp_path / "run"), "--", sys.executable, "-c", "print(1)")
    done = llm_perf(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/env.json").read_text())["working_folder"] == {"commit": head, "dirty": False}
    assert marker.marks == []


def test_a_repository_too_large_for_the_time_limit_has_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new_repository(tmp_path / "large")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "x")

    def late(*_: object, **__: object) -> None:
        raise GitError("git status took longer than 15 s and was stopped.", "Try again.", timed_out=True)

    monkeypatch.setattr(provenance, "changes", late)
    found = provenance.commit_of(folder)
    assert found == {"commit": git(folder, "rev-parse", "HEAD"), "dirty": "n/a: git status took longer than 15 s and was stopped"}

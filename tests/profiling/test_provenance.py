"""What is recorded about the machine, and what must not be."""

import pytest

from llm_perf_opt.core.compiler import INSTALL, Compiler
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


def test_a_commit_is_ours_only_where_the_file_is_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def untracked(argv: list[str], timeout_s: float = 0) -> str | None:
        asked.append(argv)
        return None if "ls-files" in argv else "0123"

    monkeypatch.setattr(provenance, "ask", untracked)
    assert "commit" not in environment(0)["tool"]
    assert environment(0)["working_folder"]["commit"] == "0123"
    assert any("ls-files" in argv for argv in asked)

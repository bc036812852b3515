"""Comparing runs under load."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from command import clean_end, llm_perf
from serving_loads import SIMULATED, write_serving_run

SLOWER = replace(SIMULATED, step_ns=SIMULATED.step_ns * 13 // 10)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs per side, alternating; new is slower."""
    place = tmp_path_factory.mktemp("compared")
    for number in range(3):
        write_serving_run(place / f"base{number}", [4.0, 8.0], count=80, seed=1 + 2 * number)
        write_serving_run(place / f"new{number}", [4.0, 16.0], count=80, seed=2 + 2 * number, server=SLOWER)
    return place


def sides(runs: Path, count: int = 3) -> list[str]:
    return [",".join(str(runs / f"{side}{number}") for number in range(count)) for side in ("base", "new")]


def test_the_same_load_is_compared(runs: Path) -> None:
    done = llm_perf("compare", *sides(runs), "--gate", "tpot=5%", "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert [load["asked"] for load in found["loads"]] == [4.0]
    assert (found["only_base"], found["only_new"]) == ([8.0], [16.0])
    rows = {row["key"]: row["effect"] for row in found["loads"][0]["rows"]}
    assert rows["tpot"]["verdict"] == "slower"
    assert rows["tpot"]["change"] == pytest.approx(0.27, abs=0.05)
    (gate,) = found["gates"]
    assert gate["outcome"] == "regression"


def test_a_gate_that_passes(runs: Path) -> None:
    done = llm_perf("compare", *sides(runs), "--gate", "tpot=60%")
    assert done.returncode == 0, done.stderr
    assert "new is slower" in done.stdout


def test_single_runs_cannot_tell(runs: Path) -> None:
    done = llm_perf("compare", *sides(runs, 1), "--gate", "tpot=5%")
    assert done.returncode == 2
    assert "cannot tell" in done.stdout
    decided = llm_perf("compare", *sides(runs, 1), "--gate", "tpot=5%", "--process-spread", "1")
    assert decided.returncode == 1


def test_what_cannot_be_compared(runs: Path, tmp_path: Path) -> None:
    other = write_serving_run(tmp_path / "other", [64.0], count=20)
    assert llm_perf("compare", runs / "base0", other.path).returncode == 2
    old = Path(__file__).parents[1] / "fixtures" / "old_run"
    old = next(path.parent for path in old.rglob("run.json"))
    for words in ([runs / "base0", old], [old, runs / "base0"]):
        done = llm_perf("compare", *words)
        assert done.returncode == 2
        assert "under load" in done.stderr
        assert clean_end(done)
    done = llm_perf("compare", *sides(runs), "--gate", "prefill.throughput=5%")
    assert done.returncode == 2
    assert clean_end(done)


def test_longer_answers_are_another_workload(runs: Path, tmp_path: Path) -> None:
    changed = write_serving_run(tmp_path / "run", [4.0], count=30)
    file = changed.raw("load_00") / "profile_export.jsonl"
    file.write_text(
        file.read_text().replace('"usage_completion_tokens": {"value": 16', '"usage_completion_tokens": {"value": 32')
    )
    done = llm_perf("compare", runs / "base0", changed.path)
    assert done.returncode == 2
    assert "output tokens" in done.stderr
    assert llm_perf("compare", runs / "base0", changed.path, "--allow", "workload").returncode == 0


@pytest.mark.slow
def test_pages_and_baselines(runs: Path, tmp_path: Path) -> None:
    for ending in ("html", "md", "json"):
        out = tmp_path / f"x.{ending}"
        assert llm_perf("compare", *sides(runs), "--out", out).returncode == 0
        assert out.stat().st_size > 500
    done = llm_perf("baseline", "set", "good", *[runs / f"base{number}" for number in range(3)], "--runs-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    done = llm_perf("compare", "good", sides(runs)[1], "--runs-dir", tmp_path, "--markdown")
    assert done.returncode == 0, done.stderr
    assert "# Comparison of runs under load" in done.stdout

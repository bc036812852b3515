"""A run folder written by an earlier version (commit d6b60a7) opens, with the same JSON keys and the same numbers."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command import llm_perf

OLD = Path(__file__).parents[1] / "fixtures" / "old_run"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy: reports are written into the folder."""
    return Path(shutil.copytree(OLD / "run", tmp_path / "run"))


@pytest.mark.parametrize("verb", ["report", "advise"])
def test_an_old_run_gives_the_same_numbers(run: Path, verb: str) -> None:
    done = llm_perf(verb, run, "--json")
    assert done.returncode == 0, done.stderr
    old, new = json.loads((OLD / f"{verb}.json").read_text()), json.loads(done.stdout)
    if verb == "advise":  # rules for the CPU are newer than the run
        known = {finding["id"] for finding in old["findings"]}
        new["findings"] = [finding for finding in new["findings"] if finding["id"] in known]
    assert list(lost(old, new)) == []


def test_the_pages_of_an_old_run_are_written_again(run: Path) -> None:
    pages = [run / name for name in ("report.md", "stakeholder_summary.md", "operators.md", "kernels.md", "findings.json")]
    for page in pages:
        page.unlink()
    assert llm_perf("report", run).returncode == 0
    assert [page.name for page in (*pages, run / "report.html") if not page.is_file()] == []


def test_the_tables_of_an_old_run_can_be_queried(run: Path) -> None:
    """Before and after its reports are written again, which adds tables under their present names."""
    sql = "select count(*) from steps"
    before = llm_perf("sql", run, sql, "--json")
    assert before.returncode == 0, before.stderr
    assert llm_perf("report", run).returncode == 0
    assert llm_perf("sql", run, sql, "--json").stdout == before.stdout


def test_an_old_run_is_listed_and_compared(run: Path, tmp_path: Path) -> None:
    listed = json.loads(llm_perf("runs", tmp_path, "--json").stdout)
    assert len(listed) == 1
    later = Path(shutil.copytree(run, tmp_path / "later"))
    file = later / "raw" / "clean" / "timings.json"
    timings = json.loads(file.read_text())
    older = {**timings, "model": {key: value for key, value in timings["model"].items() if key != "weights"}}
    (run / "raw" / "clean" / "timings.json").write_text(json.dumps(older))  # only its configuration says that they are random
    for iteration in timings["iterations"]:
        iteration["started_ns"] += 7  # another measurement: a copy of a run is refused
    file.write_text(json.dumps(timings))
    done = llm_perf("compare", run, later, "--json")
    assert done.returncode == 0, done.stderr
    assert "weights" not in " ".join(json.loads(done.stdout)["cautions"])
    changes = {row["key"]: row["effect"]["change"] for row in json.loads(done.stdout)["metrics"] if "change" in row["effect"]}
    assert {changes[key] for key in ("ttft", "tpot", "e2e")} == {0}


def lost(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """Yield the keys that are gone, and the numbers that differ. Sentences may change."""
    if isinstance(old, dict):
        for key, value in old.items():
            yield from lost(value, new[key], f"{where}.{key}") if key in new else [f"{where}.{key} is gone"]
    elif isinstance(old, list):
        if len(old) != len(new):
            yield f"{where} has {len(new)} entries, not {len(old)}"
        for number, (before, after) in enumerate(zip(old, new, strict=False)):
            yield from lost(before, after, f"{where}[{number}]")
    elif not isinstance(old, str) and old != new:
        yield f"{where} is {new}, not {old}"

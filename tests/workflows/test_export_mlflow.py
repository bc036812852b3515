"""Runs in MLflow: what is exported, and that a second export adds nothing. The last test uses the real MLflow."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from command import HANG_S, llm_perf
from fleets import Made, made_run
from llm_perf_opt.core.errors import ConfigError, ParseError
from llm_perf_opt.workflows.export_mlflow import read_exported

SOURCE = Path(__file__).parents[2] / "src"


def test_metrics_have_their_intervals_and_settings_are_parameters(tmp_path: Path) -> None:
    made_run(
        tmp_path / "run", Made(tpot_ms=10, devices=4, weights="real", settings={"  compile: none\n": "  compile: default\n"})
    )
    found = read_exported(tmp_path / "run")
    assert found.metrics["tpot_ms"] == pytest.approx(10, rel=0.01)
    assert found.metrics["tpot_ms_ci95_low"] < found.metrics["tpot_ms"] < found.metrics["tpot_ms_ci95_high"]
    assert found.metrics["tpot_repeats"] == 10
    assert found.metrics["decode_rate_tokens_per_s"] == pytest.approx(100, rel=0.01)
    assert found.parameters["runtime.compile"] == "default"
    expected = {
        "status": "complete", "model": "tiny", "hardware": "NVIDIA H200", "devices": "4", "weights": "real", "commit": "a" * 40,
        "uncommitted_changes": "no",
    }  # fmt: skip
    assert expected.items() <= found.tags.items()
    assert (found.status, found.ended_ms - found.started_ms) == ("FINISHED", 1000)


def test_too_few_repeats_have_a_range_and_no_interval(tmp_path: Path) -> None:
    made_run(tmp_path / "run", Made(noise=(0, 0.1)))
    found = read_exported(tmp_path / "run").metrics
    assert (found["tpot_ms_min"], found["tpot_ms_max"]) == (10, 11)
    assert not any("ci95" in name for name in found if name.startswith("tpot"))


def test_a_run_is_recognized_after_it_was_moved(tmp_path: Path) -> None:
    made_run(tmp_path / "a")
    made_run(tmp_path / "b", Made(minute=1))
    first = read_exported(tmp_path / "a").identity
    (tmp_path / "a").rename(tmp_path / "moved")
    assert read_exported(tmp_path / "moved").identity == first != read_exported(tmp_path / "b").identity


def test_an_impossible_figure_is_not_exported(tmp_path: Path) -> None:
    made_run(tmp_path / "run", Made(tpot_ms=1e-6))
    found = read_exported(tmp_path / "run")
    assert found.metrics == {}
    assert found.tags["not_ranked"].startswith("impossible figure")


def test_damaged_and_other_runs_are_refused_and_links_left_out(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run")
    folder.page_file.symlink_to("run.json")
    assert [file.name for file in read_exported(folder.path).files] == ["run.json"]
    folder.write_manifest(replace(folder.manifest(), kind="serving"))
    with pytest.raises(ConfigError, match="under load"):
        read_exported(folder.path)
    damaged = made_run(tmp_path / "damaged")
    damaged.clean_file.write_text("{}")
    with pytest.raises(ParseError):
        read_exported(damaged.path)


def test_a_partial_run_says_so(tmp_path: Path) -> None:
    made_run(tmp_path / "run", Made(status="partial", why="nsys failed", commit=""))
    found = read_exported(tmp_path / "run")
    assert (found.status, found.tags["status"], found.tags["status.why"]) == ("FAILED", "partial", "nsys failed")
    assert "commit" not in found.tags


def test_without_mlflow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "mlflow.exceptions", None)
    done = llm_perf("export", "mlflow", tmp_path / "run", cwd=tmp_path)
    assert done.returncode == 3
    assert "llm-perf-opt[mlflow]" in done.stderr
    assert not (tmp_path / "mlflow.db").exists()


IN_MLFLOW = """
import contextlib, io, json, sys
from llm_perf_opt.cli.app import main
said = []
for words in (["runs/a", "runs/b"], ["runs/moved", "runs/b"], ["runs/b", "--replace"]):
    if words[0] == "runs/moved":
        __import__("os").rename("runs/a", "runs/moved")
    sys.argv = ["llm-perf", "export", "mlflow", *words, "--json"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main()
        except SystemExit as end:
            assert not end.code, end.code
    said.append([row["done"] for row in json.loads(out.getvalue())])
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri="sqlite:///mlflow.db")
place = client.get_experiment_by_name("llm-perf").experiment_id
runs = client.search_runs([place], order_by=["start_time"])
found = [
    {"metrics": run.data.metrics, "params": run.data.params, "tags": run.data.tags, "status": run.info.status,
     "files": sorted(file.path for file in client.list_artifacts(run.info.run_id))}
    for run in runs
]
slow = client.search_runs([place], filter_string="metrics.tpot_ms > 15 and tags.weights = 'random'")
print(json.dumps({"said": said, "runs": found, "slow": len(slow)}))
"""


def test_the_real_mlflow_has_every_run_once(mlflow_python: Path, tmp_path: Path) -> None:
    made_run(tmp_path / "runs" / "a", Made(tpot_ms=10)).page_file.write_text("<p>a report</p>")
    made_run(tmp_path / "runs" / "b", Made(tpot_ms=20, minute=5))
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [mlflow_python, "-c", IN_MLFLOW],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["said"] == [["exported", "exported"], ["already exported"] * 2, ["replaced"]]
    assert len(found["runs"]) == 2
    first = found["runs"][0]
    assert first["metrics"]["tpot_ms"] == pytest.approx(10, rel=0.01)
    assert first["metrics"]["tpot_ms_ci95_low"] < first["metrics"]["tpot_ms_ci95_high"]
    assert first["params"]["runtime.type"] == "pytorch"
    assert (first["tags"]["weights"], first["tags"]["commit"], first["status"]) == ("random", "a" * 40, "FINISHED")
    assert first["files"] == ["report.html", "run.json"]
    assert found["slow"] == 1
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "mlflow.db", "mlartifacts"}

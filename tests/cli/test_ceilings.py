"""`llm-perf ceilings` as a user types it."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

import command

BUDGET = ("--budget-s", "0.05")


def llm_perf(*words: str, cache: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    return command.llm_perf(*words, env={"XDG_CACHE_HOME": str(cache), "TMPDIR": str(cache / "tmp"), **variables})


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    (tmp_path / "tmp").mkdir()
    return tmp_path


@pytest.mark.slow
def test_measure_then_find_again(cache: Path) -> None:
    first = llm_perf("ceilings", "--device", "cpu", *BUDGET, cache=cache)
    assert first.returncode == 0, first.stderr
    assert "measured now" in first.stdout
    for label in ("GEMM fp32", "read bandwidth", "copy bandwidth", "GEMV bandwidth", "host time per operator"):
        assert label in first.stdout
    for group in ("Matrix products", "Bandwidth", "Number of threads", "Calls and launches"):
        assert group in first.stdout
    assert "the run is on the CPU" not in first.stdout  # what only a GPU has is left out
    assert "ceilings: measuring" in first.stderr
    assert list((cache / "tmp").iterdir()) == []  # neither log nor result is left behind

    second = llm_perf("ceilings", "--device", "cpu", *BUDGET, "--json", cache=cache)
    assert second.returncode == 0, second.stderr
    shown = json.loads(second.stdout)
    assert set(shown) == {"cached", "age_s", "cache_file", "notes", "ceilings"}
    assert shown["cached"] or "Not cached" in first.stdout  # another process may have been busy
    assert 0 <= shown["age_s"] < 120
    rows = {row["key"]: row for row in shown["ceilings"]["rows"]}
    assert set(rows["gemm_fp32"]) == {
        "key", "label", "unit", "value", "how", "conditions", "instructions", "native", "work", "gpus",
    }  # fmt: skip
    assert rows["gemm_fp32"]["value"]["median"] > 0
    assert rows["sync"]["value"] == {"why": "the run is on the CPU"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_a_gpu_that_is_not_there_is_refused(cache: Path) -> None:
    done = llm_perf("ceilings", "--device", "cuda", cache=cache)
    assert done.returncode == 3
    assert done.stdout == ""
    assert "error: --device cuda, but " in done.stderr
    assert "→ Use --device cpu, or see `llm-perf doctor`." in done.stderr
    assert "Traceback" not in done.stderr
    assert list((cache / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--device", "cudda"), "--device cudda is not known. Did you mean 'cuda'?"),
        (("--device-index", "-1"), "--device-index"),
        (("--budget-s", "0"), "--budget-s"),
        (("--threads", "0"), "--threads"),
    ],
)
def test_a_wrong_request_is_refused_at_once(cache: Path, words: tuple[str, ...], said: str) -> None:
    done = llm_perf("ceilings", *words, cache=cache)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""


def test_a_crash_of_the_measuring_process_leaves_its_log(cache: Path) -> None:
    (cache / "torch.py").write_text("raise ValueError('broken installation')\n")
    path = os.pathsep.join([str(cache), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = llm_perf("ceilings", "--device", "cpu", cache=cache, PYTHONPATH=path)
    assert done.returncode == 4
    assert "error: ValueError: broken installation" in done.stderr
    log = next((cache / "tmp").glob("llm-perf-ceilings-*.log"))
    assert str(log) in done.stderr
    assert "Traceback" in log.read_text()

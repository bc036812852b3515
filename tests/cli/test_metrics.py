"""`llm-perf metrics` as typed by a user."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from command import llm_perf
from llm_perf_opt.counters.catalog import chips
from llm_perf_opt.counters.manifest import resolve
from llm_perf_opt.counters.set_file import shipped_sets

GOOD = "sm__throughput.avg.pct_of_peak_sustained_elapsed"


def metrics(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return llm_perf("metrics", *words, env=environment)


def metrics_json(*words: str, code: int = 0) -> Any:
    done = metrics(*words, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def test_list() -> None:
    found = metrics_json("list")
    assert [one["name"] for one in found["sets"]] == list(shipped_sets())
    assert [one["chip"] for one in found["chips"]] == list(chips())
    text = metrics("list").stdout
    assert all(name in text for name in (*shipped_sets(), *chips()))


def test_show_is_what_resolves() -> None:
    found = metrics_json("show", "roofline", "--chip", "gb202", "--add", "lts__t_sectors.sum", "--remove", "lts__t_bytes.sum")
    expected = resolve(["roofline"], add=["lts__t_sectors.sum"], remove=["lts__t_bytes.sum"], chip="gb202")
    assert [one["name"] for one in found["metrics"]] == list(expected.names)
    assert found["chip"] == "gb202"


def test_show_says_what_a_chip_lacks() -> None:
    text = metrics("show", "nvlink", "--chip", "ad102").stdout
    assert "Not on ad102:" in text
    assert "nvlrx__bytes.sum (nvlink)" in text


def test_check_accepts_translates_and_refuses() -> None:
    found = metrics_json("check", GOOD, "flop_count_hp", "sm__thruput.sum", "--chip", "gh100", code=2)
    good, old, bad = found["names"]
    assert (good["status"], old["status"], bad["status"]) == ("ok", "old", "unknown")
    assert {"name": "sm__ops_path_tensor_src_bf16_dst_fp32.sum", "factor": 1} in old["use"]
    assert GOOD in bad["near"]
    assert metrics("check", GOOD, "flop_count_hp", "--chip", "gh100").returncode == 0


def test_check_in_words() -> None:
    done = metrics("check", "flop_count_sp", "sm__throughput", "--chip", "ga100")
    assert done.returncode == 2
    assert "→ 2 × smsp__sass_thread_inst_executed_op_ffma_pred_on.sum" in done.stdout
    assert "a throughput needs a suffix" in done.stdout


def test_without_a_chip_it_is_said_which_one_is_meant() -> None:
    done = metrics("check", GOOD, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0
    assert "chip gh100:" in done.stderr
    assert "--chip" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("show", "rooflin", "--chip", "gh100"), "Did you mean 'roofline'"),
        (("show", "base", "--chip", "gh101"), "gh101"),
        (("check", GOOD, "--chip", "GH100"), "Known chips: ga100"),
        (("show", "base", "--chip", "gh100", "--add", "nonsense"), "'nonsense' cannot be collected"),
        (("show", "base", "--chip", "gh100", "--remove", "lts__t_bytes.sum"), "cannot be removed"),
        (("show",), "SET"),
        (("check",), "NAME"),
    ],
)
def test_a_wrong_request_ends_with_code_2(words: tuple[str, ...], said: str) -> None:
    done = metrics(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_the_installed_tool_is_asked(real_ncu: Path) -> None:
    done = metrics("check", GOOD, "--chip", "gh100", "--installed", NCU=str(real_ncu))
    assert done.returncode == 0, done.stderr
    assert metrics("show", "roofline", "--chip", "gh100", "--installed", NCU=str(real_ncu)).returncode == 0


def test_a_tool_that_lists_nothing_is_not_believed(tmp_path: Path) -> None:
    ncu = tmp_path / "ncu"
    ncu.write_text("#!/bin/sh\necho '==ERROR== Unknown chip'\n")
    ncu.chmod(0o755)
    done = metrics("check", GOOD, "--chip", "gb100", "--installed", NCU=str(ncu))
    assert done.returncode == 3
    assert "listed no counters" in done.stderr


def test_your_own_sets_are_listed_and_shown(tmp_path: Path) -> None:
    (tmp_path / "mine/metrics").mkdir(parents=True)
    (tmp_path / "mine/metrics/traffic.yaml").write_text("description: Traffic.\nncu: [lts__t_bytes.sum]\n")
    (tmp_path / "mine/metrics/ch09.yaml").write_text("ncu: [lts__t_bytes.sum]\n")
    listed = llm_perf("metrics", "list", "--config-dir", "mine", cwd=tmp_path).stdout
    assert "traffic" in listed
    assert "Traffic." in listed
    shown = llm_perf("metrics", "show", "traffic", "ch9", "--chip", "gh100", "--config-dir", "mine", "--json", cwd=tmp_path)
    found = json.loads(shown.stdout)
    assert found["sets"] == ["base", "traffic", "ch09"]
    assert [origin.split(" is ")[0] for origin in found["origins"]] == ["The metric set traffic", "The metric set ch09"]
    assert all("mine/metrics/" in origin for origin in found["origins"]), "ch9 is the own ch09"
    assert llm_perf("metrics", "show", "traffic", "--chip", "gh100", cwd=tmp_path).returncode == 2

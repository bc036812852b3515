"""The program that the counter self-test runs."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from command import HANG_S
from llm_perf_opt.analysis.kernels.counter_selftest import reported_work
from llm_perf_opt.profiling.vendor.launch import Callbacks, run_child
from llm_perf_opt.runners.measure import counter_selftest

ARGV = [sys.executable, "-m", "llm_perf_opt.runners.measure.counter_selftest"]


def test_the_work_is_of_sizes_that_common_tiles_divide() -> None:
    work = counter_selftest.WORK
    assert all(size % 128 == 0 for gemm in work.gemms for size in (gemm.m, gemm.n, gemm.k))
    assert any(len({gemm.m, gemm.n, gemm.k}) == 3 for gemm in work.gemms)
    assert len({gemm.range for gemm in work.gemms} | {work.copy.range}) == len(work.gemms) + 1
    assert work.copy.size_bytes >= 4 * 256 << 20
    assert counter_selftest.SELFTEST_RANGE == "LLM@selftest/"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    said: list[dict[str, Any]] = []
    finished = run_child(ARGV, log=tmp_path / "log.txt", timeout_s=HANG_S, callbacks=Callbacks(on_message=said.append))
    assert finished.exit_code == 3
    assert "The counter self-test needs a GPU" in said[-1]["fact"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_it_runs_what_it_says(tmp_path: Path) -> None:
    said: list[dict[str, Any]] = []
    finished = run_child(ARGV, log=tmp_path / "log.txt", timeout_s=HANG_S, callbacks=Callbacks(on_message=said.append))
    assert finished.exit_code == 0
    assert reported_work(said[-1]) == counter_selftest.WORK

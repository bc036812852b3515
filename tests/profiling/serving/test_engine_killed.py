"""`llm-perf serve` with a real server (vLLM on the CPU) and a real generator (AIPerf), killed under load."""

import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from command import HANG_S
from serve_command import environment, serve_argv

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_a_killed_command_leaves_nothing_running(vllm_python: Path, aiperf_python: Path, tmp_path: Path) -> None:
    loads = ("--no-profile", "--rates", "1", "--requests", "2000", "--point-s", "3000")
    argv = serve_argv(vllm_python, aiperf_python, tmp_path / "run", *loads)
    with (tmp_path / "log").open("w") as log:
        command = subprocess.Popen(argv, cwd=tmp_path, env=environment(), stdout=log, stderr=log)
    records = tmp_path / "run/raw/load_01/profile_export.jsonl"
    deadline = time.monotonic() + HANG_S
    try:
        while not (records.exists() and records.stat().st_size) and time.monotonic() < deadline:
            assert command.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.2)
        started = psutil.Process(command.pid).children(recursive=True)
    finally:
        command.send_signal(signal.SIGKILL)
        command.wait()
    assert len(started) > 2
    _, alive = psutil.wait_procs(started, timeout=HANG_S / 10)
    assert alive == []

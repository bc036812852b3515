"""`llm-perf serve`, killed: nothing that a real server (vLLM on the CPU) or a real generator (AIPerf) started keeps running."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from command import HANG_S
from llm_perf_opt.runners.plain_tokenizer import write_tokenizer
from serve_command import environment, running_server, serve_argv

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LOADS = ("--no-profile", "--rates", "2", "--requests", "500", "--warmup", "1", "--point-s", "3000")
SHORT = ("runtime.prompt_tokens=32", "runtime.num_new_tokens=8")


def killed(argv: list[str], folder: Path, ready: Callable[[list[psutil.Process]], bool]) -> list[psutil.Process]:
    """Kill the command when it is ready; return the processes below it."""
    with (folder / "log").open("w") as log:
        command = subprocess.Popen(argv, cwd=folder, env=environment(), stdout=log, stderr=log)
    started: list[psutil.Process] = []
    deadline = time.monotonic() + HANG_S
    try:
        while not ready(started) and time.monotonic() < deadline:
            assert command.poll() is None, (folder / "log").read_text()
            time.sleep(0.5)  # listing processes takes CPU time of its own
            started = psutil.Process(command.pid).children(recursive=True)
        assert ready(started), (folder / "log").read_text()
    finally:
        command.send_signal(signal.SIGKILL)
        command.wait()
    return started


def words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""


def test_a_killed_command_leaves_no_engine_running(vllm_python: Path, aiperf_python: Path, tmp_path: Path) -> None:
    """The engine's core is a process that the server has started. It is killed before it serves: what ends it is the same."""

    def core_started(processes: list[psutil.Process]) -> bool:
        return any("spawn_main" in words(process) for process in processes)

    started = killed(serve_argv(vllm_python, aiperf_python, tmp_path / "run", *LOADS), tmp_path, core_started)
    assert len(started) > 2
    _, alive = psutil.wait_procs(started, timeout=HANG_S / 10)
    assert alive == []


def test_a_killed_command_leaves_no_generator_running(aiperf_python: Path, tmp_path: Path) -> None:
    records = tmp_path / "run/raw/load_01/profile_export.jsonl"
    with running_server(write_tokenizer(tmp_path, 256)) as url:
        places = ("--url", url, "--generator-python", str(aiperf_python), "--out", str(tmp_path / "run"))
        argv = [sys.executable, "-m", "llm_perf_opt", "serve", *SHORT, *places, *LOADS]
        started = killed(argv, tmp_path, lambda _: records.exists() and records.stat().st_size > 0)
        assert len(started) > 2
        _, alive = psutil.wait_procs(started, timeout=HANG_S / 10)
        assert alive == []

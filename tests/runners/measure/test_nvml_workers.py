"""Processes that the measured one has started belong to it, also before the sampler looks for children again."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from llm_perf_opt.runners.measure import nvml


@pytest.fixture
def other_process() -> Iterator[int]:
    """A process that is no child of the watched one."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield child.pid
    child.kill()
    child.communicate()


def test_a_worker_is_counted_as_soon_as_it_is_told(other_process: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    reader = nvml.HostReader()
    monkeypatch.setattr(sys, "stdin", os.fdopen(read_end))
    os.write(write_end, f"1\n+{other_process} +999999999\n".encode())
    assert nvml._wait(reader, due=0.0)
    assert other_process in reader.pids
    os.close(write_end)
    assert not nvml._wait(reader, due=0.0)

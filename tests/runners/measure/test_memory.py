"""Peak memory of the measured process and of processes that an engine starts."""

import os
import subprocess
import sys

import torch

from llm_perf_opt.core.records import Missing
from llm_perf_opt.runners.cpus import compute_threads
from llm_perf_opt.runners.measure.memory import memory_peaks
from llm_perf_opt.runners.measure.nvml import HostReader

MIB = 2**20
HOLDS = "import sys; held = bytearray(64 * 2**20); print('held', flush=True); sys.stdin.read()"


def holder() -> "subprocess.Popen[bytes]":
    """A child that holds 64 MiB until its input ends."""
    child = subprocess.Popen([sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"held\n"
    return child


def test_children_count_only_if_the_model_runs_there() -> None:
    with holder() as child:
        alone, together = (
            memory_peaks(torch.device("cpu"), elsewhere=elsewhere).process_rss_bytes for elsewhere in (False, True)
        )
        child.communicate()
    assert not isinstance(alone, Missing)
    assert not isinstance(together, Missing)
    assert together - alone >= 64 * MIB


def test_threads_of_this_process_are_torchs() -> None:
    assert compute_threads(elsewhere=False) == torch.get_num_threads()
    with holder() as child:
        assert compute_threads(elsewhere=True) >= 1
        child.communicate()


def test_the_sampler_watches_a_process_with_its_children() -> None:
    with holder() as child:
        reader = HostReader()
        reader.watch(os.getpid())
        assert {os.getpid(), child.pid} <= reader.pids
        assert reader.sample(0).rss_bytes >= 64 * MIB
        child.communicate()
    reader.sample(1)
    assert child.pid not in reader.pids
    reader.watch(child.pid)
    assert (reader.pids, reader.sample(2).rss_bytes) == (frozenset(), 0), "it has ended"

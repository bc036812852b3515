"""CPUs and threads of a process, in a real process of its own."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.runners.cpus import check_cpus, default_threads

PROGRAM = """
import json, os, sys, threading
from pathlib import Path
from llm_perf_opt.runners.cpus import prepare_threads, set_threads
earlier = threading.Event()
threading.Thread(target=earlier.wait, daemon=True).start()
cpus, threads = json.loads(sys.argv[1])
prepare_threads(cpus, threads)
set_threads(cpus, threads)
import torch
torch.ones(500, 500) @ torch.ones(500, 500)
pinned = [sorted(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()]
print(json.dumps({"pinned": pinned, "threads": torch.get_num_threads(), "omp": os.environ.get("OMP_NUM_THREADS")}))
"""

needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")


def applied(cpus: str | None, threads: int | None) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([cpus, threads])], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.slow
@needs_affinity
def test_every_thread_is_pinned_and_there_is_one_per_cpu() -> None:
    first = min(os.sched_getaffinity(0))
    found = applied(str(first), None)
    assert {tuple(cpus) for cpus in found["pinned"]} == {(first,)}
    assert len(found["pinned"]) > 1, "a thread that existed before is pinned, too"
    assert (found["threads"], found["omp"]) == (1, "1")


@pytest.mark.slow
@needs_affinity
def test_the_number_of_threads_can_be_given() -> None:
    first = min(os.sched_getaffinity(0))
    assert applied(str(first), 3)["threads"] == 3


@needs_affinity
def test_a_cpu_that_is_not_allowed_is_refused() -> None:
    gone = max(os.sched_getaffinity(0)) + 1
    with pytest.raises(ConfigError, match=f"CPU {gone}"):
        check_cpus(f"0,{gone}")


def test_a_system_without_affinity_refuses_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    with pytest.raises(ConfigError, match="affinity"):
        check_cpus("0")


def test_threads_follow_from_the_cpus_unless_they_are_given() -> None:
    assert default_threads("0-3,8", None) == 5
    assert default_threads("0-3", 2) == 2
    assert default_threads(None, None) is None

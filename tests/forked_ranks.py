"""Ranks as forks of a process that has imported torch and transformers: the imports are most of what a rank costs."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from typing import Any
from unittest.mock import patch

from llm_perf_opt.runners import rank_supervisor

_IMPORTED = (
    "torch", "torch.profiler", "torch.distributed.tensor", "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto", "transformers.distributed.tensor_parallel", "psutil", "pytest",
    "llm_perf_opt.runners.llm_profile_runner", "llm_perf_opt.runners.pytorch_runner", "llm_perf_opt.runners.vision_inputs",
    "llm_perf_opt.runners.measure.torch_profiler",
)  # fmt: skip


class ForkedRank:
    """A rank, with what `subprocess.Popen` offers of a process."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_IMPORTED))
        readable, writable = os.pipe()
        self._process = context.Process(target=_rank, args=(list(argv[2:]), dict(environment), _Pipe(writable)), daemon=True)
        self._process.start()
        os.close(writable)
        self.stdout = os.fdopen(readable, "rb")
        self.pid = self._process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class _Pipe:
    """A file descriptor that is passed to the fork."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self._descriptor),)


def _received(passed: Any) -> int:
    return int(passed.detach())


def _rank(argv: list[str], environment: dict[str, str], output: int) -> None:
    """Become the rank: `argv` is the module and its arguments."""
    import runpy

    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.argv = argv
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Start the ranks of runs in this process as forks; afterwards none of them runs."""
    with patch.object(rank_supervisor, "start_member", ForkedRank):
        yield
    assert multiprocessing.active_children() == []


def end_fork_server() -> None:
    """End the process that the ranks are forks of."""
    server: Any = forkserver
    server._forkserver._stop()

"""What runs on a node of a cluster: one point of a sweep, as a process of its own. Loads nothing heavy."""

import os
from collections.abc import Sequence
from pathlib import Path

from llm_perf_opt.core.processes import LAUNCHER_PID, become, module_argv, run_logged


def point_argv(sweep: Path, number: int, code: Sequence[str] = ()) -> list[str]:
    """Return the command of a point, for the interpreter of this process. `code`: settings that can run code, as typed."""
    return module_argv("llm_perf_opt", "run", "--quiet", "--point", str(sweep), str(number), *code)


def become_point(sweep: str, number: int, code: Sequence[str] = ()) -> None:
    """Turn this process into the point, so that the signals of the scheduler reach it directly."""
    become(point_argv(Path(sweep), number, code))


def run_point(sweep: str, number: int, log: str, code: Sequence[str], folder: str) -> int:
    """Run a point to its end in a folder and return its exit code. It ends with this process, and if that is interrupted."""
    environment = {**os.environ, LAUNCHER_PID: str(os.getpid()), "PYTHONSAFEPATH": "1"}
    argv = point_argv(Path(sweep), number, code)
    return run_logged(argv, folder=Path(folder), environment=environment, log=Path(log))


class Lease:
    """Exists in a Ray cluster while a command runs the points of a sweep there."""

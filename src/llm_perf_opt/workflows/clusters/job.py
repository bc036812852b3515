"""What runs on a node of a cluster: one point of a sweep, as a process of its own. Loads nothing heavy."""

import os
import sys
from pathlib import Path

from llm_perf_opt.core.processes import LAUNCHER_PID, become, run_logged


def point_argv(sweep: Path, number: int) -> list[str]:
    """Return the command of a point, for the interpreter of this process."""
    return [sys.executable, "-m", "llm_perf_opt", "run", "--quiet", "--point", str(sweep), str(number)]


def become_point(sweep: str, number: int) -> None:
    """Turn this process into the point, so that the signals of the scheduler reach it directly."""
    become(point_argv(Path(sweep), number))


def run_point(sweep: str, number: int, log: str) -> int:
    """Run a point to its end and return its exit code. It ends with this process, and if this process is interrupted."""
    environment = {**os.environ, LAUNCHER_PID: str(os.getpid())}
    return run_logged(point_argv(Path(sweep), number), folder=Path(sweep), environment=environment, log=Path(log))


class Lease:
    """Exists in a Ray cluster while a command runs the points of a sweep there."""

"""The CPUs and threads of the measured process: set before torch is imported, because its threads inherit both."""

import os
from contextlib import suppress
from pathlib import Path

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.host import allowed_cpus, cpu_list, parse_cpu_list
from llm_perf_opt.core.missing import Missing

_TASKS = Path("/proc/self/task")
_SETTING = "hardware.cpus"


def check_cpus(cpus: str) -> frozenset[int]:
    """Return the CPUs of a valid list; raise a ConfigError if one of them does not exist here or is not allowed."""
    allowed, wanted = allowed_cpus(), frozenset(parse_cpu_list(cpus))
    if isinstance(allowed, Missing) or not hasattr(os, "sched_setaffinity"):
        raise ConfigError(f"{_SETTING}={cpus} cannot be applied: this system has no CPU affinity.", f"Remove {_SETTING}.")
    if missing := wanted - allowed:
        raise ConfigError(
            f"{_SETTING}={cpus}: this process may not run on CPU {cpu_list(missing)}, or there is no such CPU.",
            f"It may use {cpu_list(allowed)}.",
        )
    return wanted


def default_threads(cpus: str | None, threads: int | None) -> int | None:
    """Return the number of threads: the given one, otherwise one per CPU of the list; None: the framework decides."""
    return threads or (len(parse_cpu_list(cpus)) if cpus else None)


def prepare_threads(cpus: str | None, threads: int | None) -> None:
    """Pin every thread of this process and set the number of OpenMP threads. Call before torch is imported."""
    if cpus:
        wanted = check_cpus(cpus)
        for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
            with suppress(ProcessLookupError):  # the thread has ended
                os.sched_setaffinity(int(task.name), wanted)
        os.sched_setaffinity(0, wanted)
    count = default_threads(cpus, threads)
    if count:
        os.environ["OMP_NUM_THREADS"] = str(count)


def set_threads(cpus: str | None, threads: int | None) -> None:
    """Set the number of torch's threads."""
    import torch

    count = default_threads(cpus, threads)
    if count:
        torch.set_num_threads(count)


def compute_threads(*, elsewhere: bool) -> int:
    """Return the number of threads that compute: torch's, or the CPUs that an engine's worker process is bound to.

    Such a worker has one thread per CPU. The number of its threads in /proc includes many that only wait.
    """
    import psutil
    import torch

    if not elsewhere or not hasattr(psutil.Process, "cpu_affinity"):
        return torch.get_num_threads()
    bound = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            bound.append(len(child.cpu_affinity()))
    return min(bound, default=torch.get_num_threads())

"""The machine, driver, clocks, packages and commit of a run."""

import os
import platform
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from llm_perf_opt import __version__
from llm_perf_opt.config.runtimes import all_traits
from llm_perf_opt.core.compiler import INSTALL, compiler_problem, find_compiler
from llm_perf_opt.core.errors import ResourceError
from llm_perf_opt.core.git import Git
from llm_perf_opt.core.git_changes import changes
from llm_perf_opt.core.host import available_memory_bytes, cluster_node, cpu_flags, cpu_frequency_mhz, cpu_name, usable_cpus
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.secrets import hidden, secret_variable
from llm_perf_opt.core.topology import cpu_layout, numa_nodes
from llm_perf_opt.runners.measure.gpu import describe, handle_of, nvml, read, text_of
from llm_perf_opt.runners.measure.gpu_topology import connections, gpus

PACKAGES = ("hydra-core", "omegaconf", "numpy", "nvtx", "nvidia-ml-py", "msgspec", "psutil")
"""Recorded with every run, in addition to those of the runtimes."""
_ENVIRONMENT_PREFIXES = ("CUDA_", "NVIDIA_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "KMP_", "GOMP_", "NCCL_", "TRITON_")
_GIT_S = 15.0
"""Time limit of each git command; a repository of 100,000 files takes about a second."""
_CLUSTER_PREFIXES = ("SLURM_", "SLURMD_")
_CLUSTER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "CUDA_VISIBLE_DEVICES",
    "JOB_COMPLETION_INDEX",
)  # fmt: skip
"""Set by torchrun, a scheduler or Kubernetes."""


def environment(device_index: int) -> dict[str, Any]:
    """Return the content of env.json. An unavailable fact is "n/a: reason"."""
    recorded = (*_ENVIRONMENT_PREFIXES, *(prefix for runtime in all_traits() for prefix in runtime.variables))
    return {
        "taken": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "python_executable": sys.executable,
        "cpu": _cpu(),
        "memory": _memory(),
        "numa": _numa(),
        **_gpu(device_index),
        "compiler": _compiler(),
        "packages": packages(),
        "tool": {"version": __version__, **_own_commit()},
        "working_folder": commit_of(Path.cwd()),
        "variables": _variables(recorded),
        "cluster": {"node": cluster_node(), "variables": _variables(_CLUSTER_PREFIXES, _CLUSTER_VARIABLES)},
    }


def _variables(prefixes: tuple[str, ...], names: tuple[str, ...] = ()) -> dict[str, str]:
    """Return environment variables by prefix or name, without credentials: neither named ones nor parts of values."""
    return {
        name: hidden(value)
        for name, value in sorted(os.environ.items())
        if (name.startswith(prefixes) or name in names) and not secret_variable(name, value)
    }


def packages() -> dict[str, str]:
    """Return the installed versions of packages that can change a result."""
    found = {}
    for name in dict.fromkeys((*(name for runtime in all_traits() for name in runtime.packages), *PACKAGES)):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> dict[str, Any]:
    import psutil

    frequency = cpu_frequency_mhz("max")
    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    return {
        "name": cpu_name(),
        "logical": psutil.cpu_count(),
        "physical": psutil.cpu_count(logical=False),
        "usable": usable_cpus(),
        "frequency_max_mhz": str(frequency) if isinstance(frequency, Missing) else frequency,
        "governor": governor.read_text().strip() if governor.exists() else "n/a: the system does not report it",
        "flags": sorted(flag for flag in cpu_flags() if flag.startswith(("avx", "amx", "asimd", "sve", "bf16", "fma"))),
        **cpu_layout(),
    }


def _numa() -> list[dict[str, Any]] | str:
    found = numa_nodes()
    return str(found) if isinstance(found, Missing) else found


def _compiler() -> dict[str, Any] | str:
    """Return the C++ compiler that torch.compile uses on a CPU, or why it cannot be used and how to install it."""
    found, problem = find_compiler(), compiler_problem()
    if isinstance(found, Missing) or problem:
        return f"{Missing(problem)}. {INSTALL}"
    return asdict(found)


def _memory() -> dict[str, Any]:
    import psutil

    return {"total_bytes": psutil.virtual_memory().total, "available_bytes": available_memory_bytes()}


def _gpu(device_index: int) -> dict[str, Any]:
    with nvml() as library:
        if isinstance(library, Missing):
            return {"gpu": str(library), "gpu_driver": str(library)}
        handle = handle_of(library, device_index)
        driver = read(library, lambda: text_of(library.nvmlSystemGetDriverVersion()))
        cuda = read(library, library.nvmlSystemGetCudaDriverVersion_v2)
        return {
            "gpu": str(handle) if isinstance(handle, Missing) else describe(library, handle),
            "gpu_count": int(library.nvmlDeviceGetCount()),
            "gpus": gpus(library),
            "gpu_connections": connections(library),
            "gpu_driver": str(driver),
            "gpu_driver_cuda": str(cuda) if isinstance(cuda, Missing) else f"{cuda // 1000}.{cuda % 1000 // 10}",
        }


def _own_commit() -> dict[str, Any]:
    """Return the commit of llm-perf, if this file is tracked: an installed package may lie in another repository."""
    here = Path(__file__)
    try:
        tracked = Git(here.parent, limit_s=_GIT_S).try_text("ls-files", "--error-unmatch", here.name)
    except ResourceError:  # no git
        return {}
    return commit_of(here.parent) if tracked else {}


def commit_of(folder: Path) -> dict[str, Any]:
    """Return the commit of the repository that contains `folder`, and whether its files differ; empty if there is none.

    `dirty` is "n/a: reason" if that cannot be found out without running a program that the repository names.
    """
    try:
        git = Git(folder, limit_s=_GIT_S)
        commit = git.text("rev-parse", "--verify", "HEAD")
    except ResourceError:  # no repository, no commit yet, or no git
        return {}
    try:
        found = changes(git)
    except ResourceError as error:
        return {"commit": commit, "dirty": str(Missing(error.fact.rstrip(".")))}
    unknown = str(Missing(found.unknown[0])) if found.unknown else False
    return {"commit": commit, "dirty": True if found.changed else unknown}

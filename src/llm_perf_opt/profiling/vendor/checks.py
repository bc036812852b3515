"""What is on this machine, what is missing, what that costs, and how to get it."""

import os
import platform
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from llm_perf_opt.host import available_memory_bytes, cpu_has_native_bf16, cpu_name, usable_cpus
from llm_perf_opt.profiling.gpu import describe, handle_of, nvml
from llm_perf_opt.profiling.vendor.launch import ask
from llm_perf_opt.records import Missing
from llm_perf_opt.run_folder import LEAST_FREE_BYTES

_INSTALL_FOLDERS = {
    "nsys": (
        "/opt/nvidia/nsight-systems/*/bin/nsys",
        "/usr/local/cuda*/bin/nsys",
        "/opt/nvidia/nsight-systems-cli/*/bin/nsys",
    ),
    "ncu": ("/opt/nvidia/nsight-compute/*/ncu", "/usr/local/cuda*/bin/ncu"),
}


@dataclass(frozen=True)
class Check:
    """One thing looked at."""

    name: str
    status: Literal["ok", "warning", "missing"]
    found: str
    costs: str = ""
    """What the user goes without."""
    remedy: str = ""


def check_machine() -> list[Check]:
    """Every check, in the order a reader wants them."""
    checks: tuple[Callable[[], Check], ...] = (
        _python, _processor, _memory, _disk, _torch, _transformers, _gpu, _nvtx, _nsys, _ncu, _compiler,
    )  # fmt: skip
    return [check() for check in checks]


def find_tool(name: str) -> Path | None:
    """nsys or ncu: its variable (NSYS, NCU), the PATH, then the usual folders, newest first."""
    named = os.environ.get(name.upper())
    if named and Path(named).is_file():
        return Path(named)
    on_path = shutil.which(name)
    if on_path:
        return Path(on_path)
    for pattern in _INSTALL_FOLDERS[name]:
        found = sorted(Path("/").glob(pattern.lstrip("/")), reverse=True)
        if found:
            return found[0]
    return None


def tool_version(path: Path) -> str | None:
    """What nsys or ncu says of itself."""
    version = re.search(r"\d{4}\.\d+\.\d+[\w.-]*", ask([str(path), "--version"], timeout_s=30) or "")
    return version.group() if version else None


def _python() -> Check:
    return Check("Python", "ok", platform.python_version())


def _processor() -> Check:
    native = "native bf16" if cpu_has_native_bf16() else "no native bf16: dtype auto is fp32 on the CPU"
    return Check("CPU", "ok", f"{cpu_name()}, {usable_cpus()} usable processors, {native}")


def _memory() -> Check:
    return Check("Memory", "ok", f"{available_memory_bytes() / 2**30:.1f} GiB available")


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    found = f"{free / 2**30:.1f} GiB free in the current folder"
    if free < LEAST_FREE_BYTES:
        return Check("Disk", "missing", found, "No run can begin here.", "Free some space, or use hydra.run.dir=DIR.")
    return Check("Disk", "ok", found)


def _torch() -> Check:
    try:
        import torch
    except ImportError as error:
        return Check("torch", "missing", str(error), "No model can be run.", "pip install torch")
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    found = f"{torch.__version__} ({cuda}, {torch.cuda.device_count() if torch.cuda.is_available() else 0} devices)"
    with nvml() as library:
        gpus = 0 if isinstance(library, Missing) else int(library.nvmlDeviceGetCount())
    if gpus and not torch.cuda.is_available():
        return Check("torch", "warning", found, "The GPU is here but torch cannot use it.", "Install a torch build for CUDA.")
    return Check("torch", "ok", found)


def _transformers() -> Check:
    return _package("transformers", "No model can be built.")


def _gpu() -> Check:
    with nvml() as library:
        if isinstance(library, Missing):
            return Check(
                "NVIDIA GPU", "missing", str(library),
                "Runs are on the CPU; no GPU power, clocks or energy; Nsight Compute has nothing to count.",
                "Run on a machine with an NVIDIA GPU and its driver.",
            )  # fmt: skip
        handle = handle_of(library, 0)
        if isinstance(handle, Missing):
            return Check("NVIDIA GPU", "missing", str(handle), "Runs are on the CPU.", "Check CUDA_VISIBLE_DEVICES.")
        facts = describe(library, handle)
        count = int(library.nvmlDeviceGetCount())
        memory = facts["memory_bytes"]
        size = f"{memory / 2**30:.0f} GiB" if isinstance(memory, int) else str(memory)
        driver = library.nvmlSystemGetDriverVersion()
        return Check("NVIDIA GPU", "ok", f"{facts['name']}, {size}, driver {driver}; {count} in all")


def _nvtx() -> Check:
    check = _package("nvtx", "Nsight tools cannot see the stages.")
    version = re.match(r"(\d+)\.(\d+)\.(\d+)", check.found)
    if check.status == "ok" and version and tuple(map(int, version.groups())) >= (0, 2, 12):
        return Check(
            "nvtx",
            "warning",
            check.found,
            "Nsight Systems up to 2023.4 does not see its ranges.",
            "pip install 'nvtx<0.2.12'",
        )
    return check


def _nsys() -> Check:
    return _tool("nsys", "Nsight Systems", "No kernel timeline from outside the process.")


def _ncu() -> Check:
    return _tool("ncu", "Nsight Compute", "No hardware counters per kernel.")


def _compiler() -> Check:
    found = shutil.which("g++") or shutil.which("clang++")
    if found:
        return Check("C++ compiler", "ok", found)
    return Check("C++ compiler", "warning", "none on the PATH", "runtime.compile on the CPU fails.", "Install g++ or clang++.")


def _package(name: str, costs: str) -> Check:
    try:
        return Check(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check(name, "missing", "not installed", costs, f"pip install {name}")


def _tool(name: str, title: str, costs: str) -> Check:
    path = find_tool(name)
    where = f"Install {title} from NVIDIA or the CUDA toolkit, or name the binary in the variable {name.upper()}."
    if path is None:
        return Check(title, "missing", f"no {name} on the PATH or in the usual folders", costs, where)
    version = tool_version(path)
    if version is None:
        return Check(title, "warning", f"{path} does not tell its version", costs, where)
    return Check(title, "ok", f"{version} at {path}")

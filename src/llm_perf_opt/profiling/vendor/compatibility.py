"""Detect incompatible versions and missing permissions before a pass."""

import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from llm_perf_opt.core.errors import ResourceError
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.profiling.vendor.probe import numbers, release_of
from llm_perf_opt.runners.measure.device import torch_build

NVTX_REMEDY = "pip install 'nvtx>=0.2.10,<0.2.12', or use Nsight Systems 2024 or newer."

_SHIPPED_WITH_CUDA = {
    (11, 8): (2022, 4), (12, 0): (2022, 4), (12, 1): (2023, 1), (12, 2): (2023, 2), (12, 3): (2023, 3), (12, 4): (2023, 4),
    (12, 5): (2024, 2), (12, 6): (2024, 4), (12, 8): (2024, 6), (12, 9): (2025, 1), (13, 0): (2025, 3),
}  # fmt: skip
"""CUDA → the Nsight Systems of the same toolkit. Used only for a warning."""
_BLIND_NVTX = (0, 2, 12)
_BLIND_NSYS = (2023, 4)


def cuda_runtime() -> Maybe[tuple[int, int]]:
    """Return the CUDA version that torch was built for, read without importing torch."""
    build = torch_build()
    version = numbers(build.cuda)[:2] if build and build.cuda else ()
    return (version[0], version[1]) if len(version) == 2 else Missing("torch is not installed or was built without CUDA")


def nvtx_version() -> Maybe[str]:
    """Return the version of the installed nvtx package."""
    try:
        return metadata.version("nvtx")
    except metadata.PackageNotFoundError:
        return Missing("not installed")


def too_old_for(nsys_version: str, cuda: Maybe[tuple[int, int]]) -> str:
    """Return a warning if nsys is older than the program's CUDA; an empty string otherwise or if either is unknown."""
    if isinstance(cuda, Missing) or not release_of(nsys_version):
        return ""
    known = [shipped for toolkit, shipped in _SHIPPED_WITH_CUDA.items() if toolkit <= cuda]
    if not known or release_of(nsys_version)[:2] >= known[-1]:
        return ""
    year, number = known[-1]
    return (
        f"nsys {nsys_version} is older than torch's CUDA {cuda[0]}.{cuda[1]}, which was released with nsys {year}.{number}: "
        "its reports may be truncated"
    )


def blind_to_ranges(nsys_version: str, nvtx: Maybe[str]) -> bool:
    """Return whether this nsys cannot see the ranges of this nvtx package."""
    if isinstance(nvtx, Missing) or not release_of(nsys_version):
        return False
    return numbers(nvtx)[:3] >= _BLIND_NVTX and release_of(nsys_version)[:2] <= _BLIND_NSYS


def check_ranges_visible(nsys_version: str) -> None:
    """Raise a ResourceError if nsys cannot see the stages."""
    nvtx = nvtx_version()
    if isinstance(nvtx, Missing):
        raise ResourceError("The nvtx package is not installed, so nsys cannot see the stages.", NVTX_REMEDY)
    if blind_to_ranges(nsys_version, nvtx):
        raise ResourceError(
            f"nsys {nsys_version} does not see the ranges of nvtx {nvtx}: it would record nothing and exit with code 0.",
            NVTX_REMEDY,
        )


# --- permission -------------------------------------------------------------------------------------------------------


REMEDY = (
    "Run as root or with the capability CAP_SYS_ADMIN (in a container: --cap-add=SYS_ADMIN; from driver 565 on CAP_PERFMON is "
    "enough), or allow all users: put `options nvidia NVreg_RestrictProfilingToAdminUsers=0` in a file in /etc/modprobe.d, "
    "rebuild the initramfs if it contains the driver, and reboot."
)

_CAP_SYS_ADMIN, _CAP_PERFMON = 21, 38
_PERFMON_SINCE_DRIVER = 565


@dataclass(frozen=True)
class Permission:
    """Whether counters may be read, and why."""

    status: Literal["ok", "denied", "unknown"]
    why: str


def counter_permission(driver: Path = Path("/proc/driver/nvidia"), process: Path = Path("/proc/self/status")) -> Permission:
    """Return whether the driver's parameters and this process's capabilities allow reading counters."""
    try:
        restricted = re.search(r"^RmProfilingAdminOnly:\s*(\d+)", (driver / "params").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return Permission("unknown", f"there is no {driver}")
    if restricted is None:
        return Permission("unknown", "the driver does not report whether counters are restricted")
    if restricted.group(1) == "0":
        return Permission("ok", "the driver allows all users to read counters")
    capabilities = _capabilities(process)
    if capabilities is None:
        return Permission("unknown", "counters are restricted to administrators, and this process's capabilities are unknown")
    if capabilities >> _CAP_SYS_ADMIN & 1:
        return Permission("ok", "counters are restricted to administrators, and this process has CAP_SYS_ADMIN")
    if capabilities >> _CAP_PERFMON & 1 and _driver_release(driver) >= _PERFMON_SINCE_DRIVER:
        return Permission("ok", "counters are restricted to administrators, and this process has CAP_PERFMON")
    return Permission("denied", "the driver restricts counters to administrators (RmProfilingAdminOnly: 1)")


def permission_error(reason: str) -> ResourceError:
    """Return the error for counters that may not be read."""
    return ResourceError(f"Permission to read the GPU's hardware counters was denied: {reason}.", REMEDY)


def _capabilities(process: Path) -> int | None:
    try:
        effective = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", process.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(effective.group(1), 16) if effective else None


def _driver_release(driver: Path) -> int:
    """Return the release branch of the driver; 0 if unknown."""
    try:
        found = re.search(r"\s(\d{3,})\.\d+", (driver / "version").read_text(errors="replace"))
    except OSError:
        return 0
    return int(found.group(1)) if found else 0

"""Whether this user may read hardware counters, found out without running anything on the GPU."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llm_perf_opt.core.errors import ResourceError

REMEDY = (
    "Either run as root or with the capability CAP_SYS_ADMIN (in a container: --cap-add=SYS_ADMIN; from driver 565 on "
    "CAP_PERFMON is enough), or let everyone read them: put `options nvidia NVreg_RestrictProfilingToAdminUsers=0` in a file of "
    "/etc/modprobe.d, rebuild the initramfs where the driver is in it, and reboot."
)

_CAP_SYS_ADMIN, _CAP_PERFMON = 21, 38
_PERFMON_SINCE_DRIVER = 565


@dataclass(frozen=True)
class Permission:
    """Whether counters may be read, and how that is known."""

    status: Literal["ok", "denied", "unknown"]
    why: str


def counter_permission(driver: Path = Path("/proc/driver/nvidia"), process: Path = Path("/proc/self/status")) -> Permission:
    """What the driver's parameters and our own capabilities say."""
    try:
        restricted = re.search(r"^RmProfilingAdminOnly:\s*(\d+)", (driver / "params").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return Permission("unknown", f"there is no {driver}")
    if restricted is None:
        return Permission("unknown", "the driver does not say whether counters are restricted")
    if restricted.group(1) == "0":
        return Permission("ok", "the driver lets every user read counters")
    capabilities = _capabilities(process)
    if capabilities is None:
        return Permission("unknown", "counters are for administrators, and this process does not know its capabilities")
    if capabilities >> _CAP_SYS_ADMIN & 1:
        return Permission("ok", "counters are for administrators, and this process has CAP_SYS_ADMIN")
    if capabilities >> _CAP_PERFMON & 1 and _driver_release(driver) >= _PERFMON_SINCE_DRIVER:
        return Permission("ok", "counters are for administrators, and this process has CAP_PERFMON")
    return Permission("denied", "the driver keeps counters for administrators (RmProfilingAdminOnly: 1)")


def permission_error(seen: str) -> ResourceError:
    """Counters were refused."""
    return ResourceError(f"The GPU's hardware counters may not be read: {seen}.", REMEDY)


def _capabilities(process: Path) -> int | None:
    try:
        effective = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", process.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(effective.group(1), 16) if effective else None


def _driver_release(driver: Path) -> int:
    """The branch of the driver, 0 where it does not tell."""
    try:
        found = re.search(r"\s(\d{3,})\.\d+", (driver / "version").read_text(errors="replace"))
    except OSError:
        return 0
    return int(found.group(1)) if found else 0

"""Whether counters may be read."""

from pathlib import Path

import pytest

from llm_perf_opt.profiling.vendor.compatibility import REMEDY, counter_permission

SYS_ADMIN, PERFMON = 1 << 21, 1 << 38


def driver(folder: Path, restricted: str | None, release: str = "580.82.07") -> Path:
    if restricted is not None:
        (folder / "params").write_text(f"ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: {restricted}\nOther: 1\n")
    (folder / "version").write_text(f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {release}  Release Build\n")
    return folder


def process(folder: Path, capabilities: int) -> Path:
    path = folder / "status"
    path.write_text(f"Name:\tpython\nCapInh:\t0000000000000000\nCapEff:\t{capabilities:016x}\n")
    return path


@pytest.mark.parametrize(
    ("restricted", "capabilities", "release", "expected"),
    [
        ("0", 0, "580.82.07", "ok"),
        ("1", 0, "580.82.07", "denied"),
        ("1", SYS_ADMIN, "535.183.01", "ok"),
        ("1", PERFMON, "580.82.07", "ok"),
        ("1", PERFMON, "550.54.15", "denied"),
        ("1", ~(SYS_ADMIN | PERFMON) & (1 << 40) - 1, "580.82.07", "denied"),
    ],
)
def test_driver_and_capabilities_decide(tmp_path: Path, restricted: str, capabilities: int, release: str, expected: str) -> None:
    found = counter_permission(driver(tmp_path, restricted, release), process(tmp_path, capabilities))
    assert found.status == expected
    assert found.why


def test_what_is_not_told_is_not_known(tmp_path: Path) -> None:
    assert counter_permission(tmp_path / "none", process(tmp_path, 0)).status == "unknown"
    assert counter_permission(driver(tmp_path, "1"), tmp_path / "none").status == "unknown"
    (tmp_path / "params").write_text("Nothing: 1\n")
    assert counter_permission(tmp_path, process(tmp_path, 0)).status == "unknown"


def test_both_remedies_are_told() -> None:
    assert "CAP_SYS_ADMIN" in REMEDY
    assert "NVreg_RestrictProfilingToAdminUsers=0" in REMEDY

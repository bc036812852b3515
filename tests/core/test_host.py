"""Facts about the host, read from files that differ between systems."""

import os
import platform
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.core import host
from llm_perf_opt.core.missing import Missing

Files = Callable[[dict[str, str]], None]

INTEL = """\
processor\t: 0
model name\t: Intel(R) Xeon(R) Gold
flags\t\t: fpu sse avx512_bf16 amx_bf16

processor\t: 1
flags\t\t: fpu
"""
ARM = """\
processor\t: 0
BogoMIPS\t: 50.00
Features\t: fp asimd bf16 sve
CPU part\t: 0xd40
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    """Redirects system files to a folder of the test."""
    monkeypatch.setattr(host, "Path", lambda name: tmp_path / name.lstrip("/"))

    def write(contents: dict[str, str]) -> None:
        for name, content in contents.items():
            file = tmp_path / name.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content, encoding="latin-1")

    return write


def test_flags_of_an_intel_processor(files: Files) -> None:
    files({"/proc/cpuinfo": INTEL})
    assert host.cpu_flags() == {"fpu", "sse", "avx512_bf16", "amx_bf16"}, "of the first processor"
    assert host.cpu_has_native_bf16()
    assert host.cpu_name() == "Intel(R) Xeon(R) Gold"


def test_flags_of_an_arm_processor(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files({"/proc/cpuinfo": ARM})
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "asimd" in host.cpu_flags()
    assert host.cpu_has_native_bf16()
    assert host.cpu_name() == "aarch64", "it has no name there"


@pytest.mark.parametrize("flags", ["fpu sse avx512f", "asimd", "", "notbf16 xbf16"])
def test_a_processor_without_bf16(files: Files, flags: str) -> None:
    files({"/proc/cpuinfo": f"flags\t: {flags}\n"})
    assert not host.cpu_has_native_bf16()


@pytest.mark.parametrize("content", ["", "no colon here\n", "model name\t:\n", "\xff\xfe"])
def test_a_strange_cpuinfo_is_survived(files: Files, content: str) -> None:
    files({"/proc/cpuinfo": content})
    assert host.cpu_flags() == frozenset()
    assert host.cpu_name()


def test_a_system_without_cpuinfo(files: Files) -> None:
    assert host.cpu_flags() == frozenset()
    assert not host.cpu_has_native_bf16()
    assert host.cpu_name() == (platform.processor() or platform.machine())


def test_this_machine_answers() -> None:
    assert host.cpu_name()
    assert 1 <= host.usable_cpus() <= (os.cpu_count() or 1)
    assert 0 < host.available_memory_bytes() <= psutil.virtual_memory().total


def test_usable_processors_are_those_this_process_may_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    assert host.usable_cpus() == 3


def test_where_the_system_does_not_tell_all_processors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert host.usable_cpus() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert host.usable_cpus() == 1


V2 = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current")
V1 = ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes")


@pytest.mark.parametrize("names", [V2, V1], ids=["v2", "v1"])
@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        ("1000\n", "300\n", 700),
        ("1000", "1200", 0),  # over its limit: nothing is left, not less than nothing
        ("9000", "1000", 5000),  # the machine has less than the container may take
        ("max", "300", 5000),
        (str(2**63 - 4096), "300", 5000),  # how version 1 writes "no limit"
        ("nonsense", "300", 5000),
    ],
)
def test_a_containers_limit_is_respected(
    files: Files, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str], limit: str, used: str, expected: int
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5000))
    files({names[0]: limit, names[1]: used})
    assert host.available_memory_bytes() == expected


@pytest.mark.parametrize(("names", "word"), [(V2, "inactive_file"), (V1, "total_inactive_file")], ids=["v2", "v1"])
def test_files_kept_in_memory_are_room_that_can_be_had(
    files: Files, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str], word: str
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5000))
    known = {names[0]: "1000", names[1]: "900"}
    statistics = f"{names[0].rpartition('/')[0]}/memory.stat"
    files({**known, statistics: f"anon 100\n{word} 600\nactive_file 200\n"})
    assert host.available_memory_bytes() == 700
    files({**known, statistics: f"{word} many\n"})
    assert host.available_memory_bytes() == 100


@pytest.mark.parametrize(("limit", "expected"), [("1000", 1000), ("9000", 5000), ("max", 5000), (None, 5000)])
def test_all_memory_there_is(files: Files, monkeypatch: pytest.MonkeyPatch, limit: str | None, expected: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=5000, available=300))
    files({} if limit is None else {V2[0]: limit, V2[1]: "900"})
    assert host.total_memory_bytes() == expected


def test_without_a_control_group_the_machine_decides(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5000))
    assert host.available_memory_bytes() == 5000


@pytest.mark.parametrize(("text", "cpus"), [("0", (0,)), ("8,0-2", (0, 1, 2, 8)), ("3, 1-1", (1, 3)), ("0-1,1-2", (0, 1, 2))])
def test_a_list_of_cpus_is_read(text: str, cpus: tuple[int, ...]) -> None:
    assert host.parse_cpu_list(text) == cpus


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "2-1", "8192", "1,", "²"])
def test_a_wrong_list_of_cpus_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        host.parse_cpu_list(text)


@given(st.sets(st.integers(0, 300)))
def test_cpus_written_as_ranges_are_read_back(cpus: set[int]) -> None:
    if cpus:
        assert set(host.parse_cpu_list(host.cpu_list(cpus))) == cpus


def test_a_system_without_affinity_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert isinstance(host.allowed_cpus(), Missing)

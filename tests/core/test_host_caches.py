"""Caches and cores, read from a fake system folder."""

import os
from pathlib import Path

import pytest

from llm_perf_opt.core.host import cache_bytes, last_level_cache_bytes, physical_cores
from llm_perf_opt.core.records import Missing


def processor(root: Path, number: int, *caches: tuple[str, str, str, str]) -> None:
    for index, values in enumerate(caches):
        folder = root / f"cpu{number}" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        for name, value in zip(("level", "type", "size", "shared_cpu_list"), values, strict=True):
            (folder / name).write_text(value + "\n")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    (tmp_path / "cpufreq").mkdir()
    return tmp_path


def test_a_shared_cache_counts_once_and_separate_ones_add_up(root: Path) -> None:
    for number in range(4):
        shared = "0-1" if number < 2 else "2-3"
        processor(root, number, ("1", "Data", "48K", str(number)), ("3", "Unified", "32M", shared))
    assert last_level_cache_bytes(root) == 2 * 32 * 2**20


def test_processors_out_of_reach_do_not_count(root: Path) -> None:
    processor(root, 0, ("2", "Unified", "2048K", "0"))
    processor(root, 7, ("2", "Unified", "2048K", "7"), ("3", "Unified", "64M", "7"))
    assert last_level_cache_bytes(root) == 2 * 2**20


def test_an_instruction_cache_or_an_unreadable_size_is_none(root: Path) -> None:
    processor(root, 0, ("4", "Instruction", "1024K", "0"), ("3", "Unified", "huge", "0"))
    assert last_level_cache_bytes(root) == Missing("the system does not report its caches")


def test_each_level_has_the_size_of_its_data_caches_together(root: Path) -> None:
    for number in range(2):
        own = (("1", "Data", "64K", str(number)), ("1", "Instruction", "64K", str(number)), ("2", "Unified", "1M", str(number)))
        processor(root, number, *own, ("3", "Unified", "32M", "0-1"))
    assert cache_bytes(root) == {1: 128 * 2**10, 2: 2 * 2**20, 3: 32 * 2**20}


def test_hyperthreads_of_one_core_count_once(root: Path) -> None:
    assert physical_cores(root) == Missing("the system does not report which processors share a core")
    for number, siblings in enumerate(("0,2", "1,3", "0,2", "1,3", "4,5", "4,5")):
        folder = root / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert physical_cores(root) == 2  # processors 4 and 5 are out of reach

"""Write files of runs in tests, each with its own folder as the root."""

import os
from pathlib import Path
from typing import Any

import pytest

from llm_perf_opt.core import run_folder


def write_whole(path: Path, content: bytes) -> None:
    """Write a file completely or not at all."""
    run_folder.write_whole(path.parent, path, content)


def write_record(path: Path, record: Any) -> None:
    """Write a record as indented JSON."""
    run_folder.write_record(path.parent, path, record)


def full_disk(monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    """Let files whose names end so be on a disk without space. Skip the test on a system without such a device."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    plain_open = os.open

    def opened(path: Any, flags: int, *words: Any, **named: Any) -> int:
        return plain_open("/dev/full", os.O_WRONLY) if str(path).endswith(ending) else plain_open(path, flags, *words, **named)

    monkeypatch.setattr(os, "open", opened)

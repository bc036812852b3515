"""How the passes of a run are closed, and whether they left results."""

import sys
from pathlib import Path
from typing import Any

import pytest

from builders import manifest
from llm_perf_opt.core.records import PassRecord
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.profiling.passes import TICK, PassPlan, closed, left_something, run_pass
from llm_perf_opt.profiling.vendor import launch
from llm_perf_opt.profiling.vendor.child import TICK_S


def test_no_pass_of_an_ended_run_is_waiting_or_under_way() -> None:
    passes = (PassRecord("clean", "complete"), PassRecord("nsys", "started"), PassRecord("ncu_decode"))
    found = closed(passes)
    assert [entry.status for entry in found] == ["complete", "failed", "skipped"]
    assert [entry.why for entry in found] == ["", "The run ended during this pass.", "The run ended before this pass."]


def test_a_report_that_a_tool_left_is_something(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    passes = (PassRecord("nvml", "complete"), PassRecord("nsys", "failed"))
    assert not left_something(folder, passes), "telemetry beside nothing"
    report = folder.tool_report("nsys")
    report.parent.mkdir(parents=True)
    report.with_name(report.name + ".nsys-rep").write_bytes(b"x")
    assert left_something(folder, passes)
    assert left_something(folder, (PassRecord("torch", "complete"),))


class Heard:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, dict[str, Any]]] = []

    def pass_started(self, name: str, label: str) -> None: ...

    def pass_message(self, name: str, message: dict[str, Any]) -> None:
        self.messages.append((name, message))

    def pass_ended(self, entry: PassRecord) -> None: ...


def test_whoever_shows_a_pass_is_told_that_time_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TICK_S <= 1, "a display that stands still for longer looks frozen"
    monkeypatch.setattr(launch, "TICK_S", 0.05)
    folder = RunFolder.create(tmp_path / "run")
    folder.write_manifest(manifest())
    heard = Heard()
    run_pass(folder, PassPlan("clean", [sys.executable, "-c", "import time; time.sleep(0.4)"], 60.0), heard)
    assert heard.messages
    assert all(message == ("clean", TICK) for message in heard.messages)

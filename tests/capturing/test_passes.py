"""How the passes of a run are closed, and whether they left anything."""

from pathlib import Path

from llm_perf_opt.capturing.passes import closed, left_something
from llm_perf_opt.records import PassRecord
from llm_perf_opt.run_folder import RunFolder


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

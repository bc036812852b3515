"""Whose word counts when a pass below a tool ends badly: the program's own, the tool's log, then the exit code."""

import sys
from pathlib import Path
from typing import Any

import pytest

from llm_perf_opt.analysis.trace_health import Expected
from llm_perf_opt.errors import CaptureError, ConfigError, LlmPerfError
from llm_perf_opt.nsight_passes import NsysAsked, nsys_pass
from llm_perf_opt.passes import PassPlan
from llm_perf_opt.profiling.vendor.child import UnexplainedEndError
from llm_perf_opt.records import SCHEMA, Manifest, PassRecord
from llm_perf_opt.run_folder import RunFolder

COMPLAINT = "print('Unknown runtime API function index: 470');"
SAID = "from llm_perf_opt.profiling.vendor.launch import send;"
SAID += "send('error', kind='ConfigError', fact='A tool said: exit code 9.', remedy='');"


class Nobody:
    """Is told and says nothing."""

    def pass_started(self, name: str, label: str) -> None: ...

    def pass_message(self, name: str, message: dict[str, Any]) -> None: ...

    def pass_ended(self, entry: PassRecord) -> None: ...


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (f"{COMPLAINT} raise SystemExit(3)", CaptureError, "newer than itself"),
        (f"{COMPLAINT} import os; os.abort()", CaptureError, "newer than itself"),
        (f"{COMPLAINT} {SAID} raise SystemExit(3)", ConfigError, "A tool said: exit code 9."),
        ("print('exit code'); raise SystemExit(3)", UnexplainedEndError, "was ended with exit code 3"),
        (COMPLAINT, CaptureError, "newer than itself"),
        ("pass", CaptureError, "ended without an error"),
    ],
)
def test_who_says_most_is_heard(tmp_path: Path, code: str, kind: type[LlmPerfError], said: str) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.write_manifest(Manifest(SCHEMA, "0", "partial", "now", ("x",), (PassRecord("nsys"),)))
    plan = PassPlan("nsys", [sys.executable, "-c", code], 120)
    with pytest.raises(LlmPerfError) as caught:
        nsys_pass(folder, plan, Nobody(), NsysAsked(Path("nsys"), Expected(), 1.0))
    assert type(caught.value) is kind, caught.value
    assert said in caught.value.fact
    assert folder.manifest().passes[0].why == caught.value.fact

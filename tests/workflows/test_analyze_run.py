"""The reports of a run, written by the workflow."""

from pathlib import Path
from typing import Any

import pytest

from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.workflows.analyze_run import is_reported, report_run
from llm_perf_opt.workflows.run_reader import RunReader
from whole_runs import whole_run


def test_a_run_counts_as_reported_only_after_its_last_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed before any of the writes leaves a run that is reported again."""
    folder = whole_run(tmp_path / "run")
    written: list[str] = []

    def checked(name: str) -> None:
        plain = getattr(RunFolder, name)

        def write(self: RunFolder, path: Path, content: Any) -> None:
            assert not is_reported(folder), f"{path.name} is still to be written"
            written.append(path.name)
            plain(self, path, content)

        monkeypatch.setattr(RunFolder, name, write)

    checked("write")
    checked("write_record")
    report_run(RunReader(folder))
    assert {"findings.json", "ops.csv", "nvml.csv", "report.md"} <= {*written}
    assert is_reported(folder)

"""Searches that are stopped: what they leave, and how they continue."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from llm_perf_opt.analysis.comparison import statistics
from llm_perf_opt.cli.progress import QuietProgress
from llm_perf_opt.core.errors import Interrupted
from llm_perf_opt.workflows.tune import begin, tune
from llm_perf_opt.workflows.tune_folder import TuneOptions
from tuning_builders import FakeRuns, fake_base, fake_runtime, fake_settings


@pytest.fixture(scope="module", autouse=True)
def _fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with fake_runtime(tmp_path_factory.mktemp("fake") / "site"), patch.object(statistics, "DRAWS", 100):
        yield


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    return fake_settings()


@pytest.mark.parametrize("stop_at", ["base", "01-1-1"])
def test_the_command_that_continues_a_search_can_be_pasted(tmp_path: Path, values: dict[str, Any], stop_at: str) -> None:
    base = tmp_path / "my run; new"
    fake_base(base, values)
    folder = begin(base, TuneOptions(), [])
    runs = FakeRuns(folder.path, values, stop_at=stop_at)
    try:
        error = tune(folder, QuietProgress(), runs=runs, clock=runs.clock)[1]
    except Interrupted as raised:
        error = raised
    finally:
        folder.close()
    assert error is not None
    assert shlex.split(error.remedy.split("`")[1]) == ["llm-perf", "tune", str(base), "--resume"]

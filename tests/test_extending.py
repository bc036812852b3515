"""A finding, a metric and a trace format are added from one new file and a line in a registry, and are seen everywhere."""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from command import llm_perf
from llm_perf_opt.analysis.findings.registry import RULES
from llm_perf_opt.analysis.metrics import METRICS
from llm_perf_opt.report.definitions import metrics_page
from llm_perf_opt.traces.open_trace import FORMATS, TraceFormat
from whole_runs import whole_run

FINDING = '''
"""Finds the same in every run."""

from llm_perf_opt.analysis.findings.finding import Grounds, ToTry, finding
from llm_perf_opt.core.records import Missing


def always_there(evidence):
    """Something that every run has."""
    grounds = Grounds((f"{len(evidence.stages)} stages",), "high", "it was counted")
    change = ToTry(change="Change the test.")
    return finding("always_there", ("", 1), ("The test is a test.", "It always is."), grounds, Missing("nothing"), change)
'''
METRIC = '''
"""The time of the longest step."""

from llm_perf_opt.analysis.metrics import MetricDefinition
from llm_perf_opt.core.records import Missing
from llm_perf_opt.core.stages import Stage

LONGEST = MetricDefinition(
    "longest_step", "Longest decode step", "ns", "The largest of the gaps between tokens inside one request.",
    lambda iteration: max(iteration.steps_ns) if iteration.steps_ns else Missing("there is no step"),
    needs="steps", stage=Stage.DECODE, least_tokens=2,
)
'''
FORMAT = '''
"""A trace in lines of text: start, end and name of a kernel."""

from llm_perf_opt.core.user_files import read_text
from trace_builders import Builder


def read(path):
    """The trace in a file."""
    made = Builder()
    for line in read_text(path).splitlines()[1:]:
        start, end, name = line.split()
        made.launch(int(start) - 5, int(start), int(end), name)
    return made.trace()
'''


@pytest.fixture
def new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """A module that was not there before."""
    (tmp_path / "added_in_a_test.py").write_text(request.param)
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module("added_in_a_test")
    del sys.modules["added_in_a_test"]


@pytest.mark.parametrize("new_file", [FINDING], indirect=True)
def test_a_finding(tmp_path: Path, new_file: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_perf_opt.analysis.findings.registry.RULES", [*RULES, new_file.always_there])
    folder = whole_run(tmp_path / "run")
    done = llm_perf("report", folder.path)
    assert done.returncode == 0, done.stderr
    (kept,) = [one for one in json.loads(folder.findings_file.read_text())["findings"] if one["id"] == "always_there"]
    assert (kept["kind"], kept["headline"], kept["claim"]) == (
        "trust", "The test is a test.", "The test is a test. It always is."
    )  # fmt: skip
    for page in (folder.report_file, folder.page_file):
        assert all(text in page.read_text() for text in ("The test is a test.", "It always is."))
    assert "The test is a test." in llm_perf("advise", folder.path).stdout


@pytest.mark.parametrize("new_file", [METRIC], indirect=True)
def test_a_metric(tmp_path: Path, new_file: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    METRICS.append(new_file.LONGEST)
    try:
        folder = whole_run(tmp_path / "run", traces=False)
        shown = json.loads(llm_perf("report", folder.path, "--json").stdout)["metrics"]
        assert shown["longest_step"]["unit"] == "ns"
        assert shown["longest_step"]["value"]["median"] >= shown["itl_p50"]["value"]["median"]
        for page in (folder.report_file, folder.page_file):
            assert "Longest decode step" in page.read_text()
        assert "`longest_step`" in metrics_page()
        other = whole_run(tmp_path / "other", traces=False)
        _at_another_time(other.clean_file)
        words = ("compare", folder.path, other.path, "--gate", "decode.longest_step=5%", "--json")
        done = llm_perf(*words)
        assert "longest_step" in [row["key"] for row in json.loads(done.stdout)["metrics"]], done.stderr
    finally:
        METRICS.remove(new_file.LONGEST)


@pytest.mark.parametrize("new_file", [FORMAT], indirect=True)
def test_a_trace_format(tmp_path: Path, new_file: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    FORMATS.append(TraceFormat("lines", b"LINES\n", f"{new_file.__name__}:read"))
    try:
        trace = tmp_path / "trace.txt"
        trace.write_text("LINES\n100 150 a_kernel\n200 275 another_kernel\n")
        done = llm_perf("analyze", trace, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["gpu"]["kernel_ns"] == 125
        assert "another_kernel" in llm_perf("analyze", trace).stdout
        asked = llm_perf("sql", trace, "select sum(dur_ns) from kernels", "--csv")
        assert asked.stdout.split()[-1] == "125"
    finally:
        FORMATS.pop()


def _at_another_time(file: Path) -> None:
    """The same work later: a copy of a run is not compared with it."""
    found = json.loads(file.read_text())
    for one in found["iterations"]:
        one["started_ns"] += 7
    file.write_text(json.dumps(found))

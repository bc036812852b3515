"""Labels that are neither stages nor modules: by hand, in a torch trace, and on every page."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from builders import run_analysis
from llm_perf_opt.analysis.trace.document import LabelLine, TraceAnalysis
from llm_perf_opt.analysis.trace.labels import label_lines
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.core.records import Missing
from llm_perf_opt.report.trace_document import trace_text
from llm_perf_opt.traces.events import RangeKind
from llm_perf_opt.workflows.analyze_trace import analyze_source
from rendered import report, run_page
from trace_builders import THREAD, Builder


def lines(made: Builder) -> list[LabelLine]:
    trace = made.trace()
    return label_lines(trace, find_stages(trace))


def test_a_label_owns_what_was_launched_in_it_and_in_inner_ones() -> None:
    """forward 0–100 with routing inside twice; one routing is inside another and counts once; another thread also launches."""
    made = Builder()
    made.range(0, 100, "forward", domain=None)
    made.range(10, 40, "routing", domain=None)
    made.range(20, 30, "routing", domain=None)
    made.range(50, 60, "routing", domain="moe")
    made.launch(5, 200, 210)
    made.launch(25, 210, 230)
    made.launch(55, 230, 260)
    made.launch(26, 260, 300, thread=THREAD + 1)
    made.launch(120, 300, 400)
    assert lines(made) == [
        LabelLine("forward", 1, 100, 3, 10 + 20 + 30),
        LabelLine("moe@routing", 1, 10, 1, 30),
        LabelLine("routing", 2, 30, 1, 20),
    ]


def test_stages_and_modules_are_no_labels_of_the_program() -> None:
    made = Builder()
    made.range(0, 100, "prefill")
    made.range(10, 90, "nn.Module: Linear_0", domain=None)
    made.range(20, 80, "my label", domain=None)
    made.launch(30, 40, 50)
    assert lines(made) == [LabelLine("my label", 1, 60, 1, 10)]


def test_the_label_of_a_step_of_the_profiler_is_none_of_the_program() -> None:
    built = Builder()
    built.range(0, 300, "ProfilerStep#1", domain=None)
    built.range(0, 100, "prefill")
    built.range(110, 200, "mine", domain=None)
    built.launch(20, 30, 60)
    assert [line.name for line in lines(built)] == ["mine"]


def test_a_range_that_may_end_on_another_thread_has_no_kernels() -> None:
    made = Builder()
    made.range(0, 100, "request", kind=RangeKind.START_END)
    made.launch(30, 40, 50)
    assert lines(made) == [LabelLine("LLM@request", 1, 100, None, None)]
    assert lines(Builder()) == []


def event(cat: str, name: str, ts: float, dur: float, pid: int = 1, tid: int = 2, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


@pytest.fixture
def found(tmp_path: Path) -> TraceAnalysis:
    """A torch trace with labels of no dialect."""
    events = [event("user_annotation", "## preprocess ##", 0.0, 50.0), event("user_annotation", "capture_32", 100.0, 40.0)]
    for number, at in enumerate((10.0, 20.0, 110.0), 1):
        events.append(event("cuda_runtime", "cudaLaunchKernel", at, 1.0, correlation=number))
        where = {"device": 0, "stream": 7, "correlation": number, "grid": [1, 1, 1], "block": [32, 1, 1]}
        events.append(event("kernel", f"k{number}", at + 2, 5.0, 0, 7, **where))
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return analyze_source(path, use_cache=False).document


def test_labels_that_are_not_recognized_are_shown(found: TraceAnalysis) -> None:
    """In the terminal, in --json, in report.md and report.html."""
    assert found.stages == []
    assert [(line.name, line.calls, line.wall_ns, line.kernels, line.kernel_ns) for line in found.labels] == [
        ("## preprocess ##", 1, 50_000, 2, 10_000),
        ("capture_32", 1, 40_000, 1, 5_000),
    ]
    row = next(line for line in trace_text(found).splitlines() if line.startswith("## preprocess ##"))
    assert row.split()[3:] == ["1", "50.00", "µs", "2", "10.00", "µs"]
    analysis = run_analysis(trace=found)
    assert "Labels that are not stages" in report(analysis)
    assert "capture_32 | 1 | 40.00 µs | 1 | 5.000 µs" in report(analysis).replace("\\", "")
    page = run_page(analysis, Missing("none"), Missing("none"))
    assert 'id="labels"' in page
    assert "capture_32" in page
    assert "Labels that are not stages" not in report(run_analysis())


def test_many_labels_are_cut_on_pages_and_counted(found: TraceAnalysis) -> None:
    many = replace(found, labels=[LabelLine(f"label {place}", 1, 10, 0, 0) for place in range(130)])
    analysis = run_analysis(trace=many)
    for page in (report(analysis), run_page(analysis, Missing("none"), Missing("none"))):
        assert "label 99" in page
        assert "label 100" not in page
        assert "30 more are not shown" in page
    assert "115 more are not shown" in " ".join(trace_text(many).split())


def test_labels_are_not_called_missing_without_device_work() -> None:
    made = Builder()
    made.range(0, 100, "mine", domain=None)
    assert [line.name for line in lines(made)] == ["mine"]
    assert find_stages(made.trace()).why == "no stage labels and no device work"

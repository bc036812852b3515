"""Kernels by time, of the whole and of a stage."""

from pathlib import Path

import pytest

from llm_perf_opt.analysis.trace.stage_launches import kernels_by_time, stage_launches, substage_launches
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.core.stages import Stage
from llm_perf_opt.traces.events import WorkKind
from llm_perf_opt.traces.projection import project
from llm_perf_opt.traces.torch_json.trace import read_torch_trace
from synthetic_traces import Recipe, write_trace
from trace_builders import Builder

FIXTURES = Path(__file__).parents[2] / "fixtures" / "h200"


def test_by_hand() -> None:
    built = Builder()
    built.range(0, 50, "prefill")
    built.launch(1, 100, 130, "nvjet_a")
    built.launch(2, 130, 140, "silu_kernel")
    built.launch(60, 200, 220, "nvjet_a")
    built.launch(61, 300, 900, "Memcpy", kind=WorkKind.MEMCPY)
    trace = built.trace()
    assert [(row.name, str(row.kind), row.calls, row.total_ns, row.mean_ns, row.share) for row in kernels_by_time(trace)] == [
        ("nvjet_a", "GEMM", 2, 50, 25.0, 50 / 60),
        ("silu_kernel", "elementwise", 1, 10, 10.0, 10 / 60),
    ]
    inside = kernels_by_time(trace, find_stages(trace), "prefill")
    assert [(row.name, row.calls, row.share) for row in inside] == [("nvjet_a", 1, 0.75), ("silu_kernel", 1, 0.25)]
    assert kernels_by_time(trace, find_stages(trace), "decode") == ()


def test_a_stage_needs_the_stages() -> None:
    with pytest.raises(ValueError, match="stages"):
        kernels_by_time(Builder().trace(), stage="prefill")


def test_known_truth(tmp_path: Path) -> None:
    truth = write_trace(tmp_path / "trace.json", Recipe(streams=2, copies=True, seed=9))
    rows = kernels_by_time(read_torch_trace(tmp_path / "trace.json"))
    assert {row.name: [row.calls, row.total_ns] for row in rows} == dict(truth.by_name)
    assert [row.total_ns for row in rows] == sorted((row.total_ns for row in rows), reverse=True)


def test_a_real_trace() -> None:
    trace = read_torch_trace(FIXTURES / "torch_trace.json.gz")
    stages = find_stages(trace)
    rows = kernels_by_time(trace)
    assert sum(row.total_ns for row in rows) == 5_521_227
    assert sum(row.calls for row in rows) == 1711
    prefill, decode = (kernels_by_time(trace, stages, name) for name in ("prefill", "decode"))
    assert sum(row.calls for row in prefill) == 183
    assert sum(row.calls for row in decode) == 1528
    assert sum(row.share for row in decode) == pytest.approx(1)


def test_the_launches_of_a_sub_stage_are_those_inside_it_and_the_stage() -> None:
    built = Builder()
    built.range(0, 50, "prefill")
    built.range(10, 40, "vision")
    built.range(20, 30, "projector")
    built.range(60, 90, "decode_step")
    built.range(65, 75, "vision")
    for start, name in ((5, "embed"), (15, "attention"), (25, "product"), (45, "head"), (70, "late")):
        built.launch(start, 100 + start, 105 + start, name)
    trace = built.trace()
    projection = project(trace)
    names = [launch.name for launch in substage_launches(trace, projection, Stage.PREFILL, "vision")]
    assert names == ["attention", "product"]
    assert [launch.name for launch in substage_launches(trace, projection, Stage.PREFILL, "projector")] == ["product"]
    assert [launch.name for launch in substage_launches(trace, projection, Stage.DECODE_STEP, "vision")] == ["late"]
    assert substage_launches(trace, projection, Stage.PREFILL, "sam") == []
    assert len(stage_launches(trace, projection, Stage.PREFILL)) == 4

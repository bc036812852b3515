"""Operators and stage activity from a trace alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from llm_perf_opt.analysis.trace.operators import operator_rows, stage_activity_of
from llm_perf_opt.core.records import Missing
from llm_perf_opt.runners.measure.torch_profiler import operators
from llm_perf_opt.traces.events import NO_NAME, Operators, Trace
from llm_perf_opt.traces.torch_json.trace import read_torch_trace
from synthetic_traces import Recipe, write_trace
from trace_builders import PROCESS, THREAD, Builder


def example() -> Trace:
    """In prefill, linear contains mm, which launches twice, and another linear; add launches by itself."""
    built = Builder()
    built.range(0, 100, "prefill")
    built.launch(12, 200, 210, "gemm")
    built.launch(14, 210, 213, "splitk")
    built.launch(62, 230, 235, "add")
    rows = [(10, 30, "aten::linear"), (11, 19, "aten::mm"), (20, 25, "aten::linear"), (61, 65, "aten::add")]
    start, end = (np.array([row[place] for row in rows], np.int64) for place in range(2))
    name = np.array([built.name(row[2]) for row in rows], np.int32)
    same = np.ones(len(rows), np.int64)
    table = Operators(start, end, name, same * PROCESS, same * THREAD, np.full(len(rows), NO_NAME, np.int32))
    return replace(built.trace(), operators=table)


def test_self_total_and_calls_on_the_host() -> None:
    rows = {row.name: row for row in operator_rows(example(), on_gpu=False)}
    linear, mm = rows["aten::linear"], rows["aten::mm"]
    assert (linear.calls, linear.cpu_total_ns, linear.cpu_self_ns) == (2, 20, 12), (
        "the inner of two of a name is inside the outer"
    )
    assert (mm.calls, mm.cpu_total_ns, mm.cpu_self_ns) == (1, 8, 8)
    assert linear.device_self_ns == Missing("the run is on the CPU")
    assert sum(row.cpu_self_ns for row in rows.values()) == 20 + 4, "self times fill the outermost operators"


def test_device_time_belongs_to_the_operator_that_launched_it() -> None:
    found = operator_rows(example(), on_gpu=True)
    rows = {row.name: row for row in found}
    assert (rows["aten::mm"].device_self_ns, rows["aten::mm"].device_total_ns) == (13, 13)
    assert (rows["aten::linear"].device_self_ns, rows["aten::linear"].device_total_ns) == (0, 13)
    assert [row.name for row in found] == ["aten::mm", "aten::add", "aten::linear"], "the most device time comes first"


def test_stage_activity_of_an_example() -> None:
    found = stage_activity_of(example())
    assert not isinstance(found, Missing)
    assert [(row.stage, row.launches, row.kernels, row.kernel_ns) for row in found] == [("prefill", 3, 3, 18)]


@pytest.mark.parametrize(
    "recipe", [Recipe(), Recipe(graph=True), Recipe(streams=2, copies=True)], ids=["plain", "graph", "copies"]
)
def test_stage_activity_of_traces_whose_truth_is_known(tmp_path: Path, recipe: Recipe) -> None:
    truth = write_trace(tmp_path / "trace.json", recipe)
    found = stage_activity_of(read_torch_trace(tmp_path / "trace.json"))
    assert not isinstance(found, Missing)
    for row in found:
        (played,) = [stage for stage in truth.stages if stage.name == row.stage]
        assert (row.launches, row.kernels, row.kernel_ns) == (
            played.launches,
            len(played.work),
            sum(end - start for start, end in played.work),
        )


def test_a_trace_without_stages_has_a_reason() -> None:
    built = Builder()
    assert isinstance(stage_activity_of(built.trace()), Missing)


def test_the_table_is_the_one_torch_itself_makes(tmp_path: Path) -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True).eval()
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            layer(torch.randn(2, 5, 32)).softmax(-1).sum()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    expected = {row.name: row for row in operators(profiler.key_averages(), "minimal", cuda=False)}
    found = {row.name: row for row in operator_rows(read_torch_trace(tmp_path / "trace.json"), on_gpu=False)}
    assert len(expected) > 5
    assert {name: row.calls for name, row in found.items()} == {name: row.calls for name, row in expected.items()}
    for name, row in found.items():
        assert row.cpu_self_ns == pytest.approx(expected[name].cpu_self_ns, rel=0.02, abs=2000 * row.calls)

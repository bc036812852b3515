"""Kernel → call → operator → module → stage and step."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from llm_perf_opt.analysis.trace.attribution import attribute, modules_by_time, operators_by_time
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.traces.events import NO_NAME, Operators, Trace
from llm_perf_opt.traces.torch_json.trace import read_torch_trace
from synthetic_traces import Recipe, write_trace
from trace_builders import PROCESS, THREAD, Builder

FIXTURES = Path(__file__).parents[2] / "fixtures" / "h200"


def with_operators(built: Builder, operators: list[tuple[int, int, str]]) -> Trace:
    rows = [(start, end, built.name(name)) for start, end, name in sorted(operators, key=lambda row: (row[0], -row[1]))]
    count = len(rows)
    start, end, name = (np.array([row[place] for row in rows], np.int64) for place in range(3))
    same = np.full(count, 1, np.int64)
    table = Operators(start, end, name.astype(np.int32), same * PROCESS, same * THREAD, np.full(count, NO_NAME, np.int32))
    return replace(built.trace(), operators=table)


def example() -> Trace:
    """linear contains mm, which launches twice; add launches by itself; the last kernel has no operator."""
    built = Builder()
    built.range(0, 100, "prefill")
    built.range(5, 40, "nn.Module: Attention_0", "nn.Module")
    built.range(8, 30, "nn.Module: Linear_0", "nn.Module")
    built.range(60, 70, "part:norms", None)
    built.launch(12, 200, 210, "gemm")
    built.launch(14, 210, 213, "splitk")
    built.launch(36, 220, 224, "copy")
    built.launch(62, 230, 235, "add")
    built.launch(90, 240, 241, "stray")
    built.kernel(250, 260, "unlaunched")
    return with_operators(built, [(10, 20, "aten::linear"), (11, 19, "aten::mm"), (35, 38, "aten::copy_"), (61, 65, "aten::add")])


def test_each_level() -> None:
    trace = example()
    found = attribute(trace, find_stages(trace))
    names = [trace.name_of(int(trace.operators.name[row])) if row >= 0 else None for row in found.operator]
    assert names == ["aten::mm", "aten::mm", "aten::copy_", "aten::add", None, None]
    tops = [trace.name_of(int(trace.operators.name[row])) if row >= 0 else None for row in found.top_operator]
    assert tops == ["aten::linear", "aten::linear", "aten::copy_", "aten::add", None, None]
    modules = [found.modules[index] if index >= 0 else None for index in found.module]
    assert modules == ["Linear_0", "Linear_0", "Attention_0", "norms", None, None]
    assert found.stage.tolist() == [0, 0, 0, 0, 0, -1]
    assert found.step.tolist() == [-1] * 6
    assert found.coverage == {"launch": 23 / 33, "operator": 22 / 33, "module": 22 / 33, "stage": 23 / 33, "step": 0.0}


def test_self_and_total() -> None:
    trace = example()
    found = attribute(trace, find_stages(trace))
    assert [(row.name, row.calls, row.kernels, row.self_ns, row.total_ns) for row in operators_by_time(trace, found)] == [
        ("aten::mm", 1, 2, 13, 13),
        ("aten::add", 1, 1, 5, 5),
        ("aten::copy_", 1, 1, 4, 4),
        ("aten::linear", 1, 0, 0, 13),
    ]
    assert [(row.name, row.self_ns, row.total_ns) for row in modules_by_time(trace, found)] == [
        ("Linear_0", 13, 13),
        ("norms", 5, 5),
        ("Attention_0", 4, 17),
    ]


def test_an_operator_inside_one_of_its_own_name_is_counted_once() -> None:
    built = Builder()
    built.launch(12, 20, 30)
    trace = with_operators(built, [(0, 20, "aten::to"), (5, 18, "aten::_to_copy"), (10, 15, "aten::to")])
    found = attribute(trace, find_stages(trace))
    assert {row.name: (row.self_ns, row.total_ns) for row in operators_by_time(trace, found)} == {
        "aten::to": (10, 10),
        "aten::_to_copy": (0, 10),
    }


def test_layerwise_markers_of_servers_name_modules() -> None:
    built = Builder()
    built.range(0, 50, "{'Module': 'model.layers.0.mlp', 'TrainableParams': {'weight': [4, 4]}}", None)
    built.launch(12, 20, 30)
    trace = built.trace()
    assert attribute(trace, find_stages(trace)).modules == ("model.layers.0.mlp",)


def test_a_graphs_kernels_belong_to_the_operator_that_launched_it(tmp_path: Path) -> None:
    truth = write_trace(tmp_path / "trace.json", Recipe(graph=True))
    trace = read_torch_trace(tmp_path / "trace.json")
    found = attribute(trace, find_stages(trace))
    assert found.coverage["launch"] == 1
    assert found.coverage["stage"] == 1
    steps = [one for one in truth.stages if one.name == "decode_step"]
    assert len(set(found.step.tolist()) - {-1}) == len(steps)
    inside = found.step >= 0
    assert int((trace.work.end_ns - trace.work.start_ns)[inside].sum()) == sum(one.kernel_ns for one in steps)


def test_a_real_trace() -> None:
    trace = read_torch_trace(FIXTURES / "torch_trace.json.gz")
    found = attribute(trace, find_stages(trace))
    rows = operators_by_time(trace, found)
    assert found.coverage["operator"] == 1
    assert sum(row.self_ns for row in rows) == int((trace.work.end_ns - trace.work.start_ns).sum())
    assert sum(row.share for row in rows) == 1 or abs(sum(row.share for row in rows) - 1) < 1e-12
    assert (rows[0].name, rows[0].self_ns) == ("aten::mm", 2_442_460)
    linear = next(row for row in rows if row.name == "aten::linear")
    assert linear.self_ns == 0
    assert linear.total_ns > rows[0].self_ns, "it holds mm and addmm"


def test_nothing_at_all() -> None:
    trace = Builder().trace()
    found = attribute(trace, find_stages(trace))
    assert set(found.coverage.values()) == {None}
    assert operators_by_time(trace, found) == ()
    assert modules_by_time(trace, found) == ()

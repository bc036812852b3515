"""Host time of a trace without device work, by hand and of a model that torch profiled."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import clean_timings
from llm_perf_opt.analysis.evidence import RunFacts
from llm_perf_opt.analysis.trace.host_time import host_times
from llm_perf_opt.analysis.trace.operator_classes import HostRow
from llm_perf_opt.analysis.trace.operators import host_table
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.analysis.trace_analysis import document_of
from llm_perf_opt.report.trace_document import trace_text
from llm_perf_opt.traces.events import GPUS, NO_NAME, Operators, Trace
from llm_perf_opt.traces.torch_json.trace import read_torch_trace
from synthetic_traces import write_cpu_trace
from trace_builders import PROCESS, THREAD, Builder


def with_operators(built: Builder, rows: list[tuple[int, int, str, int]]) -> Trace:
    names = np.array([built.name(name) for _, _, name, _ in rows], np.int32)
    start, end, thread = (np.array([row[place] for row in rows], np.int64) for place in (0, 1, 3))
    process = np.full(len(rows), PROCESS, np.int64)
    return replace(built.trace(), operators=Operators(start, end, names, process, thread, np.full(len(rows), NO_NAME, np.int32)))


def test_time_inside_and_outside_operators_adds_up_to_the_wall_time() -> None:
    built = Builder()
    built.range(0, 1000, "prefill")
    built.range(1000, 1500, "decode")
    built.range(1100, 1200, "decode_step")
    built.range(1300, 1400, "decode_step")
    trace = with_operators(
        built,
        [
            (100, 500, "linear", THREAD),
            (200, 400, "mm", THREAD),
            (100, 900, "mm", THREAD + 1),  # another thread's: in the whole, in no stage
            (1110, 1160, "mm", THREAD),
            (1310, 1330, "mm", THREAD),
            (1450, 1460, "add", THREAD),
        ],
    )
    found = host_table(trace, find_stages(trace))
    stages = {one.name: one for one in found.stages}
    assert {name: (one.wall_ns, one.operator_ns, one.outside_ns) for name, one in stages.items()} == {
        "prefill": (1000, 400, 600),
        "decode": (500, 80, 420),
        "decode_step": (200, 70, 130),
    }
    assert [(row.name, row.calls, row.self_ns, row.total_ns) for row in stages["prefill"].operators] == [
        ("linear", 1, 200, 400),
        ("mm", 1, 200, 200),
    ]
    assert [(row.name, row.self_ns) for row in stages["decode"].operators] == [("mm", 70), ("add", 10)]
    assert [(row.name, row.calls, row.self_ns) for row in found.operators] == [
        ("mm", 4, 1070),
        ("linear", 1, 200),
        ("add", 1, 10),
    ]
    assert sum(row.share for row in found.operators) == pytest.approx(1)


def test_what_torch_runs_to_record_a_label_is_no_operator() -> None:
    built = Builder()
    built.range(0, 1000, "prefill")
    rows = [(100, 200, "profiler::_record_function_enter_new", THREAD), (300, 500, "mm", THREAD)]
    found = host_table(trace := with_operators(built, rows), find_stages(trace))
    assert [row.name for row in found.operators] == ["mm"]
    assert [row.name for row in found.stages[0].operators] == ["mm"]
    assert found.stages[0].operator_ns + found.stages[0].outside_ns == 1000


def test_a_decode_put_together_from_an_engines_steps_has_their_operators() -> None:
    built = Builder()
    for step in range(3):
        built.range(100 * step, 100 * step + 90, "step[DECODE bs=1]", domain=None)
    trace = with_operators(built, [(100 * step + 10, 100 * step + 50, "mm", THREAD) for step in range(3)])
    stages = {one.name: one for one in host_table(trace, find_stages(trace)).stages}
    assert (stages["decode"].wall_ns, stages["decode"].operator_ns) == (290, 120)
    assert (stages["decode_step"].wall_ns, stages["decode_step"].operator_ns) == (270, 120)


def test_it_agrees_with_the_profiler_itself(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile, record_function

    layer = torch.nn.Linear(64, 64)
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("prefill"):
        for _ in range(5):
            layer(torch.ones(8, 64)).softmax(-1)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = read_torch_trace(tmp_path / "trace.json")
    found = host_table(trace, find_stages(trace))
    told = {row.key: row for row in profiler.key_averages() if row.key.startswith("aten::")}
    assert {row.name: row.calls for row in found.operators} == {name: row.count for name, row in told.items()}
    for row in found.operators:
        assert row.self_ns == pytest.approx(told[row.name].self_cpu_time_total * 1000, abs=2000)
    (prefill,) = found.stages
    assert prefill.operator_ns == sum(row.self_ns for row in prefill.operators)
    assert prefill.operator_ns + prefill.outside_ns == prefill.wall_ns


def test_a_run_without_a_gpu_keeps_its_findings_about_trust() -> None:
    built = Builder()
    built.range(0, 1000, "prefill")
    noisy = RunFacts(timings=clean_timings(stable=False))
    found = document_of(with_operators(built, [(10, 20, "mm", THREAD)]), noisy, "x")
    assert {finding.id for finding in found.findings} == {"noisy_machine", "passes_disagree"}
    assert "Run both passes again" in trace_text(found)


# --- rows of a stage --------------------------------------------------------------------------------------------------


def test_every_nanosecond_has_one_row() -> None:
    built = Builder()
    built.range(0, 1000, "prefill")
    built.range(100, 400, "part:norms")
    built.range(500, 900, "part:mlp")
    rows = [
        (120, 200, "aten::mul", THREAD),
        (520, 820, "aten::linear", THREAD),
        (540, 560, "aten::t", THREAD),
        (600, 800, "aten::addmm", THREAD),
        (910, 950, "aten::cat", THREAD),
        (100, 990, "aten::mm", THREAD + 1),
    ]
    trace = with_operators(built, rows)
    (found,) = host_times(trace, find_stages(trace), smallest_ns=10)
    assert (found.stage, found.unit, found.units, found.wall_ns) == ("prefill", "prefill", 1, 1000)
    assert {row: ns for row, ns in found.rows.items() if ns} == {
        HostRow.NORM: 70,
        HostRow.MATMUL: 190,
        HostRow.MEMORY: 30,
        HostRow.FRAMEWORK: 80 + 20 + 30,  # linear, t, and the dispatch of three operators
        HostRow.PYTHON: 1000 - 80 - 300 - 40,
    }
    assert {row: number for row, number in found.events.items() if number} == {HostRow.PYTHON: 3, HostRow.FRAMEWORK: 2}
    assert (found.labels, found.stage_labels) == (2, 1)
    components = {name: sum(rows.values()) for name, rows in found.components.items()}
    assert components == {"norms": 300, "mlp": 400, "other": 300}
    assert found.components["mlp"][HostRow.PYTHON] == 100


def test_a_trace_without_stages_is_one_stage() -> None:
    trace = with_operators(Builder(), [(100, 200, "aten::mm", THREAD), (300, 350, "aten::add", THREAD)])
    (found,) = host_times(trace, find_stages(trace))
    assert (found.stage, found.wall_ns, found.rows[HostRow.PYTHON]) == ("trace", 250, 100)
    assert [table.stage for table in document_of(trace, RunFacts(), "x").budgets] == ["trace"]


INTERVAL = st.tuples(st.integers(0, 400), st.integers(0, 200), st.sampled_from(["aten::mm", "aten::linear", "aten::view", "odd"]))
LABEL = st.tuples(st.integers(0, 400), st.integers(0, 200), st.sampled_from(["part:mlp", "part:norms", "decode_step", "mine"]))


@given(st.lists(INTERVAL, min_size=1, max_size=30), st.lists(LABEL, max_size=8), st.integers(0, 20))
def test_rows_of_any_trace_sum_to_its_wall_time(
    operators: list[tuple[int, int, str]], labels: list[tuple[int, int, str]], smallest: int
) -> None:
    built = Builder()
    built.range(20, 300, "prefill")
    built.range(300, 500, "decode")
    for start, length, name in labels:
        built.range(start, start + length, name)
    rows = sorted((start, start + length, name, THREAD) for start, length, name in operators)
    trace = with_operators(built, sorted(rows, key=lambda row: (row[0], -row[1])))
    for found in host_times(trace, find_stages(trace), smallest):
        assert sum(found.rows.values()) == found.wall_ns
        assert min(found.rows.values()) >= 0
        for row in HostRow:
            if found.components:
                assert sum(rows[row] for rows in found.components.values()) == found.rows[row]
    for table in document_of(trace, RunFacts(), "x").budgets:
        assert sum(line.ns for line in table.rows) == table.wall_ns


@pytest.mark.parametrize("seed", range(8))
def test_rows_of_a_trace_whose_truth_is_known(tmp_path: Path, seed: int) -> None:
    truth = write_cpu_trace(tmp_path / "trace.json", seed)
    trace = read_torch_trace(tmp_path / "trace.json")
    found = {time.stage: time for time in host_times(trace, find_stages(trace))}
    assert {name: time.wall_ns for name, time in found.items()} == truth.wall_ns
    assert (found["prefill"].units, found["decode"].units) == (1, truth.steps)
    for name, time in found.items():
        assert {row.value: ns for row, ns in time.rows.items() if ns} == truth.rows[name]
        assert {row.value: number for row, number in time.events.items() if number} == truth.events[name]
        assert {part: sum(rows.values()) for part, rows in time.components.items()} == truth.components[name]
    tables = document_of(trace, RunFacts(), "x").budgets
    assert {table.stage: sum(line.ns for line in table.rows) for table in tables} == truth.wall_ns


def test_operators_without_duration_are_no_stage() -> None:
    trace = with_operators(Builder(), [(100, 100, "aten::mm", THREAD)])
    assert host_times(trace, find_stages(trace)) == []
    assert document_of(trace, RunFacts(), "x").budgets == []


def test_operators_of_the_profiler_are_not_work() -> None:
    built = Builder()
    built.range(0, 100, "prefill")
    trace = with_operators(built, [(10, 60, "profiler::_record_function_enter_new", THREAD), (70, 80, "aten::mm", THREAD)])
    (found,) = host_times(trace, find_stages(trace))
    assert {row: ns for row, ns in found.rows.items() if ns} == {HostRow.MATMUL: 10, HostRow.PYTHON: 90}
    assert sum(found.events.values()) == 1


def test_a_run_on_a_gpu_without_kernels_is_not_taken_for_a_run_on_the_cpu() -> None:
    built = Builder()
    built.range(0, 1000, "decode")
    timings = clean_timings()
    facts = RunFacts(timings=replace(timings, model=replace(timings.model, device="cuda:0")))
    found = document_of(with_operators(built, [(10, 20, "mm", THREAD)]), facts, "x")
    assert (found.device, found.budgets) == ("", [])
    assert "no_device_work" in {problem.id for problem in found.problems}


@pytest.mark.parametrize("gpus", ["0", "1", ""])
def test_no_device_is_missed_where_there_was_none(gpus: str) -> None:
    """A run says where it was; a trace may say that its process had no GPU."""
    built = Builder()
    built.range(0, 1000, "decode")
    trace = with_operators(built, [(10, 20, "mm", THREAD)])
    trace = replace(trace, facts={**trace.facts, **({GPUS: gpus} if gpus else {})})

    def noted(facts: RunFacts) -> bool:
        return "no_device_work" in {problem.id for problem in document_of(trace, facts, "x").problems}

    assert not noted(RunFacts(timings=clean_timings()))
    assert noted(RunFacts()) == (gpus != "0")

"""Host time of a trace without device work, by hand and of a model that torch profiled."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from builders import clean_timings
from llm_perf_opt.analysis.evidence import RunFacts
from llm_perf_opt.analysis.trace.operators import host_table
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.analysis.trace_analysis import document_of
from llm_perf_opt.report.trace_document import trace_text
from llm_perf_opt.traces.events import NO_NAME, Operators, Trace
from llm_perf_opt.traces.torch_json.trace import read_torch_trace
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
    assert [finding.id for finding in found.findings] == ["noisy_machine"]
    assert "noisy_machine" in trace_text(found)

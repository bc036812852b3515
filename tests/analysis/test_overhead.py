"""The profiler's own work is not an operator; it is shown with the overhead of the passes."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from builders import MS, clean_timings, in_a_row, operator, run_analysis, torch_pass
from llm_perf_opt.analysis.evidence import RunFacts, _changed
from llm_perf_opt.analysis.overhead import PROFILER_EVENTS, AddedTime, overheads, without_profiler_events
from llm_perf_opt.core.engine_records import ChangedEngine, EngineSetting
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.report.run_tables import operators_table, passes_table
from llm_perf_opt.runners.measure.torch_profiler import is_own_work, operators_of
from llm_perf_opt.traces.torch_json.trace import read_torch_trace
from rendered import operators_page, report, stakeholder_summary

FULL = operator("Command Buffer Full", calls=7, cpu_total_ns=9 * MS, cpu_self_ns=9 * MS, device_self_ns=90 * MS)
PRODUCT = operator("aten::mm", device_self_ns=5 * MS)


def test_events_of_the_profiler_are_taken_out_of_a_run_that_was_captured_with_them() -> None:
    found = without_profiler_events(torch_pass(operators=(FULL, PRODUCT)))
    assert (found.operators, found.overhead) == ((PRODUCT,), (FULL,))
    assert without_profiler_events(found) == found, "once"
    assert without_profiler_events(torch_pass(operators=(PRODUCT,))) == torch_pass(operators=(PRODUCT,))


@pytest.mark.parametrize("name", [*sorted(PROFILER_EVENTS), "profiler::_record_function_enter_new"])
def test_no_page_calls_them_operators(name: str) -> None:
    torch = without_profiler_events(torch_pass(operators=(operator(name, device_self_ns=90 * MS), PRODUCT)))
    analysis = run_analysis(torch=torch, overheads=overheads(None, torch, {}))
    assert "is aten::mm" in stakeholder_summary(analysis)
    assert name not in operators_page(analysis)
    assert [row[0].text for row in operators_table(torch.operators).rows] == ["aten::mm"]
    before, _, passes = report(analysis).partition("**Passes**")
    assert name not in before
    assert name in passes.replace("\\", "")


def test_their_time_and_number_stand_with_the_overhead_of_the_pass() -> None:
    flush = operator("Buffer Flush", calls=2, cpu_total_ns=MS, cpu_self_ns=MS)
    torch = torch_pass(overhead=(FULL, flush))
    (found,) = overheads(None, torch, {})
    assert found.own == (FULL, flush)
    assert "10.00 ms in 9 events" in found.own_words
    assert "Command Buffer Full 9.000 ms (7)" in found.own_words
    analysis = run_analysis(torch=torch, overheads=(found,))
    assert found.own_words in passes_table(analysis).foot
    assert "10.00 ms in 9 events" in report(analysis)
    assert overheads(None, Missing("not run"), {}) == ()
    assert "own work" not in passes_table(run_analysis(overheads=overheads(None, torch_pass(), {}))).foot


@pytest.mark.parametrize("name", ["Resource", "Instrumentation"])
def test_a_label_of_a_common_word_stays(name: str) -> None:
    found = torch_pass(operators=(operator(name), PRODUCT))
    assert without_profiler_events(found) == found
    assert not is_own_work(SimpleNamespace(key=name, is_user_annotation=True))
    assert is_own_work(SimpleNamespace(key=name, is_user_annotation=False))
    assert not is_own_work(SimpleNamespace(key="aten::mm", is_user_annotation=False))
    assert not is_own_work(SimpleNamespace(key=name)), "an older torch does not say"


IN_PROCESS = EngineSetting("VLLM_ENABLE_V1_MULTIPROCESSING", "0", "ranges enclose the work")
CHANGED = ChangedEngine((IN_PROCESS,), {"prefill": 110 * MS, "decode": 33 * MS}, decode_steps=2, repeats=5)


def test_what_a_pass_changed_in_an_engine_is_compared_with_as_many_unprofiled_steps() -> None:
    timings = clean_timings()  # prefill 100 ms; steps of 10, 20 and 30 ms
    torch = torch_pass(engine=CHANGED)
    (found,) = overheads(timings, torch, {})
    assert found.changes is not None
    assert (found.changes.clean_step_ns, found.changes.step_ns) == (15 * MS, 16.5 * MS)
    assert added(found.changes.added_step).ns == 1.5 * MS
    assert added(found.changes.added_prefill).ns == 10 * MS
    assert overheads(timings, torch_pass(), {})[0].changes is None


def added(time: Maybe[AddedTime]) -> AddedTime:
    assert not isinstance(time, Missing)
    return time


@pytest.mark.parametrize(
    ("prefills", "ends", "distinguishable"),
    [
        ((107, 108, 109, 111, 112, 113), (7, 13), True),
        ((94, 108, 109, 111, 112, 113), (-6, 13), False),
        ((81, 82, 83, 84, 85, 86), (-19, -14), True),
        ((), None, True),
    ],
    ids=["longer", "within the spread", "shorter", "of an older run"],
)
def test_the_cost_of_changes_has_a_spread(prefills: tuple[int, ...], ends: tuple[int, int] | None, distinguishable: bool) -> None:
    """Every unprofiled prefill takes 100 ms."""
    samples = {"prefill": tuple(ms * MS for ms in prefills)} if prefills else {}
    (found,) = overheads(
        clean_timings(in_a_row(8, 100 * MS, [10 * MS] * 3)), torch_pass(engine=replace(CHANGED, samples_ns=samples)), {}
    )
    assert found.changes is not None
    cost = added(found.changes.added_prefill)
    assert (None if isinstance(cost.ends_ns, Missing) else tuple(end / MS for end in cost.ends_ns)) == ends
    assert cost.distinguishable is distinguishable
    facts = RunFacts(overheads=(found,), trace_pass="torch")
    assert (_changed("prefill", "prefill", facts) is not None) is distinguishable


def test_a_time_that_is_missing_has_no_cost() -> None:
    nothing = replace(CHANGED, stage_wall_ns={}, decode_steps=0)
    (found,) = overheads(clean_timings(), torch_pass(engine=nothing), {})
    assert found.changes is not None
    assert isinstance(found.changes.added_prefill, Missing)
    assert isinstance(found.changes.added_step, Missing)
    (alone,) = overheads(None, torch_pass(engine=CHANGED), {})
    assert alone.changes is not None
    assert (alone.changes.step_ns, isinstance(alone.changes.added_step, Missing)) == (16.5 * MS, True)


@pytest.mark.parametrize(
    ("stage", "unit", "trace", "expected"),
    [
        ("decode", "token", "torch", 1.5 * MS),
        ("prefill", "prefill", "torch", 10 * MS),
        ("decode", "decode", "torch", None),
        ("step", "step", "torch", None),
        ("decode", "token", "nsys", None),
    ],
    ids=["per token", "per prefill", "no steps", "another stage", "another pass"],
)
def test_the_budget_of_a_trace_knows_what_its_pass_added(stage: str, unit: str, trace: str, expected: float | None) -> None:
    costs = overheads(clean_timings(), torch_pass(engine=CHANGED), {})
    found = _changed(stage, unit, RunFacts(overheads=costs, trace_pass=trace))
    assert (None if found is None else found.ns) == expected


def test_changes_that_shorten_a_step_are_negative() -> None:
    costs = overheads(clean_timings(), torch_pass(engine=replace(CHANGED, stage_wall_ns={"prefill": MS, "decode": 2 * MS})), {})
    found = _changed("decode", "token", RunFacts(overheads=costs, trace_pass="torch"))
    assert found is not None
    assert found.ns == -14 * MS


CUPTI = ("Command Buffer Full", "Activity Buffer Request", "Buffer Flush", "Instrumentation", "Resource")


def test_the_profilers_own_time_in_a_trace_is_no_operator(tmp_path: Path) -> None:
    common = {"ph": "X", "pid": 1, "tid": 1, "dur": 5}
    events = [{**common, "cat": "overhead", "name": name, "ts": 10 * at} for at, name in enumerate(CUPTI)]
    events.append({**common, "cat": "cpu_op", "name": "aten::mm", "ts": 100, "args": {"Input Dims": [[1, 2], [2, 3]]}})
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    found = read_torch_trace(file)
    assert [found.name_of(int(name)) for name in found.operators.name] == ["aten::mm"]
    assert len(found.calls) == len(found.work) == len(found.ranges) == 0


def test_the_profilers_own_time_is_no_operator_of_a_users_profiler() -> None:
    from torch._C._autograd import DeviceType

    times = dict.fromkeys(("cpu_time_total", "self_cpu_time_total", "device_time_total", "self_device_time_total"), 1.0)
    rows = [
        SimpleNamespace(key=name, is_user_annotation=False, device_type=DeviceType.CPU, count=1, flops=0, **times)
        for name in (*CUPTI, "aten::mm")
    ]
    profiler = SimpleNamespace(activities=(), profile_memory=False, key_averages=lambda: rows)
    assert [row.name for row in operators_of(profiler)] == ["aten::mm"]

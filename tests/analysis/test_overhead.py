"""The profiler's own work is not an operator; it is shown with the overhead of the passes."""

from types import SimpleNamespace

import pytest

from builders import MS, operator, run_analysis, torch_pass
from llm_perf_opt.analysis.overhead import PROFILER_EVENTS, overheads, without_profiler_events
from llm_perf_opt.core.records import Missing
from llm_perf_opt.report.run_tables import operators_table, passes_table
from llm_perf_opt.runners.measure.torch_profiler import is_own_work
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

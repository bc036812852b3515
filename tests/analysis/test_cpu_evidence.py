"""The evidence of a program on the CPU: roofline time and waiting cover as many units as the trace."""

from dataclasses import replace

import numpy as np
import pytest

from builders import MS, clean_timings, default_config, in_a_row, torch_pass
from llm_perf_opt.analysis.budget import BudgetKey
from llm_perf_opt.analysis.cpu_evidence import gather_cpu
from llm_perf_opt.analysis.evidence import HostStageEvidence, RunFacts
from llm_perf_opt.analysis.limits.efficiency import efficiency
from llm_perf_opt.analysis.limits.hardware import hardware_named
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.core.records import Maybe, Missing, TorchPass
from llm_perf_opt.traces.events import NO_NAME, Operators
from trace_builders import PROCESS, THREAD, Builder

NO_PASS = Missing("there is no torch pass")


def prefill_of(prefills: int, torch: Maybe[TorchPass] = NO_PASS, ran_ms: int = 90) -> HostStageEvidence:
    """Evidence of a trace with some prefills of 100 ms, all of it one product; 10 ms of each were spent waiting."""
    built = Builder()
    starts = [number * 200 * MS for number in range(prefills)]
    for start in starts:
        built.range(start, start + 100 * MS, "prefill")
    name, same = built.name("aten::mm"), np.ones(prefills, np.int64)
    start_ns = np.array(starts, np.int64)
    table = Operators(start_ns, start_ns + 100 * MS, same.astype(np.int32) * name, same * PROCESS, same * THREAD,
                      np.full(prefills, NO_NAME, np.int32))  # fmt: skip
    trace = replace(built.trace(), operators=table)
    timings = clean_timings([replace(each, prefill_cpu_ns=ran_ms * MS) for each in in_a_row(10)])
    timings = replace(timings, model=replace(timings.model, architecture=default_config().model.architecture))
    distance = efficiency(timings, Missing("none"), hardware_named("h100_sxm"), Missing("not measured"))
    facts = RunFacts(timings=timings, efficiency=distance, torch=torch)
    found = gather_cpu(trace, find_stages(trace), facts).cpu_stage("prefill")
    assert found is not None
    return found


def test_roofline_time_and_waiting_are_those_of_all_prefills_in_the_trace() -> None:
    one, three = prefill_of(1), prefill_of(3)
    assert (one.units, three.units) == (1, 3)
    for key in (BudgetKey.ROOFLINE, BudgetKey.WAITING):
        assert one.budget.ns(key) > 0
        assert three.budget.ns(key) == pytest.approx(3 * one.budget.ns(key), abs=3)
    assert sum(row.ns for row in three.budget.rows) == three.budget.wall_ns == 3 * one.budget.wall_ns


def test_a_stage_that_waits_longer_than_its_trace_lasts_still_has_its_operators() -> None:
    """An engine's trace of 100 ms, of a stage of 400 ms, in which the thread ran for a tenth of the time, as without profiler."""
    torch = torch_pass(stage_wall_ns={"prefill": 400 * MS}, stage_cpu_ns={"prefill": 40 * MS})
    found = prefill_of(1, torch, ran_ms=10).budget
    assert (found.ns(BudgetKey.WAITING), found.ns(BudgetKey.NOT_IN_TRACE)) == (90 * MS, 0)
    assert found.ns(BudgetKey.MATMUL) + found.ns(BudgetKey.ROOFLINE) == 10 * MS
    assert not found.problems

"""Findings for a program on the CPU: when they apply, and the time that they predict."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from builders import MS, clean_timings, default_config, in_a_row, workload
from llm_perf_opt.analysis.budget import BudgetKey, BudgetRow, StageBudget
from llm_perf_opt.analysis.evidence import Evidence, HostStageEvidence, RunFacts
from llm_perf_opt.analysis.findings.registry import find
from llm_perf_opt.analysis.limits.efficiency import efficiency
from llm_perf_opt.analysis.limits.hardware import hardware_named
from llm_perf_opt.analysis.stats import summarize
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.trace.host_time import HostTime
from llm_perf_opt.analysis.trace.operator_classes import HostRow
from llm_perf_opt.core.machine_records import CeilingRow, Ceilings
from llm_perf_opt.core.records import Missing

STEPS = 10


def ceilings(**times_ms: float) -> Ceilings:
    rows = tuple(CeilingRow(key, key, "ns", summarize([ms * MS] * 9), "measured") for key, ms in times_ms.items())
    none = Missing("the run is on the CPU")
    return Ceilings("cpu", "a CPU", "id", none, "2.13", 2, "2026-01-01T00:00:00+00:00", 6.0, 5.0, (), rows)


def evidence(rows: Mapping[HostRow, int], by_name: Mapping[str, tuple[int, int]] | None = None, **facts: Any) -> Evidence:
    """Decode of ten steps with these rows, in ns over all steps."""
    wall, none = sum(rows.values()), dict.fromkeys(HostRow, 0)
    time = HostTime("decode", "token", STEPS, wall, {**none, **rows}, none, 0, 0, {**none, HostRow.MATMUL: 100}, by_name or {})
    budget = StageBudget("decode", STEPS, wall, "the unprofiled pass", wall, (BudgetRow(BudgetKey.MATMUL, wall, 1.0),))
    stage = HostStageEvidence(name="decode", unit="token", units=STEPS, budget=budget, unprofiled=True, time=time, rows=rows)
    timings = clean_timings(in_a_row(10, 5 * MS, [wall // STEPS] * STEPS))
    config = {"runtime": {"type": "pytorch", "cache": "dynamic", "compile": "none"}}
    return Evidence((), RunFacts(**{"timings": timings, "config": config, **facts}), "labels", (stage,))


def found(id: str, given: Evidence) -> Finding | None:
    return next((finding for finding in find(given) if finding.id == id), None)


BOUND = {HostRow.MATMUL: 20 * MS, HostRow.ELEMENTWISE: 10 * MS, HostRow.FRAMEWORK: 30 * MS, HostRow.PYTHON: 40 * MS}


def test_compiling_removes_overhead_and_fuses_operators() -> None:
    finding = found("framework_bound_decode", evidence(BOUND))
    assert finding is not None
    assert finding.overrides == ["runtime.compile=default", "runtime.cache=static"]
    assert finding.before_ns == 10 * MS
    assert finding.after_ns == pytest.approx(2 * MS + 0.4 * 8 * MS, rel=0.01)
    assert finding.after_low_ns < finding.after_ns < finding.after_high_ns  # type: ignore[operator]


def test_a_machine_without_a_compiler_is_told_how_to_get_one() -> None:
    finding = found("framework_bound_decode", evidence(BOUND, env={"compiler": "n/a: there is no g++"}))
    assert finding is not None
    assert finding.overrides == []
    assert "there is no g++" in finding.change


@pytest.mark.parametrize(
    "given",
    [
        evidence({HostRow.MATMUL: 99 * MS, HostRow.PYTHON: 1 * MS}),
        evidence(BOUND, config={"runtime": {"type": "pytorch", "cache": "static", "compile": "default"}}),
        evidence({**BOUND, HostRow.COMPILED: MS}),
    ],
    ids=["little overhead", "compiled already", "compiled code in the trace"],
)
def test_no_compiling_where_there_is_nothing_to_gain(given: Evidence) -> None:
    assert found("framework_bound_decode", given) is None


def test_no_compiling_without_operators() -> None:
    """A trace of 10 collectives and nothing else: that Python ran between them is not known."""
    given = evidence({HostRow.PYTHON: 99 * MS, HostRow.FRAMEWORK: 1 * MS})
    (stage,) = given.on_cpu
    none = replace(stage.time, calls=dict.fromkeys(HostRow, 0))
    assert found("framework_bound_decode", given) is not None
    assert found("framework_bound_decode", replace(given, on_cpu=(replace(stage, time=none),))) is None


def test_another_format_is_proposed_if_it_was_measured_to_be_faster() -> None:
    measured = ceilings(model_gemv_fp32=1.0, model_gemv_bf16=0.5, model_gemv_fp16=3.0, model_gemv_int8=0.25)
    rows = {HostRow.MATMUL: 80 * MS, HostRow.PYTHON: 20 * MS}
    dtype = found("slow_dtype", evidence(rows, ceilings=measured))
    int8 = found("int8_weights", evidence(rows, ceilings=measured))
    assert dtype is not None
    assert int8 is not None
    assert (dtype.overrides, dtype.after_ns) == (["model.dtype=bf16"], 10 * MS - 4 * MS)
    assert (int8.overrides, int8.after_ns) == (["runtime.quantization=int8"], 10 * MS - 6 * MS)
    engine = {"runtime": {"type": "vllm", "cache": "dynamic", "compile": "none"}}
    assert found("slow_dtype", evidence(rows, ceilings=measured, config=engine)) is None, "its kernels were not measured"
    slower = ceilings(model_gemv_fp32=1.0, model_gemv_bf16=5.0, model_gemv_int8=1.0)
    assert found("slow_dtype", evidence(rows, ceilings=slower)) is None
    assert found("int8_weights", evidence(rows, ceilings=slower)) is None


@pytest.mark.parametrize(("times", "best"), [((1.0, 2.0, 4.0), 1), ((4.0, 2.0, 1.0), 4), ((4.0, 1.0, 1.0), None)])
def test_the_number_of_threads(times: tuple[float, float, float], best: int | None) -> None:
    keys = ("threads_1_model_gemv", "threads_2_model_gemv", "threads_4_model_gemv")
    given = evidence({HostRow.MATMUL: 100 * MS}, ceilings=ceilings(**dict(zip(keys, times, strict=True))))
    finding = found("thread_count", given)
    assert (finding.overrides if finding else None) == ([f"hardware.threads={best}"] if best else None)


def test_a_growing_cache_is_noticed_by_its_concatenations() -> None:
    rows = {HostRow.MATMUL: 40 * MS, HostRow.MEMORY: 60 * MS}
    cats = {"aten::cat": (2 * STEPS, 45 * MS)}
    finding = found("growing_cache", evidence(rows, cats))
    assert finding is not None
    assert finding.overrides == ["runtime.cache=static"]
    assert (finding.saving_ns, finding.saving_high_ns) == (2.25 * MS, 4.5 * MS), "half of it may be position embeddings"
    assert found("growing_cache", evidence(rows, {"aten::copy_": (2 * STEPS, 45 * MS)})) is None
    engine = {"runtime": {"type": "vllm", "cache": "dynamic", "compile": "none"}}
    assert found("growing_cache", evidence(rows, cats, config=engine)) is None, "an engine has its own cache"
    more = found("growing_cache", evidence(rows, {"aten::cat": (2 * STEPS, 999 * MS)}))
    assert more is not None
    assert more.saving_high_ns == 6 * MS, "not more than the row contains"


def test_a_longer_attention_is_subtracted_from_what_a_static_cache_saves() -> None:
    rows = {HostRow.ATTENTION: 20 * MS, HostRow.MEMORY: 60 * MS, HostRow.MATMUL: 20 * MS}
    finding = found("growing_cache", evidence(rows, {"aten::cat": (2 * STEPS, 60 * MS)}))
    assert finding is not None
    prompt = workload().padded_tokens
    longer = 2 * MS * ((prompt + STEPS + 1) / (prompt + STEPS / 2) - 1)
    assert finding.saving_ns == pytest.approx(3 * MS - longer, rel=0.01)


def test_unfused_attention_is_proposed_to_be_fused() -> None:
    given = evidence({HostRow.ATTENTION: 50 * MS, HostRow.MATMUL: 50 * MS})
    stage = replace(given.on_cpu[0].time, components={"attention_core": {HostRow.ATTENTION: 50 * MS}})
    timings = clean_timings(in_a_row(10, 5 * MS, [10 * MS] * STEPS))
    facts = replace(given.facts, timings=replace(timings, model=replace(timings.model, attention="eager")))
    eager = replace(given, facts=facts, on_cpu=(replace(given.on_cpu[0], time=stage),))
    finding = found("unfused_attention", eager)
    assert finding is not None
    assert (finding.overrides, finding.saving_ns) == (["runtime.attn_implementation=sdpa"], 2.5 * MS)
    assert found("unfused_attention", given) is None


def test_one_thread_per_core_is_pinned() -> None:
    measured = replace(ceilings(threads_2_model_gemv=4.0, threads_1_model_gemv=1.0), core_cpus=(0,), processors=2)
    finding = found("thread_count", evidence({HostRow.MATMUL: 100 * MS}, ceilings=measured))
    assert finding is not None
    assert [override.replace("'", "") for override in finding.overrides] == ["hardware.threads=1", "hardware.cpus=0"]


def test_a_larger_batch_costs_the_work_that_grows() -> None:
    timings = clean_timings(in_a_row(10, 5 * MS, [10 * MS] * STEPS))
    timings = replace(timings, model=replace(timings.model, architecture=default_config().model.architecture))
    distance = efficiency(timings, Missing("no torch pass"), hardware_named("h100_sxm"), Missing("not measured"))
    rows = {HostRow.MATMUL: 20 * MS, HostRow.PYTHON: 80 * MS}
    finding = found("small_batch_on_cpu", evidence(rows, efficiency=distance, timings=timings))
    assert finding is not None
    assert finding.throughput is not None
    assert finding.overrides == [f"runtime.batch_size={finding.throughput.batch_after}"]
    assert 10 * MS < finding.throughput.step_after_ns < finding.throughput.step_after_high_ns
    assert finding.throughput.step_after_high_ns == pytest.approx(10 * MS + 7 * 2 * MS, rel=0.01)

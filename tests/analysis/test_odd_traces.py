"""Traces as odd as programs make them, each with its truth worked out by hand: health, stages, accounts, findings."""

from collections.abc import Callable

import pytest

from llm_perf_opt.analysis.evidence import RunFacts
from llm_perf_opt.analysis.trace.document import BudgetTable, StageLine, TraceAnalysis
from llm_perf_opt.analysis.trace_analysis import document_of
from trace_builders import THREAD, Builder

US = 1000
STEP = 100 * US
"""From step to step."""


def told(built: Builder) -> TraceAnalysis:
    found = document_of(built.trace(), RunFacts(), "odd")
    assert found.complete
    check_sums(found)
    return found


def check_sums(found: TraceAnalysis) -> None:
    """What holds of every trace."""
    gpu = found.gpu
    assert gpu.busy_ns is not None
    assert gpu.idle_ns is not None
    assert gpu.busy_ns + gpu.idle_ns == gpu.span_ns
    assert sum(line.ns for line in found.idle) == gpu.idle_ns
    assert sum(device.kernels for device in found.devices) == gpu.kernels
    for device in found.devices:
        assert device.busy_ns + device.idle_ns == device.span_ns
    for stage in found.stages:
        if stage.gpu_busy_ns is not None and stage.idle_ns is not None:
            assert stage.gpu_busy_ns + stage.idle_ns == stage.span_ns
    for budget in found.budgets:
        assert sum(row.ns for row in budget.rows) == budget.wall_ns
    for finding in found.findings:
        if finding.saving_ns is None:
            continue
        assert finding.saving_low_ns is not None
        assert finding.saving_high_ns is not None
        budget = budget_of(found, finding.stage)
        assert 0 <= finding.saving_low_ns <= finding.saving_ns <= finding.saving_high_ns <= -(-budget.wall_ns // budget.units)


def budget_of(found: TraceAnalysis, stage: str) -> BudgetTable:
    return next(budget for budget in found.budgets if budget.stage == stage)


def stage_of(found: TraceAnalysis, name: str) -> StageLine:
    return next(stage for stage in found.stages if stage.name == name)


def ids(found: TraceAnalysis) -> set[str]:
    return {finding.id for finding in found.findings}


def test_two_workers_with_a_device_each() -> None:
    """Eight steps of five kernels of 5 µs on each of two devices, launched by a thread each at the same time."""
    built = Builder()
    for step in range(8):
        for worker in range(2):
            at = step * STEP
            built.range(at, at + 90 * US, "decode_step", thread=THREAD + worker)
            for kernel in range(5):
                now = at + kernel * 15 * US
                built.launch(now, now + 5 * US, now + 10 * US, f"nvjet_{kernel}", thread=THREAD + worker, device=worker)
    found = told(built)
    assert (found.gpu.kernels, found.gpu.kernel_ns, found.gpu.busy_ns) == (80, 400 * US, 200 * US)
    assert [(one.busy_ns, one.span_ns) for one in found.devices] == [(200 * US, 765 * US)] * 2
    steps = stage_of(found, "decode_step")
    assert (steps.count, steps.gpu_busy_ns, steps.kernels) == (16, 400 * US, 80)
    decode = budget_of(found, "decode")
    assert decode.wall_ns / decode.units == pytest.approx((7 * STEP + 90 * US) / 8)  # of one token, whoever computes it
    assert any("2 threads label the stage at the same time" in note for note in decode.notes)
    finding = next(one for one in found.findings if one.id == "launch_bound_decode")
    assert finding.saving_high_ns == round(decode.wall_ns / 16 - 25 * US)  # a token's five kernels on one device stay


def test_one_thread_that_feeds_two_devices() -> None:
    """The second device starts 2 µs after the first: together they cover 7 µs where each covers 5."""
    built = Builder()
    for step in range(8):
        at = step * STEP
        built.range(at, at + 90 * US, "decode_step")
        for kernel in range(5):
            for device in range(2):
                now = at + kernel * 15 * US + device * 2 * US
                built.launch(now, now + 5 * US, now + 10 * US, f"nvjet_{kernel}", device=device)
    found = told(built)
    assert (found.gpu.busy_ns, found.gpu.kernel_ns) == (8 * 5 * 7 * US, 400 * US)
    assert [one.busy_ns for one in found.devices] == [200 * US] * 2
    assert [stage.busy_ns for stage in found.devices[1].stages if stage.name == "decode"] == [200 * US]
    decode = budget_of(found, "decode")
    assert (decode.units, decode.busy_ns) == (8, 280 * US)
    assert any("at least one of the stage's 2 devices" in note for note in decode.notes)
    finding = next(one for one in found.findings if one.id == "launch_bound_decode")
    assert finding.saving_high_ns == round((decode.wall_ns - 200 * US) / 8)  # the kernels of one device stay, not of both


def test_three_streams_that_overlap() -> None:
    """Three rounds of three kernels of 24 µs, 2 µs apart: 28 µs a round, 3 × 28 − 2 × 3 shared with the next."""
    built = Builder()
    for step in range(8):
        at = step * STEP
        built.range(at, at + 90 * US, "decode_step")
        for kernel in range(9):
            start = at + 10 * US + (kernel // 3) * 25 * US + (kernel % 3) * 2 * US
            built.launch(at + kernel * 2 * US, start, start + 24 * US, "CatArrayBatchedCopy", stream=7 + kernel % 3)
    found = told(built)
    assert (found.gpu.busy_ns, found.gpu.kernel_ns) == (8 * 78 * US, 8 * 9 * 24 * US)
    decode = budget_of(found, "decode")
    copied = next(one for one in found.findings if one.id == "cache_concatenation")
    assert copied.saving_ns is not None
    assert copied.saving_ns < decode.busy_ns / 8 / 2  # half of what the copies cover, not of their sum
    assert "concurrently" in copied.because


def test_kernels_without_length() -> None:
    built = Builder()
    for step in range(4):
        built.range(step * STEP, step * STEP + 90 * US, "decode_step")
        for kernel in range(5):
            now = step * STEP + kernel * 15 * US
            built.launch(now, now + 5 * US, now + 5 * US, f"nvjet_{kernel}")
    found = told(built)
    assert (found.gpu.kernels, found.gpu.busy_ns, found.gpu.span_ns) == (20, 0, 3 * STEP + 60 * US)
    assert found.stage_coverage is None  # a share of nothing


def test_replays_of_a_graph_over_two_streams() -> None:
    """Each replay runs three pairs: 15 µs and 15 µs begun 3 µs later cover 18; 2 µs lie between pairs."""
    built = Builder()
    for step in range(6):
        at = step * STEP
        built.range(at, at + 90 * US, "decode_step")
        built.call(at + 5 * US, at + 10 * US, "cudaGraphLaunch", correlation=step + 1)
        for kernel in range(6):
            start = at + 12 * US + (kernel // 2) * 20 * US + (kernel % 2) * 3 * US
            built.kernel(start, start + 15 * US, f"nvjet_{kernel}", step + 1, stream=7 + kernel % 2, graph_node=100 + kernel)
    found = told(built)
    steps = stage_of(found, "decode_step")
    assert (steps.count, steps.kernels, steps.launches) == (6, 36, 6)
    assert (steps.gpu_busy_ns, steps.idle_ns) == (6 * 3 * 18 * US, 6 * 2 * 2 * US)
    assert {line.cause: line.ns for line in found.idle}["device latency"] == 6 * 2 * 2 * US
    assert "launch_bound_decode" not in ids(found)


def test_stages_inside_stages_of_their_name_count_once() -> None:
    """decode ⊃ decode_step ⊃ decode_step ⊃ decode, as a wrapper around an engine with labels of its own sets them."""
    built = Builder()
    built.range(0, 600 * US, "profile")
    built.range(10 * US, 590 * US, "decode")
    for step in range(4):
        at = 20 * US + step * STEP
        built.range(at, at + 90 * US, "decode_step")
        built.range(at + 5 * US, at + 80 * US, "decode_step")
        built.range(at + 6 * US, at + 70 * US, "decode")
        built.launch(at + 10 * US, at + 15 * US, at + 60 * US, "nvjet")
    found = told(built)
    decode, steps = stage_of(found, "decode"), stage_of(found, "decode_step")
    assert (decode.count, decode.wall_ns, decode.kernels) == (1, 580 * US, 4)
    assert (steps.count, steps.wall_ns, steps.gpu_busy_ns) == (4, 360 * US, 180 * US)
    assert budget_of(found, "decode").wall_ns == 580 * US


def vllm(step: int) -> str:
    return "execute_context_0(0)_generation_1(1)" if step else "execute_context_1(512)_generation_0(0)"


def sglang(step: int) -> str:
    return "step[DECODE bs=8]" if step else "step[EXTEND bs=1 toks=512]"


@pytest.mark.parametrize(("label", "method"), [(vllm, "vllm"), (sglang, "sglang")])
def test_labels_of_engines_inside_the_profilers_steps(label: Callable[[int], str], method: str) -> None:
    """A prefill and three steps of 45 µs. The host's own work lies between: that is no launch-bound decode."""
    built = Builder()
    for step in range(4):
        at = step * STEP
        built.range(at, at + 95 * US, f"ProfilerStep#{step}", domain=None)
        built.range(at + US, at + 90 * US, label(step), domain=None)
        built.launch(at + 10 * US, at + 15 * US, at + 60 * US, "nvjet")
    found = told(built)
    assert found.stage_method == method
    assert [(one.name, one.count, one.gpu_busy_ns) for one in found.stages] == [
        ("prefill", 1, 45 * US),
        ("decode", 1, 135 * US),
        ("decode_step", 3, 135 * US),
    ]
    assert stage_of(found, "decode").wall_ns == 2 * STEP + 89 * US
    assert ids(found) == {"unoverlapped_scheduling"}


def test_the_profilers_steps_alone() -> None:
    built = Builder()
    for step in range(4):
        built.range(step * STEP, step * STEP + 90 * US, f"ProfilerStep#{step}", domain=None)
        built.launch(step * STEP + 10 * US, step * STEP + 15 * US, step * STEP + 60 * US, "nvjet")
    found = told(built)
    assert (found.stage_method, [(one.name, one.count) for one in found.stages]) == ("profiler_step", [("step", 4)])
    assert [(step.wall_ns, step.kernels) for step in found.steps] == [(90 * US, 1)] * 4


@pytest.mark.parametrize("devices", [1, 2])
def test_no_labels_at_all(devices: int) -> None:
    """Nobody synchronizes. On two devices the steps of the busier stream are found, and that is said."""
    names = ["nvjet_a", "flash_fwd", "elementwise", "reduce_kernel<ArgMaxOps>"]
    built = Builder()
    for step in range(8):
        for place, name in enumerate(names):
            for device in range(devices):
                now = step * STEP + place * 10 * US
                built.launch(now + device, now + 3 * US, now + 8 * US, name, device=device)
    found = told(built)
    assert found.stage_method == "kernel sequence"
    steps = stage_of(found, "decode_step")
    assert (steps.count, steps.kernels, steps.gpu_busy_ns) == (8, 32, 160 * US)
    assert found.stage_coverage == pytest.approx(1 / devices)
    assert ("only on device 0 of 2" in found.stage_why) == (devices == 2)
    assert (found.gpu.kernels, found.gpu.busy_ns) == (32 * devices, 160 * US)


def test_work_that_tells_no_launch_leaves_its_stage_unknown() -> None:
    built = Builder()
    built.range(0, 100, "decode_step")
    built.kernel(10, 50, "nvjet", correlation=0)
    found = told(built)
    assert {problem.id for problem in found.problems} >= {"work_without_calls"}
    steps = stage_of(found, "decode_step")
    assert (steps.wall_ns, steps.gpu_busy_ns, steps.kernels) == (100, None, None)
    assert (found.gpu.kernels, found.gpu.busy_ns) == (1, 40)


def test_collectives_stay_in_a_graph_and_are_counted_once() -> None:
    """Per step two products and an all-reduce of 5 µs each, launched one by one: 15 µs stay."""
    built = Builder()
    for step in range(8):
        built.range(step * STEP, step * STEP + 90 * US, "decode_step")
        for place, name in enumerate(["nvjet_a", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "nvjet_b"]):
            now = step * STEP + place * 30 * US
            built.launch(now, now + 5 * US, now + 10 * US, name)
    found = told(built)
    decode = budget_of(found, "decode")
    assert {row.key: row.ns for row in decode.rows}["exposed_copies"] == 8 * 5 * US
    finding = next(one for one in found.findings if one.id == "launch_bound_decode")
    assert finding.saving_high_ns == round((decode.wall_ns - 8 * 15 * US) / 8)

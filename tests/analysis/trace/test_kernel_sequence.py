"""Steps found in the sequence of kernels."""

import random

import pytest

from llm_perf_opt.analysis.trace.kernel_sequence import find_repetition
from llm_perf_opt.analysis.trace.stages import find_stages
from llm_perf_opt.traces.events import Trace
from trace_builders import Builder

LAYER = ["rms_norm", "qkv_gemm", "flash_fwd_kernel", "out_gemm", "add", "up_gemm", "silu", "down_gemm"]
ARGMAX = "reduce_kernel<ArgMaxOps>"


def step(layers: int = 4, sampling: bool = True, attention: str = "flash_fwd_kernel") -> list[str]:
    body = [attention if name == "flash_fwd_kernel" else name for name in LAYER]
    return ["embedding", "arange", *body * layers, "final_norm", "lm_head_gemm", *([ARGMAX] if sampling else ["to_host"])]


def prefill(layers: int = 4) -> list[str]:
    return ["embedding_prefill", *[f"{name}_prefill" for name in LAYER] * layers, "final_norm", "lm_head_gemm", ARGMAX]


def played(parts: list[list[str]], inside: int = 2, between: int = 60) -> tuple[Trace, list[int]]:
    """The kernels of all parts, one after another; and where each part begins."""
    built = Builder()
    now, begins = 1000, []
    for part in parts:
        now += between
        begins.append(now)
        for name in part:
            built.launch(now - 900, now, now + 5, name)
            now += 5 + inside
    return built.trace(), begins


def steps_of(trace: Trace) -> list[int]:
    found = find_repetition(trace)
    return [begin for run in found.runs for begin, _ in run] if found else []


@pytest.mark.parametrize(("layers", "sampling"), [(1, True), (2, True), (28, True), (2, False), (4, False), (28, False)])
def test_a_prefill_and_its_steps(layers: int, sampling: bool) -> None:
    parts = [prefill(layers), *[step(layers, sampling)] * 8]
    trace, begins = played(parts)
    found = find_repetition(trace)
    assert found is not None
    assert steps_of(trace) == begins[1:]
    assert found.period == len(parts[1])
    assert [head[0] for head in found.heads] == [begins[0]]
    stages = find_stages(trace)
    assert (stages.method, stages.names, stages.coverage) == ("kernel sequence", ("prefill", "decode", "decode_step"), 1.0)


def test_two_requests_have_two_prefills() -> None:
    trace, begins = played([prefill(), *[step()] * 5, prefill(), *[step()] * 5])
    found = find_repetition(trace)
    assert found is not None
    assert [head[0] for head in found.heads] == [begins[0], begins[6]]
    assert [len(run) for run in found.runs] == [5, 5]
    assert steps_of(trace) == begins[1:6] + begins[7:]


def test_a_longer_prefill_than_the_steps_is_no_step() -> None:
    trace, begins = played([prefill(12), *[step(4)] * 30])
    assert steps_of(trace) == begins[1:]


def test_a_step_with_other_variants_or_an_extra_kernel_is_still_a_step() -> None:
    parts = [step() for _ in range(12)]
    parts[5] = step(attention="flash_fwd_splitkv_kernel")
    parts[8] = [*step(), "extra_fill"]
    trace, begins = played([prefill(), *parts])
    assert steps_of(trace) == begins[1:]


def test_without_a_unique_kernel_irregular_layer_distances_mark_steps() -> None:
    same = [[*LAYER * 6, "add", "rms_norm", "out_gemm"]] * 10
    trace, begins = played(same)
    assert steps_of(trace) == begins


def test_no_rhythm_no_steps() -> None:
    source = random.Random(1)
    noise = [source.choice("abcdefgh") for _ in range(400)]
    assert find_repetition(played([noise])[0]) is None
    assert find_repetition(played([[f"kernel {number}" for number in range(40)]])[0]) is None
    assert find_repetition(Builder().trace()) is None


def test_the_layers_of_one_prefill_are_not_steps_of_a_decode() -> None:
    assert steps_of(played([prefill(40)], between=0)[0]) == []
    assert find_stages(played([prefill(40)])[0]).method == "none"
    assert steps_of(played([prefill(4), step(), step()])[0]) == []


def test_the_busiest_stream_is_read_and_the_others_work_goes_along() -> None:
    built = Builder()
    now = 1000
    for _ in range(6):
        now += 80
        for name in step():
            built.launch(now - 900, now, now + 5, name)
            built.launch(now - 899, now + 1, now + 2, "side", stream=9)
            now += 7
    trace = built.trace()
    found = find_stages(trace)
    assert found.method == "kernel sequence"
    assert (found.of_work >= 0).all()
    assert len(found.rows_of("decode_step")) == 6


def test_kernels_that_end_before_they_start_have_no_steps() -> None:
    """The time of every stream is negative, and streams of several devices are not numbered without gaps."""
    built = Builder()
    built.kernel(100, 90, "a", device=0, stream=5)
    built.kernel(100, 98, "b", device=1, stream=7)
    assert find_repetition(built.trace()) is None
    assert find_stages(built.trace()).names == ()

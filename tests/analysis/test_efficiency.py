"""Distance from the limit, on hand-made timings whose arithmetic can be followed by eye."""

from dataclasses import replace

import pytest

from llm_perf_opt.analysis.efficiency import Efficiency, efficiency
from llm_perf_opt.analysis.hardware import Hardware, given_hardware, hardware_named, hardware_of_device
from llm_perf_opt.errors import ImplausibleError
from llm_perf_opt.records import (
    CeilingRow,
    Ceilings,
    CleanTimings,
    Distribution,
    Iteration,
    Maybe,
    MemoryPeaks,
    Missing,
    ModelFacts,
    StageActivity,
    TorchPass,
    Workload,
)

# One layer, no grouping: d = 8, two heads of 4, ff = 16, vocabulary 10, bf16.
TINY = {
    "model_type": "llama", "vocab_size": 10, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
PROMPT, NEW = 3, 3
# A decode token: projections 2·8·(8+8+8+8) = 512, MLP 2·3·8·16 = 768, lm_head 2·8·10 = 160;
# attention over p+1 keys 2·2·(p+1)·(4+4) = 32 (p+1): 4 keys, then 5.
DECODE_FLOPS = 2 * (512 + 768 + 160) + 32 * 4 + 32 * 5
# Prefill of three: 3 (512 + 768) + one logits row + causal pairs 1+2+3 = 6.
PREFILL_FLOPS = 3 * (512 + 768) + 160 + 32 * 6
NOT_HERE = Missing("not here")
ON_CPU = Missing("the run is on the CPU")


def timings(prefill_ns: int, step_ns: int, cache_bytes: Maybe[int] = NOT_HERE) -> CleanTimings:
    model = ModelFacts(
        "m", "LlamaForCausalLM", "llama", 1, 10_000, "bf16", "cuda:0", "NVIDIA H200", "sdpa", "dynamic", "none", "last token",
        TINY, cache_bytes,
    )  # fmt: skip
    iteration = Iteration(0, prefill_ns + 2 * step_ns, prefill_ns, (step_ns, step_ns))
    memory = MemoryPeaks(NOT_HERE, NOT_HERE, NOT_HERE, NOT_HERE)
    return CleanTimings(
        model=model, workload=Workload(1, (PROMPT,), PROMPT, NEW, "test"), clock="cuda events", load_s=0.0, warmup=(),
        iterations=(iteration,) * 7, stopped="", stable=True, memory=memory, tokens_sha256="", tokens_repeat=True, threads=1,
        framework={}, settled=True, device_untouched_until_ns=0,
    )  # fmt: skip


def torch_pass(prefill_kernel_ns: int, decode_kernel_ns: int) -> TorchPass:
    activity = (StageActivity("prefill", 5, 5, prefill_kernel_ns), StageActivity("decode", 8, 8, decode_kernel_ns))
    return TorchPass("minimal", {}, 2, activity, (), "trace", 1)


def ceilings(peak: float, read: float) -> Ceilings:
    def row(key: str, value: float) -> CeilingRow:
        return CeilingRow(
            key, key, "FLOP/s", Distribution(9, value, value, value, value, value, value, value, NOT_HERE, NOT_HERE), ""
        )

    rows = (row("gemm_bf16", peak), row("read", read))
    return Ceilings("cuda", "NVIDIA H200", "id", "580", "2.11", 1, "2026-01-01T00:00:00+00:00", 1.0, 1.0, (), rows)


def found(value: Maybe[Efficiency]) -> Efficiency:
    assert isinstance(value, Efficiency)
    return value


def given(peak_flops: float, bandwidth: float) -> Hardware:
    return given_hardware(dtype="bf16", peak_tflops=peak_flops / 1e12, bandwidth_gbs=bandwidth / 1e9)


def test_mfu_is_flops_over_time_times_peak() -> None:
    result = found(efficiency(timings(1_000, 500), NOT_HERE, given(1e13, 1e12), ceilings(0.5e13, 0.5e12)))
    prefill, decode = result.stages
    assert (prefill.cost.flops, decode.cost.flops) == (PREFILL_FLOPS, DECODE_FLOPS)
    datasheet, measured = decode.against
    assert datasheet.mfu == pytest.approx(DECODE_FLOPS / (1_000e-9 * 1e13))
    assert measured.mfu == pytest.approx(2 * DECODE_FLOPS / (1_000e-9 * 1e13))
    assert datasheet.mbu == pytest.approx(decode.cost.bytes / (1_000e-9 * 1e12))
    assert prefill.against[0].mfu_full_attention == pytest.approx((PREFILL_FLOPS + 32 * 3) / (1_000e-9 * 1e13))


def test_floor_is_never_above_the_time_and_never_below_either_sum() -> None:
    result = found(efficiency(timings(100_000, 50_000), NOT_HERE, given(1e12, 1e11), NOT_HERE))
    for stage in result.stages:
        entry = stage.against[0]
        assert not isinstance(entry.floor, Missing)
        assert max(entry.floor.compute_s, entry.floor.memory_s) <= entry.floor.seconds <= stage.seconds
        assert entry.times_floor == pytest.approx(stage.seconds / entry.floor.seconds)


@pytest.mark.parametrize(
    ("hardware", "kernel_ns", "verdict"),
    [
        (given(1e12, 1e11), 100, "launch-bound"),
        (given(1e13, 5e9), 900_000, "memory-bound"),
        (given(5e9, 1e14), 900_000, "compute-bound"),
    ],
)
def test_verdict(hardware: Hardware, kernel_ns: int, verdict: str) -> None:
    result = found(efficiency(timings(1_000_000, 500_000), torch_pass(kernel_ns, kernel_ns), hardware, NOT_HERE))
    assert [stage.verdict for stage in result.stages] == [verdict, verdict]


def test_without_device_activity_far_from_the_floor_is_overhead() -> None:
    torch = replace(torch_pass(1, 1), activity=ON_CPU)
    result = found(efficiency(timings(10_000_000, 10_000_000), torch, given(1e12, 1e11), NOT_HERE))
    assert {stage.verdict for stage in result.stages} == {"overhead-bound"}
    assert {str(stage.busy) for stage in result.stages} == {"n/a: the run is on the CPU"}


def test_above_a_hundred_percent_stops_with_what_to_check() -> None:
    with pytest.raises(ImplausibleError, match=r"MFU of prefill against the datasheet limit is .*%") as caught:
        efficiency(timings(1, 1), NOT_HERE, given(1e9, 1e15), NOT_HERE)
    assert "hardware.peak_tflops" in caught.value.remedy
    with pytest.raises(ImplausibleError, match="MBU of prefill against the measured limit"):
        efficiency(timings(1_000, 1_000), NOT_HERE, NOT_HERE, ceilings(1e15, 1e9))


def test_an_unknown_device_has_no_datasheet_figures() -> None:
    result = found(efficiency(timings(1_000, 500), NOT_HERE, hardware_of_device("NVIDIA L5"), ceilings(1e13, 1e12)))
    datasheet, measured = result.stages[0].against
    for value in (datasheet.mfu, datasheet.mbu, datasheet.floor, datasheet.times_floor):
        assert isinstance(value, Missing)
        assert "hardware.peak_tflops" in value.why
    assert not isinstance(measured.mfu, Missing)


def test_a_model_in_the_cache_is_not_held_against_memory_bandwidth() -> None:
    result = found(efficiency(timings(1_000, 500, cache_bytes=20_000), NOT_HERE, given(1e13, 1.0), NOT_HERE))
    entry = result.stages[1].against[0]
    assert isinstance(entry.mbu, Missing)
    assert "fit in the last-level cache" in entry.mbu.why
    assert not isinstance(entry.floor, Missing)
    assert entry.floor.seconds == pytest.approx(DECODE_FLOPS / 1e13)


def test_an_unknown_architecture_is_said_so() -> None:
    strange = timings(1_000, 500)
    strange = replace(strange, model=replace(strange.model, architecture={"model_type": "mamba"}))
    result = efficiency(strange, NOT_HERE, hardware_named("h200"), NOT_HERE)
    assert isinstance(result, Missing)
    assert "mamba" in result.why

"""Distance from the roofline, on hand-made timings that are easy to check."""

from dataclasses import replace

import pytest

from llm_perf_opt.analysis.limits.efficiency import Efficiency, RequestCost, efficiency, request_cost
from llm_perf_opt.analysis.limits.hardware import Hardware, given_hardware, hardware_named, hardware_of_device, shared_words
from llm_perf_opt.core.errors import ImplausibleError
from llm_perf_opt.core.machine_records import CacheLevel, CeilingRow, Ceilings, ModelLinears
from llm_perf_opt.core.records import (
    CleanTimings,
    Distribution,
    Iteration,
    Maybe,
    MemoryPeaks,
    Missing,
    ModelFacts,
    PartTime,
    RuntimeFacts,
    StageActivity,
    TorchPass,
    Workload,
)
from llm_perf_opt.core.units import duration
from llm_perf_opt.profiling.ceilings import model_linears
from llm_perf_opt.report.document import Table
from llm_perf_opt.report.efficiency import components_table, limits_table, used_verdicts, verdict_items

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


PARTS = (
    PartTime("prefill", "mlp", 3, 300),
    PartTime("decode", "mlp", 2, 768),
    PartTime("decode", "lm_head", 2, 100),
    PartTime("decode", "other", 5, 32),
)


def torch_pass(prefill_kernel_ns: int, decode_kernel_ns: int) -> TorchPass:
    activity = (StageActivity("prefill", 5, 5, prefill_kernel_ns), StageActivity("decode", 8, 8, decode_kernel_ns))
    return TorchPass("minimal", {}, 2, activity, PARTS, (), "trace", 1)


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


def test_roofline_time_is_between_either_sum_and_the_time() -> None:
    result = found(efficiency(timings(100_000, 50_000), NOT_HERE, given(1e12, 1e11), NOT_HERE))
    for stage in result.stages:
        entry = stage.against[0]
        assert not isinstance(entry.roofline, Missing)
        assert max(entry.roofline.compute_s, entry.roofline.memory_s) <= entry.roofline.seconds <= stage.seconds
        assert entry.times_roofline == pytest.approx(stage.seconds / entry.roofline.seconds)


def bytes_of(stage: int) -> int:
    return found(efficiency(timings(10**9, 10**9), NOT_HERE, given(1e15, 1e15), NOT_HERE)).stages[stage].cost.bytes


@pytest.mark.parametrize("stage", [0, 1])
def test_verdict_follows_the_launches_then_the_nearer_limit(stage: int) -> None:
    """A stage of 1 ms: at half the bandwidth, at half the peak, at a hundredth of both, and with an idle device."""
    flops, moved = (PREFILL_FLOPS, DECODE_FLOPS)[stage], bytes_of(stage)
    wide_flops, wide_bytes = 1e6 * flops, 1e6 * moved
    cases = {
        "memory-bound": (given(wide_flops, 2e3 * moved), 900_000),
        "compute-bound": (given(2e3 * flops, wide_bytes), 900_000),
        "kernel-bound": (given(1e5 * flops, 1e5 * moved), 900_000),
        "launch-bound": (given(2e3 * flops, wide_bytes), 100_000),
    }
    for verdict, (hardware, kernel_ns) in cases.items():
        # the other stage is long enough to be plausible
        measured = timings(10**6, 10**9) if stage == 0 else timings(10**9, 5 * 10**5)
        kernels = torch_pass(kernel_ns if stage == 0 else 10**9, kernel_ns if stage == 1 else 2 * 10**9)
        assert found(efficiency(measured, kernels, hardware, NOT_HERE)).stages[stage].verdict == verdict


def test_kernels_are_compared_with_as_many_unprofiled_steps() -> None:
    one_step = replace(torch_pass(0, 400), decode_steps=1)
    decode = found(efficiency(timings(1_000, 500), one_step, given(1e15, 1e15), NOT_HERE)).stages[1]
    assert decode.busy == pytest.approx(400 / 500)


def test_logits_of_the_whole_prompt_cost_more() -> None:
    last = timings(10**6, 10**6)
    every = replace(last, model=replace(last.model, logits="whole prompt"))
    few, many = (found(efficiency(t, NOT_HERE, given(1e15, 1e15), NOT_HERE)).stages[0].cost.flops for t in (last, every))
    assert many - few == (PROMPT - 1) * 160


def row_of(table: Table, *names: str) -> dict[str, str]:
    """Return the row that begins with these cells, by column."""
    cells = next(row for row in table.rows if tuple(cell.text for cell in row[: len(names)]) == names)
    return {column.name: cell.text for column, cell in zip(table.columns, cells, strict=True)}


def test_the_table_shows_what_was_found() -> None:
    result = found(efficiency(timings(1_000, 500), NOT_HERE, given(1e13, 1e12), NOT_HERE))
    table = limits_table(result, ())
    assert row_of(table, "decode", "datasheet peak")["MFU (causal)"] == f"{DECODE_FLOPS / (1_000e-9 * 1e13) * 100:.3g} %"
    assert row_of(table, "decode", "measured peak")["MFU (causal)"] == "n/a"
    assert "not here" in table.reasons
    least = result.stages[1].against[0].roofline
    assert not isinstance(least, Missing)
    assert row_of(table, "decode", "datasheet peak")["roofline time"] == duration(least.seconds * 1e9)
    assert row_of(components_table(result), "decode", "mlp")["time"] == "n/a", "without their times, what they compute"
    assert row_of(components_table(result), "decode", "mlp")["FLOPs"] == "1.536 kFLOP"


def test_components_are_compared_with_their_own_roofline_time() -> None:
    decode = found(efficiency(timings(10**6, 10**6), torch_pass(1, 1), given(1e13, 1e15), NOT_HERE)).stages[1]
    assert not isinstance(decode.components, Missing)
    parts = {part.name: part for part in decode.components}
    # two steps of 768 FLOP in 768 ns at 1e13 FLOP/s: 2 GFLOP/s of 10 TFLOP/s
    assert parts["mlp"].mfu == pytest.approx(2 * 768 / (768e-9 * 1e13))
    assert parts["mlp"].times_roofline == pytest.approx(768e-9 / (2 * 768 / 1e13))
    assert parts["other"].time_ns == 32
    assert isinstance(parts["attention_core"].time_ns, Missing)
    assert any(component.name == "mlp" for component in decode.cost.components)
    table = components_table(found(efficiency(timings(10**6, 10**6), torch_pass(1, 1), given(1e13, 1e15), NOT_HERE)))
    mlp = row_of(table, "decode", "mlp")
    assert (mlp["time"], mlp["share"], mlp["FLOP/s"]) == ("768 ns", "85.3 %", "2.000 GFLOP/s")
    assert "Above 100 %" not in table.foot


def test_a_component_that_is_faster_than_the_measured_peak_is_named() -> None:
    """1,536 FLOP in 768 ns are 2.0 GFLOP/s; of 1.96 GFLOP/s, 102 %."""
    table = components_table(found(efficiency(timings(10**6, 10**6), torch_pass(1, 1), given(1.96e9, 1e15), NOT_HERE)))
    assert row_of(table, "decode", "mlp")["MFU"] == "102 %"
    assert "Above 100 %: " in table.foot
    assert "mlp of decode" in table.foot


def test_a_component_whose_bytes_stay_in_the_cache_has_no_roofline_time() -> None:
    """Norms have no FLOPs: with the weights in the cache, their roofline time is missing instead of 6.554e-23 ms."""
    held = found(efficiency(timings(10**6, 10**6, cache_bytes=20_000), torch_pass(1, 1), given(1e13, 1e12), NOT_HERE))
    assert held.peak_sets[0].in_cache
    assert not isinstance(held.stages[1].components, Missing)
    norms = next(part for part in held.stages[1].components if part.name == "norms")
    assert norms.roofline is not None
    assert norms.roofline.seconds == 0
    table = components_table(held)
    shown = row_of(table, "decode", "norms")
    assert (shown["roofline time"], shown["bound by"]) == ("0 ms", "nothing")
    assert not any("e-" in cell.text for row in table.rows for cell in row)


def test_full_attention_mfu_above_one_is_not_an_error() -> None:
    long = timings(1_000, 500)
    peak = PREFILL_FLOPS / 1_000e-9  # causal MFU is exactly 100 %, whole attention above
    prefill = found(efficiency(long, NOT_HERE, given(peak, 1e15), NOT_HERE)).stages[0].against[0]
    assert prefill.mfu == pytest.approx(1.0)
    assert not isinstance(prefill.mfu_full_attention, Missing)
    assert prefill.mfu_full_attention > 1.0


def test_on_a_cpu_far_from_the_roofline_is_near_neither_limit() -> None:
    torch = replace(torch_pass(1, 1), activity=ON_CPU)
    far = timings(10_000_000, 10_000_000)
    far = replace(far, model=replace(far.model, device="cpu"))
    result = found(efficiency(far, torch, given(1e12, 1e11), NOT_HERE))
    assert {stage.verdict for stage in result.stages} == {"near neither limit"}
    assert result.stages[0].binds == "Prefill is bound by no single cause"
    assert {str(stage.busy) for stage in result.stages} == {"n/a: the run is on the CPU"}


def test_on_a_gpu_without_evidence_the_verdict_is_unknown() -> None:
    far = timings(10_000_000, 10_000_000)
    result = found(efficiency(far, NOT_HERE, given(1e12, 1e11), NOT_HERE))
    assert {stage.verdict for stage in result.stages} == {"not known"}
    assert result.stages[1].binds == "What bounds decode is not known"
    assert "not here; the device was not sampled (use profiling.torch.enable=true)" in result.stages[1].because
    busy = found(efficiency(far, NOT_HERE, given(1e12, 1e11), NOT_HERE, 1.0))
    assert {stage.verdict for stage in busy.stages} == {"kernel-bound"}
    short = found(efficiency(timings(1_000_000, 10_000_000), NOT_HERE, given(1e12, 1e11), NOT_HERE, 1.0))
    assert [stage.verdict for stage in short.stages] == ["not known", "kernel-bound"], "of a short stage the readings say little"
    idle = found(efficiency(far, NOT_HERE, given(1e12, 1e11), NOT_HERE, 0.02))
    assert {stage.verdict for stage in idle.stages} == {"launch-bound"}
    half = found(efficiency(far, NOT_HERE, given(1e12, 1e11), NOT_HERE, 0.6))
    assert {stage.verdict for stage in half.stages} == {"not known"}, "it may have been either stage"
    seen = found(efficiency(far, torch_pass(9_000_000, 18_000_000), given(1e12, 1e11), NOT_HERE, 0.02))
    assert {stage.verdict for stage in seen.stages} == {"kernel-bound"}, "what the torch pass saw outweighs the sampler"


def test_every_word_on_the_page_is_explained_on_it() -> None:
    result = found(efficiency(timings(1_000, 500), NOT_HERE, given(1e13, 1e12), NOT_HERE))
    assert "What bounds decode is not known:" in [item.head for item in verdict_items(result).items]
    assert [word for word, _ in used_verdicts(result)] == ["not known"], "words that are not used are not explained"


def test_above_a_hundred_percent_stops_with_what_to_check() -> None:
    with pytest.raises(ImplausibleError, match=r"MFU of prefill against the datasheet peak is .*%") as caught:
        efficiency(timings(1, 1), NOT_HERE, given(1e9, 1e15), NOT_HERE)
    assert "hardware.peak_tflops" in caught.value.remedy
    with pytest.raises(ImplausibleError, match="MBU of prefill against the measured peak"):
        efficiency(timings(1_000, 1_000), NOT_HERE, NOT_HERE, ceilings(1e15, 1e9))


def on_cpu(levels: dict[int, tuple[int, float]], read: float = 1e9) -> Ceilings:
    """Level → its size and bandwidth."""
    own = ceilings(1e13, read)
    rows = tuple(replace(own.rows[1], key=f"read_l{level}", value=at(rate)) for level, (_, rate) in levels.items())
    caches = tuple(CacheLevel(level, size) for level, (size, _) in levels.items())
    return replace(own, device_kind="cpu", rows=(*own.rows, *rows), caches=caches)


def at(value: float) -> Distribution:
    return Distribution(9, value, value, value, value, value, value, value, NOT_HERE, NOT_HERE)


def test_a_model_in_a_cache_is_compared_with_the_bandwidth_of_that_level() -> None:
    run = timings(1_000_000, 500_000, cache_bytes=20_000)  # 10,000 bytes of weights
    levels = {1: (1_000, 8e9), 2: (5_000, 6e9), 3: (20_000, 4e9)}
    result = found(efficiency(run, NOT_HERE, NOT_HERE, on_cpu(levels)))
    decode = result.stages[1]
    measured = decode.against[1]
    assert (measured.peaks.level, measured.peaks.in_cache) == ("L3", False)
    assert measured.mbu == pytest.approx(decode.cost.bytes / (decode.seconds * 4e9))
    assert not isinstance(measured.roofline, Missing)
    assert measured.roofline.memory_s == pytest.approx(decode.cost.bytes / 4e9)
    assert "L3" in str(limits_table(result, ()).rows)


def test_a_model_beyond_every_cache_is_compared_with_memory() -> None:
    run = timings(1_000_000, 500_000, cache_bytes=9_000)
    measured = found(efficiency(run, NOT_HERE, NOT_HERE, on_cpu({3: (9_000, 4e9)}))).stages[1].against[1]
    assert (measured.peaks.level, measured.peaks.bandwidth_bytes_per_s) == ("", 1e9)


def test_weights_that_arrive_faster_than_their_level_delivers_came_from_a_faster_one() -> None:
    run = timings(1_000_000, 1_000, cache_bytes=20_000)
    rate = found(efficiency(run, NOT_HERE, NOT_HERE, on_cpu({3: (20_000, 1e15)}))).stages[1].bytes_per_s
    levels = {1: (1_000, 4 * rate), 2: (5_000, 2 * rate), 3: (20_000, rate / 2)}
    measured = found(efficiency(run, NOT_HERE, NOT_HERE, on_cpu(levels))).stages[1].against[1]
    assert measured.peaks.level == "L2"
    assert measured.mbu == pytest.approx(0.5)
    with pytest.raises(ImplausibleError, match="MBU of decode"):
        efficiency(run, NOT_HERE, NOT_HERE, on_cpu({3: (20_000, rate / 2)}))


def test_the_products_of_a_request_are_those_of_its_cost() -> None:
    request, linears = request_cost(timings(1, 1)), model_linears(timings(1, 1))
    assert isinstance(request, RequestCost)
    assert isinstance(linears, ModelLinears)
    assert (linears.dtype, linears.parameters) == ("bf16", request.architecture.params)
    assert (linears.compiled, linears.experts) == (timings(1, 1).model.compile != "none", False)
    for cost, rows in ((request.prefill, "prefill_rows"), (request.steps[0], "decode_rows")):
        flops = sum(2 * layer.in_features * layer.out_features * layer.count * getattr(layer, rows) for layer in linears.layers)
        assert flops == sum(part.flops for part in cost.components if part.name != "attention_core")


def test_an_unknown_device_has_no_datasheet_figures() -> None:
    result = found(efficiency(timings(1_000, 500), NOT_HERE, hardware_of_device("NVIDIA L5"), ceilings(1e13, 1e12)))
    datasheet, measured = result.stages[0].against
    for value in (datasheet.mfu, datasheet.mbu, datasheet.roofline, datasheet.times_roofline):
        assert isinstance(value, Missing)
        assert "hardware.peak_tflops" in value.why
    assert not isinstance(measured.mfu, Missing)


def test_a_model_in_the_cache_is_not_bound_by_memory_bandwidth() -> None:
    result = found(efficiency(timings(1_000, 500, cache_bytes=20_000), NOT_HERE, given(1e13, 1.0), NOT_HERE))
    entry = result.stages[1].against[0]
    assert isinstance(entry.mbu, Missing)
    assert "fit in the last-level cache" in entry.mbu.why
    assert not isinstance(entry.roofline, Missing)
    assert entry.roofline.seconds == pytest.approx(DECODE_FLOPS / 1e13)


def test_an_unknown_architecture_is_missing_with_a_reason() -> None:
    strange = timings(1_000, 500)
    strange = replace(strange, model=replace(strange.model, architecture={"model_type": "mamba"}))
    result = efficiency(strange, NOT_HERE, hardware_named("h200"), NOT_HERE)
    assert isinstance(result, Missing)
    assert "mamba" in result.why


# --- several devices ----------------------------------------------------------------------------------------------------


def spread_over(devices: int, step_ns: int = 500) -> CleanTimings:
    runtime = RuntimeFacts("vllm", "1", "by arrival", devices=devices)
    return replace(timings(1_000, step_ns), runtime=runtime)


def known(value: Maybe[float]) -> float:
    assert not isinstance(value, Missing)
    return value


def test_a_model_on_two_devices_is_compared_with_both_peaks() -> None:
    """Twice the FLOP/s and bytes/s: half the MFU and MBU, half the roofline time, and a note."""
    args = (NOT_HERE, given(1e13, 1e12), ceilings(0.5e13, 0.5e12))
    one, two = (found(efficiency(spread_over(devices), *args)) for devices in (1, 2))
    for alone, shared in zip(one.stages, two.stages, strict=True):
        for before, after in zip(alone.against, shared.against, strict=True):
            assert known(after.mfu) == pytest.approx(known(before.mfu) / 2)
            assert known(after.mbu) == pytest.approx(known(before.mbu) / 2)
            assert known(after.times_roofline) == pytest.approx(known(before.times_roofline) * 2)
            assert known(after.peaks.ridge_flops_per_byte) == pytest.approx(known(before.peaks.ridge_flops_per_byte))
            assert after.peaks.source.startswith("2 devices together, each:")
    assert shared_words(2) in two.notes
    assert not any("devices" in note for note in one.notes)


def test_kernels_on_more_devices_than_the_limits_are_of_give_no_figure() -> None:
    activity = tuple(StageActivity(stage, 5, 5, 100, devices=2) for stage in ("prefill", "decode"))
    torch = replace(torch_pass(100, 100), activity=activity)
    result = efficiency(timings(1_000, 500), torch, given(1e13, 1e12), NOT_HERE)
    assert result == Missing("the stage's kernels ran on 2 devices, but the peaks are those of one")
    assert isinstance(efficiency(spread_over(2), torch, given(1e13, 1e12), NOT_HERE), Efficiency)


def test_the_share_of_busy_time_is_the_mean_of_the_devices() -> None:
    activity = tuple(StageActivity(stage, 5, 5, 1_000, devices=2) for stage in ("prefill", "decode"))
    torch = replace(torch_pass(100, 100), activity=activity)
    decode = found(efficiency(spread_over(2), torch, given(1e13, 1e12), NOT_HERE)).stages[1]
    assert decode.busy == pytest.approx(1_000 / (1_000 * 2))


def test_a_share_of_the_weights_may_stay_in_each_devices_cache() -> None:
    def cached(devices: int) -> bool:
        small = replace(spread_over(devices), model=replace(spread_over(devices).model, last_level_cache_bytes=6_000))
        return found(efficiency(small, NOT_HERE, given(1e13, 1e12), NOT_HERE)).peak_sets[0].in_cache

    assert (cached(1), cached(2)) == (False, True)  # 10,000 bytes of weights

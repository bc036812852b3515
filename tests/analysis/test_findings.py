"""Every rule fires where it should and only there; savings are wall-clock savings."""

import re
from dataclasses import asdict, replace
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from builders import MS, clean_timings, default_config, in_a_row, iteration, manifest, model_facts
from evidence_builders import NOTHING_TO_FUSE, QUIET, evidence, stage_evidence
from llm_perf_opt.analysis.cost_model.cost import Formats
from llm_perf_opt.analysis.cost_model.families import architecture_of
from llm_perf_opt.analysis.evidence import Evidence
from llm_perf_opt.analysis.findings.finding import Kind, PredictedTime, Saving
from llm_perf_opt.analysis.findings.registry import RULES, find
from llm_perf_opt.analysis.kernels.table import PerCall, StageKernel, StageKernels, Variant
from llm_perf_opt.analysis.limits.efficiency import efficiency
from llm_perf_opt.analysis.limits.hardware import hardware_named
from llm_perf_opt.analysis.limits.roofline import what_if
from llm_perf_opt.analysis.overhead import PassOverhead
from llm_perf_opt.analysis.stats import summarize
from llm_perf_opt.analysis.telemetry import TelemetrySummary
from llm_perf_opt.analysis.trace.document import Finding, ThroughputLine
from llm_perf_opt.analysis.trace.host_calls import Fusion
from llm_perf_opt.analysis.trace.idle import IdleCause
from llm_perf_opt.config.composition import compose
from llm_perf_opt.config.runtimes import Runtime
from llm_perf_opt.core.machine_records import CeilingRow, Ceilings
from llm_perf_opt.core.records import CleanTimings, Missing
from llm_perf_opt.core.warnings import RunWarning, WarningId
from llm_perf_opt.workflows.run_warnings import run_warnings

WAITING = {IdleCause.LAUNCH_BOUND: 90 * MS}
FUSABLE = Fusion(
    kept_kernels=200, kept_ns=6 * MS, fusable_kernels=800, fusable_ns=4 * MS, runs=100, sizes=300, least_ns=1 * MS, most_ns=2 * MS
)
SMALL = "void at::native::vectorized_elementwise_kernel<add>"


def host_bound(**changes: Any) -> Evidence:
    """Ten steps of 10 ms; the device is busy for 1 ms of each, in 100 launches."""
    made = stage_evidence(
        busy_ns=10 * MS, idle=WAITING, fusion=FUSABLE, kernels=[("nvjet", 200, 6 * MS), (SMALL, 800, 4 * MS)], **changes
    )
    return evidence(made)


def found(rule_id: str, given: Evidence) -> Finding | None:
    return next((one for one in find(given) if one.id == rule_id), None)


def known(rule_id: str, given: Evidence) -> tuple[Finding, Saving]:
    finding = found(rule_id, given)
    assert finding is not None
    return finding, saving_in(finding)


def test_host_time_of_several_ranks_is_not_predicted() -> None:
    """A rank waits for the others; that time is not saved by launching faster."""
    assert found("launch_bound_decode", evidence_of_ranks(1)) is not None
    assert found("launch_bound_decode", evidence_of_ranks(2)) is None


def evidence_of_ranks(count: int) -> Evidence:
    given = host_bound()
    return replace(given, facts=replace(given.facts, config={"runtime": {"tensor_parallel": count}}))


def saving_in(finding: Finding) -> Saving:
    """Return the saving stored in a finding."""
    expected, low, high = finding.saving_ns, finding.saving_low_ns, finding.saving_high_ns
    assert expected is not None
    assert low is not None
    assert high is not None
    return Saving(expected, low, high, finding.saving_per, finding.counted, after_in(finding))


def after_in(finding: Finding) -> PredictedTime:
    times = (finding.after_ns, finding.after_low_ns, finding.after_high_ns, finding.before_ns)
    expected, low, high, before = (time for time in times if time is not None)
    return PredictedTime(expected, low, high, before, finding.kept)


def ceilings(graph_ns: float) -> Ceilings:
    rows = (CeilingRow("launch_graph", "kernels in a graph", "ns", summarize([graph_ns] * 3), "a graph of empty kernels"),)
    return Ceilings("cuda", "a GPU", "0", "580", "2.13", 1, "2026-01-01T00:00:00+00:00", 9.0, 8.0, (), rows)


# --- launches ---------------------------------------------------------------------------------------------------------


def test_launch_bound_decode_predicts_kernels_and_gaps_inside_a_graph() -> None:
    """Per token: 0.6 ms stay, 0.1 to 0.2 ms fused, 20 kernels stay and 10 to 30 are fused, 1 µs apart at most."""
    given = replace(host_bound(), facts=replace(host_bound().facts, ceilings=ceilings(1000.0)))
    finding, saving = known("launch_bound_decode", given)
    assert finding.overrides == ["runtime.cache=static", "runtime.compile=reduce-overhead"]
    assert saving.expected_ns == 10 * MS - (600_000 + 150_000 + 40 * 500)
    assert saving.low_ns == 10 * MS - (600_000 + 200_000 + 50 * 1000)
    assert saving.high_ns == 10 * MS - (600_000 + 100_000)
    assert finding.units == 10
    assert finding.confidence == "high"


def test_a_saving_is_no_surer_than_the_time_it_is_taken_from() -> None:
    """Ten steps of 8 to 13 ms, 10 ms in the middle."""
    plain = known("launch_bound_decode", host_bound())[1]
    finding, saving = known("launch_bound_decode", host_bound(wall_ends_ns=(80.0 * MS, 130.0 * MS), request_units=127))
    assert saving.expected_ns == plain.expected_ns
    assert saving.low_ns == plain.low_ns - 2 * MS
    assert saving.high_ns == plain.high_ns, "at most the time shown minus what stays"
    assert "10.0 ms per token (8.00 ms to 13.0 ms) over the first 10 of 127 steps" in finding.claim
    assert "over the first" not in known("launch_bound_decode", host_bound(request_units=10))[0].claim
    short = known("launch_bound_decode", host_bound(wall_ends_ns=(1.0 * MS, 130.0 * MS)))[1]
    assert short.low_ns == 0
    assert "10.0 ms per token;" in known("launch_bound_decode", host_bound(wall_ends_ns=(100.0 * MS, 100.0 * MS)))[0].claim


@pytest.mark.parametrize(("stable", "confidence"), [(True, "high"), (False, "medium")])
def test_times_that_did_not_reach_their_target_lower_the_confidence(stable: bool, confidence: str) -> None:
    timings = replace(timings_of(), stable=stable)
    finding, _ = known("launch_bound_decode", evidence(*host_bound().stages, timings=timings))
    assert finding.confidence == confidence
    assert ("did not reach their spread target" in finding.because) is not stable
    below, _ = known("launch_bound_decode", evidence(*host_bound(unprofiled=False).stages, timings=timings))
    assert below.confidence == "medium", "it is not based on those times"


def test_under_the_profiler_the_saving_may_be_zero_and_the_claim_says_so() -> None:
    finding, saving = known("launch_bound_decode", host_bound(unprofiled=False))
    assert saving.low_ns == 0
    assert "under the profiler" in finding.claim
    assert finding.confidence == "medium"


@pytest.mark.parametrize(
    "quiet",
    [
        evidence(stage_evidence()),  # the device is busy
        host_bound(launches=10),  # graphs already
        evidence(stage_evidence("prefill", busy_ns=10 * MS, idle=WAITING)),  # another stage
    ],
)
def test_no_launch_bound_decode(quiet: Evidence) -> None:
    assert found("launch_bound_decode", quiet) is None


def test_launch_bound_prefill() -> None:
    _, saving = known("launch_bound_prefill", evidence(stage_evidence("prefill", busy_ns=10 * MS, idle=WAITING)))
    assert (saving.low_ns, saving.expected_ns, saving.high_ns, saving.unit) == (0, 45 * MS, 90 * MS, "prefill")
    assert found("launch_bound_prefill", evidence(stage_evidence("prefill"))) is None


@pytest.mark.parametrize(
    ("runtime", "overrides"),
    [
        ({}, ["runtime.cache=static", "runtime.compile=reduce-overhead", "runtime.compile_prefill=true"]),
        ({"compile": "max-autotune"}, ["runtime.compile_prefill=true"]),
        ({"compile": "max-autotune", "compile_prefill": True}, []),
    ],
)
def test_launch_bound_prefill_is_compiled_with_the_mode_of_decode(runtime: dict[str, Any], overrides: list[str]) -> None:
    prefill = stage_evidence("prefill", busy_ns=10 * MS, idle=WAITING)
    assert known("launch_bound_prefill", evidence(prefill, config={"runtime": runtime}))[0].overrides == overrides


def test_host_between_steps() -> None:
    waiting = stage_evidence(busy_ns=60 * MS, idle={IdleCause.HOST_BETWEEN_STEPS: 40 * MS})
    assert known("host_between_steps", evidence(waiting))[1].high_ns == 4 * MS
    assert found("host_between_steps", evidence(stage_evidence())) is None


# --- kernels ----------------------------------------------------------------------------------------------------------

CAT = ("void at::native::CatArrayBatchedCopy<x>", 560, 20 * MS)


def test_cache_concatenation_saves_where_the_device_is_the_bottleneck() -> None:
    given = evidence(stage_evidence(kernels=[("nvjet", 100, 70 * MS), CAT]))
    finding, saving = known("cache_concatenation", given)
    assert (saving.low_ns, saving.expected_ns, saving.high_ns) == (0, 1 * MS, 2 * MS)
    assert finding.overrides == ["runtime.cache=static"]


def test_a_faster_kernel_saves_nothing_in_a_host_bound_step_and_the_finding_says_so() -> None:
    given = evidence(stage_evidence(busy_ns=10 * MS, idle=WAITING, kernels=[("nvjet", 100, 8 * MS), (CAT[0], 560, 2 * MS)]))
    finding, saving = known("cache_concatenation", given)
    assert saving.high_ns == 0
    assert "saves nothing now: the device is idle for 90 %" in finding.claim


def test_no_cache_concatenation() -> None:
    assert found("cache_concatenation", evidence(stage_evidence())) is None
    static = evidence(stage_evidence(kernels=[("nvjet", 100, 70 * MS), CAT]), config={"runtime": {"cache": "static"}})
    assert found("cache_concatenation", static) is None


def test_unfused_elementwise() -> None:
    busy = evidence(
        stage_evidence(fusion=replace(FUSABLE, fusable_ns=40 * MS), kernels=[("nvjet", 9, 40 * MS), (SMALL, 9, 40 * MS)])
    )
    _, saving = known("unfused_elementwise", busy)
    assert (saving.low_ns, saving.expected_ns, saving.high_ns) == (3_800_000, 3_850_000, 3_900_000)
    finding, waiting = known("unfused_elementwise", host_bound())
    assert "fewer launches" in finding.claim
    assert finding.overrides == ["runtime.cache=static", "runtime.compile=default"]
    compiled = replace(host_bound(), facts=replace(host_bound().facts, config={"runtime": {"compile": "reduce-overhead"}}))
    assert known("unfused_elementwise", compiled)[0].overrides == []  # less than what is set would be no trial of it
    assert (waiting.low_ns, waiting.high_ns) == (0, 5_400_000)  # 600 of 1,000 launches go, of 9 ms of gaps a token
    assert found("unfused_elementwise", evidence(stage_evidence(fusion=NOTHING_TO_FUSE))) is None


def test_a_kernel_less_in_a_graph_is_no_launch_less() -> None:
    waiting = host_bound()
    (stage,) = waiting.stages
    graph = replace(waiting, stages=(replace(stage, time=replace(stage.time, launches=stage.units)),))
    finding, saving = known("unfused_elementwise", graph)
    assert "fewer launches" not in finding.claim
    assert finding.overrides == [], "compile=default would take the graphs away"
    assert saving.high_ns == 0 or "saves nothing" in finding.claim


def test_products_without_tensor_cores() -> None:
    plain = evidence(stage_evidence(kernels=[("ampere_sgemm_128x64_tn", 100, 60 * MS), ("nvjet", 10, 20 * MS)]))
    finding, saving = known("products_without_tensor_cores", plain)
    assert finding.overrides == ["model.dtype=bf16"]
    assert saving.expected_ns == 3 * MS
    tensor = [("cutlass_80_tensorop_s1688gemm_bf16", 100, 60 * MS), ("sgemm_tiny", 1, 1 * MS)]
    assert found("products_without_tensor_cores", evidence(stage_evidence(kernels=tensor))) is None
    vector = "void gemv2T_kernel_val<int, int, {0}, {0}, {0}, float, 128, 16, 4, 4, false>"
    for weights, fires in (("float", True), ("__nv_bfloat16", False), ("__half", False)):  # the sums are in fp32 in each of them
        given = evidence(stage_evidence(kernels=[(vector.format(weights), 100, 60 * MS)]))
        assert (found("products_without_tensor_cores", given) is not None) is fires


def test_of_two_stages_the_one_that_saves_more_is_named() -> None:
    plain = [("ampere_sgemm_128x64_tn", 100, 80 * MS)]
    both = evidence(stage_evidence("prefill", kernels=plain, wall_ns=200 * MS, busy_ns=20 * MS), stage_evidence(kernels=plain))
    assert known("products_without_tensor_cores", both)[0].stage == "decode"  # prefill waits for the host: nothing to save there


def test_math_attention() -> None:
    softmax = ("void softmax_warp_forward<float>", 280, 10 * MS)
    given = evidence(stage_evidence(kernels=[("nvjet", 100, 60 * MS), softmax]))
    finding, saving = known("math_attention", given)
    assert finding.overrides == ["runtime.attn_implementation=sdpa"]
    assert (saving.low_ns, saving.expected_ns, saving.high_ns) == (0, 2 * MS, 4 * MS)
    asked = evidence(
        stage_evidence(kernels=[("nvjet", 100, 60 * MS), softmax]), config={"runtime": {"attn_implementation": "sdpa"}}
    )
    assert known("math_attention", asked)[0].overrides == []  # it is set already, and its fused backends were refused
    fused = [("flash_fwd_kernel", 280, 60 * MS), softmax]
    assert found("math_attention", evidence(stage_evidence(kernels=fused))) is None
    sampling = [("nvjet", 100, 60 * MS), ("softmax_warp_forward", 10, 1 * MS)]
    assert found("math_attention", evidence(stage_evidence(kernels=sampling))) is None
    generated = [("nvjet", 100, 60 * MS), ("triton_per_fused__softmax_bmm_3", 280, 10 * MS)]  # by a compiler, on purpose
    assert found("math_attention", evidence(stage_evidence(kernels=generated))) is None
    assert known("math_attention", evidence(stage_evidence("prefill", kernels=generated)))[0].stage == "prefill"


def timings_of(**model: Any) -> CleanTimings:
    made = clean_timings(in_a_row(10, 50 * MS, [10 * MS] * 10))
    return replace(made, model=model_facts(architecture=default_config().model.architecture, dtype="bf16", **model))


def test_logits_for_the_whole_prompt() -> None:
    timings = timings_of(logits="whole prompt")
    timings = replace(timings, workload=replace(timings.workload, prompt_tokens=(100_000, 100_000), padded_tokens=100_000))
    facts: dict[str, Any] = {
        "timings": timings,
        "efficiency": efficiency(
            replace(timings, iterations=tuple(in_a_row(10, 500_000 * MS, [10 * MS] * 10))),
            Missing("none"),
            hardware_named("h100_sxm"),
            Missing("none"),
        ),
    }
    prefill = stage_evidence("prefill", wall_ns=60 * MS, busy_ns=55 * MS, idle={})
    assert known("logits_for_the_whole_prompt", evidence(prefill, **facts))[1].expected_ns > 0
    lean = replace(timings, model=replace(timings.model, logits="last token"))
    assert found("logits_for_the_whole_prompt", evidence(prefill, **{**facts, "timings": lean})) is None


# --- host -------------------------------------------------------------------------------------------------------------


def test_syncs_per_step() -> None:
    calls = replace(QUIET, syncs=20, sync_ns=30 * MS, items=10)
    waiting = stage_evidence(busy_ns=70 * MS, idle={IdleCause.SYNC: 30 * MS}, calls=calls)
    finding, saving = known("syncs_per_step", evidence(waiting))
    assert "2 times per token, 1 of them to read a value" in finding.claim
    assert saving.high_ns == 3 * MS
    assert found("syncs_per_step", evidence(replace(waiting, calls=replace(calls, syncs=1)))) is None


def test_allocations_in_the_loop() -> None:
    given = stage_evidence(calls=replace(QUIET, allocations=10, allocation_ns=5 * MS))
    assert known("allocations_in_the_loop", evidence(given))[1].high_ns == 500_000
    assert found("allocations_in_the_loop", evidence(stage_evidence())) is None


def test_copies_from_the_host() -> None:
    given = stage_evidence(
        busy_ns=80 * MS, idle={IdleCause.COPY_WAIT: 20 * MS}, calls=replace(QUIET, to_device=10, copied_bytes=80)
    )
    finding, saving = known("copies_from_the_host", evidence(given))
    assert "8 bytes" in finding.claim
    assert saving.high_ns == 2 * MS
    assert found("copies_from_the_host", evidence(stage_evidence())) is None


# --- device -----------------------------------------------------------------------------------------------------------


def counted(**values: float) -> StageKernels:
    none = Missing("not counted")
    call = PerCall(
        none, none, none, none, none, **{"sm_pct": 20.0, "dram_pct": 20.0, "occupancy_pct": 60.0, "waves": 4.0, **values}
    )
    row = StageKernel("decode", "slow", "slow", 10, 40 * MS, 0.5, (Variant(1, 32, 10, 40 * MS, 1, False, call),), call)
    return StageKernels("decode", (row,), 80 * MS, 10, 1.0, 0.0, none, none, none, 0, ())


@pytest.mark.parametrize(
    ("rule", "fires", "silent"),
    [
        ("low_occupancy", {"occupancy_pct": 10.0}, {"occupancy_pct": 10.0, "dram_pct": 90.0}),
        ("wave_tail", {"waves": 1.1}, {"waves": 3.9}),
    ],
)
def test_counters(rule: str, fires: dict[str, float], silent: dict[str, float]) -> None:
    assert known(rule, evidence(stage_evidence(counters=counted(**fires))))[1].expected_ns > 0
    assert found(rule, evidence(stage_evidence(counters=counted(**silent)))) is None
    assert found(rule, evidence(stage_evidence())) is None
    tuned = evidence(stage_evidence(counters=counted(**fires)), config={"runtime": {"compile": "max-autotune"}})
    assert known(rule, tuned)[0].overrides == []
    idle = stage_evidence(busy_ns=10 * MS, idle=WAITING, counters=counted(**fires))
    assert known(rule, evidence(idle))[1].high_ns == 0


def of_batch(batch: int, **architecture: Any) -> Evidence:
    """Ten steps of 10 ms of this batch on an H200."""
    timings = timings_of()
    work = replace(timings.workload, batch_size=batch, prompt_tokens=(10,) * batch)
    model = replace(timings.model, architecture={**timings.model.architecture, **architecture})
    return evidence(stage_evidence(), timings=replace(timings, workload=work, model=model), hardware=hardware_named("h200"))


def throughput_of(given: Evidence) -> tuple[Finding, ThroughputLine]:
    finding = found("small_batch", given)
    assert finding is not None
    assert finding.throughput is not None
    return finding, finding.throughput


def test_small_batch_is_about_throughput_and_saves_no_time() -> None:
    finding, line = throughput_of(of_batch(2))
    assert finding.kind == Kind.THROUGHPUT.value
    assert finding.saving_ns is None, "a single request is no faster"
    assert finding.weight_ns == 0, "it is not ranked among savings"
    assert finding.overrides == ["runtime.batch_size=16"]
    assert (line.batch, line.batch_after, line.step_ns, line.step_after_low_ns) == (2, 16, 10 * MS, 10 * MS)
    assert line.step_ns < line.step_after_ns <= line.step_after_high_ns, "the larger step is longer"
    assert finding.counted == 10, "it is verified over the steps that it is based on"
    assert (finding.before_ns, finding.kept) == (5 * MS, 2 / 16)
    assert finding.after_ns == round(line.step_after_ns / 16)
    assert line.tokens_per_s == pytest.approx(200)
    assert line.tokens_per_s_after == pytest.approx(16e9 / line.step_after_ns)
    assert found("small_batch", of_batch(4096)) is None


@pytest.mark.parametrize(("batch", "tokens"), [(1, "one token"), (8, "8 tokens at once")])
def test_small_batch_names_the_batch_that_ran(batch: int, tokens: str) -> None:
    finding, _ = throughput_of(of_batch(batch))
    assert finding.claim.startswith(f"At batch {batch}, a decode step reads the weights for {tokens}.")


def test_small_batch_agrees_with_the_cost_model() -> None:
    """Up to the batch it names, the roofline time is within a tenth of the present one, and not one batch further."""
    finding, _ = throughput_of(of_batch(1, **compose(["model=llama3_8b"]).config.model.architecture))
    named = re.search(r"is ([\d.]+) ms; up to batch ([\d,]+) it stays within 10 % of that \(([\d.]+) ms\)", finding.claim)
    assert named is not None
    batch = int(named[2].replace(",", ""))
    fields = compose(["model=llama3_8b"]).config.model.architecture
    sizes: dict[str, Any] = {"batches": [1, batch, batch + 1], "contexts": [10], "formats": [Formats("bf16", "bf16")]}
    rows = what_if(architecture_of(fields), hardware_named("h200"), **sizes)
    now, last, beyond = (row.decode.seconds * 1e3 for row in rows if not isinstance(row.decode, Missing))
    assert (f"{now:.3g}", f"{last:.3g}") == (named[1], named[3])
    assert last <= 1.1 * now < beyond


@pytest.mark.parametrize(("hardware", "prompt"), [("h100_sxm", 100_000), ("h200", 150_000), ("b200", 250_000)])
def test_the_batch_that_small_batch_proposes_fits_as_the_cost_model_says(hardware: str, prompt: int) -> None:
    """With a prompt so long that memory limits the batch; one sequence more does not fit."""
    fields, device = compose(["model=llama3_8b"]).config.model.architecture, hardware_named(hardware)
    given = of_batch(1, **fields)
    timings = given.facts.timings
    assert not isinstance(timings, Missing)
    work = replace(timings.workload, prompt_tokens=(prompt,), padded_tokens=prompt)
    facts = replace(given.facts, timings=replace(timings, workload=work), hardware=device)
    _, line = throughput_of(replace(given, facts=facts))
    batches, context = [line.batch_after, line.batch_after + 1], prompt + work.new_tokens - 1
    rows = what_if(architecture_of(fields), device, batches=batches, contexts=[context], formats=[Formats("bf16", "bf16")])
    assert [row.fits for row in rows] == [True, False]


def test_small_batch_of_a_mixture_names_the_additional_experts() -> None:
    """What `llm-perf cost model=qwen3_30b_a3b --hardware h200` says, too: a step of batch 8 takes four times as long."""
    finding, line = throughput_of(of_batch(1, **compose(["model=qwen3_30b_a3b"]).config.model.architecture))
    grown = re.search(r"grows from ([\d.]+) ms to ([\d.]+) ms at batch 8: more sequences use more experts", finding.claim)
    assert grown is not None
    assert float(grown[2]) / float(grown[1]) == pytest.approx(5.47 / 1.28, rel=0.02)
    assert line.step_after_ns - line.step_ns == pytest.approx((float(grown[2]) - float(grown[1])) * MS, rel=0.01)
    assert "stays within" not in finding.claim


def test_overrides_that_the_configuration_rejects_become_words() -> None:
    """Sub-stages cannot be bracketed in a compiled step: the tool would refuse what it proposes."""
    waiting = stage_evidence(busy_ns=10 * MS, idle=WAITING, fusion=FUSABLE)
    plain = asdict(compose(["model=tiny"]).config)
    bracketed = {**plain, "model": {**plain["model"], "substages": {"mlp": "model.layers.*.mlp"}}}
    takes, refuses = (find(evidence(waiting, config=config))[0] for config in (plain, bracketed))
    assert takes.id == refuses.id == "launch_bound_decode"
    assert takes.overrides == ["runtime.cache=static", "runtime.compile=reduce-overhead"]
    assert refuses.overrides == []
    assert refuses.change.startswith(takes.change)
    assert "substages" in refuses.change


@pytest.mark.parametrize("method", ["vllm", "sglang", "tensorrt_llm", "atom"])
def test_an_engines_trace_gets_no_settings_of_this_tool(method: str) -> None:
    waiting = evidence(stage_evidence(busy_ns=10 * MS, idle=WAITING, fusion=FUSABLE))
    assert find(waiting)[0].overrides
    for finding in find(replace(waiting, method=method)):
        assert finding.overrides == []
        assert finding.change


def test_launches_predict_a_time_gaps_a_share_and_kernels_a_saving() -> None:
    """What is verified when the base is measured again: the time after, what stays of the gaps, or the saving."""
    few: dict[str, Any] = {"busy_ns": 20 * MS, "kernels": [("nvjet_a", 1000, 18 * MS)], "fusion": FUSABLE}
    waiting = stage_evidence(idle={IdleCause.LAUNCH_BOUND: 80 * MS}, **few)
    launches = known("launch_bound_decode", evidence(waiting))[1]
    longer = stage_evidence(wall_ns=200 * MS, idle={IdleCause.LAUNCH_BOUND: 180 * MS}, **few)
    again = known("launch_bound_decode", evidence(longer))[1]
    assert launches.after is not None
    assert again.after is not None
    assert launches.after.kept == 0
    assert (again.after.expected_ns, again.after.low_ns) == (launches.after.expected_ns, launches.after.low_ns)
    gaps, more = (known("unfused_elementwise", evidence(one))[1] for one in (waiting, longer))
    assert gaps.after is not None
    assert more.after is not None
    moved = gaps.after.expected_ns + gaps.after.kept * (more.after.before_ns - gaps.after.before_ns)
    assert moved == pytest.approx(more.after.expected_ns, abs=1)
    kernels = known("cache_concatenation", evidence(stage_evidence(busy_ns=95 * MS, kernels=[CAT])))[1]
    assert kernels.after is not None
    assert kernels.after.kept == 1


# --- trust ------------------------------------------------------------------------------------------------------------


def summary(*ids: WarningId) -> TelemetrySummary:
    return TelemetrySummary((), (), "", tuple(RunWarning(id, f"A warning of {id.value}.") for id in ids))


def test_throttled() -> None:
    given = evidence(stage_evidence(), telemetry=summary(WarningId.THROTTLED))
    finding = found("throttled", given)
    assert finding is not None
    assert finding.saving_ns is None
    assert found("throttled", evidence(stage_evidence(), telemetry=summary())) is None


def test_noisy_machine() -> None:
    noisy = found("noisy_machine", evidence(stage_evidence(), timings=clean_timings(stable=False)))
    assert noisy is not None
    assert not any(text.endswith(".") for text in noisy.evidence), "the renderer ends the sentence"
    unsettled = clean_timings(settled=False, warmup=(iteration(),))
    warned = [warning.text for warning in run_warnings(manifest(), unsettled, (), Missing("no telemetry"))]
    varying = found("noisy_machine", evidence(stage_evidence(), timings=unsettled))
    assert varying is not None
    assert warned == [f"{text}." for text in varying.evidence] == ["The times had not settled after 1 warm-up iteration."]
    assert found("noisy_machine", evidence(stage_evidence(), telemetry=summary(WarningId.BUSY_PROCESSORS))) is not None
    assert found("noisy_machine", evidence(stage_evidence(), timings=clean_timings(), telemetry=summary())) is None


def test_profiler_inflation() -> None:
    def given(factor: float) -> Evidence:
        return evidence(stage_evidence(), trace_pass="torch", overheads=(PassOverhead("torch", 1.0, factor, 10),))

    assert found("profiler_inflation", given(4.7)) is not None
    assert found("profiler_inflation", given(1.5)) is None
    nsys = evidence(stage_evidence(), trace_pass="nsys", overheads=(PassOverhead("nsys", 20.0, 1.0, 10),))
    advised = found("profiler_inflation", nsys)
    assert advised is not None
    assert "profiling.torch.preset" not in advised.change, "a setting of another pass"


def test_passes_disagree() -> None:
    assert found("passes_disagree", evidence(stage_evidence(wall_ns=50 * MS, idle={}))) is not None
    assert found("passes_disagree", evidence(stage_evidence())) is None


# --- all together -----------------------------------------------------------------------------------------------------


def test_findings_are_ranked_latency_first_by_what_a_request_saves() -> None:
    given = evidence(
        *host_bound().stages,
        stage_evidence("prefill", busy_ns=10 * MS, idle=WAITING),
        timings=timings_of(),
        hardware=hardware_named("h200"),
        telemetry=summary(WarningId.THROTTLED),
    )
    kinds = [one.kind for one in find(given)]
    assert kinds == sorted(kinds, key=[kind.value for kind in Kind].index)
    weights = [one.weight_ns for one in find(given) if one.kind == Kind.LATENCY.value]
    assert weights == sorted(weights, reverse=True)
    assert find(given)[0].id == "launch_bound_decode"


def test_a_steppable_runtime_gets_words_not_settings_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    given = host_bound()
    other = replace(given, facts=replace(given.facts, config={"runtime": {"type": "other"}}))
    assert found("launch_bound_decode", other) is None, "an engine has arguments of its own"
    steppable = Runtime("other", "", steppable=True)
    monkeypatch.setattr("llm_perf_opt.analysis.findings.remedies.traits_of", lambda _: steppable)
    finding, _ = known("launch_bound_decode", other)
    assert finding.overrides == []
    assert "CUDA graph" in finding.to_try


def test_a_sound_stage_is_left_alone() -> None:
    assert find(evidence(stage_evidence(), stage_evidence("prefill"))) == ()


def test_no_stage_no_finding() -> None:
    assert all(rule(evidence()) is None for rule in RULES)


def test_a_saving_lies_within_its_bounds() -> None:
    with pytest.raises(ValueError, match="not within"):
        Saving(5, 6, 7, "token")


# --- honest on the wall clock, and something that can be tried ------------------------------------------------------------


def test_a_host_that_mostly_does_its_own_work_is_no_launch_bound_decode() -> None:
    """Graphs launch faster; they do not make the host's own work between steps go away."""
    own = stage_evidence(busy_ns=10 * MS, idle={IdleCause.LAUNCH_BOUND: 30 * MS, IdleCause.HOST_BETWEEN_STEPS: 60 * MS})
    assert found("launch_bound_decode", evidence(own)) is None
    assert known("host_between_steps", evidence(own))[1].high_ns == 6 * MS


def test_at_worst_graphs_leave_waiting_and_the_hosts_own_work_as_they_are() -> None:
    idle = {IdleCause.LAUNCH_BOUND: 60 * MS, IdleCause.SYNC: 20 * MS, IdleCause.HOST_BETWEEN_STEPS: 10 * MS}
    mixed = replace(host_bound().stages[0], budget=stage_evidence(busy_ns=10 * MS, idle=idle).budget)
    bare, stays = (known("launch_bound_decode", evidence(one))[1] for one in (host_bound().stages[0], mixed))
    assert (stays.expected_ns, stays.high_ns) == (bare.expected_ns, bare.high_ns)
    assert stays.low_ns == bare.low_ns - 3 * MS


def test_graphs_that_are_already_enabled_are_not_proposed_again() -> None:
    given = host_bound()
    config = {"runtime": {"type": "pytorch", "cache": "static", "compile": "reduce-overhead"}}
    finding, _ = known("launch_bound_decode", replace(given, facts=replace(given.facts, config=config)))
    assert finding.overrides == []
    assert "graph_breaks" in finding.to_try


def test_calls_that_cost_nothing_are_no_finding() -> None:
    """A device that has enough queued does not notice that its host waits, allocates or copies."""
    calls = replace(QUIET, syncs=20, sync_ns=30 * MS, allocations=20, allocation_ns=5 * MS, to_device=20)
    busy = stage_evidence(busy_ns=100 * MS, idle={}, calls=calls)
    assert {one.id for one in find(evidence(busy))} == set()


def test_communication_is_not_taken_for_copies_from_the_host() -> None:
    given = stage_evidence(
        busy_ns=80 * MS, idle={IdleCause.COPY_WAIT: 20 * MS}, calls=replace(QUIET, to_device=10), collective_ns=15 * MS
    )
    assert known("copies_from_the_host", evidence(given))[1].high_ns == 500_000


def test_every_override_that_is_proposed_composes() -> None:
    """Each rule's own evidence, all on the plain runtime: what is to be tried is a setting that there is."""
    fires = counted(occupancy_pct=10.0, waves=1.1)
    waiting = replace(QUIET, syncs=20, sync_ns=MS, allocations=20, allocation_ns=5 * MS, to_device=20)
    softmax = ("void softmax_warp_forward<float>", 280, 10 * MS)
    busy = stage_evidence(
        kernels=[("cutlass_80_simt_sgemm", 100, 40 * MS), CAT, softmax, (SMALL, 800, 10 * MS)],
        fusion=FUSABLE, counters=fires, calls=waiting,
    )  # fmt: skip
    facts = {"timings": timings_of(), "hardware": hardware_named("h200"), "config": {"runtime": {"cache": "dynamic"}}}
    proposed: dict[str, list[str]] = {}
    for given in (evidence(busy, **facts), evidence(busy), replace(host_bound(), facts=evidence(**facts).facts)):
        for finding in find(given):
            assert finding.overrides or finding.change
            proposed[f"{finding.id} {finding.overrides}"] = finding.overrides
    assert {key.split()[0] for key in proposed} >= {
        "launch_bound_decode", "unfused_elementwise", "cache_concatenation", "products_without_tensor_cores", "math_attention",
        "low_occupancy", "wave_tail", "small_batch", "allocations_in_the_loop",
    }  # fmt: skip
    tried = [overrides for overrides in proposed.values() if overrides]
    assert len(tried) >= 8
    for overrides in tried:
        compose(["model=tiny", *overrides])


@hypothesis.given(
    st.integers(0, 120), st.integers(0, 100), st.integers(0, 100), st.integers(0, 100), st.floats(0.1, 1.0), st.booleans(),
    st.integers(0, 40), st.integers(0, 100), st.integers(100, 300),
)  # fmt: skip
def test_every_saving_is_between_zero_and_the_time_of_the_stage(
    busy: int, launch: int, host: int, sync: int, overlap: float, unprofiled: bool, calls: int, least: int, most: int
) -> None:
    causes = {IdleCause.LAUNCH_BOUND: launch * MS, IdleCause.HOST_BETWEEN_STEPS: host * MS, IdleCause.SYNC: sync * MS}
    asked = replace(QUIET, syncs=calls, sync_ns=calls * MS, allocations=calls, allocation_ns=calls * MS, to_device=calls)
    softmax = ("void softmax_warp_forward<float>", 280, 60 * MS)
    made = [
        stage_evidence(
            name, busy_ns=busy * MS, idle=causes, calls=asked, overlap=overlap, unprofiled=unprofiled, fusion=FUSABLE,
            wall_ends_ns=(least * MS, most * MS),
            counters=counted(occupancy_pct=10.0, waves=1.1), kernels=[("cutlass_80_simt_sgemm", 100, 40 * MS), CAT, softmax],
        )
        for name in ("decode", "prefill")
    ]  # fmt: skip
    for finding in find(evidence(*made)):
        if finding.saving_ns is None:
            continue
        stage = next(one for one in made if one.name == finding.stage)
        saving = saving_in(finding)
        assert 0 <= saving.low_ns <= saving.expected_ns <= saving.high_ns <= stage.wall_ns

"""Findings for the user of an engine: they speak its arguments, predict by hand-made figures, and are silent without evidence."""

from dataclasses import replace
from typing import Any

import pytest

from builders import MS, clean_timings, in_a_row, model_facts, torch_pass
from evidence_builders import evidence, stage_evidence
from llm_perf_opt.analysis.budget import BudgetKey, BudgetRow
from llm_perf_opt.analysis.evidence import Evidence
from llm_perf_opt.analysis.findings.registry import find
from llm_perf_opt.analysis.limits.efficiency import efficiency
from llm_perf_opt.analysis.limits.hardware import hardware_named
from llm_perf_opt.analysis.overhead import overheads
from llm_perf_opt.analysis.trace.document import Finding
from llm_perf_opt.analysis.trace.host_calls import Fusion
from llm_perf_opt.analysis.trace.idle import IdleCause
from llm_perf_opt.config.composition import compose
from llm_perf_opt.core.engine_records import ChangedEngine, EngineSetting
from llm_perf_opt.core.records import CleanTimings, Missing, RuntimeFacts
from llm_perf_opt.core.remedy_records import EngineRemedy, Remedy

LLAMA = compose(["model=llama3_8b"]).config.model.architecture
H200 = hardware_named("h200")
ECHO = {"runtime": {"type": "echo", "engine": {}}}
"""The configuration of a run by an engine of another package; it cannot be checked, so nothing is rejected."""
GRAPH = Fusion(
    kept_kernels=200, kept_ns=6 * MS, fusable_kernels=800, fusable_ns=4 * MS, runs=100, sizes=300, least_ns=1 * MS, most_ns=2 * MS
)


def remedy(kind: Remedy, before: float = 0, after: float = 0, **changes: Any) -> EngineRemedy:
    made = EngineRemedy(kind.value, ("runtime.engine.some=1",), "Pass some=1 to the engine.", "some=0", before, after)
    return replace(made, **changes)


def timings(*remedies: EngineRemedy, batch: int = 1, prompt: int = 512, prefill_ms: float = 50, **runtime: Any) -> CleanTimings:
    """Llama-3-8B in bf16, ten steps of 10 ms."""
    made = clean_timings(in_a_row(10, round(prefill_ms * MS), [10 * MS] * 10))
    work = replace(made.workload, batch_size=batch, prompt_tokens=(prompt,) * batch, padded_tokens=prompt)
    model = model_facts(architecture=LLAMA, dtype="bf16", device="cuda:0", parameters=8_030_261_248, weight_bytes=16_060_522_496)
    facts = RuntimeFacts("echo", "1", "by arrival", remedies=remedies, **runtime)
    return replace(made, workload=work, model=model, runtime=facts)


def given(stage: Any, *remedies: EngineRemedy, **changes: Any) -> Evidence:
    times = timings(*remedies, **changes)
    slow = replace(times, iterations=tuple(in_a_row(10, 500_000 * MS, [10_000 * MS] * 10)))
    distance = efficiency(slow, Missing("none"), H200, Missing("none"))  # only its peaks are used, which no time may exceed
    stages = () if stage is None else (stage,)
    return evidence(*stages, timings=times, hardware=H200, efficiency=distance, config=ECHO)


def found(id: str, evidence: Evidence) -> Finding | None:
    return next((finding for finding in find(evidence) if finding.id == id), None)


def known(id: str, evidence: Evidence) -> Finding:
    finding = found(id, evidence)
    assert finding is not None, [each.id for each in find(evidence)]
    assert finding.overrides == ["runtime.engine.some=1"]
    assert "some=0" in finding.evidence
    return finding


def savings(finding: Finding) -> tuple[float, float, float]:
    """Least, expected and most, in ms per unit."""
    values = (finding.saving_low_ns, finding.saving_ns, finding.saving_high_ns)
    assert None not in values
    low, expected, high = (value / MS for value in values if value is not None)
    return low, expected, high


# --- steps ------------------------------------------------------------------------------------------------------------

BETWEEN = {IdleCause.HOST_BETWEEN_STEPS: 18 * MS, IdleCause.SYNC: 2 * MS}


def test_host_work_between_steps_hides_behind_the_kernels() -> None:
    """Ten steps of 10 ms: 8 ms of kernels, 1.8 ms of host work and 0.2 ms of waiting."""
    stage = stage_evidence(busy_ns=80 * MS, idle=BETWEEN)
    finding = known("unoverlapped_scheduling", given(stage, remedy(Remedy.OVERLAP)))
    assert savings(finding) == pytest.approx((0.9, 1.8, 2.0))
    assert found("unoverlapped_scheduling", given(stage)) is None, "the engine already does it"
    assert found("unoverlapped_scheduling", given(stage_evidence(), remedy(Remedy.OVERLAP))) is None, "launches, not host work"


def test_work_longer_than_the_kernels_is_hidden_only_as_far_as_they_go() -> None:
    stage = stage_evidence(busy_ns=30 * MS, idle={IdleCause.HOST_BETWEEN_STEPS: 70 * MS}, kernels=[("nvjet", 10, 30 * MS)])
    assert savings(known("unoverlapped_scheduling", given(stage, remedy(Remedy.OVERLAP))))[1] == pytest.approx(3.0)


def eager(**changes: Any) -> Any:
    """Ten steps of 10 ms in 100 launches each: 1 ms of kernels, 8 ms of launch gaps, 1 ms of host work."""
    idle = {IdleCause.LAUNCH_BOUND: 80 * MS, IdleCause.HOST_BETWEEN_STEPS: 10 * MS}
    kernels = [("nvjet", 200, 6 * MS), ("void at::native::vectorized_elementwise_kernel<add>", 800, 4 * MS)]
    return stage_evidence(busy_ns=10 * MS, idle=idle, fusion=GRAPH, kernels=kernels, **changes)


def test_an_eager_engine_is_predicted_in_graphs() -> None:
    """0.6 ms stay, 0.1 to 0.2 ms are fused, and 40 kernels are 0.5 µs apart; host work stays unless it is overlapped."""
    finding = known("eager_engine", given(eager(), remedy(Remedy.GRAPHS)))
    assert finding.after_ns == pytest.approx(0.77 * MS, rel=0.001)
    assert finding.after_low_ns == pytest.approx(0.7 * MS, rel=0.001)
    assert finding.after_high_ns == pytest.approx(1.85 * MS, rel=0.001)
    alone = known("eager_engine", given(eager(), remedy(Remedy.GRAPHS), remedy(Remedy.OVERLAP)))
    assert alone.after_ns == pytest.approx(1.77 * MS, rel=0.001)
    assert found("eager_engine", given(eager())) is None
    assert found("eager_engine", given(eager(launches=10), remedy(Remedy.GRAPHS))) is None, "graphs already"


def test_a_batch_without_a_graph_is_predicted_in_one() -> None:
    finding = known("uncaptured_batch", given(eager(), remedy(Remedy.GRAPH_SIZES, 0, 3), batch=3))
    assert finding.after_ns == pytest.approx(0.77 * MS, rel=0.001)


def test_padding_is_a_finding_only_where_it_costs_something() -> None:
    """A memory-bound step reads the weights once, whatever its batch; a compute-bound one grows with it."""
    busy = stage_evidence(busy_ns=95 * MS, idle={IdleCause.LAUNCH_BOUND: 5 * MS})
    assert found("uncaptured_batch", given(busy, remedy(Remedy.GRAPH_SIZES, 4, 3), batch=3)) is None
    finding = known("uncaptured_batch", given(busy, remedy(Remedy.GRAPH_SIZES, 1024, 513), batch=513))
    low, expected, high = savings(finding)
    assert low == 0
    assert 1 < expected < high == pytest.approx(9.5 * (1 - 513 / 1024), rel=0.001)


def test_piecewise_graphs() -> None:
    """33 launches per token, 1 ms of gaps between them."""
    stage = stage_evidence(launches=330)
    assert savings(known("piecewise_graphs", given(stage, remedy(Remedy.FULL_GRAPHS)))) == pytest.approx((0, 0.5, 1.0))
    assert found("piecewise_graphs", given(stage_evidence(launches=10), remedy(Remedy.FULL_GRAPHS))) is None, "one graph"
    assert found("piecewise_graphs", given(stage)) is None


def test_a_split_prefill_reads_the_weights_again() -> None:
    """8 steps of 64 tokens are memory-bound: each reads 15 GB in 3.1 ms, but 512 tokens at once take about 8 ms."""
    finding = known("split_prefill", given(None, remedy(Remedy.LARGER_STEP, 64, 512)))
    low, expected, high = savings(finding)
    assert (low, high) == pytest.approx((0, 50 * 7 / 8))
    assert 30 < expected < high
    assert (finding.stage, finding.saving_per, finding.before_ns) == ("prefill", "prefill", 50 * MS)
    whole = given(None, remedy(Remedy.LARGER_STEP, 8192, 16384), prompt=16384)
    assert found("split_prefill", whole) is None, "compute-bound steps lose nothing"


def test_idle_time_of_each_step_counts_without_a_cost_model() -> None:
    prefill = stage_evidence("prefill", wall_ns=50 * MS, busy_ns=30 * MS, idle={IdleCause.LAUNCH_BOUND: 20 * MS})
    times = timings(remedy(Remedy.LARGER_STEP, 256, 512))
    unknown = replace(times, model=replace(times.model, architecture={"model_type": "unheard-of"}))
    finding = known("split_prefill", evidence(prefill, timings=unknown, config=ECHO))
    assert savings(finding)[1] == pytest.approx(10)


def test_a_split_prefill_that_ran_with_decode_is_compared_over_the_request() -> None:
    """A request of 150 ms, whose first tokens take 50 ms."""
    offer = remedy(Remedy.LARGER_STEP, 64, 512)
    alone = known("split_prefill", given(None, offer))
    mixed = known("split_prefill", given(None, offer, inseparable="prompts and tokens were mixed", held_back=False))
    assert (mixed.stage, mixed.saving_per, mixed.before_ns) == ("request", "request", 150 * MS)
    assert savings(mixed) == savings(alone)
    assert "mixed" in mixed.because
    for waited in (True, None):
        assert found("split_prefill", given(None, offer, inseparable="mixed", held_back=waited)) is None


def test_what_the_engine_runs_is_not_that_of_the_cost_model() -> None:
    offer = remedy(Remedy.LARGER_STEP, 64, 512)
    assert found("split_prefill", given(None, offer, uncosted="the weights are quantized")) is None


def test_sequences_that_wait() -> None:
    """Two of four at once: all four would take between half of the time and all of it."""
    waiting = given(None, remedy(Remedy.MORE_SEQUENCES, 2, 4), batch=4, inseparable="some sequences were held back")
    finding = known("held_back_sequences", waiting)
    assert (finding.stage, finding.saving_per) == ("request", "request")
    assert savings(finding) == pytest.approx((0, 37.5, 75.0))
    together = given(None, remedy(Remedy.MORE_SEQUENCES, 2, 4), batch=4)
    assert found("held_back_sequences", together) is None, "the arrival times show that none waited"
    chunked = given(None, remedy(Remedy.MORE_SEQUENCES, 2, 4), batch=4, inseparable="mixed", held_back=False)
    assert found("held_back_sequences", chunked) is None, "inseparable for another reason"


# --- bytes ------------------------------------------------------------------------------------------------------------


def memory_bound(**changes: Any) -> Any:
    """Ten steps of 4 ms, of which kernels take 3.8 ms."""
    kernels = [("nvjet_sm90_tst_128x8", 1000, 34 * MS), ("flash_fwd_splitkv_kernel", 320, 4 * MS)]
    return stage_evidence(
        wall_ns=40 * MS, busy_ns=38 * MS, idle={IdleCause.LAUNCH_BOUND: 2 * MS}, kernels=kernels, launches=10, **changes
    )


def test_quantized_weights_save_their_bytes_at_the_bandwidth() -> None:
    """13.96 GB of linear layers become 6.98 GB: 1.454 ms at 4.8 TB/s. Of 3.4 ms of products, at most half is saved."""
    offer = remedy(Remedy.WEIGHT_FORMAT, 16, 8, alters_output=True)
    finding = known("wide_weights", given(memory_bound(), offer))
    assert savings(finding) == pytest.approx((0, 1.454, 1.7), rel=0.01)
    assert "output changes" in finding.change
    waiting = stage_evidence(busy_ns=30 * MS, idle={IdleCause.LAUNCH_BOUND: 70 * MS}, launches=10)
    assert found("wide_weights", given(waiting, offer)) is None, "the device waits for the host"
    assert found("wide_weights", given(memory_bound())) is None


def test_a_narrow_cache_matters_with_long_contexts() -> None:
    """64 sequences of 4,096 tokens: 34 GB of cache, which is 7.2 ms per step at 4.8 TB/s; half of it is saved."""
    offer = remedy(Remedy.CACHE_FORMAT, 16, 8, alters_output=True)
    kernels = [("nvjet_sm90_tst_128x8", 1000, 40 * MS), ("flash_fwd_splitkv_kernel", 320, 75 * MS)]
    stage = stage_evidence(
        wall_ns=120 * MS, busy_ns=115 * MS, idle={IdleCause.LAUNCH_BOUND: 5 * MS}, kernels=kernels, launches=10
    )
    finding = known("wide_cache", given(stage, offer, batch=64, prompt=4096))
    low, expected, high = savings(finding)
    assert expected == pytest.approx(64 * 4101 * 131_072 / 4.8e12 / 2 * 1e3, rel=0.02)
    assert (low, high) == pytest.approx((0, 3.75), rel=0.01)
    assert found("wide_cache", given(memory_bound(), offer)) is None, "a short context is hardly any bytes"


def test_attention_far_from_its_roofline() -> None:
    """512 tokens of cache take 14 µs at 4.8 TB/s; the kernels take 1 ms of each step."""
    kernels = [("nvjet_sm90_tst_128x8", 1000, 28 * MS), ("flash_fwd_splitkv_kernel", 320, 10 * MS)]
    stage = stage_evidence(wall_ns=40 * MS, busy_ns=38 * MS, idle={IdleCause.LAUNCH_BOUND: 2 * MS}, kernels=kernels, launches=10)
    low, expected, high = savings(known("slow_attention", given(stage, remedy(Remedy.ATTENTION))))
    assert (low, high) == pytest.approx((0, 0.986), abs=0.002)
    assert expected == pytest.approx(high / 2)
    assert found("slow_attention", given(stage)) is None, "there is no other backend"
    near = given(stage, remedy(Remedy.ATTENTION), batch=32, prompt=4096)
    assert found("slow_attention", near) is None, "so long a context takes that long"


def test_a_shared_prefix_is_computed_once() -> None:
    """Of 8,192 tokens 6,144 are shared: compute-bound products take a quarter of their time."""
    finding = known("unshared_prefix", given(None, remedy(Remedy.PREFIX_CACHE, 8192, 2048), batch=8, prompt=1024))
    low, expected, high = savings(finding)
    assert (expected, high) == pytest.approx((37.5, 37.5), rel=0.02)
    assert low == pytest.approx(expected / 2, rel=0.001)
    mixed = given(None, remedy(Remedy.PREFIX_CACHE, 8192, 1024), batch=8, prompt=1024, inseparable="mixed", held_back=False)
    assert found("unshared_prefix", mixed) is None, "the time of prefill is not known"
    few = given(None, remedy(Remedy.PREFIX_CACHE, 8192, 8064), batch=8, prompt=1024)
    assert found("unshared_prefix", few) is None


def test_a_prefix_of_a_memory_bound_prefill_saves_little() -> None:
    """128 tokens read the weights once, and so do 64."""
    assert found("unshared_prefix", given(None, remedy(Remedy.PREFIX_CACHE, 128, 64), batch=2, prompt=64)) is None


def test_speculation_is_a_range_with_its_condition() -> None:
    """Five tokens per step take hardly longer; none to all of the four proposals may be accepted."""
    finding = known("one_token_per_step", given(memory_bound(), remedy(Remedy.SPECULATION, 1, 5)))
    low, expected, high = savings(finding)
    assert low == 0
    assert 4 * (1 - 1 / 1.332) * 0.9 < expected < 4 * (1 - 1 / 1.332) < high < 4 * 4 / 5
    assert finding.confidence == "low"
    assert finding.counted == 0, "a trial is compared over the whole decode"
    assert "accepted" in finding.claim
    large = given(memory_bound(), remedy(Remedy.SPECULATION, 1, 5), batch=256)
    assert found("one_token_per_step", large) is None, "verifying takes longer"


def test_speculation_pays_for_what_it_turns_off() -> None:
    """Without overlap, a step takes 1 ms longer, as a profiled pass measured: 4 ms and 1 ms by 1.332 tokens."""
    offer = remedy(Remedy.SPECULATION, 1, 5, implied=("async_scheduling=False",))
    changed = ChangedEngine((EngineSetting("async_scheduling", "False", "labels"),), {"decode": 110 * MS}, 10, 6)
    plain = given(memory_bound(), offer)
    costs = overheads(timings(offer), torch_pass(engine=changed), {})  # steps of 11 ms, 10 ms unprofiled
    finding = known("one_token_per_step", replace(plain, facts=replace(plain.facts, overheads=costs)))
    free = known("one_token_per_step", given(memory_bound(), remedy(Remedy.SPECULATION, 1, 5)))
    assert finding.after_ns is not None
    assert free.after_ns is not None
    assert (finding.after_ns - free.after_ns) / MS == pytest.approx(1 / 1.332, rel=0.001)
    assert finding.kept == free.kept
    unmeasured = known("one_token_per_step", plain)
    assert unmeasured.after_ns == free.after_ns
    assert "async_scheduling=False" in unmeasured.because
    slower = overheads(timings(offer), torch_pass(engine=replace(changed, stage_wall_ns={"decode": 120 * MS})), {})
    assert found("one_token_per_step", replace(plain, facts=replace(plain.facts, overheads=slower))) is None, "nothing is saved"


def test_speculation_of_an_older_run_pays_too() -> None:
    """The record has no `implied`: what the condition names counts if a pass changed it; otherwise the reason is given."""
    offer = remedy(Remedy.SPECULATION, 1, 5, condition="The engine does not overlap scheduling with them (async_scheduling).")
    assert offer.implied is None
    changed = ChangedEngine((EngineSetting("async_scheduling", "False", "labels"),), {"decode": 120 * MS}, 10, 6)
    plain = given(memory_bound(), offer)
    costs = overheads(timings(offer), torch_pass(engine=changed), {})  # steps of 12 ms, 10 ms unprofiled
    slower = replace(plain, facts=replace(plain.facts, overheads=costs))
    assert found("one_token_per_step", slower) is None, "4 ms and 2 ms by 1.332 tokens is no saving"
    assert "did not record" in known("one_token_per_step", plain).because, "no pass changed it"
    silent = given(memory_bound(), replace(offer, condition=""))
    unknown = known("one_token_per_step", replace(silent, facts=replace(silent.facts, overheads=costs)))
    assert "did not record" in unknown.because


def test_graphs_keep_the_time_that_only_the_unchanged_engine_has() -> None:
    """Of the 9 ms of idle time per step, 2 ms are not in the trace: no prediction takes them away."""
    stage = eager()
    rows = (*stage.budget.rows, BudgetRow(BudgetKey.UNCHANGED, 20 * MS, 0.2))
    other = replace(stage, budget=replace(stage.budget, rows=rows))
    plain, kept = (known("eager_engine", given(each, remedy(Remedy.GRAPHS))) for each in (stage, other))
    for before, after in ((plain.after_ns, kept.after_ns), (plain.after_high_ns, kept.after_high_ns)):
        assert before is not None
        assert after == pytest.approx(before + 2 * MS, rel=0.001)


def test_speculation_gets_no_credit_for_what_other_changes_save() -> None:
    """A step with all changes of the pass takes 9 ms, 1 ms less: the engine core in the measured process saved it."""
    offer = remedy(Remedy.SPECULATION, 1, 5, implied=("async_scheduling=False",))
    changed = ChangedEngine((EngineSetting("async_scheduling", "False", "labels"),), {"decode": 90 * MS}, 10, 6)
    costs = overheads(timings(offer), torch_pass(engine=changed), {})
    plain = given(memory_bound(), offer)
    finding = known("one_token_per_step", replace(plain, facts=replace(plain.facts, overheads=costs)))
    free = known("one_token_per_step", given(memory_bound(), remedy(Remedy.SPECULATION, 1, 5, implied=())))
    assert finding.after_ns == free.after_ns


# --- who is told what -------------------------------------------------------------------------------------------------


def test_an_engines_user_reads_nothing_about_pytorch() -> None:
    """What the same stage says to a user of PyTorch is left out, and what speaks of the batch or of trust stays."""
    stages = (eager(), stage_evidence("prefill", busy_ns=10 * MS, idle={IdleCause.LAUNCH_BOUND: 90 * MS}))
    times = timings(remedy(Remedy.GRAPHS))
    facts: dict[str, Any] = {"timings": times, "hardware": H200}
    own = {finding.id for finding in find(evidence(*stages, **facts))}
    engine = {finding.id for finding in find(evidence(*stages, **facts, config=ECHO))}
    assert own >= {"launch_bound_decode", "launch_bound_prefill", "unfused_elementwise", "host_between_steps"}
    assert engine == {"eager_engine", "small_batch"}


def test_the_trace_of_an_engine_alone_gets_words() -> None:
    for method in ("vllm", "sglang"):
        findings = find(replace(evidence(eager()), method=method))
        assert {finding.id for finding in findings} == {"eager_engine", "unoverlapped_scheduling"}
        assert all(not finding.overrides and finding.change for finding in findings)


def test_an_argument_that_the_configuration_rejects_is_not_proposed() -> None:
    config = {**compose_values("runtime=vllm"), "dataset": None}
    finding = found("eager_engine", evidence(eager(), timings=timings(remedy(Remedy.GRAPHS)), config=config))
    assert finding is not None
    assert finding.overrides == ["runtime.engine.some=1"], "an incomplete configuration cannot be checked"


def compose_values(*words: str) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(compose(["model=tiny", *words]).config)


def test_a_kind_of_a_later_version_is_ignored() -> None:
    later = replace(remedy(Remedy.GRAPHS), kind="teleportation")
    assert [finding.id for finding in find(given(stage_evidence(), later))] == ["small_batch"]

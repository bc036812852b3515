"""Latency and throughput from handmade timings, with the arithmetic next to each figure."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import MS, clean_timings, in_a_row, iteration, torch_pass, workload
from llm_perf_opt.analysis.evidence import RunFacts, unprofiled_wall
from llm_perf_opt.analysis.limits.efficiency import stage_samples
from llm_perf_opt.analysis.metrics import METRICS, NO_DECODE, compile_seconds, context_drift, metrics, stage_timings
from llm_perf_opt.core.records import (
    CleanTimings,
    Distribution,
    Drift,
    Iteration,
    Missing,
    RuntimeFacts,
    StageTiming,
    SubstageSpan,
)
from llm_perf_opt.core.stages import Stage

NO_TORCH = Missing("the run was made without the torch pass")


def figure(timings: CleanTimings, key: str) -> Distribution:
    value = next(metric.value for metric in metrics(timings) if metric.key == key)
    assert isinstance(value, Distribution)
    return value


def reason(timings: CleanTimings, key: str) -> str:
    value = next(metric.value for metric in metrics(timings) if metric.key == key)
    assert isinstance(value, Missing)
    return value.why


def stages(timings: CleanTimings) -> dict[str, StageTiming]:
    return {row.name: row for row in stage_timings(timings, NO_TORCH)}


# --- figures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "median"),
    [
        # two sequences, prompts of 10 and 6 tokens, 4 new tokens each: prefill 100 ms, then steps of 10, 20 and 30 ms
        ("ttft", 100 * MS),
        ("tpot", 20 * MS),  # (160 − 100) / (4 − 1)
        ("e2e", 160 * MS),  # 100 + 10 + 20 + 30
        ("itl_p50", 20 * MS),  # the middle one of 10, 20, 30
        ("prefill_rate", 160),  # (10 + 6) / 0.1 s; padding does not count
        ("decode_rate", 100),  # 2 / 0.02 s
        ("output_rate", 50),  # 2 · 4 / 0.16 s
    ],
)
def test_figures_to_the_eye(key: str, median: float) -> None:
    found = figure(clean_timings(), key)
    assert found.median == pytest.approx(median, rel=1e-12)
    assert found.n == 10


def test_figures_are_distributions_over_the_repeats() -> None:
    timings = clean_timings([iteration(prefill_ns=prefill * MS) for prefill in (90, 80, 100, 120, 110, 70, 130)])
    found = figure(timings, "ttft")
    assert (found.minimum, found.median, found.maximum, found.n) == (70 * MS, 100 * MS, 130 * MS, 7)
    assert (found.ci_low, found.ci_high) == (70 * MS, 130 * MS), "of seven, the least and the greatest"


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 10**9), st.lists(st.integers(1, 10**9), min_size=3, max_size=3)), min_size=1, max_size=40)
)
def test_a_rate_follows_from_the_time_next_to_it(requests: list[tuple[int, list[int]]]) -> None:
    """Also of an even number of repeats, whose middle two are averaged, and at the ends, which swap."""
    timings = clean_timings([iteration(prefill, steps) for prefill, steps in requests])
    for rate_key, time_key, tokens in (("prefill_rate", "ttft", 16), ("decode_rate", "tpot", 2), ("output_rate", "e2e", 8)):
        rate, time = figure(timings, rate_key), figure(timings, time_key)
        assert rate.median == pytest.approx(tokens * 1e9 / time.median, rel=1e-12)
        assert (rate.n, isinstance(rate.ci_low, Missing)) == (time.n, isinstance(time.ci_low, Missing))
        swapped = [(rate.minimum, time.maximum), (rate.maximum, time.minimum), (rate.q1, time.q3), (rate.q3, time.q1)]
        for one, other in [*swapped, (rate.ci_low, time.ci_high), (rate.ci_high, time.ci_low)]:
            if not isinstance(one, Missing) and not isinstance(other, Missing):
                assert one == pytest.approx(tokens * 1e9 / other, rel=1e-12)


def test_the_tail_of_a_rate_is_the_head_of_its_time() -> None:
    timings = clean_timings([iteration((place + 1) * MS, [MS] * 3) for place in range(101)])
    tail = figure(timings, "prefill_rate").p90
    assert not isinstance(tail, Missing)
    assert tail == pytest.approx(16 / 0.011)  # nine of ten repeats take longer than 11 ms


def test_tpot_is_a_mean_and_the_gap_a_median() -> None:
    timings = clean_timings([iteration(steps_ns=(10 * MS, 10 * MS, 70 * MS))] * 6)
    assert figure(timings, "tpot").median == 30 * MS
    assert figure(timings, "itl_p50").median == 10 * MS


def test_one_new_token_has_no_time_per_further_token() -> None:
    timings = clean_timings([iteration(steps_ns=())] * 8)
    assert timings.workload.new_tokens == 1
    for key in ("tpot", "itl_p50", "itl_p90", "itl_p99", "decode_rate"):
        assert reason(timings, key) == NO_DECODE
    assert figure(timings, "ttft").median == figure(timings, "e2e").median == 100 * MS
    assert figure(timings, "output_rate").median == pytest.approx(20)  # 2 · 1 / 0.1 s


def test_gaps_of_different_requests_are_never_pooled() -> None:
    # One request in seven is slow throughout. Pooled, its gaps would be the p90 of all; apart, they are one value of seven.
    quick, slow = iteration(steps_ns=[10] * 1000), iteration(steps_ns=[500] * 1000)
    found = figure(clean_timings([quick] * 6 + [slow]), "itl_p90")
    assert (found.median, found.maximum, found.n) == (10, 500, 7)


def test_a_percentile_of_gaps_needs_gaps_enough() -> None:
    few, enough = clean_timings([iteration(steps_ns=range(1, 50))] * 6), clean_timings([iteration(steps_ns=range(1, 51))] * 6)
    assert reason(few, "itl_p90") == "49 values; p90 needs 50"
    assert figure(enough, "itl_p90").median == pytest.approx(1 + 0.9 * 49)
    assert reason(enough, "itl_p99") == "50 values; p99 needs 500"


def test_without_measurements_the_reason_is_given() -> None:
    timings = clean_timings([])
    assert {reason(timings, metric.key) for metric in metrics(timings)} == {"no iteration was measured"}
    assert stage_timings(timings, NO_TORCH) == ()


def test_every_figure_is_defined_once_in_words() -> None:
    assert len({definition.key for definition in METRICS}) == len(METRICS)
    assert {definition.unit for definition in METRICS} == {"ns", "tokens/s"}
    assert all(definition.definition.endswith(".") and definition.label for definition in METRICS)


# --- stages -----------------------------------------------------------------------------------------------------------


def test_stages_to_the_eye() -> None:
    found = stages(clean_timings())
    assert list(found) == ["profile", "prefill", "decode", "decode_step"], "parents before children"
    assert {name: row.parent for name, row in found.items()} == {
        "profile": "",
        "prefill": "profile",
        "decode": "profile",
        "decode_step": "decode",
    }
    assert {name: (row.per_iteration, row.time_ns.median) for name, row in found.items()} == {
        "profile": (1, 160 * MS),
        "prefill": (1, 100 * MS),
        "decode": (1, 60 * MS),
        "decode_step": (3, 20 * MS),
    }
    assert found["profile"].share == 1
    assert found["prefill"].share == pytest.approx(100 / 160)
    assert found["decode"].share == pytest.approx(60 / 160)


STEPS = st.lists(st.integers(1, 10**12), max_size=40)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 10**12), STEPS), min_size=1, max_size=8))
def test_prefill_and_decode_are_the_whole_to_the_nanosecond(requests: list[tuple[int, list[int]]]) -> None:
    for prefill, steps in requests:
        one = iteration(prefill, steps)
        assert one.prefill_ns + one.decode_ns == one.total_ns
        assert one.decode_ns == sum(one.steps_ns)
        assert isinstance(one.total_ns, int)


@settings(deadline=None)
@given(st.integers(1, 10**12), STEPS, st.integers(1, 12))
def test_the_stages_of_equal_iterations_add_up_exactly(prefill: int, steps: list[int], count: int) -> None:
    found = stages(clean_timings(in_a_row(count, prefill, steps)))
    parts = [found[name].time_ns.median for name in ("prefill", "decode") if name in found]
    assert sum(parts) == found["profile"].time_ns.median == prefill + sum(steps)
    assert sum(found[name].share for name in ("prefill", "decode") if name in found) == pytest.approx(1)


def test_without_decode_steps_there_is_no_decode_stage() -> None:
    assert list(stages(clean_timings([iteration(steps_ns=())] * 6))) == ["profile", "prefill"]


def test_a_steps_value_is_its_iterations_median() -> None:
    fast, slow = iteration(steps_ns=(1, 2, 99)), iteration(steps_ns=(10, 20, 990))
    found = stages(clean_timings([fast] * 6 + [slow]))["decode_step"].time_ns
    assert (found.n, found.minimum, found.median, found.maximum) == (7, 2, 2, 20)


# --- inflation --------------------------------------------------------------------------------------------------------


def test_inflation_is_profiled_over_unprofiled_time() -> None:
    found = {row.name: row for row in stage_timings(clean_timings(), torch_pass())}
    assert {name: row.inflation for name, row in found.items()} == {
        "profile": 320 / 160,
        "prefill": 200 / 100,
        "decode": 120 / 60,
        "decode_step": 40 / 20,
    }
    assert found["prefill"].profiled_ns == 200 * MS


def test_a_shorter_profiled_iteration_is_compared_with_as_many_steps() -> None:
    timings = clean_timings([iteration(prefill_ns=100, steps_ns=(10, 10, 40, 40))] * 6)
    shorter = torch_pass(decode_steps=2, stage_wall_ns={"profile": 240, "prefill": 200, "decode": 40, "decode_step": 15})
    found = {row.name: row.inflation for row in stage_timings(timings, shorter)}
    assert found["decode"] == 40 / (10 + 10)
    assert found["profile"] == 240 / (100 + 10 + 10)
    assert found["decode_step"] == 15 / 10


def test_a_stage_that_the_profiler_did_not_record_gives_the_reason() -> None:
    found = {row.name: row for row in stage_timings(clean_timings(), torch_pass(stage_wall_ns={"prefill": 200 * MS}))}
    assert found["prefill"].inflation == 2
    assert found["decode"].inflation == found["decode"].profiled_ns == Missing("the torch pass did not record this stage")


def test_without_the_torch_pass_its_reason_is_kept() -> None:
    assert all(row.inflation == row.profiled_ns == NO_TORCH for row in stages(clean_timings()).values())


# --- sub-stages -------------------------------------------------------------------------------------------------------


def with_substages(*spans: SubstageSpan) -> Iteration:
    return iteration(prefill_ns=100, steps_ns=(50, 50), substages=spans)


def test_substages_follow_the_stage_they_lie_in() -> None:
    one = with_substages(
        SubstageSpan("sam", "prefill", -1, 0, 40),
        SubstageSpan("mlp", "prefill", -1, 40, 10),
        SubstageSpan("mlp", "prefill", -1, 60, 20),
        SubstageSpan("mlp", "decode_step", 0, 100, 5),
        SubstageSpan("mlp", "decode_step", 1, 150, 7),
    )
    rows = stage_timings(clean_timings([one] * 6), NO_TORCH)
    assert [(row.name, row.parent) for row in rows] == [
        ("profile", ""),
        ("prefill", "profile"),
        ("sam", "prefill"),
        ("mlp", "prefill"),
        ("decode", "profile"),
        ("decode_step", "decode"),
        ("mlp", "decode_step"),
    ]
    sam, in_prefill, in_decode = (row for row in rows if row.name in ("sam", "mlp"))
    assert (sam.per_iteration, sam.time_ns.median, sam.share) == (1, 40, 40 / 200)
    assert (in_prefill.per_iteration, in_prefill.time_ns.median) == (2, 15), "the mean of 10 and 20"
    assert in_prefill.share == pytest.approx(30 / 200)
    assert (in_decode.per_iteration, in_decode.time_ns.median) == (2, 6)
    assert in_decode.share == pytest.approx(12 / 200)
    assert isinstance(sam.inflation, Missing)
    assert isinstance(sam.profiled_ns, Missing)


def test_an_iteration_without_the_substage_is_not_counted_as_zero() -> None:
    span = SubstageSpan("sam", "prefill", -1, 0, 40)
    rows = stage_timings(clean_timings([with_substages(span)] * 6 + [with_substages()]), NO_TORCH)
    sam = next(row for row in rows if row.name == "sam")
    assert (sam.time_ns.n, sam.time_ns.minimum) == (6, 40)


# --- growth and warm-up -----------------------------------------------------------------------------------------------


def test_the_first_decode_step_sees_the_prompt_and_one_token() -> None:
    steps = [1000 + 5 * step for step in range(16)]
    timings = clean_timings([iteration(steps_ns=steps)] * 6, workload=workload(padded_tokens=10, new_tokens=17))
    found = context_drift(timings)
    assert isinstance(found, Drift)
    assert (found.first_context, found.last_context, found.ns_per_token) == (11, 26, 5)


def test_few_steps_have_no_drift() -> None:
    assert context_drift(clean_timings()) == Missing("3 decode steps; a slope needs 8")


def test_compiling_is_what_warm_up_took_beyond_settled_requests() -> None:
    # settled requests take 160 ms; the two of the warm-up 960 and 160: 0.8 s more, and nothing less for a quick one
    assert compile_seconds(clean_timings()) == pytest.approx(0.8)
    quick = clean_timings(warmup=(iteration(prefill_ns=900 * MS), iteration(prefill_ns=1 * MS)))
    assert compile_seconds(quick) == pytest.approx(0.8)


@pytest.mark.parametrize("timings", [clean_timings(warmup=()), clean_timings([])])
def test_without_warm_up_or_repeats_nothing_is_claimed_about_compiling(timings: CleanTimings) -> None:
    assert compile_seconds(timings) == Missing("no warm-up was measured")


def mixed() -> CleanTimings:
    """A run in which some sequences decoded while others were still in prefill."""
    return clean_timings(runtime=RuntimeFacts("vllm", "1", "by arrival", inseparable="they ran together"))


def test_metrics_of_stages_are_missing_if_the_stages_ran_together() -> None:
    found = {metric.key: metric.value for metric in metrics(mixed())}
    missing = {key for key, value in found.items() if isinstance(value, Missing)}
    assert missing == {"tpot", "itl_p50", "itl_p90", "itl_p99", "prefill_rate", "decode_rate"}
    assert found["tpot"] == Missing("they ran together")
    assert [row.name for row in stage_timings(mixed(), Missing("no torch pass"))] == ["profile"]
    assert context_drift(mixed()) == Missing("they ran together")


@pytest.mark.parametrize("told", ["they came at once", ""], ids=["told by the meter", "seen in the record"])
def test_metrics_of_steps_are_missing_if_tokens_came_at_once(told: str) -> None:
    repeats = in_a_row(10, steps_ns=(0, 0, 9 * MS))
    timings = clean_timings(repeats, runtime=RuntimeFacts("vllm", "1", "by arrival", unstepped=told))
    found = {metric.key: metric.value for metric in metrics(timings)}
    assert {key for key, value in found.items() if isinstance(value, Missing)} == {"itl_p50", "itl_p90", "itl_p99"}
    assert told in reason(timings, "itl_p50")
    assert figure(timings, "tpot").median == 3 * MS
    assert [row.name for row in stage_timings(timings, NO_TORCH)] == ["profile", "prefill", "decode"]
    assert isinstance(context_drift(timings), Missing)


def test_a_torch_pass_of_fewer_steps_has_no_inflation_if_tokens_came_at_once() -> None:
    repeats = in_a_row(10, steps_ns=(0, 0, 9 * MS))
    timings = clean_timings(repeats, runtime=RuntimeFacts("vllm", "1", "by arrival", unstepped="they came at once"))
    torch = torch_pass(decode_steps=2)
    rows = {row.name: row for row in stage_timings(timings, torch)}
    assert rows["decode"].inflation == rows["profile"].inflation == Missing("they came at once")
    assert isinstance(rows["prefill"].inflation, float)
    assert stage_samples(timings, Stage.DECODE, 2) == Missing("they came at once")
    assert stage_samples(timings, Stage.DECODE, 3) == [9 * MS] * 10


def test_an_engine_hands_its_tokens_over_on_the_host() -> None:
    engine = clean_timings(runtime=RuntimeFacts("vllm", "1", "by arrival"))
    assert "ready on the device" in metrics(clean_timings())[0].definition
    assert "returned to the caller on the host" in metrics(engine)[0].definition


@given(
    steps=st.lists(st.integers(1, 20 * MS), min_size=2, max_size=40),
    spread=st.lists(st.integers(0, MS), min_size=1, max_size=9),
)
def test_a_budget_of_all_steps_is_the_time_per_output_token(steps: list[int], spread: list[int]) -> None:
    timings = clean_timings([iteration(steps_ns=(steps[0] + more, *steps[1:])) for more in spread])
    wall, _, _ = unprofiled_wall("decode", "token", len(steps), RunFacts(timings=timings))
    assert wall is not None
    assert abs(wall - figure(timings, "tpot").median * len(steps)) <= 0.5 + 1e-6, "up to the rounding to a nanosecond"

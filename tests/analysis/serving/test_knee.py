"""The knee of simulated servers whose capacity is known, and why it is there."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from llm_perf_opt.analysis.serving.breakdown import RequestParts, joined, model_steps, request_parts
from llm_perf_opt.analysis.serving.knee import CauseId, Knee, find_knee
from llm_perf_opt.analysis.serving.outcome import Criterion
from llm_perf_opt.analysis.serving.points import MeasuredLoad, PointAnalysis, analyze_point
from llm_perf_opt.analysis.serving.serving_analysis import curve_of, slots_of
from llm_perf_opt.analysis.serving.slo import NO_SLO, Slo
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.serving_records import (
    LoadKind,
    LoadPoint,
    LoadRecords,
    MetricsSample,
    RequestSpan,
    ServedRequest,
    ServerFacts,
)
from llm_perf_opt.report.serving_text import knee_sentence
from llm_perf_opt.traces.open_trace import read_trace
from llm_perf_opt.traces.serving.server_files import read_spans
from llm_perf_opt.workflows.load_reader import step_times
from serving_loads import BASE_NS, SIMULATED, Load, Server, otlp, simulate, torch_trace
from trace_builders import Builder

NONE = Missing("not recorded")


def served(load: Load) -> tuple[ServedRequest, ...]:
    return tuple(
        ServedRequest(
            request.id,
            BASE_NS + request.sent,
            BASE_NS + request.tokens[-1],
            tuple(BASE_NS + time for time in request.tokens),
            output_tokens=len(request.tokens),
            scheduled_ns=BASE_NS + request.sent - 1000,
        )
        for request in load.requests
    )


@cache
def measured(rate: float, server: Server = SIMULATED, count: int = 300) -> MeasuredLoad:
    load = simulate(server, rate, count, seed=round(rate))
    point = LoadPoint(round(rate), "rate", rate, "poisson", "x", "f", count, BASE_NS, BASE_NS + 10**12, "complete")
    return MeasuredLoad(point, LoadRecords("x", served(load)), tuple(load.samples), NONE, NONE)


def points(rates: list[float], slo: Maybe[Slo] = NO_SLO, server: Server = SIMULATED) -> list[PointAnalysis]:
    return [analyzed(rate, server) if slo is NO_SLO else analyze_point(measured(rate, server), slo) for rate in rates]


@cache
def analyzed(rate: float, server: Server = SIMULATED) -> PointAnalysis:
    return analyze_point(measured(rate, server), NO_SLO)


@pytest.mark.slow
def test_the_knee_lies_around_the_capacity() -> None:
    assert SIMULATED.capacity == pytest.approx(24.4, abs=0.1)
    knee = find_knee(points([8.0, 16.0, 22.0, 36.0, 48.0]), 8)
    assert isinstance(knee, Knee)
    assert (knee.status, knee.carried, knee.not_carried) == ("found", 22.0, 36.0)
    assert knee.broken == (Criterion.THROUGHPUT,)
    assert {cause.id for cause in knee.causes} == {
        CauseId.BATCH_LIMIT, CauseId.QUEUE, CauseId.LONGER_STEPS, CauseId.LONGER_TTFT,
    }  # fmt: skip
    limit = next(cause for cause in knee.causes if cause.id is CauseId.BATCH_LIMIT)
    assert limit.figures == {"running_max": 8.0, "slots": 8.0}


def test_an_objective_moves_the_knee_down() -> None:
    slo = Slo({"ttft": 200_000_000, "tpot": 17_000_000})
    knee = find_knee(points([8.0, 16.0, 22.0, 32.0], slo), NONE)
    assert isinstance(knee, Knee)
    assert knee.carried in (8.0, 16.0)
    assert Criterion.OBJECTIVE in knee.broken


def test_every_load_is_carried_or_none() -> None:
    above = find_knee(points([4.0, 8.0]), NONE)
    assert isinstance(above, Knee)
    assert (above.status, above.carried, above.causes) == ("above", 8.0, ())
    below = find_knee(points([36.0, 48.0]), NONE)
    assert isinstance(below, Knee)
    assert (below.status, below.not_carried) == ("below", 36.0)


def test_a_limit_shows_without_the_servers_setting() -> None:
    knee = find_knee(points([8.0, 48.0]), NONE)
    assert isinstance(knee, Knee)
    limit = next(cause for cause in knee.causes if cause.id is CauseId.BATCH_LIMIT)
    assert limit.figures["running_min_waiting"] >= 7


def with_series(load: MeasuredLoad, name: str, values: list[float]) -> MeasuredLoad:
    """Replace one metric in all samples; the last value stays."""
    assert not isinstance(load.samples, Missing)
    samples = []
    for place, sample in enumerate(load.samples):
        series = {key: values[min(place, len(values) - 1)] if name in key else value for key, value in sample.series.items()}
        samples.append(MetricsSample(sample.at_ns, series))
    return replace(load, samples=tuple(samples))


def test_a_full_cache_and_preemptions_are_causes() -> None:
    full = with_series(with_series(measured(48.0), "kv_cache_usage_perc", [0.99]), "num_preemptions", [3.0, 3.0, 10.0])
    knee = find_knee([analyzed(8.0), analyze_point(full, NO_SLO)], NONE)
    assert isinstance(knee, Knee)
    causes = {cause.id: cause.figures for cause in knee.causes}
    assert causes[CauseId.KV_CACHE] == {"kv_usage_max": 0.99}
    assert causes[CauseId.PREEMPTIONS] == {"preemptions": 7.0}
    assert CauseId.BATCH_LIMIT not in causes


def test_failures_and_a_generator_that_is_off_are_causes() -> None:
    load = measured(48.0)
    assert not isinstance(load.records, Missing)
    failed = [
        replace(request, error="429") if number % 5 == 0 else request for number, request in enumerate(load.records.requests)
    ]
    broken = replace(load, records=replace(load.records, requests=tuple(failed)), point=replace(load.point, asked=96.0))
    knee = find_knee([analyzed(8.0), analyze_point(broken, NO_SLO)], NONE)
    assert isinstance(knee, Knee)
    assert Criterion.FAILURES in knee.broken
    assert {CauseId.REFUSED, CauseId.GENERATOR} <= {cause.id for cause in knee.causes}
    point = analyze_point(broken, NO_SLO)
    assert point.errors == (("429", 60),)


def closed(concurrency: int) -> MeasuredLoad:
    """Return a closed loop whose throughput saturates at 8 requests at a time."""
    took = 100_000_000 * max(1, concurrency // 8)
    requests = [
        ServedRequest(f"{turn}-{place}", BASE_NS + turn * took, BASE_NS + (turn + 1) * took, (), output_tokens=10)
        for turn in range(20)
        for place in range(concurrency)
    ]
    kind: LoadKind = "concurrency"
    point = LoadPoint(concurrency, kind, concurrency, "closed", "x", "f", len(requests), BASE_NS, BASE_NS + 20 * took, "complete")
    return MeasuredLoad(point, LoadRecords("x", tuple(requests), kind=kind), NONE, NONE, NONE)


def test_the_knee_of_closed_loops() -> None:
    knee = find_knee([analyze_point(closed(count), NO_SLO) for count in (2, 4, 8, 16, 32)], NONE)
    assert isinstance(knee, Knee)
    assert (knee.kind, knee.carried, knee.not_carried) == ("concurrency", 8, 16)


def test_no_knee_without_two_loads_of_one_kind() -> None:
    one, other = analyzed(8.0), analyze_point(closed(4), NO_SLO)
    assert isinstance(find_knee([one], NONE), Missing)
    assert isinstance(find_knee(curve_of([one, other]), NONE), Missing)
    assert isinstance(find_knee([], NONE), Missing)


@cache
def partial(rate: float) -> PointAnalysis:
    load = measured(rate)
    return analyze_point(replace(load, point=replace(load.point, status="partial", why="It was stopped.")), NO_SLO)


def test_loads_that_cannot_be_judged_are_named() -> None:
    between = find_knee([analyzed(8.0), partial(16.0), analyzed(48.0)], NONE)
    assert isinstance(between, Knee)
    assert (between.status, between.carried, between.not_carried) == ("found", 8.0, 48.0)
    assert [found.load for found in between.unclear] == [16.0]
    assert "16 requests/s cannot be told" in knee_sentence(between)
    largest = find_knee([analyzed(8.0), partial(16.0)], NONE)
    assert isinstance(largest, Knee)
    assert (largest.status, largest.carried) == ("unclear", 8.0)
    assert "every load" not in knee_sentence(largest)
    lowest = find_knee([partial(8.0), analyzed(16.0)], NONE)
    assert isinstance(lowest, Knee)
    assert (lowest.status, [found.load for found in lowest.unclear]) == ("above", [8.0])
    nothing = find_knee([partial(8.0), analyzed(48.0)], NONE)
    assert isinstance(nothing, Knee)
    assert nothing.status == "unclear"
    assert isinstance(nothing.carried, Missing)
    assert "even the smallest" not in knee_sentence(nothing)
    assert isinstance(find_knee([partial(8.0), partial(16.0)], NONE), Missing)


def test_a_load_without_records_below_the_knee_is_named() -> None:
    lost = analyze_point(replace(measured(16.0), records=Missing("the file is gone")), NO_SLO)
    knee = find_knee([analyzed(8.0), lost, analyzed(48.0)], NONE)
    assert isinstance(knee, Knee)
    assert [found.load for found in knee.unclear] == [16.0]


def test_of_a_repeated_load_the_longer_one_counts() -> None:
    short = analyze_point(replace(measured(48.0, count=40), point=replace(measured(48.0).point, number=1)), NO_SLO)
    knee = find_knee([analyzed(8.0), analyzed(48.0), short], NONE)
    assert isinstance(knee, Knee)
    assert [(found.load, found.number, found.carried) for found in knee.verdicts] == [(8.0, 8, True), (48.0, 48, False)]


def test_single_samples_show_no_cause() -> None:
    once = with_series(measured(48.0), "kv_cache_usage_perc", [0.99, 0.99, 0.5])
    knee = find_knee([analyzed(8.0), analyze_point(once, NO_SLO)], NONE)
    assert isinstance(knee, Knee)
    assert CauseId.KV_CACHE not in {cause.id for cause in knee.causes}
    load = measured(48.0)
    assert not isinstance(load.samples, Missing)
    few = find_knee([analyzed(8.0), analyze_point(replace(load, samples=load.samples[:2]), NO_SLO)], 8)
    assert isinstance(few, Knee)
    assert {CauseId.BATCH_LIMIT, CauseId.QUEUE} & {cause.id for cause in few.causes} == set()


def test_a_curve_has_loads_of_one_kind() -> None:
    rates = points([8.0, 16.0])
    burst = analyze_point(replace(measured(40.0), point=replace(measured(40.0).point, arrival="burst")), NO_SLO)
    assert curve_of([*rates, burst, analyze_point(closed(4), NO_SLO)]) == tuple(rates)
    assert curve_of([burst]) == (burst,)


def test_the_limit_of_a_server_is_in_its_command() -> None:
    for argv, slots in ((("x", "--max-num-seqs", "64"), 64), (("x", "--max-num-seqs=8"), 8)):
        assert slots_of(ServerFacts("", "", argv)) == slots
    for words in ("", "x --max-num-seqs", "x --max-num-seqs many"):
        assert isinstance(slots_of(ServerFacts("", "", tuple(words.split()))), Missing)


# --- the parts of a request -----------------------------------------------------------------------------------------------


def spans_of(load: Load, folder: Path) -> tuple[RequestSpan, ...]:
    file = folder / "spans.jsonl"
    file.write_text(json.dumps(otlp(load, BASE_NS)) + "\n")
    return read_spans(file)


def test_the_parts_of_a_request_sum_to_its_time(tmp_path: Path) -> None:
    load = simulate(SIMULATED, 20.0, 60)
    requests, spans = served(load), spans_of(load, tmp_path)
    assert len(joined(requests, spans)) == 60
    parts = request_parts(requests, spans, NONE)
    assert isinstance(parts, RequestParts)
    assert not isinstance(parts.network_ns, Missing)
    assert not isinstance(parts.frontend_ns, Missing)
    assert parts.network_ns == pytest.approx(SIMULATED.network_ns)
    assert parts.frontend_ns == pytest.approx(SIMULATED.front_ns, abs=2)
    total = parts.network_ns + parts.frontend_ns + parts.queue_ns + parts.prefill_ns + parts.decode_ns
    assert total == pytest.approx(parts.e2e_ns)
    waited = sum(request.admitted - request.sent - SIMULATED.network_ns for request in load.requests) / 60
    assert parts.queue_ns == pytest.approx(waited, abs=2)
    assert isinstance(parts.steps_ns, Missing)


def test_decode_is_steps_and_the_time_between(tmp_path: Path) -> None:
    load = simulate(SIMULATED, 20.0, 60)
    file = tmp_path / "server.json"
    file.write_text(json.dumps(torch_trace(load, BASE_NS)))
    steps = step_times(read_trace(file))
    assert len(steps) == len(load.steps)
    assert abs(int(steps[0, 0]) - (BASE_NS + load.steps[0][0])) <= 1000
    parts = request_parts(served(load), spans_of(load, tmp_path), steps)
    assert isinstance(parts, RequestParts)
    assert not isinstance(parts.steps_ns, Missing)
    assert not isinstance(parts.between_ns, Missing)
    assert parts.steps_ns + parts.between_ns == pytest.approx(parts.decode_ns)
    assert parts.between_ns == pytest.approx(15 * 1_000_000, rel=0.02)  # a millisecond in each of 15 steps
    found = model_steps(served(load), steps)
    assert not isinstance(found, Missing)
    assert found.between_ns == pytest.approx(1_000_000, rel=0.01)
    assert [(row.least, row.most) for row in found.by_batch] == [(1, 1), (2, 2), (3, 4), (5, 8)]
    assert sum(row.steps for row in found.by_batch) == found.steps


def test_a_step_lasts_as_long_as_its_device_work() -> None:
    built = Builder()
    built.range(0, 20, "execute_context_1(8)_generation_0(0)", None)
    built.launch(1, 10, 100)
    built.range(30, 50, "execute_context_0(0)_generation_1(1)", None)  # launched while the first still runs
    built.launch(31, 105, 150)
    built.launch(32, 150, 205)
    built.range(60, 80, "execute_context_0(0)_generation_1(1)", None)  # its work was not recorded
    assert step_times(built.trace()).tolist() == [[10, 100], [105, 205]]


def test_the_part_that_grows_is_a_cause(tmp_path: Path) -> None:
    found = []
    for rate in (4.0, 48.0):
        load = simulate(SIMULATED, rate, 200, seed=round(rate))
        found.append(analyze_point(replace(measured(rate), spans=spans_of(load, tmp_path)), NO_SLO))
    knee = find_knee(found, NONE)
    assert isinstance(knee, Knee)
    part = next(cause for cause in knee.causes if cause.id is CauseId.LONGER_PART)
    assert part.figures["queue_ns"] > part.figures["queue_lowest_ns"]
    assert 0.9 < part.figures["share"] <= 1


def test_short_loads_are_marked() -> None:
    assert not analyzed(8.0).short
    assert analyze_point(measured(400.0, count=20), NO_SLO).short


def test_spans_of_other_requests_are_not_joined(tmp_path: Path) -> None:
    load = simulate(SIMULATED, 20.0, 20)
    other = simulate(SIMULATED, 20.0, 20, seed=9)
    assert isinstance(request_parts(served(load), spans_of(other, tmp_path), NONE), Missing)
    assert isinstance(request_parts(served(load), NONE, NONE), Missing)


def test_a_profiled_load_has_no_latencies() -> None:
    load = measured(8.0)
    found = analyze_point(replace(load, point=replace(load.point, profiled=True)), NO_SLO)
    assert all(isinstance(value, Missing) for value in (*found.latencies.values(), found.output_rate, found.kept_up))


def test_a_load_without_records_is_kept_with_its_reason() -> None:
    found = analyze_point(replace(measured(8.0), records=Missing("the file is gone")), NO_SLO)
    assert found.unusable == Missing("the file is gone")
    assert found.requests == 0


def test_records_of_a_monotonic_clock_are_moved() -> None:
    load = measured(8.0)
    assert not isinstance(load.records, Missing)
    shifted = tuple(
        replace(
            request,
            sent_ns=request.sent_ns - BASE_NS,
            end_ns=request.end_ns - BASE_NS,
            token_ns=tuple(time - BASE_NS for time in request.token_ns),
        )
        for request in load.records.requests
    )
    records = replace(load.records, requests=shifted, clock="monotonic")
    found = analyze_point(replace(load, records=records, point=replace(load.point, monotonic_offset_ns=BASE_NS)), NO_SLO)
    assert found.server == analyze_point(load, NO_SLO).server

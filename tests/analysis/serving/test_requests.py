"""Latencies of requests, their percentiles and intervals."""

import random

import pytest

from llm_perf_opt.analysis.serving.requests import LATENCIES, Latency, block_of, e2e, itl, latency, tpot, ttft
from llm_perf_opt.analysis.stats import percentile
from llm_perf_opt.core.missing import Missing
from llm_perf_opt.core.serving_records import ServedRequest

MS = 1_000_000
TTFT, TPOT, ITL, E2E = LATENCIES


def request(number: int, first: int = 20, gaps: tuple[int, ...] = (10, 30), tokens: int = 3, error: str = "") -> ServedRequest:
    sent = number * 100 * MS
    arrivals = [sent + first * MS]
    for gap in gaps:
        arrivals.append(arrivals[-1] + gap * MS)
    return ServedRequest(str(number), sent, arrivals[-1] + 5 * MS, tuple(arrivals), output_tokens=tokens, error=error)


def test_the_figures_of_one_request() -> None:
    one = request(0)
    assert ttft(one) == (20 * MS,)
    assert tpot(one) == (20 * MS,)
    assert itl(one) == (10 * MS, 30 * MS)
    assert e2e(one) == (65 * MS,)


def test_a_single_token_has_no_tpot() -> None:
    assert tpot(request(0, gaps=(), tokens=1)) == ()
    assert isinstance(latency(TPOT, [request(0, gaps=(), tokens=1)]), Missing)


def test_what_was_not_recorded_is_missing() -> None:
    unstreamed = ServedRequest("a", 0, 10)
    assert isinstance(ttft(unstreamed), Missing)
    assert isinstance(tpot(unstreamed), Missing)
    assert isinstance(tpot(ServedRequest("a", 0, 10, (5, 6))), Missing)  # no count of tokens
    ends = ServedRequest("a", 0, 10, (5,), output_tokens=3, last_token_ns=9)
    assert tpot(ends) == (2.0,)
    assert isinstance(itl(ends), Missing)


def test_percentiles_need_enough_requests() -> None:
    requests = [request(number, first=number + 1) for number in range(60)]
    found = latency(TTFT, requests)
    assert isinstance(found, Latency)
    assert not isinstance(found.p50, Missing)
    assert not isinstance(found.p90, Missing)
    assert found.p50.value == pytest.approx(percentile([(number + 1) * MS for number in range(60)], 0.5))
    assert isinstance(found.p99, Missing)
    few = latency(TTFT, requests[:9])
    assert isinstance(few, Latency)
    assert isinstance(few.p50, Missing)
    assert (few.n, few.mean) == (9, 5 * MS)


def test_a_percentile_of_gaps_needs_enough_requests() -> None:
    """Hundreds of gaps of a few requests depend on each other."""
    gaps = tuple(10 + number % 7 for number in range(99))
    for count, expected in ((40, True), (60, False)):
        found = latency(ITL, [request(number, gaps=gaps, tokens=100) for number in range(count)])
        assert isinstance(found, Latency)
        assert found.n == 99 * count
        assert isinstance(found.p90, Missing) is expected


def test_failed_requests_have_no_latency() -> None:
    found = latency(TTFT, [*[request(number) for number in range(12)], request(12, first=10_000, error="500")])
    assert isinstance(found, Latency)
    assert (found.n, found.mean) == (12, 20 * MS)
    assert isinstance(latency(E2E, [request(0, error="500")]), Missing)


def test_intervals_cover_the_true_median() -> None:
    draw, covered = random.Random(3), 0
    for _ in range(40):
        requests = [request(number, first=round(draw.expovariate(1) * 1000) + 1) for number in range(100)]
        found = latency(TTFT, requests)
        assert isinstance(found, Latency)
        assert not isinstance(found.p50, Missing)
        assert not isinstance(found.p50.low, Missing)
        assert not isinstance(found.p50.high, Missing)
        covered += found.p50.low <= (693.1 + 1) * MS <= found.p50.high
    assert covered >= 34  # 38 are expected


def test_requests_in_flight_are_drawn_together() -> None:
    alone = [request(number) for number in range(100)]
    assert block_of(alone) == 1
    together = [ServedRequest(str(number), number, number + 5, (number + 1,)) for number in range(100)]
    assert block_of(together) == 5
    assert block_of([ServedRequest("a", 5, 5)]) == 1

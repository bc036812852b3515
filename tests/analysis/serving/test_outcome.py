"""Whether a load is carried: simulated servers of known capacity, and what leaves it open."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from llm_perf_opt.analysis.serving.outcome import Criterion, outcome_of, verdict
from llm_perf_opt.analysis.serving.pace import pace_of
from llm_perf_opt.analysis.serving.requests import Estimate
from llm_perf_opt.analysis.serving.slo import NO_SLO, Goodput, Slo, goodput
from llm_perf_opt.core.missing import Maybe, Missing
from llm_perf_opt.core.serving_records import LoadPoint, LoadRecords, ServedRequest

S, MS = 10**9, 10**6
POINT = LoadPoint(1, "rate", 8.0, "poisson", "x", "f", 100, 0, 0, "complete")
SLOTS, STEP_S, PREFILL_S, TOKENS = 8, 0.018, 0.005, 16
CAPACITY = 1 / (TOKENS * STEP_S / SLOTS + PREFILL_S)


def served(sent_s: float, took_s: float, **changes: Any) -> ServedRequest:
    sent, end = round(sent_s * S), round((sent_s + took_s) * S)
    return replace(ServedRequest(f"{sent}", sent, end, (sent + 1, end), output_tokens=10), **changes)


def load(*requests: ServedRequest) -> LoadRecords:
    return LoadRecords("x", requests)


def carried(records: LoadRecords, slo: Maybe[Slo] = NO_SLO, **point: Any) -> Maybe[bool]:
    return verdict(outcome_of(replace(POINT, **point), records, slo)).carried


# --- the pace -------------------------------------------------------------------------------------------------------------


def wide_server(rate: float, count: int, seed: int, mean_s: float = 1.0) -> LoadRecords:
    """A server with room for everything, whose answers have exponential lengths."""
    draw, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at += draw.expovariate(rate)
        found.append(served(at, draw.expovariate(1 / mean_s)))
    return load(*found)


def batch_server(share: float, seed: int, *, varied: bool) -> LoadRecords:
    """A server that runs eight requests at a time, at a share of its capacity for ten seconds."""
    draw, at, waiting = random.Random(seed), 0.0, []
    for _ in range(max(100, math.ceil(10 * share * CAPACITY))):
        at += draw.expovariate(share * CAPACITY)
        waiting.append((at, max(1, round(draw.expovariate(1 / TOKENS))) if varied else TOKENS))
    now, done = 0.0, []
    running: list[tuple[float, int]] = []
    waiting.reverse()
    while waiting or running:
        now = now if running else max(now, waiting[-1][0])
        joined = 0
        while waiting and waiting[-1][0] <= now and len(running) < SLOTS:
            running.append(waiting.pop())
            joined += 1
        now += STEP_S + joined * PREFILL_S
        done += [served(sent, now - sent) for sent, left in running if left == 1]
        running = [(sent, left - 1) for sent, left in running if left > 1]
    return load(*done)


@pytest.mark.parametrize(("rate", "count"), [(5, 100), (20, 240), (60, 600)])
def test_a_server_with_room_keeps_up_however_long_its_answers_are(rate: float, count: int) -> None:
    found = [carried(wide_server(rate, count, seed)) for seed in range(40)]
    assert found.count(False) <= 2
    assert found.count(True) >= 36


@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize(("share", "expected"), [(0.3, True), (0.6, True), (0.8, True), (1.3, False), (1.6, False), (3.0, False)])
def test_wrong_verdicts_are_rare(share: float, expected: bool, varied: bool) -> None:
    """Ten seconds of requests, as `llm-perf serve` sends them; verdicts that cannot be told are repeated there."""
    found = [carried(batch_server(share, seed, varied=varied)) for seed in range(20)]
    assert found.count(not expected) <= 1  # at most 5 %
    assert found.count(expected) >= 14


def test_the_ratio_is_that_of_the_rates() -> None:
    """Sent every 0.1 s, ended every 0.125 s."""
    found = pace_of(load(*(served(number * 0.1, 0.5 + number * 0.025) for number in range(200))), "poisson").kept_up
    assert isinstance(found, Estimate)
    assert (found.value, found.low, found.high) == pytest.approx((0.8, 0.8, 0.8))


def test_a_load_in_which_the_server_only_fills_is_not_judged() -> None:
    """Each request takes longer than the one before, until the server has filled; 2 s of sending do not show the end of it."""
    records = load(*(served(number * 0.01, 0.4 + number * 0.005) for number in range(200)))
    assert isinstance(carried(records), Missing)
    longer = load(*(served(number * 0.01, 0.4 + number * 0.005) for number in range(800)))
    assert carried(longer) is False


def test_a_load_that_is_too_short_is_not_carried() -> None:
    assert isinstance(carried(load(*(served(number * 0.01, 1.0) for number in range(100)))), Missing)
    assert carried(load(*(served(number * 0.04, 1.0) for number in range(100)))) is True


def test_few_requests_have_no_pace() -> None:
    assert isinstance(carried(load(*(served(number, 0.1) for number in range(24)))), Missing)
    assert isinstance(pace_of(load(*(served(0, 0.1) for _ in range(50))), "poisson").kept_up, Missing)
    assert isinstance(pace_of(load(*(served(number, 0.1) for number in range(50))), "closed").kept_up, Missing)
    assert isinstance(pace_of(load(), "poisson").kept_up, Missing)


# --- the other criteria ---------------------------------------------------------------------------------------------------

STEADY = [served(number * 0.1, 0.2) for number in range(100)]


def test_a_partial_load_is_not_carried() -> None:
    assert carried(load(*STEADY)) is True
    found = carried(load(*STEADY), status="partial", why="The server died.")
    assert isinstance(found, Missing)
    assert "The server died" in found.why


def test_a_partial_load_that_breaks_a_criterion_stays_broken() -> None:
    slo = Slo({"e2e": 100 * MS})
    assert carried(load(*STEADY), slo, status="partial", why="x") is False


def test_an_objective_does_not_replace_the_other_criteria() -> None:
    slow = load(*(served(number * 0.1, 0.5 + number * 0.025) for number in range(200)))
    found = verdict(outcome_of(POINT, slow, Slo({"ttft": 10 * S})))
    assert (found.carried, found.broken) == (False, (Criterion.THROUGHPUT,))
    failing = load(*(replace(one, error="429") if number % 10 == 0 else one for number, one in enumerate(STEADY)))
    found = verdict(outcome_of(POINT, failing, Slo({"e2e": 10 * S})))
    assert Criterion.FAILURES in found.broken


@pytest.mark.parametrize("slo", [Slo({"itl": S}), Slo({"tpot": S})])
def test_an_objective_that_cannot_be_judged_leaves_the_verdict_open(slo: Slo) -> None:
    records = load(*(replace(one, output_tokens=Missing("not recorded"), last_token_ns=one.end_ns) for one in STEADY))
    found = carried(records, slo)
    assert isinstance(found, Missing)
    assert "objective" in found.why


def test_few_requests_decide_only_what_is_clear() -> None:
    def bad(count: int, of: int, **changes: Any) -> LoadRecords:
        return load(*(served(number, 0.2, **changes) if number < count else served(number, 0.2) for number in range(of)))

    slo = Slo({"e2e": 300 * MS})
    late = {"end_ns": 100 * S}
    assert isinstance(carried(bad(0, 30), slo), Missing), "30 of 30 may be 88 %"
    assert carried(bad(20, 30, **late), slo) is False
    assert carried(bad(0, 60), slo) is True
    assert isinstance(carried(bad(3, 40, error="500")), Missing), "3 of 40 may be 3 %"
    assert carried(bad(20, 60, error="500")) is False
    assert carried(bad(2, 60, error="500")) is True


def closed(places: int, turns: int, took_s: float) -> LoadRecords:
    return load(*(served(turn * took_s + place * 1e-4, took_s) for turn in range(turns) for place in range(places)))


def test_a_closed_loop_must_be_long_enough() -> None:
    def outcome(places: int, turns: int, took_s: float) -> Any:
        point = replace(POINT, kind="concurrency", arrival="closed", asked=float(places))
        return outcome_of(point, closed(places, turns, took_s), NO_SLO)

    four, eight = outcome(4, 20, 0.1), outcome(8, 20, 0.1)
    assert verdict(eight, [four]).carried is True
    assert verdict(outcome(8, 20, 0.2), [four]).carried is False
    assert isinstance(verdict(outcome(8, 2, 0.1), [four]).carried, Missing)
    assert isinstance(verdict(eight, [outcome(4, 2, 0.1)]).carried, Missing)
    assert isinstance(verdict(outcome(4, 2, 0.1)).carried, Missing)
    assert verdict(four).carried is True


# --- requests that the end of the measurement cut -------------------------------------------------------------------------


def test_cut_requests_are_no_failures() -> None:
    cut = [replace(served(10 + number * 0.01, 0.1), error="not finished", cut=True) for number in range(20)]
    found = outcome_of(POINT, load(*STEADY, *cut), NO_SLO)
    assert (found.requests, found.failed, found.cut, found.failed_share) == (120, 0, 20, 0.0)
    assert verdict(found).carried is True


def test_cut_requests_do_not_meet_what_they_had_exceeded() -> None:
    def one(took_s: float) -> ServedRequest:
        return replace(served(10, took_s), error="not finished", cut=True, token_ns=())

    found = goodput([*STEADY, one(0.1), one(0.5)], Slo({"e2e": 300 * MS}), S)
    assert isinstance(found, Goodput)
    assert (found.good, found.requests) == (100, 101)
    found = goodput([*STEADY, one(0.1), one(0.5)], Slo({"ttft": 300 * MS}), S)
    assert isinstance(found, Goodput)
    assert (found.good, found.requests) == (100, 101)
    assert isinstance(goodput([one(0.1)], Slo({"ttft": 300 * MS}), S), Missing)

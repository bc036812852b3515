"""Whether a load is carried: simulated servers of known capacity, and what leaves it open."""

import math
import random
from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from llm_perf_opt.analysis.serving.outcome import Criterion, outcome_of, verdict
from llm_perf_opt.analysis.serving.pace import FILLING, pace_of
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


@pytest.mark.parametrize(("rate", "count"), [(5, 100), (20, 240), (60, 300)])
def test_a_server_with_room_keeps_up_however_long_its_answers_are(rate: float, count: int) -> None:
    """A quarter of the requests often does not suffice, but does not mislead either; the search repeats such loads."""
    assert [carried(wide_server(rate, count, seed)) for seed in range(20)].count(False) <= 1
    found = [carried(wide_server(rate, 4 * count, seed)) for seed in range(20)]
    assert found.count(True) >= 19


@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize(("share", "expected"), [(0.3, True), (0.6, True), (0.8, True), (1.3, False), (1.6, False), (3.0, False)])
def test_wrong_verdicts_are_rare(share: float, expected: bool, varied: bool) -> None:
    """Ten seconds of requests, as `llm-perf serve` sends them; verdicts that cannot be told are repeated there."""
    found = [carried(batch_server(share, seed, varied=varied)) for seed in range(20)]
    assert found.count(not expected) <= 1  # at most 5 %
    assert found.count(expected) >= 14


LONG_SLOTS, LONG_TOKENS = 64, 256
LONG_CAPACITY = LONG_SLOTS / LONG_TOKENS / (0.005 + 0.0001 * LONG_SLOTS)


def long_answers(share: float, seed: int) -> LoadRecords:
    """Eleven seconds of answers of 256 tokens, of which a server runs 64 at a time."""
    draw, sent = random.Random(seed), [0.0]
    while len(sent) < round(11 * share * LONG_CAPACITY):
        sent.append(sent[-1] + draw.expovariate(share * LONG_CAPACITY))
    waiting, done, now, steps = deque(sent), [], 0.0, 0
    running: deque[tuple[float, int]] = deque()  # sent, the step of the last token
    while waiting or running:
        now = now if running else max(now, waiting[0])
        while waiting and waiting[0] <= now and len(running) < LONG_SLOTS:
            running.append((waiting.popleft(), steps + LONG_TOKENS))
        now, steps = now + 0.005 + 0.0001 * len(running), steps + 1
        while running and running[0][1] == steps:
            start = running.popleft()[0]
            done.append(served(start, now - start))
    return load(*done)


def issued_rate(records: LoadRecords) -> float:
    sent = sorted(request.sent_ns / S for request in records.requests)
    kept = [at for at in sent if at - sent[0] >= FILLING * (sent[-1] - sent[0])]
    return (len(kept) - 1) / (kept[-1] - kept[0])


def covered(records: LoadRecords, capacity: float) -> bool:
    """Whether the interval contains the true ratio to the rate that was issued."""
    found = pace_of(records, "poisson").kept_up
    if isinstance(found, Missing):
        return True
    assert not isinstance(found.low, Missing)
    assert not isinstance(found.high, Missing)
    return found.low <= min(1.0, capacity / issued_rate(records)) <= found.high


@pytest.mark.parametrize(("share", "most_carried"), [(0.8, 60), (0.95, 60), (1.15, 6), (1.3, 1)])
def test_the_interval_covers_the_truth_if_requests_depend_on_each_other(share: float, most_carried: int) -> None:
    loads = [long_answers(share, seed) for seed in range(60)]
    assert sum(covered(records, LONG_CAPACITY) for records in loads) >= 54
    assert [carried(records) for records in loads].count(True) <= most_carried


@pytest.mark.slow
@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize("share", [0.8, 1.15])
def test_the_interval_covers_the_truth_if_answers_differ(share: float, varied: bool) -> None:
    assert sum(covered(batch_server(share, seed, varied=varied), CAPACITY) for seed in range(60)) >= 52


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


def test_the_reason_names_the_requests_that_count() -> None:
    """Of 26 requests, 8 were sent in the first fifth of the time."""
    at = [number * 1.4 for number in range(8)] + [12.5 + number * 2.8 for number in range(18)]
    found = pace_of(load(*(served(sent, 0.5) for sent in at)), "poisson").kept_up
    assert isinstance(found, Missing)
    assert found.why.startswith("18 requests")
    assert found.why.endswith("needs 20")


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


def test_a_closed_loop_in_lockstep_has_its_true_throughput() -> None:
    """64 places, each with 10 tokens per second: all requests of a turn end at almost the same time."""
    found = outcome_of(replace(POINT, kind="concurrency", arrival="closed", asked=64.0), closed(64, 10, 1.0), NO_SLO)
    assert found.steady_rate == pytest.approx(640, rel=0.01)


def test_closed_loops_of_almost_the_same_size_are_not_compared() -> None:
    def outcome(places: int, took_s: float) -> Any:
        return outcome_of(
            replace(POINT, kind="concurrency", arrival="closed", asked=float(places)), closed(places, 10, took_s), NO_SLO
        )

    thirty, sixty, last = outcome(32, 0.5), outcome(60, 1.0), outcome(64, 1.0)
    assert isinstance(verdict(last, [sixty]).carried, Missing)
    assert verdict(last, [thirty, sixty]).carried is False, "twice as many as 32, and no more tokens"
    assert verdict(outcome(64, 0.5), [thirty, sixty]).carried is True


# --- requests that the end of the measurement cut -------------------------------------------------------------------------


def test_cut_requests_are_no_failures() -> None:
    cut = [replace(served(10 + number * 0.01, 0.1), error="not finished", cut=True) for number in range(20)]
    found = outcome_of(POINT, load(*STEADY, *cut), NO_SLO)
    assert (found.requests, found.failed, found.cut, found.failed_share) == (120, 0, 20, 0.0)
    assert verdict(found).carried is True


def cut_after(took_s: float, **changes: Any) -> ServedRequest:
    return replace(served(10, took_s), error="not finished", cut=True, **{"token_ns": (), **changes})


def test_cut_requests_do_not_meet_what_they_had_exceeded() -> None:
    found = goodput([*STEADY, cut_after(0.1), cut_after(0.5)], Slo({"e2e": 300 * MS}), S)
    assert isinstance(found, Goodput)
    assert (found.good, found.requests, found.undecided) == (100, 101, 1)
    late = cut_after(0.5, token_ns=(10 * S + 400 * MS,))
    found = goodput([*STEADY, cut_after(0.1), late], Slo({"ttft": 300 * MS}), S)
    assert isinstance(found, Goodput)
    assert (found.good, found.requests, found.undecided) == (100, 101, 1)
    assert isinstance(goodput([cut_after(0.1)], Slo({"ttft": 300 * MS}), S), Missing)


def test_the_ttft_of_a_cut_request_without_token_times_is_unknown() -> None:
    """AIPerf writes none for requests that it cancels."""
    found = goodput([*STEADY, *(cut_after(0.5) for _ in range(20))], Slo({"ttft": 300 * MS}), S)
    assert isinstance(found, Goodput)
    assert (found.good, found.requests, found.undecided) == (100, 100, 20)


@pytest.mark.parametrize(
    ("late", "cut", "expected"), [(0, 5, True), (0, 20, None), (5, 20, None), (20, 20, False), (20, 200, None), (100, 5, False)]
)
def test_cut_requests_leave_the_objective_open_if_they_could_decide_it(late: int, cut: int, expected: bool | None) -> None:
    missed = [replace(one, token_ns=(one.sent_ns + 200 * MS, one.end_ns)) for one in STEADY[:late]]
    others = [replace(cut_after(0.5), id=f"{number}") for number in range(cut)]
    found = carried(load(*missed, *STEADY[late:], *others), Slo({"ttft": 100 * MS}))
    assert isinstance(found, Missing) if expected is None else found is expected

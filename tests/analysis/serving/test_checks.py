"""Checks of the generator, its own summary against ours, goodput."""

import random
from pathlib import Path

import pytest

from llm_perf_opt.analysis.serving.agreement import Agreement, agreement
from llm_perf_opt.analysis.serving.generator import CheckId, GeneratorCheck, generator_checks
from llm_perf_opt.analysis.serving.slo import Goodput, Slo, goodput, parse_slo, share_interval
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.missing import Missing
from llm_perf_opt.core.serving_records import Arrival, LoadKind, LoadPoint, LoadRecords, ServedRequest
from llm_perf_opt.traces.serving.load_file import read_load

FILES = Path(__file__).parents[2] / "fixtures" / "serving"
MS, S = 1_000_000, 1_000_000_000


def point(asked: float, kind: LoadKind = "rate", arrival: Arrival = "poisson") -> LoadPoint:
    return LoadPoint(0, kind, asked, arrival, "x", "f", 1, 0, 0, "complete")


def load(sent: list[int], took: int = 50 * MS, delay: int = MS) -> LoadRecords:
    requests = [ServedRequest(str(at), at, at + took, (at + 20 * MS,), scheduled_ns=at - delay) for at in sent]
    return LoadRecords("x", tuple(requests))


def poisson(rate: float, count: int, seed: int = 1) -> list[int]:
    draw, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at += draw.expovariate(rate)
        found.append(round(at * S))
    return found


def outcomes(checks: tuple[GeneratorCheck, ...]) -> dict[CheckId, str]:
    return {check.id: check.outcome for check in checks}


def test_a_generator_that_does_what_was_asked() -> None:
    found = outcomes(generator_checks(load(poisson(8, 300)), point(8)))
    assert found == {CheckId.RATE: "ok", CheckId.SPREAD: "ok", CheckId.DELAY: "ok"}
    even = load([number * S // 8 for number in range(300)])
    assert set(outcomes(generator_checks(even, point(8, arrival="constant"))).values()) == {"ok"}


def test_correct_generators_are_seldom_called_off() -> None:
    off = sum(
        check.outcome == "off" for seed in range(200) for check in generator_checks(load(poisson(8, 60, seed)), point(8))[:2]
    )
    assert off <= 16  # 400 checks at 99 %: 4 are expected, more because the spread is skewed


def test_a_wrong_rate_is_found() -> None:
    found = outcomes(generator_checks(load(poisson(31, 200)), point(20)))
    assert found[CheckId.RATE] == "off"
    assert found[CheckId.SPREAD] == "ok"


def test_bursts_and_even_gaps_are_no_poisson_arrivals() -> None:
    bursts = sorted(at + place for at in poisson(2, 60) for place in range(5))
    assert outcomes(generator_checks(load(bursts), point(10)))[CheckId.SPREAD] == "off"
    even = load([number * S // 8 for number in range(300)])
    assert outcomes(generator_checks(even, point(8)))[CheckId.SPREAD] == "off"


def test_a_burst_has_no_rate_and_no_gaps() -> None:
    found = generator_checks(load(list(range(0, 50 * MS, MS))), point(50, arrival="burst"))
    assert set(outcomes(found)) == {CheckId.DELAY}


def test_late_requests_are_found() -> None:
    assert outcomes(generator_checks(load(poisson(8, 100), delay=5 * MS), point(8)))[CheckId.DELAY] == "off"


def test_a_closed_loop_keeps_its_requests_in_flight() -> None:
    sent = [place + turn * 50 * MS for turn in range(20) for place in range(4)]
    assert outcomes(generator_checks(load(sent), point(4, "concurrency", "closed")))[CheckId.IN_FLIGHT] == "ok"
    assert outcomes(generator_checks(load(sent), point(8, "concurrency", "closed")))[CheckId.IN_FLIGHT] == "off"


def test_what_cannot_be_told() -> None:
    few = generator_checks(load(poisson(8, 5)), point(8))
    assert outcomes(few)[CheckId.RATE] == "cannot tell"
    (bench,) = read_load(FILES / "vllm_bench_serve.json")
    assert outcomes(generator_checks(bench, point(2)))[CheckId.DELAY] == "cannot tell"


# --- the generator's own summary ------------------------------------------------------------------------------------------


def explanations(name: str) -> dict[str, set[Agreement]]:
    (found,) = read_load(FILES / name)
    start = min(request.sent_ns for request in found.requests)
    window = max(request.end_ns for request in found.requests) - start
    rates = len(found.requests) * 1e9 / window, 16 * len(found.requests) * 1e9 / window
    kinds: dict[str, set[Agreement]] = {}
    for figure in agreement(found, *rates):
        assert not isinstance(figure.agreement, Missing)
        kinds.setdefault(figure.key, set()).add(figure.agreement)
    return kinds


def test_every_difference_from_real_summaries_is_explained() -> None:
    same = {Agreement.SAME}
    aiperf = explanations("profile_export.jsonl")
    assert aiperf["ttft"] == aiperf["itl"] == aiperf["e2e"] == same
    assert aiperf["tpot"] == aiperf["output_rate"] == {Agreement.RETOKENIZED}
    assert aiperf["request_rate"] == {Agreement.WINDOW}
    bench = explanations("vllm_bench_serve.json")
    assert bench["ttft"] == bench["tpot"] == bench["itl"] == bench["e2e"] == same
    assert bench["request_rate"] == bench["output_rate"] == {Agreement.WINDOW}
    guidellm = explanations("guidellm.json")
    assert guidellm["ttft"] == guidellm["tpot"] == guidellm["e2e"] == {Agreement.SAME, Agreement.RANK}
    assert guidellm["request_rate"] == guidellm["output_rate"] == same


def test_a_wrong_figure_is_unexplained() -> None:
    requests = load(poisson(8, 50)).requests
    wrong = LoadRecords("x", requests, own={"ttft": {"p50": 21.0 * MS}, "request_rate": {"mean": 100.0}})
    found = agreement(wrong, 8.0, Missing("no tokens"))
    assert [figure.agreement for figure in found] == [Agreement.UNEXPLAINED] * 2


def test_a_lower_rate_is_explained_only_by_the_time_that_the_generator_took() -> None:
    requests = load(poisson(8, 50)).requests
    for duration_s, expected in ((10.0, Agreement.WINDOW), (9.0, Agreement.UNEXPLAINED), (None, Agreement.UNEXPLAINED)):
        known = Missing("not recorded") if duration_s is None else duration_s
        records = LoadRecords("x", requests, own={"request_rate": {"mean": 5.0}}, duration_s=known)
        (found,) = agreement(records, 8.0, Missing("no tokens"))
        assert found.agreement is expected


# --- goodput --------------------------------------------------------------------------------------------------------------


def test_objectives() -> None:
    assert parse_slo("ttft=200ms, tpot=20ms,e2e=1.5s").limits == {"ttft": 200 * MS, "tpot": 20 * MS, "e2e": 1500 * MS}
    for text in ("", "ttft", "ttft=5", "ttft=-1ms", "speed=1ms", "ttft=1ms,ttft=2ms", "ttft=0ms", "ttft=1h"):
        with pytest.raises(ConfigError):
            parse_slo(text)


def test_goodput_counts_failed_requests_as_bad() -> None:
    def one(first: int, error: str = "") -> ServedRequest:
        return ServedRequest("a", 0, 100, (first, first + 10), output_tokens=2, error=error)

    requests = [one(10), one(20), one(30), one(10, "500")]
    found = goodput(requests, Slo({"ttft": 20, "tpot": 10}), S)
    assert isinstance(found, Goodput)
    assert (found.good, found.requests, found.share, found.rate) == (2, 4, 0.5, 2.0)
    assert found.share_low < 0.5 < found.share_high
    unstreamed = goodput([ServedRequest("a", 0, 5)], Slo({"ttft": 20}), S)
    assert isinstance(unstreamed, Missing)


def test_wilsons_interval() -> None:
    assert share_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-3)
    assert share_interval(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-3)

"""Whether a server kept up with a load, and which rate comes next."""

import pytest

from llm_perf_opt.analysis.serving.slo import NO_SLO, Slo
from llm_perf_opt.config.serving import parse_loads
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.serving_records import LoadRecords, ServedRequest
from llm_perf_opt.profiling.serving.rates import first_rate, judge, knee, next_rate

MS = 10**6


def served(sent_ms: float, *arrivals_ms: float, error: str = "") -> ServedRequest:
    times = tuple(round((sent_ms + at) * MS) for at in arrivals_ms)
    return ServedRequest("1", round(sent_ms * MS), times[-1] if times else round(sent_ms * MS), times, error=error)


def load(*requests: ServedRequest) -> LoadRecords:
    return LoadRecords("test", requests)


def test_a_server_keeps_up_if_requests_end_as_fast_as_they_are_sent() -> None:
    found = judge(load(*(served(100 * number, 50, 300) for number in range(11))), NO_SLO)
    assert (found.kept_up, found.sent, found.failed) == (True, 11, 0), "the last request's 300 ms do not count"
    assert not judge(load(*(served(100 * number, 50, 300 + 10 * number) for number in range(11))), NO_SLO).kept_up


def test_failed_requests_are_not_kept_up_with() -> None:
    requests = [served(100 * number, 50, error="" if number % 10 else "429") for number in range(20)]
    assert not judge(load(*requests), NO_SLO).kept_up
    assert judge(load(*requests), Slo({"ttft": 60 * MS})).kept_up, "90 % are good"
    assert not judge(load(*requests), Slo({"ttft": 40 * MS})).kept_up


def test_rates_double_then_bisect() -> None:
    tried: dict[float, bool] = {}
    rate: float | None = first_rate(0.5)
    while rate is not None:
        tried[rate] = rate <= 13
        rate = next_rate(tried, 12)
    assert list(tried) == [2.0, 4.0, 8.0, 16.0, 11.3, 13.4, 12.3]
    assert knee(tried) == (12.3, 13.4)
    assert next_rate(tried, 7) is None


def test_rates_halve_if_the_first_is_too_high() -> None:
    assert next_rate({10.0: False}, 8) == 5.0
    assert next_rate({10.0: False, 5.0: True}, 8) == 7.07
    assert knee({10.0: False}) == (None, 10.0)
    assert knee({1.0: True, 2.0: False, 4.0: True}) == (1.0, 2.0)


def test_loads_are_read() -> None:
    assert parse_loads("4,1,2.5", "--rates") == (1.0, 2.5, 4.0)


@pytest.mark.parametrize(("text", "option"), [("0", "--rates"), ("x", "--rates"), ("", "--rates"), ("1.5", "--concurrency")])
def test_bad_loads_are_refused(text: str, option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        parse_loads(text, option)

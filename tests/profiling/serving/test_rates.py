"""Which rate comes next, and how many requests it has."""

import pytest

from llm_perf_opt.config.composition import compose
from llm_perf_opt.config.serving import parse_loads
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.profiling.serving.rates import first_rate, knee, next_rate
from llm_perf_opt.profiling.serving.request import ServingRequest


def test_a_load_has_enough_requests_for_a_steady_state() -> None:
    config = compose(["model=tiny"], None).config
    asked = ServingRequest(config, requests=100, least_s=10.0)
    assert asked.requests_at(5.0, 0.2) == 100
    assert asked.requests_at(50.0, 0.2) == 500
    assert asked.requests_at(50.0, 8.0) == 1400, "3.5 times the end-to-end time"
    assert ServingRequest(config, requests=8, least_s=0.0).requests_at(50.0, 8.0) == 8
    closed = ServingRequest(config, requests=100, least_s=10.0, concurrency=(1.0, 64.0))
    assert closed.requests_at(1.0, 0.5) == 100
    assert closed.requests_at(64.0, 0.5) == 1280, "ten seconds at 64 requests in half a second"
    assert closed.requests_at(64.0, 30.0) == 640, "ten in each place"


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

"""What a search improves and respects, as the user writes it."""

import pytest

from llm_perf_opt.analysis.tuning.goals import GOALS, in_ns, objective_named, parse_budget, parse_constraints
from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import Missing


@pytest.mark.parametrize(
    ("text", "goal", "limit"),
    [
        ("ttft<50ms", "ttft", 50e6),
        (" tpot <= 2.5 ms ", "tpot", 2.5e6),
        ("latency<1.5s", "latency", 1.5e9),
        ("memory<20GB", "memory", 20e9),
        ("memory<2GiB", "memory", 2 * 2**30),
        ("throughput>100", "throughput", 100.0),
        ("energy<500mJ", "energy", 0.5),
    ],
)
def test_constraints(text: str, goal: str, limit: float) -> None:
    (found,) = parse_constraints([text])
    assert found.goal == goal
    assert found.limit == pytest.approx(limit)


def test_a_constraint_is_broken_from_its_side_alone_and_by_what_is_unknown() -> None:
    time, rate = parse_constraints(["ttft<50ms", "throughput>100"])
    assert (time.broken_by(50e6), rate.broken_by(100.0)) == ("", "")
    assert time.broken_by(51e6) == "ttft<50ms: ttft is 51.00 ms"
    assert rate.broken_by(99.0) == "throughput>100: throughput is 99.00 tokens/s"
    assert "not sampled" in time.broken_by(Missing("not sampled"))


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("20m", 1200), ("1.5h", 5400), ("2min", 120)])
def test_budgets(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["20", "m", "0s", "-1m", "1d", "1m30s"])
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a time"):
        parse_budget(text)


def test_a_rate_is_compared_as_the_time_of_a_token() -> None:
    assert in_ns(objective_named("throughput"), 200.0) == 5_000_000
    assert in_ns(GOALS["tpot"], 7.4) == 7
    assert in_ns(GOALS["energy"], 3.0) is None

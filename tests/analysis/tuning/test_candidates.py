"""What a finding predicts for an objective."""

import pytest

from builders import MS, clean_timings, in_a_row
from llm_perf_opt.analysis.tuning.candidates import prediction
from llm_perf_opt.analysis.tuning.goals import GOALS
from tuning_builders import fake_finding


def test_steps_that_the_finding_does_not_cover_save_the_same_share() -> None:
    """Two traced steps of 20 ms save 18 ms each; over all steps, a token takes 15 ms."""
    timings = clean_timings(in_a_row(5, 100 * MS, [20 * MS, 20 * MS, 10 * MS, 10 * MS]))
    finding = fake_finding("launch_bound_decode", "runtime.compile=default", 18, counted=2)
    found = prediction(finding, GOALS["tpot"], 15 * MS, timings, {})
    assert found is not None
    assert found.expected_ns == 15 * MS * 2 // 20
    assert (found.low_ns, found.high_ns) == (round(15 * MS * 1.5 / 20), round(15 * MS * 2.5 / 20))


@pytest.mark.parametrize(("goal", "tokens"), [("latency", 1), ("throughput", 10)])
def test_a_request_saves_what_its_units_save(goal: str, tokens: int) -> None:
    """Two sequences of five tokens take 160 ms; four steps of 15 ms on average save 18 of 20 parts."""
    timings = clean_timings(in_a_row(5, 100 * MS, [20 * MS, 20 * MS, 10 * MS, 10 * MS]))
    assert timings.workload.batch_size * timings.workload.new_tokens == 10
    finding = fake_finding("launch_bound_decode", "runtime.compile=default", 18, counted=2)
    found = prediction(finding, GOALS[goal], 160 * MS / tokens, timings, {})
    assert found is not None
    assert found.expected_ns == pytest.approx((160 - 60 * 18 / 20) * MS / tokens)

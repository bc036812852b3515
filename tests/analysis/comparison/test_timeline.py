"""The change between several runs, from the timeline of all their repeats."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from llm_perf_opt.analysis.comparison.effects import Judgement, in_turn
from llm_perf_opt.analysis.comparison.statistics import effect
from llm_perf_opt.analysis.comparison.timeline import Posterior, posterior, timeline_of
from llm_perf_opt.core.records import Missing
from machine_noise import KINDS, Plan, pairs

PAIRS = 60
AT_MOST = 0.05
SLACK = 3 * math.sqrt(0.9 * 0.1 / PAIRS)
"""Three standard errors of a share of nine in ten."""


def verdicts(kind: str, slowdown: float) -> list[str]:
    found = [
        effect(base, new, judgement=Judgement(process_spread=0.01))
        for base, new in pairs(kind, Plan(runs=5, repeats=10, slowdown=slowdown), PAIRS)
    ]
    return ["" if isinstance(one, Missing) else one.verdict for one in found]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_five_runs_of_ten_repeats_find_5_percent_in_every_kind_of_noise(kind: str) -> None:
    """The published rates are those of benchmarks/false_verdicts.py, from more pairs."""
    assert verdicts(kind, 0.05).count("slower") >= (0.9 - SLACK) * PAIRS
    assert verdicts(kind, 0.0).count("not distinguishable") >= (1 - AT_MOST) * PAIRS


@pytest.mark.parametrize("kind", ["one switch", "switches", "drift, continuing"])
def test_a_machine_that_moves_does_not_hide_a_change(kind: str) -> None:
    """From the medians of the runs alone, one in three was found, or fewer."""
    found = [
        effect(base, new, judgement=Judgement(process_spread=0.01))
        for base, new in pairs(kind, Plan(runs=5, repeats=10, slowdown=0.05), 12)
    ]
    assert sum(not isinstance(one, Missing) and one.verdict == "slower" for one in found) >= 9


def change_of(base: Sequence[Sequence[float]], new: Sequence[Sequence[float]], sides: Sequence[int]) -> Posterior:
    logs = [[np.log(np.asarray(run))[:, None] for run in side] for side in (base, new)]
    found = posterior(timeline_of(logs[0], logs[1], sides))
    assert found is not None
    return found


def test_the_order_of_the_runs_tells_a_drift_from_a_change() -> None:
    generator = np.random.default_rng(1)
    runs = [[100 * math.exp(0.002 * (10 * run + place) + 0.005 * generator.normal()) for place in range(10)] for run in range(6)]
    alternating = change_of(runs[0::2], runs[1::2], (0, 1, 0, 1, 0, 1))
    low, high = alternating.quantiles(0.01, 0.99)
    assert low < 0 < high
    assert high - low < 0.05
    first, last = change_of(runs[:3], runs[3:], (0, 0, 0, 1, 1, 1)).quantiles(0.01, 0.99)
    assert first < 0 < last


def test_runs_that_differ_far_more_than_their_repeats_are_judged_by_their_levels() -> None:
    """As by Student's t over the levels, with four degrees of freedom."""
    generator = np.random.default_rng(2)
    levels = [math.log(100) + 0.3 * generator.normal() for _ in range(6)]
    runs = [[math.exp(level + 1e-5 * generator.normal()) for _ in range(10)] for level in levels]
    low, high = change_of(runs[0::2], runs[1::2], (0, 1) * 3).quantiles(0.05, 0.95)
    spread = math.sqrt((np.var(levels[0::2], ddof=1) + np.var(levels[1::2], ddof=1)) / 2 * 2 / 3)
    assert high - low == pytest.approx(2 * 2.132 * spread, rel=0.2)


def test_a_coarse_clock_leaves_the_spread_between_runs() -> None:
    base, new = [[100.0] * 10, [103.0] * 10, [101.0] * 10], [[102.0] * 10, [100.0] * 10, [104.0] * 10]
    low, high = change_of(base, new, (0, 1) * 3).quantiles(0.01, 0.99)
    assert low < -0.02 < 0.04 < high


def test_nothing_that_varies_has_no_posterior() -> None:
    same = [np.zeros((10, 1))] * 3
    assert posterior(timeline_of(same, same, (0, 1) * 3)) is None


@pytest.mark.parametrize(("repeats", "runs"), [(6, 3), (300, 3), (7, 30), (7, 150)])
def test_any_number_of_runs_and_repeats_is_judged(repeats: int, runs: int) -> None:
    generator = np.random.default_rng(3)
    sides = [[[level * math.exp(0.01 * generator.normal()) for _ in range(repeats)] for _ in range(runs)] for level in (100, 110)]
    found = effect(sides[0], sides[1], judgement=Judgement())
    assert not isinstance(found, Missing)
    assert found.verdict == "slower"
    assert found.change == pytest.approx(0.1, abs=0.02)


def test_runs_alternate_where_their_times_do_not_tell() -> None:
    assert in_turn(["a", "c"], ["b", "d"]) == (0, 1, 0, 1)
    assert in_turn(["", "", ""], ["", "", ""]) == (0, 1) * 3
    assert in_turn(["a", "b"], ["c", "d"]) == (0, 0, 1, 1)
    assert Judgement().sides(4, 2) == (0, 1, 0, 0, 1, 0)
    assert Judgement(order="new first").sides(1, 2) == (1, 1, 0)

"""The forecast of a planned comparison, against what compare then finds."""

import math

import numpy as np
import pytest

from llm_perf_opt.analysis.comparison.effects import Judgement
from llm_perf_opt.analysis.comparison.planning import Noise, forecast, noise_of
from llm_perf_opt.analysis.comparison.statistics import effect
from llm_perf_opt.core.records import Missing

PAIRS = 100


def drawn(noise: Noise, generator: np.random.Generator, repeats: int, level: float = 100.0) -> list[float]:
    """A run with this noise."""
    assert not isinstance(noise.process, Missing)
    steps = generator.normal(size=repeats)
    values = [steps[0]]
    for step in steps[1:]:
        values.append(noise.likeness * values[-1] + math.sqrt(1 - noise.likeness**2) * step)
    level *= math.exp(noise.process * generator.normal())
    return [level * math.exp(noise.scatter * value) for value in values]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "runs"),
    [
        (Noise(0.024, 0.8, 0.005, 0.01, 3, 10), 3),
        (Noise(0.024, 0.0, 0.03, 0.03, 3, 10), 5),
        (Noise(0.05, 0.0, 0.02, 0.03, 3, 10), 6),
    ],
    ids=["correlated repeats", "processes that differ", "both"],
)
def test_the_forecast_is_what_compare_then_finds(noise: Noise, runs: int) -> None:
    found = forecast(noise, 0.05, 0.9)
    assert not isinstance(found, Missing)
    power = next(row.power for row in found.table if row.runs == runs)
    generator = np.random.default_rng(3)
    sides = [[[drawn(noise, generator, 10, level) for _ in range(runs)] for level in (100.0, 105.0)] for _ in range(PAIRS)]
    effects = [effect(base, new, judgement=Judgement(process_spread=0.01)) for base, new in sides]
    share = sum(not isinstance(one, Missing) and one.verdict == "slower" for one in effects) / PAIRS
    assert 0.2 < power < 0.9
    assert share == pytest.approx(power, abs=0.05 + 2.5 * math.sqrt(power * (1 - power) / PAIRS))


@pytest.mark.slow
def test_more_runs_find_more_and_a_larger_change_needs_fewer() -> None:
    noise = Noise(0.024, 0.0, 0.02, 0.03, 3, 10)
    small, large = (forecast(noise, change, 0.9) for change in (0.04, 0.10))
    assert not isinstance(small, Missing)
    assert not isinstance(large, Missing)
    powers = [row.power for row in small.table]
    assert powers == sorted(powers)
    assert [row.finds for row in small.table] == sorted((row.finds for row in small.table), reverse=True)
    assert all(row.power_least <= row.power for row in small.table)
    assert not isinstance(small.needed, Missing)
    assert not isinstance(large.needed, Missing)
    assert large.needed < small.needed
    first = next(row for row in small.table if row.power >= 0.9)
    assert (first.runs, first.finds <= 0.04) == (small.needed, True)


def test_a_change_that_no_number_of_runs_finds() -> None:
    found = forecast(Noise(0.024, 0.0, 0.3, 0.6, 1, 10), 0.05, 0.9)
    assert not isinstance(found, Missing)
    assert isinstance(found.needed, Missing)
    assert found.table[-1].finds > 0.05


def test_the_noise_of_pilots_is_recovered() -> None:
    generator = np.random.default_rng(5)
    truth = Noise(0.02, 0.6, 0.03, 0.03, 40, 30)
    found = noise_of([drawn(truth, generator, 30) for _ in range(40)], None)
    assert not isinstance(found, Missing)
    assert not isinstance(found.process_most, Missing)
    assert found.scatter == pytest.approx(0.02, rel=0.1)
    assert found.likeness == pytest.approx(0.6, abs=0.1)
    assert found.process == pytest.approx(0.03, rel=0.25)
    assert found.process_most > 0.03


def test_one_pilot_does_not_show_how_processes_differ() -> None:
    run = drawn(Noise(0.02, 0.0, 0.0, 0.0, 1, 10), np.random.default_rng(1), 10)
    unknown, assumed = noise_of([run], None), noise_of([run], 0.01)
    assert not isinstance(unknown, Missing)
    assert not isinstance(assumed, Missing)
    assert isinstance(unknown.process, Missing)
    assert isinstance(forecast(unknown, 0.05, 0.9), Missing)
    assert (assumed.process, assumed.process_most) == (0.01, 0.02)


@pytest.mark.parametrize("run", [[1.0] * 5, [1.0] * 5 + [0.0], [1.0] * 5 + [math.inf]])
def test_pilots_without_usable_repeats_give_no_noise(run: list[float]) -> None:
    assert isinstance(noise_of([run], 0.01), Missing)


def test_repeats_without_noise_need_the_fewest_runs() -> None:
    noise = noise_of([[1.0] * 10] * 3, None)
    assert not isinstance(noise, Missing)
    found = forecast(noise, 0.05, 0.9)
    assert not isinstance(found, Missing)
    assert found.needed == 3

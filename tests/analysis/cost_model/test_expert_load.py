"""The busiest device among those that share whole experts, against simulated tokens."""

import random

import pytest

from llm_perf_opt.analysis.cost_model.expert_load import most_choices, most_experts


def simulated(experts: int, active: int, devices: int, tokens: int, trials: int) -> tuple[float, float]:
    """Return mean distinct experts and mean choices on the busiest device, each the busiest for itself."""
    each, more = divmod(experts, devices)
    holder = [device for device in range(devices) for _ in range(each + (device < more))]
    draw, distinct, choices = random.Random(0), 0, 0
    for _ in range(trials):
        chosen = [draw.sample(range(experts), active) for _ in range(tokens)]
        distinct += max(_per_device({expert for experts in chosen for expert in experts}, holder, devices))
        choices += max(_per_device([expert for experts in chosen for expert in experts], holder, devices))
    return distinct / trials, choices / trials


def _per_device(chosen: set[int] | list[int], holder: list[int], devices: int) -> list[int]:
    found = [0] * devices
    for expert in chosen:
        found[holder[expert]] += 1
    return found


@pytest.mark.parametrize(
    ("experts", "active", "devices", "tokens"),
    [(128, 8, 8, 1), (128, 8, 8, 4), (128, 8, 8, 16), (64, 6, 8, 64), (6, 2, 4, 16), (8, 2, 2, 4), (256, 8, 64, 128)],
)
def test_the_busiest_device_is_that_of_a_simulation(experts: int, active: int, devices: int, tokens: int) -> None:
    distinct, choices = simulated(experts, active, devices, tokens, trials=6000 // (active * tokens) + 60)
    assert most_experts(experts, active, devices, tokens) == pytest.approx(distinct, rel=0.05)
    assert most_choices(experts, active, devices, tokens) == pytest.approx(choices, rel=0.05)


def test_known_cases() -> None:
    assert most_experts(8, 2, 8, 1) == most_choices(8, 2, 8, 1) == 1, "one whole expert at least"
    assert most_experts(8, 2, 2, 1) == pytest.approx(1 + 3 / 7), "both experts on one of two devices: 3 of 7"
    assert most_experts(128, 8, 8, 1) == pytest.approx(2.53, abs=0.005)
    assert most_experts(128, 8, 8, 100_000) == pytest.approx(16)
    assert most_choices(128, 8, 8, 10**6) == pytest.approx(10**6, rel=0.01), "the busiest has little more than the average"
    assert most_experts(4, 4, 2, 3) == 2
    assert most_choices(4, 4, 2, 3) == 6, "every token uses every expert"

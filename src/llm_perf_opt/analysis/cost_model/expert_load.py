"""How much work the busiest of the devices that share whole experts gets, if tokens choose all experts equally often."""

import math
from functools import lru_cache
from statistics import NormalDist

from llm_perf_opt.analysis.cost_model.work import expected_experts

_STEP = 0.01
_FARTHEST = 8.0
"""Width and end of the steps of an integral over the normal distribution; its result is exact to six digits."""


@lru_cache(maxsize=4096)
def most_experts(experts: int, active: int, devices: int, tokens: int) -> float:
    """Return how many distinct experts the tokens are expected to use on the device where they use most.

    Exact for one token. For several, the distinct experts are as many as expected, and lie on the devices at random.
    """
    used = expected_experts(experts, active, tokens)
    fewer = math.floor(used)
    found = _most_of(experts, devices, fewer)
    return found if used == fewer else found + (used - fewer) * (_most_of(experts, devices, fewer + 1) - found)


def _most_of(experts: int, devices: int, used: int) -> float:
    """Return how many of `used` random experts are expected on the device that has most of them."""
    each, more = divmod(experts, devices)
    bits = experts + 1  # holds the number of all subsets
    ways = math.comb(experts, used)
    found = 0.0
    for most in range(min(used, each + (more > 0))):
        if most * devices < used:
            found += 1
            continue
        # Polynomials as whole numbers: the coefficient of x^n counts the choices of n experts, at most `most` on each device.
        choices = _choices(each, most, bits) ** (devices - more) * _choices(each + 1, most, bits) ** more
        within = choices >> bits * used & (1 << bits) - 1
        found += 1 - within / ways
    return found


def _choices(held: int, most: int, bits: int) -> int:
    return sum(math.comb(held, count) << bits * count for count in range(min(held, most) + 1))


@lru_cache(maxsize=4096)
def most_choices(experts: int, active: int, devices: int, tokens: int) -> float:
    """Return how often the tokens are expected to choose an expert of the device that they choose most.

    Exact for one token. For several, numbers of choices are normally distributed, with their true variance and correlation.
    """
    fullest = experts % devices or devices
    share = -(-experts // devices) / experts
    mean = tokens * active * share
    spread = math.sqrt(mean * (experts - active) / (experts - 1))
    least = most_experts(experts, active, devices, tokens)
    return least if tokens == 1 else min(max(least, mean + spread * _largest_normal(fullest)), tokens * active)


@lru_cache(maxsize=256)
def _largest_normal(count: int) -> float:
    """Return the expected largest of independent standard normal values."""
    below = NormalDist().cdf
    points = [index * _STEP for index in range(round(_FARTHEST / _STEP))]
    return _STEP * sum(1 - below(point + _STEP / 2) ** count - below(-point - _STEP / 2) ** count for point in points)

"""Quantiles of Student's t, without a statistics package."""

import functools
import math


@functools.lru_cache(maxsize=256)
def student_quantile(share: float, freedom: int | None) -> float:
    """Quantile (0.5 < share < 1) of Student's t with whole degrees of freedom; none: of the normal distribution."""
    low, high = 0.0, 1e5
    for _ in range(100):
        middle = (low + high) / 2
        inside = math.erf(middle / math.sqrt(2)) if freedom is None else _inside_student(middle, freedom)
        if (1 + inside) / 2 < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _inside_student(t: float, freedom: int) -> float:
    """P(|T| < t): the finite sums that hold for whole degrees of freedom."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2 == 1
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(1 if odd else 0, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total

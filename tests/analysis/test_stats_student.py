"""Student's t against printed tables."""

import pytest

from llm_perf_opt.analysis.stats import student_quantile


@pytest.mark.parametrize(
    ("share_inside", "freedom", "expected"),
    [(0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 3, 3.182), (0.95, 4, 2.132), (0.975, 10, 2.228), (0.975, None, 1.960)],
)
def test_quantiles_are_those_of_the_tables(share_inside: float, freedom: int | None, expected: float) -> None:
    assert student_quantile(share_inside, freedom) == pytest.approx(expected, abs=5e-4)

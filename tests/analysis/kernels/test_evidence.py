"""Passes of one run against each other."""

import pytest

from llm_perf_opt.analysis.kernels.evidence import disagreements


@pytest.mark.parametrize(
    ("nsys", "torch", "told"),
    [(1172.0, 1172.0, False), (1172.0, 1170.0, False), (100.0, 91.0, False), (100.0, 89.0, True), (89.0, 100.0, True)],
)
def test_only_what_differs_notably_is_told(nsys: float, torch: float, told: bool) -> None:
    found = disagreements({"nsys": {"decode": nsys}, "torch": {"decode": torch}})
    assert len(found) == told
    assert all(f"nsys has {nsys:,.1f} kernels per decode step, torch {torch:,.1f}" in one.text for one in found)


def test_a_stage_that_one_pass_does_not_hold_is_not_compared() -> None:
    assert disagreements({"nsys": {"decode": 8.0}, "torch": {"prefill": 1.0}}) == ()
    assert disagreements({"nsys": {"decode": 8.0}}) == disagreements({}) == ()

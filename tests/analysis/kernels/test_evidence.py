"""Differences between the passes of one run."""

import pytest

from llm_perf_opt.analysis.kernels.evidence import disagreements


@pytest.mark.parametrize(
    ("nsys", "torch", "told"),
    [(1172.0, 1172.0, False), (1172.0, 1170.0, False), (100.0, 91.0, False), (100.0, 89.0, True), (89.0, 100.0, True)],
)
def test_only_notable_differences_are_warnings(nsys: float, torch: float, told: bool) -> None:
    found = disagreements({"nsys": {"decode": nsys}, "torch": {"decode": torch}})
    assert len(found) == told
    assert all(f"nsys has {nsys:,.1f} kernels per decode step, torch {torch:,.1f}" in one.text for one in found)


def test_a_stage_missing_in_one_pass_is_not_compared() -> None:
    assert disagreements({"nsys": {"decode": 8.0}, "torch": {"prefill": 1.0}}) == ()
    assert disagreements({"nsys": {"decode": 8.0}}) == disagreements({}) == ()

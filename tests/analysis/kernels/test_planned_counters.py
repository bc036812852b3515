"""The plan of a counting pass compared with its result."""

import pytest

from llm_perf_opt.analysis.kernels.evidence import outcome
from llm_perf_opt.analysis.kernels.selection import SelectedKernel, Selection
from llm_perf_opt.core.records import Missing


def plan(stage: str = "decode_step") -> Selection:
    kernels = (SelectedKernel("f", 100, 10, 0.9),)
    return Selection(stage, "nsys", 2, kernels, 0.9, launch_skip=0, launch_count=100, steps_needed=3, passes=9, seconds=1.0)


def test_the_plan_is_shown_with_what_was_counted() -> None:
    found = outcome(plan(), "decode", 100, 0.88)
    assert "100 launches of step 2, which represent 90.0 % of its kernel time" in found.note
    assert found.note.endswith("Counted: 100 launches, joined to 88.0 % of the stage's kernel time.")
    assert found.warning is None


@pytest.mark.parametrize(("launches", "joined"), [(90, 0.9), (100, 0.8), (0, 0.0)])
def test_less_than_planned_is_a_warning(launches: int, joined: float) -> None:
    warning = outcome(plan(), "decode", launches, joined).warning
    assert warning is not None
    assert f"{launches} of 100 launches were counted" in warning.text
    assert "planned 90.0 %" in warning.text


def test_a_plan_for_one_range_has_no_target_for_the_program() -> None:
    assert outcome(plan("train@LLM"), "program", 100, 0.2).warning is None
    assert outcome(plan("the program"), "program", 100, 0.2).warning
    assert outcome(plan("train@LLM"), "program", 10, 0.2).warning


def test_unused_counters_have_a_reason() -> None:
    found = outcome(plan(), "decode", Missing("no verdict"), Missing("no verdict"))
    assert found.note.endswith("Counted: n/a: no verdict.")
    assert found.warning is None

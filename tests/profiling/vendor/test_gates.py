"""Range expressions that would record nothing are rejected before a process is started."""

import pytest

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.stages import Stage, ncu_range, nsys_range
from llm_perf_opt.profiling.vendor.gates import Tool, check_gate, on_range, on_stage


@pytest.mark.parametrize("stage", Stage)
def test_our_own_spellings_pass(stage: Stage) -> None:
    check_gate("nsys", nsys_range(stage))
    check_gate("ncu", ncu_range(stage))
    assert on_stage(stage).range == nsys_range(stage)


@pytest.mark.parametrize(
    ("tool", "expression"),
    [
        ("nsys", "range@LLM"),  # waits for a range called "range"
        ("nsys", "LLM@decode/"),  # the other tool's syntax
        ("nsys", "decode*@LLM"),
        ("nsys", "decode"),  # in the default domain there is none
        ("nsys", "@LLM"),
        ("nsys", "a@b@LLM"),
        ("nsys", ""),
        ("ncu", "decode*"),
        ("ncu", "decode@LLM"),
        ("ncu", "LLM@decode"),  # without the slash: a start/end range, which we never open
        ("ncu", "decode/"),
        ("ncu", "LLM@decode_step/decode/"),  # the wrong way round
        ("ncu", "LLM@range/"),
        ("ncu", "LLM@/"),
        ("ncu", ""),
    ],
)
def test_what_would_match_nothing_is_refused_with_both_syntaxes(tool: Tool, expression: str) -> None:
    with pytest.raises(ConfigError, match="would record nothing") as refused:
        check_gate(tool, expression)
    assert "NAME@DOMAIN" in refused.value.remedy
    assert "DOMAIN@OUTER/INNER/" in refused.value.remedy


def test_the_nearest_range_is_named() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'decode@LLM'"):
        check_gate("nsys", "decod@LLM")


def test_sub_stages_lie_inside_prefill_and_decode_steps() -> None:
    for expression in ("LLM@first/", "LLM@prefill/first/", "LLM@decode/decode_step/first/", "LLM@profile/prefill/first/"):
        check_gate("ncu", expression, substages=["first"])
    check_gate("nsys", "first@LLM", substages=["first"])
    with pytest.raises(ConfigError):
        check_gate("ncu", "LLM@decode/first/", substages=["first"])


@pytest.mark.parametrize(
    ("tool", "expression"),
    [
        ("nsys", "mine@App"),
        ("nsys", "mine"),
        ("nsys", "mine@*"),
        ("nsys", r"a\@b@App"),
        ("ncu", "App@mine/*/inner"),
        ("ncu", "mine"),
    ],
)
def test_a_users_own_program_may_have_any_name(tool: Tool, expression: str) -> None:
    check_gate(tool, expression, ours=False)


@pytest.mark.parametrize(("tool", "expression"), [("nsys", "step*@App"), ("nsys", "App@step/"), ("ncu", "step*"), ("ncu", "*")])
def test_syntax_that_can_never_match_is_refused_there_too(tool: Tool, expression: str) -> None:
    with pytest.raises(ConfigError):
        check_gate(tool, expression, ours=False)
    assert on_range(expression).ours is False

"""Stage names in the syntax that each tool accepts."""

import re

import pytest

from llm_perf_opt.core.stages import DOMAIN, PARENT, STAGE_NAMES, Stage, ncu_range, nsys_range


def test_the_stages_and_how_they_nest() -> None:
    assert STAGE_NAMES == ("profile", "prefill", "decode", "decode_step")
    assert {str(stage): str(parent) for stage, parent in PARENT.items() if parent} == {
        "prefill": "profile",
        "decode": "profile",
        "decode_step": "decode",
    }
    assert set(PARENT) == set(Stage), "every stage has its place"


@pytest.mark.parametrize("stage", Stage)
def test_every_stage_lies_in_profile(stage: Stage) -> None:
    seen = [stage]
    while (parent := PARENT[seen[-1]]) is not None:
        assert parent not in seen, "no stage holds itself"
        seen.append(parent)
    assert seen[-1] is Stage.PROFILE


@pytest.mark.parametrize("stage", Stage)
def test_a_stage_reads_as_its_name(stage: Stage) -> None:
    assert f"{stage}" == str(stage) == stage.value
    assert re.fullmatch("[a-z_]+", stage.value), "no character that any tool's filter takes for syntax"


@pytest.mark.parametrize(
    ("stage", "spelling"),
    [
        (Stage.PROFILE, "profile@LLM"),
        (Stage.PREFILL, "prefill@LLM"),
        (Stage.DECODE, "decode@LLM"),
        (Stage.DECODE_STEP, "decode_step@LLM"),
    ],
)
def test_nsys_takes_a_literal_name_then_the_domain(stage: Stage, spelling: str) -> None:
    assert nsys_range(stage) == spelling
    assert nsys_range(stage).split("@") == [stage.value, DOMAIN]


@pytest.mark.parametrize(
    ("stage", "spelling"),
    [
        (Stage.PROFILE, "LLM@profile/"),
        (Stage.PREFILL, "LLM@prefill/"),
        (Stage.DECODE, "LLM@decode/"),
        (Stage.DECODE_STEP, "LLM@decode/decode_step/"),
    ],
)
def test_ncu_takes_the_domain_then_the_path_and_a_slash(stage: Stage, spelling: str) -> None:
    assert ncu_range(stage) == spelling
    assert "*" not in ncu_range(stage), "a wildcard matches nothing and still exits with 0"


def test_a_sub_stage_is_gated_wherever_it_lies_in_prefill_and_inside_a_decode_step() -> None:
    assert ncu_range(Stage.PREFILL, "sam") == "LLM@sam/"
    assert ncu_range(Stage.DECODE_STEP, "first") == "LLM@decode_step/first/"

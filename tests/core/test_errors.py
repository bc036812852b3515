"""Errors: fact, remedy, exit code, and the suggested name."""

import pickle
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_perf_opt.core import errors
from llm_perf_opt.core.errors import (
    CaptureError,
    ConfigError,
    HungUp,
    Interrupted,
    LlmPerfError,
    ParseError,
    ResourceError,
    Terminated,
    close_names,
    did_you_mean,
    error_from,
    nearest,
)

FAMILY = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LlmPerfError)]


def test_the_family_is_found() -> None:
    assert {LlmPerfError, ConfigError, ResourceError, CaptureError, ParseError, Interrupted} <= set(FAMILY)


def test_every_exit_code_is_its_own_and_is_documented() -> None:
    codes = [kind.exit_code for kind in FAMILY]
    assert len(set(codes)) == len(codes)
    assert 0 not in codes, "an error is never success"
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", errors.__doc__ or "", re.MULTILINE)}
    assert documented == {0, *codes}


def test_the_codes_scripts_rely_on() -> None:
    assert (ConfigError.exit_code, ResourceError.exit_code, CaptureError.exit_code, ParseError.exit_code) == (2, 3, 4, 5)
    assert Interrupted.exit_code == 128 + 2, "as a shell counts SIGINT"
    assert Terminated.exit_code == 128 + 15, "as a shell counts SIGTERM"
    assert HungUp.exit_code == 128 + 1, "as a shell counts SIGHUP"
    assert issubclass(Terminated, Interrupted)
    assert issubclass(HungUp, Interrupted)


@pytest.mark.parametrize("kind", FAMILY)
def test_an_error_states_fact_and_remedy(kind: type[LlmPerfError]) -> None:
    error = kind("The disk is full.", "Free some space.")
    assert (error.fact, error.remedy) == ("The disk is full.", "Free some space.")
    assert str(error) == "The disk is full.\nFree some space."
    assert str(kind("The disk is full.")) == "The disk is full."
    assert isinstance(error, LlmPerfError)


@pytest.mark.parametrize("kind", FAMILY)
def test_an_error_crosses_a_process_by_pickle_and_by_name(kind: type[LlmPerfError]) -> None:
    for copy in (pickle.loads(pickle.dumps(kind("fact", "remedy"))), error_from(kind.__name__, "fact", "remedy")):
        assert type(copy) is kind
        assert (copy.fact, copy.remedy) == ("fact", "remedy")


@pytest.mark.parametrize("kind", ["", "ValueError", "SystemExit", "None"])
def test_a_childs_unknown_error_is_a_failed_pass(kind: str) -> None:
    assert type(error_from(kind, "fact", "")) is CaptureError


CHOICES = ("batch_size", "prompt_tokens", "compile", "cache")


@pytest.mark.parametrize(
    ("word", "meant"), [("batchsize", "batch_size"), ("batch-size", "batch_size"), ("compil", "compile"), ("cashe", "cache")]
)
def test_a_slip_of_the_pen_finds_the_name_meant(word: str, meant: str) -> None:
    assert nearest(word, CHOICES) == f" Did you mean '{meant}'?"


@pytest.mark.parametrize(("word", "meant"), [("cuda", []), ("nsy", ["nsys"]), ("ncuu", ["ncu"]), ("gtp2", ["gpt2"])])
def test_a_short_word_must_be_much_alike(word: str, meant: list[str]) -> None:
    assert close_names(word, ("ncu", "nsys", "gpt2")) == meant


@pytest.mark.parametrize("word", ["", "zzzz", "42"])
def test_nothing_near_is_not_guessed_at(word: str) -> None:
    assert nearest(word, CHOICES) == ""
    assert nearest(word, ()) == ""


@settings(deadline=None)
@given(st.text(max_size=50), st.lists(st.text(max_size=50)))
def test_only_a_real_choice_is_ever_offered(word: str, choices: list[str]) -> None:
    answer = nearest(word, choices)
    offered = close_names(word, choices)
    assert set(offered) <= set(choices)
    assert answer == did_you_mean(offered)
    assert bool(answer) == bool(offered)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("h100", ["h100_sxm", "h100_pcie"]),
        ("H100", ["h100_sxm", "h100_pcie"]),
        ("gpu", ["single_gpu"]),
        ("qwen2.5-1.5b", ["qwen2_5_1_5b"]),
        ("Qwen2.5-1.5B", ["qwen2_5_1_5b"]),
        ("h200", ["h200"]),
        ("h10", ["h100_sxm"]),
    ],
)
def test_a_part_of_a_name_and_another_spelling_find_it(word: str, meant: list[str]) -> None:
    names = ("h200", "h100_sxm", "h100_pcie", "cpu", "single_gpu", "qwen2_5_1_5b", "qwen2_5_7b")
    assert close_names(word, names) == meant


def test_several_names_are_offered_in_a_sentence() -> None:
    assert nearest("h100", ["h100_sxm", "h100_nvl", "h100_pcie"]) == " Did you mean 'h100_sxm', 'h100_nvl' or 'h100_pcie'?"


@settings(deadline=None)
@given(st.lists(st.text(min_size=1, max_size=50), min_size=1, unique=True), st.data())
def test_an_exact_name_is_its_own_nearest(choices: list[str], data: st.DataObject) -> None:
    word = data.draw(st.sampled_from(choices))
    assert nearest(word, choices) == f" Did you mean '{word}'?"

"""Another token passes only as a tie within the rounding of the base, and only if the error against fp32 has not grown."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from builders import clean_timings, run_analysis
from llm_perf_opt.analysis.tuning.logits import LogitCheck, beyond, check_logits, check_words, difference_words, unlike_measured
from llm_perf_opt.analysis.tuning.tokens import Tried, check_tokens
from llm_perf_opt.core.logit_records import Logits
from llm_perf_opt.core.records import Missing
from tuning_builders import recorded_logits

TOKENS = [[3, 3, 3, 3]]
ERROR = 0.05
SIGNS = np.where(np.arange(8) % 2, 1.0, -1.0)


def exact(margin: float = 0.04) -> Any:
    """Logits in fp32: token 3 is ahead of token 5 by 2, but at position 2 by `margin`, of the others by 4."""
    values = np.zeros((1, 4, 8))
    values[:, :, 3], values[:, :, 5] = 4.0, 2.0
    values[0, 2, 5] = 4.0 - margin
    return values


def base(margin: float = 0.04) -> Logits:
    return recorded_logits(TOKENS, exact(margin) + ERROR * SIGNS, fp32=exact(margin))


def tried(margin: float = 0.04, error: float = ERROR, chosen: int = 5) -> Logits:
    return recorded_logits([[3, 3, chosen, 3]], exact(margin) - error * SIGNS, fed=TOKENS)


def checked(reference: Logits, other: Logits, before: Logits | None = None) -> LogitCheck:
    found = check_logits(reference, before or reference, other)
    assert isinstance(found, LogitCheck)
    return found


def test_a_tie_within_the_error_of_the_base_is_rounding() -> None:
    found = checked(base(), tried())
    assert (found.compared, found.equal, found.ties, found.values) == (4, 3, 1, 32)
    assert [found.largest_margin, found.rounding, found.max_difference, found.rms_difference] == pytest.approx(
        [0.04, 0.05, 0.1, 0.1], rel=1e-4
    )
    assert found.error is not None
    assert found.error_before is not None
    assert [found.error.rms, found.error.max, found.error_before.rms] == pytest.approx([0.05] * 3, rel=1e-4)
    assert found.within_rounding
    assert check_words(found) == (
        "3 of 4 tokens are equal, 1 is a tie within the rounding of bf16 (error against fp32 0.0500, before 0.0500)"
    )


@pytest.mark.parametrize(
    ("reference", "other", "flaw"),
    [
        (base(0.06), tried(0.06), "margin is 0.0600, more than the rounding error of the base there, 0.0500"),
        (base(-3.0), tried(-3.0), ""),  # in fp32 the other token is the likelier one
        (base(), tried(error=0.062), ""),
        (base(), tried(error=0.063), "root mean square error against fp32 is 0.0630, more than 1.25"),
        (base(), tried(error=0.063, chosen=3), "root mean square error"),
        (base(), tried(error=float("nan")), "root mean square error against fp32 is nan"),
        (recorded_logits(TOKENS, exact()), tried(), "no logits in fp32 to compare with: only a reference"),
    ],
)
def test_what_is_more_than_rounding(reference: Logits, other: Logits, flaw: str) -> None:
    found = checked(reference, other)
    assert flaw in found.flaw
    assert found.within_rounding is (not flaw)


def test_a_single_large_error_is_more_than_rounding() -> None:
    values = tried().values.copy()
    values[0, 0, 0] = 0.101
    assert (
        "at token 0 of sequence 0, the largest error against fp32 is 0.101, more than 2.00 × the 0.0500 before"
        in checked(base(), replace(tried(), values=values)).flaw
    )


def test_an_excluded_id_has_no_error() -> None:
    """Some models set logits to minus infinity."""
    one, other = base(), tried()
    for logits in (one.values, one.fp32, other.values):
        assert not isinstance(logits, Missing)
        logits[:, :, 0] = -np.inf
    assert checked(one, other).within_rounding


def test_a_token_that_was_not_recorded_is_no_tie() -> None:
    """Only ids 3 and 1 are recorded, as those with the largest logits of a large vocabulary."""

    def only(logits: Logits) -> Logits:
        kept = logits.fp32 if isinstance(logits.fp32, Missing) else logits.fp32[:, :, [3, 1]]
        top = np.tile(np.array([3], np.int32), (1, 4, 1))
        return replace(logits, top=top, common=np.array([1], np.int32), values=logits.values[:, :, [3, 1]], fp32=kept)

    assert "not among the most likely ones of the base (1)" in checked(only(base()), only(tried())).flaw


def test_after_a_change_of_precision_a_tie_is_one_of_that_configuration() -> None:
    """Quantized, tokens 3 and 6 are 0.03 apart at position 1; in fp32 they are 4 apart. Errors may not grow beyond its own."""
    quantized = exact()
    quantized[0, 1, 6] = 4.0 - 0.03
    before = recorded_logits(TOKENS, quantized, fed=TOKENS)
    after = recorded_logits([[3, 6, 3, 3]], quantized + 0.02 * SIGNS, fed=TOKENS)
    found = checked(base(), after, before)
    assert found.within_rounding
    assert found.largest_margin == pytest.approx(0.03, rel=1e-4)
    assert found.error_before is not None
    assert found.error_before.max == pytest.approx(3.97, rel=1e-4)
    assert "margin is 4.00" in checked(base(), after).flaw
    assert found.equal_to_base == 3
    quantized[0, 1, 6] = 4.0 - 0.06
    wider = recorded_logits(TOKENS, quantized, fed=TOKENS)
    assert "margin is 0.0600" in checked(base(), after, wider).flaw


@pytest.mark.parametrize(
    ("reference", "before", "other", "why"),
    [
        (Missing("too large"), base(), tried(), "the base has no logits: too large"),
        (base(), base(), Missing("an engine"), "the trial has no logits: an engine"),
        (base(), Missing("old"), tried(), "the configuration before has no logits: old"),
        (base(), base(), recorded_logits([[3, 3, 5, 3]], exact()), "recorded with other tokens"),
        (recorded_logits([[3, 3, 5, 3]], exact(), fed=TOKENS), base(), tried(), "the base chose other tokens"),
    ],
)
def test_what_cannot_be_compared(reference: Any, before: Any, other: Any, why: str) -> None:
    found = check_logits(reference, before, other)
    assert isinstance(found, Missing)
    assert why in found.why


def test_the_recording_must_stand_for_what_was_measured() -> None:
    """Up to the first difference from the base both have seen the same tokens; after it they have not."""
    one, other = base(), tried()
    assert unlike_measured(one, other, [[3, 3, 5, 1]], TOKENS) == ""
    assert "sequence 0 chose other tokens" in unlike_measured(one, other, [[3, 3, 6, 1]], TOKENS)
    assert "sequence 0 chose other tokens" in unlike_measured(one, other, [[3, 5, 5, 1]], TOKENS)
    assert "sequence 0 chose other tokens" in unlike_measured(one, other, TOKENS, TOKENS)
    more = [*TOKENS, [1, 1, 1, 1]]
    assert unlike_measured(one, other, [[3, 3, 5, 1], [1, 1, 1, 1]], more) == ""
    assert "sequence 1 differ, and its logits were not recorded" in unlike_measured(
        one, other, [[3, 3, 5, 1], [1, 1, 1, 2]], more
    )


@pytest.mark.parametrize(
    ("found", "most", "said"),
    [
        (checked(base(), tried()), None, ""),
        (checked(base(), tried()), 0.11, ""),
        (checked(base(), tried()), 0.09, "logits differ by up to 0.100, more than --max-logit-diff 0.0900"),
        (checked(base(), tried(error=float("nan"))), 9.0, "logits differ by up to nan"),
        (Missing("an engine"), 9.0, "--max-logit-diff cannot be checked: an engine"),
        (Missing("an engine"), None, ""),
    ],
)
def test_the_limit_of_a_lossy_change(found: Any, most: float | None, said: str) -> None:
    assert beyond(found, most).startswith(said)
    assert bool(beyond(found, most)) is bool(said)


def test_the_difference_from_the_base_in_words() -> None:
    words = "logits differ by up to 0.100 (rms 0.100); with the same tokens fed, 3 of 4 tokens are equal"
    assert difference_words(checked(base(), tried())) == words


def run(logits: Any, tokens: Any, sha: str = "1") -> Tried:
    timings = clean_timings(tokens_sha256=sha * 64)
    return Tried(
        "run", replace(run_analysis(), timings=replace(timings, model=replace(timings.model, dtype="bf16"))), tokens, logits
    )


@pytest.mark.parametrize(
    ("logits", "tokens", "ties", "said"),
    [
        (tried(), [[3, 3, 5, 1]], True, "within rounding (--tokens same)"),
        (tried(), [[3, 6, 5, 1]], False, "chose other tokens when its logits were recorded"),
        (tried(error=0.1), [[3, 3, 5, 1]], False, "root mean square"),
        (Missing("an engine"), [[3, 3, 5, 1]], False, "(--tokens any accepts this); the trial has no logits: an engine"),
    ],
)
def test_different_tokens_pass_only_as_ties(logits: Any, tokens: Any, ties: bool, said: str) -> None:
    found = check_tokens(run(base(), TOKENS, "0"), run(logits, tokens))
    assert (found.same, found.ties) == (False, ties)
    assert said in found.why
    assert (found.refused("same") == "") is ties
    assert said in found.refused("exact")
    assert found.refused("any") == ""


def test_equal_tokens_pass_without_logits() -> None:
    found = check_tokens(run(Missing("none"), TOKENS), run(Missing("none"), TOKENS))
    assert (found.same, found.refused("exact"), found.refused("same")) == (True, "", "")


def varying(found: Tried) -> Tried:
    """The same run with repeats that produced different tokens."""
    timings = found.timings
    assert not isinstance(timings, Missing)
    return replace(found, analysis=replace(found.analysis, timings=replace(timings, tokens_repeat=False)))


@pytest.mark.parametrize(
    ("logits", "ties", "said"),
    [
        (tried(), True, "within rounding (--tokens same)"),
        (tried(chosen=3), True, "within rounding (--tokens same)"),
        (tried(error=0.1), False, "root mean square"),
        (Missing("an engine"), False, "the trial has no logits: an engine"),
    ],
)
@pytest.mark.parametrize("tokens", [[[3, 3, 5, 1]], [[3, 6, 5, 1]]])
def test_runs_whose_repeats_differ_are_judged_by_their_logits(logits: Any, tokens: Any, ties: bool, said: str) -> None:
    """Their kernels do not add in the same order every time: measured tokens are those of one repeat."""
    for one, other in (
        (varying(run(base(), TOKENS, "0")), run(logits, tokens)),
        (run(base(), TOKENS, "0"), varying(run(logits, tokens))),
        (varying(run(base(), TOKENS)), run(logits, TOKENS)),  # the first repeat happened to have the same tokens
    ):
        found = check_tokens(one, other)
        assert (found.same, found.ties) == (False if ties else None, ties)
        assert said in found.why
        assert (found.refused("same") == "") is ties
        assert "produced different tokens" in found.refused("exact")
        assert found.refused("any") == ""


@pytest.mark.parametrize(("margin", "rounding"), [(0.04, True), (0.06, False)])
def test_a_base_that_varies_while_it_is_recorded_may_do_so_at_ties_only(margin: float, rounding: bool) -> None:
    varied = recorded_logits([[3, 3, 5, 3]], exact(margin) + ERROR * SIGNS, fed=TOKENS, fp32=exact(margin))
    found = check_logits(varied, varied, tried(margin))
    assert isinstance(found, LogitCheck) is rounding
    if isinstance(found, Missing):
        assert "the base chose other tokens" in found.why
    else:
        assert (found.equal, found.within_rounding) == (4, True)


def test_one_large_error_of_the_base_makes_no_ties_elsewhere() -> None:
    """At position 0 an expert was chosen differently, say; at position 2 the base rounds as usual."""

    def spoiled(margin: float) -> Logits:
        values = exact(margin) + ERROR * SIGNS
        values[0, 0, 0] += 2.5
        return recorded_logits(TOKENS, values, fp32=exact(margin))

    assert "margin is 0.500, more than the rounding error of the base there, 0.0500" in checked(spoiled(0.5), tried(0.5)).flaw
    values = tried().values.copy()
    values[0, 1, 6] = -0.12  # far below the error of the base at position 0
    assert "at token 1 of sequence 0" in checked(spoiled(0.04), replace(tried(), values=values)).flaw


def test_after_a_change_of_precision_the_logits_may_not_move_far() -> None:
    generator = np.random.default_rng(0)
    quantized = exact() + 0.5 * generator.normal(size=(1, 4, 8))
    quantized[:, :, 3] = 6.0
    before = recorded_logits(TOKENS, quantized, fed=TOKENS)
    near = recorded_logits(TOKENS, quantized + 0.09 * SIGNS, fed=TOKENS)
    far = recorded_logits(TOKENS, quantized + 0.11 * SIGNS, fed=TOKENS)
    assert checked(base(), near, before).within_rounding
    assert "the logits moved by 0.110 (root mean square), more than 2.00 × the rounding" in checked(base(), far, before).flaw

"""Functions of the tokens that fit counted figures exactly, or not at all."""

from collections.abc import Callable

import pytest

from llm_perf_opt.cost.forms import NOTHING, Form, NoFormError, Sequences, fitted

SESSIONS = ((1, 24, 3), (2, 40, 75), (3, 17, 2), (1, 150, 270), (2, 330, 4), (5, 33, 6))
STEPS: list[Sequences] = [
    ((new, cached),) * number
    for number, prompt, chunk in SESSIONS
    for new, cached in ((prompt, 0), (1, prompt), (chunk, prompt + 1))
]
MIXED: Sequences = ((700, 0), (1, 900), (1, 17), (500, 1000))


def _figure(one: Callable[[int, int], int]) -> Callable[[Sequences], int]:
    return lambda sequences: sum(one(new, cached) for new, cached in sequences)


def _in_blocks(block: int) -> Callable[[Sequences], int]:
    return _figure(lambda new, cached: -(-new // block) * block * 13)


@pytest.mark.parametrize(
    "figure",
    [
        pytest.param(_figure(lambda q, p: 7 * q), id="projection"),
        pytest.param(_figure(lambda q, p: 3 * q * (p + q)), id="attention"),
        pytest.param(_figure(lambda q, p: p + q), id="of the context"),
        pytest.param(lambda sequences: 11, id="of the step"),
        pytest.param(_figure(lambda q, p: 5), id="of a sequence"),
        pytest.param(_figure(lambda q, p: 5 * q + 2 * q * q + 9), id="polynomial"),
        *(pytest.param(_in_blocks(block), id=f"blocks of {block}") for block in (16, 32, 64, 128, 256)),
        pytest.param(_figure(lambda q, p: 5 * (q // 64 * 64) + 3 * (q % 64)), id="whole blocks and the rest"),
        pytest.param(_figure(lambda q, p: 9 * (q // 256 * 256) + 3 * (q % 256) ** 2), id="whole blocks and a shorter one"),
        pytest.param(_figure(lambda q, p: 4 * q + 3 if not p else 6 * q if q > 1 else 8), id="other code for chunks and decode"),
    ],
)  # fmt: skip
def test_figures_of_a_known_kind_are_found_and_hold_for_other_steps(figure: Callable[[Sequences], int]) -> None:
    form = fitted([(step, figure(step)) for step in STEPS])

    assert form(MIXED) == figure(MIXED)
    assert Form.from_json(form.to_json()) == form


def test_tokens_of_the_longest_sequence_are_told_from_those_of_all() -> None:
    assert fitted([(step, 2 * max(new for new, _ in step)) for step in STEPS])(MIXED) == 1400
    assert fitted([(step, 3 * max(new + cached for new, cached in step)) for step in STEPS])(MIXED) == 4500


@pytest.mark.parametrize("exponent", [3, 4])
def test_figures_of_an_unknown_kind_are_refused_with_their_numbers(exponent: int) -> None:
    with pytest.raises(NoFormError, match="13,824 at 1 × 24" if exponent == 3 else "331,776 at 1 × 24"):
        fitted([(step, sum(new**exponent for new, _ in step)) for step in STEPS])


def test_one_figure_that_does_not_follow_is_not_smoothed_away() -> None:
    points = [(step, sum(new for new, _ in step)) for step in STEPS]
    points[7] = points[7][0], points[7][1] + 1

    with pytest.raises(NoFormError):
        fitted(points)


def test_zeros_are_nothing() -> None:
    assert fitted([(step, 0) for step in STEPS]) == NOTHING


def test_a_form_is_multiplied_in_all_its_pieces() -> None:
    points = [(step, sum(4 * q if not p else 6 * q if q > 1 else 8 for q, p in step)) for step in STEPS]

    assert fitted(points).times(3)(MIXED) == 3 * fitted(points)(MIXED)

"""Prompts that contain an image."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.records import TextUse
from llm_perf_opt.workspace.data.prompts import PromptImage, Prompts, synthetic_prompts, with_images

PICTURE = PromptImage(tokens=4, token_id=9, channels=3, height=8, width=8)


def test_the_picture_stands_after_the_first_token_and_the_text_gives_way() -> None:
    found = with_images(Prompts(((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 5, 6, 7, 8)), "ids"), PICTURE, 8, seed=5)
    assert found.ids == ((1, 9, 9, 9, 9, 2, 3, 4),) * 2
    assert (found.pixels, found.pixel_seed) == ((2, 3, 8, 8), 5)
    assert found.source == "ids; one image of random pixels each, seed 5 (4 of the prompt's tokens)"


def test_a_token_that_would_be_taken_for_a_picture_is_replaced() -> None:
    assert with_images(Prompts(((9, 9, 1),), "ids"), PICTURE, 8, seed=0).ids == ((0, 9, 9, 9, 9, 0, 1),)


def test_a_prompt_too_short_for_a_picture_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes 4 tokens") as caught:
        with_images(Prompts(((1, 2),), "ids"), PICTURE, 5, seed=0)
    assert "runtime.prompt_tokens=6 or more" in caught.value.remedy


@given(st.integers(6, 40), st.integers(1, 50), st.integers(10, 20))
def test_every_prompt_holds_exactly_its_pictures_tokens(longest: int, length: int, vocabulary: int) -> None:
    found = with_images(synthetic_prompts(2, length, vocabulary, 0), PICTURE, longest, seed=0)
    for ids in found.ids:
        assert ids.count(PICTURE.token_id) == PICTURE.tokens
        assert PICTURE.tokens + 2 <= len(ids) <= longest


def test_the_same_ids_with_another_picture_are_another_input() -> None:
    plain = Prompts(((1, 2, 3, 4),), "ids")
    hashes = {with_images(plain, PICTURE, 8, seed=seed).sha256() for seed in (0, 1)}
    assert len(hashes | {plain.sha256()}) == 3


def test_a_text_that_gives_way_to_its_picture_is_cut() -> None:
    prompts = Prompts(((1,) * 8, (1,) * 4), "ids", texts=TextUse(used=2, cut=0, longest=8, limit=8, unused=0))
    found = with_images(prompts, PICTURE, 8, seed=0).texts
    assert found == TextUse(used=2, cut=1, longest=8, limit=8 - PICTURE.tokens, unused=0)

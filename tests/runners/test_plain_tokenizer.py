"""The tokenizer of a model without one: as many tokens as characters, and a text for every id."""

from pathlib import Path

import pytest

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.runners.plain_tokenizer import vocabulary, write_tokenizer

TEXT = "Now is the winter\nof our <discontent> ~ 1593!"


def test_a_character_is_a_token(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(write_tokenizer(tmp_path, 8192) / "tokenizer.json"))
    ids = tokenizer.encode(TEXT).ids
    assert len(ids) == len(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.get_vocab_size() == 8192
    texts = [tokenizer.decode([number]) for number in range(8192)]
    assert all(text and "\ufffd" not in text for text in texts)  # a server streams a token whose text is complete at once
    ids = [8191, 5, 8191, *range(0, 8192, 7)]
    assert tokenizer.encode(tokenizer.decode(ids)).ids == ids
    assert len(tokenizer.encode("é<99999>").ids) == 2  # unknown, but each a token


def test_transformers_reads_it(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path, 300))
    assert len(tokenizer) == 300
    assert len(tokenizer(TEXT)["input_ids"]) == len(TEXT)
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT


def test_a_vocabulary_must_hold_the_characters() -> None:
    assert sorted(vocabulary(100).values()) == list(range(100))
    with pytest.raises(ConfigError, match="too small"):
        vocabulary(50)

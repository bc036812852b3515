"""A tokenizer for models without one: a printable ASCII character is a token, and so is `<N>` for every other id N.

A server needs one to read prompts and to stream text. With this one, any ids become a text that is read back as the same ids,
and every token that the model produces is complete text, so that each is sent when it is ready.
"""

import json
from pathlib import Path
from typing import Any

from llm_perf_opt.core.errors import ConfigError
from llm_perf_opt.core.run_folder import write_whole

_CHARACTERS = (" ", "\n", *map(chr, range(ord("!"), ord("~") + 1)))
_UNKNOWN = "?"


def vocabulary(size: int) -> dict[str, int]:
    """Return token → id for all ids below `size`."""
    if size < len(_CHARACTERS):
        raise ConfigError(
            f"A vocabulary of {size} ids is too small for a tokenizer: printable text has {len(_CHARACTERS)} characters.",
            "Choose a model with a larger vocab_size, or one with its own tokenizer.",
        )
    characters = {token: number for number, token in enumerate(_CHARACTERS)}
    return characters | {f"<{number}>": number for number in range(len(characters), size)}


def write_tokenizer(folder: Path, size: int) -> Path:
    """Write the files of the tokenizer and return the folder."""
    pieces = {"Regex": r"<[0-9]+>|[\s\S]"}
    fast: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": pieces, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary(size), "unk_token": _UNKNOWN},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "model_max_length": 10**9}
    for name, content in (("tokenizer.json", fast), ("tokenizer_config.json", settings)):
        write_whole(folder, folder / name, json.dumps(content).encode())
    return folder

"""YAML whose size says little about what reading it takes: refused before anything is built."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from llm_perf_opt.core.errors import ConfigError, LlmPerfError, ParseError
from llm_perf_opt.core.recorded_inputs import read_inputs
from llm_perf_opt.core.run_folder import read_values
from llm_perf_opt.core.yaml_text import MOST_VALUES, load_yaml
from llm_perf_opt.workspace.data.inventory import read_yaml
from llm_perf_opt.workspace.externals.listing import read_listing


def copied(levels: int) -> str:
    """Return mappings of which each copies the one before twice, with `<<`."""
    return "a0: &a0 {k: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, levels))


HOSTILE = {
    "copied": copied(40),
    "deep": "a: " + "[" * 100_000,
    "deep blocks": "- " * 100_000,
    "sixties": "a: " + ":".join(["1"] * 100_000),
    "stated sixties": f"a: !!int '{':'.join(['1'] * 100_000)}'",
}
"""Took minutes, or ended the process: the parser in C has no limit of its own."""


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_short_text_cannot_take_long(text: str) -> None:
    with pytest.raises(ValueError, match=r"nested more than 64|more than 100,000 values|beyond 64 bits"):
        load_yaml(text)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize(
    ("read", "error"),
    [
        (read_values, ParseError),
        (read_yaml, ParseError),
        (read_inputs, ConfigError),
        (lambda path: read_listing(path.read_text(), str(path)), ConfigError),
    ],
    ids=["settings", "metadata", "inputs", "externals"],
)
def test_every_reader_refuses_it(read: Any, error: type[LlmPerfError], text: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(error, match=r"x\.yaml"):
        read(tmp_path / "x.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "a: &a {k: 1, l: [1, 2]}\nb: {<<: *a, m: 1:30:00}\nc: [*a, *a]\n",
        "&x a: *x\n",
        "a: &x 1\nb: &x [2, *x]\n",
        "a: '1:1'\nb: 2026-01-01\nc: 0x1F\n",
        "",
        "# nothing\n",
    ],
)
def test_usual_texts_are_read_as_yaml_reads_them(text: str) -> None:
    if "&x [2, *x]" in text:  # inside, the name is already that of the list
        with pytest.raises(ValueError, match="line 2: a value contains itself"):
            load_yaml(text)
    else:
        assert load_yaml(text) == yaml.safe_load(text)


def test_values_up_to_the_limit_are_read() -> None:
    assert len(load_yaml("- 1\n" * (MOST_VALUES - 1))) == MOST_VALUES - 1
    with pytest.raises(ValueError, match="more than 100,000 values"):
        load_yaml("- 1\n" * MOST_VALUES)
    assert load_yaml("a: &a [1, 2, 3]\nb: *a\n", 12) == {"a": [1, 2, 3], "b": [1, 2, 3]}
    with pytest.raises(ValueError, match="more than 9 values"):
        load_yaml("a: &a [1, 2, 3]\nb: *a\n", 9)

"""The commands a page of the documentation shows, so that tests can run them."""

import shlex
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def commands(page: str) -> list[list[str]]:
    """The words after `llm-perf` of every such line inside a fence."""
    fences = (DOCS / page).read_text(encoding="utf-8").split("```")[1::2]
    lines = [line for fence in fences for line in fence.splitlines() if line.startswith("llm-perf ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]

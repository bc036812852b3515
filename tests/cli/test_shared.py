"""What every verb shares: help that is whole."""

from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from command import llm_perf
from llm_perf_opt.cli.app import app


def verbs(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every verb and sub-verb with its command."""
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from verbs(below, (*words, name))


ALL = dict(verbs(get_command(app)))


def help_of(words: tuple[str, ...]) -> str:
    done = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert done.exit_code == 0, done.output
    return done.output


def first_sentence(text: str) -> str:
    """Of a docstring: up to the end of a sentence, or of the paragraph."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".")


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_help_is_whole_at_80_columns(words: tuple[str, ...]) -> None:
    shown = help_of(words)
    assert max(map(len, shown.splitlines())) <= 80
    body = " ".join(line.strip() for line in shown.splitlines()[1:])  # the first line is the usage, with its [ARGS]...
    assert "..." not in body.replace("]...", "").replace("RUN...", "")
    plain = " ".join(body.split())
    assert "─" not in shown, "one style of help for all"
    for name, below in getattr(ALL[words], "commands", {}).items():
        assert f" {name} {first_sentence(below.help)}" in f" {plain}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--hardware", "h100"], "llm-perf cost --hardware"),
        (["run", "--model=tiny"], "'model=OPTION'"),
        (["run", "--batch-size", "4"], "'runtime.batch_size=VALUE'"),
        (["cost", "--model", "tiny"], "'model=OPTION'"),
        (["cost", "--hardware", "gpu"], "Name a product: "),
        (["run", "--nonsense"], "No such option"),
    ],
)
def test_a_setting_given_as_an_option_is_answered_with_how_it_is_written(words: list[str], said: str) -> None:
    done = llm_perf(*words)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        (["run"], "run [OPTIONS] [KEY=VALUE]..."),
        (["cost"], "cost [OPTIONS] [KEY=VALUE]..."),
        (["baseline", "set"], "RUN}..."),
        (["externals", "update"], "[NAME]..."),
    ],
)
def test_a_usage_line_repeats_no_brackets(words: list[str], usage: str) -> None:
    first = llm_perf(*words, "-h").stdout.splitlines()[0]
    assert first.endswith(usage)
    assert first.count("...") == 1

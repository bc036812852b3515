"""What every verb shares: its common options, and how data is printed."""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from llm_perf_opt.errors import LlmPerfError
from llm_perf_opt.terminal import json_text

Json = Annotated[bool, typer.Option("--json", help="Data on standard output as JSON; everything else on standard error.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

_debug = False


class WholeHelp(TyperGroup):
    """A group of verbs whose help shows each verb's first sentence whole: wrapped, not cut off with three dots."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of verbs."""
        verbs = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, verb.get_short_help_str(limit=10_000)) for name, verb in verbs if verb is not None and not verb.hidden]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def note_debug(debug: bool) -> None:
    """Remember that tracebacks are wanted."""
    global _debug
    _debug = _debug or debug


def debugging() -> bool:
    """Whether tracebacks are wanted."""
    return _debug


def print_json(value: Any) -> None:
    """Data for another program."""
    sys.stdout.write(json_text(value, sys.stdout.encoding) + "\n")


def command_line() -> list[str]:
    """What the user typed."""
    return ["llm-perf", *sys.argv[1:]]


def raise_if(error: LlmPerfError | None) -> None:
    """End the verb with this error, if there is one."""
    if error is not None:
        raise error

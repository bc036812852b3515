"""Options and helpers that the verbs share."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from llm_perf_opt.core.errors import ConfigError, LlmPerfError, did_you_mean, interrupted, nearest
from llm_perf_opt.core.secrets import hidden_argv
from llm_perf_opt.core.terminal import json_text

if TYPE_CHECKING:
    from llm_perf_opt.report.document import Document

Json = Annotated[bool, typer.Option("--json", help="Print data as JSON on standard output, everything else on standard error.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Hide progress.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
SLO_HELP = "What a request must meet to count as good: ttft=200ms,tpot=20ms,e2e=2s."

_debug = False


class WholeHelp(TyperGroup):
    """A group of verbs whose help wraps each verb's first sentence instead of truncating it."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of verbs."""
        verbs = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, verb.get_short_help_str(limit=10_000)) for name, verb in verbs if verb is not None and not verb.hidden]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def verb_group(name: str, help_text: str) -> typer.Typer:
    """Return a group of verbs, such as `llm-perf dataset`."""
    return typer.Typer(name=name, cls=WholeHelp, help=help_text, no_args_is_help=True, rich_markup_mode=None)


class WithCompletion(WholeHelp):
    """The command itself: its completion options also accept a shell by name, as in `--show-completion zsh`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Handle the completion options, then parse the rest. Settings without a verb are those of `run`."""
        if args and not ctx.resilient_parsing and _is_setting(args[0]):
            args = ["run", *args]
        option, _, given = args[0].partition("=") if args else ("", "", "")
        if option in _COMPLETIONS and not ctx.resilient_parsing:
            if " " in (ctx.info_name or ""):
                raise ConfigError(
                    f"{option} works only for the command llm-perf: shells cannot complete '{ctx.info_name}'.",
                    f"Run llm-perf {option}.",
                )
            words = [given] if given else args[1:]
            if words and not words[0].startswith("-"):
                _answer_completion(ctx, option, words[0])
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb. Raise Interrupted on Ctrl-C, which typer would end without a message."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise interrupted(error, "") from error


def _is_setting(word: str) -> bool:
    """Return whether a command line starts with KEY=VALUE, or with -m before it, as the programs of the profiling guides take."""
    return word in ("-m", "--multirun") or ("=" in word and not word.startswith("-"))


_COMPLETIONS = ("--show-completion", "--install-completion")
SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")


def _answer_completion(ctx: Any, option: str, shell: str) -> None:
    """Print or install the completion script, and exit."""
    from typer.completion import install_callback, show_callback

    if shell not in SHELLS:
        raise ConfigError(f"{option} {shell}: unknown shell.{nearest(shell, SHELLS)}", f"Known: {', '.join(SHELLS)}.")
    (show_callback if option == _COMPLETIONS[0] else install_callback)(ctx, ctx.command.params[0], shell)


class WithOverrides(TyperCommand):
    """A verb that takes KEY=VALUE: a setting given as an option (`--model tiny`) is rejected with the correct form."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reject options that are settings, then parse the rest."""
        known = {name for parameter in self.params for name in parameter.opts}
        words = args[: args.index("--")] if "--" in args else args
        for word in () if ctx.resilient_parsing else words:
            option = word.partition("=")[0]
            if option.startswith("--") and option not in known:
                _refuse_setting(option, option[2:].replace("-", "_"))
        return super().parse_args(ctx, args)


def _refuse_setting(option: str, name: str) -> None:
    from llm_perf_opt.config.choices import GROUPS, HARDWARE_HINT, keys_like

    keys = [f"{name}=OPTION"] if name in GROUPS else [f"{key}=VALUE" for key in keys_like(name, exactly=True)]
    if keys:
        raise ConfigError(
            f"There is no option {option}: settings are written KEY=VALUE.{did_you_mean(keys)}",
            HARDWARE_HINT if name == "hardware" else "`llm-perf options` lists the groups and their options.",
        )


def note_debug(debug: bool) -> None:
    """Record whether to show tracebacks."""
    global _debug
    _debug = _debug or debug


def debugging() -> bool:
    """Return whether to show tracebacks."""
    return _debug


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    sys.stdout.write(json_text(value, sys.stdout.encoding) + "\n")


def page_kind(out: Path | None) -> str:
    """Return the format of a page by the extension of its file; empty without a file."""
    if out is None:
        return ""
    if out.suffix not in (".html", ".md", ".json"):
        raise ConfigError(f"--out {out}: the file extension must select a format.", "Use .html, .md or .json.")
    return out.suffix


def write_page(out: Path, kind: str, data: Any, page: Callable[[], "Document"]) -> None:
    """Write data as JSON, or its page as HTML or Markdown."""
    from llm_perf_opt.core.run_folder import encoded, write_whole
    from llm_perf_opt.report.html import render_html
    from llm_perf_opt.report.markdown import render_markdown

    content = encoded(data) if kind == ".json" else (render_html if kind == ".html" else render_markdown)(page()).encode()
    write_whole(out.parent, out, content)


def command_line() -> list[str]:
    """Return the command line as typed, for records: without credentials. Settings without a verb are those of `run`."""
    words = hidden_argv(sys.argv[1:])
    return ["llm-perf", *(["run"] if words and _is_setting(words[0]) else []), *words]


def raise_if(error: LlmPerfError | None) -> None:
    """Raise the error, if there is one."""
    if error is not None:
        raise error

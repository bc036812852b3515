"""The command `llm-perf`: its verbs, and the one place where errors are caught."""

import functools
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from llm_perf_opt import __version__
from llm_perf_opt.cli import (
    advise,
    analyze,
    baseline,
    ceilings,
    compare,
    cost,
    dataset,
    doctor,
    exec,
    export,
    externals,
    import_load,
    metrics,
    model,
    options,
    report,
    run,
    runs,
    serve,
    sql,
    tune,
)
from llm_perf_opt.cli.shared import WithCompletion, WithOverrides, debugging
from llm_perf_opt.cli.signals import forget_interrupt, graceful_exit
from llm_perf_opt.core.errors import LlmPerfError, file_error, interrupted
from llm_perf_opt.core.secrets import hidden
from llm_perf_opt.core.terminal import indented, safe_streams

BUG = "This is a bug in llm-perf"
"""The start of the remedy of an unexpected error."""

app = typer.Typer(
    name="llm-perf",
    cls=WithCompletion,
    help="Profile LLM inference: where every millisecond goes, how far it is from the roofline, and what to change first.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
        print(f"llm-perf {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Parse the options before the command."""


_VERBS = (
    run.run,
    report.report,
    analyze.analyze,
    serve.serve,
    advise.advise,
    tune.tune,
    compare.compare,
    runs.runs,
    sql.sql,
    cost.cost,
    ceilings.ceilings,
    doctor.doctor,
    options.options,
)
_OWN_PARSING = {
    **dict.fromkeys((run.run, cost.cost, serve.serve, tune.tune), WithOverrides),
    runs.runs: runs.WithPage,
}
for _verb in _VERBS:
    app.command(cls=_OWN_PARSING.get(_verb))(_verb)
app.command("exec")(exec.exec_program)
app.command("import")(import_load.import_load)
app.add_typer(baseline.app)
app.add_typer(export.app)
app.add_typer(metrics.app)
app.add_typer(externals.app)
app.add_typer(dataset.app)
app.add_typer(model.app)


def main() -> None:
    """Run a verb. Every error becomes one message and an exit code; all output is safe to show in a terminal."""
    try:
        with safe_streams():
            _main()
    finally:
        forget_interrupt()


@functools.cache
def _command() -> Callable[[], Any]:
    """Return the verbs as one command; `app()` would make it again at each call in a process."""
    return typer.main.get_command(app)


def _main() -> None:
    try:
        with graceful_exit():
            _command()()
    except LlmPerfError as error:
        _end(error, error.fact, error.remedy, error.exit_code)
    except KeyboardInterrupt as error:  # before or after the verb
        stopped = interrupted(error, "")
        _end(stopped, stopped.fact, stopped.remedy, stopped.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # the reader closed the pipe
        sys.exit(1)
    except OSError as error:
        found = file_error(error)
        _end(error, found.fact, found.remedy, found.exit_code)
    except Exception as defect:  # noqa: BLE001 - last resort; --debug shows the traceback
        fact = f"{type(defect).__name__}: {' '.join(str(defect).split())[:300]}"
        _end(defect, fact, f"{BUG}, or a file was edited by hand; --debug shows the traceback.", 1)


def _end(error: Exception, fact: str, remedy: str, exit_code: int) -> NoReturn:
    if debugging():
        print(hidden("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    print("error:", indented(hidden(fact)), file=sys.stderr)
    if remedy:
        print("  →", indented(hidden(remedy)), file=sys.stderr)
    sys.exit(exit_code)

"""The command `llm-perf`: its verbs, and the one place where errors are caught."""

import sys
from typing import Annotated

import typer

from llm_perf_opt import __version__
from llm_perf_opt.commands import (
    advise,
    analyze,
    baseline,
    ceilings,
    compare,
    cost,
    dataset,
    doctor,
    exec,
    externals,
    metrics,
    model,
    options,
    report,
    run,
    runs,
    sql,
)
from llm_perf_opt.commands.shared import WholeHelp, debugging
from llm_perf_opt.errors import LlmPerfError

app = typer.Typer(
    name="llm-perf",
    cls=WholeHelp,
    help="Profile an LLM's inference: where every millisecond goes, how far it is from the limit, what to change first.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"llm-perf {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of every verb."""


_VERBS = (
    run.run,
    report.report,
    analyze.analyze,
    advise.advise,
    compare.compare,
    runs.runs,
    sql.sql,
    cost.cost,
    ceilings.ceilings,
    doctor.doctor,
    options.options,
)
for _verb in _VERBS:
    app.command()(_verb)
app.command("exec")(exec.exec_program)
app.add_typer(baseline.app)
app.add_typer(metrics.app)
app.add_typer(externals.app)
app.add_typer(dataset.app)
app.add_typer(model.app)


def main() -> None:
    """Run a verb; every error of ours ends here, as one message and an exit code."""
    try:
        app(standalone_mode=True)
    except LlmPerfError as error:
        if debugging():
            raise
        print(f"error: {error.fact}", file=sys.stderr)
        if error.remedy:
            print(f"  → {error.remedy}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read us has gone: nothing to say, nobody to say it to
        sys.exit(1)
    except Exception as defect:
        if debugging():
            raise
        print(f"error: {type(defect).__name__}: {' '.join(str(defect).split())[:300]}", file=sys.stderr)
        print("  → This is a defect of llm-perf, or a file somebody edited; --debug shows the traceback.", file=sys.stderr)
        sys.exit(1)

"""Profile a model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llm_perf_opt.commands.outcome import outcome, print_outcome
from llm_perf_opt.commands.shared import Debug, Json, command_line, note_debug, print_json, raise_if
from llm_perf_opt.errors import LlmPerfError

if TYPE_CHECKING:
    from llm_perf_opt.analysis.run_analysis import RunAnalysis
    from llm_perf_opt.run_folder import RunFolder


def run(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="GROUP=OPTION or KEY=VALUE, as in model=qwen2_5_1_5b runtime.batch_size=4."),
    ] = None,
    config_dir: Annotated[
        Path | None, typer.Option(help="A folder with options of your own: model/mine.yaml, runtime/mine.yaml …")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the resolved configuration and the passes; run nothing.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Profile a model and write a run folder with its report.

    Groups: model, dataset, runtime, hardware, profiling. `llm-perf options` lists what each offers.
    """
    note_debug(debug)
    from llm_perf_opt.composition import compose

    composed = compose(overrides or [], config_dir)
    if dry_run:
        _print_plan(composed, as_json)
        return
    from llm_perf_opt.capture import capture
    from llm_perf_opt.progress import progress_for

    with progress_for(quiet) as progress:
        folder, error = capture(composed, command_line(), progress)
    analysis = _finish(folder, error)
    if as_json:
        print_json(outcome(folder, analysis))
    else:
        print_outcome(folder, analysis)
    raise_if(error or (analysis.impossible if analysis else None))


def _finish(folder: "RunFolder", error: LlmPerfError | None) -> "RunAnalysis | None":
    """The reports, also of a run that ended early; a report that fails must not hide why the run did."""
    from llm_perf_opt.analyse import analyse, write_reports

    try:
        analysis = analyse(folder)
        write_reports(folder, analysis)
    except LlmPerfError:
        if error is None:
            raise
        return None
    return analysis


def _print_plan(composed: Any, as_json: bool) -> None:
    from dataclasses import asdict

    from llm_perf_opt.capture import planned_passes
    from llm_perf_opt.composition import config_to_yaml

    passes = planned_passes(composed.config)
    if as_json:
        print_json({"run_dir": str(composed.run_dir), "passes": passes, "config": asdict(composed.config)})
        return
    print(config_to_yaml(composed.config))
    print(f"# passes: {', '.join(passes)}\n# run folder: {composed.run_dir}")

"""List what to change first in a run, and try it."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from llm_perf_opt.cli.completing import complete_run
from llm_perf_opt.cli.shared import Debug, Json, Quiet, command_line, note_debug, print_json, raise_if


def advise(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", autocompletion=complete_run)],
    code: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="With --verify: the settings of the run that can run code, such as model.trust_remote_code=true, to allow them.",
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Try the findings that are configuration changes, one at a time, on this machine.")
    ] = False,
    top: Annotated[int, typer.Option(min=1, help="With --verify: how many findings to try.")] = 3,
    remeasure: Annotated[
        bool, typer.Option("--remeasure", help="With --verify: measure the run's own configuration again first.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List what to change first, and what each change would save.

    With --verify, try the changes and print predicted and measured times.
    """
    note_debug(debug)
    from llm_perf_opt.cli.progress import progress_for
    from llm_perf_opt.core.errors import ConfigError
    from llm_perf_opt.report.findings import advice_text, source_of, trials_text, verification_json
    from llm_perf_opt.workflows.advise import findings_of, to_try
    from llm_perf_opt.workflows.advise import verify as try_findings

    if code and not verify:
        raise ConfigError(f"{code[0]} has no effect without --verify.", "Add --verify.")
    if remeasure and not verify:
        raise ConfigError("--remeasure has no effect without --verify.", "Add --verify.")
    run, analysis, findings = findings_of(run_folder)
    for warning in analysis.warnings:
        print(f"note: {warning.text}", file=sys.stderr)
    if not verify:
        tried = analysis.verified
        if as_json:
            verification = None if tried is None else verification_json(tried)
            print_json({"run": str(run.folder.path), "findings": findings, "verification": verification})
        else:
            sys.stdout.write(advice_text(findings, source_of(analysis)) + (trials_text(tried) if tried and tried.trials else ""))
        return
    chosen = to_try(findings, top)
    if not as_json:
        sys.stdout.write(advice_text(findings, source_of(analysis)))
    if not chosen:
        print("note: no finding is a configuration change with a predicted saving; nothing to try", file=sys.stderr)
        print_json({"run": str(run.folder.path), "findings": findings, "verification": None}) if as_json else None
        return
    with progress_for(quiet) as progress:
        found, interrupted = try_findings(run, analysis, chosen, command_line(), progress, remeasure=remeasure, code=code or ())
    if as_json:
        print_json({"run": str(run.folder.path), "findings": findings, "verification": verification_json(found)})
    else:
        sys.stdout.write(trials_text(found))
    raise_if(interrupted)

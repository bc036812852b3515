"""Make the reports of a run anew."""

from pathlib import Path
from typing import Annotated

import typer

from llm_perf_opt.commands.outcome import outcome, print_outcome, print_program
from llm_perf_opt.commands.shared import Debug, Json, note_debug, print_json, raise_if
from llm_perf_opt.errors import ConfigError


def report(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    peak_tflops: Annotated[
        float | None, typer.Option(help="Dense peak of the run's dtype, in place of the run's own.", min=1e-9)
    ] = None,
    bandwidth_gbs: Annotated[float | None, typer.Option(help="Memory bandwidth, likewise.", min=1e-9)] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Make the reports of a run anew, on any machine."""
    note_debug(debug)
    from llm_perf_opt.analyse import reanalyse
    from llm_perf_opt.exec_report import report_program
    from llm_perf_opt.run_folder import RunFolder

    if (peak_tflops is None) != (bandwidth_gbs is None):
        raise ConfigError("--peak-tflops and --bandwidth-gbs describe a device together.", "Give both.")
    limits = None
    if peak_tflops is not None and bandwidth_gbs is not None:
        limits = {"peak_tflops": peak_tflops, "bandwidth_gbs": bandwidth_gbs}
    opened = RunFolder.open(run_folder)
    if opened.manifest().kind == "exec":
        if limits:
            raise ConfigError(
                "The report of a user's own program knows no limits.", "Leave --peak-tflops and --bandwidth-gbs out."
            )
        print_program(opened, report_program(opened), as_json)
        return
    folder, analysis = reanalyse(run_folder, limits)
    if as_json:
        print_json(outcome(folder, analysis))
    else:
        print_outcome(folder, analysis)
    raise_if(analysis.impossible)

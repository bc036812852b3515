"""Regenerate the reports of a run or a sweep."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llm_perf_opt.cli.completing import complete_run
from llm_perf_opt.cli.outcome import outcome, print_outcome, print_program, print_serving
from llm_perf_opt.cli.shared import SLO_HELP, Debug, Json, note_debug, print_json, raise_if
from llm_perf_opt.core.errors import ConfigError

if TYPE_CHECKING:
    from llm_perf_opt.workflows.run_reader import RunReader


def report(
    run_folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run or a sweep.", autocompletion=complete_run)
    ],
    peak_tflops: Annotated[
        float | None,
        typer.Option(help="Dense peak of the run's dtype, instead of the recorded one; with --bandwidth-gbs.", min=1e-9),
    ] = None,
    bandwidth_gbs: Annotated[
        float | None, typer.Option(help="Memory bandwidth in GB/s, instead of the recorded one; with --peak-tflops.", min=1e-9)
    ] = None,
    slo: Annotated[str | None, typer.Option(help=SLO_HELP, metavar="LIMITS")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Regenerate the reports of a run, on any machine: report.html, report.md, stakeholder_summary.md.

    For a sweep: sweep.html and sweep.md, with every point in one table. For a run under load: the same pages, with the
    saturation curve.
    """
    note_debug(debug)
    from llm_perf_opt.workflows.analyze_program import report_program
    from llm_perf_opt.workflows.run_reader import RunReader
    from llm_perf_opt.workflows.sweep_folder import is_sweep

    if (peak_tflops is None) != (bandwidth_gbs is None):
        raise ConfigError("--peak-tflops and --bandwidth-gbs must be given together.", "Give both, or neither.")
    if is_sweep(run_folder):
        _sweep(run_folder, peak_tflops is not None, open_page, as_json)
        return
    from llm_perf_opt.workflows.analyze_run import report_run
    from llm_perf_opt.workflows.images import draw_images

    limits = None
    if peak_tflops is not None and bandwidth_gbs is not None:
        limits = {"peak_tflops": peak_tflops, "bandwidth_gbs": bandwidth_gbs}
    run = RunReader.open(run_folder)
    folder = run.folder
    if run.manifest.kind == "serving":
        _serving(run, slo, limits is not None, open_page, as_json)
        return
    if slo is not None:
        raise ConfigError("--slo applies to runs under load only.", "Omit it.")
    if run.manifest.kind == "exec":
        if limits:
            raise ConfigError("The report of `llm-perf exec` uses no peaks.", "Omit --peak-tflops and --bandwidth-gbs.")
        print_program(folder, report_program(run), as_json)
        if open_page:
            _show(folder.page_file)
        return
    analysis = report_run(run, limits)
    images = draw_images(folder)
    if as_json:
        print_json(outcome(folder, analysis))
    else:
        print_outcome(folder, analysis, images)
    if open_page:
        _show(folder.page_file)
    raise_if(analysis.fault)


def _serving(run: "RunReader", slo: str | None, with_limits: bool, open_page: bool, as_json: bool) -> None:
    from llm_perf_opt.workflows.serving import report_serving

    if with_limits:
        raise ConfigError("The report of a run under load uses no peaks.", "Omit --peak-tflops and --bandwidth-gbs.")
    print_serving(run.folder, report_serving(run, slo), as_json)
    if open_page:
        _show(run.folder.page_file)


def _sweep(path: Path, with_limits: bool, open_page: bool, as_json: bool) -> None:
    from llm_perf_opt.workflows.sweep import report_sweep, sweep_error

    if with_limits:
        raise ConfigError(
            "--peak-tflops and --bandwidth-gbs do not apply to a sweep.", "Use them with `llm-perf report` on each run."
        )
    folder, found = report_sweep(path)
    if as_json:
        print_json({"sweep": str(folder.path), "page": str(folder.page_file), "points": found.rows})
    else:
        print(f"{found.complete} of {len(found.rows)} points are complete")
        for row in found.rows:
            if row.status != "complete" or row.why:
                print(f"{row.label}: {row.status}: {row.why}")
        print(f"report: {folder.page_file}")
    if open_page:
        _show(folder.page_file)
    raise_if(sweep_error(found))


def _show(page: Path) -> None:
    import sys
    import webbrowser

    if not webbrowser.open(page.resolve().as_uri()):
        print(f"could not open a browser; the page is {page}", file=sys.stderr)

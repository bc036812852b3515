"""Look at any program as closely as at our own."""

from pathlib import Path
from typing import Annotated

import typer

from llm_perf_opt.commands.outcome import print_program
from llm_perf_opt.commands.shared import Debug, Json, command_line, note_debug, raise_if
from llm_perf_opt.commands.watching import ended_in_order


def exec_program(
    program: Annotated[list[str], typer.Argument(metavar="-- PROGRAM [ARGUMENTS]", help="The program, behind two dashes.")],
    metrics: Annotated[
        str, typer.Option(help="Sets of counters and traces, comma-separated: see `llm-perf metrics list`.")
    ] = "roofline",
    add: Annotated[list[str] | None, typer.Option(help="A further counter; may be repeated.")] = None,
    remove: Annotated[list[str] | None, typer.Option(help="A counter less; may be repeated.")] = None,
    section: Annotated[
        list[str] | None, typer.Option(help="A section of Nsight Compute beside those of the sets; may be repeated.")
    ] = None,
    range_: Annotated[
        str, typer.Option("--range", metavar="NAME@DOMAIN", help="Record only this NVTX range; otherwise the whole program.")
    ] = "",
    passes: Annotated[str, typer.Option(help="Which passes: program (alone, for its time), nsys, ncu.")] = "program,nsys,ncu",
    top: Annotated[int, typer.Option(min=1, help="At least so many kernels are counted …")] = 10,
    coverage: Annotated[float, typer.Option(min=0.01, max=1, help="… and enough for this share of the kernel time.")] = 0.8,
    budget_s: Annotated[float, typer.Option(min=0.1, help="The most seconds spent replaying kernels.")] = 180.0,
    timeout_s: Annotated[float, typer.Option(min=1, max=1_000_000, help="The most seconds a pass may take.")] = 3600.0,
    max_trace_gb: Annotated[float, typer.Option(min=0.01, help="The most disk space a tool may take.")] = 2.0,
    device_index: Annotated[int, typer.Option(min=0, help="Which GPU's counters.")] = 0,
    regions: Annotated[list[str] | None, typer.Option(help="NVTX regions to report: `step*` or `regex:…`; repeatable.")] = None,
    without_regions: Annotated[list[str] | None, typer.Option(help="Regions to leave out; leaving out wins.")] = None,
    kernels: Annotated[list[str] | None, typer.Option(help="Kernels counted into the regions' report; repeatable.")] = None,
    without_kernels: Annotated[list[str] | None, typer.Option(help="Kernels to leave out of it; leaving out wins.")] = None,
    aggregate: Annotated[bool, typer.Option("--aggregate", help="Regions of all processes and devices in one table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; by default runs/exec/PROGRAM/TIME.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run any program alone, below Nsight Systems, and its longest kernels below Nsight Compute: once per pass."""
    note_debug(debug)
    from datetime import datetime

    from llm_perf_opt.analyse_program import report_program
    from llm_perf_opt.capturing.program import Asked, capture_program, check_asked
    from llm_perf_opt.commands.progress import progress_for
    from llm_perf_opt.config import RegionsConfig
    from llm_perf_opt.run_folder import RunFolder

    asked = Asked(
        argv=tuple(program),
        passes=tuple(_words(passes)),
        range=range_,
        sets=tuple(_words(metrics)),
        add=tuple(add or ()),
        remove=tuple(remove or ()),
        sections=tuple(section or ()),
        regions=RegionsConfig(
            tuple(regions or ()), tuple(without_regions or ()), tuple(kernels or ()), tuple(without_kernels or ()), aggregate
        ),
        top=top,
        coverage=coverage,
        budget_s=budget_s,
        timeout_s=timeout_s,
        max_trace_gb=max_trace_gb,
        device_index=device_index,
    )
    check_asked(asked)
    name = "".join(c if c.isalnum() or c in "._-" else "_" for c in Path(program[0]).name).lstrip("._-") or "program"
    folder = RunFolder.create(out or Path("runs") / "exec" / name / datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))
    with ended_in_order():
        with progress_for(quiet) as progress:
            error = capture_program(asked, folder, command_line(), progress)
        print_program(folder, report_program(folder), as_json)
        raise_if(error)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]

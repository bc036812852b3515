"""Profile any program with the Nsight tools."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from llm_perf_opt.cli.outcome import print_program
from llm_perf_opt.cli.shared import Debug, Json, Quiet, command_line, note_debug, raise_if
from llm_perf_opt.cli.signals import graceful_exit

_PYTHON = re.compile(r"(python|pypy)[0-9.]*")
_LAUNCHER = re.compile(r"torchrun|accelerate|deepspeed|mpirun|uv|env|bash|sh|time|nohup|nsys|ncu")
"""Programs that run another one; the run is named after that one."""
_LAUNCH_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed.launcher.runner")
"""Modules that do the same with `python -m`."""
_SCRIPTS = (".py", ".pyz", ".sh")
_LONGEST_NAME = 100


def exec_program(
    program: Annotated[
        list[str],
        typer.Argument(metavar="PROGRAM", help="The program and its arguments after two dashes: exec -- python serve.py."),
    ],
    metrics: Annotated[str, typer.Option(help="Metric sets, separated by commas: see `llm-perf metrics list`.")] = "roofline",
    add: Annotated[list[str] | None, typer.Option(help="Add a counter. May be repeated.")] = None,
    remove: Annotated[list[str] | None, typer.Option(help="Remove a counter. May be repeated.")] = None,
    section: Annotated[list[str] | None, typer.Option(help="Add a section of Nsight Compute. May be repeated.")] = None,
    range_: Annotated[
        str, typer.Option("--range", metavar="NAME@DOMAIN", help="Record only this NVTX range; the whole program by default.")
    ] = "",
    passes: Annotated[
        str | None,
        typer.Option(help="Passes: program (unprofiled, for its time), nsys, ncu. By default, all whose tool is installed."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Count at least this many kernels.")] = 10,
    coverage: Annotated[float, typer.Option(min=0.01, max=1, help="Count enough to cover this share of the kernel time.")] = 0.8,
    budget_s: Annotated[float, typer.Option(min=0.1, help="Maximum seconds for replaying kernels.")] = 180.0,
    timeout_s: Annotated[float, typer.Option(min=1, max=1_000_000, help="Maximum seconds per pass.")] = 3600.0,
    max_trace_gb: Annotated[float, typer.Option(min=0.01, help="Maximum disk space that a tool may use, in GB.")] = 2.0,
    device_index: Annotated[int, typer.Option(min=0, help="The GPU whose counters are read.")] = 0,
    regions: Annotated[list[str] | None, typer.Option(help="Regions to report: `step*` or `regex:…`. May be repeated.")] = None,
    without_regions: Annotated[list[str] | None, typer.Option(help="Excluded regions; exclusion wins. May be repeated.")] = None,
    kernels: Annotated[list[str] | None, typer.Option(help="Kernels to include in the regions report. May be repeated.")] = None,
    without_kernels: Annotated[list[str] | None, typer.Option(help="Excluded kernels; exclusion wins. May be repeated.")] = None,
    aggregate: Annotated[bool, typer.Option("--aggregate", help="Use one regions table for all processes and devices.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Run folder; by default runs/exec/NAME/TIME, named after the script or program.")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Profile any program: time it, run it under Nsight Systems, and read counters of its longest kernels with Nsight Compute.

    The program runs once per pass. Its output is kept in raw/program/log.txt of the run. A tool that is not installed is
    skipped unless --passes names it.
    """
    note_debug(debug)
    from datetime import datetime

    from llm_perf_opt.cli.progress import progress_for
    from llm_perf_opt.config.schema import MetricsConfig, RegionsConfig
    from llm_perf_opt.core.run_folder import RunFolder
    from llm_perf_opt.profiling.program import ExecRequest, capture_program, check_request
    from llm_perf_opt.workflows.analyze_program import report_program
    from llm_perf_opt.workflows.run_reader import RunReader

    request = ExecRequest(
        argv=tuple(program),
        passes=None if passes is None else tuple(_words(passes)),
        range=range_,
        metrics=MetricsConfig(tuple(_words(metrics)), tuple(add or ()), tuple(remove or ()), tuple(section or ())),
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
    check_request(request)
    name = run_name(program)
    folder = RunFolder.create(out or Path("runs") / "exec" / name / datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))
    with graceful_exit():
        with progress_for(quiet) as progress:
            error = capture_program(request, folder, command_line(), progress)
        print_program(folder, report_program(RunReader(folder)), as_json)
        raise_if(error)


def run_name(argv: Sequence[str]) -> str:
    """Return the name of a run: the script or module behind an interpreter or launcher, or the program."""
    named = _named(argv)
    return "".join(char if char.isalnum() or char in "._-" else "_" for char in named).lstrip("._-")[:_LONGEST_NAME] or "program"


def _named(argv: Sequence[str]) -> str:
    program = Path(argv[0]).name
    if _PYTHON.fullmatch(program):
        return _behind_python(argv[1:]) or program
    if program in ("time", "nohup") and len(argv) > 1 and not argv[1].startswith("-"):
        return _named(argv[1:])
    return (_behind_launcher(argv[1:], shell=program in ("bash", "sh")) if _LAUNCHER.fullmatch(program) else "") or program


def _behind_python(words: Sequence[str]) -> str:
    """Return the module or script of an interpreter; empty for `-c` or standard input."""
    for at, word in enumerate(words):
        if word.startswith("-m"):
            module, rest = (word[2:], words[at + 1 :]) if word != "-m" else ("".join(words[at + 1 : at + 2]), words[at + 2 :])
            return (_behind_launcher(rest) if module in _LAUNCH_MODULES else "") or module
        if word.startswith("-c"):
            return ""
        if not word.startswith("-") and not (at and words[at - 1] in ("-W", "-X")):
            return _script(word)
    return ""


def _behind_launcher(words: Sequence[str], *, shell: bool = False) -> str:
    """Return the first script, module or interpreter; it is unknown which options of a launcher take a value."""
    for at, word in enumerate(words):
        if word == "-c" and shell:
            return ""
        if at and words[at - 1] == "-m":
            return word
        if Path(word).suffix in _SCRIPTS:
            return _script(word)
        if _PYTHON.fullmatch(Path(word).name) or _LAUNCHER.fullmatch(Path(word).name):
            return _named(words[at:])
    return ""


def _script(word: str) -> str:
    path = Path(word)
    return path.stem if path.suffix in _SCRIPTS else path.name


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]

"""Profile any program with the Nsight tools and torch.profiler."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llm_perf_opt.cli.outcome import print_program
from llm_perf_opt.cli.shared import Debug, Json, Quiet, command_line, note_debug, raise_if
from llm_perf_opt.core.errors import Interrupted, unreported

if TYPE_CHECKING:
    from llm_perf_opt.profiling.program import ExecRequest

_PYTHON = re.compile(r"(python|pypy)[0-9.]*")
_LAUNCHER = re.compile(r"torchrun|accelerate|deepspeed|mpirun|uv|env|bash|sh|time|nohup|nsys|ncu")
"""Programs that run another one; the run is named after that one."""
_SCRIPTS = (".py", ".pyz", ".sh")
_LONGEST_NAME = 100


def _option(text: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, help=text, **limits)


Texts = list[str] | None
_PASSES = (
    "Passes: program (unprofiled, for its time), torch (torch.profiler, for Python programs), nsys, ncu. "
    "Default: program, plus nsys and ncu if they are installed."
)
_ONCE = (
    "Run the program a single time, under one pass: that of --passes; by default torch for a Python program whose interpreter "
    "has torch, and program for any other."
)
_METRICS = "Metric sets, separated by commas: see `llm-perf metrics list`. Default: roofline, for ncu."
_CAPTURE = "program: record from start to exit. cudaProfilerApi: from cudaProfilerStart to cudaProfilerStop."
_OUT = "Run folder. Default: runs/exec/NAME/TIME, named after the script or program."
_OF_NCU = (
    *("top", "coverage", "budget_s", "kernel_regex", "launch_skip", "launch_count"),
    *("clock_control", "cache_control"),
)
"""Options that are settings of `profiling.ncu` under the same name."""
_ARGUMENT = typer.Argument(metavar="PROGRAM", help="The program and its arguments after two dashes: exec -- python serve.py.")


def exec_program(
    program: Annotated[list[str], _ARGUMENT],
    metrics: Annotated[str | None, _option(_METRICS)] = None,
    add: Annotated[Texts, _option("Add a counter. May be repeated.")] = None,
    remove: Annotated[Texts, _option("Remove a counter. May be repeated.")] = None,
    section: Annotated[Texts, _option("Add a section of Nsight Compute. May be repeated.")] = None,
    range_: Annotated[str, _option("Record only this NVTX range.", "--range", metavar="NAME@DOMAIN")] = "",
    capture: Annotated[str, _option(_CAPTURE, metavar="WHAT")] = "program",
    passes: Annotated[str | None, _option(_PASSES)] = None,
    once: Annotated[bool, _option(_ONCE, "--once")] = False,
    torch_preset: Annotated[str, _option("What torch.profiler records: minimal, default, full or max.")] = "minimal",
    trace: Annotated[str | None, _option("What nsys traces, separated by commas. Default: what the metric sets request.")] = None,
    sample: Annotated[str, _option("CPU sampling by nsys: none, process-tree or system-wide.")] = "none",
    nsys_args: Annotated[str, _option("More options for `nsys profile`, as one string.")] = "",
    ncu_set: Annotated[str | None, _option("A section set of ncu, such as full: see `ncu --list-sets`.")] = None,
    ncu_args: Annotated[str, _option("More options for ncu, as one string.")] = "",
    kernel_regex: Annotated[str | None, _option("Count only kernels whose function name contains a match.")] = None,
    launch_skip: Annotated[int | None, _option("Skip this many matching launches and count the next ones.", min=0)] = None,
    launch_count: Annotated[int | None, _option("Count this many launches.", min=1)] = None,
    clock_control: Annotated[str, _option("Clocks while ncu counts: none (unchanged) or base (locked).")] = "none",
    cache_control: Annotated[str, _option("Caches before each replay: none (unchanged) or all (flushed).")] = "none",
    top: Annotated[int, _option("Count at least this many kernels.", min=1)] = 10,
    coverage: Annotated[float, _option("Count enough to cover this share of the kernel time.", min=0.01, max=1)] = 0.8,
    budget_s: Annotated[float, _option("Maximum seconds for replaying kernels.", min=0.1)] = 180.0,
    timeout_s: Annotated[float, _option("Maximum seconds per pass.", min=1, max=1_000_000)] = 3600.0,
    max_trace_gb: Annotated[float, _option("Maximum disk space that nsys or ncu may use, in GB.", min=0.01)] = 2.0,
    device_index: Annotated[int, _option("The GPU whose counters are read.", min=0)] = 0,
    regions: Annotated[Texts, _option("Regions to report: `step*` or `regex:…`. May be repeated.")] = None,
    without_regions: Annotated[Texts, _option("Excluded regions; exclusion wins. May be repeated.")] = None,
    kernels: Annotated[Texts, _option("Kernels to include in the regions report. May be repeated.")] = None,
    without_kernels: Annotated[Texts, _option("Excluded kernels; exclusion wins. May be repeated.")] = None,
    aggregate: Annotated[bool, _option("Use one regions table for all processes and devices.", "--aggregate")] = False,
    config_dir: Annotated[Path | None, _option("A folder with your own metric sets, metrics/NAME.yaml.")] = None,
    out: Annotated[Path | None, _option(_OUT)] = None,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Profile any program: time it, run it under Nsight Systems, and read counters of its longest kernels with Nsight Compute.

    The program runs once per pass, so several times by default; with --once, it runs a single time. Its output is kept in
    raw/PASS/log.txt of the run. A tool that is not installed is skipped unless --passes names it. For a Python program, --passes
    can add torch.profiler.
    """
    options = dict(locals())
    note_debug(debug)
    from datetime import datetime

    from llm_perf_opt.cli.progress import progress_for
    from llm_perf_opt.core.run_folder import RunFolder
    from llm_perf_opt.profiling.program import capture_program, check_request
    from llm_perf_opt.workflows.analyze_program import report_program
    from llm_perf_opt.workflows.run_reader import RunReader

    request = _request(options)
    check_request(request)
    if not quiet:
        print(_announcement(request), file=sys.stderr)
    name = run_name(program)
    folder = RunFolder.create(out or Path("runs") / "exec" / name / datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))
    with progress_for(quiet) as progress:
        error = capture_program(request, folder, command_line(), progress)
    try:
        print_program(folder, report_program(RunReader(folder)), as_json)
    except (KeyboardInterrupt, Interrupted) as stopped:
        raise unreported(stopped, folder.path, error) from stopped
    raise_if(error)


def _announcement(request: "ExecRequest") -> str:
    """Return how often the program runs, before it starts: it may take long, cost money or write files."""
    from llm_perf_opt.profiling.program import planned_runs

    names = planned_runs(request)
    if len(names) == 1:
        return f"The program runs once, in the pass {names[0]}."
    most = "at most " if "ncu" in names and request.passes is None else ""  # without kernels there is nothing to count
    return f"The program runs {most}{len(names)} times, once per pass: {', '.join(names)}. With --once, it runs once."


def _passes(given: dict[str, Any]) -> tuple[str, ...] | None:
    """Return the requested passes; None: the default ones."""
    from llm_perf_opt.core.errors import ConfigError
    from llm_perf_opt.profiling.program import only_pass

    named = None if given["passes"] is None else tuple(_words(given["passes"]))
    if not given["once"]:
        return named
    if named is not None and len(set(named)) != 1:
        fact = f"--once runs the program under one pass, but --passes names {len(set(named))}: {', '.join(named) or 'none'}."
        raise ConfigError(fact, "Name one pass, or leave out --once.")
    return named or (only_pass(given["program"]),)


def _request(given: dict[str, Any]) -> "ExecRequest":
    """Return the options, by parameter name, as a request."""
    from llm_perf_opt.config.choices import own_sets
    from llm_perf_opt.config.schema import MetricsConfig, NcuConfig, NsysConfig, RegionsConfig, TorchPreset
    from llm_perf_opt.profiling.program import ExecRequest

    def several(name: str) -> tuple[str, ...]:
        return tuple(given[name] or ())

    sets = None if given["metrics"] is None else tuple(_words(given["metrics"]))
    recorder = {
        "capture": _gate(given["capture"]),
        "trace": given["trace"],
        "sample": given["sample"],
        "args": given["nsys_args"],
    }
    counter = {name: given[name] for name in _OF_NCU} | {"set": given["ncu_set"], "args": given["ncu_args"]}
    shown, hidden, kernels, hidden_kernels = map(several, ("regions", "without_regions", "kernels", "without_kernels"))
    return ExecRequest(
        argv=tuple(given["program"]),
        passes=_passes(given),
        range=given["range_"],
        metrics=MetricsConfig(
            sets, several("add"), several("remove"), several("section"), own_sets(sets or (), given["config_dir"])
        ),
        regions=RegionsConfig(shown, hidden, kernels, hidden_kernels, given["aggregate"]),
        nsys=_built(NsysConfig, {"enable": True, "decode_steps": None, **recorder}, "nsys"),
        ncu=_built(NcuConfig, {"enable": True, **counter}, "ncu"),
        torch_preset=_built(TorchPreset, given["torch_preset"], "torch.preset"),
        **{name: given[name] for name in ("timeout_s", "max_trace_gb", "device_index")},
    )


def _built(kind: Any, value: Any, section: str) -> Any:
    """Return options as a section of `profiling`; errors name the options."""
    from llm_perf_opt.config.values import build
    from llm_perf_opt.core.errors import ConfigError
    from llm_perf_opt.profiling.passes import respelled_error
    from llm_perf_opt.profiling.program import SPELLINGS

    try:
        return build(kind, value, f"profiling.{section}")
    except ConfigError as error:
        raise respelled_error(error, SPELLINGS) from None


def _gate(capture: str) -> str:
    """Return the setting `profiling.nsys.capture`; ranges are given with --range."""
    from llm_perf_opt.core.errors import ConfigError

    known = {"program": "nvtx", "cudaProfilerApi": "cudaProfilerApi"}
    if capture not in known:
        raise ConfigError(f"--capture {capture} is not known.", f"Known: {', '.join(known)}. For an NVTX range, use --range.")
    return known[capture]


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
    from llm_perf_opt.profiling.python_program import LAUNCH_MODULES

    for at, word in enumerate(words):
        if word.startswith("-m"):
            module, rest = (word[2:], words[at + 1 :]) if word != "-m" else ("".join(words[at + 1 : at + 2]), words[at + 2 :])
            return (_behind_launcher(rest) if module in LAUNCH_MODULES else "") or module
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

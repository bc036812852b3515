"""Profile any program: unprofiled, then under Nsight Systems, then its longest kernels under Nsight Compute.

The program runs once per pass, so it must do the same each time. It is started without a shell.
"""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import yaml

from llm_perf_opt.config.checks import check_kernel_regex
from llm_perf_opt.config.passes import known_passes
from llm_perf_opt.config.schema import (
    MetricsConfig,
    NcuConfig,
    NsysConfig,
    NvmlConfig,
    ProfilingConfig,
    RegionsConfig,
    TorchConfig,
    TorchPreset,
)
from llm_perf_opt.core.errors import ConfigError, LlmPerfError
from llm_perf_opt.core.run_folder import RunFolder
from llm_perf_opt.counters.manifest import chosen_sets
from llm_perf_opt.counters.set_file import PRESETS
from llm_perf_opt.profiling.capture import fill
from llm_perf_opt.profiling.passes import Capture, Listener, Program, respelled_error
from llm_perf_opt.profiling.provenance import environment
from llm_perf_opt.profiling.python_program import check_python
from llm_perf_opt.profiling.requested_metrics import (
    check_collected,
    check_counters,
    check_patterns,
    check_tools,
    on_gpu,
    with_sections,
    with_sets,
)
from llm_perf_opt.profiling.vendor.gates import check_gate
from llm_perf_opt.profiling.vendor.probe import locate

SPELLINGS = {
    "profiling.pass_timeout_s": "--timeout-s",
    "profiling.max_trace_gb": "--max-trace-gb",
    "profiling.ncu.budget_s": "--budget-s",
    "profiling.ncu.top": "--top",
    "profiling.ncu.coverage": "--coverage",
    "profiling.ncu.launch_skip": "--launch-skip",
    "profiling.ncu.launch_count": "--launch-count",
    "profiling.ncu.kernel_regex": "--kernel-regex",
    "profiling.ncu.clock_control": "--clock-control",
    "profiling.ncu.cache_control": "--cache-control",
    "profiling.ncu.sections": "--section",
    "profiling.ncu.set": "--ncu-set",
    "profiling.ncu.args": "--ncu-args",
    "profiling.nsys.args": "--nsys-args",
    "profiling.nsys.trace": "--trace",
    "profiling.nsys.sample": "--sample",
    "profiling.metrics.add": "--add",
    "profiling.torch.preset": "--torch-preset",
    "hydra.run.dir=DIR": "--out DIR",
}
"""Settings of `llm-perf run` → the options of `llm-perf exec`."""
ONLY_BY_NAME = ("torch",)
"""Passes that run only if --passes names them: torch.profiler keeps every event of the whole program in memory."""
TOOLS = ("nsys", "ncu")
"""Passes that are left out if the tool of this name is not installed and --passes does not name them."""
DEFAULT_METRICS = MetricsConfig(None, (), ())
ALL_REGIONS = RegionsConfig((), (), (), (), aggregate=False)
NSYS = NsysConfig(enable=True, capture="nvtx", decode_steps=None)
NCU = NcuConfig(enable=True, top=10, coverage=0.8, budget_s=180.0)


@dataclass(frozen=True)
class ExecRequest:
    """The program to run, and what to collect."""

    argv: tuple[str, ...]
    passes: tuple[str, ...] | None = None
    """None: all; a pass whose tool is missing, or that has nothing to count, is left out without an error."""
    range: str = ""
    """An NVTX range of the program in nsys syntax, NAME@DOMAIN. Empty: the whole program."""
    metrics: MetricsConfig = DEFAULT_METRICS
    regions: RegionsConfig = ALL_REGIONS
    nsys: NsysConfig = NSYS
    """Its `capture` also starts and stops ncu."""
    ncu: NcuConfig = NCU
    torch_preset: TorchPreset = "minimal"
    timeout_s: float = 3600.0
    max_trace_gb: float = 2.0
    device_index: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The passes to run, in order."""
        return tuple(
            name for name in program_passes() if (name in self.passes if self.passes is not None else name not in ONLY_BY_NAME)
        )


def program_passes() -> tuple[str, ...]:
    """Return the passes that can run a program, in order: each needs the results of those before it."""
    return tuple(one.name for one in known_passes() if one.programs)


def planned_runs(request: ExecRequest) -> tuple[str, ...]:
    """Return the passes that run the program if nothing fails: those whose tool is here, unless all were named."""
    return tuple(
        name for name in request.names if request.passes is not None or name not in TOOLS or locate(name).path is not None
    )


def only_pass(argv: Sequence[str]) -> str:
    """Return the pass that shows most of a program in one run: torch if torch.profiler can record it, otherwise program."""
    try:
        check_python(argv)
    except LlmPerfError:
        return "program"
    return "torch"


def check_request(request: ExecRequest) -> None:
    """Raise a ConfigError for a request that cannot work, with the options of `llm-perf exec` in its text."""
    try:
        _check(request)
    except LlmPerfError as error:
        raise respelled_error(error, SPELLINGS) from error


def _check(request: ExecRequest) -> None:
    known = program_passes()
    if not request.argv:
        raise ConfigError("There is no program to run.", "Write it after two dashes: llm-perf exec -- python my_script.py")
    if request.passes == ():
        raise ConfigError("No pass is requested.", f"Known: {', '.join(known)}.")
    for name in request.passes or ():
        if name not in known:
            raise ConfigError(f"There is no pass '{name}'.", f"Known: {', '.join(known)}.")
    if request.range:
        check_gate("nsys", request.range, ours=False)
        if request.nsys.capture == "cudaProfilerApi":
            raise ConfigError("--range and --capture cudaProfilerApi cannot be combined.", "Give one of them.")
    check_patterns(request.regions)
    _check_metrics(request)
    _check_effect(request)
    if shutil.which(request.argv[0]) is None:
        raise ConfigError(
            f"The program {request.argv[0]!r} cannot be run.", "Check its name and path, and that it is executable."
        )
    if "torch" in request.names:
        check_python(request.argv)


def _check_metrics(request: ExecRequest) -> None:
    counting = "ncu" in request.names
    profiling = _profiling(request)
    asked = request.metrics
    if not counting and (asked.add or asked.remove or asked.sections or request.ncu.sections or request.ncu.set):
        fact = "Counters, sections or sets of Nsight Compute are requested, but ncu is not among the passes."
        raise ConfigError(fact, "Add ncu to --passes.")
    check_collected(profiling.metrics, request.names, "Name the pass in --passes, or leave out the set in --metrics.")
    check_tools(profiling, request.names)
    check_kernel_regex(request.ncu)
    if counting:
        check_counters(with_sections(profiling.metrics, request.ncu), request.device_index, gpu=on_gpu())


def _check_effect(request: ExecRequest) -> None:
    """Reject options of a pass that does not run."""
    names = request.names
    if set(names) <= {"program"} and (request.range or request.nsys.capture != NSYS.capture):
        option = "--range" if request.range else "--capture"
        raise ConfigError(f"{option} has no effect: no pass records anything.", "Add nsys or ncu to --passes.")
    if "torch" not in names and request.torch_preset != ExecRequest.torch_preset:
        raise ConfigError(f"profiling.torch.preset {request.torch_preset} has no effect: torch is off.", "Add torch to --passes.")
    sections: tuple[tuple[str, NsysConfig | NcuConfig, NsysConfig | NcuConfig], ...]
    sections = (("nsys", request.nsys, NSYS), ("ncu", request.ncu, NCU))
    for tool, given, usual in sections:
        for item in fields(given) if tool not in names else ():
            value = getattr(given, item.name)
            if item.name != "capture" and value != getattr(usual, item.name):  # `capture` also starts and stops ncu
                shown = " ".join(value) if isinstance(value, tuple) else value
                fact = f"profiling.{tool}.{item.name} {shown} has no effect: {tool} is off."
                raise ConfigError(fact, f"Add {tool} to --passes.")


def capture_program(request: ExecRequest, folder: RunFolder, command: Sequence[str], listener: Listener) -> LlmPerfError | None:
    """Fill the folder and return the first error. A failed pass does not stop the others."""
    program = Program(request.argv, request.range, request.passes is None, SPELLINGS)
    profiling = _profiling(request)
    capture = Capture(folder, listener, request.names, profiling, program=program, device_index=request.device_index)

    def prepare() -> None:
        wanted = {name: asdict(getattr(profiling, name)) for name in ("nsys", "ncu", "metrics", "regions")}
        values = {"profiling": {"torch": {"preset": profiling.torch.preset}, **wanted}}  # regions: to regenerate the pages
        folder.write(folder.config_file, yaml.safe_dump(values, sort_keys=False, default_flow_style=None).encode())
        folder.write_record(folder.env_file, environment(request.device_index))

    return fill(capture, command, prepare, "exec")


def _profiling(request: ExecRequest) -> ProfilingConfig:
    """Return the request as the profiling section of a run's configuration, with the richest requested torch preset."""
    metrics = with_sets(request.metrics, counting="ncu" in request.names)
    wanted = [one.torch for one in chosen_sets(metrics.sets or (), metrics.defined) if one.torch]
    preset = max(request.torch_preset, *wanted, key=PRESETS.index)
    return ProfilingConfig(
        ceilings=False,
        clean=False,
        torch=TorchConfig(enable="torch" in request.names, preset=preset, decode_steps=None),
        nvml=NvmlConfig(enable=False, interval_s=1.0),
        nsys=request.nsys,
        ncu=request.ncu,
        metrics=metrics,
        regions=request.regions,
        pass_timeout_s=request.timeout_s,
        max_trace_gb=request.max_trace_gb,
    )

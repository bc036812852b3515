"""Profile any program: unprofiled, then under Nsight Systems, then its longest kernels under Nsight Compute.

The program runs once per pass, so it must do the same each time. It is started without a shell.
"""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import yaml

from llm_perf_opt.config.passes import known_passes
from llm_perf_opt.config.schema import (
    MetricsConfig,
    NcuConfig,
    NsysConfig,
    NvmlConfig,
    ProfilingConfig,
    RegionsConfig,
    TorchConfig,
)
from llm_perf_opt.core.errors import ConfigError, LlmPerfError
from llm_perf_opt.core.run_folder import RunFolder, write_whole
from llm_perf_opt.profiling.capture import fill
from llm_perf_opt.profiling.passes import Capture, Listener, Program
from llm_perf_opt.profiling.requested_metrics import check_counters, check_patterns, on_gpu
from llm_perf_opt.profiling.vendor.gates import check_gate

SPELLINGS = {
    "profiling.pass_timeout_s": "--timeout-s",
    "profiling.max_trace_gb": "--max-trace-gb",
    "profiling.ncu.budget_s": "--budget-s",
    "hydra.run.dir=DIR": "--out DIR",
}
"""Settings of `llm-perf run` → the options of `llm-perf exec`."""
ROOFLINE = MetricsConfig(("roofline",), (), ())
ALL_REGIONS = RegionsConfig((), (), (), (), aggregate=False)


@dataclass(frozen=True)
class ExecRequest:
    """The program to run, and what to collect."""

    argv: tuple[str, ...]
    passes: tuple[str, ...] | None = None
    """None: all; a pass whose tool is missing, or that has nothing to count, is left out without an error."""
    range: str = ""
    """An NVTX range of the program in nsys syntax, NAME@DOMAIN. Empty: the whole program."""
    metrics: MetricsConfig = ROOFLINE
    regions: RegionsConfig = ALL_REGIONS
    top: int = 10
    coverage: float = 0.8
    budget_s: float = 180.0
    timeout_s: float = 3600.0
    max_trace_gb: float = 2.0
    device_index: int = 0


def program_passes() -> tuple[str, ...]:
    """Return the passes that can run a program, in order: each needs the results of those before it."""
    return tuple(one.name for one in known_passes() if one.programs)


def check_request(request: ExecRequest) -> None:
    """Raise a ConfigError for a request that cannot work."""
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
    check_patterns(request.regions)
    if request.passes is None or "ncu" in request.passes:
        check_counters(request.metrics, request.device_index, gpu=on_gpu())
    if shutil.which(request.argv[0]) is None:
        raise ConfigError(
            f"The program {request.argv[0]!r} cannot be run.", "Check its name and path, and that it is executable."
        )


def capture_program(request: ExecRequest, folder: RunFolder, command: Sequence[str], listener: Listener) -> LlmPerfError | None:
    """Fill the folder and return the first error. A failed pass does not stop the others."""
    names = tuple(name for name in program_passes() if request.passes is None or name in request.passes)
    program = Program(request.argv, request.range, request.passes is None, SPELLINGS)
    capture = Capture(folder, listener, names, _profiling(request), program=program, device_index=request.device_index)

    def prepare() -> None:
        values = {"profiling": {"regions": asdict(request.regions)}}  # needed to regenerate the pages
        write_whole(folder.config_file, yaml.safe_dump(values, sort_keys=False, default_flow_style=None).encode())

    return fill(capture, command, prepare, "exec")


def _profiling(request: ExecRequest) -> ProfilingConfig:
    """Return the request as the profiling section of a run's configuration."""
    return ProfilingConfig(
        ceilings=False,
        clean=False,
        torch=TorchConfig(enable=False, preset="minimal", decode_steps=None),
        nvml=NvmlConfig(enable=False, interval_s=1.0),
        nsys=NsysConfig(enable=True, capture="nvtx", decode_steps=None),
        ncu=NcuConfig(enable=True, top=request.top, coverage=request.coverage, budget_s=request.budget_s),
        metrics=request.metrics,
        regions=request.regions,
        pass_timeout_s=request.timeout_s,
        max_trace_gb=request.max_trace_gb,
    )

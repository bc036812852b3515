"""Any program, profiled as a model is: alone, then under Nsight Systems, then its longest kernels under Nsight Compute.

The program is run once per pass, so it must do the same each time. It is given its arguments as they are, never through a shell.
"""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import yaml

from llm_perf_opt.config.passes import Pass, known_passes
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
from llm_perf_opt.profiling.passes import Capture, Listener, Program, run_alone
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
    """What to run, and how closely to look."""

    argv: tuple[str, ...]
    passes: tuple[str, ...] | None = None
    """None: nobody named them, and one whose tool is not here, or that has nothing to count, is left out and no error."""
    range: str = ""
    """An NVTX range of the program, as nsys spells it: NAME@DOMAIN. Empty: the whole program."""
    metrics: MetricsConfig = ROOFLINE
    regions: RegionsConfig = ALL_REGIONS
    top: int = 10
    coverage: float = 0.8
    budget_s: float = 180.0
    timeout_s: float = 3600.0
    max_trace_gb: float = 2.0
    device_index: int = 0


def program_passes() -> tuple[str, ...]:
    """Return the passes that can run a program, in their order: each needs what those before it left."""
    return tuple(one.name for one in known_passes() if one.programs)


def check_request(asked: ExecRequest) -> None:
    """Refuse what cannot work before anything is started."""
    known = program_passes()
    if not asked.argv:
        raise ConfigError("There is no program to run.", "Write it behind two dashes: llm-perf exec -- python my_script.py")
    if asked.passes == ():
        raise ConfigError("No pass is asked for.", f"Known: {', '.join(known)}.")
    for name in asked.passes or ():
        if name not in known:
            raise ConfigError(f"There is no pass '{name}'.", f"Known: {', '.join(known)}.")
    if asked.range:
        check_gate("nsys", asked.range, ours=False)
    check_patterns(asked.regions)
    check_counters(asked.metrics, asked.device_index, gpu=on_gpu())
    if shutil.which(asked.argv[0]) is None:
        raise ConfigError(
            f"There is no program {asked.argv[0]!r} that can be run.", "Check its name, its path, and that it may be executed."
        )


def capture_program(asked: ExecRequest, folder: RunFolder, command: Sequence[str], listener: Listener) -> LlmPerfError | None:
    """Fill the folder; return what went wrong first. A pass that fails leaves the others standing."""
    names = tuple(name for name in program_passes() if asked.passes is None or name in asked.passes)
    program = Program(asked.argv, asked.range, asked.passes is None, SPELLINGS)
    capture = Capture(folder, listener, names, _profiling(asked), program=program, device_index=asked.device_index)

    def prepare() -> None:
        values = {"profiling": {"regions": asdict(asked.regions)}}  # how the pages are made, now and whenever they are remade
        write_whole(folder.config_file, yaml.safe_dump(values, sort_keys=False, default_flow_style=None).encode())

    return fill(capture, command, prepare, "exec")


def _profiling(asked: ExecRequest) -> ProfilingConfig:
    """The request as the settings of a run have it."""
    return ProfilingConfig(
        ceilings=False,
        clean=False,
        torch=TorchConfig(enable=False, preset="minimal", decode_steps=None),
        nvml=NvmlConfig(enable=False, interval_s=1.0),
        nsys=NsysConfig(enable=True, capture="nvtx", decode_steps=None),
        ncu=NcuConfig(enable=True, top=asked.top, coverage=asked.coverage, budget_s=asked.budget_s),
        metrics=asked.metrics,
        regions=asked.regions,
        pass_timeout_s=asked.timeout_s,
        max_trace_gb=asked.max_trace_gb,
    )


PASSES = (
    Pass(
        "program",
        "the program alone",
        20,
        lambda capture: run_alone(capture, "program", capture.work("program")),
        lambda _: False,
        essential=True,
        programs=True,
    ),
)
